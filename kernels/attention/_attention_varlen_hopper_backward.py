"""The backward pass of attention over packed sequences for Hopper (compute capability 9.0), in Gluon.

The schedule is that of `_attention_hopper_backward.py`: one kernel for dK and dV of a block of keys and one for dQ
of a block of queries, one warp group that feeds and two that own 64 rows each. Blocks come from the list of
`attention_varlen.listed`; a program beyond its end loads something, computes nothing and writes nothing.

What is streamed beyond the end of a sequence is overwritten before it is multiplied: with zeros, as in
`_attention_varlen_hopper.py`, but queries with the sequence's last, whose scores are numbers where its own are.
So their log-sum-exp of +inf makes their probabilities 0 without a mask; scores of zeros would be NaN beside a key
of -inf. What is resident beyond the end has rows of its own, which are not written. Taken for what
`_attention_varlen_hopper.fits` approves of.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._common import on
from ._attention_hopper import LOG2E, copy_in, copy_out, launch, onward, product_layout, sectioned
from ._attention_hopper_backward import REGISTERS, ROWS, STAGES, together
from ._attention_varlen_hopper import FIELDS, _clean, packed

BLOCK = 2 * ROWS
"""Rows of a resident block."""


@gluon.jit
def _block(table, rows, heads, section):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(head, block, blocks, start, length, other start, other length, sequence) of this program: a sequence's
    blocks are `sectioned`.

    Beyond the list it is the first block of a sequence of no tokens.
    """
    sequence = 0
    start = 0
    length = 0
    other_start = 0
    other = 0
    within = 0
    blocks = 1
    row = table + gl.program_id(0) // heads * FIELDS
    if gl.program_id(0) < gl.load(table + rows * FIELDS) * heads:
        start = gl.load(row)
        length = gl.load(row + 1)
        other_start = gl.load(row + 2)
        other = gl.load(row + 3)
        within = gl.program_id(0) - gl.load(row + 4) * heads
        blocks = gl.load(row + 5)
        sequence = gl.load(row + 6)
    head, block = sectioned(within, blocks, heads, section)
    return head, block, blocks, start, length, other_start, other, sequence


@gluon.jit
def _write(  # type: ignore[no-untyped-def]  # Triton's types are its own
    tiles, plain, x, buffer, start, row, length, head, heads, ROWS: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Rows `row` to `row + ROWS` of a head of a contiguous (T, heads, D) tensor, as far as the sequence has them:
    whole tiles by the tensor memory accelerator, which would go on into the next sequence with others.
    """
    if row + ROWS <= length:
        buffer.store(x)
        fence_async_shared()
        copy_out(tiles, [start + row, head * D], buffer)
        tma.store_wait(pendings=0)
    else:
        layout: gl.constexpr = x.type.layout
        own = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        columns = head * D + gl.arange(0, D, gl.SliceLayout(0, layout))
        places = gl.expand_dims(gl.cast(start + own, gl.int64) * (heads * D), 1) + gl.expand_dims(columns, 0)
        gl.store(plain + places, x, mask=gl.expand_dims(own < length, 1))


@gluon.jit
def _first(key, offset, length, CAUSAL: gl.constexpr, ROWS: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The first tile of queries that sees a key."""
    first = 0
    if CAUSAL:
        first = gl.maximum(gl.minimum(key - offset, length), 0) // ROWS
    return first


@gluon.jit
def _token(plain, eights, token, column, D: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The D numbers (1, D) from `column` of a token, which are 8 · `eights` numbers apart."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    columns = column + gl.arange(0, D, gl.SliceLayout(0, layout))
    return gl.expand_dims(gl.load(plain + gl.cast(token, gl.int64) * (eights * 8) + columns), 0)


@gluon.jit
def _repeat(buffer, beyond, row, SIZE: gl.constexpr, D: gl.constexpr, PIECE: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """A row over those from `beyond` on, PIECE at a time. Nobody is told yet."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows = gl.arange(0, PIECE, gl.SliceLayout(1, layout))
    for i in gl.static_range(SIZE // PIECE):
        if (i + 1) * PIECE > beyond:
            part = buffer.slice(i * PIECE, PIECE)
            x = part.load(layout)
            part.store(gl.where(gl.expand_dims(rows + i * PIECE < beyond, 1), x, row))


@gluon.jit
def _keys_feed(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, ks, vs, qs, gs, kv_full, full, empty, table, rows, heads, section, groups,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Loads a block of K and V in halves, then the queries that see it and their dO, head by head."""
    head, block, _, key_start, keys, start, length, _ = _block(table, rows, heads, section)
    row = key_start + block * 2 * ROWS
    for i in gl.static_range(2):
        mbarrier.expect(kv_full.index(i), 2 * k.block_type.nbytes)
        copy_in(k, [row + i * ROWS, head * D], kv_full.index(i), ks.index(i))
        copy_in(v, [row + i * ROWS, head * D], kv_full.index(i), vs.index(i))
    stage = 0
    phase = 1
    first = _first(block * 2 * ROWS, keys - length, length, CAUSAL, ROWS)
    for member in range(0, groups):
        column = (head * groups + member) * D
        for j in range(first, (length + ROWS - 1) // ROWS):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), 2 * q.block_type.nbytes)
            copy_in(q, [start + j * ROWS, column], full.index(stage), qs.index(stage))
            copy_in(g, [start + j * ROWS, column], full.index(stage), gs.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _keys_compute(  # type: ignore[no-untyped-def]  # Triton's types are its own
    plain, eights, dk_out, dv_out, dk_plain, dv_plain, lse, delta, ks, vs, qs, gs, kv_full, full, empty,
    table, rows, heads, section, groups, slots, scale, root,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dK and dV of one half of a block of keys. Scores are transposed here: keys by queries."""
    dtype: gl.constexpr = dk_out.dtype
    score: gl.constexpr = product_layout(ROWS)
    total: gl.constexpr = product_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=total, k_width=2)
    head, block, _, key_start, keys, start, length, sequence = _block(table, rows, heads, section)
    key = block * 2 * ROWS
    offset = keys - length
    k = ks.index(HALF)
    v = vs.index(HALF)
    zero = gl.zeros([ROWS, ROWS], gl.float32, score)
    # The first query that sees a key, in tokens of the sequence.
    seer = key + HALF * ROWS - offset + gl.arange(0, ROWS, gl.SliceLayout(1, score))
    columns = gl.arange(0, ROWS, gl.SliceLayout(0, score))
    dk = gl.zeros([ROWS, D], gl.float32, total)
    dv = gl.zeros([ROWS, D], gl.float32, total)
    mbarrier.wait(kv_full.index(HALF), 0)
    stage = 0
    phase = 0
    first = _first(key, offset, length, CAUSAL, ROWS)
    for member in range(0, groups):
        at = (gl.cast(head * groups + member, gl.int64) * slots + start // (2 * ROWS) + sequence) * 2 * ROWS
        for j in range(first, (length + ROWS - 1) // ROWS):
            level = gl.load(lse + at + j * ROWS + columns)
            mbarrier.wait(full.index(stage), phase)
            q = qs.index(stage)
            g = gs.index(stage)
            if (j + 1) * ROWS > length:
                column = (head * groups + member) * D
                row = _token(plain, eights, start + length - 1, column, D)
                _repeat(q, length - j * ROWS, row, ROWS, D, 32)
                # With a fence and a barrier, for both.
                _clean(g, length - j * ROWS, ROWS, D)
            s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, g.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            p = gl.exp2(s * scale - gl.expand_dims(level, 0))
            if CAUSAL:  # noqa: SIM102  # a constexpr by itself: Triton leaves the code out
                if j * ROWS < key + 2 * ROWS - 1 - offset:
                    p = gl.where(gl.expand_dims(j * ROWS + columns, 0) >= gl.expand_dims(seer, 1), p, 0.0)
            weights = gl.convert_layout(p.to(dtype), operand)
            dv = warpgroup_mma(weights, g, dv, is_async=True)
            mean = gl.load(delta + at + j * ROWS + columns)
            dp = warpgroup_mma_wait(1, deps=[dp])
            change = gl.convert_layout((p * (dp - gl.expand_dims(mean, 0))).to(dtype), operand)
            dk = warpgroup_mma(change, q, dk, is_async=True)
            dv, dk, weights, change = warpgroup_mma_wait(0, deps=[dv, dk, weights, change])
            mbarrier.arrive(empty.index(stage), count=1)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
    row = key + HALF * ROWS
    _write(dk_out, dk_plain, (dk * root).to(dtype), k, key_start, row, keys, head, heads, ROWS, D)
    _write(dv_out, dv_plain, dv.to(dtype), v, key_start, row, keys, head, heads, ROWS, D)


@gluon.jit(do_not_specialize=["eights", "rows", "heads", "section", "groups", "slots"])
def _keys(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, plain, eights: tl.int64, dk, dv, dk_plain, dv_plain, lse, delta,
    table, rows, heads, section, groups, slots, scale, root,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One block of keys of one of `heads` key heads, over all its query heads. `plain` is `q` as a pointer, of
    tokens that are 8 · `eights` numbers apart; `root` is 1/√D.
    """
    ks = gl.allocate_shared_memory(k.dtype, [2, ROWS, D], k.layout)
    vs = gl.allocate_shared_memory(k.dtype, [2, ROWS, D], v.layout)
    qs = gl.allocate_shared_memory(k.dtype, [STAGES, ROWS, D], q.layout)
    gs = gl.allocate_shared_memory(k.dtype, [STAGES, ROWS, D], g.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _keys_feed,
                (
                    q, g, k, v, ks, vs, qs, gs, kv_full, full, empty, table, rows, heads, section, groups,
                    CAUSAL, ROWS, D, STAGES,
                ),
            ),
            (
                _keys_compute,
                (
                    plain, eights, dk, dv, dk_plain, dv_plain, lse, delta, ks, vs, qs, gs, kv_full, full, empty,
                    table, rows, heads, section, groups, slots, scale, root, 0, CAUSAL, ROWS, D, STAGES,
                ),
            ),
            (
                _keys_compute,
                (
                    plain, eights, dk, dv, dk_plain, dv_plain, lse, delta, ks, vs, qs, gs, kv_full, full, empty,
                    table, rows, heads, section, groups, slots, scale, root, 1, CAUSAL, ROWS, D, STAGES,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


@gluon.jit
def _seen(block, blocks, length, keys, CAUSAL: gl.constexpr, ROWS: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(query block, tiles of keys that it sees), the last block first under a causal mask: it is the longest."""
    limit = keys
    if CAUSAL:
        block = blocks - 1 - block
        limit = gl.minimum((block + 1) * 2 * ROWS + keys - length, keys)
    return block, gl.maximum(limit + ROWS - 1, 0) // ROWS


@gluon.jit
def _queries_feed(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, qs, gs, ks, vs, q_full, full, empty, table, rows, heads, section, groups,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Loads a block of Q and dO in halves, then the keys that it sees and their V."""
    head, block, blocks, start, length, key_start, keys, _ = _block(table, rows, heads, section)
    block, count = _seen(block, blocks, length, keys, CAUSAL, ROWS)
    row = start + block * 2 * ROWS
    for i in gl.static_range(2):
        mbarrier.expect(q_full.index(i), 2 * q.block_type.nbytes)
        copy_in(q, [row + i * ROWS, head * D], q_full.index(i), qs.index(i))
        copy_in(g, [row + i * ROWS, head * D], q_full.index(i), gs.index(i))
    stage = 0
    phase = 1
    column = head // groups * D
    for j in range(0, count):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), 2 * k.block_type.nbytes)
        copy_in(k, [key_start + j * ROWS, column], full.index(stage), ks.index(stage))
        copy_in(v, [key_start + j * ROWS, column], full.index(stage), vs.index(stage))
        stage, phase = onward(stage, phase, STAGES)


@gluon.jit
def _queries_compute(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dq_out, dq_plain, lse, delta, qs, gs, ks, vs, q_full, full, empty,
    table, rows, heads, section, slots, scale, root,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dQ of one half of a block of queries."""
    dtype: gl.constexpr = dq_out.dtype
    score: gl.constexpr = product_layout(ROWS)
    total: gl.constexpr = product_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=total, k_width=2)
    head, block, blocks, start, length, _, keys, sequence = _block(table, rows, heads, section)
    block, count = _seen(block, blocks, length, keys, CAUSAL, ROWS)
    q = qs.index(HALF)
    g = gs.index(HALF)
    zero = gl.zeros([ROWS, ROWS], gl.float32, score)
    row = block * 2 * ROWS + HALF * ROWS
    own = row + gl.arange(0, ROWS, gl.SliceLayout(1, score))
    columns = gl.arange(0, ROWS, gl.SliceLayout(0, score))
    clear = keys
    if CAUSAL:
        clear = gl.minimum(row + keys - length + 1, keys)
    at = (gl.cast(head, gl.int64) * slots + start // (2 * ROWS) + sequence) * 2 * ROWS
    level = gl.load(lse + at + own)
    mean = gl.load(delta + at + own)
    dq = gl.zeros([ROWS, D], gl.float32, total)
    mbarrier.wait(q_full.index(HALF), 0)
    stage = 0
    phase = 0
    for j in range(0, count):
        mbarrier.wait(full.index(stage), phase)
        k = ks.index(stage)
        v = vs.index(stage)
        if (j + 1) * ROWS > keys:
            _clean(k, keys - j * ROWS, ROWS, D)
            _clean(v, keys - j * ROWS, ROWS, D)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(g, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        p = gl.exp2(s * scale - gl.expand_dims(level, 1))
        if (j + 1) * ROWS > clear:
            # Of keys beyond the sequence too: 2^(0 - level) can overflow, and inf · 0 is NaN.
            if CAUSAL:
                seen = gl.expand_dims(own + (keys - length), 1) >= gl.expand_dims(columns + j * ROWS, 0)
            else:
                seen = gl.expand_dims(columns + j * ROWS, 0) < keys
            p = gl.where(seen, p, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        change = gl.convert_layout((p * (dp - gl.expand_dims(mean, 1))).to(dtype), operand)
        dq = warpgroup_mma(change, k, dq, is_async=True)
        dq, change = warpgroup_mma_wait(0, deps=[dq, change])
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = onward(stage, phase, STAGES)
    _write(dq_out, dq_plain, (dq * root).to(dtype), q, start, row, length, head, heads, ROWS, D)


@gluon.jit(do_not_specialize=["rows", "heads", "section", "groups", "slots"])
def _queries(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, dq, dq_plain, lse, delta, table, rows, heads, section, groups, slots, scale, root,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One block of queries of one of `heads` heads."""
    qs = gl.allocate_shared_memory(k.dtype, [2, ROWS, D], q.layout)
    gs = gl.allocate_shared_memory(k.dtype, [2, ROWS, D], g.layout)
    ks = gl.allocate_shared_memory(k.dtype, [STAGES, ROWS, D], k.layout)
    vs = gl.allocate_shared_memory(k.dtype, [STAGES, ROWS, D], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _queries_feed,
                (
                    q, g, k, v, qs, gs, ks, vs, q_full, full, empty, table, rows, heads, section, groups,
                    CAUSAL, ROWS, D, STAGES,
                ),
            ),
            (
                _queries_compute,
                (
                    dq, dq_plain, lse, delta, qs, gs, ks, vs, q_full, full, empty,
                    table, rows, heads, section, slots, scale, root, 0, CAUSAL, ROWS, D, STAGES,
                ),
            ),
            (
                _queries_compute,
                (
                    dq, dq_plain, lse, delta, qs, gs, ks, vs, q_full, full, empty,
                    table, rows, heads, section, slots, scale, root, 1, CAUSAL, ROWS, D, STAGES,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    listed: tuple[torch.Tensor, int],
    listed_keys: tuple[torch.Tensor, int],
    causal: bool,
    longest: int,
) -> None:
    """Writes dq, dk and dv, contiguous as `grad` is. `longest` is how many queries a sequence has at most.

    The lists are of blocks of `BLOCK` queries and keys; `lse`, in base 2, and `delta`, the sums of O ∘ dO over
    rows, are laid out by `attention_varlen.statistics`.
    """
    H, D = q.shape[1:]
    slots = lse.shape[1]
    heads = k.shape[1]
    tq, tg, tk, tv, tdq, tdk, tdv = (packed(x, ROWS) for x in (q, grad, k, v, dq, dk, dv))
    root = 1 / math.sqrt(D)
    scale = LOG2E * root
    constants = (causal, ROWS, D, STAGES[D], REGISTERS)
    key = (q.device, q.dtype, *constants)
    section = together(longest, D, H // heads, heads) if causal else 1
    of_queries = section * (H // heads) if causal else 1
    with on(q):
        launch(
            _keys, (_keys, key), listed_keys[1] * heads,
            tq, tg, tk, tv, q, q.stride(0) // 8, tdk, tdv, dk, dv, lse, delta,
            *listed_keys, heads, section, H // heads, slots, scale, root, *constants,
        )  # fmt: skip
        launch(
            _queries, (_queries, key), listed[1] * H, tq, tg, tk, tv, tdq, dq, lse, delta,
            *listed, H, of_queries, H // heads, slots, scale, root, *constants,
        )  # fmt: skip
