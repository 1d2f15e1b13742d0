"""Reduce-scatter among GPUs of one host over peer pointers (`_exchange`), and NCCL for what is not small."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .._common import FLOATING, check, choice
from ._exchange import WORDS_BYTES, scattered_sum, words_memory
from ._sharded import scatter_into
from ._symmetric import shares


def reduce_scatter(x: torch.Tensor, place: str = "out") -> torch.Tensor:
    """(N,): the sum over ranks of this rank's share of `x` (world · N,), of the default process group.

    With `place="in"` it is written over that share, which is given back. x in bf16, fp16 or fp32, contiguous, of
    the same length in all ranks, a multiple of their number; sums are fp32 up to 1 MiB. Every rank must call it.
    Raises TypeError or ValueError.
    """
    check("x", x, dtypes=FLOATING, dim=1)
    choice("place", place, ("out", "in"))
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    group = dist.group.WORLD
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if x.numel() % world:
        raise ValueError(f"x has {x.numel()} elements, expected a multiple of {world} ranks")
    own = x.view(world, -1)[rank] if x.numel() else x
    out = own if place == "in" else torch.empty_like(own)
    if world > 1 and 0 < x.numel() * x.element_size() <= WORDS_BYTES:
        scattered_sum(x, out, words_memory(x, group, "reduce_scatter"))
    elif x.numel():
        dist.reduce_scatter_tensor(out, x)
    return out


reduce_scatter.into = scatter_into  # type: ignore[attr-defined]  # beside a step's computation, as FSDP2 asks
shares(reduce_scatter)
