"""Latent attention of a prompt on a CPU: PyTorch's attention, whose values may have a dimension of their own."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention_mla(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Literal["causal", "full"]
) -> torch.Tensor:
    """q and k (B, H, S, D), v (B, H, S, Dv) to softmax(q·kᵀ / √D)·v, (B, H, S, Dv)."""
    return scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")
