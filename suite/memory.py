"""A memory profiler for those who script: how much memory a block of code took, of the device and of the host, and
what kept it.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from ..registry import figures
from .memory_figures import MemoryFigures

PROCESS = Path("/proc/self")
_RESIDENT, _HIGHEST = "VmRSS", "VmHWM"


@dataclass
class MemoryProfiler(MemoryFigures):
    """Measures memory over a `with` block: of the current CUDA device, and of this process on the host.

    Afterwards, all in bytes. Of the device, counted by torch's allocator: `before_bytes` and `after_bytes`
    allocated, `peak_bytes` at most above `before_bytes`, `reserved_peak_bytes` taken from the driver at most. Of
    the host, counted by the kernel as resident: `host_before_bytes`, and `host_peak_bytes` at most above that;
    what was resident before and is used again costs nothing. `seconds` is host time.

    What could not be measured is None, and `why` says why, by the field's name.

        with MemoryProfiler() as memory:
            y = attention(q, k, v, mask="causal")
        print(memory)

    Blocks may nest: torch and the kernel keep a single high-water mark each, and the blocks hand it on.
    """

    before_bytes: int | None = field(default=None, init=False)
    after_bytes: int | None = field(default=None, init=False)
    peak_bytes: int | None = field(default=None, init=False)
    reserved_peak_bytes: int | None = field(default=None, init=False)
    host_before_bytes: int | None = field(default=None, init=False)
    host_peak_bytes: int | None = field(default=None, init=False)
    seconds: float = field(default=0.0, init=False)
    why: dict[str, str] = field(default_factory=lambda: _why("no block was measured yet"), init=False)
    _begin: float = field(default=0.0, init=False, repr=False)
    _marks: tuple[int, int] = field(default=(0, 0), init=False, repr=False)
    _host_mark: int = field(default=0, init=False, repr=False)

    def __enter__(self) -> MemoryProfiler:
        self.why = _why("the block has not ended")
        self._open_device()
        self._open_host()
        self._begin = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.before_bytes is not None:
            import torch

            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._begin
        self._close_host()
        self._close_device()

    def __str__(self) -> str:
        """A line a value, with why where there is none."""
        values = {x: getattr(self, x) for x in (*_DEVICE, *_HOST)}
        told = [
            f"{x}: {figures.size(y) if y is not None else f'not measured: {self.why[x]}'}"
            for x, y in values.items()
        ]
        return "\n".join([*told, f"seconds: {self.seconds:.6g}"])

    def _open_device(self) -> None:
        missing = _no_device()
        if missing is not None:
            self.why |= dict.fromkeys(_DEVICE, missing)
            return
        import torch

        torch.cuda.synchronize()
        self._enclosing()
        _open.append(self)
        torch.cuda.reset_peak_memory_stats()
        self.before_bytes = torch.cuda.memory_allocated()
        del self.why["before_bytes"]

    def _close_device(self) -> None:
        if self.before_bytes is None:
            return
        import torch

        self.after_bytes = torch.cuda.memory_allocated()
        self._enclosing()
        _open.remove(self)
        self.peak_bytes = self._marks[0] - self.before_bytes
        self.reserved_peak_bytes = self._marks[1]
        for name in _DEVICE[1:]:
            del self.why[name]

    def _enclosing(self) -> None:
        """Saves the marks so far for the blocks around this one, which resetting would lose."""
        import torch

        for outer in _open:
            outer._raise(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    def _raise(self, allocated: int, reserved: int) -> None:
        self._marks = (max(self._marks[0], allocated), max(self._marks[1], reserved))

    def _open_host(self) -> None:
        try:
            _hand_on()
            (PROCESS / "clear_refs").write_text("5")  # resets the mark alone, proc(5)
            self.host_before_bytes = _resident(_RESIDENT)
        except OSError as error:
            reason = f"this system does not let a process reset its high-water mark: {error.strerror or error}"
            self.why |= dict.fromkeys(_HOST, reason)
        else:
            del self.why["host_before_bytes"]
            _open_on_host.append(self)

    def _close_host(self) -> None:
        if self.host_before_bytes is None:
            return
        try:
            _hand_on()
        except OSError as error:
            self.why["host_peak_bytes"] = f"the mark cannot be read: {error.strerror or error}"
        else:
            self.host_peak_bytes = max(0, self._host_mark - self.host_before_bytes)
            del self.why["host_peak_bytes"]
        _open_on_host.remove(self)


_DEVICE = ("before_bytes", "after_bytes", "peak_bytes", "reserved_peak_bytes")
_HOST = ("host_before_bytes", "host_peak_bytes")
_open: list[MemoryProfiler] = []
_open_on_host: list[MemoryProfiler] = []


def _why(reason: str) -> dict[str, str]:
    """One reason for all values."""
    return dict.fromkeys((*_DEVICE, *_HOST), reason)


def _no_device() -> str | None:
    """Why device memory cannot be measured here; None where it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.cuda.is_available():
        return None
    return "torch sees no CUDA device, and keeps no count of CPU memory; host_peak_bytes has that"


def _hand_on() -> None:
    """Raises the marks of the blocks that are open to the kernel's, before another block resets that."""
    mark = _resident(_HIGHEST)
    for outer in _open_on_host:
        outer._host_mark = max(outer._host_mark, mark)


def _resident(name: str) -> int:
    """Bytes that the kernel counts for this process under a name. Raises `OSError` where it does not."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", (PROCESS / "status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{PROCESS}/status has no {name}")
    return int(found[1]) * 1024
