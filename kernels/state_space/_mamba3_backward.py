"""The backward kernels of `mamba3.py`, around those of `ssd.py`.

B and C, rotated for every head, are written to memory, as k and q. Then the scan is `ssd` with a group a head,
whose backward kernels apply; what differs is a position's own part in its y, which ssd weighs with `weight` and
this scan with `present`:

    y = ssd(x, k, q, weight, decay) - (weight - present) (q·k) x

`correct_diagonal` takes that into account where x and its gradient are, `rotate_back` where k and q are, which
also rotates their gradients back.

The gradient of an angle is the sum over all positions from there on of k × dk + q × dq, as the angle rotates
their k and q. Most of that cancels, as k and q that rotate together keep their product, but each position's
rounding does not: a sum over the sequence would have an error that grows with it. So only a chunk is summed. All
positions behind it, rotated, see no more than the state at its end rotated the other way, so that their sum is
g × h of that state h and its gradient g, which `angle_gradients` computes of the two that there are.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .._common import cdiv, multiprocessors
from .._pointwise import sigmoid
from ._mamba3_forward import HEADS, Rotation, Weights, angles_of, biased, cos_sin, rotated, rotated_columns
from ._ssd_backward import load_state
from ._ssd_forward import Extent, Sizes, Strides, block, load_tile, store_tile, strides


class Columns(NamedTuple):
    """Known when compiling: state dimension, angles, positions of a chunk, columns that are rotated or are not."""

    N: int
    A: int
    CHUNK: int
    ROTATED: int
    REST: int


class Rotated(NamedTuple):
    """k and q (B, S, H, N) and their gradients."""

    k: Any
    q: Any
    dk: Any
    dq: Any


class Results(NamedTuple):
    """Of `_rotate_back`, fp32: dB and dC (splits, B, S, G, N), gradients of biases (B, chunks, H, N), of steps by
    angles (B, H, S in whole chunks), and of rates (splits, G, B, S in whole chunks, A).
    """

    db: Any
    dc: Any
    db_bias: Any
    dc_bias: Any
    dstep: Any
    drates: Any


class Groups(NamedTuple):
    """Of a grid with a program for each chunk, group and split of its `groups` heads."""

    S: Any
    H: Any
    groups: Any
    batches: Any
    chunks: Any
    splits: Any


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]  # Triton's types are its own
    b, c, steps, rotation, b_bias, c_bias, k, q, product, b_strides, c_strides, sizes, columns: tl.constexpr
):
    """k and q (B, S, H, N), and their product at every position, (B, H, S in whole chunks)."""
    N: tl.constexpr = columns.N
    CHUNK: tl.constexpr = columns.CHUNK
    ROTATED: tl.constexpr = columns.ROTATED
    REST: tl.constexpr = columns.REST
    S, H, groups, chunks = sizes
    head = tl.program_id(0) % H
    chunk = tl.program_id(0) // H % chunks
    wide = (tl.program_id(0) // H // chunks).to(tl.int64)
    group = head // groups
    row = chunk * CHUNK
    rows = row + tl.arange(0, CHUNK)
    at = (wide * H + head) * chunks * CHUNK + rows
    step = tl.load(steps + at)
    cos, sin = cos_sin(angles_of(rotation, step, wide, chunk, head, H, chunks, columns.A, CHUNK, ROTATED // 2))
    column = tl.arange(0, ROTATED)
    to = ((wide * S + rows) * H + head)[:, None] * N + column[None, :]
    inside = (rows < S)[:, None] & (column < N)[None, :]
    # k = R(angle) · (B + bias), q = R(angle) · (C + bias)
    key = load_tile(b, b_strides, wide, row, group, S, N, CHUNK, ROTATED, False)
    key = rotated(biased(key, b_bias, head, N, ROTATED, 0), cos, sin, CHUNK, ROTATED).to(k.dtype.element_ty)
    tl.store(k + to, key, inside)
    query = load_tile(c, c_strides, wide, row, group, S, N, CHUNK, ROTATED, False)
    query = rotated(biased(query, c_bias, head, N, ROTATED, 0), cos, sin, CHUNK, ROTATED).to(k.dtype.element_ty)
    tl.store(q + to, query, inside)
    both = tl.sum(key.to(tl.float32) * query.to(tl.float32), 1)
    if REST:
        column = ROTATED + tl.arange(0, REST)
        to = ((wide * S + rows) * H + head)[:, None] * N + column[None, :]
        inside = (rows < S)[:, None] & (column < N)[None, :]
        key = load_tile(b, b_strides, wide, row, group, S, N, CHUNK, REST, False, ROTATED)
        key = biased(key, b_bias, head, N, REST, ROTATED).to(k.dtype.element_ty)
        tl.store(k + to, key, inside)
        query = load_tile(c, c_strides, wide, row, group, S, N, CHUNK, REST, False, ROTATED)
        query = biased(query, c_bias, head, N, REST, ROTATED).to(k.dtype.element_ty)
        tl.store(q + to, query, inside)
        both += tl.sum(key.to(tl.float32) * query.to(tl.float32), 1)
    tl.store(product + at, both)


@triton.jit
def _correct_diagonal(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, dy, dx, weight, present, product, dproduct, dafter, x_strides, dy_strides, extent,
    P: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Takes a position's own part, weighed too much by weight - present, out of dx, in place. `dafter` is what
    that means for the gradient of the difference; `dproduct`, of q·k, by which dk and dq are too large.
    """
    S, H, chunks = extent
    head = tl.program_id(0) % H
    chunk = tl.program_id(0) // H % chunks
    wide = (tl.program_id(0) // H // chunks).to(tl.int64)
    row = chunk * CHUNK
    at = (wide * H + head) * chunks * CHUNK + row + tl.arange(0, CHUNK)
    x_tile = load_tile(x, x_strides, wide, row, head, S, P, CHUNK, BLOCK_P, False)
    wide_dy = load_tile(dy, dy_strides, wide, row, head, S, P, CHUNK, BLOCK_P, False)
    wide_dy = wide_dy.to(tl.float32)
    both = tl.sum(x_tile.to(tl.float32) * wide_dy, 1)
    after = tl.load(weight + at) - tl.load(present + at)
    score = tl.load(product + at)
    tl.store(dproduct + at, after * both)
    tl.store(dafter + at, -score * both)
    # dx -= (weight - present) (q·k) dy
    stride = tl.cast(H, tl.int64) * P
    out = load_tile(dx, Strides(S * stride, stride, P), wide, row, head, S, P, CHUNK, BLOCK_P, False)
    out = out.to(tl.float32)
    out -= (after * score)[:, None] * wide_dy
    store_tile(dx, out, wide, row, head, S, H, P, CHUNK, BLOCK_P, False)


@triton.jit
def _angle_gradients(  # type: ignore[no-untyped-def]  # Triton's types are its own
    h, g, gradients, H, chunks,
    A: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(B, chunks, H, A), fp32: the gradient of an angle by which all positions behind a chunk are rotated, 0 for
    the last. h and g (B, chunks, H, tile) are the state that each chunk starts from, and the gradient of the one
    that it ends with; of both COLUMNS are read.
    """
    head = tl.program_id(0) % H
    chunk = tl.program_id(0) // H % chunks
    wide = (tl.program_id(0) // H // chunks).to(tl.int64)
    pairs = tl.arange(0, COLUMNS // 2)
    dangle = tl.zeros([COLUMNS // 2], tl.float32)
    if chunk + 1 < chunks:
        state = load_state(h, wide, chunk + 1, head, chunks, H, BLOCK_P, BLOCK_N, False, COLUMNS)
        first, second = tl.split(tl.reshape(state, [BLOCK_P, COLUMNS // 2, 2]))
        gradient = load_state(g, wide, chunk, head, chunks, H, BLOCK_P, BLOCK_N, False, COLUMNS)
        dfirst, dsecond = tl.split(tl.reshape(gradient, [BLOCK_P, COLUMNS // 2, 2]))
        # dangle = g × h, pair by pair
        cross = second.to(tl.float32) * dfirst.to(tl.float32) - first.to(tl.float32) * dsecond.to(tl.float32)
        dangle += tl.sum(cross, 0)
    tl.store(gradients + ((wide * chunks + chunk) * H + head) * A + pairs, dangle, pairs < A)


@triton.jit
def _rotate_back(  # type: ignore[no-untyped-def]  # Triton's types are its own
    given, steps, dproduct, rotation, behind, results, sizes, shape: tl.constexpr
):
    """The gradients of one chunk's B and C, summed over some heads of one group, and of the heads' biases; of the
    first ROTATED columns or, by programs of their own, the rest. Those of the first also write those of angles, in
    radians: of steps and of rates. `behind` is that of `_angle_gradients`.
    """
    N: tl.constexpr = shape.N
    A: tl.constexpr = shape.A
    CHUNK: tl.constexpr = shape.CHUNK
    ROTATED: tl.constexpr = shape.ROTATED
    REST: tl.constexpr = shape.REST
    S, H, groups, batches, chunks, splits = sizes
    program = tl.program_id(0)
    split = program % splits
    group = program // splits % (H // groups)
    chunk = program // (splits * (H // groups)) % chunks
    batch = program // (splits * (H // groups)) // chunks
    wide = batch.to(tl.int64)
    rows = tl.arange(0, CHUNK)
    position = chunk * CHUNK + rows
    per = tl.cdiv(groups, splits)
    low = group * groups + split * per
    high = tl.minimum(low + per, (group + 1) * groups)
    result = ((tl.cast(split, tl.int64) * batches + batch) * S + position) * (H // groups) + group
    if tl.program_id(1) == 0:
        columns = tl.arange(0, ROTATED)
        pairs = tl.arange(0, ROTATED // 2)
        inside = (position < S)[:, None] & (columns < N)[None, :]
        at = (wide * chunks + chunk) * CHUNK + rows
        rate = tl.load(rotation.rates + at[:, None] * A + pairs[None, :], (pairs < A)[None, :], 0.0)
        total_k = tl.zeros([CHUNK, ROTATED], tl.float32)
        total_q = tl.zeros([CHUNK, ROTATED], tl.float32)
        drate = tl.zeros([CHUNK, ROTATED // 2], tl.float32)
        for head in range(low, high):
            at = (wide * H + head) * chunks * CHUNK + position
            step = tl.load(steps + at)
            too_much = tl.load(dproduct + at)[:, None]
            cos, sin = cos_sin(angles_of(rotation, step, wide, chunk, head, H, chunks, A, CHUNK, ROTATED // 2))
            to = ((wide * S + position) * H + head)[:, None] * N + columns[None, :]
            key = tl.load(given.k + to, inside, 0.0).to(tl.float32)
            query = tl.load(given.q + to, inside, 0.0).to(tl.float32)
            dkey = tl.load(given.dk + to, inside, 0.0).to(tl.float32) - too_much * query
            dquery = tl.load(given.dq + to, inside, 0.0).to(tl.float32) - too_much * key
            first, second = tl.split(tl.reshape(key, [CHUNK, ROTATED // 2, 2]))
            dfirst, dsecond = tl.split(tl.reshape(dkey, [CHUNK, ROTATED // 2, 2]))
            # dangle = k × dk + q × dq, pair by pair
            dangle = first * dsecond - second * dfirst
            first, second = tl.split(tl.reshape(query, [CHUNK, ROTATED // 2, 2]))
            dfirst, dsecond = tl.split(tl.reshape(dquery, [CHUNK, ROTATED // 2, 2]))
            dangle += first * dsecond - second * dfirst
            # R(-angle) · dk, R(-angle) · dq
            dkey = rotated(dkey, cos, -sin, CHUNK, ROTATED)
            dquery = rotated(dquery, cos, -sin, CHUNK, ROTATED)
            total_k += dkey
            total_q += dquery
            bias = ((wide * chunks + chunk) * H + head) * N + columns
            tl.store(results.db_bias + bias, tl.sum(dkey, 0), columns < N)
            tl.store(results.dc_bias + bias, tl.sum(dquery, 0), columns < N)
            after = tl.load(behind + ((wide * chunks + chunk) * H + head) * A + pairs, pairs < A, 0.0)
            dangle = tl.cumsum(dangle, 0, reverse=True) + after[None, :]
            tl.store(results.dstep + at, tl.sum(dangle * rate, 1))
            drate += dangle * step[:, None]
        tl.store(results.db + result[:, None] * N + columns[None, :], total_k, inside)
        tl.store(results.dc + result[:, None] * N + columns[None, :], total_q, inside)
        to = ((tl.cast(split, tl.int64) * (H // groups) + group) * batches + batch) * chunks * CHUNK + position
        tl.store(results.drates + to[:, None] * A + pairs[None, :], drate, (pairs < A)[None, :])
    else:
        columns = ROTATED + tl.arange(0, REST)
        inside = (position < S)[:, None] & (columns < N)[None, :]
        total_k = tl.zeros([CHUNK, REST], tl.float32)
        total_q = tl.zeros([CHUNK, REST], tl.float32)
        for head in range(low, high):
            at = (wide * H + head) * chunks * CHUNK + position
            too_much = tl.load(dproduct + at)[:, None]
            to = ((wide * S + position) * H + head)[:, None] * N + columns[None, :]
            dkey = tl.load(given.dk + to, inside, 0.0).to(tl.float32)
            dkey -= too_much * tl.load(given.q + to, inside, 0.0).to(tl.float32)
            dquery = tl.load(given.dq + to, inside, 0.0).to(tl.float32)
            dquery -= too_much * tl.load(given.k + to, inside, 0.0).to(tl.float32)
            total_k += dkey
            total_q += dquery
            bias = ((wide * chunks + chunk) * H + head) * N + columns
            tl.store(results.db_bias + bias, tl.sum(dkey, 0), columns < N)
            tl.store(results.dc_bias + bias, tl.sum(dquery, 0), columns < N)
        tl.store(results.db + result[:, None] * N + columns[None, :], total_k, inside)
        tl.store(results.dc + result[:, None] * N + columns[None, :], total_q, inside)


@triton.jit
def _reduce_gradients(  # type: ignore[no-untyped-def]  # Triton's types are its own
    trap, steps, direct, dafter, dstep, ddt, dtrap, strides, extent, CHUNK: tl.constexpr, HEADS: tl.constexpr
):
    """Gradients of dt and trap (B, S, H): from `direct`, of the weight at a position, with `dafter`, of its part
    that belongs to the position after; and from angles, `dstep`.
    """
    S, H, chunks = extent
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    rows = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (rows < S)[:, None] & (heads < H)[None, :]
    at = (batch * H + heads)[None, :] * (chunks * CHUNK) + rows[:, None]
    pointers = trap + batch * strides.batch + (rows.to(tl.int64) * strides.position)[:, None]
    pointers += (heads * strides.head)[None, :]
    share = sigmoid(tl.load(pointers, inside, 0.0).to(tl.float32))
    step = tl.load(steps + at, inside, 0.0)
    own = tl.load(direct + at, inside, 0.0)
    behind = inside & (rows > 0)[:, None]
    before = tl.load(direct + at - 1, behind, 0.0) + tl.load(dafter + at - 1, behind, 0.0)
    to = (batch * S + rows)[:, None] * H + heads[None, :]
    value = share * own + (1.0 - share) * before + 6.283185307179586 * tl.load(dstep + at, inside, 0.0)
    tl.store(ddt + to, value.to(ddt.dtype.element_ty), inside)
    value = share * (1.0 - share) * step * (own - before)
    tl.store(dtrap + to, value.to(dtrap.dtype.element_ty), inside)


# ---------------------------------------------------------------------------------------------------------
# Launches. Biases are contiguous, and so are k, q and dx; x, B, C and the gradient of y in their last dimension.


def rotate(
    b: torch.Tensor, c: torch.Tensor, step: torch.Tensor, rotation: Rotation, b_bias: torch.Tensor,
    c_bias: torch.Tensor, *, chunk: int, warps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(k, q, their product at every position): see `_rotate`."""
    B, S, G, N = b.shape
    H, A = step.shape[1], rotation.rates.shape[2]
    chunks = cdiv(S, chunk)
    k, q = (torch.empty(B, S, H, N, dtype=b.dtype, device=b.device) for _ in range(2))
    product = torch.empty(B, H, chunks * chunk, dtype=torch.float32, device=b.device)
    first = rotated_columns(N, A)
    _rotate[(B * chunks * H,)](
        b, c, step, rotation, b_bias, c_bias, k, q, product, strides(b), strides(c), Sizes(S, H, H // G, chunks),
        Columns(N, A, chunk, first, block(N) - first), num_warps=warps,
    )  # fmt: skip
    return k, q, product


def correct_diagonal(
    x: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, weights: Weights, product: torch.Tensor, *,
    chunk: int, warps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dproduct, dafter), and dx in place: see `_correct_diagonal`."""
    B, S, H, P = x.shape
    chunks = cdiv(S, chunk)
    dproduct, dafter = torch.empty_like(product), torch.empty_like(product)
    _correct_diagonal[(B * chunks * H,)](
        x, dy, dx, weights.weight, weights.present, product, dproduct, dafter, strides(x), strides(dy),
        Extent(S, H, chunks), P, chunk, block(P), num_warps=warps,
    )  # fmt: skip
    return dproduct, dafter


def angle_gradients(h: torch.Tensor, g: torch.Tensor, angles: int, *, warps: int | None = None) -> torch.Tensor:
    """(B, chunks, H, angles): see `_angle_gradients`."""
    B, chunks, H, height, width = h.shape
    result = torch.empty(B, chunks, H, angles, dtype=torch.float32, device=h.device)
    if angles:
        columns = block(2 * angles)
        _angle_gradients[(B * chunks * H,)](
            h, g, result, H, chunks, angles, columns, height, width,
            num_warps=warps or min(8, max(1, height * columns // 1024)),
        )  # fmt: skip
    return result


def rotate_back(
    given: Rotated, step: torch.Tensor, dproduct: torch.Tensor, rotation: Rotation, behind: torch.Tensor,
    groups: int, *, chunk: int, warps: int = 8, splits: int | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Gradients of B, C and their biases; of the steps by angles (B, H, S in whole chunks), which want a factor of
    2π; and of angles, the inputs. All in fp32.
    """
    B, S, H, N = given.k.shape
    A = rotation.rates.shape[2]
    chunks = cdiv(S, chunk)
    first = rotated_columns(N, A)
    rest = block(N) - first  # as many or none; without, the kernel's other branch only has to have the same types
    if splits is None:
        splits = max(1, 4 * multiprocessors(step) // (B * chunks * groups))
    splits = cdiv(H // groups, cdiv(H // groups, min(splits, H // groups)))

    def made(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=step.device)

    db, dc = (made(splits, B, S, groups, N) for _ in range(2))
    biases = made(2, B * chunks, H, N)
    results = Results(db, dc, *biases, torch.empty_like(step), made(splits * groups, B, chunks, chunk, A))
    _rotate_back[(B * chunks * groups * splits, 2 if rest else 1)](
        given, step, dproduct, rotation, behind, results, Groups(S, H, H // groups, B, chunks, splits),
        Columns(N, A, chunk, first, rest or first), num_warps=warps,
    )  # fmt: skip
    # The rate, in revolutions, is tanh(angle) / 2: π for what a revolution has, the rest for tanh.
    dangles = math.pi * (1.0 - 4.0 * rotation.rates.square())
    dangles *= results.drates.sum(0).view(B, chunks * chunk, A)
    return db.sum(0), dc.sum(0), *biases.sum(1), results.dstep, dangles[:, :S]


def reduce_gradients(
    dt: torch.Tensor, trap: torch.Tensor, step: torch.Tensor, direct: torch.Tensor, dafter: torch.Tensor,
    dstep: torch.Tensor, *, chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of dt and trap, contiguous: see `_reduce_gradients`."""
    B, S, H = dt.shape
    chunks = cdiv(S, chunk)
    ddt, dtrap = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (dt, trap))
    _reduce_gradients[(B * chunks, cdiv(H, HEADS))](
        trap, step, direct, dafter, dstep, ddt, dtrap, strides(trap), Extent(S, H, chunks),
        CHUNK=chunk, HEADS=HEADS, num_warps=4,
    )  # fmt: skip
    return ddt, dtrap
