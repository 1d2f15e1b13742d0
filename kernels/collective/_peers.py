"""Copies between GPUs by copy engines, beside what the current stream computes.

Each rank has a place in symmetric memory that all can read and write. `meet` is where ranks wait for one another
in the order of their streams; a copy goes on a stream of its own, which begins once what was queued before it is
done, and is waited for where its data is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ._streams import stream
from ._symmetric import Symmetric, next_turn, symmetric, symmetric_if_any


class Peers:
    """A rank's view of the others, for arrays of up to `size` bytes a rank."""

    def __init__(self, shared: Symmetric, device: torch.device, priority: int = 0) -> None:
        self.rank, self.world = shared.rank, shared.world
        self.capacity = shared.capacity
        """Bytes of a place, as many as were asked for or more."""
        self._shared = shared
        self._device = device
        self._priority = priority
        """Of side streams."""

    @classmethod
    def of(cls, group: Any, device: torch.device, size: int, use: str = "") -> Peers:
        """All ranks of the group must ask for the same in the same order. Of another `use` the places are others:
        calls of two that are in different streams at once must not have the same.
        """
        return cls(symmetric(group, device, 1, size, halves=1, use=use), device)

    @classmethod
    def if_any(cls, group: Any, device: torch.device, size: int, use: str, priority: int = 0) -> Peers | None:
        """The same, with side streams of that priority; None where there is no such memory."""
        shared = symmetric_if_any(group, device, 1, size, use)
        return None if shared is None else cls(shared, device, priority)

    def turn(self) -> int:
        """0, 1, 2, … by calls, the same in all ranks; not for what a graph may hold."""
        return next_turn(self._shared)

    def others(self) -> list[int]:
        """The other ranks, each rank's from another one on, so that no two read from one at the same time."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def place(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A rank's place as a tensor, whose memory is that rank's."""
        begin = self._shared.data
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        own = rank == self.rank
        whole = self._shared.buffer if own else self._shared.handle.get_buffer(rank, (end,), torch.uint8)
        return whole[begin:end].view(dtype).view(shape)

    def meet(self, channel: int) -> None:
        """No rank goes on before all are here, with what they had queued. Two in a row take two channels."""
        self._shared.handle.barrier(channel=channel)

    @contextlib.contextmanager
    def beside(self, number: int) -> Iterator[None]:
        """What is queued within begins when all that was queued before is done, and goes on beside the rest."""
        side = stream(self._device, number, self._priority)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            yield

    def wait(self, number: int) -> None:
        """What is queued from here on begins when that of `beside` of this number is done."""
        torch.cuda.current_stream(self._device).wait_stream(stream(self._device, number, self._priority))
