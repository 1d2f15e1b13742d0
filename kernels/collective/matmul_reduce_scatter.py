"""Matrix product and reduce-scatter at once: those for peers first, pushed by copy engines while the next runs.

A rank's rows of the sum are added up in fp32 once all ranks' products for it have come. Products are cuBLAS's, as
they are written to where they are sent from.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .._common import FLOATING, check
from ._peers import Peers
from ._symmetric import shares

PUSHING = 1
"""The stream of copies: one after the other, as several at once take longer than all in turn."""


def matmul_reduce_scatter(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """(M / world, N): this rank's rows of the sum over ranks of a (M, K) @ w (K, N), of the default process group.

    In bf16, fp16 or fp32, of the same shapes in all ranks, M a multiple of their number. Every rank's product is
    rounded once, and their sum. Every rank must call it. Raises TypeError or ValueError.
    """
    check("a", a, dtypes=FLOATING, dim=2)
    check("w", w, dtypes=(a.dtype,), dim=2, like=a)
    if w.shape[0] != a.shape[1]:
        raise ValueError(f"w has shape {tuple(w.shape)}, expected ({a.shape[1]}, N)")
    world = dist.get_world_size()
    if a.shape[0] % world:
        raise ValueError(f"a has {a.shape[0]} rows, expected a multiple of {world} ranks")
    if world == 1:
        return torch.mm(a, w)
    return scattered_product(
        a, w, Peers.of(dist.group.WORLD, a.device, a.shape[0] * w.shape[1] * a.element_size())
    )


shares(matmul_reduce_scatter)


def scattered_product(a: torch.Tensor, w: torch.Tensor, peers: Peers) -> torch.Tensor:
    """As `matmul_reduce_scatter`, over `peers`."""
    shape = peers.world, a.shape[0] // peers.world, w.shape[1]
    rows = a.unflatten(0, shape[:2])
    products = a.new_empty(shape)
    for peer in peers.others():
        torch.mm(rows[peer], w, out=products[peer])
        with peers.beside(PUSHING):
            peers.place(peer, shape, a.dtype)[peers.rank].copy_(products[peer])
    arrived = peers.place(peers.rank, shape, a.dtype)
    torch.mm(rows[peers.rank], w, out=arrived[peers.rank])
    peers.wait(PUSHING)
    peers.meet(0)  # all have pushed
    out = arrived.sum(0)  # summed in fp32, and rounded once
    peers.meet(1)  # all have read: the next call may push
    return out
