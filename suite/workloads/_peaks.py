"""Peak memory of a program with what CUDA graphs work in, which to the allocator is free once it is captured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SHARED = (0, 0)
"""The pool of all that is in no graph."""

NOTED = 64 << 20
"""Bytes that are worth a remark."""


@dataclass(frozen=True)
class Left:
    """What earlier programs of a process hold when the next one begins, in bytes: tensors, and pools of graphs.
    What stays of a compiled program, after all that can be forgotten was, is not the next one's.
    """

    allocated: int = 0
    pools: int = 0

    @classmethod
    def now(cls, cuda: bool) -> Left:
        """At this moment; nothing where no GPU counts it."""
        if not cuda:
            return cls()
        import torch

        return cls(int(torch.cuda.memory_allocated()), unseen(torch.cuda.memory_snapshot()))

    @property
    def remarks(self) -> tuple[str, ...]:
        """For a reader, who may wonder where memory went."""
        held = self.allocated + self.pools
        if held < NOTED:
            return ()
        return (f"{held / 2**30:.2f} GiB of earlier programs were still held; peaks are without them",)


def peak_allocated(left: Left) -> int:
    """Most bytes that tensors took at once since the peak was last forgotten, and the pools of graphs beyond what
    is allocated in them, without what was `left` by earlier programs.
    """
    import torch

    pools = unseen(torch.cuda.memory_snapshot()) - left.pools
    return max(0, int(torch.cuda.max_memory_allocated()) - left.allocated) + max(0, pools)


def unseen(segments: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of private pools that the allocator does not count as allocated."""
    return sum(
        int(x["total_size"]) - int(x["allocated_size"])
        for x in segments
        if tuple(x.get("segment_pool_id", SHARED)) != SHARED
    )
