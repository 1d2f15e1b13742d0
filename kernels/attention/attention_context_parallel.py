"""Attention of one sequence over the GPUs of a host: K and V gathered by copy engines, and one kernel that takes
chunks as they come.

That is the kernel for Hopper with tiles of up to 128 columns, for chunks of whole blocks of 128 keys, outside of
CUDA graphs (`_as_they_come`). Others attend by `attention` with each of a rank's two chunks, and keys come while
the early one is attended to. In the backward pass gradients in K and V are added up over ranks while those of each
chunk with itself are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from ..collective._peers import Peers
from ..collective._symmetric import shares
from ._as_they_come import attention_as_they_come, chunks, pieces
from ._context_parallel import Arriving, Attention, Brought, gathered, ring, stay
from ._merge import merge
from ._pulled import Pulled, shared_bytes
from .attention import attention, attention_gradients, attention_into

PARTIAL = Attention(
    attention_into,  # type: ignore[arg-type]  # the mask is a literal
    attention_gradients,
    merge,
    attention_as_they_come,
)


def attention_context_parallel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Literal["causal", "full"]
) -> torch.Tensor:
    """This rank's part of attention: q (B, H, S/P, D), k and v (B, Hkv, S/P, D) hold chunks r and 2·P - 1 - r of
    2·P chunks of the sequence, r the rank in the default process group of P; the output lies as q does.

    Every rank must call it, its inputs requiring gradients if any rank's do, and run backward if any does. Dtypes,
    errors and gradients are those of `attention`.
    """
    if dist.get_world_size() == 1:
        return attention(q, k, v, mask)
    return _in_parts(q, k, v, mask, *_pulled(q, k, v, mask))


def _pulled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str) -> tuple[Pulled, int]:
    """How keys come, and in how many parts of their heads. Those say how keys lie where other ranks read them: so
    they go by shapes alone, which are the same in all ranks, and not by what this rank's kernel takes.
    """
    kept = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))  # a backward pass may come
    peers = Peers.of(dist.group.WORLD, k.device, shared_bytes(k, dist.get_world_size(), kept))
    B, heads, rows, D = k.shape
    counted = chunks(q, mask, peers.rank, peers.world)
    return Pulled(peers, kept, counted), pieces(B, heads, rows // 2, D, k.element_size())


def _in_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str, arriving: Arriving, parts: int
) -> torch.Tensor:
    """As `gathered`, with heads in parts that come one after the other, as sequences do."""
    if parts == 1:
        return gathered(q, k, v, mask, PARTIAL, arriving)
    found = gathered(*(x.unflatten(1, (parts, -1)).flatten(0, 1) for x in (q, k, v)), mask, PARTIAL, arriving)
    return found.unflatten(0, (-1, parts)).flatten(1, 2)


def local() -> Callable[..., torch.Tensor]:
    """A call of the same that sends nothing but in its first call."""
    brought: list[tuple[Brought, int]] = []

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str) -> torch.Tensor:
        if not brought:
            pulled, parts = _pulled(q, k, v, mask)
            brought.append((Brought(pulled), parts))
        return _in_parts(q, k, v, mask, *brought[0])

    return call


attention_context_parallel.local = local  # type: ignore[attr-defined]  # the same without communication
shares(attention_context_parallel)


def attention_context_parallel_ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Literal["causal", "full"]
) -> torch.Tensor:
    """The same with two pairs of chunks of K and V in memory in place of all of them, which go round."""
    if dist.get_world_size() == 1:
        raise NotImplementedError("one rank has nobody to send to: `kernelmark` is that case")
    return ring(q, k, v, mask, PARTIAL)


attention_context_parallel_ring.local = lambda: partial(ring, attention=PARTIAL, send=stay)  # type: ignore[attr-defined]
