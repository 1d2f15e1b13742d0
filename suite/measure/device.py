"""The device a worker measures on: what differs between a GPU and a CPU, in one place."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from ...registry.store.record import Cache, Case
from . import cache
from .energy import Load, Queued
from .group import ALONE, Group
from .stopping import TimerName
from .telemetry import Nvml
from .timers import Call, Events, Graph, Monotonic, Timer, choose, spin_rate

if TYPE_CHECKING:
    import torch

GRAPHED_MS = 1.0
"""Shorter calls are captured, if they can be, to be queued back to back: the host would be too slow for them."""
AHEAD_MS = 10.0
"""Work that is queued ahead of the device while energy is measured."""


class Device(Protocol):
    """What the stages need of a device."""

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        """Its name on the command line."""
        ...

    @property
    def nvml(self) -> Nvml | None:
        """Its own account of itself, where it gives one."""
        ...

    group: Group
    """The ranks of the case under way."""

    @property
    def torch_device(self) -> torch.device:
        """torch's name of it."""
        ...

    def using(self) -> contextlib.AbstractContextManager[object]:
        """Entered once around all work of a process."""
        ...

    def synchronize(self) -> None:
        """Returns when all queued work is done; raises what it raised."""
        ...

    def timer(self, case: Case, cache: Cache, call: Call, name: TimerName) -> Timer:
        """The timer of that name, or for "auto" the case's own.

        Raises `TimerUnavailable` where it cannot time this call.
        """
        ...

    def fallback(self, cache: Cache) -> Timer:
        """The timer that can time anything."""
        ...

    def load(self, call: Call, latency_ms: float) -> Load:
        """Calls back to back that keep the device busy; `latency_ms` is about what one takes."""
        ...

    def peak_memory(self, call: Call) -> int | None:
        """Bytes allocated at most during a call beyond what was allocated before it; None if unknown."""
        ...

    def release(self) -> None:
        """Gives cached memory back between cases."""
        ...


class TimerUnavailable(Exception):
    """The timer of a case cannot time this implementation (it cannot be captured in a graph, say)."""


@dataclass
class Cuda:
    """The current CUDA device. All work runs on one side stream, so that graphs can capture it."""

    kind: Literal["cuda"] = "cuda"
    nvml: Nvml | None = None
    cupti: bool = False
    group: Group = ALONE
    _flush: Call | None = field(default=None, repr=False)
    _spin_hz: float = 0.0
    _stream: torch.cuda.Stream | None = None

    @classmethod
    def open(cls) -> Cuda:
        """The current device, warmed up. Raises RuntimeError where there is none."""
        import torch

        from . import cupti

        torch.cuda.init()
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = cls(nvml=Nvml.open(str(properties.uuid)), cupti=cupti.present(), _stream=torch.cuda.Stream())
        device._flush = cache.flush(device.torch_device)
        device._spin_hz = spin_rate()
        return device

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    @contextlib.contextmanager
    def using(self) -> Iterator[object]:
        import torch

        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            yield self

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def timer(self, case: Case, cache: Cache, call: Call, name: TimerName) -> Timer:

        flush = _before(self.group, self._flush if cache == "cold" else None)
        if name == "auto":
            # Kernels' own times hold no wait for another rank's: calls over ranks are timed between barriers.
            name = choose(case, self.cupti and self.group.barrier is None)
        if name == "events":
            return self.fallback(cache)
        if name == "cupti":
            if not self.cupti:
                raise TimerUnavailable("cupti-python is not installed")
            from .cupti import Cupti, NoRecords

            timer = Cupti(flush, self._spin_hz)
            try:
                timer.sample(call)
            except NoRecords as error:
                raise TimerUnavailable(str(error)) from None
            return timer
        return self._graph(flush, call)

    def fallback(self, cache: Cache) -> Timer:
        flush = _before(self.group, self._flush if cache == "cold" else None)
        return Events(flush, self._spin_hz, self.group.agreed)

    def load(self, call: Call, latency_ms: float) -> Load:
        assert self._stream is not None
        launch, calls = call, 1
        if self.group.barrier is None and latency_ms < GRAPHED_MS:
            with contextlib.suppress(TimerUnavailable):  # then the host queues each call, and may be too slow
                graph = self._graph(None, call)
                launch, calls = graph.replay, graph.batch
        return Queued(launch, calls, max(2, math.ceil(AHEAD_MS / max(calls * latency_ms, 1e-3))))

    def _graph(self, flush: Call | None, call: Call) -> Graph:
        """Raises `TimerUnavailable` for a call that cannot be captured."""
        import torch

        assert self._stream is not None
        try:
            return Graph(flush, call, self._stream)
        except RuntimeError as error:  # what torch raises for any operation that cannot be captured
            torch.cuda.synchronize()
            # PyTorch leaves its random generator in a capture that failed, and the next random number raises
            # ("Offset increment outside graph capture"). A capture that ends well takes it out of there.
            with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
                torch.empty(1, device=self.torch_device).zero_()
            raise TimerUnavailable(f"cannot be captured in a CUDA graph: {str(error).splitlines()[0]}") from None

    def peak_memory(self, call: Call) -> int | None:
        import torch

        torch.cuda.synchronize()
        collecting = gc.isenabled()
        gc.disable()  # tensors of earlier calls, freed during this one, would be taken off its own
        try:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            result = call()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            del result
        finally:
            if collecting:
                gc.enable()
        return peak

    def release(self) -> None:
        import torch

        torch.cuda.empty_cache()


@dataclass
class Cpu:
    """The host's processor."""

    kind: Literal["cpu"] = "cpu"
    nvml: None = None
    group: Group = ALONE
    _flush: Call | None = field(default=None, repr=False)

    @classmethod
    def open(cls) -> Cpu:
        """The host."""
        import torch

        return cls(_flush=cache.flush(torch.device("cpu")))

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def using(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """A CPU call is done when it returns."""

    def timer(self, case: Case, cache: Cache, call: Call, name: TimerName) -> Timer:
        return self.fallback(cache)

    def fallback(self, cache: Cache) -> Timer:
        return Monotonic(_before(self.group, self._flush if cache == "cold" else None))

    def load(self, call: Call, latency_ms: float) -> Load:
        raise NotImplementedError("a CPU has no counter of energy that NVML reads")

    def peak_memory(self, call: Call) -> int | None:
        """torch keeps no count of CPU memory."""
        return None

    def release(self) -> None:
        """The allocator of the host needs no help."""


def opened(kind: Literal["cuda", "cpu"]) -> Device:
    """The device of that kind, ready to measure on."""
    return Cuda.open() if kind == "cuda" else Cpu.open()


def _before(group: Group, flush: Call | None) -> Call | None:
    """What comes before each call and outside of its time: the cache is flushed, and no rank begins alone."""
    barrier = group.barrier
    if flush is None or barrier is None:
        return flush or barrier

    def before() -> None:
        flush()
        barrier()

    return before


def wall_ms(device: Device, call: Call, count: int, limit_s: float = math.inf) -> list[float]:
    """Host time of single calls in milliseconds, launch and synchronization included.

    At most `count` calls, and no further one after `limit_s` seconds; of several ranks, rank 0's.
    """
    samples: list[float] = []
    while device.group.agreed(len(samples) < count and sum(samples) < limit_s * 1e3):
        device.synchronize()
        begin = time.perf_counter_ns()
        call()
        device.synchronize()
        samples.append((time.perf_counter_ns() - begin) / 1e6)
    return samples
