"""PyTorch's memory pool: how much it holds beyond what is allocated, by setting and pattern of allocation.

A system is a value of `PYTORCH_ALLOC_CONF`. Every system of a case replays the same allocations in a fresh
process; that no two of them share memory is checked before anything is timed.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ...registry.store.metric import Metric, Ratio
from ...registry.store.record import Case, Measurement
from ..measure.rounding import rounded
from ..measure.verify import Incorrect
from ..workload import Workload
from . import _pool as pool

if TYPE_CHECKING:
    from ..measure.session import Session

METRICS = (
    Metric(
        "reserved_ratio",
        "1",
        across="maximum",
        judged=Ratio(test="median"),
        label="reserved / allocated",
        shown="table",
        about="Most bytes that the pool held over most bytes that were allocated. 1: nothing beyond.",
    ),
    Metric(
        "retries",
        "1",
        across="maximum",
        shown="table",
        about="How often the pool gave all free memory back and asked again, which waits for the device.",
    ),
    Metric("replay", "ms", shown="table", about="Host time of all allocations of the pattern once."),
    Metric("pool_reserved", "B", across="maximum", label="reserved", shown="table"),
    Metric("pool_allocated", "B", across="maximum", better="neither", label="allocated"),
)
TIMES = 5


@cache
def _events(pattern: str, S: int, D: int, L: int, N: int, seed: int) -> tuple[pool.Event, ...]:
    return tuple(pool.events(pattern, S, D, L, N, seed))


def prepare(case: Case, session: Session) -> tuple[pool.Event, ...]:
    """The pattern. Raises NotImplementedError on a CPU."""
    if session.device.kind != "cuda":
        raise NotImplementedError("the pool is of CUDA memory; on a CPU PyTorch asks the C library")
    sizes = case.axes
    pattern = str(case.options["pattern"])
    return _events(pattern, sizes["S"], sizes["D"], sizes["L"], sizes["N"], session.seed)


def measure(case: Case, settings: str, session: Session, events: tuple[pool.Event, ...]) -> Measurement:
    """One setting: replayed and checked once, then timed. Raises `MemoryError` where it runs out of memory."""
    limit = int(pool.peak(events) * pool.TIGHT) if case.options["memory"] == "tight" else 0
    device = session.device.torch_device.index or 0
    asked = {"events": events, "times": TIMES, "limit": limit, "device": device}
    with session.stage("sample"):
        found = pool.replayed(asked, settings)
    if found["overlapping"]:
        raise Incorrect("two allocations have memory in common")
    return Measurement(
        samples={
            "reserved_ratio": rounded([found["reserved"] / found["allocated"]]),
            "retries": (float(found["retries"]),),
            "replay": rounded(found["milliseconds"]),
            "pool_reserved": (float(found["reserved"]),),
            "pool_allocated": (float(found["allocated"]),),
        },
        timer="monotonic, in a process of its own",
    )


def nothing(case: Case) -> int:
    """Allocating moves and computes nothing."""
    return 0


WORKLOAD = Workload(
    name="memory_pool",
    summary="PyTorch's memory pool: reserved over allocated, retries and time, by setting and pattern",
    axes={"S": "tokens of the longest sequence", "D": "model dimension", "L": "layers", "N": "steps or tokens"},
    options={"pattern": pool.PATTERNS, "memory": ("ample", "tight")},
    dtypes=("bf16",),
    bytes=nothing,
    flops=nothing,
    measured=METRICS,
    prepare=prepare,
    measure=measure,
    definition=(pool.events, pool.peak, pool.overlapping),
    plans={},
)
