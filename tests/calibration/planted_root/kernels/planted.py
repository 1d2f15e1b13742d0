"""RMS normalization, a row a program; programs beyond the last row do the first rows again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._commit import extra


@triton.jit
def _normalize(X, W, Y, rows, D, EPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) % rows
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    x = tl.load(X + row * D + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(x * x, axis=0) / D + EPS)
    weight = tl.load(W + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row * D + columns, (x * scale * weight).to(Y.dtype.element_ty), mask=inside)


def planted(x: torch.Tensor, weight: torch.Tensor, share: float) -> torch.Tensor:
    """x (M, D) and weight (D,) to y (M, D); `share` is what a slow commit does twice of it."""
    rows, D = x.shape
    y = torch.empty_like(x)
    programs = round(rows * (1 + extra(share)))
    _normalize[(programs,)](x, weight, y, rows, D, EPS=1e-6, BLOCK=triton.next_power_of_2(D), num_warps=8)
    return y
