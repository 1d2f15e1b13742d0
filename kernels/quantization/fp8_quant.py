"""Dynamic quantization to 8-bit floats (Micikevicius et al., arXiv 2209.05433): one read, one write."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import torch
import triton
import triton.language as tl

from .._common import (
    INTERPRETED,
    add_parts,
    cdiv,
    check,
    choice,
    in_rows,
    most_registers,
    needs_e4m3,
    operator,
    power_of_2,
    rows,
    sigmoid,
    tanh_slope,
)
from .._launch import Launch, prepared, room

GROUP = 128
"""Columns that share a scale with granularity "block", rows with "column", both with "tile"."""

GRANULARITIES = ("row", "block", "tile", "column", "both", "tile_both")

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

LAYOUTS = ("rows", "matmul")

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}

LIMIT = 512 if INTERPRETED else 32768
"""Longest row held in registers; longer ones are read twice, the second time from the L2 cache."""

PIECE = 256 if INTERPRETED else 8192
"""Piece of a longer row."""

BLOCK_ROWS, BLOCK_GROUPS, BLOCK_WARPS = 8, 16, 4
"""Rows, where scales lie column by column, groups and warps of a program of granularity "block"."""

TILE_WARPS = 4

COLUMNS, COLUMN_WARPS = 64, 4
"""Columns and warps of a program of granularity "column"; a row that it writes has the 128 bytes of a group."""

BOTH_WARPS = 8
"""Of a program with maxima along rows and columns: 128 × 128 numbers in fp32 are 64 registers a thread."""

CACHED = 64 << 20
"""Size of x up to which it is quicker to say that nothing read or written is worth caching: 2 % at 32 MiB on an
H200; at 128 MiB saying so costs as much.
"""


Two = tuple[torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@overload
def fp8_quant(
    x: torch.Tensor,
    granularity: Literal["row", "block", "tile", "column"] = "row",
    format: str = "e4m3",
    layout: str = "rows",
) -> Two: ...


@overload
def fp8_quant(
    x: torch.Tensor, granularity: Literal["both", "tile_both"], format: str = "e4m3", layout: str = "rows"
) -> Four: ...


def fp8_quant(x: torch.Tensor, granularity: str = "row", format: str = "e4m3", layout: str = "rows") -> Two | Four:
    """(q, scale) with q · scale ≈ x and the largest magnitude of each group at the largest fp8 number.

    x (…, N) in bf16, fp16 or fp32. q has x's shape, in float8_e4m3fn ("e4m3") or float8_e5m2 ("e5m2"),
    rounded to nearest even. scale is fp32: with granularity "row" (…, 1), with "block" (…, ceil(N/128)), with
    "tile", which takes squares of 128 rows and columns of x as (M, N), (ceil(M/128), ceil(N/128)).

    "column" is "block" of the transpose of x as (M, N), in one pass: q (N, M), scale (N, ceil(M/128)). A product
    that sums over the rows of x, as a weight's gradient does, takes it so. Its scale lies as "matmul" has it,
    column by column, whatever the layout.

    A linear layer's forward and backward passes take one tensor as it is and transposed. "both" gives "block" and
    "column" in one read of x: (q, scale, q of the transpose, its scale), both scales as "matmul" has them.
    "tile_both" gives "tile" so; the transpose's scale is the transpose of the scale.

    `layout` says how scale lies in memory: "rows" is row-major; "matmul" is what `torch.nn.functional.scaled_mm`
    wants: column-major of "block" (activations, BlockWise1x128), and of "tile" (weights (N, K), BlockWise128x128)
    rows padded to four numbers, for its transpose. A group whose magnitudes are below 1e-30 counts as 1e-30 large.
    Not differentiable.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device, granularity, format or
    layout; the message names the argument.
    """
    if granularity == "both" and layout in LAYOUTS:
        four: Four = _fp8_quant_both(x, format)
        return four
    if granularity == "tile_both":
        q, scale, turned = _fp8_quant_tile_both(x, format, layout)
        return q, scale, turned, scale.t()
    # "both" with a wrong layout comes here too: its operator takes none, this one's check says what is wrong.
    two: Two = _fp8_quant(x, granularity, format, layout)
    return two


def _check(x: torch.Tensor, granularity: str, format: str, layout: str) -> None:
    check("x", x)
    if x.dim() == 0:
        raise ValueError("x has shape (), expected at least one dimension")
    choice("granularity", granularity, GRANULARITIES)
    choice("format", format, tuple(FORMATS))
    choice("layout", layout, LAYOUTS)


def _check_both(x: torch.Tensor, format: str) -> None:
    _check(x, "both", format, "rows")


def _check_tile_both(x: torch.Tensor, format: str, layout: str) -> None:
    _check(x, "tile_both", format, layout)


@triton.jit
def _row(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, q, scales, M, N, stride, LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """ROWS whole rows a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row < M)[:, None] & (col < N)[None, :]
    value = tl.load(x + row[:, None] * stride + col[None, :], inside, 0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(value), 1), 1e-30)
    tl.store(scales + row, largest / LARGEST, row < M)
    value = value * (LARGEST / largest)[:, None]
    tl.store(q + row[:, None] * N + col[None, :], value.to(q.dtype.element_ty), inside)


@triton.jit
def _long_row(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, q, scales, M, N, stride, LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program, in pieces, twice."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + col, col < N, 0.0, eviction_policy="evict_last")
        most = tl.maximum(most, tl.abs(value.to(tl.float32)))
    largest = tl.maximum(tl.max(most, 0), 1e-30)
    tl.store(scales + row, largest / LARGEST)
    factor = LARGEST / largest
    for start in range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + col, col < N, 0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(q + row * N + col, (value * factor).to(q.dtype.element_ty), col < N)


@triton.jit
def _block(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    q,
    scales,
    M,
    N,
    across,
    blocks,
    stride,
    row_step,
    group_step,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    HINT: tl.constexpr,
):
    """GROUPS groups of each of ROWS rows a program, each in 16 threads of one warp: maxima need no shared memory.

    One division a program: a row and column for every group cost a division of 64 bits each.
    """
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS
    first = (tl.program_id(0) % blocks).to(tl.int64) * GROUPS
    x += row * stride + first * GROUP
    q += row * N + first * GROUP
    scales += row * row_step + first * group_step
    height = tl.minimum(M - row, ROWS).to(tl.int32)
    left = tl.minimum(N - first * GROUP, GROUPS * GROUP).to(tl.int32)
    index = tl.arange(0, ROWS * GROUPS)
    # Rows are what runs fastest, as scales lie in memory column by column.
    down = index % ROWS
    group = index // ROWS
    col = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (down < height)[:, None] & (col < left)
    value = tl.load(x + down[:, None] * tl.cast(stride, tl.int64) + col, inside, 0.0, eviction_policy=HINT)
    value = value.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(value), 1), 1e-30)
    at = down * tl.cast(row_step, tl.int64) + group * tl.cast(group_step, tl.int64)
    tl.store(scales + at, largest / LARGEST, (down < height) & (group < across - first))
    value = (value * (LARGEST / largest)[:, None]).to(q.dtype.element_ty)
    tl.store(q + down[:, None] * tl.cast(N, tl.int64) + col, value, inside, eviction_policy=HINT)


@triton.jit
def _tile(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, q, scales, turned, M, N, stride, row_step, LARGEST: tl.constexpr, GROUP: tl.constexpr, HINT: tl.constexpr
):
    """One square of GROUP rows and columns a program. `turned`, if it is not None, gets the transpose."""
    across = tl.cdiv(N, GROUP)
    down = (tl.program_id(0) // across).to(tl.int64)
    first = tl.program_id(0) % across
    row = down * GROUP + tl.arange(0, GROUP)
    col = first * GROUP + tl.arange(0, GROUP)
    inside = (row < M)[:, None] & (col < N)[None, :]
    at = x + row[:, None] * stride + col[None, :]
    value = tl.load(at, inside, 0.0, eviction_policy=HINT).to(tl.float32)
    largest = tl.maximum(tl.max(tl.max(tl.abs(value), 1), 0), 1e-30)
    tl.store(scales + down * row_step + first, largest / LARGEST)
    value = (value * (LARGEST / largest)).to(q.dtype.element_ty)
    tl.store(q + row[:, None] * N + col[None, :], value, inside, eviction_policy=HINT)
    if turned is not None:
        across_rows = turned + col.to(tl.int64)[:, None] * M + row[None, :]
        tl.store(across_rows, tl.trans(value), tl.trans(inside), eviction_policy=HINT)


@triton.jit
def _column(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    q,
    scales,
    M,
    N,
    stride,
    LARGEST: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    HINT: tl.constexpr,
):
    """GROUP rows of COLUMNS columns a program, written as COLUMNS rows; a scale for each."""
    across = tl.cdiv(N, COLUMNS)
    group = (tl.program_id(0) // across).to(tl.int64)
    row = group * GROUP + tl.arange(0, GROUP)
    col = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < M)[:, None] & (col < N)[None, :]
    value = tl.load(x + row[:, None] * stride + col[None, :], inside, 0.0, eviction_policy=HINT).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(value), 0), 1e-30)
    tl.store(scales + group * N + col, largest / LARGEST, col < N)
    value = (value * (LARGEST / largest)[None, :]).to(q.dtype.element_ty)
    at = q + col.to(tl.int64)[:, None] * M + row[None, :]
    tl.store(at, tl.trans(value), tl.trans(inside), eviction_policy=HINT)


@triton.jit
def _both(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    q,
    scales,
    turned,
    turned_scales,
    others,
    M,
    N,
    stride,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
    HINT: tl.constexpr,
    OF: tl.constexpr,
):
    """GROUP rows of GROUP columns a program: `_block` with scales column by column, and `_column`, of one read.

    Of what is computed of x first, of `others`:

    ===============  ==========================================  ==================================================
    OF               what is quantized                           others
    ===============  ==========================================  ==================================================
    x                x                                           –
    sums             x                                           (N-wide sums of each group's rows, written)
    rms_norm         x · rstd · weight                           (weight of columns, rstd of rows)
    layer_norm       (x - mean) · rstd · weight + bias           (weight, bias of columns, mean, rstd of rows)
    swiglu           silu(x) · up                                (up, which lies as x)
    gelu             gelu(x), its tanh form                      –
    gelu_gradient    x · the slope of that at y                  (y, which lies as x; sums of what is quantized, as
                                                                 above)
    ===============  ==========================================  ==================================================
    """
    across = tl.cdiv(N, GROUP)
    group = (tl.program_id(0) // across).to(tl.int64)
    beside = (tl.program_id(0) % across).to(tl.int64)
    row = group * GROUP + tl.arange(0, GROUP)
    col = beside * GROUP + tl.arange(0, GROUP)
    inside = (row < M)[:, None] & (col < N)[None, :]
    value = tl.load(x + row[:, None] * stride + col[None, :], inside, 0.0, eviction_policy=HINT).to(tl.float32)
    if OF == "rms_norm":
        weight, rstds = others
        weight = tl.load(weight + col, col < N, 0.0).to(tl.float32)
        value = value * tl.load(rstds + row, row < M, 0.0)[:, None] * weight[None, :]
    elif OF == "layer_norm":
        weight, bias, means, rstds = others
        weight = tl.load(weight + col, col < N, 0.0).to(tl.float32)
        bias = tl.load(bias + col, col < N, 0.0).to(tl.float32)
        value -= tl.load(means + row, row < M, 0.0)[:, None]
        value = value * tl.load(rstds + row, row < M, 0.0)[:, None] * weight[None, :] + bias[None, :]
        # Rows that are not there would have the bias, which no maximum of a column may see.
        value = tl.where(inside, value, 0.0)
    elif OF == "swiglu":
        up = tl.load(others[0] + row[:, None] * stride + col[None, :], inside, 0.0, eviction_policy=HINT)
        value = value * sigmoid(value) * up.to(tl.float32)
    elif OF == "gelu":
        half, _ = tanh_slope(value)
        value = value * half
    elif OF == "gelu_gradient":
        y = tl.load(others[0] + row[:, None] * stride + col[None, :], inside, 0.0, eviction_policy=HINT)
        _, slope = tanh_slope(y.to(tl.float32))
        value = value * slope
    if OF == "sums" or OF == "gelu_gradient":
        sums = others[0] if OF == "sums" else others[1]
        tl.store(sums + group * N + col, tl.sum(value, 0), col < N)
    largest = tl.maximum(tl.max(tl.abs(value), 1), 1e-30)
    tl.store(scales + beside * M + row, largest / LARGEST, row < M)
    own = (value * (LARGEST / largest)[:, None]).to(q.dtype.element_ty)
    tl.store(q + row[:, None] * N + col[None, :], own, inside, eviction_policy=HINT)
    largest = tl.maximum(tl.max(tl.abs(value), 0), 1e-30)
    tl.store(turned_scales + group * N + col, largest / LARGEST, col < N)
    own = (value * (LARGEST / largest)[None, :]).to(q.dtype.element_ty)
    tl.store(turned + col[:, None] * M + row[None, :], tl.trans(own), tl.trans(inside), eviction_policy=HINT)


@triton.jit
def _maxima(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, of_rows, of_columns, beside, M, N, stride, GROUP: tl.constexpr
):
    """The largest magnitude of each row and of each column, of GROUP rows and columns a program. What is beside
    them, if it is not None, gets the sum of each group's rows, as rows of N.

    A magnitude's bits are in its order as whole numbers, and a maximum is the same in any order.
    """
    sums = beside[0]
    across = tl.cdiv(N, GROUP)
    group = (tl.program_id(0) // across).to(tl.int64)
    row = group * GROUP + tl.arange(0, GROUP)
    col = (tl.program_id(0) % across) * GROUP + tl.arange(0, GROUP)
    inside = (row < M)[:, None] & (col < N)[None, :]
    value = tl.load(x + row[:, None] * stride + col[None, :], inside, 0.0).to(tl.float32)
    if sums is not None:
        tl.store(sums + group * N + col, tl.sum(value, 0), col < N)
    value = tl.abs(value)
    tl.atomic_max(of_rows + row, tl.max(value, 1).to(tl.int32, bitcast=True), row < M, sem="relaxed")
    tl.atomic_max(of_columns + col, tl.max(value, 0).to(tl.int32, bitcast=True), col < N, sem="relaxed")


@triton.jit
def _rows_both(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    q,
    scales,
    turned,
    turned_scales,
    of_rows,
    of_columns,
    M,
    N,
    stride,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
    HINT: tl.constexpr,
):
    """GROUP rows of GROUP columns a program, as they are and transposed, by what `_maxima` found."""
    across = tl.cdiv(N, GROUP)
    group = (tl.program_id(0) // across).to(tl.int64)
    beside = (tl.program_id(0) % across).to(tl.int64)
    row = group * GROUP + tl.arange(0, GROUP)
    col = beside * GROUP + tl.arange(0, GROUP)
    inside = (row < M)[:, None] & (col < N)[None, :]
    value = tl.load(x + row[:, None] * stride + col[None, :], inside, 0.0, eviction_policy=HINT).to(tl.float32)
    largest = tl.maximum(tl.load(of_rows + row, row < M, 0).to(tl.float32, bitcast=True), 1e-30)
    tl.store(scales + row, largest / LARGEST, (row < M) & (beside == 0))
    own = (value * (LARGEST / largest)[:, None]).to(q.dtype.element_ty)
    tl.store(q + row[:, None] * N + col[None, :], own, inside, eviction_policy=HINT)
    largest = tl.maximum(tl.load(of_columns + col, col < N, 0).to(tl.float32, bitcast=True), 1e-30)
    tl.store(turned_scales + col, largest / LARGEST, (col < N) & (group == 0))
    own = (value * (LARGEST / largest)[None, :]).to(q.dtype.element_ty)
    tl.store(turned + col[:, None] * M + row[None, :], tl.trans(own), tl.trans(inside), eviction_policy=HINT)


def _empty(x: torch.Tensor, granularity: str, format: str, layout: str) -> Two:
    """Memory for q and scale."""
    *rest, N = x.shape
    if granularity == "column":
        M = math.prod(rest)
        q = torch.empty(N, M, dtype=FORMATS[format], device=x.device)
        return q, torch.empty(-(-M // GROUP), N, dtype=torch.float32, device=x.device).t()
    q = torch.empty(x.shape, dtype=FORMATS[format], device=x.device)
    if granularity == "row":
        return q, torch.empty(*rest, 1, dtype=torch.float32, device=x.device)
    across = -(-N // GROUP)
    if granularity == "tile":
        shape = (-(-math.prod(rest) // GROUP), across)
        if layout == "rows":
            return q, torch.empty(shape, dtype=torch.float32, device=x.device)
        padded = torch.empty(shape[0], -(-across // 4) * 4, dtype=torch.float32, device=x.device)
        return q, padded[:, :across]
    if layout == "rows":
        return q, torch.empty(*rest, across, dtype=torch.float32, device=x.device)
    return q, torch.empty(across, *rest, dtype=torch.float32, device=x.device).movedim(0, -1)


def _of_nothing(found: Any, format: str) -> Any:
    """Results that `_empty…` gave for a tensor without elements: scales are as those of zeros."""
    for result in found:
        if result.dtype == torch.float32:
            result.fill_(1e-30 / LARGEST[format])
    return found


def _room(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Takes memory that lies as what `_empty…` gave."""
    if like.dim() == 2 and like.stride(1) == 1 and like.stride(0) > like.shape[1]:
        # Rows padded to four scales. Memory of these strides alone would end with the last row's own scales, and
        # who reads four at a time reads its padding too.
        height, across = like.shape
        padded = room((height, like.stride(0)), like.dtype, like.device)
        return lambda: padded().narrow(1, 0, across)
    return room(like.shape, like.dtype, like.device, like.stride())


def _hint(x: torch.Tensor) -> str:
    """What is said of caching x and what is made of it."""
    return "evict_first" if x.numel() * x.element_size() <= CACHED else ""


def _of_rows(flat: torch.Tensor, format: str) -> Launch:
    """A scale for each of the rows (M, N)."""
    M, N = flat.shape
    if (block := power_of_2(N)) > LIMIT:
        return Launch(
            _long_row,
            (M,),
            M,
            N,
            flat.stride(0),
            LARGEST=LARGEST[format],
            ROWS=1,
            BLOCK=PIECE,
            num_warps=16,
        )
    tall = power_of_2(max(1, min(4096 // block, M)))
    return Launch(
        _row,
        (cdiv(M, tall),),
        M,
        N,
        flat.stride(0),
        LARGEST=LARGEST[format],
        ROWS=tall,
        BLOCK=block,
        num_warps=min(max(tall * block // 1024, 4), 32),
    )


def _of_blocks(flat: torch.Tensor, format: str, layout: str) -> Launch:
    """A scale for each GROUP columns of each row."""
    (M, N), stride = flat.shape, flat.stride(0)
    across = cdiv(N, GROUP)
    if layout == "rows":
        height, row_step, group_step = 1, across, 1
        if N % GROUP == 0 and flat.is_contiguous():
            # Groups do not know rows: one row, and no programs that end with it.
            M, N, across, stride = 1, M * N, M * across, M * N
    else:
        height, row_step, group_step = BLOCK_ROWS, 1, M
    wide = BLOCK_GROUPS // height
    blocks = cdiv(across, wide)
    return Launch(
        _block,
        (cdiv(M, height) * blocks,),
        M,
        N,
        across,
        blocks,
        stride,
        row_step,
        group_step,
        LARGEST=LARGEST[format],
        ROWS=height,
        GROUPS=wide,
        GROUP=GROUP,
        HINT=_hint(flat),
        num_warps=BLOCK_WARPS,
    )


def _of_columns(flat: torch.Tensor, format: str) -> Launch:
    """A scale for each GROUP rows of each column, and the transpose of the values."""
    M, N = flat.shape
    return Launch(
        _column,
        (cdiv(M, GROUP) * cdiv(N, COLUMNS),),
        M,
        N,
        flat.stride(0),
        LARGEST=LARGEST[format],
        COLUMNS=COLUMNS,
        GROUP=GROUP,
        HINT=_hint(flat),
        num_warps=COLUMN_WARPS,
    )


def _of_tiles(flat: torch.Tensor, scale: torch.Tensor, format: str, *absent: None) -> Launch:
    """A scale for each square of GROUP rows and columns. `absent` is None where the transpose is not wanted."""
    return Launch(
        _tile,
        (scale.numel(),),
        *absent,
        *flat.shape,
        flat.stride(0),
        scale.stride(0),
        LARGEST=LARGEST[format],
        GROUP=GROUP,
        HINT=_hint(flat),
        num_warps=TILE_WARPS,
    )


def _prepare(x: torch.Tensor, granularity: str, format: str, layout: str) -> Callable[..., Two]:
    if x.numel() == 0:
        return lambda *arguments: _of_nothing(_empty(*arguments), format)
    if format == "e4m3":
        needs_e4m3("fp8_quant to E4M3", x)
    q, scale = _empty(x, granularity, format, layout)
    flat = rows(x)
    if granularity == "block":
        launch = _of_blocks(flat, format, layout)
    elif granularity == "column":
        launch = _of_columns(flat, format)
    elif granularity == "tile":
        launch = _of_tiles(flat, scale, format, None)
    else:
        launch = _of_rows(flat, format)
    of_q, of_scale = _room(q), _room(scale)
    device, copied = x.device, not in_rows(x)

    def run(x: torch.Tensor, *_: str) -> Two:
        found = q, scale = of_q(), of_scale()
        launch(device, rows(x) if copied else x, q, scale)
        return found

    return run


_fp8_quant = operator(
    "fp8_quant(Tensor x, str granularity, str format, str layout) -> (Tensor, Tensor)",
    prepared(_prepare, _check),
    _empty,
    check=_check,
)


def _empty_both(x: torch.Tensor, format: str) -> Four:
    """Memory for values and scales of blocks, and of the transpose's."""
    return *_empty(x, "block", format, "matmul"), *_empty(x, "column", format, "matmul")


def _planned_both(x: torch.Tensor, format: str, of: str = "x") -> Callable[..., Four]:
    """`_both` for tensors like x: a function of x, which lies in rows by then, and of `others`."""
    if x.numel() == 0:
        return lambda x, *_: _of_nothing(_empty_both(x, format), format)
    if format == "e4m3":
        needs_e4m3("fp8_quant to E4M3", x)
    flat = rows(x)
    M, N = flat.shape
    launch = Launch(
        _both,
        (cdiv(M, GROUP) * cdiv(N, GROUP),),
        M,
        N,
        flat.stride(0),
        LARGEST=LARGEST[format],
        GROUP=GROUP,
        HINT=_hint(x),
        OF=of,
        num_warps=BOTH_WARPS,
        # Two programs at a time on a multiprocessor: it would take 140.
        **most_registers(x, 128 if of == "gelu_gradient" else None),
    )
    of_q, of_scale, of_turned, of_turned_scale = map(_room, _empty_both(x, format))
    device = x.device

    def run(x: torch.Tensor, *others: torch.Tensor) -> Four:
        found = of_q(), of_scale(), of_turned(), of_turned_scale()
        launch(device, x, *found, others or (None,))
        return found

    return run


def _prepare_both(x: torch.Tensor, format: str) -> Callable[..., Four]:
    run, copied = _planned_both(x, format), not in_rows(x)
    return lambda x, format: run(rows(x) if copied else x)


_fp8_quant_both = operator(
    "fp8_quant_both(Tensor x, str format) -> (Tensor, Tensor, Tensor, Tensor)",
    prepared(_prepare_both, _check_both),
    _empty_both,
    check=_check_both,
)


def norm_both(h: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> Four:
    """`fp8_quant(h · rstd · weight, "both")` of what is in memory nowhere else: an RMS norm of h (M, K) in bf16,
    fp16 or fp32, by rstd (M,) in fp32 and weight (K,).
    """
    four: Four = _norm_both(h, rstd, weight)
    return four


def swiglu_both(gate: torch.Tensor, up: torch.Tensor) -> Four:
    """`fp8_quant(silu(gate) · up, "both")` of what is in memory nowhere else. gate and up (M, N) of one dtype."""
    four: Four = _swiglu_both(gate, up)
    return four


def _check_norm_both(h: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> None:
    check("h", h, dim=2)
    check("rstd", rstd, shape=h.shape[:1], like=h, dtypes=(torch.float32,))
    check("weight", weight, shape=h.shape[1:], like=h)


def _check_swiglu_both(gate: torch.Tensor, up: torch.Tensor) -> None:
    check("gate", gate, dim=2)
    check("up", up, shape=gate.shape, like=gate, dtypes=(gate.dtype,))


def _prepare_norm_both(h: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> Callable[..., Four]:
    planned = _planned_both(h, "e4m3", "rms_norm")
    copied = h.numel() > 0 and not (in_rows(h) and rstd.is_contiguous() and weight.is_contiguous())

    def run(h: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> Four:
        if copied:
            h, rstd, weight = rows(h), rstd.contiguous(), weight.contiguous()
        return planned(h, weight, rstd)

    return run


def _prepare_swiglu_both(gate: torch.Tensor, up: torch.Tensor) -> Callable[..., Four]:
    copied = gate.stride(1) != 1 or gate.stride() != up.stride()  # which lie alike
    planned = _planned_both(gate.contiguous() if copied else gate, "e4m3", "swiglu")

    def run(gate: torch.Tensor, up: torch.Tensor) -> Four:
        if copied:
            gate, up = gate.contiguous(), up.contiguous()
        return planned(gate, up)

    return run


def both_summed(x: torch.Tensor) -> Five:
    """`fp8_quant(x, "both")` of x (M, N) in bf16, fp16 or fp32, and the sums of its columns (N,), of one read:
    what a layer with a bias wants of its output's gradient. They are added in fp32, in an order of their own that
    is the same each time, and rounded to x's dtype.
    """
    five: Five = _both_summed(x)
    return five


def _check_matrix(x: torch.Tensor) -> None:
    check("x", x, dim=2)


def _prepare_both_summed(x: torch.Tensor) -> Callable[..., Five]:
    planned, copied = _planned_summed(x, "sums"), not in_rows(x)
    return lambda x: planned(rows(x) if copied else x)


def _planned_summed(x: torch.Tensor, of: str) -> Callable[..., Five]:
    """`_planned_both`, and the sums of columns in x's dtype."""
    planned = _planned_both(x, "e4m3", of)
    if x.numel() == 0:
        return lambda x, *others: (*planned(x), x.new_zeros(x.shape[1]))
    of_parts, summed = _adding(x)

    def run(x: torch.Tensor, *others: torch.Tensor) -> Five:
        parts = of_parts()
        return *planned(x, *others, parts), summed(parts)

    return run


def _adding(x: torch.Tensor) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Takes memory for sums of columns by groups of rows, and adds them, to x's dtype."""
    (M, N), device = x.shape, x.device
    groups = cdiv(M, GROUP)
    of_sums = room((N,), x.dtype, device)
    add = Launch(add_parts, (cdiv(N, 32),), groups, N, ROWS=min(power_of_2(groups), 256), BLOCK=32, num_warps=8)

    def summed(parts: torch.Tensor) -> torch.Tensor:
        sums = of_sums()
        add(device, parts, sums)
        return sums

    return room((groups, N), torch.float32, device), summed


def rows_both(x: torch.Tensor) -> Four:
    """`fp8_quant(x, "row")` of x (M, N) in bf16, fp16 or fp32, and of its transpose: (q (M, N), scale (M, 1), q of
    the transpose (N, M), its scale (N, 1)), of two reads of x as it lies.
    """
    four: Four = _fp8_quant_rows_both(x)
    return four


def rows_both_summed(x: torch.Tensor) -> Five:
    """`rows_both`, and the sums of columns as `both_summed` has them, of the same two reads. They are added in an
    order of their own here too: both agree as sums in fp32 do, and not to the last bit.
    """
    five: Five = _fp8_quant_rows_both_summed(x)
    return five


def _empty_rows_both(x: torch.Tensor) -> Four:
    """Memory for values and scales of rows, and of the transpose's."""
    return *_empty(x, "row", "e4m3", "rows"), *_empty(x.t(), "row", "e4m3", "rows")


def _prepare_rows_both(x: torch.Tensor, summed: bool = False) -> Callable[..., Any]:
    if x.numel() == 0:

        def nothing(x: torch.Tensor) -> Any:
            found = _of_nothing(_empty_rows_both(x), "e4m3")
            return (*found, x.new_zeros(x.shape[1])) if summed else found

        return nothing
    needs_e4m3("fp8_quant to E4M3", x)
    (M, N), flat, device = x.shape, rows(x), x.device
    grid = (cdiv(M, GROUP) * cdiv(N, GROUP),)
    of: dict[str, Any] = {"GROUP": GROUP, "num_warps": BOTH_WARPS}
    find = Launch(_maxima, grid, M, N, flat.stride(0), **of)
    write = Launch(_rows_both, grid, M, N, flat.stride(0), LARGEST=LARGEST["e4m3"], HINT=_hint(x), **of)
    of_results = tuple(map(_room, _empty_rows_both(flat)))
    of_maxima = room((M + N,), torch.int32, device)
    of_parts, add = _adding(x)
    copied = not in_rows(x)

    def run(x: torch.Tensor) -> Any:
        x = rows(x) if copied else x
        maxima = of_maxima().zero_().split((M, N))
        parts = of_parts() if summed else None
        find(device, x, *maxima, (parts,))
        found = tuple(take() for take in of_results)
        write(device, x, *found, *maxima)
        return found if parts is None else (*found, add(parts))

    return run


def layer_norm_both(
    h: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> Four:
    """`fp8_quant((h - mean) · rstd · weight + bias, "both")` of what is in memory nowhere else: a layer norm of h
    (M, K) in bf16, fp16 or fp32, by mean and rstd (M,) in fp32, weight and bias (K,).
    """
    four: Four = _layer_norm_both(h, mean, rstd, weight, bias)
    return four


def _check_layer_norm_both(
    h: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> None:
    check("h", h, dim=2)
    check("mean", mean, shape=h.shape[:1], like=h, dtypes=(torch.float32,))
    check("rstd", rstd, shape=h.shape[:1], like=h, dtypes=(torch.float32,))
    check("weight", weight, shape=h.shape[1:], like=h)
    check("bias", bias, shape=h.shape[1:], like=h, dtypes=(weight.dtype,))


def _prepare_layer_norm_both(
    h: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> Callable[..., Four]:
    planned, copied = _planned_both(h, "e4m3", "layer_norm"), not in_rows(h)

    def run(
        h: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> Four:
        h = rows(h) if copied else h
        return planned(h, *(x.contiguous() for x in (weight, bias, mean, rstd)))

    return run


def gelu_both(x: torch.Tensor) -> Four:
    """`fp8_quant(gelu(x), "both")`, gelu by its tanh form, of what is in memory nowhere else. x (M, N) in bf16,
    fp16 or fp32.
    """
    four: Four = _gelu_both(x)
    return four


def _prepare_gelu_both(x: torch.Tensor) -> Callable[..., Four]:
    planned, copied = _planned_both(x, "e4m3", "gelu"), not in_rows(x)
    return lambda x: planned(rows(x) if copied else x)


def gelu_gradient_both_summed(dy: torch.Tensor, x: torch.Tensor) -> Five:
    """`both_summed` of the gradient of x (M, N), from that of gelu(x) by its tanh form, in memory nowhere else. dy
    and x of one dtype, bf16, fp16 or fp32.
    """
    five: Five = _gelu_gradient_both_summed(dy, x)
    return five


def _check_gelu_gradient(dy: torch.Tensor, x: torch.Tensor) -> None:
    check("dy", dy, dim=2)
    check("x", x, shape=dy.shape, like=dy, dtypes=(dy.dtype,))


def _prepare_gelu_gradient(dy: torch.Tensor, x: torch.Tensor) -> Callable[..., Five]:
    copied = dy.stride(1) != 1 or dy.stride() != x.stride()  # which lie alike
    planned = _planned_summed(dy.contiguous() if copied else dy, "gelu_gradient")

    def run(dy: torch.Tensor, x: torch.Tensor) -> Five:
        if copied:
            dy, x = dy.contiguous(), x.contiguous()
        return planned(dy, x)

    return run


_both_summed = operator(
    "fp8_quant_both_summed(Tensor x) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    prepared(_prepare_both_summed, _check_matrix),
    lambda x: (*_empty_both(x, "e4m3"), x.new_empty(x.shape[1])),
    check=_check_matrix,
)
_fp8_quant_rows_both = operator(
    "fp8_quant_rows_both(Tensor x) -> (Tensor, Tensor, Tensor, Tensor)",
    prepared(_prepare_rows_both, _check_matrix),
    _empty_rows_both,
    check=_check_matrix,
)
_fp8_quant_rows_both_summed = operator(
    "fp8_quant_rows_both_summed(Tensor x) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    prepared(partial(_prepare_rows_both, summed=True), _check_matrix),
    lambda x: (*_empty_rows_both(x), x.new_empty(x.shape[1])),
    check=_check_matrix,
)
_layer_norm_both = operator(
    "layer_norm_both(Tensor h, Tensor mean, Tensor rstd, Tensor weight, Tensor bias)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    prepared(_prepare_layer_norm_both, _check_layer_norm_both),
    lambda h, mean, rstd, weight, bias: _empty_both(h, "e4m3"),
    check=_check_layer_norm_both,
)
_gelu_both = operator(
    "gelu_both(Tensor x) -> (Tensor, Tensor, Tensor, Tensor)",
    prepared(_prepare_gelu_both, _check_matrix),
    lambda x: _empty_both(x, "e4m3"),
    check=_check_matrix,
)
_gelu_gradient_both_summed = operator(
    "gelu_gradient_both_summed(Tensor dy, Tensor x) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    prepared(_prepare_gelu_gradient, _check_gelu_gradient),
    lambda dy, x: (*_empty_both(dy, "e4m3"), dy.new_empty(dy.shape[1])),
    check=_check_gelu_gradient,
)
_norm_both = operator(
    "norm_both(Tensor h, Tensor rstd, Tensor weight) -> (Tensor, Tensor, Tensor, Tensor)",
    prepared(_prepare_norm_both, _check_norm_both),
    lambda h, rstd, weight: _empty_both(h, "e4m3"),
    check=_check_norm_both,
)
_swiglu_both = operator(
    "swiglu_both(Tensor gate, Tensor up) -> (Tensor, Tensor, Tensor, Tensor)",
    prepared(_prepare_swiglu_both, _check_swiglu_both),
    lambda gate, up: _empty_both(gate, "e4m3"),
    check=_check_swiglu_both,
)


def _empty_tile_both(x: torch.Tensor, format: str, layout: str) -> Three:
    """Memory for values and scales of tiles, and for the transpose's values."""
    *rest, N = x.shape
    turned = torch.empty(N, math.prod(rest), dtype=FORMATS[format], device=x.device)
    return *_empty(x, "tile", format, layout), turned


def _prepare_tile_both(x: torch.Tensor, format: str, layout: str) -> Callable[..., Three]:
    if x.numel() == 0:
        return lambda *arguments: _of_nothing(_empty_tile_both(*arguments), format)
    if format == "e4m3":
        needs_e4m3("fp8_quant to E4M3", x)
    q, scale, turned = _empty_tile_both(x, format, layout)
    launch = _of_tiles(rows(x), scale, format)
    of_q, of_scale, of_turned = _room(q), _room(scale), _room(turned)
    device, copied = x.device, not in_rows(x)

    def run(x: torch.Tensor, *_: str) -> Three:
        found = of_q(), of_scale(), of_turned()
        launch(device, rows(x) if copied else x, *found)
        return found

    return run


_fp8_quant_tile_both = operator(
    "fp8_quant_tile_both(Tensor x, str format, str layout) -> (Tensor, Tensor, Tensor)",
    prepared(_prepare_tile_both, _check_tile_both),
    _empty_tile_both,
    check=_check_tile_both,
)
