"""The step of the backward passes for Hopper, over dense and over packed sequences: P of a tile, and what is done
with it once it is masked; the mask is each kernel's own.

The first half is of the pass in two kernels, dK and dV in one and dQ in the other; the second of the pass in one,
whose consumers exchange dS. Their schedules stand in `_attention_hopper_backward_deterministic.py` and
`_attention_hopper_backward.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._hopper import product_layout, unpack
from .._pipeline import Cursor, Exchange, add_out, barriers, pieces
from ._softmax import capped, pack, products


@gluon.jit
def opaque(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """0, which the compiler does not know to be. Added to a buffer's index within a loop it keeps the addresses
    that follow from it, dozens of them, from being computed before the loop and spilled.
    """
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def scored(  # type: ignore[no-untyped-def]  # as above
    own, own_other, tile, tile_other, level, zero, scale, AXIS: gl.constexpr, INNER: gl.constexpr = 0.0
):
    """(P before its mask, dP still being multiplied) of a consumer's own rows with a tile: K and V with Q and dO
    where the log-sum-exp is by column (AXIS 0), Q and dO with K and V where it is by row (1). Q and K are tuples
    of pieces, as in `products`. Of scores that are capped, t = tanh(S·INNER), P comes times their slope 1 - t²: as
    dS has it, not dV.
    """
    # S = Q·Kᵀ, dP = dO·Vᵀ, or both transposed
    s = products(own, tile, zero)
    dp = warpgroup_mma(own_other, tile_other.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    s = capped(s, INNER, own_other.dtype)
    # P = 2^(S·scale - lse)
    p = gl.exp2(s * scale - gl.expand_dims(level, AXIS))
    if INNER > 0:
        p = p * (1.0 - s * s)
    return p, dp


@gluon.jit
def add_to_keys(  # type: ignore[no-untyped-def]  # as above
    p, dp, dk, dv, stream, at, delta, base, j, columns, c: gl.constexpr
):
    """(dK, dV) with those of a tile of queries, which it releases; their delta is read `base` + j tiles behind
    `delta`. dK is a tuple of pieces.
    """
    of_values: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv.type.layout, k_width=2)
    of_keys: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk[0].type.layout, k_width=2)
    q = pieces(stream.first, at.stage, len(dk))
    g = stream.second.index(at.stage)
    weights = gl.convert_layout(p.to(g.dtype), of_values)
    # dV += Pᵀ·dO
    dv = warpgroup_mma(weights, g, dv, is_async=True)
    of_row = gl.load(delta + base + j * c.tile + columns)
    dp = warpgroup_mma_wait(1, deps=[dp])
    # dS = P ∘ (dP - delta)
    ds = gl.convert_layout((p * (dp - gl.expand_dims(of_row, 0))).to(g.dtype), of_keys)
    # dK += dSᵀ·Q
    if len(dk) == 1:
        one = warpgroup_mma(ds, q[0], dk[0], is_async=True)
        dv, one, weights, ds = warpgroup_mma_wait(0, deps=[dv, one, weights, ds])
        dk = (one,)
    else:
        one = warpgroup_mma(ds, q[0], dk[0], is_async=True)
        two = warpgroup_mma(ds, q[1], dk[1], is_async=True)
        three = warpgroup_mma(ds, q[2], dk[2], is_async=True)
        dv, one, two, three, weights, ds = warpgroup_mma_wait(0, deps=[dv, one, two, three, weights, ds])
        dk = (one, two, three)
    stream.release(at)
    return dk, dv


@gluon.jit
def add_to_queries(p, dp, dq, of_row, stream, at):  # type: ignore[no-untyped-def]  # as above
    """dQ, a tuple of pieces, with that of a tile of keys, which it releases."""
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq[0].type.layout, k_width=2)
    k = pieces(stream.first, at.stage, len(dq))
    dp = warpgroup_mma_wait(0, deps=[dp])
    # dS = P ∘ (dP - delta)
    ds = gl.convert_layout((p * (dp - gl.expand_dims(of_row, 1))).to(stream.first.dtype), operand)
    # dQ += dS·K
    if len(dq) == 1:
        one = warpgroup_mma(ds, k[0], dq[0], is_async=True)
        one, ds = warpgroup_mma_wait(0, deps=[one, ds])
        dq = (one,)
    else:
        one = warpgroup_mma(ds, k[0], dq[0], is_async=True)
        two = warpgroup_mma(ds, k[1], dq[1], is_async=True)
        three = warpgroup_mma(ds, k[2], dq[2], is_async=True)
        one, two, three, ds = warpgroup_mma_wait(0, deps=[one, two, three, ds])
        dq = (one, two, three)
    stream.release(at)
    return dq


@gluon.jit
def exchanges(sums, dtype: gl.constexpr, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """What the two consumers exchange, as each of them sees it."""
    ds = gl.allocate_shared_memory(dtype, [2 * c.buffers, c.rows, c.queries], c.exchanged)
    staged = gl.allocate_shared_memory(sums.dtype, [2, c.queries * c.width // 2 // c.line, c.line], sums.layout)
    ready0 = barriers(c.buffers, 1)
    ready1 = barriers(c.buffers, 1)
    free0 = barriers(c.buffers, 1)
    free1 = barriers(c.buffers, 1)
    return (
        Exchange(ds, staged, ready0, ready1, free0, free1),
        Exchange(ds, staged, ready1, ready0, free1, free0),
    )


@gluon.jit
def product_dq(  # type: ignore[no-untyped-def]  # Triton's types are its own
    ds, ks, buffer, hidden, none, c: gl.constexpr, HALF: gl.constexpr, block=0
):
    """Issues a consumer's part of dQ: 64 queries, or some columns of D, over the keys of both halves, of which
    `block` is the first.
    """
    PART: gl.constexpr = c.part
    ROW: gl.constexpr = HALF * 64 if c.queries == 128 else 0
    COLUMN: gl.constexpr = HALF * PART if c.queries == 64 else 0
    at = 2 * buffer + hidden
    one = ds.index(at).slice(ROW, 64, 1).permute((1, 0))
    other = ds.index(at + 1).slice(ROW, 64, 1).permute((1, 0))
    # dQ = dS·K, over the keys of one half and of the other
    dq = warpgroup_mma(one, ks.index(block + hidden).slice(COLUMN, PART, 1), none, use_acc=False, is_async=True)
    return warpgroup_mma(other, ks.index(block + hidden + 1).slice(COLUMN, PART, 1), dq, is_async=True)


@gluon.jit
def add_dq(sums, dq, staging, at, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Has a consumer's part of dQ added to the accumulator's rows from `at` on: four of a thread together."""
    flat = dq.reshape([4, 2, 8, c.part // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    staging.store(flat.reshape([64 * c.part // c.line, c.line]))
    fence_async_shared()
    add_out(sums, [at, 0], staging)


@gluon.jit
def offer_zeros(pipes, step, c: gl.constexpr, HALF: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """A consumer's dS before a block's first step, in a step of its own: zeros, added to rows that the block
    adds to itself, so that none differs. The next step.
    """
    exchange = pipes.exchange
    layout: gl.constexpr = product_layout(c.queries)
    SHAPE: gl.constexpr = [c.rows, c.queries]
    to = place_of_ds(step, c)
    mbarrier.wait(exchange.other_free.index(to.stage), to.phase ^ 1)
    exchange.ds.index(2 * to.stage + HALF).store(gl.zeros(SHAPE, exchange.ds.dtype, layout))
    fence_async_shared()
    mbarrier.arrive(exchange.ready.index(to.stage), count=1)
    return step + 1


@gluon.jit
def first_scores(pipes, zero, c: gl.constexpr, HALF: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Sᵀ of the first step, where scores are multiplied a step ahead; else zeros."""
    s = zero
    if c.schedule.ahead:
        mbarrier.wait((pipes.statistics.q_full if c.schedule.apart else pipes.stream.full).index(0), 0)
        # Sᵀ = K·Qᵀ
        q = pipes.stream.first.index(0).permute((1, 0))
        s = warpgroup_mma(pipes.resident.first.index(HALF), q, zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
    return s


@gluon.jit
def place_of_ds(step, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """The buffers that a step's dS goes to, and the phase of their barriers."""
    return Cursor(step % c.buffers, step // c.buffers % 2, c.buffers)


@gluon.jit
def probabilities(  # type: ignore[no-untyped-def]  # as above
    s, step, at, pipes, zero, scale, c: gl.constexpr, HALF: gl.constexpr, INNER: gl.constexpr = 0.0, block=0
):
    """(P before its mask, the slope of capped scores, dP still being multiplied) of a step, from its scores where
    these are multiplied a step ahead. All are transposed: keys by queries. `block` is the first half of K and V.
    Capped scores are t = tanh(S·INNER), and their slope 1 - t² in words of two fp16; without a cap nothing reads
    it.
    """
    hidden = block + opaque(step)
    k = pipes.resident.first.index(hidden + HALF)
    v = pipes.resident.second.index(hidden + HALF)
    q = pipes.stream.first.index(at.stage)
    g = pipes.stream.second.index(at.stage)
    if not c.schedule.ahead:
        if c.schedule.apart:
            mbarrier.wait(pipes.statistics.q_full.index(at.stage), at.phase)
        else:
            pipes.stream.wait(at)
        # Sᵀ = K·Qᵀ
        s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    if c.schedule.apart:
        pipes.stream.wait(at)
    # dPᵀ = V·dOᵀ
    dp = warpgroup_mma(v, g.permute((1, 0)), zero, use_acc=False, is_async=True)
    if not c.schedule.ahead:
        s = warpgroup_mma_wait(1, deps=[s])
    level = pipes.statistics.lse.index(at.stage).load(gl.SliceLayout(0, zero.type.layout))
    slope = zero
    if INNER > 0:
        s = capped(s, INNER, q.dtype)
        slope = pack(1.0 - s * s, gl.float16)
    # P = 2^(S·scale - lse)
    p = gl.exp2(s * scale - gl.expand_dims(level, 0))
    return p, slope, dp


@gluon.jit
def add_step(  # type: ignore[no-untyped-def]  # as above
    p, slope, dp, s, dk, dv, at, step, to, last, pipes, sums, zero, none, c: gl.constexpr, HALF: gl.constexpr,
    INNER: gl.constexpr = 0.0, block=0,
):  # fmt: skip
    """(Sᵀ of the next step where it is multiplied ahead, dK and dV with this one's, the next place and step). dQ
    is that of the step before, added to the accumulator's rows from `last` on; `to` is the step's `place_of_ds`.

    A consumer is `ready` when its dS is in shared memory, and has left both halves of it `free` when it has
    multiplied them; it need not wait for itself.
    """
    AHEAD: gl.constexpr = c.schedule.ahead
    resident = pipes.resident
    stream = pipes.stream
    exchange = pipes.exchange
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    q = stream.first.index(at.stage)
    g = stream.second.index(at.stage)
    weights = gl.convert_layout(p.to(q.dtype), operand)
    if INNER > 0:
        # From here on P stands in dS alone: one factor less to keep until dP is there.
        slope = unpack(slope, gl.float16, operand).to(gl.float32)
        p = p * gl.convert_layout(slope, zero.type.layout, assert_trivial=True)
    # dV += Pᵀ·dO
    dv = warpgroup_mma(weights, g, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    delta = pipes.statistics.delta.index(at.stage).load(gl.SliceLayout(0, zero.type.layout))
    # dS = P ∘ (dP - delta)
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(q.dtype)
    mbarrier.wait(exchange.other_free.index(to.stage), to.phase ^ 1)
    exchange.ds.index(2 * to.stage + HALF).store(ds)
    fence_async_shared()
    mbarrier.arrive(exchange.ready.index(to.stage), count=1)
    ds = gl.convert_layout(ds, operand)
    hidden = opaque(step)
    following = at.advanced()
    behind = (step - 1) % c.buffers
    mbarrier.wait(exchange.other_ready.index(behind), (step - 1) // c.buffers % 2)
    dq = product_dq(exchange.ds, resident.first, behind, hidden, none, c, HALF, block)
    # dK += dSᵀ·Q
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    # What was staged a step ago may still be read.
    tma.store_wait(pendings=0)
    dv, weights, dq = warpgroup_mma_wait(1, deps=[dv, weights, dq])
    add_dq(sums, dq, exchange.staged.index(HALF), last, c)
    mbarrier.arrive(exchange.free.index(behind), count=1)
    if AHEAD:
        if c.schedule.apart:
            mbarrier.wait(pipes.statistics.q_full.index(following.stage), following.phase)
        else:
            stream.wait(following)
        # Sᵀ = K·Qᵀ, of the next step
        ahead_q = stream.first.index(following.stage).permute((1, 0))
        s = warpgroup_mma(resident.first.index(hidden + HALF), ahead_q, zero, use_acc=False, is_async=True)
    dk, ds = warpgroup_mma_wait(0 + AHEAD, deps=[dk, ds])
    stream.release(at)
    step += 1
    if AHEAD:
        # Nothing may be in flight at the end of a loop's body: ptxas would serialize all products.
        s = warpgroup_mma_wait(0, deps=[s])
    return s, dk, dv, following, step


@gluon.jit
def add_last(  # type: ignore[no-untyped-def]  # as above
    step, last, pipes, sums, none, c: gl.constexpr, HALF: gl.constexpr, block=0
):
    """dQ of a block's last step; then waits until the other consumer is done with this one's half of K, which
    results go over.
    """
    exchange = pipes.exchange
    behind = (step - 1) % c.buffers
    phase = (step - 1) // c.buffers % 2
    mbarrier.wait(exchange.other_ready.index(behind), phase)
    dq = product_dq(exchange.ds, pipes.resident.first, behind, 0, none, c, HALF, block)
    tma.store_wait(pendings=0)
    dq = warpgroup_mma_wait(0, deps=[dq])
    add_dq(sums, dq, exchange.staged.index(HALF), last, c)
    mbarrier.arrive(exchange.free.index(behind), count=1)
    mbarrier.wait(exchange.other_free.index(behind), phase)
