"""All-gather and matrix product at once: a rank's own rows are multiplied while copy engines pull its peers'.

Every peer's rows are a product of their own, which begins when they have come. Products are cuBLAS's, as they are
written to a part of the result.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .._common import FLOATING, check
from ._peers import Peers
from ._symmetric import shares


def all_gather_matmul(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """(world · M, N): all ranks' rows a (M, K), by rank, times this rank's w (K, N); of the default process group.

    In bf16, fp16 or fp32, a contiguous, of the same shapes in all ranks. Every rank must call it. Raises TypeError
    or ValueError.
    """
    check("a", a, dtypes=FLOATING, dim=2)
    check("w", w, dtypes=(a.dtype,), dim=2, like=a)
    if w.shape[0] != a.shape[1]:
        raise ValueError(f"w has shape {tuple(w.shape)}, expected ({a.shape[1]}, N)")
    if not a.is_contiguous():
        raise ValueError("a must be contiguous")
    if dist.get_world_size() == 1:
        return torch.mm(a, w)
    return gathered_product(a, w, Peers.of(dist.group.WORLD, a.device, a.numel() * a.element_size()))


shares(all_gather_matmul)


def gathered_product(a: torch.Tensor, w: torch.Tensor, peers: Peers) -> torch.Tensor:
    """As `all_gather_matmul`, over `peers`."""
    own = peers.place(peers.rank, a.shape, a.dtype)
    own.copy_(a)
    out = a.new_empty(peers.world, a.shape[0], w.shape[1])
    pulled = a.new_empty(peers.world, *a.shape)
    peers.meet(0)
    before = None
    for peer in peers.others():
        with peers.beside(peer):
            if before is not None:
                peers.wait(before)  # a copy has the links to itself: several at once take longer than all in turn
            pulled[peer].copy_(peers.place(peer, a.shape, a.dtype))
        before = peer
    torch.mm(a, w, out=out[peers.rank])
    for peer in peers.others():
        peers.wait(peer)
        torch.mm(pulled[peer], w, out=out[peer])
    peers.meet(1)  # all have pulled: the next call may lay its own
    return out.flatten(0, 1)
