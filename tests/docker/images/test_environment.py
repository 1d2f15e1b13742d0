"""An image as the environment of one side of an A/B: its workers in a container, the other side's beside it."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from kernelmark.registry.store.home import Home
from kernelmark.suite.container.build import Built
from kernelmark.suite.container.engine import Engine
from kernelmark.suite.container.interpreter import HOUSE, opened
from kernelmark.suite.container.session import Session

from ...processes import wait_for
from ...repositories import Repository, sleeping

pytestmark = pytest.mark.image

PLAN = """
[sampling]
max_seconds = 0.2
min_seconds = 0.01
min_samples = 3
max_samples = 5
warmup_s = 0.05
[[cases]]
operator = "double"
axes = { N = 16 }
dtype = "fp32"
"""
SECONDS = 0.02, 0.026
"""Of a call, by commit."""


def test_one_side_in_an_image(machine, image, tmp_path):
    """Killed as soon as both sides have rows: each has its commit's time, and nothing is left in the engine."""
    repository = sleeping(Repository(tmp_path / "a root")).folder
    (tmp_path / "plan.toml").write_text(PLAN)
    there = machine.with_home(tmp_path / "home")
    before = _running(machine, image)
    with subprocess.Popen(
        [
            *(str(Path(sys.executable).with_name("regression_detector")), "--baseline", "HEAD~1"),
            *("--base-environment", f"image:{image.id}", "--plan", str(tmp_path / "plan.toml")),
            *("--device", "cpu", "--budget", "10m"),
        ],
        env={**there.environment, "TMPDIR": str(tmp_path), "KERNELMARK_PATH": str(repository)},
        cwd=repository,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_for(
                lambda: len(_measured(tmp_path / "home")) == 2 or process.poll() is not None, "both sides", 90
            )
            assert process.poll() is None, process.stderr.read()
            (container,) = (x for x in _running(machine, image) if x not in before)
            host = container.attrs["HostConfig"]
            assert (host["NetworkMode"], host["ReadonlyRootfs"], host["CapDrop"]) == ("none", True, ["ALL"])
            assert not any(x["RW"] for x in container.attrs["Mounts"] if x["Type"] == "bind")
        finally:
            process.send_signal(signal.SIGKILL)
    times = {x.header.conditions["image_digest"]: _ms(x) / 1e3 for x in _measured(tmp_path / "home")}
    assert times.keys() == {image.id, None}
    images = {x.header.environment.get("image") for x in _measured(tmp_path / "home")}
    assert images == {"cpu", None}
    assert SECONDS[0] <= times[image.id] < SECONDS[1] <= times[None]
    wait_for(lambda: container not in _running(machine, image), "the container's end")


def test_a_worker_in_it_ends_with_the_one_here(machine, image, tmp_path):
    """Whoever stands for it is asked to end, and has ended it then; or is killed."""
    engine = Engine(machine.client, machine.environment["DOCKER_HOST"])
    session = Session(engine, Built.of(image), (), Home(tmp_path))
    before = _running(machine, image)
    code = "import os, sys, time; os.write(int(sys.argv[1]), b'here'); time.sleep(600)"
    with opened(session, [tmp_path]) as python:
        (container,) = (x for x in _running(machine, image) if x not in before)
        for number, at_once in ((signal.SIGTERM, True), (signal.SIGKILL, False)):
            with _started(python, code) as (worker, said):
                assert os.read(said, 10) == b"here"
                assert _processes(container) > 0
                os.kill(worker.pid, number)
                worker.wait(60)
                assert not at_once or _processes(container) == 0
                wait_for(lambda: _processes(container) == 0, "the worker's end")
    wait_for(lambda: container not in _running(machine, image), "the container's end")


def test_the_harness_there_is_ours(machine, image, tmp_path):
    """By its root too: the commits' code is known by it. And a worker's end is seen as it was."""
    engine = Engine(machine.client, machine.environment["DOCKER_HOST"])
    session = Session(engine, Built.of(image), (), Home(tmp_path))
    code = (
        "import os, sys, kernelmark.suite.catalog as c; "
        "os.write(int(sys.argv[1]), str(c.Catalog.default().roots[0].folder).encode()); "
        "os.kill(os.getpid(), 11)"
    )
    with opened(session, [tmp_path]) as python, _started(python, code) as (worker, said):
        assert os.read(said, 1000).decode() == str(HOUSE)
        assert worker.wait(60) == -signal.SIGSEGV


class _started:
    """A worker and what it says, as `Worker` starts it."""

    def __init__(self, python: Path, code: str) -> None:
        self.said, writer = os.pipe()
        self.process = subprocess.Popen(
            [python, "-c", code, str(writer)], stdin=subprocess.PIPE, pass_fds=(writer,), start_new_session=True
        )
        os.close(writer)
        self.process.stdin.close()

    def __enter__(self) -> tuple[subprocess.Popen[bytes], int]:
        return self.process, self.said

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.said)


def _processes(container) -> int:
    """That sleep there."""
    found = container.top(ps_args="-efww")["Processes"]  # whole lines, however wide its screen
    return sum("time.sleep(600)" in " ".join(x) for x in found)


def _running(machine, image) -> list:
    return [x for x in machine.client.containers.list() if x.image.id == image.id]


def _measured(home: Path) -> list:
    """The runs that have a row, whole."""
    written = [x for x in Home(home).runs() if '"kind":"record"' in Home(home).journal(x).read_text()]
    return [x for x in map(Home(home).load, written) if x.records]


def _ms(journal) -> float:
    return statistics.median(journal.records[0].primary)
