"""The device a worker measures on: what differs between devices, in one place, a small class each.

What each really has:

| kind | timers | before a cold call | telemetry | peak memory | fp64 |
|---|---|---|---|---|---|
| `cuda` | events, graph, cupti | 2 × L2 | NVML | yes | yes |
| `rocm` | events, graph | 2 × the larger of L2 and Infinity Cache | amdsmi | yes | yes |
| `xpu` | events, else synchronized | 2 × what torch says | none | yes | asked of the device |
| `mps` | events, else synchronized | 2 × 96 MiB | none | no | no |
| `cpu` | monotonic | 2 × the largest cache, 256 MiB at most | none | no | yes |

Only `cuda` and `cpu` have been run; the others' code is held to the same contract by devices that are made up.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ...registry.store.record import Cache, Case, DeviceKind
from . import cache
from .energy import Load, Queued
from .group import ALONE, Group
from .stopping import TimerName
from .telemetry import AmdSmi, Nvml
from .timers import Call, CudaQueue, Events, Graph, Monotonic, Synchronized, Timer, choose, spin_rate

if TYPE_CHECKING:
    import torch

GRAPHED_MS = 1.0
"""Shorter calls are captured, if they can be, to be queued back to back: the host would be too slow for them."""
GROWING = re.compile(r"expandable_segments\s*:\s*True")
"""What torch's allocator was told where its memory grows already."""
AHEAD_MS = 50.0
"""Work that is queued ahead of the device while energy is measured: several looks at a slow counter."""


class Device(Protocol):
    """What the stages need of a device."""

    @property
    def kind(self) -> DeviceKind:
        """Its name on the command line."""
        ...

    @property
    def nvml(self) -> Nvml | None:
        """Its own account of itself, where it gives one."""
        ...

    @property
    def fp64(self) -> bool:
        """Whether it computes in fp64, in which references are computed where it does."""
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
        """Gives cached memory back between cases: of a CUDA device also the host's that it may read itself."""
        ...

    def held(self) -> int:
        """Bytes of the device's memory that this process still holds when it has released what it can."""
        ...

    def growing(self) -> contextlib.AbstractContextManager[object]:
        """Within it memory is taken in pieces that can grow, so that none of it lies unused between others: for
        what nearly fills the device.
        """
        ...


class TimerUnavailable(Exception):
    """The timer of a case cannot time this implementation (it cannot be captured in a graph, say)."""


@dataclass
class Cuda:
    """The current CUDA device. All work runs on one side stream, so that graphs can capture it."""

    kind: ClassVar[DeviceKind] = "cuda"
    fp64: ClassVar[bool] = True
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

        torch.cuda.init()
        device = cls(_stream=torch.cuda.Stream())
        device._look()
        device._flush = cache.flush(device.torch_device)
        device._spin_hz = spin_rate()
        return device

    def _look(self) -> None:
        """Finds what is there beside torch: telemetry, and the profiler's timer."""
        import torch

        from . import cupti

        self.nvml = Nvml.open(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
        self.cupti = cupti.present()

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
        return Events(flush, CudaQueue(self._spin_hz), self.group.agreed)

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
        assert self._stream is not None
        try:
            return Graph(flush, call, self._stream)
        except RuntimeError as error:  # what torch raises for any operation that cannot be captured
            recover(self._stream)
            said = str(refusal(error)).splitlines()[0]
            raise TimerUnavailable(f"cannot be captured in a CUDA graph: {said}") from None

    def peak_memory(self, call: Call) -> int | None:
        import torch

        return _peak(torch.cuda, call)

    def release(self) -> None:
        import torch

        # A model's module and graph hold each other: what is in no use is freed before the next one's peak begins.
        gc.collect()
        torch.cuda.empty_cache()
        # As torch 2.13 names it, and 2.11. Of optimizer states on the host the cache holds tens of gigabytes.
        for name in ("_accelerator_emptyHostCache", "_host_emptyCache"):
            if hasattr(torch._C, name):
                getattr(torch._C, name)()
                break

    def held(self) -> int:
        import torch

        self.release()
        return int(torch.cuda.memory_reserved())

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        before = _allocator_settings()
        if GROWING.search(before) or "cudaMallocAsync" in before:  # as it is, or there is nothing to grow
            yield
            return
        # What is not said is set back to its default.
        _set_allocator(f"{before},expandable_segments:True")
        try:
            yield
        finally:
            _set_allocator(f"{before},expandable_segments:False")


def recover(stream: torch.cuda.Stream) -> None:
    """After a capture that failed on a stream: PyTorch leaves its random generator in it, and the next random
    number raises ("Offset increment outside graph capture"). A capture that ends well takes it out of there.
    """
    import torch

    torch.cuda.synchronize()
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        torch.empty(1, device=stream.device).zero_()


def refusal(error: RuntimeError) -> RuntimeError:
    """What a call raised while it was captured: it stands before what the capture's end made of it."""
    return error.__context__ if isinstance(error.__context__, RuntimeError) else error


def _allocator_settings() -> str:
    """What torch's allocator was told, by a variable or since."""
    import torch

    if (get := getattr(torch._C, "_accelerator_getAllocatorSettings", None)) is not None:
        return str(get())
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def _set_allocator(settings: str) -> None:
    import torch

    # As torch 2.11 and 2.13 name it; older ones may have the other name alone.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (change or torch.cuda.memory._set_allocator_settings)(settings.strip(","))


class Rocm(Cuda):
    """The current AMD GPU, which torch drives by the same names. Not run yet."""

    kind: ClassVar[DeviceKind] = "rocm"

    @classmethod
    def open(cls) -> Cuda:
        """The current device. Raises RuntimeError where there is none, or torch is another's build."""
        import torch

        if not torch.version.hip:
            raise RuntimeError(f"this torch, {torch.__version__}, is not built for ROCm")
        return super().open()

    def _look(self) -> None:
        import torch

        self.nvml = AmdSmi.open(torch.cuda.current_device())


@dataclass
class Accelerator:
    """A device by what torch gives all of them alike: `torch.accelerator` and `torch.Event`.

    Its stream is kept busy by writing over the flush's buffer, for want of a kernel that only waits. Where events
    have no times, calls are timed by the host's clock, the wait for their end included.
    """

    kind: ClassVar[DeviceKind]
    counts_memory: ClassVar[bool] = True
    fp64: bool = True
    nvml: None = None
    group: Group = ALONE
    _flush: Call | None = field(default=None, repr=False)
    _fill_s: float = 1e-4
    """Seconds that one overwriting takes the device."""
    _timed: bool = False

    @classmethod
    def open(cls) -> Accelerator:
        """The current device, its events tried. Raises RuntimeError where there is none."""
        device = cls()
        device.synchronize()
        device._flush = cache.flush(device.torch_device)
        device._calibrate()
        return device

    def _calibrate(self) -> None:
        assert self._flush is not None
        self._flush()
        self.wait()
        begin = time.perf_counter()
        self._flush()
        self.wait()
        self._fill_s = max(1e-6, time.perf_counter() - begin)
        try:
            start, end = self.event(), self.event()
            start.record()
            self._flush()
            end.record()
            self.wait()
            # Events that time a write of megabytes at nothing time nothing.
            self._timed = math.isfinite(took := start.elapsed_time(end)) and took > 0
        except (RuntimeError, ValueError, TypeError):  # torch's backends differ in how they refuse
            self._timed = False

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.kind)

    def using(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        import torch

        torch.accelerator.synchronize()

    def event(self) -> Any:
        """An event with a time, as far as the device has such."""
        import torch

        return torch.Event(device=self.torch_device, enable_timing=True)

    def occupy(self, seconds: float) -> None:
        """Queues as many overwritings as take about so long."""
        assert self._flush is not None
        for _ in range(math.ceil(seconds / self._fill_s)):
            self._flush()

    def wait(self) -> None:
        """Returns when all queued work is done."""
        self.synchronize()

    def timer(self, case: Case, cache: Cache, call: Call, name: TimerName) -> Timer:
        if name in ("graph", "cupti"):
            raise TimerUnavailable(f"there is no timer {name!r} on {self.kind}")
        return self.fallback(cache)

    def fallback(self, cache: Cache) -> Timer:
        flush = _before(self.group, self._flush if cache == "cold" else None)
        return Events(flush, self, self.group.agreed) if self._timed else Synchronized(flush, self.wait)

    def load(self, call: Call, latency_ms: float) -> Load:
        raise NotImplementedError(f"there is no counter of energy on {self.kind}")

    def peak_memory(self, call: Call) -> int | None:
        import torch

        return _peak(torch.accelerator, call) if self.counts_memory else None

    def release(self) -> None:
        import torch

        torch.accelerator.empty_cache()

    def held(self) -> int:
        """Not asked of these."""
        return 0

    def growing(self) -> contextlib.AbstractContextManager[object]:
        """Nothing is changed: not tried with these."""
        return contextlib.nullcontext()


class Xpu(Accelerator):
    """The current Intel GPU. Not run yet."""

    kind: ClassVar[DeviceKind] = "xpu"

    @classmethod
    def open(cls) -> Accelerator:
        """The current device, and whether it has fp64, which client GPUs have not."""
        import torch

        device = super().open()
        device.fp64 = bool(getattr(torch.xpu.get_device_properties(device.torch_device), "has_fp64", False))
        return device


class Mps(Accelerator):
    """Apple's GPU through Metal, which has no fp64 and of which torch counts no peak of memory. Not run yet."""

    kind: ClassVar[DeviceKind] = "mps"
    counts_memory: ClassVar[bool] = False

    @classmethod
    def open(cls) -> Accelerator:
        """The GPU."""
        device = super().open()
        device.fp64 = False
        return device


@dataclass
class Cpu:
    """The host's processor."""

    kind: ClassVar[DeviceKind] = "cpu"
    fp64: ClassVar[bool] = True
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

    def held(self) -> int:
        """torch keeps no count of CPU memory."""
        return 0

    def growing(self) -> contextlib.AbstractContextManager[object]:
        """Nothing is changed: the host's memory is paged."""
        return contextlib.nullcontext()


CLASSES: Mapping[DeviceKind, type[Cuda | Accelerator | Cpu]] = {
    "cuda": Cuda,
    "rocm": Rocm,
    "xpu": Xpu,
    "mps": Mps,
    "cpu": Cpu,
}


def opened(kind: DeviceKind) -> Device:
    """The device of that kind, ready to measure on."""
    # The stopping rule's functions take a quarter of a second to load: not while something is timed.
    import scipy.special  # noqa: F401

    return CLASSES[kind].open()


def _peak(counts: Any, call: Call) -> int:
    """Bytes that a call takes beyond what was taken, as torch's module of the device counts them."""
    counts.synchronize()
    collecting = gc.isenabled()
    gc.disable()  # tensors of earlier calls, freed during this one, would be taken off its own
    try:
        before = counts.memory_allocated()
        counts.reset_peak_memory_stats()
        result = call()
        counts.synchronize()
        peak: int = counts.max_memory_allocated() - before
        del result
    finally:
        if collecting:
            gc.enable()
    return peak


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
