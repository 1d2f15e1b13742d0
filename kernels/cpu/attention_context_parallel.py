"""Attention of one sequence over processes of a CPU: cut and gathered as on GPUs, attention by PyTorch."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ..attention._context_parallel import gathered, ring


def attention_context_parallel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Literal["causal", "full"], form: str = "gathered"
) -> torch.Tensor:
    """See `kernels/attention/attention_context_parallel.py`."""
    return ring(q, k, v, mask, _attend_lse) if form == "ring" else gathered(q, k, v, mask, _attend)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str) -> torch.Tensor:
    groups = q.shape[1] != k.shape[1]
    bias = causal_lower_right(q.shape[2], k.shape[2]) if mask == "causal" else None
    return scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=groups)


def _attend_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str) -> tuple[torch.Tensor, torch.Tensor]:
    """In plain steps, for the log-sum-exp: PyTorch's fused kernel keeps it to itself."""
    groups = q.shape[1] // k.shape[1]
    scores = (q * q.shape[3] ** -0.5) @ k.repeat_interleave(groups, 1).mT
    if mask == "causal":
        own, other = (torch.arange(x.shape[2]) for x in (q, k))
        scores = scores.masked_fill(other > own[:, None] + k.shape[2] - q.shape[2], -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(groups, 1), scores.logsumexp(-1)
