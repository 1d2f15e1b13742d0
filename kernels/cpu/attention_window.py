"""Attention within a window on a CPU: PyTorch's fused kernel for pieces of queries, each with the keys it sees.

With a mask of elements alone PyTorch computes every score: all S², of which a window of W needs S · W.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import scaled_dot_product_attention

SHORTEST = 128
"""Queries of a piece, at least; else as many as the window has keys, so that half of the scores are visible."""


def attention_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"],
    window: int,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """q (B, H, S, D), k and v (B, Hkv, Sk, D) to softmax(q·kᵀ / √D)·v over the keys less than `window` places
    away, under a causal mask none after the query, the last query and key in one place; of q's shape and dtype.
    """
    if sinks is not None or cap:
        raise NotImplementedError("PyTorch's fused attention has neither sinks nor a cap of scores")
    S, Sk = q.shape[2], k.shape[2]
    shift = Sk - S
    ahead = 0 if mask == "causal" else window - 1
    parts = []
    size = max(SHORTEST, window)
    for first in range(0, S, size):
        last = min(first + size, S)
        low, high = max(0, first + shift - window + 1), min(Sk, last + shift + ahead)
        if high <= low:
            parts.append(torch.zeros_like(q[:, :, first:last]))
            continue
        distance = torch.arange(first, last)[:, None] + shift - torch.arange(low, high)
        seen = (distance < window) & (distance >= -ahead)
        blind = ~seen.any(-1, keepdim=True)
        output = scaled_dot_product_attention(
            q[:, :, first:last],
            k[:, :, low:high],
            v[:, :, low:high],
            attn_mask=seen | blind,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        parts.append(output.masked_fill(blind, 0) if shift < 0 else output)
    return torch.cat(parts, 2) if parts else torch.zeros_like(q)
