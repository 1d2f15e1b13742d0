"""Gated RMS normalization, as between the scan and the output of Mamba-2 (Dao and Gu, arXiv 2405.21060).

One read of x and z, one write. Backward runs as many programs as the device holds at a time; each takes every
n-th row and keeps its part of the weight's gradient in registers; a second kernel adds the parts in a fixed
order, so that results repeat bit by bit. Rows too long for registers are taken in pieces, twice. Few of them are
spread over programs: forward by clusters or in two launches, backward means first, then all rows of some columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from .._cluster import ClusterLaunch, begin, clusters, exchange, few_registers, of_members
from .._common import (
    INTERPRETED,
    add_parts,
    cdiv,
    check,
    choice,
    dense_like,
    in_rows,
    multiprocessors,
    needs_gradient,
    operator,
    power_of_2,
    rows,
)
from .._launch import Launch, prepared
from .._pointwise import silu, silu_slope
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
)
from ._norm import Plan, spread

FORWARD_LIMIT = 16 if INTERPRETED else 16384
"""Longest group that forward holds in registers."""

BACKWARD_LIMIT = 8 if INTERPRETED else 8192
"""Longest group that backward holds."""

PIECE = 8 if INTERPRETED else 4096
"""Piece of a longer group."""

AHEAD = 8 if INTERPRETED else 4096
"""Blocks below it are read ahead by backward; longer ones have no registers left for it."""

PARTS = (8, 64) if INTERPRETED else (64, 65536)
"""Shortest row, and longest in bytes, of one group that forward holds in parts where it is no power of two."""

TWICE = 16 if INTERPRETED else 8192
"""Piece of a row of many that two launches take."""

TILE = (4, 16, 4) if INTERPRETED else (8, 128, 4)
"""Rows, columns and warps of a program that goes down the columns of few long rows; half as many rows of fp32 that
start anywhere.
"""


def gated_rms_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
    group: int | None = None,
    order: Literal["gate_first", "norm_first"] = "gate_first",
) -> torch.Tensor:
    """norm(x · silu(z)) · weight with order "gate_first", norm(x) · weight · silu(z) with "norm_first".

    norm(h) = h / √(mean(h²) + eps) over groups of `group` numbers of the last dimension, by default all of it.
    x and z (…, D) and weight (D,), in bf16, fp16 or fp32, to y (…, D) in x's dtype; computed in fp32.
    Differentiable in x, z and weight. Raises TypeError for a wrong type or dtype, ValueError for a wrong
    shape, device, group or order; the message names the argument.
    """
    choice("order", order, ("gate_first", "norm_first"))
    if not isinstance(x, torch.Tensor) or x.dim() == 0:
        _check(x, z, weight, eps, 1, True)
    size = max(x.shape[-1], 1) if group is None else group
    y: torch.Tensor
    if needs_gradient(x, z, weight):
        y = _saving(x, z, weight, eps, size, order == "gate_first")[0]
    else:
        y = _plain(x, z, weight, eps, size, order == "gate_first")
    return y


def _check(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, group: int, gate_first: bool
) -> None:
    check("x", x)
    if x.dim() == 0:
        raise ValueError("x has shape (), expected at least one dimension")
    check("z", z, shape=x.shape, like=x)
    check("weight", weight, shape=x.shape[-1:], like=x)
    if group < 1 or x.shape[-1] % group:
        raise ValueError(f"group is {group}, which does not divide the width {x.shape[-1]}")


@triton.jit
def _forward(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    outputs,
    sizes,
    strides,
    eps,
    FIRST: tl.constexpr,
    SAVE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS whole groups of D numbers a program; `groups` of them make a row."""
    x, z, weight = inputs
    y, rstds = outputs
    N, D, groups = sizes
    x_stride, z_stride = strides
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, start = at // groups, (at % groups) * D
    col = tl.arange(0, BLOCK)
    inside = (at < N)[:, None] & (col < D)[None, :]
    here = start[:, None] + col[None, :]
    value = tl.load(x + row[:, None] * x_stride + here, inside, 0.0).to(tl.float32)
    gate = silu(tl.load(z + row[:, None] * z_stride + here, inside, 0.0).to(tl.float32))
    # Read before the sum, which hides the wait.
    w = tl.load(weight + here, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    if FIRST:
        value *= gate
    rstd = 1.0 / tl.sqrt(tl.sum(value * value, 1) / D + eps)
    if SAVE:
        tl.store(rstds + at, rstd, at < N)
    value = value * rstd[:, None] * w
    if not FIRST:
        value *= gate
    tl.store(y + at[:, None] * D + col[None, :], value.to(y.dtype.element_ty), inside)


@triton.jit
def _forward_parts(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    outputs,
    sizes,
    strides,
    eps,
    FIRST: tl.constexpr,
    SAVE: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """ROWS whole rows of one group a program, held in PARTS parts of PART columns. AHEAD: the weight is read
    before the sum is known.
    """
    x, z, weight = inputs
    y, rstds = outputs
    N, D = sizes
    first, row, down = same_rows(tl.program_id(0), ROWS, VECTOR, SHIFTED)
    rows = row < N
    shift = shift_of(x, first * strides[0], SHIFTED)
    source = boundary(x, first * strides[0], shift, VECTOR)
    source += tl.multiple_of(down * strides[0], [VECTOR, VECTOR])
    gates = boundary(z, first * strides[1], shift, VECTOR)
    gates += tl.multiple_of(down * strides[1], [VECTOR, VECTOR])
    target = boundary(y, first * D, shift, VECTOR)
    target += tl.multiple_of(down * D, [VECTOR, VECTOR])
    end = shift + D
    held = ()
    gated = ()
    weights = ()
    squares = tl.zeros([ROWS, PART], tl.float32)
    for i in tl.static_range(PARTS):
        value = get_part(source, shift, end, rows, 0.0, i, PART, PARTS, VECTOR, SHIFTED).to(tl.float32)
        gate = get_part(gates, shift, end, rows, 0.0, i, PART, PARTS, VECTOR, SHIFTED)
        if FIRST:
            value *= silu(gate.to(tl.float32))
        held += (value,)
        gated += (gate,)
        squares += value * value
        if AHEAD:
            weights += (of_part(weight, shift, end, ROWS, i, PART, PARTS, VECTOR, SHIFTED),)
    rstd = (1.0 / tl.sqrt(tl.sum(squares, 1) / D + eps))[:, None]
    if SAVE:
        tl.store(rstds + row, rstd, rows)
    for i in tl.static_range(PARTS):
        # y = h / √(mean(h²) + ε) · w, of h = x · silu(z), or of x and then times silu(z)
        w = weights[i] if AHEAD else of_part(weight, shift, end, ROWS, i, PART, PARTS, VECTOR, SHIFTED)
        value = held[i] * rstd * w.to(tl.float32)
        if not FIRST:
            value *= silu(gated[i].to(tl.float32))
        put_part(target, value, shift, end, rows, i, PART, PARTS, VECTOR, SHIFTED)


@triton.jit
def _forward_long(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    outputs,
    sizes,
    strides,
    eps,
    FIRST: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One group a program, in pieces, twice; the second time it comes from the L2 cache."""
    x, z, weight = inputs
    y, rstds = outputs
    D, groups = sizes[1], sizes[2]
    x_stride, z_stride = strides
    at = tl.program_id(0).to(tl.int64)
    start = (at % groups) * D
    x += (at // groups) * x_stride + start
    z += (at // groups) * z_stride + start
    squares = tl.zeros([BLOCK], tl.float32)
    for piece in range(0, D, BLOCK):
        col = piece + tl.arange(0, BLOCK)
        value = tl.load(x + col, col < D, 0.0).to(tl.float32)
        if FIRST:
            value *= silu(tl.load(z + col, col < D, 0.0).to(tl.float32))
        squares += value * value
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / D + eps)
    if SAVE:
        tl.store(rstds + at, rstd)
    for piece in range(0, D, BLOCK):
        col = piece + tl.arange(0, BLOCK)
        gate = silu(tl.load(z + col, col < D, 0.0).to(tl.float32))
        value = tl.load(x + col, col < D, 0.0).to(tl.float32) * rstd * gate
        value *= tl.load(weight + start + col, col < D, 0.0).to(tl.float32)
        tl.store(y + at * D + col, value.to(y.dtype.element_ty), col < D)


@triton.jit
def _forward_spread(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    outputs,
    sums,
    sizes,
    strides,
    eps,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    FIRST: tl.constexpr,
    SAVE: tl.constexpr,
    SUM: tl.constexpr,
    NORM: tl.constexpr,
    CLUSTER: tl.constexpr,
):
    """One piece of one row of one group. SUM: its sum of squares; NORM: its normalization by those of all pieces.
    With both, the programs of a row are a CLUSTER, and the piece stays in registers.
    """
    x, z, weight = inputs
    y, rstds = outputs
    D, pieces = sizes
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    pairs = 0
    if CLUSTER:
        pairs = begin()
    shift = shift_of(x, row * strides[0], SHIFTED)
    source = boundary(x, row * strides[0], shift, VECTOR)
    gates = boundary(z, row * strides[1], shift, VECTOR)
    end = shift + D
    col = piece * BLOCK + tl.arange(0, BLOCK)
    value = get(source, col, shift, end, True, 0.0, "", VECTOR, SHIFTED).to(tl.float32)
    gate = get(gates, col, shift, end, True, 0.0, "", VECTOR, SHIFTED)
    if FIRST:
        value *= silu(gate.to(tl.float32))
    if NORM:
        w = of_columns(weight, col, shift, end, "evict_last", VECTOR, SHIFTED)
    if SUM:
        total = tl.sum(value * value, 0)
        if CLUSTER:
            pairs = exchange(pairs, total, 0.0)
        else:
            tl.store(sums + tl.program_id(0), total)
    if NORM:
        part = tl.arange(0, PIECES)
        if CLUSTER:
            squares = of_members(pairs, 0, part, pieces, 0.0)
        else:
            squares = tl.load(sums + row * pieces + part, part < pieces, 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / D + eps)
        if SAVE:
            tl.store(rstds + row, rstd, piece == 0)
        # y = h / √(mean(h²) + ε) · w, of h = x · silu(z), or of x and then times silu(z)
        value = value * rstd * w.to(tl.float32)
        if not FIRST:
            value *= silu(gate.to(tl.float32))
        target = boundary(y, row * D, shift, VECTOR)
        put(target, col, value, shift, end, True, "", VECTOR, SHIFTED)


@triton.jit
def _parts(given, value, gate, rstd, w, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """(x̂ that was normalized, its gradient before the norm, what it adds to the weight's, silu(z), slope)."""
    s, slope = silu_slope(gate)
    if FIRST:
        hat = value * s * rstd
        inner = given * w
        of_weight = given * hat
    else:
        hat = value * rstd
        inner = given * w * s
        of_weight = given * hat * s
    return hat, inner, of_weight, s, slope


@triton.jit
def _ends(given, value, hat, inner, s, slope, rstd, projection, w, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """(dx, dz), with `projection` the mean of inner · x̂."""
    d = (inner - hat * projection) * rstd
    if FIRST:
        dx = d * s
        dz = d * value * slope
    else:
        dx = d
        dz = given * hat * w * slope
    return dx, dz


@triton.jit
def _backward_short(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    outputs,
    sizes,
    strides,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ROWS whole groups at a time, of every n-th rows; parts (programs, groups · D) of the weight's gradient."""
    dy, x, z, weight, rstds = inputs
    dx, dz, parts = outputs
    M, D, groups = sizes
    dy_stride, x_stride, z_stride = strides
    col = tl.arange(0, BLOCK)
    group = tl.program_id(1)
    here = group * D + col
    w = tl.load(weight + here, col < D, 0.0).to(tl.float32)[None, :]
    part = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        inside = (row < M)[:, None] & (col < D)[None, :]
        given = tl.load(dy + row[:, None] * dy_stride + here[None, :], inside, 0.0).to(tl.float32)
        value = tl.load(x + row[:, None] * x_stride + here[None, :], inside, 0.0).to(tl.float32)
        gate = tl.load(z + row[:, None] * z_stride + here[None, :], inside, 0.0).to(tl.float32)
        rstd = tl.load(rstds + row * groups + group, row < M, 0.0)[:, None]
        hat, inner, of_weight, s, slope = _parts(given, value, gate, rstd, w, FIRST)
        part += of_weight
        projection = (tl.sum(inner * hat, 1) / D)[:, None]
        of_x, of_z = _ends(given, value, hat, inner, s, slope, rstd, projection, w, FIRST)
        at = (row * groups * D)[:, None] + here[None, :]
        tl.store(dx + at, of_x.to(dx.dtype.element_ty), inside)
        tl.store(dz + at, of_z.to(dz.dtype.element_ty), inside)
    tl.store(parts + tl.program_id(0).to(tl.int64) * groups * D + here, tl.sum(part, 0), col < D)


@triton.jit
def _project(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    projections,
    sizes,
    strides,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mean of inner · x̂ of one long group."""
    dy, x, z, weight, rstds = inputs
    D, groups = sizes[1], sizes[2]
    dy_stride, x_stride, z_stride = strides
    at = tl.program_id(0).to(tl.int64)
    row, start = at // groups, (at % groups) * D
    rstd = tl.load(rstds + at)
    total = tl.zeros([BLOCK], tl.float32)
    for piece in range(0, D, BLOCK):
        col = piece + tl.arange(0, BLOCK)
        given = tl.load(dy + row * dy_stride + start + col, col < D, 0.0).to(tl.float32)
        value = tl.load(x + row * x_stride + start + col, col < D, 0.0).to(tl.float32)
        gate = tl.load(z + row * z_stride + start + col, col < D, 0.0).to(tl.float32)
        w = tl.load(weight + start + col, col < D, 0.0).to(tl.float32)
        hat, inner, _, _, _ = _parts(given, value, gate, rstd, w, FIRST)
        total += inner * hat
    tl.store(projections + at, tl.sum(total, 0) / D)


@triton.jit
def _backward_long(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    projections,
    outputs,
    sizes,
    strides,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As `_backward_short`, for one piece of every n-th row, with the groups' means known."""
    dy, x, z, weight, rstds = inputs
    dx, dz, parts = outputs
    M, D, groups = sizes
    dy_stride, x_stride, z_stride = strides
    pieces = tl.cdiv(D, BLOCK)
    group = tl.program_id(1) // pieces
    col = (tl.program_id(1) % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = col < D
    here = group * D + col
    w = tl.load(weight + here, inside, 0.0).to(tl.float32)
    part = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(tl.program_id(0), M, tl.num_programs(0)):
        row = tl.cast(start, tl.int64)
        given = tl.load(dy + row * dy_stride + here, inside, 0.0).to(tl.float32)
        value = tl.load(x + row * x_stride + here, inside, 0.0).to(tl.float32)
        gate = tl.load(z + row * z_stride + here, inside, 0.0).to(tl.float32)
        rstd = tl.load(rstds + row * groups + group)
        hat, inner, of_weight, s, slope = _parts(given, value, gate, rstd, w, FIRST)
        part += of_weight
        projection = tl.load(projections + row * groups + group)
        of_x, of_z = _ends(given, value, hat, inner, s, slope, rstd, projection, w, FIRST)
        tl.store(dx + row * groups * D + here, of_x.to(dx.dtype.element_ty), inside)
        tl.store(dz + row * groups * D + here, of_z.to(dz.dtype.element_ty), inside)
    tl.store(parts + tl.program_id(0).to(tl.int64) * groups * D + here, part, inside)


@triton.jit
def _project_pieces(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    sums,
    sizes,
    strides,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """What one piece of one row adds to the mean of inner · x̂; one piece of all rows first."""
    dy, x, z, weight, rstds = inputs
    M, D, pieces = sizes
    row = (tl.program_id(0) % M).to(tl.int64)
    piece = tl.program_id(0) // M
    shift = shift_of(dy, row * strides[0], SHIFTED)
    dy = boundary(dy, row * strides[0], shift, VECTOR)
    x = boundary(x, row * strides[1], shift, VECTOR)
    z = boundary(z, row * strides[2], shift, VECTOR)
    end = shift + D
    col = piece * BLOCK + tl.arange(0, BLOCK)
    given = get(dy, col, shift, end, True, 0.0, "evict_last", VECTOR, SHIFTED).to(tl.float32)
    value = get(x, col, shift, end, True, 0.0, "evict_last", VECTOR, SHIFTED).to(tl.float32)
    gate = get(z, col, shift, end, True, 0.0, "evict_last", VECTOR, SHIFTED).to(tl.float32)
    w = of_columns(weight, col, shift, end, "", VECTOR, SHIFTED).to(tl.float32)
    hat, inner, _, _, _ = _parts(given, value, gate, tl.load(rstds + row), w, FIRST)
    tl.store(sums + row * pieces + piece, tl.sum(inner * hat, 0) / D)


@triton.jit
def _backward_columns(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    sums,
    outputs,
    sizes,
    strides,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
):
    """As `_backward_short`, for all rows of BLOCK columns, so that the weight's gradient needs no other program.

    The last columns first: they were read last, and are the likeliest to be in the cache still.
    """
    dy, x, z, weight, rstds = inputs
    dx, dz, dweight = outputs
    M, D, pieces = sizes
    dy_stride, x_stride, z_stride = strides
    col = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(weight + col, col < D, 0.0).to(tl.float32)[None, :]
    part = tl.zeros([ROWS, BLOCK], tl.float32)
    other = tl.arange(0, PIECES)
    for start in range(0, M, ROWS):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        inside = (row < M)[:, None] & (col < D)[None, :]
        given = tl.load(dy + row[:, None] * dy_stride + col[None, :], inside, 0.0).to(tl.float32)
        value = tl.load(x + row[:, None] * x_stride + col[None, :], inside, 0.0).to(tl.float32)
        gate = tl.load(z + row[:, None] * z_stride + col[None, :], inside, 0.0).to(tl.float32)
        rstd = tl.load(rstds + row, row < M, 0.0)[:, None]
        at = row[:, None] * pieces + other[None, :]
        within = (row < M)[:, None] & (other < pieces)[None, :]
        projection = tl.sum(tl.load(sums + at, within, 0.0), 1)[:, None]
        hat, inner, of_weight, s, slope = _parts(given, value, gate, rstd, w, FIRST)
        part += of_weight
        of_x, of_z = _ends(given, value, hat, inner, s, slope, rstd, projection, w, FIRST)
        at = row[:, None] * D + col[None, :]
        tl.store(dx + at, of_x.to(dx.dtype.element_ty), inside)
        tl.store(dz + at, of_z.to(dz.dtype.element_ty), inside)
    tl.store(dweight + col, tl.sum(part, 0).to(dweight.dtype.element_ty), col < D)


def _empty(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, group: int, gate_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for y and, one a group, rstd."""
    size = x.shape[-1] // group
    return dense_like(x), torch.empty(*x.shape[:-1], size, dtype=torch.float32, device=x.device)


def prepare_forward(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: int,
    gate_first: bool,
    save: bool,
    elements: int = 2048,
    each: int = 16,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The forward pass for tensors like these: `elements` of a program, at least one group, and `each` a thread.

    It gives y and, where `save` says so, rstd of each group.
    """
    if x.numel() == 0:
        return _empty
    flat, gate = rows(x), rows(z)
    D = x.shape[-1]
    groups = D // group
    N = x.numel() // group
    strides = (flat.stride(0), gate.stride(0))
    device = x.device
    block = power_of_2(group)
    flags = {"FIRST": gate_first, "SAVE": save}
    reach = access((flat, gate, dense_like(x)), (*strides, D), D) if x.dtype == z.dtype else PLAIN
    if groups == 1 and (found := spread_plan(x, N, D, reach)):
        launch = _spread((N, D), strides, float(eps), found, reach, flags)
    elif groups == 1 and group != block and PARTS[0] <= group and group * x.element_size() <= PARTS[1]:
        # Of few rows a program takes as long as what it waits for.
        few = multiprocessors(x) >= N and not reach.SHIFTED
        height, warps, parts, part = parts_of(
            D + reach.margin, 16 // x.element_size(), N, reach.period, 2 if few else 4, 2048
        )
        launch = Launch(
            _forward_parts, (cdiv(N, height * reach.period) * reach.period,), (N, D), strides, float(eps), **flags,
            ROWS=height, PART=part, PARTS=parts, **reach.constants(), AHEAD=few, num_warps=warps,
        )  # fmt: skip
    elif block <= FORWARD_LIMIT:
        height = power_of_2(max(1, min(elements // block, N)))
        launch = Launch(
            _forward, (cdiv(N, height),), (N, group, groups), strides, float(eps), **flags,
            ROWS=height, BLOCK=block, num_warps=min(max(height * block // (32 * each), 1), 32),
        )  # fmt: skip
    else:
        launch = Launch(
            _forward_long, (N,), (N, group, groups), strides, float(eps), **flags, BLOCK=PIECE, num_warps=8
        )  # fmt: skip
    copied = not (in_rows(x) and in_rows(z) and weight.is_contiguous())

    def run(
        x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, *arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, rstd = results = _empty(x, z, weight, *arguments) if save else (dense_like(x), weight)
        if copied:
            x, z, weight = rows(x), rows(z), weight.contiguous()
        launch(device, (x, z, weight), (y, rstd))
        return results

    return run


def largest_piece(N: int, D: int, size: int, shifted: bool, processors: int) -> int:
    """Most elements of a cluster's program where rows are not few; 0 where others are faster."""
    # Two launches were as fast for rows that start anywhere.
    return 8192 if processors > N and not shifted and size == 2 and 32768 < D <= 65536 else 0


def spread_plan(x: torch.Tensor, N: int, D: int, reach: Access) -> Plan | None:
    """How pieces of N long rows of D elements are shared out; None where one program takes a row."""
    size, processors = x.element_size(), multiprocessors(x)
    most = largest_piece(N, D, size, reach.SHIFTED, processors)
    if found := clusters(x, N, D, reach.margin, most, 2):
        piece, members, warps = found
        return Plan("cluster", 1, piece, members, warps)
    piece = spread(x, N, D)
    if not piece and processors <= N and reach.SHIFTED and size == 2 and D * size > PARTS[1]:
        # One program a row reads such rows by element.
        piece = TWICE
    if not piece:
        return None
    return Plan("spread", 1, piece, cdiv(D + reach.margin, piece), min(max(piece // 1024, 4), 16))


def _spread(
    sizes: tuple[int, int],
    strides: tuple[int, int],
    eps: float,
    plan: Plan,
    reach: Access,
    flags: dict[str, bool],
) -> Callable[..., None]:
    """The forward pass of long rows: in one launch where clusters hold them, else in two."""
    N, D = sizes
    grid, of_pieces = (N * plan.parts,), (D, plan.parts)
    shared = {"BLOCK": plan.block, "PIECES": power_of_2(plan.parts), **reach.constants(), **flags}
    shared["num_warps"] = plan.warps
    if plan.kind == "cluster":
        limit = few_registers(plan.block, plan.warps, reach.SHIFTED)
        both = ClusterLaunch(
            _forward_spread, plan.parts, grid, of_pieces, strides, eps, **shared, **limit, SUM=True, NORM=True,
            CLUSTER=True,
        )  # fmt: skip
        return lambda device, inputs, outputs: both(device, inputs, outputs, inputs[0])
    first, second = (
        Launch(_forward_spread, grid, of_pieces, strides, eps, **shared, SUM=not norm, NORM=norm, CLUSTER=False)
        for norm in (False, True)
    )

    def launch(device: torch.device, *tensors: Any) -> None:
        sums = torch.empty(grid, dtype=torch.float32, device=device)
        first(device, *tensors, sums)
        second(device, *tensors, sums)

    return launch


def _prepare(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, group: int, gate_first: bool
) -> Callable[..., torch.Tensor]:
    run = prepare_forward(x, z, weight, eps, group, gate_first, False)
    return lambda *arguments: run(*arguments)[0]


def _prepare_saving(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, group: int, gate_first: bool
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return prepare_forward(x, z, weight, eps, group, gate_first, True)


def prepare_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    group: int,
    gate_first: bool,
    elements: int = 2048,
    each: int = 16,
    share: int = 16,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The backward pass for tensors like these: dx, dz and dweight. `elements` of a program at a time, `each` a
    thread, and `share` warps on a multiprocessor.
    """
    if x.numel() == 0:
        return lambda dy, x, z, weight, *_: (dense_like(x), dense_like(z), torch.zeros_like(weight))
    given, flat, gate = rows(dy), rows(x), rows(z)
    M, D = flat.shape
    groups = D // group
    strides = (given.stride(0), flat.stride(0), gate.stride(0))
    device = x.device
    if groups == 1 and (piece := spread(flat, M, D)):
        reach = access((given, flat, gate, dense_like(x)), (*strides, D), D)
        launch = _columns((M, D, flat.element_size()), strides, piece, reach, gate_first)
    else:
        launch = _every_row(flat, (M, group, groups), strides, gate_first, elements, each, share)
    copied = not (in_rows(dy) and in_rows(x) and in_rows(z) and weight.is_contiguous())

    def run(
        dy: torch.Tensor, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        results = dense_like(x), dense_like(z), dense_like(weight)
        if copied:
            dy, x, z, weight = rows(dy), rows(x), rows(z), weight.contiguous()
        launch(device, (dy, x, z, weight, rstd), results)
        return results

    return run


def _every_row(
    flat: torch.Tensor,
    sizes: tuple[int, int, int],
    strides: tuple[int, int, int],
    gate_first: bool,
    elements: int,
    each: int,
    share: int,
) -> Callable[..., None]:
    """Gradients by programs that take every n-th row, whole or in pieces."""
    M, group, groups = sizes
    D = group * groups
    block = power_of_2(group)
    if short := block <= BACKWARD_LIMIT:
        height = power_of_2(max(1, min(elements // block, 16, M)))
        warps = min(max(height * block // (32 * each), 1), 32)
        programs = min(cdiv(M, height), max(1, multiprocessors(flat) * max(share // warps, 1) // groups))
        make = Launch(
            _backward_short, (programs, groups), sizes, strides, FIRST=gate_first,
            ROWS=height, BLOCK=block, STAGES=2 if block < AHEAD else 1, num_warps=warps,
        )  # fmt: skip
    else:
        pieces = cdiv(group, PIECE)
        programs = min(M, max(1, multiprocessors(flat) * 4 // (pieces * groups)))
        make = Launch(
            _backward_long, (programs, pieces * groups), sizes, strides, FIRST=gate_first, BLOCK=PIECE, num_warps=8
        )  # fmt: skip
    project = Launch(_project, (M * groups,), sizes, strides, FIRST=gate_first, BLOCK=PIECE, num_warps=8)
    add = Launch(
        add_parts, (cdiv(D, 32),), programs, D, ROWS=min(power_of_2(programs), 256), BLOCK=32, num_warps=8
    )  # fmt: skip

    def launch(device: torch.device, inputs: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...]) -> None:
        dx, dz, dweight = results
        parts = torch.empty((programs, D), dtype=torch.float32, device=device)
        if short:
            make(device, inputs, (dx, dz, parts))
        else:
            projection = torch.empty_like(inputs[-1])
            project(device, inputs, projection)
            make(device, inputs, projection, (dx, dz, parts))
        add(device, parts, dweight)

    return launch


def _columns(
    sizes: tuple[int, int, int], strides: tuple[int, int, int], piece: int, reach: Access, gate_first: bool
) -> Callable[..., None]:
    """Gradients of few long rows, of elements of so many bytes, by programs that have all rows of some columns."""
    M, D, size = sizes
    pieces = cdiv(D + reach.margin, piece)
    height, columns, warps = TILE
    if reach.SHIFTED and size > 2:
        height //= 2
    project = Launch(
        _project_pieces, (M * pieces,), (M, D, pieces), strides, FIRST=gate_first,
        BLOCK=piece, **reach.constants(), num_warps=min(max(piece // 256, 4), 16),
    )  # fmt: skip
    make = Launch(
        _backward_columns, (cdiv(D, columns),), (M, D, pieces), strides, FIRST=gate_first,
        ROWS=min(height, power_of_2(M)), BLOCK=columns, PIECES=power_of_2(pieces), num_warps=warps,
    )  # fmt: skip

    def launch(device: torch.device, inputs: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...]) -> None:
        sums = torch.empty((M, pieces), dtype=torch.float32, device=device)
        project(device, inputs, sums)
        make(device, inputs, sums, results)

    return launch


def _empty_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    group: int,
    gate_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for dx, dz and dweight."""
    return dense_like(x), dense_like(z), dense_like(weight)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.group, ctx.gate_first = inputs[4:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 6
    return *_gradients(dy, *ctx.saved_tensors, ctx.group, ctx.gate_first), None, None, None


_plain = operator(
    "gated_rms_norm(Tensor x, Tensor z, Tensor weight, float eps, int group, bool gate_first) -> Tensor",
    prepared(_prepare, _check),
    lambda x, *_: dense_like(x),
    check=_check,
)
_saving = operator(
    "gated_rms_norm_saving(Tensor x, Tensor z, Tensor weight, float eps, int group, bool gate_first) "
    "-> (Tensor, Tensor)",
    prepared(_prepare_saving, _check),
    _empty,
    _save,
    _backward,
    check=_check,
    hidden=1,
)
_gradients = operator(
    "gated_rms_norm_backward(Tensor dy, Tensor x, Tensor z, Tensor weight, Tensor rstd, int group, "
    "bool gate_first) -> (Tensor, Tensor, Tensor)",
    prepared(prepare_backward),
    _empty_gradients,
)
