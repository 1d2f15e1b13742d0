"""Attention of one sequence over the GPUs of a host: K and V gathered, `attention` on each of a rank's two chunks.

Copy engines bring K and V while the early chunk is attended to. In the backward pass gradients in K and V are
added up over ranks while those of each chunk with itself are computed.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from ..collective._peers import Peers
from ._context_parallel import Attention, gathered, ring
from ._pulled import Pulled
from .attention import attention, attention_gradients

PARTIAL = Attention(
    lambda *given: attention(*given, return_lse=True),  # type: ignore[arg-type]  # it takes the mask as a literal
    attention_gradients,
)


def attention_context_parallel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Literal["causal", "full"]
) -> torch.Tensor:
    """This rank's part of attention: q (B, H, S/P, D), k and v (B, Hkv, S/P, D) hold chunks r and 2·P - 1 - r of
    2·P chunks of the sequence, r the rank in the default process group of P; the output lies as q does.

    Every rank must call it, and run backward if any does. Dtypes, errors and gradients are those of `attention`.
    """
    if dist.get_world_size() == 1:
        return attention(q, k, v, mask)
    pulled = Pulled(Peers.of(dist.group.WORLD, k.device, 2 * k.numel() * k.element_size()))
    return gathered(q, k, v, mask, PARTIAL, pulled)


def attention_context_parallel_ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Literal["causal", "full"]
) -> torch.Tensor:
    """The same with two pairs of chunks of K and V in memory in place of all of them, which go round."""
    if dist.get_world_size() == 1:
        raise NotImplementedError("one rank has nobody to send to: `kernelmark` is that case")
    return ring(q, k, v, mask, PARTIAL)
