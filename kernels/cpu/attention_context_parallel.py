"""Attention of one sequence over processes of a CPU: cut and gathered as on GPUs, attention by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from ..attention._context_parallel import AtOnce, Attention, Brought, gathered, merge, ring, stay


def attention_context_parallel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Literal["causal", "full"]
) -> torch.Tensor:
    """See `kernels/attention/attention_context_parallel.py`."""
    return gathered(q, k, v, mask, PARTIAL)


def attention_context_parallel_ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Literal["causal", "full"]
) -> torch.Tensor:
    """The same with K and V going round."""
    return ring(q, k, v, mask, PARTIAL)


def _scores(q: torch.Tensor, k: torch.Tensor, mask: str) -> torch.Tensor:
    """(B, H, S, Sk) in fp32 or wider: PyTorch's fused kernel keeps their log-sum-exp to itself."""
    scores = (q * q.shape[3] ** -0.5) @ _by_query_head(k, q).mT
    if mask == "causal":
        own, other = (torch.arange(x.shape[2]) for x in (q, k))
        scores = scores.masked_fill(other > own[:, None] + k.shape[2] - q.shape[2], -torch.inf)
    return scores


def _wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _by_query_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _by_key_head(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return x.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype)


def _attend(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str) -> torch.Tensor:
    wide, keys, values = _wide(q, k, v)
    scores = _scores(wide, keys, mask)
    out.copy_(scores.softmax(-1) @ _by_query_head(values, q))
    return scores.logsumexp(-1)


def _gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With P the probabilities: dV = Pᵀ·dO, dS = P ∘ (dO·Vᵀ - rowsum(O ∘ dO)), dK = dSᵀ·Q / √D, dQ = dS·K / √D."""
    g, o, wide, keys, values = _wide(grad, out, q, k, v)
    p = (_scores(wide, keys, mask) - lse[..., None]).exp()
    dp = g @ _by_query_head(values, q).mT
    ds = p * (dp - (o * g).sum(-1, keepdim=True)) * q.shape[3] ** -0.5
    dq = ds @ _by_query_head(keys, q)
    return dq.to(q.dtype), _by_key_head(ds.mT @ wide, k), _by_key_head(p.mT @ g, v)


PARTIAL = Attention(_attend, _gradients, merge)


def local() -> Callable[..., torch.Tensor]:
    """A call of the same that sends nothing but in its first call."""
    return partial(gathered, attention=PARTIAL, arriving=Brought(AtOnce()))


# What the harness asks for: the same without communication.
attention_context_parallel.local = local  # type: ignore[attr-defined]
attention_context_parallel_ring.local = lambda: partial(ring, attention=PARTIAL, send=stay)  # type: ignore[attr-defined]
