"""Latent attention of a prompt: `attention` of values of another dimension than keys."""

from __future__ import annotations

from typing import Literal

import torch

from .attention import attention


def attention_mla(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Literal["causal", "full"]
) -> torch.Tensor:
    """`attention` of q and k (B, H, S, D), v (B, H, S, Dv): (B, H, S, Dv). Dtypes, errors and gradients are those
    of `attention`.
    """
    return attention(q, k, v, mask)
