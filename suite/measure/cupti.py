"""Device time from CUPTI's own records of kernels, copies and fills, where cupti-python is installed.

Each call is fenced by two launches of torch's spin kernel, which nothing that is measured uses; what CUPTI
recorded between a pair of fences is the call, from its first begin to its last end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from .timers import Call

if TYPE_CHECKING:
    from .fresh import Fresh

FENCE = "spin_kernel"
CALLS = 20
LONGEST_HOLD_S = 0.05


def present() -> bool:
    """Whether cupti-python can be imported."""
    return find_spec("cupti") is not None


class NoRecords(RuntimeError):
    """CUPTI recorded nothing for a call: another profiler holds it, or the call runs no kernel."""


class Cupti:
    """Times calls by CUPTI activity records. One per process records at a time."""

    name = "cupti"
    batch = 1
    _records: ClassVar[list[tuple[int, int, str]]] = []
    _registered: ClassVar[bool] = False

    def __init__(self, flush: Call | None, spin_hz: float) -> None:
        self._flush = flush
        self._spin_hz = spin_hz
        self._host_s = 0.0
        self._register()

    @classmethod
    def _register(cls) -> None:
        """Hands CUPTI our buffers, once in a process."""
        if cls._registered:
            return
        from cupti import cupti

        def requested() -> tuple[int, int]:
            return 8 << 20, 0

        def completed(activities: Iterable[Any]) -> None:
            cls._records.extend((x.start, x.end, getattr(x, "name", None) or "") for x in activities)

        cupti.activity_register_callbacks(requested, completed)
        cls._registered = True

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Records only inside: CUPTI slows every launch while it does, other timers' too."""
        from cupti import cupti

        kinds = (
            cupti.ActivityKind.CONCURRENT_KERNEL,
            cupti.ActivityKind.MEMCPY,
            cupti.ActivityKind.MEMSET,
        )
        self._records.clear()
        for kind in kinds:
            cupti.activity_enable(kind)
        try:
            yield
            cupti.activity_flush_all(1)
        finally:
            for kind in kinds:
                cupti.activity_disable(kind)

    def sample(self, call: Call, fresh: Fresh | None = None) -> list[float]:
        """Samples of a queue of calls, held back until all are launched."""
        import torch

        stream = torch.cuda.current_stream()
        stream.synchronize()
        with self._recording():
            begin = time.perf_counter()
            torch.cuda._sleep(int(self._host_s * 1.3 * self._spin_hz) + 1)
            for _ in range(CALLS):
                if fresh is not None:
                    fresh.before()
                if self._flush is not None:
                    self._flush()
                torch.cuda._sleep(1)
                result = call()
                torch.cuda._sleep(1)
                if fresh is not None:
                    fresh.after(result)
                del result
            self._host_s = min(time.perf_counter() - begin, LONGEST_HOLD_S)
            stream.synchronize()
        return spans(self._records)


def spans(records: Iterable[tuple[int, int, str]]) -> list[float]:
    """Milliseconds from first begin to last end between each pair of fences.

    Records are (begin, end, name) in nanoseconds, in any order. The first fence only holds the queue back
    and pairs with none. Raises `NoRecords` for an empty pair.
    """
    inside = False
    first: int | None = None
    last = 0
    out = []
    held = False
    for begin, end, name in sorted(records):
        if FENCE in name and not held:
            held = True
        elif FENCE in name:
            if inside:
                if first is None:
                    raise NoRecords("CUPTI recorded no kernel for a call")
                out.append((last - first) / 1e6)
            inside, first, last = not inside, None, 0
        elif inside:
            first = begin if first is None else first
            last = max(last, end)
    if not out:
        raise NoRecords("CUPTI recorded nothing")
    return out
