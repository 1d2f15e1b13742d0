"""What the portable kernels of attention share on the device: tiles that are read and written, which block a
program takes, how far it walks, and what a row sees.

A tile is a (rows, D) block of one head of a (B, H, S, D) tensor, whose first three strides come as a tuple.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634
LOG2E_ON_DEVICE = tl.constexpr(LOG2E)


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, batch, head, row, strides, S, D,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Rows `row` to `row + ROWS` of a head, zero beyond D and, with TAIL, beyond S.

    The products with strides are 64-bit: a tensor of 2³¹ elements is ordinary here. The part that depends on
    `row` is a scalar, the rest does not change over a loop.
    """
    if TMA:
        tile = x.load([batch, head, row, 0]).reshape([ROWS, WIDTH])
    else:
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, WIDTH)
        start = (
            x
            + batch.to(tl.int64) * strides[0]
            + head.to(tl.int64) * strides[1]
            + tl.cast(row, tl.int64) * strides[2]
        )
        pointers = start + (rows.to(tl.int64) * strides[2])[:, None] + columns[None, :]
        if TAIL:
            tile = tl.load(pointers, mask=(row + rows < S)[:, None] & (columns < D)[None, :], other=0.0)
        elif WIDTH != D:
            tile = tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_contiguous(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, tile, batch, head, row, H, S, D, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Writes a tile to a contiguous (B, H, S, D) tensor."""
    rows = row + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    start = x + (batch.to(tl.int64) * H + head) * S * D
    pointers = start + (rows.to(tl.int64) * D)[:, None] + columns[None, :]
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=(rows < S)[:, None] & (columns < D)[None, :])


@triton.jit
def store_strided(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, tile, batch, head, row, strides, S, D, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Writes a tile to a (B, H, S, D) tensor."""
    rows = row + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    start = x + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    pointers = start + (rows.to(tl.int64) * strides[2])[:, None] + columns[None, :]
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=(rows < S)[:, None] & (columns < D)[None, :])


@triton.jit
def program_place(BLOCKS, HEADS, SHARED, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(block, batch·head) of this program: heads in groups of SHARED, whose K and V stay in L2 together.

    Under a causal mask the last block has the most keys; within a group the heavy blocks go first, so that
    the light ones fill the gaps at the end.
    """
    program = tl.program_id(0)
    group = program // (SHARED * BLOCKS)
    within = program - group * SHARED * BLOCKS
    size = tl.minimum(SHARED, HEADS - group * SHARED)
    block = within // size
    if CAUSAL:
        block = BLOCKS - 1 - block
    return block, group * SHARED + within % size


@triton.jit
def walk_span(  # type: ignore[no-untyped-def]  # Triton's types are its own
    first, back, ahead, S, ROWS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """(low, clean, edge, high) of a walk over what rows `first` to `first + ROWS` see: row i sees i - back to
    i + ahead. `first` may be negative.

    The walk is from `low` to `high` in steps of STEP. Every row sees all of the steps from `clean` to `edge`;
    those before and after need a mask. All but `high`, and what lies at it, are multiples of STEP.
    """
    low = tl.maximum(first - back, 0) // STEP * STEP
    high = tl.maximum(tl.minimum(first + ROWS + ahead, S), 0)
    clean = tl.minimum(tl.cdiv(tl.maximum(first + ROWS - 1 - back, 0), STEP) * STEP, high)
    edge = tl.maximum(clean, tl.minimum(tl.maximum(first + ahead + 1, 0), S) // STEP * STEP)
    return low, clean, edge, high


@triton.jit
def seen_by(rows, columns, S, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Whether queries at places `rows` see keys `columns`, of S, which broadcast against each other."""
    # Under a causal mask keys beyond S are hidden too: they come after every row that is stored.
    seen = rows >= columns if CAUSAL else columns < S
    if WINDOW:
        seen = seen & (rows < columns + WINDOW)
        if not CAUSAL:
            seen = seen & (columns < rows + WINDOW)
    return seen


@triton.jit
def capped(scores, scale, CAP: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(scores, slope): CAP · tanh(score / CAP) of scores that `scale`, with its log₂e, makes those of base 2, in
    the same units, and its derivative. tanh(x) = 1 - 2 / (1 + e^2x), in base 2 as well; near 0, where that has few
    digits left, x - x³ / 3 + 2 x⁵ / 15.
    """
    twice = scores * (scale * (2.0 / CAP))
    x = twice * (0.5 / LOG2E_ON_DEVICE)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0)))
    level = tl.where(square < 0.01, near, 1.0 - 2.0 / (1.0 + tl.exp2(twice)))
    return level * (CAP * LOG2E_ON_DEVICE / scale), 1.0 - level * level
