"""Peak memory of a program with what CUDA graphs work in, which to the allocator is free once it is captured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

SHARED = (0, 0)
"""The pool of all that is in no graph."""


def peak_allocated() -> int:
    """Most bytes that tensors took at once since the peak was last forgotten, and the pools of graphs beyond what
    is allocated in them.
    """
    import torch

    return int(torch.cuda.max_memory_allocated()) + unseen(torch.cuda.memory_snapshot())


def unseen(segments: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of private pools that the allocator does not count as allocated."""
    return sum(
        int(x["total_size"]) - int(x["allocated_size"])
        for x in segments
        if tuple(x.get("segment_pool_id", SHARED)) != SHARED
    )
