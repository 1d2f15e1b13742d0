"""Products of 8-bit floats on a CPU: widened to bf16 with their scales by loops of Inductor's, then oneDNN's.

CPUs multiply no 8-bit floats. Every E4M3 number is one of bf16; its product with a scale is rounded to bf16 once.
Processors without products in bf16 compute in fp32.
"""

from __future__ import annotations

import torch

BLOCK = 128

HEIGHTS = {"block": (1, BLOCK), "group": (1, 1), "tile": (BLOCK, BLOCK)}
"""Rows of a and of b's transpose that share a scale, by recipe with scales for each 128 of K."""


@torch.compile(dynamic=False)
def _widened(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x.float() * scale).to(dtype)


def _scales(scale: torch.Tensor, shape: torch.Size, height: int) -> torch.Tensor:
    """A scale for each number, or one that broadcasts."""
    if height == 0:
        return scale
    return scale.repeat_interleave(height, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


def fp8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    recipe: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a (M, K) and b (K, N) in E4M3, scales as `kernels/matmul/fp8_matmul.py` says, to (a·sa) @ (b·sb), bf16, and
    a bias (N,) in bf16.
    """
    of_a, of_b = HEIGHTS.get(recipe, (0, 0))
    dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    wide_a = _widened(a, _scales(scale_a, a.shape, of_a), dtype)
    # b is the transpose of a weight that lies row by row, and so is what it is widened to.
    wide_b = _widened(b.t(), _scales(scale_b.t(), b.t().shape, of_b), dtype).t()
    out = wide_a @ wide_b if bias is None else torch.addmm(bias.to(dtype), wide_a, wide_b)
    return out.bfloat16()
