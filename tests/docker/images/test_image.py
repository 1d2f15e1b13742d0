"""The cpu image, built and run for real: what it holds, what it may, and where its rows end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kernelmark.registry.store.home import Home
from kernelmark.suite.container import build

from . import alike

pytestmark = [
    pytest.mark.image,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),  # MLflow's own use
]

HOUSE = Path(__file__).resolve().parents[3]
NO_ENTROPY = ("Base64HighEntropyString", "HexHighEntropyString")
INTERPRETED = ("kernelmark", "torch")
"""Of the plan, all but torch.compile, which takes longer to compile it than these to run."""


def test_the_dockerfile_is_clean():
    """hadolint, with what it is told to ignore named in the file beside the reason."""
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, HOUSE / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_quick_plan_and_its_rows_in_the_hosts_registry(machine, image, tmp_path):
    there = machine.with_home(tmp_path)
    providers = [x for name in INTERPRETED for x in ("--implementation", name)]
    done = there.kernelmark("bench", "cpu", "--plan", "quick", "--replicates", "1", "--seed", "5", *providers)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    home = Home(tmp_path)
    (run,) = home.runs()
    journal = home.load(run)
    assert journal.header.conditions["image_digest"] == image.id
    assert journal.header.environment["image"] == "cpu"
    assert journal.header.device == "cpu"
    assert journal.header.commit == _git("rev-parse", "HEAD")
    assert journal.footers[-1].complete
    statuses = {x.status for x in journal.records}
    assert "ok" in statuses
    assert statuses <= {"ok", "unsupported", "unavailable"}, [
        (x.case.operator, x.implementation, x.reason) for x in journal.records if x.status not in statuses
    ]
    assert {"torch", "kernelmark_cpu"} <= {x.implementation for x in journal.records if x.status == "ok"}
    rows = _rows(home, run)
    assert len(rows) == len({x.identity for x in journal.records})
    assert {x["image_digest"] for x in rows} == {image.id}
    assert there.left() == []
    again = there.kernelmark("repro", run, "--json")
    command = json.loads(again.stdout)["command"]
    assert command[:3] == ["kernelmark", "bench", image.id]
    assert command[command.index("--seed") + 1] == "5"


def test_torch_compile_finds_a_compiler_and_a_place_to_write(machine, image, small_plan, tmp_path):
    there = machine.with_home(tmp_path)
    chosen = "--implementation", "torch_compile", "--pass", "forward", "--pass", "backward", "--axis", "N=64"
    done = there.kernelmark("bench", image.id, "--plan", small_plan, *chosen)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (run,) = Home(tmp_path).runs()
    assert {x.status for x in Home(tmp_path).load(run).records if x.implementation == "torch_compile"} == {"ok"}


def _rows(home: Home, run: str) -> list[dict[str, str]]:
    from kernelmark.registry.tracking.connection import connect

    connection = connect(None, home)
    found = connection.client.search_runs(
        [connection.experiment_id], f"tags.invocation = '{run}' and tags.kind = 'row'", max_results=5000
    )
    return [x.data.tags for x in found]


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=HOUSE, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_what_the_container_may_and_ctrl_c(machine, image, small_plan, tmp_path):
    """One run, looked at from within and without while it measures, then interrupted, then finished."""
    there = machine.with_home(tmp_path)
    process = there.start(
        "bench", image.id, "--plan", small_plan, "--replicates", "2", "--implementation", "torch"
    )
    try:
        lines = _until(process, re.compile(r"^run "))
        (container,) = there.containers()
        _look_at(container)
        lines += _until(process, re.compile(r"^\[\d+/8\]"))
        os.kill(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    said = "".join(lines) + rest
    assert process.returncode == 130, said
    assert there.left() == []
    home = Home(tmp_path)
    (run,) = home.runs()
    assert f"kernelmark bench {image.id} --resume {run}" in said
    journal = home.load(run)
    finished = len(journal.records)
    assert 0 < finished < 8
    assert not journal.footers[-1].complete
    assert len(_rows(home, run)) == len({x.identity for x in journal.records})
    done = there.kernelmark("bench", image.id, "--resume", run, "--no-report")
    assert done.returncode == 0, done.stderr[-3000:]
    journal = home.load(run)
    assert len(journal.records) == 8
    assert journal.footers[-1].complete
    assert home.runs() == [run]
    assert there.left() == []


def _until(process: subprocess.Popen[str], wanted: re.Pattern[str]) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if wanted.search(line):
            return lines
    raise AssertionError("".join(lines))


def _look_at(container: Any) -> None:
    host = container.attrs["HostConfig"]
    assert host["ReadonlyRootfs"] is True
    assert host["Privileged"] is False
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert host["NetworkMode"] == "none"
    assert "no-new-privileges" in host["SecurityOpt"]
    assert not host["Binds"]
    assert [(x["Target"], x["Type"]) for x in host["Mounts"]] == [("/results", "volume")]
    assert container.attrs["Config"]["User"] == "10001:10001"

    def inside(command: str) -> tuple[int, str]:
        code, output = container.exec_run(["sh", "-c", command])
        return code, output.decode()

    assert inside("id -u; id -g; umask > /dev/null") == (0, "10001\n10001\n")
    assert inside("grep -E '^Cap(Prm|Eff|Bnd)' /proc/1/status | cut -f2 | sort -u") == (0, "0000000000000000\n")
    assert inside("grep NoNewPrivs /proc/1/status | cut -f2") == (0, "1\n")
    # What can be written to, of all folders: the results, and memory that goes with the container.
    code, writable = inside("find / -xdev -path /proc -prune -o -type d -writable -print 2>/dev/null | sort")
    assert (code, writable) == (0, "/results\n/tmp\n")
    assert inside("touch /results/a && rm /results/a")[0] == 0
    assert inside("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") == (0, "lo\n")
    assert inside("command -v pip curl wget git sudo")[1] == ""


def test_labels_and_doctor(machine, image):
    labels = image.labels
    oci = "org.opencontainers.image."
    commit = _git("rev-parse", "HEAD")
    assert labels[f"{oci}revision"] in (commit, f"{commit}-dirty")
    assert labels[f"{oci}version"]
    assert labels[f"{oci}source"] == build.source(HOUSE)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", labels["io.kernelmark.locks"])
    stand_in = machine.environment.get("KERNELMARK_STAND_IN", "")
    assert labels["io.kernelmark.stand_in"] == stand_in
    assert bool(labels[f"{oci}base.digest"]) is not bool(stand_in)
    doctor = machine.client.containers.run(
        image.id,
        ["doctor", "--quick", "--json"],
        network_mode="none",
        read_only=True,
        tmpfs={"/tmp": "rw,exec,nosuid,nodev,mode=1777"},  # as the launcher has it: faults are planted there
        detach=True,
    )
    try:
        code = doctor.wait()["StatusCode"]
        found = json.loads(doctor.logs(stdout=True, stderr=False))
    finally:
        doctor.remove(force=True, v=True)
    missed = [x for x in found["checks"] if x["verdict"] in ("failed", "missed")]
    assert code in (0, 3), missed  # a busy machine is too noisy to see 5 %
    assert found["device"] == "cpu"
    assert next(x for x in found["checks"] if x["name"] == "device")["detail"].startswith("CPU: no NVIDIA driver")


@dataclass
class Inside:
    """An image as one look at every file of it finds it."""

    content: dict[str, tuple[Any, ...]]
    """Each file as it is but for times."""
    holding: list[str]
    """Files that hold the password."""
    ours: dict[str, bytes]
    """What we add to what packages bring."""


@pytest.fixture(scope="module")
def inside(machine, image, password) -> Inside:
    """The image as it was built first."""
    return look(machine, image.id, password)


def look(machine, image: str, password: str) -> Inside:
    found = Inside({}, [], {})
    for member, data in alike.members(machine.client, image):
        name = member.name
        found.content[name] = alike.as_it_is(member, data)
        if data and password.encode() in data:
            found.holding.append(name)
        is_ours = name.startswith(("opt/kernelmark/bin", "results", "root", "home", "source", "locks", "tmp"))
        if data and (is_ours or "/site-packages/kernelmark/" in name) and not name.endswith(".pyc"):
            found.ours[name] = data
    return found


def test_two_builds_hold_the_same_files(machine, inside, password):
    """From the same commit and without any cache: bit for bit, times aside."""
    done = machine.kernelmark("image", "build", "cpu", "--fresh")
    assert done.returncode == 0, done.stderr[-3000:]
    content, second = inside.content, look(machine, done.stdout.strip(), password).content
    assert alike.differing(content, second) == []


def test_no_secret_is_anywhere(machine, image, inside, small_plan, password, tmp_path):
    """Neither the one that the build was given, nor anything that looks like one in what we add."""
    history = json.dumps(machine.client.api.history(image.id))
    config = json.dumps(machine.client.api.inspect_image(image.id))
    for text in (history, config):
        assert password not in text
        assert "/run/secrets/pip.conf" not in config
    home = Home(Path(machine.environment["KERNELMARK_HOME"]))
    done = machine.kernelmark("bench", image.id, "--plan", small_plan, "--implementation", "torch", "--no-report")
    assert done.returncode == 0, done.stderr[-3000:]
    ours = tmp_path / "ours"
    assert inside.holding == []
    private = (".pypirc", "pip.conf", ".netrc", "id_rsa", ".docker/config.json")
    assert [x for x in inside.content if x.endswith(private)] == []
    for name, data in inside.ours.items():
        target = ours / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    assert (ours / "opt/kernelmark/bin/kernelmark").exists()
    (ours / "history.json").write_text(history)
    (ours / "config.json").write_text(config)
    for run in home.runs():
        text = home.journal(run).read_text()
        assert password not in text
        (ours / f"{run}.jsonl").write_text(text)
    # The scan itself: a planted key must be found, and nothing else.
    (ours / "planted.py").write_text("aws_key = 'AKIAIOSFODNN7EXAMPLA'\n")
    assert set(_secrets(ours)) == {"planted.py"}


def _secrets(folder: Path) -> dict[str, Any]:
    """What detect-secrets finds; without its entropy tests, which every digest and seed would fail."""
    scan = Path(sys.executable).with_name("detect-secrets")
    command = [str(scan), "scan", "--all-files", "--no-verify"]
    for plugin in NO_ENTROPY:
        command += ["--disable-plugin", plugin]
    done = subprocess.run([*command, "."], cwd=folder, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)["results"]
    return found


def test_a_launcher_that_was_killed_leaves_its_rows_to_the_next(machine, image, small_plan, tmp_path):
    there = machine.with_home(tmp_path)
    process = there.start("bench", image.id, "--plan", small_plan, "--implementation", "torch")
    _until(process, re.compile(r"^run "))
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    (container,) = there.containers()
    container.wait(timeout=120)
    time.sleep(0.5)
    assert Home(tmp_path).runs() == []
    arguments = ("--plan", small_plan, "--implementation", "torch", "--no-report")
    done = there.kernelmark("bench", image.id, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    first, _ = Home(tmp_path).runs()
    assert f"run {first}, which an earlier launch had to leave behind, is taken in" in done.stderr
    assert Home(tmp_path).load(first).footers[-1].complete
    assert there.left() == []
