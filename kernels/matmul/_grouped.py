"""Products of groups of rows, each with a weight of its own (E, N, K), on any GPU, in Triton.

Only rows are grouped: N and K are the same in all groups, as in a mixture of experts. There are three ways to say
which rows are whose:

* contiguous: rows of a group follow each other, and each group begins at a multiple of 128 rows (DeepGEMM's
  layout);
* masked: each group has memory for the most rows that it may have, and a number of them that count (DeepGEMM's);
* listed: a list names the rows of each tile, so that rows stay where they are: a gather and a scatter in the
  product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, cdiv, on, sigmoid
from ._matmul import HEIGHTS, place, sums

ALIGNED = 128
"""Rows at whose multiples contiguous groups begin."""

LARGEST = 448.0
"""E4M3's largest number."""

CONTIGUOUS = tl.constexpr("contiguous")
MASKED = tl.constexpr("masked")
LISTED = tl.constexpr("listed")


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a program's tile, the K of a step, and what is computed of it.

    `share`: places of a list that share a row of A. `scales` is "", "row" or "block". `weighted`: the result is
    multiplied by a number of its row. `quantized`: the result is E4M3 with a scale for 128 columns, a tile's.
    `limit`: of gate and up where their product is gpt-oss's, 0 for silu(gate) · up.
    """

    kind: str
    rows: int
    columns: int
    step: int
    share: int = 1
    gated: bool = False
    scales: str = ""
    weighted: bool = False
    quantized: bool = False
    even: bool = True
    section: int = 8
    limit: float = 0.0

    @property
    def heights(self) -> tuple[int, int]:
        """Rows of A and of B that share the scale of a step; none where scales are of all of K."""
        return HEIGHTS.get(self.scales, (0, 0))


@triton.jit
def _clamped(gate, up, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """gate · sigmoid(1.702 · gate) · (up + 1) of gate up to the limit and up within both; what is NaN stays so."""
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate * sigmoid(1.702 * gate) * (up + 1.0)


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    a, b, out, scales, lists, sizes, a_strides, b_strides, out_strides, LARGEST: tl.constexpr, c: tl.constexpr
):
    """out = A · Bᵀ of each tile's group, or silu(A · Bᵀ) · (A · B₂ᵀ), with scales, a weight of each row, or
    quantized.

    `scales`: of A, of B, of the result, and the rows' weights. `lists`: each tile's group, contiguous: each row's,
    masked: each group's rows; and each tile's rows. `sizes`: tiles of rows, rows (masked: of a group), N, K.
    Strides: of a group, of a row, and of scales those of a group, a row and a step of 128.
    """
    scale_a, scale_b, out_scale, weights = scales
    group_of, row_of = lists
    tiles, M, N, K = sizes
    ROWS: tl.constexpr = c.rows
    COLUMNS: tl.constexpr = c.columns
    STEP: tl.constexpr = c.step
    tile, column_tile = place(tiles, tl.cdiv(N, COLUMNS), c.section)
    if c.kind == MASKED:
        each = tl.cdiv(M, ROWS)
        group = tile // each
        rows = tile % each * ROWS + tl.arange(0, ROWS)
        count = tl.load(group_of + group)
        if tile % each * ROWS >= count:
            return
        there = rows < count
    else:
        group = tl.load(group_of + tile * (ROWS if c.kind == CONTIGUOUS else 1))
        if group < 0:
            return
        rows = tile * ROWS + tl.arange(0, ROWS)
        there = rows < M
        if c.kind == LISTED:
            rows = tl.load(row_of + rows)
            there = rows >= 0
    group = group.to(tl.int64)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    # Rows and columns that are not there are the first ones, computed once more and not written.
    a_rows = (tl.where(there, rows, 0) // c.share).to(tl.int64)
    b_rows = (columns % N).to(tl.int64)
    depth = tl.arange(0, STEP)
    a_at = a + group * a_strides[0] + a_rows[:, None] * a_strides[1] + depth[None, :]
    b_at = b + group * b_strides[0] + b_rows[None, :] * b_strides[1] + depth[:, None]
    a_scale_at = scale_a + group * a_strides[2] + a_rows * a_strides[3]
    b_scale_at = scale_b + group * b_strides[2]
    other_scale = tl.cdiv(N, 128) * b_strides[3]
    if c.heights[0]:
        b_scale_at += b_rows // c.heights[1] * b_strides[3]
    acc, up = sums(
        (a_at, STEP, b_at, STEP, tl.cast(N, tl.int64) * b_strides[1]),
        (a_scale_at, a_strides[4], b_scale_at, b_strides[4], other_scale), K, c,
    )  # fmt: skip
    if c.scales == "row":
        acc *= tl.load(a_scale_at)[:, None] * tl.load(b_scale_at + b_rows * b_strides[3])[None, :]
    if c.gated:
        acc = _clamped(acc, up, c.limit) if c.limit > 0 else acc * sigmoid(acc) * up  # silu(g) · u
    out_rows = rows.to(tl.int64)
    if c.weighted:
        acc *= tl.load(weights + out_rows, there, 0.0)[:, None]
    inside = there[:, None] & (columns < N)[None, :]
    if c.quantized:
        largest = tl.maximum(tl.max(tl.where(inside, tl.abs(acc), 0.0), 1), 1e-30)
        tl.store(out_scale + out_rows * out_strides[2] + column_tile * out_strides[3], largest / LARGEST, there)
        acc *= (LARGEST / largest)[:, None]
    at = out + group * out_strides[0] + out_rows[:, None] * out_strides[1] + columns[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), inside)


def tile_rows(each: float) -> int:
    """Rows of a tile where a group has about `each`."""
    if INTERPRETED:
        return 16
    return 16 if each <= 16 else 64 if each <= 96 else 128


def _tile(kind: str, rows: int, itemsize: int, scales: str, gated: bool, quantized: bool) -> tuple[Tile, int, int]:
    """(the tile, warps, stages). All fit the 99 KiB of shared memory that Ada has. Not tuned on a device yet."""
    step = 128 if scales else 64 if itemsize == 2 else 32
    if INTERPRETED:
        return Tile(kind, rows, 128 if quantized else 32, 128 if scales == "block" else 32), 4, 1
    columns = 64 if gated and not quantized else 128
    stages = 2 if (rows == 128 and (gated or scales)) or quantized else 3
    return Tile(kind, rows, columns, step), 8 if rows == 128 else 4, stages


@dataclass(frozen=True)
class Rows:
    """Which rows are whose: a kind, tiles of rows, of how many rows each, and the lists that the kind has."""

    kind: str
    tiles: int
    height: int
    group_of: torch.Tensor
    row_of: torch.Tensor | None = None
    share: int = 1


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    rows: Rows,
    scales: str = "",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    gated: bool = False,
    limit: float = 0.0,
    weights: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> None:
    """out (T, N) = a (T, K) · b (E, N, K)ᵀ by groups, `gated` b (E, 2N, K); masked: out (E, M, N) of a (E, M, K).

    Scales are fp32: "row" (T, 1) and (E, N, 1), "block" (T, ⌈K / 128⌉) and (E, ⌈N / 128⌉, ⌈K / 128⌉), gated (E,
    2 · ⌈N / 128⌉, …), masked (E, M, …) in the place of (T, …). With `out_scale` (T, ⌈N / 128⌉) out is E4M3. Rows
    of a and b are contiguous.
    """
    K, N, M = a.shape[-1], out.shape[-1], out.shape[-2]
    chosen, warps, stages = _tile(rows.kind, rows.height, a.element_size(), scales, gated, out_scale is not None)
    constants = replace(
        chosen, share=rows.share, gated=gated, scales=scales, weighted=weights is not None,
        quantized=out_scale is not None, even=K % chosen.step == 0, limit=limit,
    )  # fmt: skip
    a_strides = (*strides(a)[:2], *strides(scale_a))
    b_strides = (*strides(b)[:2], *strides(scale_b))
    out_strides = (*strides(out)[:2], *strides(out_scale)[1:])
    given = tuple(out if x is None else x for x in (scale_a, scale_b, out_scale, weights))
    with on(a):
        _kernel[(rows.tiles * cdiv(N, chosen.columns),)](
            a, b, out, given, (rows.group_of, rows.group_of if rows.row_of is None else rows.row_of),
            (rows.tiles, M, N, K), a_strides, b_strides, out_strides, LARGEST, constants,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip


def strides(x: torch.Tensor | None) -> tuple[int, int, int]:
    """How far apart groups, if there are any, rows, and columns lie."""
    if x is None:
        return (0, 0, 0)
    return (x.stride(0) if x.dim() == 3 else 0), x.stride(-2), x.stride(-1)
