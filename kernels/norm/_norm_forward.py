"""Forward pass of normalization (see `_norm`): kernels, plans, and their launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from .._cluster import FEW, ClusterLaunch, begin, clusters, exchange, few_registers, of_members
from .._common import INTERPRETED, cdiv, dense_like, in_rows, multiprocessors, packed, power_of_2, rows
from .._grid_barrier import arrive_and_wait, phase, slots
from .._launch import Launch, room, room_like
from .._rows import (
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
from ._norm import MOST_PARTS, PARTS_FROM, PIECE, Inputs, Norm, Plan, spread

FORWARD_LIMIT = 64 if INTERPRETED else 65536

PLAIN_LIMIT = 32 if INTERPRETED else 8192

PLAIN_PIECE = 16 if INTERPRETED else 8192

AGAIN = (16, 64) if INTERPRETED else (4096, 1 << 27)

PARTS_LIMIT = 128 if INTERPRETED else 1 << 17

WHOLE_LIMIT = 32 if INTERPRETED else 16384

AHEAD = 64 if INTERPRETED else 16384

SPREAD_WARP = 1024


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
        w = weights[i] if AHEAD else of_part(weight, shift, end, ROWS, i, PART, PARTS, VECTOR, SHIFTED)
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
    CLUSTER: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One piece of one row. SUM: its sum of squares, or mean and sum of squared distances from that. NORM: its
    normalization by the sums of all pieces (joined as by Chan, Golub and LeVeque 1979). With both, the programs
    of a row wait for each other in between, as a CLUSTER or at a barrier in memory, and the piece stays in
    registers, in its own dtype. AHEAD: so does the weight's, which is read before.
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
    pairs = 0
    before = 0
    if CLUSTER:
        pairs = begin()
    elif SUM and NORM:
        before = phase(slot + row * 2)
    shift = shift_of(x, row * strides[0], SHIFTED)
    x = boundary(x, row * strides[0], shift, VECTOR)
    y = boundary(y, row * D, shift, VECTOR)
    end = shift + D
    col = piece * BLOCK + tl.arange(0, BLOCK)
    held = get(x, col, shift, end, True, 0.0, "evict_first" if NORM else "evict_last", VECTOR, SHIFTED)
    if RESIDUAL:
        residual = boundary(residual, row * strides[1], shift, VECTOR)
        h = boundary(h, row * D, shift, VECTOR)
        other = get(residual, col, shift, end, True, 0.0, "", VECTOR, SHIFTED)
        held = (held.to(tl.float32) + other.to(tl.float32)).to(h.dtype.element_ty)
        put(h, col, held, shift, end, True, "", VECTOR, SHIFTED)
    if AHEAD:
        w = of_columns(weight, col, shift, end, "evict_last", VECTOR, SHIFTED)
        if CENTRED:
            b = of_columns(bias, col, shift, end, "evict_last", VECTOR, SHIFTED)
    at = row * pieces + piece
    if SUM:
        value = held.to(tl.float32)
        mean = 0.0
        if CENTRED:
            # μᵢ = Σ x / nᵢ and Mᵢ = Σ (x - μᵢ)² of this piece.
            mean = tl.sum(value, 0) / tl.maximum(_elements(piece, BLOCK, shift, end), 1)
            value = tl.where(within(col, shift, end, SHIFTED), value - mean, 0.0)
        total = tl.sum(value * value, 0)
        if CLUSTER:
            pairs = exchange(pairs, total, mean)
        else:
            tl.store(sums + at, total)
            if CENTRED:
                tl.store(sums + tl.cast(N, tl.int64) * pieces + at, mean)
            if NORM:
                arrive_and_wait(slot + row * 2, pieces, before)
    if SUM and NORM:
        held = packed(held)
    if NORM:
        value = held.to(tl.float32)
        if not AHEAD:
            w = of_columns(weight, col, shift, end, "evict_last", VECTOR, SHIFTED)
            if CENTRED:
                b = of_columns(bias, col, shift, end, "evict_last", VECTOR, SHIFTED)
        part = tl.arange(0, PIECES)
        # Written by other programs of this launch: not from the multiprocessor's own cache.
        if CLUSTER:
            squares = of_members(pairs, 0, part, pieces, 0.0)
        else:
            squares = tl.load(sums + row * pieces + part, part < pieces, 0.0, cache_modifier=".cg")
        if CENTRED:
            if CLUSTER:
                average = of_members(pairs, 1, part, pieces, 0.0)
            else:
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
        value = value * rstd * w.to(tl.float32)
        if CENTRED:
            value += b.to(tl.float32)
        put(y, col, value, shift, end, True, "", VECTOR, SHIFTED)


@triton.jit
def _elements(piece, BLOCK: tl.constexpr, shift, end):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Elements of a row in its n-th piece of BLOCK columns: none in the last one of a row that starts so close to
    a boundary that it ends before.
    """
    return tl.maximum(tl.minimum(end - piece * BLOCK, BLOCK) - tl.maximum(shift - piece * BLOCK, 0), 0)


def largest_piece(N: int, D: int, size: int, shifted: bool, residual: bool, centred: bool, processors: int) -> int:
    """Most elements of a cluster's program where rows are not few; 0 where other plans are faster."""
    if size > 2:
        return 0
    if 40960 < D <= 65536:  # six to eight programs of 8192 elements
        if (shifted and (centred or processors < 2 * N)) or (centred and D <= 49152):
            return 0
        return 0 if centred and not processors // 4 <= N < processors else 8192
    # Without a mean and a residual, twice as much of a row is held.
    return 16384 if D >= 32768 and processors > N and not (shifted or residual or centred) else 0


def forward_plan(x: torch.Tensor, N: int, D: int, residual: bool, centred: bool, access: Access) -> Plan:
    """The forward pass of N rows of D elements, by measurements on an H200."""
    block = power_of_2(D)
    size = x.element_size()
    plain = not (residual or centred)
    again = plain and block == AGAIN[0] and AGAIN[1] <= N * D
    long = block * size > (PLAIN_LIMIT if plain else FORWARD_LIMIT)
    piece = largest_piece(N, D, size, access.SHIFTED, residual, centred, multiprocessors(x))
    if found := clusters(x, N, D, access.margin, piece):
        piece, members, warps = found
        if piece > 8192:
            # Three programs of eight warps have more under way than two of sixteen; without the weight they fit.
            return Plan("cluster", 1, piece, members, min(warps, 8), False)
        # With a mean, a weight that is read ahead takes registers and so programs at home at a time, if many wait.
        return Plan("cluster", 1, piece, members, warps, not centred or piece <= FEW[1])
    if long and (piece := spread(x, N, D)):
        return Plan("spread", 1, piece, cdiv(D + access.margin, piece), min(max(piece // SPREAD_WARP, 4), 16))
    if D >= PARTS_FROM and (block != D or D * size > WHOLE_LIMIT) and D * size <= PARTS_LIMIT:
        # Where there are few rows, more threads each; where columns are not read in vectors, fewer.
        most = 2 if multiprocessors(x) >= N and not access.SHIFTED else MOST_PARTS
        ahead = plain and not access.SHIFTED and D * size <= AHEAD
        rows, warps, parts, part = parts_of(
            D + access.margin,
            16 // size,
            cdiv(N, multiprocessors(x)),
            access.period,
            min(most, 4) if ahead else most,
            2048,
        )
        return Plan("parts", rows, part, parts, warps, ahead)
    if long:
        return Plan("pieces", 1, PLAIN_PIECE if plain and block * size <= FORWARD_LIMIT // 2 else PIECE, 0, 16)
    rows = power_of_2(max(1, min(2048 // block, cdiv(N, multiprocessors(x)))))
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
    """The forward pass of tensors like x (…, D), as `plan` says or as it is chosen for them.

    A function of the tensors. A bias means rows are centred; `save` keeps mean and rstd.
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
    if plan.kind in ("spread", "cluster"):
        launch = _spread(sizes, strides, eps, plan, reach, flags)
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
    of_x, of_row = room_like(x), room(x.shape[:-1], torch.float32, device)
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
        results = (
            of_x(),
            of_x() if kept else None,
            of_row() if save and centred else None,
            of_row() if save else None,
        )
        if copied:
            x, weight = rows(x), weight.contiguous()
            residual = residual if residual is None else rows(residual)
            bias = bias if bias is None else bias.contiguous()
        launch(device, (x, x if residual is None else residual, weight, weight if bias is None else bias), results)
        return results

    return run


def _spread(
    sizes: tuple[int, int],
    strides: tuple[int, int],
    eps: float,
    plan: Plan,
    reach: Access,
    flags: dict[str, bool],
) -> Callable[[torch.device, Inputs, Norm], None]:
    """The forward pass of rows in pieces: in one launch where clusters hold them or its programs can wait for each
    other, else in two.
    """
    N, D = sizes
    grid, of_pieces = (N * plan.parts,), (N, D, plan.parts)
    shared = {**flags, "BLOCK": plan.block, "PIECES": power_of_2(plan.parts), "AHEAD": plan.flag}
    shared["num_warps"] = plan.warps
    if plan.kind == "cluster":
        shared |= reach.evenly(D, plan.block * plan.parts) | few_registers(plan.block, plan.warps, reach.SHIFTED)
        held = ClusterLaunch(
            _normalize_spread,
            plan.parts,
            grid,
            of_pieces,
            strides,
            eps,
            **shared,
            SUM=True,
            NORM=True,
            CLUSTER=True,
        )
        return lambda device, inputs, outputs: held(device, inputs, outputs, inputs[:2])
    shared |= {**reach.constants(), "CLUSTER": False}

    def spread_launch(strides: tuple[int, int], sums: bool, norm: bool, **changed: bool) -> Launch:
        constants = {**shared, **changed}
        return Launch(_normalize_spread, grid, of_pieces, strides, eps, **constants, SUM=sums, NORM=norm)

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
