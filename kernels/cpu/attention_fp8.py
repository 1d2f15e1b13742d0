"""Attention of 8-bit floats on a CPU: widened to fp32 by a loop of Inductor's, then PyTorch's fused kernel.

CPUs multiply no 8-bit floats. Every E4M3 number is one of fp32, so that the only rounding is that of the result.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import scaled_dot_product_attention


@torch.compile(dynamic=False)
def _widened(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.float() * scale[..., None, None]


def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    mask: Literal["causal", "full"],
) -> torch.Tensor:
    """q (B, H, S, D), k and v (B, Hkv, S, D) in E4M3 and their scales (B, H) and (B, Hkv), fp32, to
    softmax(q·kᵀ / √D)·v (B, H, S, D) in bf16.
    """
    q, k, v = (_widened(x, scale) for x, scale in ((q, q_scale), (k, k_scale), (v, v_scale)))
    groups = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=mask == "causal", enable_gqa=groups).bfloat16()
