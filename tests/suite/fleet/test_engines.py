"""Real engines on this machine: `make test-fleet`. A host dies, the driver dies, and the run is whole.

Ray needs its Python package, Slurm the packages slurmctld, slurmd, slurm-client and munge, and root.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter

import pytest
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import read

from ...processes import wait_for

pytestmark = pytest.mark.fleet
CASES = 200
SHARDS = 8


def check(fleet, out: str, hosts: int) -> None:
    """The run is whole, each row is there once, and its shards say on which hosts they were measured."""
    home = Home(fleet.home)
    assert len(home.runs()) == 1, out
    journal = home.load("latest")
    assert Counter(x.case.axes["N"] for x in journal.records) == Counter(range(16, 16 + CASES))
    assert {x.status for x in journal.records} == {"ok"}
    assert journal.footers[-1].complete
    shards = [read(x) for x in sorted(home.shards.glob("*.jsonl"))]
    assert [x.header.request.shard for x in shards] == [(i, SHARDS) for i in range(1, SHARDS + 1)]
    assert len({x.header.environment["host"] for x in shards}) >= hosts
    assert set(journal.header.request.hosts.values()) == {x.header.environment["host"] for x in shards}


def test_ray_loses_a_host_and_its_driver(fleet, ray_hosts):
    cluster = ray_hosts(4)
    asked = ("fleet", "run", "--on", "ray", "--address", cluster.address, "--device", "cpu", "--journal-only")
    first = fleet.start(*asked, "--shards", str(SHARDS), "--plan", str(fleet.plan(CASES)), "--option", "GPU=1")
    wait_for(lambda: len(fleet.whole()) >= 1 or first.poll() is not None, "a shard", 120)
    assert first.poll() is None, first.communicate()[0]
    cluster.end(1)
    wait_for(lambda: len(fleet.whole()) >= 2, "another", 120)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    before = fleet.whole()
    assert len(before) < SHARDS
    code, out = fleet.run("fleet", "run", "--resume", "latest", "--journal-only")
    assert code == 0, out
    check(fleet, out, 3)


def test_shards_side_by_side_on_one_host(fleet):
    code, out = fleet.run(
        "run", "--parallel", "--gpus", "0,3", "--device", "cpu", "--journal-only", "--plan", str(fleet.plan(5))
    )
    assert code == 0, out
    home = Home(fleet.home)
    journal = home.load("latest")
    assert Counter(x.case.axes["N"] for x in journal.records) == Counter(range(16, 21))
    assert journal.header.conditions["parallel"] == "2"
    hosts = [read(x).header.environment["host"] for x in sorted(home.shards.glob("*.jsonl"))]
    assert [x.rpartition("_")[2] for x in hosts] == ["0", "3"]
    assert "control double/N" in out
    beside = home.runs()[-1]
    code, out = fleet.run("run", "--device", "cpu", "--journal-only", "--plan", str(fleet.plan(5)))
    assert code == 0, out
    code, out = fleet.run("compare", home.runs()[-1], beside)
    assert (code, "conditions differ: parallel" in out) == (4, True), out
    code, out = fleet.run("compare", home.runs()[-1], beside, "--across", "parallel", "--json")
    report = json.loads(out)
    assert (code, report["compared"]) == (0, 5), out
    assert [(x["condition"], x["first"], x["second"]) for x in report["differences"]] == [("parallel", None, "2")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_shards_side_by_side_go_on(fleet, number):
    """Ended in order, or with no word to its shards: what they had finished stays, and no row comes twice."""
    asked = (
        "--parallel",
        "--device",
        "cpu",
        "--journal-only",
        "--plan",
        str(fleet.plan(CASES)),
        "--control",
        "none",
    )
    first = fleet.start("run", "--gpus", "0,1", *asked)
    wait_for(lambda: finished(fleet) >= 20 or first.poll() is not None, "rows", 120)
    assert first.poll() is None, first.communicate()[0]
    first.send_signal(number)
    out = first.communicate(timeout=60)[0]
    assert first.returncode == (130 if number == signal.SIGINT else -number), out
    run = next((fleet.home / "fleet").glob("2*")).name
    command = f"kernelmark run --resume {run} --parallel --gpus"
    assert (command in out) == (number == signal.SIGINT), out
    before = finished(fleet)
    if number == signal.SIGINT:
        journal = Home(fleet.home).load(run)
        assert (len(journal.records), journal.footers[-1].complete) == (before, False)
    assert 20 <= before < CASES
    for words, why in (
        (("run", "--resume", run), "side by side; go on with --parallel"),
        (("run", "--resume", run, "--parallel"), "--parallel needs --gpus"),
        (("run", "--resume", run, "--parallel", "--gpus", "0,1,2"), "is in 2 shards"),
        (("run", "--resume", run, "--parallel", "--gpus", "0,1", "--seed", "1"), "leave --seed out"),
        (("fleet", "run", "--resume", run), command),
    ):
        code, out = fleet.run(*words)
        if (number, words) != (signal.SIGKILL, ("run", "--resume", run)):  # nobody had joined it
            assert (code, why in out) == (2, True), out
    code, out = fleet.run("run", "--resume", "latest", "--parallel", "--gpus", "2,5", "--journal-only")
    assert code == 0, out
    journal = Home(fleet.home).load(run)
    assert Counter(x.case.axes["N"] for x in journal.records) == Counter(range(16, 16 + CASES))
    assert journal.footers[-1].complete
    assert journal.header.conditions["parallel"] == "2"


def finished(fleet) -> int:
    """Rows that are in the journals of shards."""
    return sum(len(read(x).records) for x in Home(fleet.home).shards.glob("*.jsonl") if x.stat().st_size)


def test_slurm_loses_a_host_and_its_driver(fleet, slurm_hosts):
    cluster = slurm_hosts(3)
    fleet.environment |= cluster.environment
    asked = ("fleet", "run", "--on", "slurm", "--device", "cpu", "--journal-only", "--shards", str(SHARDS))
    first = fleet.start(*asked, "--plan", str(fleet.plan(CASES)))
    wait_for(lambda: len(fleet.whole()) >= 1 or first.poll() is not None, "a shard", 120)
    assert first.poll() is None, first.communicate()[0]
    cluster.end("n1")
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    before = fleet.whole()
    assert len(before) < SHARDS
    code, out = fleet.run("fleet", "status")
    assert code == 0, out
    assert "running" in out
    code, out = fleet.run("fleet", "run", "--resume", "latest", "--journal-only")
    assert code == 0, out
    check(fleet, out, 2)
    whole = [x.read_bytes() for x in sorted(Home(fleet.home).shards.glob("*"))]
    code, out = fleet.run("fleet", "collect")
    assert code == 0, out
    assert [x.read_bytes() for x in sorted(Home(fleet.home).shards.glob("*"))] == whole


def test_two_commits_over_hosts_end_as_on_one(fleet, slurm_hosts, sleeper):
    """A kernel that became four times slower, so that any machine sees it: its rows lie on two hosts, and each has
    the verdict that is due."""
    sleeper.commit(kernels__cpu___work="SECONDS = 0.08\n")
    fleet.environment |= slurm_hosts(2).environment | {"KERNELMARK_PATH": str(sleeper.folder)}
    asked = (
        "fleet",
        "compare",
        "--on",
        "slurm",
        "--shards",
        "2",
        "--device",
        "cpu",
        "--baseline",
        "HEAD~2",
        "--json",
    )
    code, out = fleet.run(*asked, "--", "--budget", "10m", cwd=sleeper.folder)
    assert code == 1, out
    report = json.loads(out[out.index("\n{") :])
    assert {(x["case"], x["implementation"], x["kind"]) for x in report["verdicts"]} == {
        ("N16-fp32-forward", "kernelmark_cpu", "regression"),
        ("N64-fp32-forward", "kernelmark_cpu", "regression"),
    }
    assert {x["pairs"] >= 10 for x in report["verdicts"]} == {True}
    sides = [Home(fleet.home).load(x) for x in Home(fleet.home).runs()]
    hosts = {}
    for side in sides:
        hosts.setdefault(side.header.request.cases[0].name, set()).add(side.header.environment["host"])
    assert len(hosts) == 2
    assert all(len(x) == 1 for x in hosts.values())
    assert hosts["N16-fp32-forward"] != hosts["N64-fp32-forward"]
