"""Device memory that a system keeps, with what its CUDA graphs hold."""

from __future__ import annotations


def peak() -> int:
    """Bytes of the current CUDA device that were allocated at most since the mark was reset, and what graphs hold.

    A CUDA graph keeps what was allocated while it was captured in a pool of its own, for its replays alone. The
    allocator counts that as free as soon as Python lets go of it: without it a step by a graph would seem to
    need no activations. The whole of each pool counts, gaps too, for nobody else can have them.
    """
    import torch

    return torch.cuda.max_memory_allocated() + sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )
