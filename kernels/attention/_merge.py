"""Outputs over two sets of keys made one, in place: a pass over both."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._common import cdiv, on, power_of_2

ELEMENTS = 4096
"""Of a program's tile."""


def merge(out: torch.Tensor, level: torch.Tensor, part: torch.Tensor, lse: torch.Tensor) -> None:
    """Adds attention over further keys, `part` (B, H, S, D) and its natural log-sum-exp `lse` (B, H, S), both
    contiguous, to `out` and `level` of the same shapes: by any strides, the last dimension of `out` contiguous.
    Sums are in fp32 and rounded once.
    """
    B, H, S, D = out.shape
    width = max(16, power_of_2(D))
    rows = max(1, ELEMENTS // width)
    with on(out):
        _merge[(cdiv(S, rows) * B * H,)](
            out, level, part, lse, out.stride()[:3], level.stride(), H, S, D, width, rows, num_warps=4
        )  # fmt: skip


@triton.jit
def _merge(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, level, part, lse, of_out, of_level, heads, S, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    blocks = tl.cdiv(S, ROWS)
    number = (tl.program_id(0) // blocks).to(tl.int64)
    sequence, head = number // heads, number % heads
    row = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < S
    levels = level + sequence * of_level[0] + head * of_level[1] + row * of_level[2]
    before = tl.load(levels, inside, float("-inf"))
    further = tl.load(lse + number * S + row, inside, float("-inf"))
    highest = tl.maximum(before, further)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    first, second = tl.exp(before - base), tl.exp(further - base)
    unseen = first + second == 0.0  # by a row that has zeros
    total = tl.where(unseen, 1.0, first + second)
    scale = 1.0 / total
    column = tl.arange(0, WIDTH)
    present = inside[:, None] & (column < D)[None, :]
    to = out + sequence * of_out[0] + head * of_out[1] + (row * of_out[2])[:, None] + column[None, :]
    added = part + (number * S + row)[:, None] * D + column[None, :]
    sums = tl.load(to, present, 0.0).to(tl.float32) * (first * scale)[:, None]
    sums += tl.load(added, present, 0.0).to(tl.float32) * (second * scale)[:, None]
    tl.store(to, sums.to(out.dtype.element_ty), present)
    tl.store(levels, tl.where(unseen, float("-inf"), base + tl.log(total)), inside)
