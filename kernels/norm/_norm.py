"""One computation behind three operators: normalization of rows, with or without mean, bias and residual.

Forward holds a row in registers and so reads it once. Backward runs as many programs as the device holds
at a time; each takes every n-th row, keeps its part of the weight's gradient in registers, and a second
kernel adds the parts: the order of summation is fixed, so results repeat bit by bit. Rows too long for
registers are taken in pieces, and so are those that a cache gives again for less than registers cost. Where
there are fewer long rows than multiprocessors, a row is spread over many programs, which forward hold it and meet
to exchange sums of their pieces; backward is in two launches, one for the sums, one for what they are needed for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, cdiv, dense_like, multiprocessors, on, packed, power_of_2, rows
from .._grid_barrier import meet, phases, places, seen

Norm = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""y, h = x + residual, mean, rstd = 1 / √(variance or mean square + eps)."""

FORWARD_LIMIT = 64 if INTERPRETED else 65536
"""Longest row in bytes that forward holds in registers: 32 numbers of 2 bytes a thread."""

PLAIN_PIECES = (32, 128) if INTERPRETED else (8192, 32768)
"""Rows without mean and residual, longer than the first and up to the second number of bytes, go in pieces
that are read twice, the second time from the cache: measured quicker on an H200 than holding them.
"""

PLAIN_PIECE = 16 if INTERPRETED else 8192
"""Elements of such a piece: 65536 rows of 8192 numbers took 497 µs, in pieces of 4096 with masks 501."""

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

SPREAD_TILE = (2, 16) if INTERPRETED else (8, 512)
"""Rows and columns at a time of a program of backward that has all rows of its columns."""


@triton.jit
def _normalize(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    residual,
    weight,
    bias,
    y,
    h,
    means,
    rstds,
    N,
    D,
    x_stride,
    residual_stride,
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
def _normalize_long(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    residual,
    weight,
    bias,
    y,
    h,
    means,
    rstds,
    N,
    D,
    x_stride,
    residual_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
    SAVE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One row a program, in pieces, twice; the second time it comes from the L2 cache.

    Each lane keeps mean and sum of squares of its own numbers (Welford), lanes are joined at the end (Chan,
    Golub and LeVeque 1979): sums of x and x² alone would cancel where the mean is large. EVEN: no
    piece is cut.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    average = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        col = start + lane
        inside = tl.full([BLOCK], 1, tl.int1) if EVEN else col < D
        value = tl.load(x + row * x_stride + col, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
        if RESIDUAL:
            value += tl.load(residual + row * residual_stride + col, inside, 0.0).to(tl.float32)
            rounded = value.to(h.dtype.element_ty)
            tl.store(h + row * D + col, rounded, inside)
            value = rounded.to(tl.float32)
        if CENTRED:
            count += inside.to(tl.float32)
            delta = tl.where(inside, value - average, 0.0)
            average += delta / tl.maximum(count, 1.0)
            squares += delta * (value - average)
        else:
            squares += value * value
    total = tl.sum(squares, 0)
    mean = 0.0
    if CENTRED:
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
    for start in range(0, D, BLOCK):
        col = start + lane
        inside = tl.full([BLOCK], 1, tl.int1) if EVEN else col < D
        if RESIDUAL:
            value = tl.load(h + row * D + col, inside, 0.0).to(tl.float32)
        else:
            value = tl.load(x + row * x_stride + col, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
        w = tl.load(weight + col, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
        value = (value - mean) * rstd * w
        if CENTRED:
            value += tl.load(bias + col, inside, 0.0).to(tl.float32)
        tl.store(y + row * D + col, value.to(y.dtype.element_ty), inside)


@triton.jit
def _normalize_spread(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    residual,
    weight,
    bias,
    y,
    h,
    sums,
    place,
    means,
    rstds,
    N,
    D,
    pieces,
    x_stride,
    residual_stride,
    eps,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
    SAVE: tl.constexpr,
    SUM: tl.constexpr,
    NORM: tl.constexpr,
):
    """One piece of one row. SUM: its sum of squares, or mean and sum of squared distances from that. NORM: its
    normalization by the sums of all pieces (joined as by Chan, Golub and LeVeque 1979). With both, the programs
    of a row meet in between, and the piece stays in registers, in its own dtype.
    """
    program = tl.program_id(0)
    if not SUM:
        # The last piece first: it was read last, and is the likeliest to be in the cache still.
        program = tl.num_programs(0) - 1 - program
    row = (program // pieces).to(tl.int64)
    piece = program % pieces
    col = piece * BLOCK + tl.arange(0, BLOCK)
    inside = col < D
    before = 0
    if SUM and NORM:
        before = seen(place + row * 2)
    held = tl.load(x + row * x_stride + col, inside, 0.0, eviction_policy="evict_first" if NORM else "evict_last")
    if RESIDUAL:
        other = tl.load(residual + row * residual_stride + col, inside, 0.0)
        held = (held.to(tl.float32) + other.to(tl.float32)).to(h.dtype.element_ty)
        tl.store(h + row * D + col, held, inside)
    at = row * pieces + piece
    if SUM:
        value = held.to(tl.float32)
        if CENTRED:
            mean = tl.sum(value, 0) / tl.minimum(D - piece * BLOCK, BLOCK)
            tl.store(sums + tl.cast(N, tl.int64) * pieces + at, mean)
            value = tl.where(inside, value - mean, 0.0)
        tl.store(sums + at, tl.sum(value * value, 0))
    if SUM and NORM:
        meet(place + row * 2, pieces, before)
        held = packed(held)
    if NORM:
        value = held.to(tl.float32)
        w = tl.load(weight + col, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
        part = tl.arange(0, PIECES)
        # Written by other programs of this launch: not from the multiprocessor's own cache.
        squares = tl.load(sums + row * pieces + part, part < pieces, 0.0, cache_modifier=".cg")
        if CENTRED:
            b = tl.load(bias + col, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
            averages = sums + tl.cast(N, tl.int64) * pieces + row * pieces
            average = tl.load(averages + part, part < pieces, 0.0, cache_modifier=".cg")
            count = tl.maximum(tl.minimum(D - part * BLOCK, BLOCK), 0).to(tl.float32)
            mean = tl.sum(average * count, 0) / D
            apart = average - mean
            squares += count * apart * apart
            value -= mean
        rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / D + eps)
        if SAVE:
            tl.store(rstds + row, rstd, piece == 0)
            if CENTRED:
                tl.store(means + row, mean, piece == 0)
        value = value * rstd * w
        if CENTRED:
            value += b
        tl.store(y + row * D + col, value.to(y.dtype.element_ty), inside)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy,
    dh,
    x,
    weight,
    means,
    rstds,
    dx,
    parts,
    N,
    D,
    dy_stride,
    dh_stride,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """dx of every n-th group of ROWS rows, and this program's part of dweight (and dbias).

    With x̂ the normalized row and g = dy · weight: dx = (g - x̂ · mean(g · x̂) - mean(g)) · rstd, the last
    mean only where rows are centred; dweight is the sum of dy · x̂ over rows, dbias that of dy.
    """
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
    part = parts + tl.program_id(0) * D + col
    tl.store(part, tl.sum(weight_part, 0), col < D)
    if CENTRED:
        tl.store(part + tl.num_programs(0) * D, tl.sum(bias_part, 0), col < D)


@triton.jit
def _row_means(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy,
    x,
    weight,
    means,
    rstds,
    projections,
    averages,
    D,
    dy_stride,
    x_stride,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """mean(g · x̂) and mean(g) of one long row, g = dy · weight."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstds + row)
    mean = 0.0
    if CENTRED:
        mean = tl.load(means + row)
    projection = tl.zeros([BLOCK], tl.float32)
    average = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        given = tl.load(dy + row * dy_stride + col, col < D, 0.0).to(tl.float32)
        given *= tl.load(weight + col, col < D, 0.0).to(tl.float32)
        hat = (tl.load(x + row * x_stride + col, col < D, 0.0).to(tl.float32) - mean) * rstd
        projection += given * hat
        average += given
    tl.store(projections + row, tl.sum(projection, 0) / D)
    if CENTRED:
        tl.store(averages + row, tl.sum(average, 0) / D)


@triton.jit
def _gradients_long(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy,
    dh,
    x,
    weight,
    means,
    rstds,
    projections,
    averages,
    dx,
    parts,
    N,
    D,
    dy_stride,
    dh_stride,
    x_stride,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """As `_gradients`, for one piece of every n-th row, with the row's means known."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = col < D
    w = tl.load(weight + col, inside, 0.0).to(tl.float32)
    weight_part = tl.zeros([BLOCK], tl.float32)
    bias_part = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(tl.program_id(1), N, tl.num_programs(1)):
        row = tl.cast(start, tl.int64)
        given = tl.load(dy + row * dy_stride + col, inside, 0.0).to(tl.float32)
        hat = tl.load(x + row * x_stride + col, inside, 0.0).to(tl.float32)
        rstd = tl.load(rstds + row)
        if CENTRED:
            hat -= tl.load(means + row)
            bias_part += given
        hat *= rstd
        weight_part += given * hat
        result = given * w - hat * tl.load(projections + row)
        if CENTRED:
            result -= tl.load(averages + row)
        result *= rstd
        if RESIDUAL:
            result += tl.load(dh + row * dh_stride + col, inside, 0.0).to(tl.float32)
        tl.store(dx + row * D + col, result.to(dx.dtype.element_ty), inside)
    part = parts + tl.program_id(1).to(tl.int64) * D + col
    tl.store(part, weight_part, inside)
    if CENTRED:
        tl.store(part + tl.num_programs(1).to(tl.int64) * D, bias_part, inside)


@triton.jit
def _piece_means(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy,
    x,
    weight,
    means,
    rstds,
    sums,
    N,
    D,
    pieces,
    dy_stride,
    x_stride,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """What one piece of one row adds to mean(g · x̂) and mean(g), g = dy · weight; one piece of all rows first."""
    row = (tl.program_id(0) % N).to(tl.int64)
    piece = tl.program_id(0) // N
    col = piece * BLOCK + tl.arange(0, BLOCK)
    inside = col < D
    given = tl.load(dy + row * dy_stride + col, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    hat = tl.load(x + row * x_stride + col, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    given *= tl.load(weight + col, inside, 0.0).to(tl.float32)
    at = row * pieces + piece
    if CENTRED:
        hat -= tl.load(means + row)
        tl.store(sums + tl.cast(N, tl.int64) * pieces + at, tl.sum(given, 0) / D)
    tl.store(sums + at, tl.sum(given * hat, 0) * tl.load(rstds + row) / D)


@triton.jit
def _gradients_columns(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy,
    dh,
    x,
    weight,
    means,
    rstds,
    sums,
    dx,
    dweight,
    dbias,
    N,
    D,
    pieces,
    dy_stride,
    dh_stride,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """As `_gradients`, for all rows of BLOCK columns, so that dweight and dbias need no other program.

    The last columns first: they were read last, and are the likeliest to be in the cache still.
    """
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


def normalize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    save: bool,
) -> Norm:
    """The forward pass of x (…, D). A bias means rows are centred; `save` keeps mean and rstd."""
    y, h, mean, rstd = empty(x, residual is not None, bias is not None, save)
    if x.numel() == 0:
        return y, h, mean, rstd
    D = x.shape[-1]
    N = x.numel() // D
    flat = rows(x)
    other = flat if residual is None else rows(residual)
    block = power_of_2(D)
    length = block * x.element_size()
    pieces = residual is None and bias is None and PLAIN_PIECES[0] < length <= PLAIN_PIECES[1]
    if long := pieces or length > FORWARD_LIMIT:
        block = min(block, PLAIN_PIECE) if pieces else PIECE
    again = not long and residual is None and block == AGAIN[0] and AGAIN[1] <= N * D
    height = 1 if long else power_of_2(max(1, min(2048 // block, N)))
    if long and (piece := spread(x, N, D)):
        _spread(flat, residual if residual is None else other, weight, bias, (y, h, mean, rstd), eps, piece)
        return y, h, mean, rstd
    with on(x):
        (_normalize_long if long else _normalize)[(cdiv(N, height),)](
            flat,
            other,
            weight.contiguous(),
            weight if bias is None else bias.contiguous(),
            y,
            h,
            mean,
            rstd,
            N,
            D,
            flat.stride(0),
            other.stride(0),
            eps,
            ROWS=height,
            BLOCK=block,
            RESIDUAL=residual is not None,
            CENTRED=bias is not None,
            SAVE=save,
            EVEN=D % block == 0 and N % height == 0,
            # 32 numbers a thread: four 16-byte loads in flight, and registers for 8 or more warps.
            num_warps=16 if long else 8 if again else min(max(height * block // 1024, 4), 32),
            **({} if long else {"AGAIN": again}),
        )
    return y, h, mean, rstd


def spread(x: torch.Tensor, N: int, D: int) -> int:
    """Elements of a piece of a row that is spread over programs; 0 where rows are many, short or too long."""
    if D < SPREAD or (processors := multiprocessors(x)) < N:
        return 0
    # Four programs a multiprocessor, but no piece so small that starting it takes longer than its work.
    piece = min(max(power_of_2(N * D // (4 * processors)), SPREAD_PIECES[0]), SPREAD_PIECES[1])
    return piece if cdiv(D, piece) <= SPREAD_MOST else 0


def _spread(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    results: Norm,
    eps: float,
    piece: int,
) -> None:
    """The forward pass of few long rows x (N, D): in one launch where its programs can meet, else in two."""
    y, h, mean, rstd = results
    N, D = x.shape
    pieces = cdiv(D, piece)
    place = places(x, N, N * D)
    sums = torch.empty(1 if bias is None else 2, N, pieces, dtype=torch.float32, device=x.device)
    weight = weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    for first, second in phases(place):
        # In two launches the second reads what the first made of x and the residual.
        source, stride = (x, x.stride(0)) if first or h is None else (h, D)
        other = residual if first else None
        with on(x):
            _normalize_spread[(N * pieces,)](
                source,
                source if other is None else other,
                weight,
                weight if bias is None else bias,
                y,
                h,
                sums,
                sums if place is None else place,
                mean,
                rstd,
                N,
                D,
                pieces,
                stride,
                0 if other is None else other.stride(0),
                eps,
                BLOCK=piece,
                PIECES=power_of_2(pieces),
                RESIDUAL=other is not None,
                CENTRED=bias is not None,
                SAVE=rstd is not None,
                SUM=first,
                NORM=second,
                num_warps=min(max(piece // SPREAD_WARP, 4), 16),
            )


def empty(x: torch.Tensor, residual: bool, centred: bool, save: bool) -> Norm:
    """Memory for the results of `normalize`."""
    shape = x.shape[:-1]
    y = dense_like(x)
    h = dense_like(x) if residual else None
    mean = torch.empty(shape, dtype=torch.float32, device=x.device) if centred and save else None
    rstd = torch.empty(shape, dtype=torch.float32, device=x.device) if save else None
    return y, h, mean, rstd


def gradients(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx (…, D) in x's dtype, dweight and dbias (D,) in the weight's; dbias only where `mean` is given.

    x is what was normalized, with the residual in it; dh is the gradient that reaches it directly.
    """
    dx, dweight, dbias = empty_gradients(x, weight)
    if x.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_()
    D = x.shape[-1]
    N = x.numel() // D
    given, flat = rows(dy), rows(x)
    direct = given if dh is None else rows(dh)
    kinds = 1 if mean is None else 2
    block = power_of_2(D)
    flags = {"RESIDUAL": dh is not None, "CENTRED": mean is not None}
    sums = rstd if mean is None else mean
    weight = weight.contiguous()
    if block > BACKWARD_LIMIT and (piece := spread(x, N, D)):
        _gradients_spread(
            given, dh if dh is None else direct, flat, weight, mean, rstd, (dx, dweight, dbias), piece
        )
        return dx, dweight, dbias
    with on(x):
        if block <= BACKWARD_LIMIT:
            height = max(1, min(2048 // block, 16))
            # 16 numbers of each tensor a thread take about 120 registers: 16 warps are at home at a time.
            warps = min(max(height * block // 512, 4), 16)
            programs = min(cdiv(N, height), multiprocessors(x) * (16 // warps))
            ahead = height * block * x.element_size() * (2 if dh is None else 3)
            parts = torch.empty(kinds, programs, D, dtype=torch.float32, device=x.device)
            _gradients[(programs,)](
                given,
                direct,
                flat,
                weight,
                sums,
                rstd,
                dx,
                parts,
                N,
                D,
                given.stride(0),
                direct.stride(0),
                flat.stride(0),
                ROWS=height,
                BLOCK=block,
                STAGES=3 if 2 * ahead <= PREFETCH else 2,
                **flags,
                num_warps=warps,
            )
        else:
            projection = torch.empty(2, N, dtype=torch.float32, device=x.device)
            pieces = cdiv(D, PIECE)
            programs = min(N, max(1, multiprocessors(x) * 4 // pieces))
            parts = torch.empty(kinds, programs, D, dtype=torch.float32, device=x.device)
            _row_means[(N,)](
                given,
                flat,
                weight,
                sums,
                rstd,
                projection[0],
                projection[1],
                D,
                given.stride(0),
                flat.stride(0),
                BLOCK=PIECE,
                CENTRED=mean is not None,
                num_warps=8,
            )
            _gradients_long[(pieces, programs)](
                given,
                direct,
                flat,
                weight,
                sums,
                rstd,
                projection[0],
                projection[1],
                dx,
                parts,
                N,
                D,
                given.stride(0),
                direct.stride(0),
                flat.stride(0),
                BLOCK=PIECE,
                **flags,
                num_warps=8,
            )
        _add_parts[(cdiv(D, 32), kinds)](
            parts, dweight, dbias, programs, D, ROWS=min(power_of_2(programs), 256), BLOCK=32, num_warps=8
        )
    return dx, dweight, dbias


def _gradients_spread(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    piece: int,
) -> None:
    """The backward pass of few long rows x (N, D)."""
    N, D = x.shape
    pieces = cdiv(D, piece)
    centred = mean is not None
    sums = torch.empty(2 if centred else 1, N, pieces, dtype=torch.float32, device=x.device)
    means = rstd if mean is None else mean
    rows_, columns = SPREAD_TILE
    rows_ = min(rows_, power_of_2(N))
    with on(x):
        _piece_means[(N * pieces,)](
            dy,
            x,
            weight,
            means,
            rstd,
            sums,
            N,
            D,
            pieces,
            dy.stride(0),
            x.stride(0),
            BLOCK=piece,
            CENTRED=centred,
            num_warps=min(max(piece // 256, 4), 16),
        )
        _gradients_columns[(cdiv(D, columns),)](
            dy,
            dy if dh is None else dh,
            x,
            weight,
            means,
            rstd,
            sums,
            *results,
            N,
            D,
            pieces,
            dy.stride(0),
            dy.stride(0) if dh is None else dh.stride(0),
            x.stride(0),
            ROWS=rows_,
            BLOCK=columns,
            PIECES=power_of_2(pieces),
            RESIDUAL=dh is not None,
            CENTRED=centred,
            num_warps=4,
        )


def empty_gradients(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for the results of `gradients`."""
    dx = dense_like(x)
    return dx, torch.empty_like(weight), torch.empty_like(weight)
