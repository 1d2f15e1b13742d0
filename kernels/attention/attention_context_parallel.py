"""Attention of one sequence over the GPUs of a host: K and V gathered, `attention` on each of a rank's two chunks.

Copy engines bring K and V while the early chunk is attended to, or, where more is to come than that would hide,
while a chunk meets its own keys (`_own_first`). In the backward pass gradients in K and V are added up over ranks
while those of each chunk with itself are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from ..collective._peers import Peers
from ..collective._symmetric import shares
from ._context_parallel import Attention, Brought, gathered, ring, stay
from ._merge import merge
from ._own_first import pays
from ._pulled import Pulled, shared_bytes
from .attention import attention, attention_gradients, attention_into

PARTIAL = Attention(attention_into, attention_gradients, merge)  # type: ignore[arg-type]  # the mask is a literal


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
    return gathered(q, k, v, mask, PARTIAL, _pulled(q, k, v), _own_first(q, k))


def _pulled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pulled:
    kept = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))  # a backward pass may come
    return Pulled(Peers.of(dist.group.WORLD, k.device, shared_bytes(k, dist.get_world_size(), kept)), kept)


def _own_first(q: torch.Tensor, k: torch.Tensor) -> bool:
    B, H, rows, D = q.shape
    return pays(B, H, k.shape[1], rows // 2, D, dist.get_world_size(), q.element_size())


def local() -> Callable[..., torch.Tensor]:
    """A call of the same that sends nothing but in its first call."""
    brought: list[Brought] = []

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str) -> torch.Tensor:
        if not brought:
            brought.append(Brought(_pulled(q, k, v)))
        return gathered(q, k, v, mask, PARTIAL, brought[0], _own_first(q, k))

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
