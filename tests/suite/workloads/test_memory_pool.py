"""Patterns of allocation by hand, the check of what a pool gave, and processes that end otherwise."""

from __future__ import annotations

import sys

import pytest
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.session import Session
from kernelmark.suite.measure.stages import Stages
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.workloads import _pool as pool
from kernelmark.suite.workloads import memory_pool, train

SIZES = {"S": 1024, "D": 64, "L": 3, "N": 6}
SEEN = {"milliseconds": [2.0], "overlapping": False, "reserved": 30, "allocated": 20, "retries": 1}


@pytest.mark.parametrize("pattern", pool.PATTERNS)
def test_everything_is_allocated_once_and_freed(pattern: str) -> None:
    found = pool.events(pattern, 1024, 64, 3, 6, 1)
    taken = [number for number, size in found if size]
    freed = [number for number, size in found if not size]
    assert sorted(taken) == sorted(freed) == list(range(len(taken)))
    assert found == pool.events(pattern, 1024, 64, 3, 6, 1) != pool.events(pattern, 1024, 64, 3, 6, 2)
    assert pool.peak(found) > 0


def test_checkpointing_keeps_less() -> None:
    plain, less = (pool.peak(pool.events(x, 1024, 64, 12, 1, 3)) for x in ("varying", "checkpointing"))
    # Per token and layer: 16 widths of activations, of which the layer under way has all and others one.
    assert less < plain / 3


def test_the_peak_is_of_rounded_bytes() -> None:
    assert pool.peak([(0, 1), (1, 513), (0, 0), (2, 512), (1, 0), (2, 0)]) == 1536


def test_allocations_with_memory_in_common_are_seen() -> None:
    assert not pool.overlapping([(0, 100, 10), (1, 110, 5), (0, 0, 0), (2, 100, 10)])
    assert pool.overlapping([(0, 100, 10), (1, 109, 5)])
    assert pool.overlapping([(1, 105, 5), (0, 100, 6)])


class Pretender(Cpu):
    """Of that kind, without one."""

    kind = "cuda"


def session(device: type[Cpu] = Pretender) -> Session:
    return Session(device(), 7, 0, Sampling(), Stages())


def measured(monkeypatch: pytest.MonkeyPatch, memory: str = "ample", **seen: object):
    case = memory_pool.WORKLOAD.case(SIZES, "bf16", "program", pattern="varying", memory=memory)
    asked = {}

    def replayed(given, settings):
        asked.update(given, settings=settings)
        return SEEN | seen

    monkeypatch.setattr(pool, "replayed", replayed)
    events = memory_pool.prepare(case, session())
    return asked, memory_pool.measure(case, "expandable_segments:True", session(), events)


def test_what_a_setting_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, found = measured(monkeypatch, "tight")
    assert asked["settings"] == "expandable_segments:True"
    assert asked["limit"] == int(1.05 * pool.peak(asked["events"]))
    assert found.samples == {
        "reserved_ratio": (1.5,),
        "retries": (1.0,),
        "replay": (2.0,),
        "pool_reserved": (30.0,),
        "pool_allocated": (20.0,),
    }
    assert measured(monkeypatch)[0]["limit"] == 0
    with pytest.raises(Incorrect, match="memory in common"):
        measured(monkeypatch, overlapping=True)


def test_systems_are_settings_and_nothing_else() -> None:
    found = train.catalog().of_operator("memory_pool")
    case = memory_pool.WORKLOAD.case(SIZES, "bf16", "program")
    assert all(isinstance(x.load()(case), str) for x in found)
    assert "torch" in {x.name for x in found}


def test_a_cpu_has_no_pool() -> None:
    case = memory_pool.WORKLOAD.case(SIZES, "bf16", "program")
    with pytest.raises(NotImplementedError, match="asks the C library"):
        memory_pool.prepare(case, session(Cpu))


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        ("import os; raise SystemExit(os.environ['PYTORCH_ALLOC_CONF'])", RuntimeError, "backend:native"),
        ("""print('{"out_of_memory": "CUDA out of memory"}')""", MemoryError, "CUDA out of memory"),
    ],
)
def test_processes_that_end_otherwise(monkeypatch, tmp_path, code, error, said) -> None:
    child = tmp_path / "child"
    child.write_text(f"#!{sys.executable}\n{code}\n")
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))
    with pytest.raises(error, match=said):
        pool.replayed({}, "backend:native")
