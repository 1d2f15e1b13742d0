"""Backward pass of normalization (see `_norm`): kernels, plans, and their launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, cdiv, dense_like, in_rows, multiprocessors, power_of_2, rows
from .._launch import Launch, room, room_like
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
    shift_of,
    within,
)
from ._norm import MOST_PARTS, PARTS_FROM, PIECE, Inputs, Plan, spread

BACKWARD_LIMIT = 16 if INTERPRETED else 8192

PREFETCH = 96 * 1024

BACKWARD_PARTS_FROM = 8 if INTERPRETED else 2048

BACKWARD_LONG = 4

SPREAD_TILES = ((2, 16, 4), (4, 16, 4)) if INTERPRETED else ((8, 128, 4), (32, 128, 4))
LONG_TILE = (2, 16, 4) if INTERPRETED else (8, 512, 4)
LONG = 1 << 17
"""Rows longer than this, and centred ones, give enough programs with fewer rows of more columns each."""


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

    All rows of a program lie equally to 16-byte boundaries, so that its columns are the same numbers of each:
    where rows are shifted, the number of programs is a multiple of VECTOR.
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


def backward_plan(x: torch.Tensor, N: int, D: int, centred: bool, access: Access) -> Plan:
    """The backward pass of N rows of D elements, by measurements on an H200."""
    block = power_of_2(D)
    if block > BACKWARD_LIMIT and (piece := spread(x, N, D, BACKWARD_LIMIT)):
        return Plan("spread", 1, piece, cdiv(D + access.margin, piece), min(max(piece // 256, 4), 16))
    wide = D + access.margin
    vector = 16 // x.element_size()
    if D >= PARTS_FROM and block != D and D <= BACKWARD_LIMIT:
        if D > BACKWARD_PARTS_FROM:
            # 24 numbers of each tensor a thread, and with a mean up to 56: fewer threads then are quicker.
            few = multiprocessors(x) >= N
            warps = 4 if (centred or access.SHIFTED) and not few else 8
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


def _spread_tile(D: int, centred: bool, shifted: bool) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program that goes down the columns of few long rows."""
    return LONG_TILE if not shifted and (centred or D > LONG) else SPREAD_TILES[not shifted]


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
    """The backward pass of tensors like these, as `plan` and `tile` say or as it is chosen for them.

    A function of the tensors. It gives dx (…, D) in x's dtype, dweight and dbias (D,) in the weight's; dbias only
    where `mean` is given, else dweight. x is what was normalized, with the residual in it; dh is the gradient that
    reaches it directly.
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
        launch = _columns((N, D), strides, plan, reach, flags, tile or _spread_tile(D, centred, reach.SHIFTED))
    elif plan.kind in ("whole", "parts"):
        launch = _rows_at_once(x, (N, D), strides, plan, reach, flags)
    else:
        launch = _rows_by_pieces(x, (N, D), strides, reach, flags)
    device = x.device
    of_x, of_weight = room_like(x), room_like(weight)
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
        dweight = of_weight()
        results = of_x(), dweight, of_weight() if centred else dweight
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
    of_parts = room((kinds, programs, D), torch.float32, x.device)

    def launch(device: torch.device, inputs: Inputs, statistics: Any, results: Any) -> None:
        if alone:
            make(device, inputs, statistics, results)
            return
        dx, dweight, dbias = results
        parts = of_parts()
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
