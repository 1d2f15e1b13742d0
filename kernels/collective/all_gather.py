"""All-gather: small and middle arrays by kernels over peer pointers (`_exchange`), larger ones by copy engines.

Each rank pulls its peers' shares, one after the other in the order of a ring, beside the copy of its own. Copies
between peers take no multiprocessor and fill a link better than loads and stores do. The shares lie in symmetric
memory; ranks meet once they are there (more than two ranks once a first part is and once the rest is), and again
once all have pulled, so that the next call may lay its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .._common import FLOATING, check, choice
from ._exchange import TURN, WORDS_BYTES, exchanged, pushed, pushed_memory, pushes, words_memory
from ._peers import Peers
from ._sharded import gather_into
from ._symmetric import shares

PULLING = 1
"""The stream of copies."""
LEAD = 4
"""Which part of a share peers can begin with, of more than two ranks. Of two they took .57 ms so for 256 MiB
(`20261129-232536-0d96`), and .47 with all of it (`20261129-200344-b173`).
"""


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
    whole = out.numel() * out.element_size()
    if world == 1 or not whole:
        dist.all_gather_into_tensor(out, x)
    elif whole <= WORDS_BYTES:
        exchanged(x, out, words_memory(x, group, "all_gather"))
    elif pushes(x.numel(), x.element_size(), world):
        pushed(x, out, pushed_memory(x, group, "all_gather"))
    else:
        pulled(x, out, Peers.of(group, x.device, whole // world, "all_gather"))
    return out


all_gather.into = gather_into  # type: ignore[attr-defined]  # beside a step's computation, as FSDP2 asks
shares(all_gather)


def pulled(x: torch.Tensor, out: torch.Tensor, peers: Peers) -> None:
    """As `all_gather`, by copy engines; `x` may be its rank's share of `out`."""
    parts = out.view(peers.world, -1)
    own = peers.place(peers.rank, x.shape, x.dtype)
    near, *far = peers.others()
    # Peers begin once they can read so much; the rest is laid meanwhile.
    lead = x.numel() // LEAD // TURN * TURN if far else x.numel()
    own[:lead].copy_(x[:lead])
    peers.meet(0)
    with peers.beside(PULLING):
        parts[near][:lead].copy_(peers.place(near, x.shape, x.dtype)[:lead])
    if far:
        own[lead:].copy_(x[lead:])
        peers.meet(1)
        # Three at once, each on a stream of its own, had a bus bandwidth of 206 GB/s over four H200; one after the
        # other they have 327 (the same two runs).
        with peers.beside(PULLING):
            parts[near][lead:].copy_(peers.place(near, x.shape, x.dtype)[lead:])
            for peer in far:
                parts[peer].copy_(peers.place(peer, x.shape, x.dtype))
    if parts[peers.rank].data_ptr() != x.data_ptr():
        parts[peers.rank].copy_(x)
    peers.wait(PULLING)
    peers.meet(2)  # all have pulled: the next call may lay its own
