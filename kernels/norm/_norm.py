"""One computation behind three operators: normalization of rows, with or without mean, bias and residual.

Forward holds a row in registers and so reads it once. Backward runs as many programs as the device holds
at a time; each takes every n-th row, keeps its part of the weight's gradient in registers, and a second
kernel adds the parts: the order of summation is fixed, so results repeat bit by bit. Rows too long for
registers are taken in pieces, and so are those that a cache gives again for less than registers cost. Where
there are fewer long rows than multiprocessors, a row is spread over many programs, which forward hold it and meet
to exchange sums of their pieces; backward is in two launches, one for the sums, one for what they are needed for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, cdiv, dense_like, in_rows, multiprocessors, packed, power_of_2, rows
from .._grid_barrier import arrive_and_wait, phase, slots
from .._launch import Launch
from .._rows import (
    PLAIN,
    Access,
    access,
    boundary,
    get,
    get_part,
    of_columns,
    of_part,
    parts_of,
    put,
    put_part,
    same_rows,
    shift_of,
    within,
)

Norm = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""y, h = x + residual, mean, rstd = 1 / √(variance or mean square + eps)."""

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Forward x, residual, weight and bias; backward dy, dh, x and weight. Where there is none, any other tensor."""

FORWARD_LIMIT = 64 if INTERPRETED else 65536
"""Longest row in bytes that forward holds in registers: 32 numbers of 2 bytes a thread."""

PLAIN_LIMIT = 32 if INTERPRETED else 8192
"""The same without mean and residual: longer rows are read in parts, or in pieces twice, the second time from the
cache, which was quicker on an H200.
"""

PLAIN_PIECE = 16 if INTERPRETED else 8192
"""Elements of a piece of such rows: 65536 rows of 8192 numbers took 497 µs, in pieces of 4096 with masks 501."""

AGAIN = (16, 64) if INTERPRETED else (4096, 1 << 27)
"""Rows of so many numbers, in tensors of at least so many, are read again from the cache rather than held, without
a residual: quicker on an H200 for tensors of several times its cache, and slower for those that it mostly has.
"""

BACKWARD_LIMIT = 16 if INTERPRETED else 8192
"""Longest row that backward holds, where there are three numbers an element to hold."""

PREFETCH = 96 * 1024
"""Bytes of shared memory for rows that backward reads ahead."""

PIECE = 16 if INTERPRETED else 4096
"""Piece of a longer row. The interpreter has small limits, so that tests reach all paths."""

SPREAD = 32 if INTERPRETED else 32768
"""Shortest row that is spread over programs, in elements, where there are no more rows than multiprocessors."""

SPREAD_PIECES = (8, 32) if INTERPRETED else (2048, 8192)
"""Smallest and largest piece of a row that is spread."""

SPREAD_WARP = 1024
"""Elements of such a piece a warp has. 32 a thread, held as they came, leave a multiprocessor all its threads."""

SPREAD_MOST = 1024
"""Most pieces of a row whose sums one program adds."""

SPREAD_TILES = ((2, 16, 4), (4, 16, 4)) if INTERPRETED else ((8, 128, 4), (32, 128, 4))
"""Rows and columns at a time, and warps, of a program of backward that has all rows of its columns: where these are
accessed by element, and in vectors. 64 rows of 65536 numbers took 22.7 µs on an H200, in tiles of (8, 512) 40.
"""

PARTS_FROM = 8 if INTERPRETED else 64
"""Shortest row that is held in parts where its width is no power of two."""

PARTS_LIMIT = 128 if INTERPRETED else 1 << 17
"""Longest row in bytes that is held in parts: 8 of 32 warps with 16 bytes a thread."""

WHOLE_LIMIT = 32 if INTERPRETED else 16384
"""Row in bytes above which a width that is a power of two is taken in parts, too."""

MOST_PARTS = 8
"""Most parts of a row: 16 bytes a thread each."""

AHEAD = 64 if INTERPRETED else 16384
"""Longest row in bytes whose weight is read before the sums are known: it takes as many registers as the row."""

BACKWARD_PARTS_FROM = 8 if INTERPRETED else 2048
"""Width above which backward has rows in parts where that is no power of two."""

BACKWARD_LONG = 4
"""Most parts of a program of 16 warps of backward, for rows longer than a block."""


@triton.jit
def _normalize(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    outputs,
    sizes,
    strides,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
    SAVE: tl.constexpr,
    EVEN: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """ROWS whole rows a program. EVEN: of BLOCK numbers each, and no program has fewer. AGAIN: x is not held over
    the sums but read again, from the cache.
    """
    x, residual, weight, bias = inputs
    y, h, means, rstds = outputs
    N, D = sizes
    x_stride, residual_stride = strides
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = tl.full([ROWS, BLOCK], 1, tl.int1) if EVEN else (row < N)[:, None] & (col < D)[None, :]
    at = row[:, None] * D + col[None, :]
    source = x + row[:, None] * x_stride + col[None, :]
    value = tl.load(source, inside, 0.0, eviction_policy="evict_last" if AGAIN else "").to(tl.float32)
    if RESIDUAL:
        value += tl.load(residual + row[:, None] * residual_stride + col[None, :], inside, 0.0).to(tl.float32)
        rounded = value.to(h.dtype.element_ty)
        tl.store(h + at, rounded, inside)
        # y is the norm of the h that is returned, which is also what backward will see.
        value = rounded.to(tl.float32)
    # Read before the sum, which hides the wait; with a mean it would take registers (74, not 64) and so programs
    # at home at a time.
    if not CENTRED:
        w = tl.load(weight + col, col < D, 0.0, eviction_policy="evict_last").to(tl.float32)
    else:
        mean = tl.sum(value, 1) / D
        value = tl.where(inside, value - mean[:, None], 0.0)
        if SAVE:
            tl.store(means + row, mean, row < N)
    rstd = 1.0 / tl.sqrt(tl.sum(value * value, 1) / D + eps)
    if SAVE:
        tl.store(rstds + row, rstd, row < N)
    if AGAIN:
        value = tl.load(source, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
        if CENTRED:
            value -= mean[:, None]
    if CENTRED:
        w = tl.load(weight + col, col < D, 0.0, eviction_policy="evict_last").to(tl.float32)
    value = value * rstd[:, None] * w[None, :]
    if CENTRED:
        value += tl.load(bias + col, col < D, 0.0, eviction_policy="evict_last").to(tl.float32)[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), inside)


@triton.jit
def _normalize_parts(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    outputs,
    sizes,
    strides,
    eps,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
    SAVE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """ROWS whole rows a program, each held in PARTS parts of PART columns, in its own dtype.

    For widths that no power of two is near: parts have 16 bytes a thread, so that only the last is not full. The
    rows of a program lie equally to 16-byte boundaries. AHEAD: the weight is read before the sums are known.
    """
    x, residual, weight, bias = inputs
    y, h, means, rstds = outputs
    N, D = sizes
    first, row, down = same_rows(tl.program_id(0), ROWS, VECTOR, SHIFTED)
    rows = row < N
    shift = shift_of(x, first * strides[0], SHIFTED)
    source = boundary(x, first * strides[0], shift, VECTOR)
    source += tl.multiple_of(down * strides[0], [VECTOR, VECTOR])
    across = tl.multiple_of(down * D, [VECTOR, VECTOR])
    target = boundary(y, first * D, shift, VECTOR)
    target += across
    if RESIDUAL:
        other = boundary(residual, first * strides[1], shift, VECTOR)
        other += tl.multiple_of(down * strides[1], [VECTOR, VECTOR])
        total = boundary(h, first * D, shift, VECTOR)
        total += across
    end = shift + D
    held = ()
    weights = ()
    sums = tl.zeros([ROWS, PART], tl.float32)
    for i in tl.static_range(PARTS):
        col = i * PART + tl.arange(0, PART)[None, :]
        part = get_part(source, shift, end, rows, 0.0, i, PART, PARTS, VECTOR, SHIFTED)
        if RESIDUAL:
            # h = x + residual. y is the norm of the h that is returned, which is also what backward will see.
            part = part.to(tl.float32) + get_part(
                other, shift, end, rows, 0.0, i, PART, PARTS, VECTOR, SHIFTED
            ).to(tl.float32)
            part = part.to(h.dtype.element_ty)
            put_part(total, part, shift, end, rows, i, PART, PARTS, VECTOR, SHIFTED)
        held += (part,)
        value = part.to(tl.float32)
        sums += value if CENTRED else value * value
    if AHEAD:
        for i in tl.static_range(PARTS):
            col = i * PART + tl.arange(0, PART)[None, :]
            weights += (of_part(weight, shift, end, ROWS, i, PART, PARTS, VECTOR, SHIFTED),)
    mean = 0.0
    if CENTRED:
        # μ = Σ x / D, and then σ² = Σ (x - μ)² / D: Σ x² - D μ² would cancel where the mean is large.
        mean = (tl.sum(sums, 1) / D)[:, None]
        if SAVE:
            tl.store(means + row, mean, rows)
        sums = tl.zeros([ROWS, PART], tl.float32)
        for i in tl.static_range(PARTS):
            col = i * PART + tl.arange(0, PART)[None, :]
            apart = tl.where(within(col, shift, end, SHIFTED), held[i].to(tl.float32) - mean, 0.0)
            sums += apart * apart
    rstd = (1.0 / tl.sqrt(tl.sum(sums, 1) / D + eps))[:, None]
    if SAVE:
        tl.store(rstds + row, rstd, rows)
    for i in tl.static_range(PARTS):
        col = i * PART + tl.arange(0, PART)[None, :]
        if AHEAD:
            w = weights[i]
        else:
            w = of_part(weight, shift, end, ROWS, i, PART, PARTS, VECTOR, SHIFTED)
        # y = (x - μ) / √(σ² + ε) · w + b
        value = packed(held[i]).to(tl.float32)
        if CENTRED:
            value -= mean
        value = value * rstd * w.to(tl.float32)
        if CENTRED:
            value += of_part(bias, shift, end, ROWS, i, PART, PARTS, VECTOR, SHIFTED).to(tl.float32)
        put_part(target, value, shift, end, rows, i, PART, PARTS, VECTOR, SHIFTED)


@triton.jit
def _normalize_long(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    outputs,
    sizes,
    strides,
    eps,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
    SAVE: tl.constexpr,
):
    """One row a program, in pieces, twice; the second time it comes from the L2 cache.

    Each lane keeps mean and sum of squares of its own numbers (Welford), lanes are joined at the end (Chan,
    Golub and LeVeque 1979): sums of x and x² alone would cancel where the mean is large.
    """
    x, residual, weight, bias = inputs
    y, h, means, rstds = outputs
    D = sizes[1]
    row = tl.program_id(0).to(tl.int64)
    shift = shift_of(x, row * strides[0], SHIFTED)
    x = boundary(x, row * strides[0], shift, VECTOR)
    y = boundary(y, row * D, shift, VECTOR)
    if RESIDUAL:
        residual = boundary(residual, row * strides[1], shift, VECTOR)
        h = boundary(h, row * D, shift, VECTOR)
    end = shift + D
    lane = tl.arange(0, BLOCK)
    average = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(0, end, BLOCK):
        col = start + lane
        value = get(x, col, shift, end, True, 0.0, "evict_last", VECTOR, SHIFTED).to(tl.float32)
        if RESIDUAL:
            value += get(residual, col, shift, end, True, 0.0, "", VECTOR, SHIFTED).to(tl.float32)
            rounded = value.to(h.dtype.element_ty)
            put(h, col, rounded, shift, end, True, "", VECTOR, SHIFTED)
            value = rounded.to(tl.float32)
        if CENTRED:
            inside = within(col, shift, end, SHIFTED)
            count += inside.to(tl.float32)
            delta = tl.where(inside, value - average, 0.0)
            average += delta / tl.maximum(count, 1.0)
            squares += delta * (value - average)
        else:
            squares += value * value
    total = tl.sum(squares, 0)
    mean = 0.0
    if CENTRED:
        # μ = Σ nᵢ μᵢ / D and D σ² = Σ Mᵢ + nᵢ (μᵢ - μ)² over lanes.
        mean = tl.sum(average * count, 0) / D
        apart = average - mean
        total += tl.sum(count * apart * apart, 0)
        if SAVE:
            tl.store(means + row, mean)
    rstd = 1.0 / tl.sqrt(total / D + eps)
    if SAVE:
        tl.store(rstds + row, rstd)
    if RESIDUAL:
        # Other threads of this program wrote what is read back.
        tl.debug_barrier()
    for start in range(0, end, BLOCK):
        col = start + lane
        if RESIDUAL:
            value = get(h, col, shift, end, True, 0.0, "", VECTOR, SHIFTED).to(tl.float32)
        else:
            value = get(x, col, shift, end, True, 0.0, "evict_first", VECTOR, SHIFTED).to(tl.float32)
        # y = (x - μ) / √(σ² + ε) · w + b
        w = of_columns(weight, col, shift, end, "evict_last", VECTOR, SHIFTED).to(tl.float32)
        value = (value - mean) * rstd * w
        if CENTRED:
            value += of_columns(bias, col, shift, end, "", VECTOR, SHIFTED).to(tl.float32)
        put(y, col, value, shift, end, True, "", VECTOR, SHIFTED)


@triton.jit
def _normalize_spread(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    outputs,
    shared,
    sizes,
    strides,
    eps,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
    SAVE: tl.constexpr,
    SUM: tl.constexpr,
    NORM: tl.constexpr,
):
    """One piece of one row. SUM: its sum of squares, or mean and sum of squared distances from that. NORM: its
    normalization by the sums of all pieces (joined as by Chan, Golub and LeVeque 1979). With both, the programs
    of a row wait for each other in between, and the piece stays in registers, in its own dtype.
    """
    x, residual, weight, bias = inputs
    y, h, means, rstds = outputs
    sums, slot = shared
    N, D, pieces = sizes
    program = tl.program_id(0)
    if not SUM:
        # The last piece first: it was read last, and is the likeliest to be in the cache still.
        program = tl.num_programs(0) - 1 - program
    row = (program // pieces).to(tl.int64)
    piece = program % pieces
    shift = shift_of(x, row * strides[0], SHIFTED)
    x = boundary(x, row * strides[0], shift, VECTOR)
    y = boundary(y, row * D, shift, VECTOR)
    end = shift + D
    col = piece * BLOCK + tl.arange(0, BLOCK)
    before = 0
    if SUM and NORM:
        before = phase(slot + row * 2)
    held = get(x, col, shift, end, True, 0.0, "evict_first" if NORM else "evict_last", VECTOR, SHIFTED)
    if RESIDUAL:
        residual = boundary(residual, row * strides[1], shift, VECTOR)
        h = boundary(h, row * D, shift, VECTOR)
        other = get(residual, col, shift, end, True, 0.0, "", VECTOR, SHIFTED)
        held = (held.to(tl.float32) + other.to(tl.float32)).to(h.dtype.element_ty)
        put(h, col, held, shift, end, True, "", VECTOR, SHIFTED)
    at = row * pieces + piece
    if SUM:
        value = held.to(tl.float32)
        if CENTRED:
            # μᵢ = Σ x / nᵢ and Mᵢ = Σ (x - μᵢ)² of this piece.
            mean = tl.sum(value, 0) / _elements(piece, BLOCK, shift, end)
            tl.store(sums + tl.cast(N, tl.int64) * pieces + at, mean)
            value = tl.where(within(col, shift, end, SHIFTED), value - mean, 0.0)
        tl.store(sums + at, tl.sum(value * value, 0))
    if SUM and NORM:
        arrive_and_wait(slot + row * 2, pieces, before)
        held = packed(held)
    if NORM:
        value = held.to(tl.float32)
        w = of_columns(weight, col, shift, end, "evict_last", VECTOR, SHIFTED).to(tl.float32)
        part = tl.arange(0, PIECES)
        # Written by other programs of this launch: not from the multiprocessor's own cache.
        squares = tl.load(sums + row * pieces + part, part < pieces, 0.0, cache_modifier=".cg")
        if CENTRED:
            b = of_columns(bias, col, shift, end, "evict_last", VECTOR, SHIFTED).to(tl.float32)
            averages = sums + tl.cast(N, tl.int64) * pieces + row * pieces
            average = tl.load(averages + part, part < pieces, 0.0, cache_modifier=".cg")
            # μ = Σ nᵢ μᵢ / D and D σ² = Σ Mᵢ + nᵢ (μᵢ - μ)² over pieces.
            count = tl.where(part < pieces, _elements(part, BLOCK, shift, end), 0).to(tl.float32)
            mean = tl.sum(average * count, 0) / D
            apart = average - mean
            squares += count * apart * apart
            value -= mean
        rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / D + eps)
        if SAVE:
            tl.store(rstds + row, rstd, piece == 0)
            if CENTRED:
                tl.store(means + row, mean, piece == 0)
        # y = (x - μ) / √(σ² + ε) · w + b
        value = value * rstd * w
        if CENTRED:
            value += b
        put(y, col, value, shift, end, True, "", VECTOR, SHIFTED)


@triton.jit
def _elements(piece, BLOCK: tl.constexpr, shift, end):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Elements of a row in its n-th piece of BLOCK columns, at least 1 to divide by."""
    return tl.maximum(tl.minimum(end - piece * BLOCK, BLOCK) - tl.maximum(shift - piece * BLOCK, 0), 1)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    statistics,
    outputs,
    sizes,
    strides,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
    ALONE: tl.constexpr,
):
    """dx of every n-th group of ROWS rows, and this program's part of dweight (and dbias).

    With x̂ the normalized row and g = dy · weight: dx = (g - x̂ · mean(g · x̂) - mean(g)) · rstd, the last
    mean only where rows are centred; dweight is the sum of dy · x̂ over rows, dbias that of dy. ALONE: there is one
    program, whose parts are the whole.
    """
    dy, dh, x, weight = inputs
    means, rstds = statistics
    dx, parts, bias_parts = outputs
    N, D = sizes
    dy_stride, dh_stride, x_stride = strides
    col = tl.arange(0, BLOCK)
    w = tl.load(weight + col, col < D, 0.0).to(tl.float32)[None, :]
    weight_part = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_part = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        inside = (row < N)[:, None] & (col < D)[None, :]
        given = tl.load(dy + row[:, None] * dy_stride + col[None, :], inside, 0.0).to(tl.float32)
        hat = tl.load(x + row[:, None] * x_stride + col[None, :], inside, 0.0).to(tl.float32)
        rstd = tl.load(rstds + row, row < N, 0.0)[:, None]
        if CENTRED:
            hat = hat - tl.load(means + row, row < N, 0.0)[:, None]
            bias_part += given
        hat = hat * rstd
        weight_part += given * hat
        given = given * w
        result = given - hat * (tl.sum(given * hat, 1) / D)[:, None]
        if CENTRED:
            result -= (tl.sum(given, 1) / D)[:, None]
        result *= rstd
        if RESIDUAL:
            result += tl.load(dh + row[:, None] * dh_stride + col[None, :], inside, 0.0).to(tl.float32)
        tl.store(dx + row[:, None] * D + col[None, :], result.to(dx.dtype.element_ty), inside)
    at = tl.program_id(0) * D + col
    tl.store(parts + at, tl.sum(weight_part, 0).to(parts.dtype.element_ty), col < D)
    if CENTRED:
        if not ALONE:
            at += tl.num_programs(0) * D
        tl.store(bias_parts + at, tl.sum(bias_part, 0).to(parts.dtype.element_ty), col < D)


@triton.jit
def _gradients_parts(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    statistics,
    outputs,
    sizes,
    strides,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
    ALONE: tl.constexpr,
):
    """As `_gradients`, with rows in PARTS parts of PART columns, for widths that no power of two is near.

    All rows of a program lie equally to 16-byte boundaries, so that its columns are the same numbers of each: where
    rows are shifted, the number of programs is a multiple of VECTOR.
    """
    dy, dh, x, weight = inputs
    means, rstds = statistics
    dx, parts, bias_parts = outputs
    N, D = sizes
    PERIOD: tl.constexpr = VECTOR if SHIFTED else 1
    program = tl.program_id(0)
    first = program // PERIOD * (PERIOD * ROWS) + program % PERIOD
    line = tl.arange(0, ROWS)[:, None]
    down = line.to(tl.int64) * PERIOD
    shift = shift_of(x, first.to(tl.int64) * strides[2], SHIFTED)
    end = shift + D
    weights = ()
    dweight = ()
    dbias = ()
    for i in tl.static_range(PARTS):
        col = i * PART + tl.arange(0, PART)[None, :]
        weights += (of_part(weight, shift, end, ROWS, i, PART, PARTS, VECTOR, SHIFTED),)
        dweight += (tl.zeros([ROWS, PART], tl.float32),)
        dbias += (tl.zeros([ROWS, PART], tl.float32),)
    for start in tl.range(first, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        begin = tl.cast(start, tl.int64)
        row = begin + down
        rows = row < N
        given_at = boundary(dy, begin * strides[0], shift, VECTOR)
        given_at += tl.multiple_of(down * strides[0], [VECTOR, VECTOR])
        x_at = boundary(x, begin * strides[2], shift, VECTOR)
        x_at += tl.multiple_of(down * strides[2], [VECTOR, VECTOR])
        dx_at = boundary(dx, begin * D, shift, VECTOR)
        dx_at += tl.multiple_of(down * D, [VECTOR, VECTOR])
        rstd = tl.load(rstds + row, rows, 0.0)
        mean = 0.0
        if CENTRED:
            mean = tl.load(means + row, rows, 0.0)
        given = ()
        hats = ()
        products = tl.zeros([ROWS, PART], tl.float32)
        sums = tl.zeros([ROWS, PART], tl.float32)
        more = ()
        more_bias = ()
        for i in tl.static_range(PARTS):
            col = i * PART + tl.arange(0, PART)[None, :]
            g = get_part(given_at, shift, end, rows, 0.0, i, PART, PARTS, VECTOR, SHIFTED).to(tl.float32)
            hat = (
                get_part(x_at, shift, end, rows, 0.0, i, PART, PARTS, VECTOR, SHIFTED).to(tl.float32) - mean
            ) * rstd
            # dw += dy · x̂, db += dy
            more += (dweight[i] + g * hat,)
            more_bias += (dbias[i] + g if CENTRED else dbias[i],)
            g = g * weights[i].to(tl.float32)
            products += g * hat
            sums += g
            given += (g,)
            hats += (hat,)
        dweight = more
        dbias = more_bias
        projection = (tl.sum(products, 1) / D)[:, None]
        average = 0.0
        if CENTRED:
            average = (tl.sum(sums, 1) / D)[:, None]
        for i in tl.static_range(PARTS):
            col = i * PART + tl.arange(0, PART)[None, :]
            # dx = (g - x̂ · mean(g · x̂) - mean(g)) · rstd + dh, g = dy · w
            result = (given[i] - hats[i] * projection - average) * rstd
            if RESIDUAL:
                dh_at = boundary(dh, begin * strides[1], shift, VECTOR)
                dh_at += tl.multiple_of(down * strides[1], [VECTOR, VECTOR])
                result += get_part(dh_at, shift, end, rows, 0.0, i, PART, PARTS, VECTOR, SHIFTED).to(tl.float32)
            put_part(dx_at, result, shift, end, rows, i, PART, PARTS, VECTOR, SHIFTED)
    for i in tl.static_range(PARTS):
        col = i * PART + tl.arange(0, PART)
        at = program * D + (col - shift)
        inside = within(col, shift, end, SHIFTED)
        tl.store(parts + at, tl.sum(dweight[i], 0).to(parts.dtype.element_ty), inside)
        if CENTRED:
            if not ALONE:
                at += tl.num_programs(0) * D
            tl.store(bias_parts + at, tl.sum(dbias[i], 0).to(parts.dtype.element_ty), inside)


@triton.jit
def _row_means(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    statistics,
    means_of_rows,
    D,
    strides,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """mean(g · x̂) and mean(g) of one long row, g = dy · weight."""
    dy, _, x, weight = inputs
    means, rstds = statistics
    projections, averages = means_of_rows
    row = tl.program_id(0).to(tl.int64)
    shift = shift_of(dy, row * strides[0], SHIFTED)
    dy = boundary(dy, row * strides[0], shift, VECTOR)
    x = boundary(x, row * strides[2], shift, VECTOR)
    end = shift + D
    rstd = tl.load(rstds + row)
    mean = 0.0
    if CENTRED:
        mean = tl.load(means + row)
    projection = tl.zeros([BLOCK], tl.float32)
    average = tl.zeros([BLOCK], tl.float32)
    for start in range(0, end, BLOCK):
        col = start + tl.arange(0, BLOCK)
        given = get(dy, col, shift, end, True, 0.0, "", VECTOR, SHIFTED).to(tl.float32)
        given *= of_columns(weight, col, shift, end, "", VECTOR, SHIFTED).to(tl.float32)
        hat = (get(x, col, shift, end, True, 0.0, "", VECTOR, SHIFTED).to(tl.float32) - mean) * rstd
        projection += given * hat
        average += given
    tl.store(projections + row, tl.sum(projection, 0) / D)
    if CENTRED:
        tl.store(averages + row, tl.sum(average, 0) / D)


@triton.jit
def _gradients_long(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    statistics,
    means_of_rows,
    outputs,
    sizes,
    strides,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """As `_gradients`, for one piece of every n-th row, with the row's means known. Where rows are shifted, n is a
    multiple of VECTOR: the rows of a program lie equally then, and its columns are the same numbers of each.
    """
    dy, dh, x, weight = inputs
    means, rstds = statistics
    projections, averages = means_of_rows
    dx, parts = outputs
    N, D = sizes
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    shift = shift_of(x, tl.program_id(1).to(tl.int64) * strides[2], SHIFTED)
    end = shift + D
    inside = within(col, shift, end, SHIFTED)
    w = of_columns(weight, col, shift, end, "", VECTOR, SHIFTED).to(tl.float32)
    weight_part = tl.zeros([BLOCK], tl.float32)
    bias_part = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(tl.program_id(1), N, tl.num_programs(1)):
        row = tl.cast(start, tl.int64)
        given_at = boundary(dy, row * strides[0], shift, VECTOR)
        x_at = boundary(x, row * strides[2], shift, VECTOR)
        dx_at = boundary(dx, row * D, shift, VECTOR)
        given = get(given_at, col, shift, end, True, 0.0, "", VECTOR, SHIFTED).to(tl.float32)
        hat = get(x_at, col, shift, end, True, 0.0, "", VECTOR, SHIFTED).to(tl.float32)
        rstd = tl.load(rstds + row)
        if CENTRED:
            hat -= tl.load(means + row)
            bias_part += given
        hat *= rstd
        # dw += dy · x̂; dx = (g - x̂ · mean(g · x̂) - mean(g)) · rstd + dh, g = dy · w
        weight_part += given * hat
        result = given * w - hat * tl.load(projections + row)
        if CENTRED:
            result -= tl.load(averages + row)
        result *= rstd
        if RESIDUAL:
            dh_at = boundary(dh, row * strides[1], shift, VECTOR)
            result += get(dh_at, col, shift, end, True, 0.0, "", VECTOR, SHIFTED).to(tl.float32)
        put(dx_at, col, result, shift, end, True, "", VECTOR, SHIFTED)
    part = parts + tl.program_id(1).to(tl.int64) * D + (col - shift)
    tl.store(part, weight_part, inside)
    if CENTRED:
        tl.store(part + tl.num_programs(1).to(tl.int64) * D, bias_part, inside)


@triton.jit
def _piece_means(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    statistics,
    sums,
    sizes,
    strides,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """What one piece of one row adds to mean(g · x̂) and mean(g), g = dy · weight; one piece of all rows first."""
    dy, _, x, weight = inputs
    means, rstds = statistics
    N, D, pieces = sizes
    row = (tl.program_id(0) % N).to(tl.int64)
    piece = tl.program_id(0) // N
    shift = shift_of(dy, row * strides[0], SHIFTED)
    dy = boundary(dy, row * strides[0], shift, VECTOR)
    x = boundary(x, row * strides[2], shift, VECTOR)
    end = shift + D
    col = piece * BLOCK + tl.arange(0, BLOCK)
    given = get(dy, col, shift, end, True, 0.0, "evict_last", VECTOR, SHIFTED).to(tl.float32)
    hat = get(x, col, shift, end, True, 0.0, "evict_last", VECTOR, SHIFTED).to(tl.float32)
    given *= of_columns(weight, col, shift, end, "", VECTOR, SHIFTED).to(tl.float32)
    at = row * pieces + piece
    if CENTRED:
        hat -= tl.load(means + row)
        tl.store(sums + tl.cast(N, tl.int64) * pieces + at, tl.sum(given, 0) / D)
    tl.store(sums + at, tl.sum(given * hat, 0) * tl.load(rstds + row) / D)


@triton.jit
def _gradients_columns(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    statistics,
    sums,
    outputs,
    sizes,
    strides,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """As `_gradients`, for all rows of BLOCK columns, so that dweight and dbias need no other program.

    The last columns first: they were read last, and are the likeliest to be in the cache still.
    """
    dy, dh, x, weight = inputs
    means, rstds = statistics
    dx, dweight, dbias = outputs
    N, D, pieces = sizes
    dy_stride, dh_stride, x_stride = strides
    col = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(weight + col, col < D, 0.0).to(tl.float32)[None, :]
    weight_part = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_part = tl.zeros([ROWS, BLOCK], tl.float32)
    other = tl.arange(0, PIECES)
    for start in range(0, N, ROWS):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        inside = (row < N)[:, None] & (col < D)[None, :]
        given = tl.load(dy + row[:, None] * dy_stride + col[None, :], inside, 0.0).to(tl.float32)
        hat = tl.load(x + row[:, None] * x_stride + col[None, :], inside, 0.0).to(tl.float32)
        rstd = tl.load(rstds + row, row < N, 0.0)[:, None]
        at = row[:, None] * pieces + other[None, :]
        within = (row < N)[:, None] & (other < pieces)[None, :]
        projection = tl.sum(tl.load(sums + at, within, 0.0), 1)[:, None]
        if CENTRED:
            hat = hat - tl.load(means + row, row < N, 0.0)[:, None]
            bias_part += given
        hat = hat * rstd
        weight_part += given * hat
        result = given * w - hat * projection
        if CENTRED:
            result -= tl.sum(tl.load(sums + tl.cast(N, tl.int64) * pieces + at, within, 0.0), 1)[:, None]
        result *= rstd
        if RESIDUAL:
            result += tl.load(dh + row[:, None] * dh_stride + col[None, :], inside, 0.0).to(tl.float32)
        tl.store(dx + row[:, None] * D + col[None, :], result.to(dx.dtype.element_ty), inside)
    tl.store(dweight + col, tl.sum(weight_part, 0).to(dweight.dtype.element_ty), col < D)
    if CENTRED:
        tl.store(dbias + col, tl.sum(bias_part, 0).to(dbias.dtype.element_ty), col < D)


@triton.jit
def _add_parts(  # type: ignore[no-untyped-def]  # Triton's types are its own
    parts, dweight, dbias, P, D, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum over programs of (2, P, D) to dweight (D,) and dbias (D,), one of them a program."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    parts += tl.program_id(1).to(tl.int64) * P * D
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, P, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < P)[:, None] & (col < D)[None, :]
        total += tl.load(parts + row[:, None] * D + col[None, :], inside, 0.0)
    value = tl.sum(total, 0)
    if tl.program_id(1) == 0:
        tl.store(dweight + col, value.to(dweight.dtype.element_ty), col < D)
    else:
        tl.store(dbias + col, value.to(dbias.dtype.element_ty), col < D)


class Plan(NamedTuple):
    """How rows are shared out, and how a program has them.

    `whole`: `rows` rows, each in a block of a power of two. `parts`: `rows` rows, each in `parts` parts of `block`
    elements; `flag`: the weight is read ahead. `pieces`: one row, twice, in pieces of `block`. `spread`: one piece
    of `block` elements of one row. For `whole`, `flag` means to read x again rather than to hold it.
    """

    kind: Literal["whole", "parts", "pieces", "spread"]
    rows: int
    block: int
    parts: int
    warps: int
    flag: bool = False


def forward_plan(x: torch.Tensor, N: int, D: int, residual: bool, centred: bool, access: Access) -> Plan:
    """The forward pass of N rows of D elements, by measurements on an H200."""
    block = power_of_2(D)
    size = x.element_size()
    plain = not (residual or centred)
    again = plain and block == AGAIN[0] and AGAIN[1] <= N * D
    long = block * size > (PLAIN_LIMIT if plain else FORWARD_LIMIT)
    if long and (piece := spread(x, N, D)):
        return Plan("spread", 1, piece, cdiv(D + access.margin, piece), min(max(piece // SPREAD_WARP, 4), 16))
    if D >= PARTS_FROM and (block != D or D * size > WHOLE_LIMIT) and D * size <= PARTS_LIMIT:
        # Where there are few rows, more threads each; where columns are not read in vectors, fewer.
        most = 2 if multiprocessors(x) >= N and not access.SHIFTED else MOST_PARTS
        ahead = plain and not access.SHIFTED and D * size <= AHEAD
        rows, warps, parts, part = parts_of(
            D + access.margin, 16 // size, N, access.period, min(most, 4) if ahead else most, 2048
        )
        return Plan("parts", rows, part, parts, warps, ahead)
    if long:
        return Plan("pieces", 1, PLAIN_PIECE if plain and block * size <= FORWARD_LIMIT // 2 else PIECE, 0, 16)
    rows = power_of_2(max(1, min(2048 // block, N)))
    # 32 numbers a thread: four 16-byte loads in flight, and registers for 8 or more warps.
    return Plan("whole", rows, block, 1, 8 if again else min(max(rows * block // 1024, 4), 32), again)


def prepare_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    save: bool,
    plan: Plan | None = None,
) -> Callable[..., Norm]:
    """The forward pass of tensors like x (…, D), as `plan` says or as it is chosen for them: a function of the tensors.

    A bias means rows are centred; `save` keeps mean and rstd.
    """
    kept = residual is not None
    centred = bias is not None
    if x.numel() == 0:
        return lambda x, *_: empty(x, kept, centred, save)
    D = x.shape[-1]
    N = x.numel() // D
    flat = rows(x)
    other = flat if residual is None else rows(residual)
    strides = (flat.stride(0), other.stride(0))
    reach = access((flat, other, dense_like(x)), (*strides, D), D)
    plan = plan or forward_plan(x, N, D, kept, centred, reach)
    sizes, eps = (N, D), float(eps)
    flags = {"RESIDUAL": kept, "CENTRED": centred, "SAVE": save}
    if plan.kind == "spread":
        launch = _spread(x, sizes, strides, eps, plan, reach, flags)
    elif plan.kind == "whole":
        launch = Launch(
            _normalize,
            (cdiv(N, plan.rows),),
            sizes,
            strides,
            eps,
            ROWS=plan.rows,
            BLOCK=plan.block,
            **flags,
            EVEN=D % plan.block == 0 and N % plan.rows == 0,
            AGAIN=plan.flag,
            num_warps=plan.warps,
        )
    elif plan.kind == "parts":
        launch = Launch(
            _normalize_parts,
            (cdiv(N, plan.rows * reach.period) * reach.period,),
            sizes,
            strides,
            eps,
            ROWS=plan.rows,
            PART=plan.block,
            PARTS=plan.parts,
            **reach.evenly(D, plan.block),
            **flags,
            AHEAD=plan.flag,
            num_warps=plan.warps,
        )
    else:
        launch = Launch(
            _normalize_long,
            (N,),
            sizes,
            strides,
            eps,
            BLOCK=plan.block,
            **reach.evenly(D, plan.block),
            **flags,
            num_warps=plan.warps,
        )
    device = x.device
    copied = not in_rows(x) or not weight.is_contiguous()
    copied |= residual is not None and not in_rows(residual)
    copied |= bias is not None and not bias.is_contiguous()

    def run(
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *_: Any,
    ) -> Norm:
        results = empty(x, kept, centred, save)
        if copied:
            x, weight = rows(x), weight.contiguous()
            residual = residual if residual is None else rows(residual)
            bias = bias if bias is None else bias.contiguous()
        launch(device, (x, x if residual is None else residual, weight, weight if bias is None else bias), results)
        return results

    return run


def spread(x: torch.Tensor, N: int, D: int) -> int:
    """Elements of a piece of a row that is spread over programs; 0 where rows are many, short or too long."""
    if D < SPREAD or (processors := multiprocessors(x)) < N:
        return 0
    # Four programs a multiprocessor, but no piece so small that starting it takes longer than its work.
    piece = min(max(power_of_2(N * D // (4 * processors)), SPREAD_PIECES[0]), SPREAD_PIECES[1])
    return piece if cdiv(D, piece) < SPREAD_MOST else 0


def _spread(
    x: torch.Tensor,
    sizes: tuple[int, int],
    strides: tuple[int, int],
    eps: float,
    plan: Plan,
    reach: Access,
    flags: dict[str, bool],
) -> Callable[[torch.device, Inputs, Norm], None]:
    """The forward pass of few long rows: in one launch where its programs can wait for each other, else in two."""
    N, D = sizes

    def spread_launch(strides: tuple[int, int], sums: bool, norm: bool, **changed: bool) -> Launch:
        return Launch(
            _normalize_spread,
            (N * plan.parts,),
            (N, D, plan.parts),
            strides,
            eps,
            BLOCK=plan.block,
            PIECES=power_of_2(plan.parts),
            **reach.constants(),
            **{**flags, **changed},
            SUM=sums,
            NORM=norm,
            num_warps=plan.warps,
        )

    both = spread_launch(strides, True, True)
    first = spread_launch(strides, True, False)
    # The second of two launches reads what the first made of x and the residual.
    second = spread_launch((D, D) if flags["RESIDUAL"] else strides, False, True, RESIDUAL=False)

    def launch(device: torch.device, inputs: Inputs, outputs: Norm) -> None:
        sums = torch.empty(1 + flags["CENTRED"], N, plan.parts, dtype=torch.float32, device=device)
        slot = slots(inputs[0], N, N * D)
        if slot is not None:
            both(device, inputs, outputs, (sums, slot))
            return
        first(device, inputs, outputs, (sums, sums))
        h = outputs[1]
        again = inputs if h is None else (h, *inputs[1:])
        second(device, again, outputs, (sums, sums))

    return launch


def empty(x: torch.Tensor, residual: bool, centred: bool, save: bool) -> Norm:
    """Memory for the results of the forward pass."""
    shape = x.shape[:-1]
    y = dense_like(x)
    h = dense_like(x) if residual else None
    mean = torch.empty(shape, dtype=torch.float32, device=x.device) if centred and save else None
    rstd = torch.empty(shape, dtype=torch.float32, device=x.device) if save else None
    return y, h, mean, rstd


def backward_plan(x: torch.Tensor, N: int, D: int, centred: bool, access: Access) -> Plan:
    """The backward pass of N rows of D elements, by measurements on an H200."""
    block = power_of_2(D)
    if block > BACKWARD_LIMIT and (piece := spread(x, N, D)):
        return Plan("spread", 1, piece, cdiv(D + access.margin, piece), min(max(piece // 256, 4), 16))
    wide = D + access.margin
    vector = 16 // x.element_size()
    if D >= PARTS_FROM and block != D and D <= BACKWARD_LIMIT:
        if D > BACKWARD_PARTS_FROM:
            # 24 numbers of each tensor a thread, and with a mean up to 56: fewer threads then are quicker.
            warps = 4 if centred or access.SHIFTED else 8
            part = 32 * warps * vector
            if cdiv(wide, part) <= MOST_PARTS:
                return Plan("parts", 1, part, cdiv(wide, part), warps)
        if access != PLAIN:
            rows, warps, parts, part = parts_of(wide, vector, N, access.period, 2, 2048)
            return Plan("parts", min(rows, 16), part, parts, min(max(warps, 4), 16))
    if block <= BACKWARD_LIMIT:
        # 16 numbers of each tensor a thread take about 120 registers: 16 warps are at home at a time.
        rows = max(1, min(2048 // block, 16))
        return Plan("whole", rows, block, 1, min(max(rows * block // 512, 4), 16))
    part = 32 * 16 * vector
    if not centred and cdiv(wide, part) <= BACKWARD_LONG:
        return Plan("parts", 1, part, cdiv(wide, part), 16)
    return Plan("pieces", 1, PIECE, cdiv(wide, PIECE), 8)


def prepare_backward(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    plan: Plan | None = None,
    tile: tuple[int, int, int] | None = None,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The backward pass of tensors like these, as `plan` and `tile` say or as it is chosen: a function of the tensors.

    It gives dx (…, D) in x's dtype, dweight and dbias (D,) in the weight's; dbias only where `mean` is given, else
    dweight. x is what was normalized, with the residual in it; dh is the gradient that reaches it directly.
    """
    centred = mean is not None
    if x.numel() == 0:
        return lambda dy, dh, x, weight, *_: (dense_like(x), torch.zeros_like(weight), torch.zeros_like(weight))
    D = x.shape[-1]
    N = x.numel() // D
    given, flat = rows(dy), rows(x)
    direct = given if dh is None else rows(dh)
    strides = (given.stride(0), direct.stride(0), flat.stride(0))
    reach = access((given, direct, flat, dense_like(x)), (*strides, D), D)
    plan = plan or backward_plan(x, N, D, centred, reach)
    flags = {"RESIDUAL": dh is not None, "CENTRED": centred}
    if plan.kind == "spread":
        launch = _columns((N, D), strides, plan, reach, flags, tile or SPREAD_TILES[not reach.SHIFTED])
    elif plan.kind in ("whole", "parts"):
        launch = _rows_at_once(x, (N, D), strides, plan, reach, flags)
    else:
        launch = _rows_by_pieces(x, (N, D), strides, reach, flags)
    device = x.device
    copied = not (in_rows(dy) and in_rows(x) and weight.is_contiguous())
    copied |= dh is not None and not in_rows(dh)

    def run(
        dy: torch.Tensor,
        dh: torch.Tensor | None,
        x: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor | None,
        rstd: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dx, dweight, dbias = results = empty_gradients(x, weight, centred)
        if copied:
            dy, x, weight = rows(dy), rows(x), weight.contiguous()
            dh = dh if dh is None else rows(dh)
        statistics = (rstd if mean is None else mean, rstd)
        launch(device, (dy, dy if dh is None else dh, x, weight), statistics, results)
        return results

    return run


def _rows_at_once(
    x: torch.Tensor,
    sizes: tuple[int, int],
    strides: tuple[int, int, int],
    plan: Plan,
    reach: Access,
    flags: dict[str, bool],
) -> Callable[..., None]:
    """Gradients where a program holds whole rows."""
    N, D = sizes
    kinds = 1 + flags["CENTRED"]
    period = reach.period if plan.kind == "parts" else 1
    programs = min(cdiv(N, plan.rows), multiprocessors(x) * max(16 // plan.warps, 1))
    programs = cdiv(programs, period) * period
    ahead = plan.rows * plan.block * plan.parts * x.element_size() * (2 + flags["RESIDUAL"])
    alone = programs == 1
    shared = {
        "STAGES": 3 if 2 * ahead <= PREFETCH else 2,
        **flags,
        "ALONE": alone,
        "num_warps": plan.warps,
    }
    if plan.kind == "whole":
        make = Launch(_gradients, (programs,), sizes, strides, ROWS=plan.rows, BLOCK=plan.block, **shared)
    else:
        make = Launch(
            _gradients_parts,
            (programs,),
            sizes,
            strides,
            ROWS=plan.rows,
            PART=plan.block,
            PARTS=plan.parts,
            **reach.constants(),
            **shared,
        )
    add = _adding(programs, D, kinds)

    def launch(device: torch.device, inputs: Inputs, statistics: Any, results: Any) -> None:
        if alone:
            make(device, inputs, statistics, results)
            return
        dx, dweight, dbias = results
        parts = torch.empty((kinds, programs, D), dtype=torch.float32, device=device)
        make(device, inputs, statistics, (dx, parts, parts))
        add(device, parts, dweight, dbias)

    return launch


def _adding(programs: int, D: int, kinds: int) -> Launch:
    """The launch that adds what programs have of the gradients of weight and bias."""
    return Launch(
        _add_parts,
        (cdiv(D, 32), kinds),
        programs,
        D,
        ROWS=min(power_of_2(programs), 256),
        BLOCK=32,
        num_warps=8,
    )


def _rows_by_pieces(
    x: torch.Tensor,
    sizes: tuple[int, int],
    strides: tuple[int, int, int],
    reach: Access,
    flags: dict[str, bool],
) -> Callable[..., None]:
    """Gradients of rows too long to be held: their means first, then one piece of every n-th row a program."""
    N, D = sizes
    kinds = 1 + flags["CENTRED"]
    pieces = cdiv(D + reach.margin, PIECE)
    programs = min(N, max(1, multiprocessors(x) * 4 // pieces))
    programs = cdiv(programs, reach.period) * reach.period
    means = Launch(
        _row_means,
        (N,),
        D,
        strides,
        BLOCK=PIECE,
        **reach.constants(),
        CENTRED=flags["CENTRED"],
        num_warps=8,
    )
    make = Launch(
        _gradients_long,
        (pieces, programs),
        sizes,
        strides,
        BLOCK=PIECE,
        **reach.constants(),
        **flags,
        num_warps=8,
    )
    add = _adding(programs, D, kinds)

    def launch(device: torch.device, inputs: Inputs, statistics: Any, results: Any) -> None:
        dx, dweight, dbias = results
        projection = torch.empty((kinds, N), dtype=torch.float32, device=device)
        means(device, inputs, statistics, (projection[0], projection[-1]))
        parts = torch.empty((kinds, programs, D), dtype=torch.float32, device=device)
        make(device, inputs, statistics, (projection[0], projection[-1]), (dx, parts))
        add(device, parts, dweight, dbias)

    return launch


def _sums_of_pieces(
    sizes: tuple[int, int],
    strides: tuple[int, int, int],
    plan: Plan,
    reach: Access,
    flags: dict[str, bool],
) -> Callable[..., torch.Tensor]:
    """What pieces of few long rows add to mean(g · x̂) and, of centred rows, mean(g): (1 or 2, N, pieces)."""
    N, D = sizes
    make = Launch(
        _piece_means,
        (N * plan.parts,),
        (N, D, plan.parts),
        strides,
        BLOCK=plan.block,
        **reach.constants(),
        CENTRED=flags["CENTRED"],
        num_warps=plan.warps,
    )

    def launch(device: torch.device, inputs: Inputs, statistics: Any) -> torch.Tensor:
        sums = torch.empty((1 + flags["CENTRED"], N, plan.parts), dtype=torch.float32, device=device)
        make(device, inputs, statistics, sums)
        return sums

    return launch


def _columns(
    sizes: tuple[int, int],
    strides: tuple[int, int, int],
    plan: Plan,
    reach: Access,
    flags: dict[str, bool],
    tile: tuple[int, int, int],
) -> Callable[..., None]:
    """Gradients of few long rows, by programs that have all rows of some columns."""
    N, D = sizes
    height, columns, warps = tile
    by_pieces = _sums_of_pieces(sizes, strides, plan, reach, flags)
    make = Launch(
        _gradients_columns,
        (cdiv(D, columns),),
        (N, D, plan.parts),
        strides,
        ROWS=min(height, power_of_2(N)),
        BLOCK=columns,
        PIECES=power_of_2(plan.parts),
        **flags,
        num_warps=warps,
    )

    def launch(device: torch.device, inputs: Inputs, statistics: Any, results: Any) -> None:
        make(device, inputs, statistics, by_pieces(device, inputs, statistics), results)

    return launch


def empty_gradients(
    x: torch.Tensor, weight: torch.Tensor, centred: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for the results of the backward pass."""
    dweight = torch.empty_like(weight)
    return dense_like(x), dweight, torch.empty_like(weight) if centred else dweight
