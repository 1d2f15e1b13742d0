"""Softmax of rows: one read and one write forward, two reads and one write backward.

A row that fits registers is held there, a longer one in those of several programs, which meet to exchange what
they have of it. Where rows are too many for that, a program reads one twice, the second time from the L2 cache if
that still has it. Running maxima and sums of exponentials (online softmax, Milakov and Gimelshein, arXiv
1805.02867) are then kept for each 16-byte vector of a thread, so that nothing waits for other threads before the
end of a piece.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, cdiv, check, dense_like, multiprocessors, on, operator, packed, power_of_2, rows
from .._grid_barrier import MOST, arrive_and_wait, launches, phase, slots

LIMIT = 64 if INTERPRETED else 16384
"""Longest row, in elements, that forward holds in registers: 32 a thread of 16 warps."""

BACKWARD_LIMIT = 32 if INTERPRETED else 8192
"""The same for backward, which has two numbers an element to hold."""

PARTS = (8, 32) if INTERPRETED else (2048, 8192)
"""Smallest and largest part of a longer row, in elements, that one of its programs holds."""

SPLIT = 64 if INTERPRETED else 65536
"""Shortest row that backward splits where there are rows for every multiprocessor."""

LANES = 4 if INTERPRETED else 1024
"""Vectors of 16 bytes in a piece of a row that one program reads twice; one or two a thread."""


class Plan(NamedTuple):
    """How rows are shared out. `size` is rows a program, lanes of a piece, or columns of a part."""

    kind: Literal["whole", "pieces", "split"]
    size: int
    warps: int


def softmax(x: torch.Tensor) -> torch.Tensor:
    """exp(x) / sum of exp(x) over the last dimension, x (…, D) in bf16, fp16 or fp32, in x's dtype.

    Computed in fp32 with the maximum taken off. A row of -inf alone is NaN, as PyTorch has it. Differentiable
    in x. Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device; the message names
    the argument.
    """
    check("x", x)
    if x.dim() == 0:
        raise ValueError("x has shape (), expected at least one dimension")
    y: torch.Tensor = _softmax(x)
    return y


@triton.jit
def _whole(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, y, M, D, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """ROWS whole rows a program."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    # Rows past the end are the last one again: no mask for them, and no infinities of nothing.
    source = x + tl.minimum(row, M - 1)[:, None] * stride + col[None, :]
    value = tl.load(source, (col < D)[None, :], float("-inf")).to(tl.float32)
    value = tl.exp2((value - tl.max(value, 1)[:, None]) * LOG2E)
    value = value * (1.0 / tl.sum(value, 1))[:, None]
    tl.store(y + row[:, None] * D + col[None, :], value.to(y.dtype.element_ty), (row < M)[:, None] & (col < D))


@triton.jit
def _statistics(x, start, end, LANES: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Maximum and sum of exp(x - maximum) over columns start to end."""
    LOG2E: tl.constexpr = 1.4426950408889634
    at = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    # Finite, so that the difference of two is never NaN.
    highest = tl.full([LANES], -1.0e38, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for first in range(start, end, LANES * VECTOR):
        col = first + at
        value = tl.load(x + col, col < end, float("-inf"), eviction_policy="evict_last").to(tl.float32)
        higher = tl.maximum(highest, tl.max(value, 1))
        terms = tl.exp2((value - higher[:, None]) * LOG2E)
        total = total * tl.exp2((highest - higher) * LOG2E) + tl.sum(terms, 1)
        highest = higher
    top = tl.max(highest, 0)
    return top, tl.sum(total * tl.exp2((highest - top) * LOG2E), 0)


@triton.jit
def _scaled(x, y, start, end, top, share, LANES: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """exp(x - top) · share over columns start to end."""
    LOG2E: tl.constexpr = 1.4426950408889634
    at = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for first in range(start, end, LANES * VECTOR):
        col = first + at
        value = tl.load(x + col, col < end, float("-inf"), eviction_policy="evict_first").to(tl.float32)
        value = tl.exp2((value - top) * LOG2E) * share
        tl.store(y + col, value.to(y.dtype.element_ty), col < end)


@triton.jit
def _pieces(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, y, D, stride, LANES: tl.constexpr, VECTOR: tl.constexpr
):
    """One row a program, in pieces, twice."""
    row = tl.program_id(0).to(tl.int64)
    top, total = _statistics(x + row * stride, 0, D, LANES, VECTOR)
    _scaled(x + row * stride, y + row * D, 0, D, top, 1.0 / total, LANES, VECTOR)


@triton.jit
def _split(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    y,
    tops,
    totals,
    place,
    D,
    stride,
    PARTS,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
    SCALE: tl.constexpr,
):
    """One of PARTS parts of a row, BLOCK columns. SUM: its maximum and sum; SCALE: its results, by those of all
    parts. With both, the programs of a row meet in between, and the part stays in registers.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    col = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    before = 0
    if SUM and SCALE:
        before = phase(place + row * 2)
    held = tl.load(x + row * stride + col, col < D, float("-inf"))
    if SUM:
        # Finite, so that the difference of two is never NaN.
        top = tl.maximum(tl.max(held.to(tl.float32), 0), -1.0e38)
        tl.store(tops + tl.program_id(0), top)
        tl.store(totals + tl.program_id(0), tl.sum(tl.exp2((held.to(tl.float32) - top) * LOG2E), 0))
    if SUM and SCALE:
        arrive_and_wait(place + row * 2, PARTS, before)
        held = packed(held)
    if SCALE:
        part = tl.arange(0, ALL)
        # Written by other programs of this launch: not from the multiprocessor's own cache.
        highest = tl.load(tops + row * PARTS + part, part < PARTS, -1.0e38, cache_modifier=".cg")
        total = tl.load(totals + row * PARTS + part, part < PARTS, 0.0, cache_modifier=".cg")
        top = tl.max(highest, 0)
        share = 1.0 / tl.sum(total * tl.exp2((highest - top) * LOG2E), 0)
        value = tl.exp2((held.to(tl.float32) - top) * LOG2E) * share
        tl.store(y + row * D + col, value.to(y.dtype.element_ty), col < D)


@triton.jit
def _whole_gradient(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy, y, dx, M, D, dy_stride, y_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """dx = y · (dy - sum of y · dy), ROWS whole rows a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row < M)[:, None] & (col < D)[None, :]
    given = tl.load(dy + row[:, None] * dy_stride + col[None, :], inside, 0.0).to(tl.float32)
    value = tl.load(y + row[:, None] * y_stride + col[None, :], inside, 0.0).to(tl.float32)
    given = value * (given - tl.sum(value * given, 1)[:, None])
    tl.store(dx + row[:, None] * D + col[None, :], given.to(dx.dtype.element_ty), inside)


@triton.jit
def _product(dy, y, start, end, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum of y · dy over columns start to end."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(start, end, BLOCK):
        col = first + tl.arange(0, BLOCK)
        given = tl.load(dy + col, col < end, 0.0, eviction_policy="evict_last").to(tl.float32)
        total += given * tl.load(y + col, col < end, 0.0, eviction_policy="evict_last").to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def _moved(dy, y, dx, start, end, shift, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """y · (dy - shift) over columns start to end."""
    for first in range(start, end, BLOCK):
        col = first + tl.arange(0, BLOCK)
        given = tl.load(dy + col, col < end, 0.0, eviction_policy="evict_first").to(tl.float32)
        value = tl.load(y + col, col < end, 0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(dx + col, (value * (given - shift)).to(dx.dtype.element_ty), col < end)


@triton.jit
def _pieces_gradient(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy, y, dx, D, dy_stride, y_stride, BLOCK: tl.constexpr
):
    """One row a program, in pieces, twice."""
    row = tl.program_id(0).to(tl.int64)
    dy += row * dy_stride
    y += row * y_stride
    _moved(dy, y, dx + row * D, 0, D, _product(dy, y, 0, D, BLOCK), BLOCK)


@triton.jit
def _split_gradient(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy,
    y,
    dx,
    totals,
    place,
    D,
    dy_stride,
    y_stride,
    PARTS,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
    MOVE: tl.constexpr,
):
    """As `_split`, for dx: SUM is that of y · dy, MOVE takes the row's off dy."""
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    col = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    before = 0
    if SUM and MOVE:
        before = phase(place + row * 2)
    given = tl.load(dy + row * dy_stride + col, col < D, 0.0)
    value = tl.load(y + row * y_stride + col, col < D, 0.0)
    if SUM:
        tl.store(totals + tl.program_id(0), tl.sum(given.to(tl.float32) * value.to(tl.float32), 0))
    if SUM and MOVE:
        arrive_and_wait(place + row * 2, PARTS, before)
        given = packed(given)
        value = packed(value)
    if MOVE:
        part = tl.arange(0, ALL)
        shift = tl.sum(tl.load(totals + row * PARTS + part, part < PARTS, 0.0, cache_modifier=".cg"), 0)
        result = value.to(tl.float32) * (given.to(tl.float32) - shift)
        tl.store(dx + row * D + col, result.to(dx.dtype.element_ty), col < D)


def plan(x: torch.Tensor, M: int, D: int, backward: bool) -> Plan:
    """How M rows of D columns are shared out, by measurements on an H200.

    Rows that fit registers are held there. Of longer ones each is one program's, unless they are too few for the
    device: then they are split, and backward also where they are long.
    """
    block = power_of_2(D)
    if block <= (BACKWARD_LIMIT if backward else LIMIT):
        height = power_of_2(max(1, min(2048 // block, M)))
        per_warp = 256 if backward else 1024  # 8 or 32 numbers a thread of each tensor
        return Plan("whole", height, min(max(height * block // per_warp, 4), 32))
    processors = multiprocessors(x)
    # Four programs a multiprocessor, but no part so small that starting it takes longer than its work.
    part = min(max(power_of_2(M * D // (4 * processors)), PARTS[0]), PARTS[1])
    if cdiv(D, part) <= 1024 and (processors > M or (backward and D >= SPLIT and M <= MOST)):
        return Plan("split", part, min(max(part // 1024, 4), 16))
    vector = 16 // x.element_size()
    if 4 * LANES * vector >= D:
        return Plan("pieces", LANES, 16 if 2 * processors <= M and not backward else 32)
    return Plan("pieces", 2 * LANES, 32)


def run(x: torch.Tensor, y: torch.Tensor, chosen: Plan) -> None:
    """Forward of x (M, D) with last stride 1 into y, contiguous."""
    M, D = x.shape
    vector = 16 // x.element_size()
    with on(x):
        if chosen.kind == "whole":
            _whole[(cdiv(M, chosen.size),)](
                x, y, M, D, x.stride(0), ROWS=chosen.size, BLOCK=power_of_2(D), num_warps=chosen.warps
            )
        elif chosen.kind == "pieces":
            _pieces[(M,)](x, y, D, x.stride(0), LANES=chosen.size, VECTOR=vector, num_warps=chosen.warps)
        else:
            parts = cdiv(D, chosen.size)
            place = slots(x, M, x.numel())
            tops, totals = torch.empty(2, M, parts, dtype=torch.float32, device=x.device)
            for first, second in launches(place):
                _split[(M * parts,)](
                    x,
                    y,
                    tops,
                    totals,
                    tops if place is None else place,
                    D,
                    x.stride(0),
                    parts,
                    ALL=power_of_2(parts),
                    BLOCK=chosen.size,
                    SUM=first,
                    SCALE=second,
                    num_warps=chosen.warps,
                )


def run_backward(dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, chosen: Plan) -> None:
    """Backward of (M, D) tensors with last stride 1 into dx, contiguous."""
    M, D = y.shape
    strides = (dy.stride(0), y.stride(0))
    with on(y):
        if chosen.kind == "whole":
            _whole_gradient[(cdiv(M, chosen.size),)](
                dy, y, dx, M, D, *strides, ROWS=chosen.size, BLOCK=power_of_2(D), num_warps=chosen.warps
            )
            return
        if chosen.kind == "pieces":
            block = chosen.size * (16 // y.element_size())
            _pieces_gradient[(M,)](dy, y, dx, D, *strides, BLOCK=block, num_warps=chosen.warps)
        else:
            parts = cdiv(D, chosen.size)
            place = slots(y, M)
            totals = torch.empty(M, parts, dtype=torch.float32, device=y.device)
            for first, second in launches(place):
                _split_gradient[(M * parts,)](
                    dy,
                    y,
                    dx,
                    totals,
                    totals if place is None else place,
                    D,
                    *strides,
                    parts,
                    ALL=power_of_2(parts),
                    BLOCK=chosen.size,
                    SUM=first,
                    MOVE=second,
                    num_warps=chosen.warps,
                )


def _launch(x: torch.Tensor) -> torch.Tensor:
    y = dense_like(x)
    if x.numel():
        flat = rows(x)
        run(flat, y, plan(flat, *flat.shape, backward=False))
    return y


def _launch_backward(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    dx = dense_like(y)
    if y.numel():
        given, flat = rows(dy), rows(y)
        run_backward(given, flat, dx, plan(flat, *flat.shape, backward=True))
    return dx


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output)


_softmax_backward = operator(
    "softmax_backward(Tensor dy, Tensor y) -> Tensor", _launch_backward, lambda dy, y: dense_like(y)
)
_softmax = operator(
    "softmax(Tensor x) -> Tensor",
    _launch,
    dense_like,
    _save,
    lambda ctx, dy: _softmax_backward(dy, *ctx.saved_tensors),
)
