"""Attention within a sliding window: the kernels of `attention`, which start and end their walks at it."""

from __future__ import annotations

from typing import Literal

import torch

from .attention import attention


def attention_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"],
    window: int,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """`attention` of q (B, H, S, D), k and v (B, Hkv, S, D) over the keys less than `window` places away, under a
    "causal" mask none after the query. Dtypes, sinks, cap, errors and gradients are those of `attention`.
    """
    return attention(q, k, v, mask, window, sinks=sinks, cap=cap)
