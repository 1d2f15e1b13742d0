"""Softmax of rows: one read and one write forward, two reads and one write backward.

A row that fits registers is held there, a longer one in those of several programs, which meet to exchange what
they have of it. Where rows are too many for that, a program reads one twice, the second time from the L2 cache if
that still has it. Running maxima and sums of exponentials (online softmax, Milakov and Gimelshein, arXiv
1805.02867) are then kept for each 16-byte vector of a thread, so that nothing waits for other threads before the
end of a piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from .._cluster import ClusterLaunch, begin, clusters, exchange, few_registers, of_members
from .._common import (
    INTERPRETED,
    cdiv,
    check,
    dense_like,
    in_rows,
    multiprocessors,
    operator,
    packed,
    power_of_2,
    rows,
)
from .._grid_barrier import MOST, arrive_and_wait, phase, slots
from .._launch import Launch, prepared
from .._online_softmax import LOWEST, lowered, over_lanes, with_terms
from .._rows import PLAIN, Access, access, boundary, get, get_part, parts_of, put, put_part, same_rows, shift_of

LIMIT = 64 if INTERPRETED else 24576
"""Longest row, in elements, that forward holds in registers; a block of a power of two is at most half as long."""

BACKWARD_LIMIT = 64 if INTERPRETED else 32768
"""The same for backward: 16 warps at most, with two numbers an element."""

FEW = (64, 32) if INTERPRETED else (16384, 8192)
"""Row above which forward and backward split it where there are fewer rows than multiprocessors."""

WIDE = 32 if INTERPRETED else 4096
"""Row from which on a width that is a power of two is taken in parts, too."""

PIECES = (8, 32) if INTERPRETED else (2048, 8192)
"""Smallest and largest piece of a longer row, in elements, that one of its programs holds."""

SPLIT = 64 if INTERPRETED else 65536
"""Shortest row that backward splits where there are rows for every multiprocessor."""

PARTS_FROM = 8 if INTERPRETED else 64
"""Shortest row that is held in parts where its width is no power of two."""

LANES = 4 if INTERPRETED else 1024
"""Vectors of 16 bytes in a piece of a row that one program reads twice; one or two a thread."""


class Plan(NamedTuple):
    """How rows are shared out.

    `whole`: `size` rows a program, each in a block of a power of two. `parts`: the same, each in `parts` parts of
    `block` elements. `pieces`: one row, twice, in pieces of `size` lanes. `split`: one piece of `size` elements of
    one row. `cluster`: the same, `parts` programs a cluster.
    """

    kind: Literal["whole", "parts", "pieces", "split", "cluster"]
    size: int
    warps: int
    parts: int = 1
    block: int = 0


def softmax(x: torch.Tensor) -> torch.Tensor:
    """exp(x) / sum of exp(x) over the last dimension, x (…, D) in bf16, fp16 or fp32, in x's dtype.

    Computed in fp32 with the maximum taken off. A row of -inf alone is NaN, as PyTorch has it. Differentiable
    in x. Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device; the message names
    the argument.
    """
    y: torch.Tensor = _softmax(x)
    return y


def _check(x: torch.Tensor) -> None:
    check("x", x)
    if x.dim() == 0:
        raise ValueError("x has shape (), expected at least one dimension")


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
def _parts(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    y,
    M,
    D,
    stride,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """ROWS whole rows a program, each in PARTS parts of PART columns; they lie equally to 16-byte boundaries."""
    LOG2E: tl.constexpr = 1.4426950408889634
    first, row, down = same_rows(tl.program_id(0), ROWS, VECTOR, SHIFTED)
    inside = row < M
    shift = shift_of(x, first * stride, SHIFTED)
    source = boundary(x, first * stride, shift, VECTOR)
    source += tl.multiple_of(down * stride, [VECTOR, VECTOR])
    target = boundary(y, first * D, shift, VECTOR)
    target += tl.multiple_of(down * D, [VECTOR, VECTOR])
    end = shift + D
    held = ()
    highest = tl.full([ROWS, PART], float("-inf"), tl.float32)
    for i in tl.static_range(PARTS):
        part = get_part(source, shift, end, inside, float("-inf"), i, PART, PARTS, VECTOR, SHIFTED).to(tl.float32)
        held += (part,)
        highest = tl.maximum(highest, part)
    # y = exp(x - max) / Σ exp(x - max); of a row that is not there 0 / 1, and not infinities of nothing.
    top = tl.where(inside, tl.max(highest, 1)[:, None], 0.0)
    total = tl.zeros([ROWS, PART], tl.float32)
    terms = ()
    for i in tl.static_range(PARTS):
        term = tl.exp2((held[i] - top) * LOG2E)
        terms += (term,)
        total += term
    share = 1.0 / tl.where(inside, tl.sum(total, 1)[:, None], 1.0)
    for i in tl.static_range(PARTS):
        put_part(target, terms[i] * share, shift, end, inside, i, PART, PARTS, VECTOR, SHIFTED)


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, shift, end, LANES: tl.constexpr, EACH: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr
):
    """Maximum and sum of exp(x - maximum) over columns shift to end."""
    at = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    # Finite, so that the difference of two is never NaN.
    highest = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for first in range(0, end, LANES * EACH):
        col = first + at
        value = get(x, col, shift, end, True, float("-inf"), "evict_last", VECTOR, SHIFTED).to(tl.float32)
        highest, total = with_terms(value, highest, total)
    return over_lanes(highest, total)


@triton.jit
def _scaled(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    y,
    shift,
    end,
    top,
    share,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """y = exp(x - top) · share over columns shift to end."""
    LOG2E: tl.constexpr = 1.4426950408889634
    at = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    for first in range(0, end, LANES * EACH):
        col = first + at
        value = get(x, col, shift, end, True, float("-inf"), "evict_first", VECTOR, SHIFTED).to(tl.float32)
        value = tl.exp2((value - top) * LOG2E) * share
        put(y, col, value, shift, end, True, "", VECTOR, SHIFTED)


@triton.jit
def _pieces(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, y, D, stride, LANES: tl.constexpr, EACH: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr
):
    """One row a program, in pieces, twice."""
    row = tl.program_id(0).to(tl.int64)
    shift = shift_of(x, row * stride, SHIFTED)
    x = boundary(x, row * stride, shift, VECTOR)
    y = boundary(y, row * D, shift, VECTOR)
    top, total = _statistics(x, shift, shift + D, LANES, EACH, VECTOR, SHIFTED)
    _scaled(x, y, shift, shift + D, top, 1.0 / total, LANES, EACH, VECTOR, SHIFTED)


@triton.jit
def _split(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    y,
    sums,
    slot,
    D,
    stride,
    pieces,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    SUM: tl.constexpr,
    RESULT: tl.constexpr,
    CLUSTER: tl.constexpr,
):
    """One of the pieces of a row, BLOCK columns. SUM: its maximum and sum; RESULT: its results, by those of all
    pieces. With both, the programs of a row wait for each other in between, as a CLUSTER or at a barrier in
    memory, and the piece stays in registers.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row = (tl.program_id(0) // pieces).to(tl.int64)
    col = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    pairs = 0
    before = 0
    if CLUSTER:
        pairs = begin()
    elif SUM and RESULT:
        before = phase(slot + row * 2)
    shift = shift_of(x, row * stride, SHIFTED)
    x = boundary(x, row * stride, shift, VECTOR)
    end = shift + D
    held = get(x, col, shift, end, True, float("-inf"), "evict_first" if CLUSTER else "", VECTOR, SHIFTED)
    if SUM:
        # Finite, so that the difference of two is never NaN.
        top = tl.maximum(tl.max(held.to(tl.float32), 0), LOWEST)
        terms = tl.exp2((held.to(tl.float32) - top) * LOG2E)
        total = tl.sum(terms, 0)
        if CLUSTER:
            pairs = exchange(pairs, top, total)
        else:
            tl.store(sums + tl.program_id(0), top)
            tl.store(sums + tl.num_programs(0) + tl.program_id(0), total)
            if RESULT:
                arrive_and_wait(slot + row * 2, pieces, before)
    if SUM and RESULT and not CLUSTER:
        held = packed(held)
    if RESULT:
        part = tl.arange(0, ALL)
        if CLUSTER:
            highest = of_members(pairs, 0, part, pieces, LOWEST)
            total = of_members(pairs, 1, part, pieces, 0.0)
        else:
            # Written by other programs of this launch: not from the multiprocessor's own cache.
            at = sums + row * pieces + part
            highest = tl.load(at, part < pieces, LOWEST, cache_modifier=".cg")
            total = tl.load(at + tl.num_programs(0), part < pieces, 0.0, cache_modifier=".cg")
        highest, total = over_lanes(highest, total)
        if CLUSTER:
            # y = exp(x - m) · exp(m - max) / Σ exp(x - max), m this piece's maximum: one exponential a number.
            value = terms * (lowered(top, highest) / total)
        else:
            share = 1.0 / total
            value = tl.exp2((held.to(tl.float32) - highest) * LOG2E) * share
        y = boundary(y, row * D, shift, VECTOR)
        put(y, col, value, shift, end, True, "", VECTOR, SHIFTED)


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
def _parts_gradient(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy,
    y,
    dx,
    M,
    D,
    dy_stride,
    y_stride,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """As `_whole_gradient`, with rows in PARTS parts of PART columns."""
    first, row, down = same_rows(tl.program_id(0), ROWS, VECTOR, SHIFTED)
    inside = row < M
    shift = shift_of(dy, first * dy_stride, SHIFTED)
    given_at = boundary(dy, first * dy_stride, shift, VECTOR)
    given_at += tl.multiple_of(down * dy_stride, [VECTOR, VECTOR])
    value_at = boundary(y, first * y_stride, shift, VECTOR)
    value_at += tl.multiple_of(down * y_stride, [VECTOR, VECTOR])
    target = boundary(dx, first * D, shift, VECTOR)
    target += tl.multiple_of(down * D, [VECTOR, VECTOR])
    end = shift + D
    given = ()
    values = ()
    products = tl.zeros([ROWS, PART], tl.float32)
    for i in tl.static_range(PARTS):
        given += (get_part(given_at, shift, end, inside, 0.0, i, PART, PARTS, VECTOR, SHIFTED).to(tl.float32),)
        values += (get_part(value_at, shift, end, inside, 0.0, i, PART, PARTS, VECTOR, SHIFTED).to(tl.float32),)
        products += given[i] * values[i]
    total = tl.sum(products, 1)[:, None]
    for i in tl.static_range(PARTS):
        put_part(target, values[i] * (given[i] - total), shift, end, inside, i, PART, PARTS, VECTOR, SHIFTED)


@triton.jit
def _pieces_gradient(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy, y, dx, D, dy_stride, y_stride, BLOCK: tl.constexpr, VECTOR: tl.constexpr, SHIFTED: tl.constexpr
):
    """One row a program, in pieces, twice."""
    row = tl.program_id(0).to(tl.int64)
    shift = shift_of(dy, row * dy_stride, SHIFTED)
    dy = boundary(dy, row * dy_stride, shift, VECTOR)
    y = boundary(y, row * y_stride, shift, VECTOR)
    dx = boundary(dx, row * D, shift, VECTOR)
    end = shift + D
    products = tl.zeros([BLOCK], tl.float32)
    for first in range(0, end, BLOCK):
        col = first + tl.arange(0, BLOCK)
        given = get(dy, col, shift, end, True, 0.0, "evict_last", VECTOR, SHIFTED).to(tl.float32)
        products += given * get(y, col, shift, end, True, 0.0, "evict_last", VECTOR, SHIFTED).to(tl.float32)
    total = tl.sum(products, 0)
    for first in range(0, end, BLOCK):
        col = first + tl.arange(0, BLOCK)
        given = get(dy, col, shift, end, True, 0.0, "evict_first", VECTOR, SHIFTED).to(tl.float32)
        value = get(y, col, shift, end, True, 0.0, "evict_first", VECTOR, SHIFTED).to(tl.float32)
        put(dx, col, value * (given - total), shift, end, True, "", VECTOR, SHIFTED)


@triton.jit
def _split_gradient(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy,
    y,
    dx,
    sums,
    slot,
    D,
    dy_stride,
    y_stride,
    pieces,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTED: tl.constexpr,
    SUM: tl.constexpr,
    RESULT: tl.constexpr,
    CLUSTER: tl.constexpr,
):
    """As `_split`, for dx: SUM is that of y · dy, RESULT takes the row's off dy."""
    row = (tl.program_id(0) // pieces).to(tl.int64)
    col = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    pairs = 0
    before = 0
    if CLUSTER:
        pairs = begin()
    elif SUM and RESULT:
        before = phase(slot + row * 2)
    shift = shift_of(dy, row * dy_stride, SHIFTED)
    dy = boundary(dy, row * dy_stride, shift, VECTOR)
    y = boundary(y, row * y_stride, shift, VECTOR)
    end = shift + D
    given = get(dy, col, shift, end, True, 0.0, "", VECTOR, SHIFTED)
    value = get(y, col, shift, end, True, 0.0, "", VECTOR, SHIFTED)
    if SUM:
        product = tl.sum(given.to(tl.float32) * value.to(tl.float32), 0)
        if CLUSTER:
            pairs = exchange(pairs, product, 0.0)
        else:
            tl.store(sums + tl.program_id(0), product)
            if RESULT:
                arrive_and_wait(slot + row * 2, pieces, before)
    if SUM and RESULT:
        given = packed(given)
        value = packed(value)
    if RESULT:
        part = tl.arange(0, ALL)
        if CLUSTER:
            products = of_members(pairs, 0, part, pieces, 0.0)
        else:
            products = tl.load(sums + row * pieces + part, part < pieces, 0.0, cache_modifier=".cg")
        total = tl.sum(products, 0)
        result = value.to(tl.float32) * (given.to(tl.float32) - total)
        dx = boundary(dx, row * D, shift, VECTOR)
        put(dx, col, result, shift, end, True, "", VECTOR, SHIFTED)


def largest_piece(M: int, D: int, size: int, shifted: bool, backward: bool, processors: int) -> int:
    """Most elements of a cluster's program where rows are not few; 0 where other plans are faster."""
    many = processors <= M
    if size > 2 or (many and not backward):
        return 0
    if shifted:
        return 8192 if backward and not many and 40960 < D <= 1 << 17 else 0
    if backward:
        return 16384 if (49152 < D <= 1 << 17 if many else 40960 < D <= 1 << 16) else 0
    return 16384 if D >= 32768 else 0


def plan(x: torch.Tensor, M: int, D: int, backward: bool, access: Access = PLAIN) -> Plan:
    """How M rows of D columns are shared out, by measurements on an H200.

    Rows that fit registers are held there. Of longer ones each is one program's, unless they are too few for the
    device: then they are split, and backward also where they are long.
    """
    block = power_of_2(D)
    vector = 16 // x.element_size()
    limit = (BACKWARD_LIMIT >> access.SHIFTED) if backward else LIMIT
    processors = multiprocessors(x)
    few = processors > M and FEW[backward] < D
    most = largest_piece(M, D, x.element_size(), access.SHIFTED, backward, processors)
    if found := clusters(x, M, D, access.margin, most, 1 + backward):
        piece, members, warps = found
        # Three programs of eight warps have more under way than two of sixteen.
        return Plan("cluster", piece, warps if backward else min(warps, 8), members)
    if D >= PARTS_FROM and (block != D or D >= WIDE) and limit >= D and not few:
        most = 8 if access.SHIFTED or limit // 4 < D else 4
        return Plan("parts", *parts_of(D + access.margin, vector, cdiv(M, processors), access.period, most, 2048))
    if block <= WIDE:
        height = power_of_2(max(1, min(2048 // block, M)))
        per_warp = 256 if backward else 1024  # 8 or 32 numbers a thread of each tensor
        return Plan("whole", height, min(max(height * block // per_warp, 4), 32))
    # Four programs a multiprocessor, but no piece so small that starting it takes longer than its work.
    piece = min(max(power_of_2(M * D // (4 * processors)), PIECES[0]), PIECES[1])
    pieces = cdiv(D + access.margin, piece)
    if pieces <= 1024 and (processors > M or (backward and D >= SPLIT and M <= MOST)):
        return Plan("split", piece, min(max(piece // 1024, 4), 16))
    if 4 * LANES * vector > D:
        return Plan("pieces", LANES, 16 if 2 * processors <= M and not backward else 32)
    return Plan("pieces", 2 * LANES, 32)


def prepare(x: torch.Tensor, chosen: Plan | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Softmax of tensors like x, as a plan says or as one is chosen for them."""
    if x.numel() == 0:
        return dense_like
    flat = rows(x)
    M, D = flat.shape
    stride = flat.stride(0)
    reach = access((flat, dense_like(x)), (stride, D), D)
    chosen = chosen or plan(flat, M, D, False, reach)
    constants = {**reach.constants(), "num_warps": chosen.warps}
    launch: Callable[..., None]
    if chosen.kind == "whole":
        launch = Launch(
            _whole,
            (cdiv(M, chosen.size),),
            M,
            D,
            stride,
            ROWS=chosen.size,
            BLOCK=power_of_2(D),
            num_warps=chosen.warps,
        )
    elif chosen.kind == "parts":
        grid = (cdiv(M, chosen.size * reach.period) * reach.period,)
        part = {"PART": chosen.block, "PARTS": chosen.parts}
        launch = Launch(_parts, grid, M, D, stride, ROWS=chosen.size, **part, **constants)
    elif chosen.kind == "pieces":
        launch = Launch(_pieces, (M,), D, stride, LANES=chosen.size, EACH=16 // x.element_size(), **constants)
    elif chosen.kind == "cluster":
        launch = _in_cluster(_split, M, D, (stride,), chosen, reach)
    else:
        launch = _in_pieces(_split, M, D, (stride,), chosen, reach, 2, M * D)
    device, copied = x.device, not in_rows(x)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = dense_like(x)
        launch(device, rows(x) if copied else x, y)
        return y

    return run


def prepare_backward(
    dy: torch.Tensor, y: torch.Tensor, chosen: Plan | None = None
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """dx = y · (dy - sum of y · dy) for tensors like these, as a plan says or as one is chosen for them."""
    if y.numel() == 0:
        return lambda dy, y: dense_like(y)
    given, flat = rows(dy), rows(y)
    M, D = flat.shape
    strides = (given.stride(0), flat.stride(0))
    reach = access((given, flat, dense_like(y)), (*strides, D), D)
    chosen = chosen or plan(flat, M, D, True, reach)
    constants = {**reach.constants(), "num_warps": chosen.warps}
    launch: Callable[..., None]
    if chosen.kind == "whole":
        block = {"ROWS": chosen.size, "BLOCK": power_of_2(D)}
        launch = Launch(_whole_gradient, (cdiv(M, chosen.size),), M, D, *strides, **block, num_warps=chosen.warps)
    elif chosen.kind == "parts":
        grid = (cdiv(M, chosen.size * reach.period) * reach.period,)
        part = {"PART": chosen.block, "PARTS": chosen.parts}
        launch = Launch(_parts_gradient, grid, M, D, *strides, ROWS=chosen.size, **part, **constants)
    elif chosen.kind == "pieces":
        block = chosen.size * (16 // y.element_size())
        launch = Launch(_pieces_gradient, (M,), D, *strides, BLOCK=block, **constants)
    elif chosen.kind == "cluster":
        launch = _in_cluster(_split_gradient, M, D, strides, chosen, reach)
    else:
        launch = _in_pieces(_split_gradient, M, D, strides, chosen, reach, 1, 0)
    device, copied = y.device, not (in_rows(dy) and in_rows(y))

    def run(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        dx = dense_like(y)
        if copied:
            dy, y = rows(dy), rows(y)
        launch(device, dy, y, dx)
        return dx

    return run


def _in_cluster(
    kernel: Any, M: int, D: int, strides: tuple[int, ...], chosen: Plan, reach: Access
) -> Callable[..., None]:
    """Rows that clusters hold."""
    make = ClusterLaunch(
        kernel,
        chosen.parts,
        (M * chosen.parts,),
        D,
        *strides,
        chosen.parts,
        ALL=power_of_2(chosen.parts),
        BLOCK=chosen.size,
        **reach.evenly(D, chosen.size * chosen.parts),
        SUM=True,
        RESULT=True,
        CLUSTER=True,
        num_warps=chosen.warps,
        **few_registers(chosen.size, chosen.warps, reach.SHIFTED),
    )
    # No sums and no slots: any tensors in their place.
    return lambda device, *tensors: make(device, *tensors, *tensors[:2])


def _in_pieces(
    kernel: Any, M: int, D: int, strides: tuple[int, ...], chosen: Plan, reach: Access, kinds: int, held: int
) -> Callable[..., None]:
    """Rows in pieces that programs hold: in one launch where the programs of a row can wait for each other, else
    in two. Of each piece `kinds` numbers are exchanged; `held` numbers are in registers meanwhile.
    """
    pieces = cdiv(D + reach.margin, chosen.size)

    def one(first: bool, second: bool) -> Launch:
        return Launch(
            kernel,
            (M * pieces,),
            D,
            *strides,
            pieces,
            ALL=power_of_2(pieces),
            BLOCK=chosen.size,
            **reach.constants(),
            SUM=first,
            RESULT=second,
            CLUSTER=False,
            num_warps=chosen.warps,
        )

    both, first, second = one(True, True), one(True, False), one(False, True)

    def launch(device: torch.device, *tensors: torch.Tensor) -> None:
        sums = torch.empty((kinds, M, pieces), dtype=torch.float32, device=device)
        slot = slots(tensors[0], M, held)
        if slot is not None:
            both(device, *tensors, sums, slot)
            return
        first(device, *tensors, sums, sums)
        second(device, *tensors, sums, sums)

    return launch


_launch = prepared(prepare, _check)
_launch_backward = prepared(prepare_backward)


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
    check=_check,
)
