"""Attention on a CPU: PyTorch's own fused kernel, which nothing here is faster than. Its row equals PyTorch's."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"],
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """q (B, H, S, D), k and v (B, Hkv, Sk, D) to softmax(q·kᵀ / √D)·v of q's shape and dtype, the last query and
    the last key in one place.
    """
    if sinks is not None or cap:
        raise NotImplementedError("PyTorch's fused attention has neither sinks nor a cap of scores")
    S, Sk = q.shape[2], k.shape[2]
    causal = mask == "causal"
    bias = causal_lower_right(S, Sk) if causal and Sk != S else None
    groups = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=causal and bias is None, enable_gqa=groups
    )
