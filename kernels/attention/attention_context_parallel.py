"""Attention of one sequence over the GPUs of a host: K and V gathered, `attention` on each of a rank's two chunks.

Copy engines bring K and V while the early chunk is attended to. In the backward pass gradients in K and V are
added up over ranks while those of each chunk with itself are computed.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from ..collective._peers import Peers
from ..collective._symmetric import buffer_bytes
from ._context_parallel import Attention, gathered, ring
from ._pulled import Pulled, shared_bytes
from .attention import attention, attention_gradients, attention_into

PARTIAL = Attention(attention_into, attention_gradients)  # type: ignore[arg-type]  # the mask is a literal


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
    kept = _kept(q, k, v)
    peers = Peers.of(dist.group.WORLD, k.device, shared_bytes(k, dist.get_world_size(), kept))
    return gathered(q, k, v, mask, PARTIAL, Pulled(peers, kept))


def _kept(*inputs: torch.Tensor) -> bool:
    """Whether a backward pass may come."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def shared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str) -> int:
    """Bytes of each rank's memory that all can read and write in such a call."""
    world = dist.get_world_size()
    return 0 if world == 1 else buffer_bytes(world, 1, shared_bytes(k, world, _kept(q, k, v)), 1)


attention_context_parallel.shared = shared  # type: ignore[attr-defined]  # what the harness asks for its memory


def attention_context_parallel_ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Literal["causal", "full"]
) -> torch.Tensor:
    """The same with two pairs of chunks of K and V in memory in place of all of them, which go round."""
    if dist.get_world_size() == 1:
        raise NotImplementedError("one rank has nobody to send to: `kernelmark` is that case")
    return ring(q, k, v, mask, PARTIAL)
