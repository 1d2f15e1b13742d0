"""All-gather by copy engines: each rank pulls its peers' shares, each on a stream of its own.

Copies between peers take no multiprocessor and fill a link better than loads and stores do. The shares lie in
symmetric memory; ranks meet before they pull, and once all have pulled, so that the next call may lay its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .._common import FLOATING, check, choice
from ._streams import stream
from ._symmetric import shares, symmetric

SMALL_BYTES = 1 << 20
"""Up to here NCCL: a copy engine's start takes microseconds, and there is one for each peer."""


def all_gather(x: torch.Tensor, place: str = "out") -> torch.Tensor:
    """(world · N,): all ranks' `x` (N,) by rank, of the default process group. Every rank must call it.

    With `place="in"` x is (world · N,), of which a rank has laid its own share; the others are written beside it,
    and x is given back. x in bf16, fp16 or fp32, contiguous, of the same length in all ranks. Raises TypeError or
    ValueError.
    """
    check("x", x, dtypes=FLOATING, dim=1)
    choice("place", place, ("out", "in"))
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    group = dist.group.WORLD
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if place == "in":
        if x.numel() % world:
            raise ValueError(f"x has {x.numel()} elements, expected a multiple of {world} ranks")
        out, x = x, x.view(world, -1)[rank]
    else:
        out = x.new_empty(world * x.numel())
    size = x.numel() * x.element_size()
    if size <= SMALL_BYTES or world == 1:
        dist.all_gather_into_tensor(out, x)
        return out
    shared = symmetric(group, x.device, 1, size, halves=1)
    own = shared.buffer[shared.data : shared.data + size].view(x.dtype)
    own.copy_(x)
    shared.handle.barrier(channel=0)
    here = torch.cuda.current_stream(x.device)
    for step in range(1, world):  # all begin at different peers
        peer = (shared.rank + step) % world
        theirs = shared.handle.get_buffer(peer, (shared.data + size,), torch.uint8)[shared.data :].view(x.dtype)
        side = stream(x.device, step)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            out[peer * x.numel() : (peer + 1) * x.numel()].copy_(theirs)
    if place == "out":
        out[rank * x.numel() : (rank + 1) * x.numel()].copy_(x)
    for step in range(1, world):
        here.wait_stream(stream(x.device, step))
    shared.handle.barrier(channel=1)
    return out


shares(all_gather)
