"""Cases over several ranks through supervisor, worker and journal; how ranks end (`make test-ranks`: each way)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import read
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.group import ALONE
from kernelmark.suite.measure.ranks import NO_MULTICAST
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.plan import Plan
from kernelmark.suite.run import worker
from kernelmark.suite.run.process import _free, _shared_memory
from kernelmark.suite.run.supervisor import Run

from ...rank_faults import ROOT, STAGES, repeat

FEW = Sampling(min_samples=6, max_samples=6, min_seconds=0, max_seconds=30, warmup_s=0.05)
PAIRS = ((64, 2), (96, 3), (128, 2), (32, 2))
TIMES = int(os.environ.get("KERNELMARK_TEST_TIMES", "1"))


def case_of(catalog: Catalog, world: int):
    return catalog.operator("total").case({"N": 64, "gpus": world}, "fp32", "forward")


def measured(home: Path, told, world: int, *names: str, deadline_s: float = 60.0):
    """The journal of `total` over so many ranks, by these implementations."""
    catalog = Catalog.of(ROOT)
    plan = Plan("ranks", (case_of(catalog, world),), 1, ("hot",), FEW, deadline_s)
    cells = plan.cells(catalog, "cpu", names)
    run = Run(plan, cells, catalog, "cpu", Home(home), 1, roots=(str(ROOT),), ceilings=False, listener=told)
    return read(run.execute())


def ends(journal) -> dict[str, tuple[str, str | None]]:
    return {x.implementation: (x.status, x.reason) for x in journal.records}


def test_ranks_are_measured_in_step(tmp_path, told, processes):
    before = set(processes.children(os.getpid())), _shared_memory()
    journal = measured(tmp_path, told, 2, "plain", "refuses", "skips")
    found = {x.implementation: x for x in journal.records}
    assert ends(journal)["refuses"] == ("unsupported", "build: rank 1 of 2: only on Sundays")
    status, reason = ends(journal)["skips"]
    assert status == "incorrect"
    assert reason.startswith("verify: rank 1 of 2: output: relative error")
    samples = found["plain"].measurement.samples
    by_rank = samples["rank_latency"]
    assert samples["latency"] == tuple(map(max, zip(by_rank[::2], by_rank[1::2], strict=True)))
    assert len(by_rank) == 12
    assert found["plain"].case.name == "N64-gpus2-fp32-forward"
    conditions = journal.header.conditions
    assert (conditions["world"], conditions["ranks"]) == (2, "gloo")
    assert {name: conditions[f"env/{name}"] for name in NO_MULTICAST} == dict(NO_MULTICAST)
    assert {x.name for x in journal.header.metrics} >= {"rank_latency", "rank_spread"}
    assert (set(processes.children(os.getpid())), _shared_memory()) == before


def test_a_world_of_one_is_the_case_that_it_was():
    operator = Catalog.default().operator("softmax")
    alone = operator.case({"M": 8, "D": 8}, "bf16", "forward")
    assert operator.case({"M": 8, "D": 8, "gpus": 1}, "bf16", "forward") == alone
    assert (alone.world, "gpus" in alone.axes) == (1, False)
    with pytest.raises(InputError, match="softmax: gpus is 2; 1, as it does not run on several"):
        operator.case({"M": 8, "D": 8, "gpus": 2}, "bf16", "forward")
    total = Catalog.of(ROOT).operator("total")
    assert total.case({"N": 8}, "fp32", "forward").name == "N8-fp32-forward"
    four = total.case({"N": 8, "gpus": 4}, "fp32", "forward")
    assert (four.name, four.world, four.axes) == ("N8-gpus4-fp32-forward", 4, {"N": 8, "gpus": 4})
    with pytest.raises(InputError, match="total: gpus is 0; 1 or more"):
        total.case({"N": 8, "gpus": 0}, "fp32", "forward")


def test_too_few_gpus_are_said(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    catalog = Catalog.of(ROOT)
    plan = Plan("ranks", (case_of(catalog, 4),), 1, ("hot",), FEW, 60.0)
    run = Run(plan, plan.cells(catalog, "cuda", ("plain",)), catalog, "cuda", Home(tmp_path), 1)
    assert run._too_few(4) == ("unsupported", "needs 4 GPUs; this run may use 2")
    assert run._too_few(2) is None
    run.gpus = (0, 1, 2, 3)
    assert run._too_few(4) is None
    assert run._variables["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert run._variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"  # as nvidia-smi numbers them
    assert run._variables["NCCL_NVLS_ENABLE"] == "0"


class Gone(BaseException):
    """The process ended."""


@pytest.fixture
def worlds(monkeypatch):
    """What a worker holds of ranks, with ranks that only remember whether they were told to end."""

    class Ranks:
        def __init__(self, world, *rest):
            self.world, self.group = world, SimpleNamespace(size=world)
            self.open = True

        def allow(self, seconds):
            assert self.open

        def tell(self, indices):
            assert self.open

        def close(self):
            self.open = False

    def leave(code):
        raise Gone(code)

    monkeypatch.setattr(worker, "Ranks", Ranks)
    monkeypatch.setattr(worker.os, "_exit", leave)
    said = []
    case = case_of(Catalog.of(ROOT), 2)
    cells = [worker.TaskCell(i, case, "plain", "hot") for i in range(2)]
    found = worker._Worlds(worker.Task("cpu", 1, 0, tuple(cells), FEW), Cpu.open(), said.append)
    found.said, found.cells = said, cells
    return found


@pytest.mark.parametrize(
    ("world", "status", "stages", "kept"),
    [
        (2, "ok", ("build", "verify"), True),
        (2, "incorrect", ("build", "verify"), False),
        (2, "unsupported", ("build",), True),
        (2, "unavailable", ("prepare", "build"), True),
        (2, "unsupported", ("build", "verify"), False),
        (2, "error", ("build",), False),
        (1, "error", ("build",), True),
    ],
)
def test_ranks_are_kept_after_a_cell_that_left_nothing_undone(world, status, stages, kept, worlds):
    device = worlds._device
    worlds.enter(worlds.cells, world, None)
    ranks = worlds._ranks
    assert device.group is ranks.group
    worlds.send(worker.Result(0, status, None, None, dict.fromkeys(stages, 0.1)))
    if kept:
        worlds.enter(worlds.cells[1:], world, None)
        assert worlds._ranks is ranks
        worlds.__exit__()
        assert device.group is ALONE
    else:
        with pytest.raises(Gone, match=str(worker.OTHER_RANKS)):
            worlds.enter(worlds.cells[1:], world, None)
    assert not ranks.open


@pytest.mark.parametrize("then", [0, 1, 4])
def test_a_process_has_ranks_once(then, worlds):
    """What libraries remember of a group has its name, which the next one has too."""
    assert worlds.enter(worlds.cells, 0, "alone") == "alone"
    worlds.enter(worlds.cells, 2, None)
    worlds.send(worker.Result(0, "ok", None, None, {}))
    with pytest.raises(Gone, match=str(worker.OTHER_RANKS)):
        worlds.enter(worlds.cells[1:], then, None)
    # The last word is no result: what was found is known before ranks end, which they may not do in order.
    assert worlds.said[-1] == worker.Stage(worker.RANKS)


@pytest.mark.parametrize("then", [0, 2])
def test_a_process_whose_ranks_could_not_start_takes_no_others(then, worlds, monkeypatch):
    """Its groups may be made in part."""

    def fail(*arguments):
        raise RuntimeError("no link")

    monkeypatch.setattr(worker, "Ranks", fail)
    with pytest.raises(RuntimeError, match="no link"):
        worlds.enter(worlds.cells, 2, None)
    with pytest.raises(Gone, match=str(worker.OTHER_RANKS)):
        worlds.enter(worlds.cells[1:], then, "alone")


def test_cases_of_as_many_ranks_come_one_after_the_other(tmp_path, told):
    """In one process for those of two ranks and one for that of three, in either order of drawing."""
    catalog = Catalog.of(ROOT)
    cases = tuple(catalog.operator("total").case({"N": n, "gpus": w}, "fp32", "forward") for n, w in PAIRS)
    plan = Plan("ranks", cases, 1, ("hot",), FEW, 60.0)
    run = Run(plan, plan.cells(catalog, "cpu", ("plain",)), catalog, "cpu", Home(tmp_path), 1)
    walked = []
    run._replicate = lambda replicate, environment, cells: walked.extend(cells.values())
    for replicate in range(4):
        walked.clear()
        run.replicate(replicate, run.cells)
        assert [x.case.world for x in walked] == [2, 2, 2, 3]


def test_shared_memory_that_nobody_uses_is_freed():
    left = Path("/dev/shm") / f"nccl-test-{os.getpid()}"
    left.write_bytes(b"x")
    with open(left) as used:
        _free({left})
        assert left.exists(), used
    _free({left})
    assert not left.exists()


@pytest.mark.ranks
@pytest.mark.parametrize("time", range(TIMES))
@pytest.mark.parametrize(("world", "which"), [(2, "last"), (3, "first"), (4, "middle")])
def test_a_rank_that_is_killed_ends_its_case_alone(world, which, time, tmp_path):
    took, wrong = repeat("cpu", world, tmp_path, seed=time, which=which)
    assert not wrong
    assert len(took) == len(STAGES) + 1


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [x for x in STAGES if x != "gather"])
def test_a_rank_that_hangs_ends_its_case_alone(stage, tmp_path, told, processes):
    before = set(processes.children(os.getpid())), _shared_memory()
    journal = measured(tmp_path, told, 3, f"hangs_in_{stage}", "plain", deadline_s=20.0)
    found = ends(journal)
    assert found.pop("plain") == ("ok", None)
    ((status, reason),) = found.values()
    assert status == "timeout"
    assert "not finished within 16 s: rank 2 of 3 is in ends.py:" in reason
    assert reason.endswith("sleep; the others wait")
    assert (set(processes.children(os.getpid())), _shared_memory()) == before


@pytest.mark.ranks
def test_a_rank_that_fails_while_others_wait_ends_its_case_alone(tmp_path, told):
    found = ends(measured(tmp_path, told, 2, "fails_in_sample", "plain"))
    assert found["plain"] == ("ok", None)
    assert found["fails_in_sample"] == ("error", "sample: RuntimeError: rank 1 of 2: ValueError: no such luck")


@pytest.mark.ranks
def test_a_rank_that_fails_between_two_collectives_ends_its_case_alone(tmp_path, told):
    """The others go on to ask what it then answers with its failure."""
    found = ends(measured(tmp_path, told, 2, "fails_after_warm_up", "plain"))
    assert found["plain"] == ("ok", None)
    assert found["fails_after_warm_up"] == (
        "error",
        "warm up: RuntimeError: rank 1 of 2: ValueError: no such luck",
    )


@pytest.mark.ranks
def test_multicast_that_was_switched_on_is_refused(tmp_path, told, monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    status, reason = ends(measured(tmp_path, told, 2, "plain"))["plain"]
    assert status == "error"
    assert "starting its ranks: RuntimeError: no case on several GPUs without NCCL_NVLS_ENABLE=0" in reason
    assert json.dumps(reason)
