"""All-to-all among GPUs of one host over peer pointers, and NCCL for what is large: see `_exchange`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .._common import FLOATING, check
from ._exchange import WORDS_BYTES, exchanged, pushed, pushed_memory, pushes, words_memory
from ._symmetric import shares


def all_to_all(x: torch.Tensor) -> torch.Tensor:
    """(world · N,): of all ranks' `x` (world · N,) the share of this rank, by rank; of the default process group.

    x in bf16, fp16 or fp32, contiguous, of the same length in all ranks, a multiple of their number. Every rank
    must call it. Raises TypeError or ValueError.
    """
    check("x", x, dtypes=FLOATING, dim=1)
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    group = dist.group.WORLD
    world = dist.get_world_size(group)
    if x.numel() % world:
        raise ValueError(f"x has {x.numel()} elements, expected a multiple of {world} ranks")
    out = torch.empty_like(x)
    whole = x.numel() * x.element_size()
    if 0 < whole <= WORDS_BYTES and world > 1:
        exchanged(x, out, words_memory(x, group, "all_to_all"))
    elif pushes(x.numel() // world, x.element_size(), world) and world > 1:
        pushed(x, out, pushed_memory(x, group, "all_to_all"))
    else:
        dist.all_to_all_single(out, x)
    return out


shares(all_to_all)
