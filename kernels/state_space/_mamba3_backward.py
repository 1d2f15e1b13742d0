"""The backward kernels of `mamba3.py`, around those of `ssd.py`.

B and C, turned for every head, are laid out in memory, as k and q. Then the scan is `ssd` with a group a head,
whose backward kernels apply; what differs is a position's own part in its y, which ssd weighs with `weight` and
this scan with `present`:

    y = ssd(x, k, q, weight, decay) - (weight - present) (q·k) x

`settle` takes that into account where x and its gradient are, `turn_back` where k and q are, which also turns
their gradients back.

The gradient of an angle is the sum of what all positions from there on say of it, whose k and q it turns. Most
of that cancels, as k and q that turn together keep their product, but the rounding of each position's does not: a
sum over the sequence would have an error that grows with it. So only a chunk is summed. All behind it, turned,
sees no more than the state at its end turned the other way, and says what that says: the torque of the state
and its gradient, which `torques` makes of the two that there are.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .._common import cdiv, multiprocessors
from .._pointwise import sigmoid
from ._mamba3_forward import HEADS, angles_of, biased, circle, turned, turning
from ._ssd_backward import load_state
from ._ssd_forward import block, load_tile, store_tile


@triton.jit
def _lay(  # type: ignore[no-untyped-def]  # Triton's types are its own
    b, c, size, rates, turns, b_bias, c_bias, k, q, product,
    stride_bb, stride_bs, stride_bg, stride_cb, stride_cs, stride_cg, S, H, groups, chunks,
    N: tl.constexpr, A: tl.constexpr, CHUNK: tl.constexpr, TURNED: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """k and q (B, S, H, N), and their product at every position, (B, H, S in whole chunks)."""
    head = tl.program_id(0) % H
    chunk = tl.program_id(0) // H % chunks
    wide = (tl.program_id(0) // H // chunks).to(tl.int64)
    group = head // groups
    row = chunk * CHUNK
    rows = row + tl.arange(0, CHUNK)
    at = (wide * H + head) * chunks * CHUNK + rows
    step = tl.load(size + at)
    cos, sin = circle(angles_of(rates, turns, step, wide, chunk, head, H, chunks, A, CHUNK, TURNED // 2))
    columns = tl.arange(0, TURNED)
    to = ((wide * S + rows) * H + head)[:, None] * N + columns[None, :]
    inside = (rows < S)[:, None] & (columns < N)[None, :]
    key = load_tile(b, wide, row, group, stride_bb, stride_bs, stride_bg, S, N, CHUNK, TURNED, False)
    key = turned(biased(key, b_bias, head, N, TURNED, 0), cos, sin, CHUNK, TURNED).to(k.dtype.element_ty)
    tl.store(k + to, key, inside)
    query = load_tile(c, wide, row, group, stride_cb, stride_cs, stride_cg, S, N, CHUNK, TURNED, False)
    query = turned(biased(query, c_bias, head, N, TURNED, 0), cos, sin, CHUNK, TURNED).to(k.dtype.element_ty)
    tl.store(q + to, query, inside)
    both = tl.sum(key.to(tl.float32) * query.to(tl.float32), 1)
    if REST:
        columns = TURNED + tl.arange(0, REST)
        to = ((wide * S + rows) * H + head)[:, None] * N + columns[None, :]
        inside = (rows < S)[:, None] & (columns < N)[None, :]
        key = load_tile(b, wide, row, group, stride_bb, stride_bs, stride_bg, S, N, CHUNK, REST, False, TURNED)
        key = biased(key, b_bias, head, N, REST, TURNED).to(k.dtype.element_ty)
        tl.store(k + to, key, inside)
        query = load_tile(c, wide, row, group, stride_cb, stride_cs, stride_cg, S, N, CHUNK, REST, False, TURNED)
        query = biased(query, c_bias, head, N, REST, TURNED).to(k.dtype.element_ty)
        tl.store(q + to, query, inside)
        both += tl.sum(key.to(tl.float32) * query.to(tl.float32), 1)
    tl.store(product + at, both)


@triton.jit
def _settle(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, grad, dx, weight, present, product, push, dafter,
    stride_xb, stride_xs, stride_xh, stride_gb, stride_gs, stride_gh, S, H, chunks,
    P: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Takes a position's own part, weighed too much by weight - present, out of dx, in place. `dafter` is what
    that means for the gradient of the difference, `push` the factor by which k and q have too much of each other.
    """
    head = tl.program_id(0) % H
    chunk = tl.program_id(0) // H % chunks
    wide = (tl.program_id(0) // H // chunks).to(tl.int64)
    row = chunk * CHUNK
    at = (wide * H + head) * chunks * CHUNK + row + tl.arange(0, CHUNK)
    given = load_tile(x, wide, row, head, stride_xb, stride_xs, stride_xh, S, P, CHUNK, BLOCK_P, False)
    dy = load_tile(grad, wide, row, head, stride_gb, stride_gs, stride_gh, S, P, CHUNK, BLOCK_P, False)
    dy = dy.to(tl.float32)
    both = tl.sum(given.to(tl.float32) * dy, 1)
    after = tl.load(weight + at) - tl.load(present + at)
    score = tl.load(product + at)
    tl.store(push + at, after * both)
    tl.store(dafter + at, -score * both)
    stride = tl.cast(H, tl.int64) * P
    out = load_tile(dx, wide, row, head, S * stride, stride, P, S, P, CHUNK, BLOCK_P, False).to(tl.float32)
    out -= (after * score)[:, None] * dy
    store_tile(dx, out, wide, row, head, S, H, P, CHUNK, BLOCK_P, False)


@triton.jit
def _torques(  # type: ignore[no-untyped-def]  # Triton's types are its own
    h, g, torques, H, chunks,
    A: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`torques` (B, chunks, H, A), fp32: the gradient of an angle by which all behind a chunk is turned, 0 for
    the last. h and g (B, chunks, H, tile) are the state that each chunk starts from, and the gradient of the one
    that it ends with; of both COLUMNS are read.
    """
    head = tl.program_id(0) % H
    chunk = tl.program_id(0) // H % chunks
    wide = (tl.program_id(0) // H // chunks).to(tl.int64)
    pairs = tl.arange(0, COLUMNS // 2)
    torque = tl.zeros([COLUMNS // 2], tl.float32)
    if chunk + 1 < chunks:
        state = load_state(h, wide, chunk + 1, head, chunks, H, BLOCK_P, BLOCK_N, False, COLUMNS)
        first, second = tl.split(tl.reshape(state, [BLOCK_P, COLUMNS // 2, 2]))
        gradient = load_state(g, wide, chunk, head, chunks, H, BLOCK_P, BLOCK_N, False, COLUMNS)
        dfirst, dsecond = tl.split(tl.reshape(gradient, [BLOCK_P, COLUMNS // 2, 2]))
        turn = second.to(tl.float32) * dfirst.to(tl.float32) - first.to(tl.float32) * dsecond.to(tl.float32)
        torque += tl.sum(turn, 0)
    tl.store(torques + ((wide * chunks + chunk) * H + head) * A + pairs, torque, pairs < A)


@triton.jit
def _turn_back(  # type: ignore[no-untyped-def]  # Triton's types are its own
    k, q, dk, dq, size, push, rates, turns, torques, db, dc, db_bias, dc_bias, dsize, drates,
    S, H, groups, batches, chunks, splits,
    N: tl.constexpr, A: tl.constexpr, CHUNK: tl.constexpr, TURNED: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """The gradients of one chunk's B and C, summed over some heads of one group, to (splits, B, S, G, N), and of
    the heads' biases (B, chunks, H, N), fp32; of the first TURNED columns or, by programs of their own, the rest.

    Those of the first also write what is said of angles, in radians: `dsize` (B, H, S in whole chunks) and
    `drates` (splits, G, B, S in whole chunks, A).
    """
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
        columns = tl.arange(0, TURNED)
        pairs = tl.arange(0, TURNED // 2)
        inside = (position < S)[:, None] & (columns < N)[None, :]
        place = (wide * chunks + chunk) * CHUNK + rows
        rate = tl.load(rates + place[:, None] * A + pairs[None, :], (pairs < A)[None, :], 0.0)
        total_k = tl.zeros([CHUNK, TURNED], tl.float32)
        total_q = tl.zeros([CHUNK, TURNED], tl.float32)
        drate = tl.zeros([CHUNK, TURNED // 2], tl.float32)
        for head in range(low, high):
            at = (wide * H + head) * chunks * CHUNK + position
            step = tl.load(size + at)
            too_much = tl.load(push + at)[:, None]
            cos, sin = circle(angles_of(rates, turns, step, wide, chunk, head, H, chunks, A, CHUNK, TURNED // 2))
            to = ((wide * S + position) * H + head)[:, None] * N + columns[None, :]
            key = tl.load(k + to, inside, 0.0).to(tl.float32)
            query = tl.load(q + to, inside, 0.0).to(tl.float32)
            dkey = tl.load(dk + to, inside, 0.0).to(tl.float32) - too_much * query
            dquery = tl.load(dq + to, inside, 0.0).to(tl.float32) - too_much * key
            first, second = tl.split(tl.reshape(key, [CHUNK, TURNED // 2, 2]))
            dfirst, dsecond = tl.split(tl.reshape(dkey, [CHUNK, TURNED // 2, 2]))
            turn = first * dsecond - second * dfirst
            first, second = tl.split(tl.reshape(query, [CHUNK, TURNED // 2, 2]))
            dfirst, dsecond = tl.split(tl.reshape(dquery, [CHUNK, TURNED // 2, 2]))
            turn += first * dsecond - second * dfirst
            # The way back is the turn by the negative angle.
            dkey = turned(dkey, cos, -sin, CHUNK, TURNED)
            dquery = turned(dquery, cos, -sin, CHUNK, TURNED)
            total_k += dkey
            total_q += dquery
            bias = ((wide * chunks + chunk) * H + head) * N + columns
            tl.store(db_bias + bias, tl.sum(dkey, 0), columns < N)
            tl.store(dc_bias + bias, tl.sum(dquery, 0), columns < N)
            behind = tl.load(torques + ((wide * chunks + chunk) * H + head) * A + pairs, pairs < A, 0.0)
            turn = tl.cumsum(turn, 0, reverse=True) + behind[None, :]
            tl.store(dsize + at, tl.sum(turn * rate, 1))
            drate += turn * step[:, None]
        tl.store(db + result[:, None] * N + columns[None, :], total_k, inside)
        tl.store(dc + result[:, None] * N + columns[None, :], total_q, inside)
        to = ((tl.cast(split, tl.int64) * (H // groups) + group) * batches + batch) * chunks * CHUNK + position
        tl.store(drates + to[:, None] * A + pairs[None, :], drate, (pairs < A)[None, :])
    else:
        columns = TURNED + tl.arange(0, REST)
        inside = (position < S)[:, None] & (columns < N)[None, :]
        total_k = tl.zeros([CHUNK, REST], tl.float32)
        total_q = tl.zeros([CHUNK, REST], tl.float32)
        for head in range(low, high):
            at = (wide * H + head) * chunks * CHUNK + position
            too_much = tl.load(push + at)[:, None]
            to = ((wide * S + position) * H + head)[:, None] * N + columns[None, :]
            dkey = tl.load(dk + to, inside, 0.0).to(tl.float32)
            dkey -= too_much * tl.load(q + to, inside, 0.0).to(tl.float32)
            dquery = tl.load(dq + to, inside, 0.0).to(tl.float32)
            dquery -= too_much * tl.load(k + to, inside, 0.0).to(tl.float32)
            total_k += dkey
            total_q += dquery
            bias = ((wide * chunks + chunk) * H + head) * N + columns
            tl.store(db_bias + bias, tl.sum(dkey, 0), columns < N)
            tl.store(dc_bias + bias, tl.sum(dquery, 0), columns < N)
        tl.store(db + result[:, None] * N + columns[None, :], total_k, inside)
        tl.store(dc + result[:, None] * N + columns[None, :], total_q, inside)


@triton.jit
def _last(  # type: ignore[no-untyped-def]  # Triton's types are its own
    trap, size, direct, dafter, dsize, ddt, dtrap, stride_b, stride_s, stride_h, S, H, chunks,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Gradients of dt and trap (B, S, H): from `direct`, of the weight at a position, with `dafter`, of its part
    that belongs to the position after; and from angles, `dsize`.
    """
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    rows = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (rows < S)[:, None] & (heads < H)[None, :]
    at = (batch * H + heads)[None, :] * (chunks * CHUNK) + rows[:, None]
    pointers = trap + batch * stride_b + (rows.to(tl.int64) * stride_s)[:, None] + (heads * stride_h)[None, :]
    share = sigmoid(tl.load(pointers, inside, 0.0).to(tl.float32))
    step = tl.load(size + at, inside, 0.0)
    own = tl.load(direct + at, inside, 0.0)
    behind = inside & (rows > 0)[:, None]
    before = tl.load(direct + at - 1, behind, 0.0) + tl.load(dafter + at - 1, behind, 0.0)
    to = (batch * S + rows)[:, None] * H + heads[None, :]
    value = share * own + (1.0 - share) * before + 6.283185307179586 * tl.load(dsize + at, inside, 0.0)
    tl.store(ddt + to, value.to(ddt.dtype.element_ty), inside)
    value = share * (1.0 - share) * step * (own - before)
    tl.store(dtrap + to, value.to(dtrap.dtype.element_ty), inside)


# ---------------------------------------------------------------------------------------------------------
# Launches. Biases are contiguous, and so are k, q and dx; x, B, C and the gradient of y in their last dimension.


def lay(
    b: torch.Tensor, c: torch.Tensor, size: torch.Tensor, rates: torch.Tensor, turns: torch.Tensor,
    b_bias: torch.Tensor, c_bias: torch.Tensor, *, chunk: int, warps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(k, q, their product at every position): see `_lay`."""
    B, S, G, N = b.shape
    H = size.shape[1]
    chunks = cdiv(S, chunk)
    k, q = (torch.empty(B, S, H, N, dtype=b.dtype, device=b.device) for _ in range(2))
    product = torch.empty(B, H, chunks * chunk, dtype=torch.float32, device=b.device)
    first = turning(N, rates.shape[2])
    _lay[(B * chunks * H,)](
        b, c, size, rates, turns, b_bias, c_bias, k, q, product, *b.stride()[:3], *c.stride()[:3],
        S, H, H // G, chunks, N, rates.shape[2], chunk, first, block(N) - first, num_warps=warps,
    )  # fmt: skip
    return k, q, product


def settle(
    x: torch.Tensor, grad: torch.Tensor, dx: torch.Tensor, weights: torch.Tensor, product: torch.Tensor, *,
    chunk: int, warps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(push, dafter), and dx in place: see `_settle`."""
    B, S, H, P = x.shape
    chunks = cdiv(S, chunk)
    push, dafter = torch.empty_like(product), torch.empty_like(product)
    _settle[(B * chunks * H,)](
        x, grad, dx, weights[2], weights[3], product, push, dafter, *x.stride()[:3], *grad.stride()[:3],
        S, H, chunks, P, chunk, block(P), num_warps=warps,
    )  # fmt: skip
    return push, dafter


def torques(h: torch.Tensor, g: torch.Tensor, angles: int, *, warps: int | None = None) -> torch.Tensor:
    """(B, chunks, H, angles): see `_torques`."""
    B, chunks, H, height, width = h.shape
    result = torch.empty(B, chunks, H, angles, dtype=torch.float32, device=h.device)
    if angles:
        columns = block(2 * angles)
        _torques[(B * chunks * H,)](
            h, g, result, H, chunks, angles, columns, height, width,
            num_warps=warps or min(8, max(1, height * columns // 1024)),
        )  # fmt: skip
    return result


def turn_back(
    k: torch.Tensor, q: torch.Tensor, dk: torch.Tensor, dq: torch.Tensor, size: torch.Tensor,
    push: torch.Tensor, rates: torch.Tensor, turns: torch.Tensor, torques: torch.Tensor, groups: int, *,
    chunk: int, warps: int = 8, splits: int | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Gradients of B, C and their biases; of the steps by angles (B, H, S in whole chunks), which want a factor of
    2π; and of angles, the inputs. All in fp32.
    """
    B, S, H, N = k.shape
    A = rates.shape[2]
    chunks = cdiv(S, chunk)
    first = turning(N, A)
    rest = block(N) - first  # as many or none; without, the kernel's other branch only has to have the same types
    if splits is None:
        splits = max(1, 4 * multiprocessors(k) // (B * chunks * groups))
    splits = cdiv(H // groups, cdiv(H // groups, min(splits, H // groups)))

    def made(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=k.device)

    db, dc = (made(splits, B, S, groups, N) for _ in range(2))
    biases = made(2, B * chunks, H, N)
    dsize = torch.empty_like(size)
    drates = made(splits * groups, B, chunks, chunk, A)
    _turn_back[(B * chunks * groups * splits, 2 if rest else 1)](
        k, q, dk, dq, size, push, rates, turns, torques, db, dc, *biases, dsize, drates,
        S, H, H // groups, B, chunks, splits, N, A, chunk, first, rest or first, num_warps=warps,
    )  # fmt: skip
    # The rate, in revolutions, is tanh(angle) / 2: π for what a revolution has, the rest for tanh.
    dangles = math.pi * (1.0 - 4.0 * rates.square()) * drates.sum(0).view(B, chunks * chunk, A)
    return db.sum(0), dc.sum(0), *biases.sum(1), dsize, dangles[:, :S]


def last(
    dt: torch.Tensor, trap: torch.Tensor, size: torch.Tensor, direct: torch.Tensor, dafter: torch.Tensor,
    dsize: torch.Tensor, *, chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of dt and trap, contiguous: see `_last`."""
    B, S, H = dt.shape
    chunks = cdiv(S, chunk)
    ddt, dtrap = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (dt, trap))
    _last[(B * chunks, cdiv(H, HEADS))](
        trap, size, direct, dafter, dsize, ddt, dtrap, *trap.stride(), S, H, chunks,
        CHUNK=chunk, HEADS=HEADS, num_warps=4,
    )  # fmt: skip
    return ddt, dtrap
