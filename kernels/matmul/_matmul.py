"""Matrix products on any GPU: one tile of the output a program, in Triton.

Hopper has a kernel of its own (`_matmul_hopper.py`). This one takes what that leaves: other GPUs, and fp32 (as
TF32).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, INTERPRETING, cdiv, on, sigmoid, tf32

TENSOR = tl.constexpr("tensor")
ROW = tl.constexpr("row")
BLOCK = 128
"""Steps of K that share a scale in the kinds of `HEIGHTS`, and rows that do in some."""
HEIGHTS = {"block": (1, BLOCK), "group": (1, 1), "tile": (BLOCK, BLOCK)}
"""Rows of a and of b that share a scale, by kind of those for each `BLOCK` steps of K."""


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a program's tile, the K of a step, and what is computed of it.

    `section` rows of tiles are computed column by column, which keeps the operands' tiles in L2. `scales` is "",
    "tensor", "row" or one of HEIGHTS. `even`: K is a multiple of the step. `adds`: the product is added to what
    the output holds.
    """

    rows: int
    columns: int
    step: int
    section: int = 8
    gated: bool = False
    a_turned: bool = False
    b_turned: bool = False
    scales: str = ""
    bias: bool = False
    even: bool = True
    adds: bool = False

    @property
    def heights(self) -> tuple[int, int]:
        """Rows of a and of b that share the scale of a step; none where scales are of all of K."""
        return HEIGHTS.get(self.scales, (0, 0))


@triton.jit
def place(row_tiles, column_tiles, SECTION: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(row, column) of a program's tile: sections of rows of tiles, of each one column after the other."""
    tile = tl.program_id(0)
    first = tile // (SECTION * column_tiles) * SECTION
    nth = tile - first * column_tiles
    height = tl.minimum(SECTION, row_tiles - first)
    return first + nth % height, nth // height


@triton.jit
def sums(at, scale_at, K, c: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(A · Bᵀ in fp32, A · B₂ᵀ of a gate's other factor or the same) of a tile.

    `at`: pointers to the tile's first step of A and its next, the same of B, and how far B₂ lies behind B.
    `scale_at`: pointers to the scales of A's rows and the next step's, the same of B, and how far B₂'s lie behind.
    """
    a_at, a_next, b_at, b_next, other = at
    a_scale_at, a_step, b_scale_at, b_step, other_scale = scale_at
    ROWS: tl.constexpr = c.rows
    COLUMNS: tl.constexpr = c.columns
    STEP: tl.constexpr = c.step
    depth = tl.arange(0, STEP)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = acc
    for k in range(0, tl.cdiv(K, STEP)):
        if c.even:
            x = tl.load(a_at)
            y = tl.load(b_at)
        else:
            left = K - k * STEP
            x = tl.load(a_at, depth[None, :] < left, 0.0)
            y = tl.load(b_at, depth[:, None] < left, 0.0)
        if INTERPRETING:  # which multiplies the bits of 16-bit numbers
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        if c.heights[0]:
            # acc += (A @ B.T) · a_scale · b_scale, of the 128 steps of K that this one is in
            block = k * STEP // 128
            a_scale = tl.load(a_scale_at + block * a_step)
            b_scale = tl.load(b_scale_at + block * b_step)
            acc += tl.dot(x, y) * (a_scale[:, None] * b_scale[None, :])
        else:
            acc = tl.dot(x, y, acc, input_precision=tf32())  # acc += A @ B.T
        if c.gated:
            z = tl.load(b_at + other) if c.even else tl.load(b_at + other, depth[:, None] < K - k * STEP, 0.0)
            if INTERPRETING:
                z = z.to(tl.float32)
            if c.heights[0]:
                b_scale = tl.load(b_scale_at + other_scale + block * b_step)
                up += tl.dot(x, z) * (a_scale[:, None] * b_scale[None, :])  # up += (A @ B₂.T) · scales
            else:
                up = tl.dot(x, z, up, input_precision=tf32())  # up += A @ B₂.T
        a_at += a_next
        b_at += b_next
    return acc, up


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    a, b, out, scale_a, scale_b, bias, M, N, K, a_lead, b_lead, a_row, a_step, b_row, b_step, c: tl.constexpr
):
    """out (M, N) = a (M, K) · b (N, K)ᵀ. `a_lead` and `b_lead` are the strides that are not 1."""
    ROWS: tl.constexpr = c.rows
    COLUMNS: tl.constexpr = c.columns
    STEP: tl.constexpr = c.step
    row_tile, column_tile = place(tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS), c.section)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    # Rows beyond the last are another's, computed once more and not written.
    a_rows = (rows % M).to(tl.int64)
    b_rows = (columns % N).to(tl.int64)
    depth = tl.arange(0, STEP)
    if c.a_turned:
        a_at = a + a_rows[:, None] + depth[None, :] * a_lead
        a_next = STEP * a_lead
    else:
        a_at = a + a_rows[:, None] * a_lead + depth[None, :]
        a_next = STEP
    if c.b_turned:
        b_at = b + b_rows[None, :] + depth[:, None] * b_lead
        b_next = STEP * b_lead
        other = tl.cast(N, tl.int64)
    else:
        b_at = b + b_rows[None, :] * b_lead + depth[:, None]
        b_next = STEP
        other = tl.cast(N, tl.int64) * b_lead
    a_scale_at = scale_a
    b_scale_at = scale_b
    if c.heights[0]:
        a_scale_at = scale_a + a_rows // c.heights[0] * a_row
        b_scale_at = scale_b + b_rows // c.heights[1] * b_row
    acc, up = sums((a_at, a_next, b_at, b_next, other), (a_scale_at, a_step, b_scale_at, b_step, 0), K, c)
    if c.scales == TENSOR:
        acc *= tl.load(scale_a) * tl.load(scale_b)
    if c.scales == ROW:
        acc *= tl.load(scale_a + a_rows * a_row)[:, None] * tl.load(scale_b + b_rows * b_row)[None, :]
    if c.bias:
        acc += tl.load(bias + b_rows).to(tl.float32)[None, :]
    if c.gated:
        acc = acc * sigmoid(acc) * up
    at = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if c.adds:
        acc += tl.load(at, inside, 0.0).to(tl.float32)
    tl.store(at, acc.to(out.dtype.element_ty), inside)


def tile(M: int, N: int, itemsize: int, scales: str, gated: bool) -> tuple[Tile, int, int]:
    """(the tile for a product of this size, warps, stages). All fit the 99 KiB of shared memory that Ada has."""
    blocked = scales in HEIGHTS
    if INTERPRETED:
        return Tile(16, 32, 128 if blocked else 32), 4, 1
    step = {1: 128, 2: 64, 4: 32}[itemsize]
    if M <= 16:
        return Tile(16, 64 if gated else 128, step), 4, 3
    if M <= 64 or N <= 64:
        return Tile(64, 64 if gated else 128, step), 4, 3
    return Tile(128, 64 if gated else 128, step), 8 if blocked else 4, 2 if blocked else 3


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    gated: bool = False,
    scales: str = "",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    adds: bool = False,
) -> None:
    """out (M, N) = a (M, K) · b (N, K)ᵀ with scales as `_matmul_hopper.multiply` takes them; `adds`: out +="""
    (M, K), N = a.shape, out.shape[1]
    a, b = (x if 1 in x.stride() else x.contiguous() for x in (a, b))
    a_turned, b_turned = a.stride(1) != 1, b.stride(1) != 1
    chosen, warps, stages = tile(M, N, a.element_size(), scales, gated)
    constants = Tile(
        chosen.rows, chosen.columns, chosen.step, chosen.section, gated, a_turned, b_turned, scales,
        bias is not None, K % chosen.step == 0, adds,
    )  # fmt: skip
    strides = [0, 0, 0, 0]
    if scale_a is not None and scale_b is not None:
        strides = [x.stride(i) if x.dim() > i else 0 for x in (scale_a, scale_b) for i in (0, 1)]
    with on(a):
        _kernel[(cdiv(M, chosen.rows) * cdiv(N, chosen.columns),)](
            a, b, out, out if scale_a is None else scale_a, out if scale_b is None else scale_b,
            out if bias is None else bias, M, N, K,
            a.stride(0 if not a_turned else 1), b.stride(0 if not b_turned else 1), *strides, constants,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
