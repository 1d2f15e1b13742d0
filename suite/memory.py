"""A memory profiler for those who script: how much device memory a block of code took, and what kept it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType

from .memory_figures import MemoryFigures


@dataclass
class MemoryProfiler(MemoryFigures):
    """Measures device memory over a `with` block, on the current CUDA device or given ones.

    Afterwards, all in bytes and counted by torch's allocator: `before_bytes` and `after_bytes` allocated,
    `peak_bytes` at most above `before_bytes`, `reserved_peak_bytes` taken from the driver at most, and
    `seconds` of host time. Without a GPU the byte counts are None: torch keeps no count of CPU memory.

        with MemoryProfiler() as memory:
            y = attention(q, k, v, mask="causal")
        print(memory.peak_bytes)

    Blocks may nest: torch keeps a single high-water mark, and the blocks hand it on to each other.
    """

    before_bytes: int | None = field(default=None, init=False)
    after_bytes: int | None = field(default=None, init=False)
    peak_bytes: int | None = field(default=None, init=False)
    reserved_peak_bytes: int | None = field(default=None, init=False)
    seconds: float = field(default=0.0, init=False)
    _begin: float = field(default=0.0, init=False, repr=False)
    _marks: tuple[int, int] = field(default=(0, 0), init=False, repr=False)

    def __enter__(self) -> MemoryProfiler:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self._enclosing()
            _open.append(self)
            torch.cuda.reset_peak_memory_stats()
            self.before_bytes = torch.cuda.memory_allocated()
        self._begin = time.perf_counter()
        return self

    def _enclosing(self) -> None:
        """Saves the marks so far for the blocks around this one, which resetting would lose."""
        import torch

        for outer in _open:
            outer._raise(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    def _raise(self, allocated: int, reserved: int) -> None:
        self._marks = (max(self._marks[0], allocated), max(self._marks[1], reserved))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        import torch

        if self.before_bytes is not None:
            torch.cuda.synchronize()
            self.after_bytes = torch.cuda.memory_allocated()
            self._enclosing()
            _open.remove(self)
            self.peak_bytes = self._marks[0] - self.before_bytes
            self.reserved_peak_bytes = self._marks[1]
        self.seconds = time.perf_counter() - self._begin


_open: list[MemoryProfiler] = []
