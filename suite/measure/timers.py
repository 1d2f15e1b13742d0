"""How one call is timed. A timer is handed a call and a flush and gives samples in milliseconds.

* `events`: the device's events around each call, the launches queued up behind work that keeps it busy, a
  spinning kernel on CUDA, so that the device never waits for the host inside a sample (after NVBench's blocking
  kernel).
* `graph`: for calls too short for events. A CUDA graph of `batch` × (flush, call) is replayed beside one of
  `batch` × flush; the difference over `batch` is one sample. Rotating over copies of the inputs, the usual
  way, cannot make kilobyte inputs cold in a 60 MB cache; this does, at any size.
* `cupti`: the device's own begin and end of every kernel of the call, where cupti-python is installed.
* `monotonic`: the host's clock, on a CPU.
* `synchronized`: the host's clock around a call and the wait for its end, on a device whose events have no times.
  Launch and wait are in it.

Which one is used is decided per case (`choose`), for all its implementations alike, and recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ...registry.store.record import Case
from .stopping import TimerName

if TYPE_CHECKING:
    import torch

    from .fresh import Fresh

Call = Callable[[], object]
QUEUE_MS = 20.0
"""How much device work is queued at a time."""
QUEUE_CALLS = 50
"""At most so many calls in a queue: some implementations launch dozens of kernels, and the driver's queue
of about a thousand launches must not fill up, for then the host blocks and the device waits for it."""
GRAPH_CALLS = 20
REPLAYS = 5
SHORT_BYTES = 64 << 20
SHORT_FLOPS = 8e9
"""A case below both takes about 20 µs at most on a current data-centre GPU and goes to `graph`. Decided by
the case, not by the time seen, so that runs cannot differ in it by chance."""


class Timer(Protocol):
    """Times calls. `batch` is the number of calls behind one sample."""

    name: str
    batch: int

    def sample(self, call: Call, fresh: Fresh | None = None) -> list[float]:
        """A handful of samples, in milliseconds a call; `fresh` changes the inputs and is shown the answers."""
        ...


def choose(case: Case, cupti: bool) -> TimerName:
    """The name of the timer for a case on a GPU; `cupti` says whether that one is installed."""
    if case.bytes > SHORT_BYTES or case.flops > SHORT_FLOPS:
        return "events"
    return "cupti" if cupti else "graph"


class Monotonic:
    """The host's monotonic clock around each call."""

    name = "monotonic"
    batch = 1

    def __init__(self, flush: Call | None) -> None:
        self._flush = flush

    def sample(
        self, call: Call, fresh: Fresh | None = None, now: Callable[[], int] = time.perf_counter_ns
    ) -> list[float]:
        """One sample. The clock is bound where this is defined: another under its name changes nothing."""
        if fresh is not None:
            fresh.before()
        if self._flush is not None:
            self._flush()
        start = now()
        result = call()
        end = now()
        if fresh is not None:
            fresh.after(result)
        return [(end - start) / 1e6]


class Synchronized:
    """The host's clock around each call and the wait for its end."""

    name = "synchronized"
    batch = 1

    def __init__(self, flush: Call | None, synchronize: Callable[[], None]) -> None:
        self._flush = flush
        self._synchronize = synchronize

    def sample(
        self, call: Call, fresh: Fresh | None = None, now: Callable[[], int] = time.perf_counter_ns
    ) -> list[float]:
        """One sample, from an idle device to an idle device."""
        if fresh is not None:
            fresh.before()
        if self._flush is not None:
            self._flush()
        self._synchronize()
        start = now()
        result = call()
        self._synchronize()
        end = now()
        if fresh is not None:
            fresh.after(result)
        return [(end - start) / 1e6]


class Queue(Protocol):
    """What `Events` needs of a device."""

    def event(self) -> Any:
        """An event with a time: `record()`, `elapsed_time(later)` in milliseconds."""
        ...

    def occupy(self, seconds: float) -> None:
        """Queues work that keeps the device busy for about so long."""
        ...

    def wait(self) -> None:
        """Returns when all queued work is done."""
        ...


@dataclass(frozen=True)
class CudaQueue:
    """The current CUDA stream. `spin_hz` is the rate of `torch.cuda._sleep`'s cycles."""

    spin_hz: float

    def event(self) -> torch.cuda.Event:
        import torch

        return torch.cuda.Event(enable_timing=True)

    def occupy(self, seconds: float) -> None:
        import torch

        torch.cuda._sleep(int(seconds * self.spin_hz))

    def wait(self) -> None:
        import torch

        torch.cuda.current_stream().synchronize()


class Events:
    """Events behind a busy queue. `agreed` makes the ranks of a case queue as many calls each."""

    name = "events"
    batch = 1

    def __init__(
        self, flush: Call | None, queue: Queue, agreed: Callable[[int], int] = lambda calls: calls
    ) -> None:
        self._flush = flush
        self._queue = queue
        self._agreed = agreed
        self._calls = 1
        self._host_s = 0.0

    def sample(self, call: Call, fresh: Fresh | None = None) -> list[float]:
        """As many samples as fill the queue; the first call of this method gives one and calibrates."""
        starts = [self._queue.event() for _ in range(self._calls)]
        ends = [self._queue.event() for _ in range(self._calls)]
        self._queue.occupy(self._host_s * 1.3 * self._calls + 50e-6)
        begin = time.perf_counter()
        for start, end in zip(starts, ends, strict=True):
            if fresh is not None:
                fresh.before()
            if self._flush is not None:
                self._flush()
            start.record()
            result = call()
            end.record()
            if fresh is not None:
                fresh.after(result)
            del result
        host_s = (time.perf_counter() - begin) / self._calls
        self._queue.wait()
        samples = [_elapsed_ms(start, end) for start, end in zip(starts, ends, strict=True)]
        self._host_s = min(host_s, 2e-3) if self._host_s == 0 else min(self._host_s, host_s)
        self._calls = self._agreed(max(1, min(QUEUE_CALLS, int(QUEUE_MS / max(samples[0], 1e-3)))))
        return samples


class Graph:
    """Graph replay of `batch` calls, the flushes' own time taken off. Capturing may raise."""

    name = "graph"

    def __init__(
        self, flush: Call | None, call: Call, stream: torch.cuda.Stream, batch: int = GRAPH_CALLS
    ) -> None:
        import torch

        self.batch = batch
        self._result: object = None
        self._flushes: torch.cuda.CUDAGraph | None = None
        self._calls = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._calls, stream=stream):
            for _ in range(batch):
                if flush is not None:
                    flush()
                self._result = None  # its memory goes to the next call, as it does without a graph
                self._result = call()
        if flush is not None:
            self._flushes = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._flushes, stream=stream):
                for _ in range(batch):
                    flush()

    def replay(self) -> None:
        """The calls once more, untimed."""
        self._calls.replay()

    def _replay(self, graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        return start, end

    def sample(self, call: Call, fresh: Fresh | None = None) -> list[float]:
        """Five samples of `batch` calls each; the call itself is in the graph already, with its answer's place."""
        import torch

        if fresh is not None:
            fresh.before()
        torch.cuda._sleep(200_000)  # about 0.1 ms: the replays below are queued behind it
        pairs = []
        for _ in range(REPLAYS):
            flushes = self._replay(self._flushes) if self._flushes is not None else None
            pairs.append((self._replay(self._calls), flushes))
        torch.cuda.current_stream().synchronize()
        if fresh is not None:
            fresh.after(self._result, REPLAYS * self.batch)
        return [
            (_elapsed_ms(*calls) - (_elapsed_ms(*flushes) if flushes else 0.0)) / self.batch
            for calls, flushes in pairs
        ]


def _elapsed_ms(start: Any, end: Any) -> float:
    milliseconds: float = start.elapsed_time(end)
    return milliseconds


def spin_rate() -> float:
    """Cycles per second that `torch.cuda._sleep` counts here and now."""
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1_000_000)
    start.record()
    torch.cuda._sleep(5_000_000)
    end.record()
    end.synchronize()
    return 5_000_000 / (_elapsed_ms(start, end) * 1e-3)
