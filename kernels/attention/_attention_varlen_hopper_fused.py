"""The backward pass of attention over packed sequences for Hopper in one kernel of five products, and a small one.

The schedule is that of `_attention_hopper_fused.py`, the list of blocks and who sees whom that of
`_attention_varlen_hopper_backward.py`. The order of additions is not fixed here either: dQ is not the same to the
bit in every run, dK and dV are. The accumulator of dQ is laid out as the statistics are, (H, slots, 128, D): each
sequence begins a slot, so that what is added beyond its end is nobody's. `_settle` takes the rest. Taken for what
`_attention_varlen_hopper.fits` and `fits` here approve of.

What the tensor memory accelerator reads beyond the end of a sequence is overwritten by the warp group that feeds,
before it tells the others: queries with the last one and dO with zeros, as in the two kernels, and keys and values
with zeros, because dQ is multiplied with all keys of a block, and 0 · NaN is NaN. Such a tile arrives at a barrier
of its own first. The probabilities of keys beyond the end are hidden: 2^(0 - level) can overflow.
"""

from __future__ import annotations

import math

import torch
import triton
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
from . import _attention_hopper_fused as dense
from ._attention_hopper import LOG2E, Tiles, _layout, copy_in, launch, onward, product_layout
from ._attention_hopper_backward import REGISTERS, ROWS, opaque, together
from ._attention_hopper_fused import LINE, TURNS, Schedule, _add, _flat, _product
from ._attention_varlen_hopper import FIELDS, _barrier, packed
from ._attention_varlen_hopper_backward import _block, _first, _repeat, _token, _write

AVAILABLE = dense.AVAILABLE
SCHEDULES = {**dense.SCHEDULES, (64, True): Schedule(64, 4)}
"""Over lengths that differ, by width and whether causal: the dense kernel's, but for D = 64 under a causal mask,
where tiles of 64 queries waste less at the ends of sequences. See `scheduled`."""


@gluon.jit
def _span(  # type: ignore[no-untyped-def]  # Triton's types are its own
    block, length, keys, CAUSAL: gl.constexpr, ROWS: gl.constexpr, QUERIES: gl.constexpr
):
    """(first tile of queries, how many, how many in the sequence) of a block of keys: none without queries.
    Under no mask each block starts at its own place, and after the last tile comes the first.
    """
    tiles = (length + QUERIES - 1) // QUERIES
    if CAUSAL:
        first = _first(block * 2 * ROWS, keys - length, length, CAUSAL, QUERIES)
        count = tiles - first
    else:
        first = block * (2 * ROWS // QUERIES) % gl.maximum(tiles, 1)
        count = tiles
    return first, count, tiles


@gluon.jit
def _zero(buffer, beyond, SIZE: gl.constexpr, D: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Zeros over rows from `beyond` on, in pieces of eight numbers a thread: who feeds has 24 registers."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    _repeat(buffer, beyond, gl.zeros([1, D], buffer.dtype, layout), SIZE, D, 1024 // D)


@gluon.jit
def _tell(full):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """What was overwritten can be multiplied."""
    fence_async_shared()
    _barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def _feed(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, plain, eights, lse, delta, ks, vs, qs, gs, levels, means, kv_full, full, empty, landed,
    table, rows, heads, section, groups, slots,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, QUERIES: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Loads a block of K and V in halves, then the queries that see it, their dO and their statistics."""
    PER: gl.constexpr = 2 * ROWS // QUERIES
    head, block, _, key_start, keys, start, length, sequence = _block(table, rows, heads, section)
    key = block * 2 * ROWS
    landed_phase = 0
    for half in gl.static_range(2):
        beyond = keys - key - half * ROWS
        at = key_start + key + half * ROWS
        if beyond < ROWS:
            mbarrier.expect(landed, 2 * k.block_type.nbytes)
            copy_in(k, [at, head * D], landed, ks.index(half))
            copy_in(v, [at, head * D], landed, vs.index(half))
            mbarrier.wait(landed, landed_phase)
            landed_phase ^= 1
            _zero(ks.index(half), beyond, ROWS, D)
            _zero(vs.index(half), beyond, ROWS, D)
            _tell(kv_full.index(half))
        else:
            mbarrier.expect(kv_full.index(half), 2 * k.block_type.nbytes)
            copy_in(k, [at, head * D], kv_full.index(half), ks.index(half))
            copy_in(v, [at, head * D], kv_full.index(half), vs.index(half))
    stage = 0
    phase = 1
    first, count, tiles = _span(block, length, keys, CAUSAL, ROWS, QUERIES)
    for member in range(0, groups):
        column = (head * groups + member) * D
        base = ((head * groups + member) * slots + start // (2 * ROWS) + sequence) * PER
        more = count
        if AHEAD:
            # The last step looks one ahead: it gets the last tile once more.
            more = count + gl.where(member == groups - 1, 1, 0)
        for i in range(0, more):
            j = first + gl.maximum(gl.minimum(i, count - 1), 0)
            if not CAUSAL:
                j = gl.where(j >= tiles, gl.maximum(j - tiles, 0), j)
            at = (base + j) * QUERIES
            row = start + j * QUERIES
            beyond = length - j * QUERIES
            mbarrier.wait(empty.index(stage), phase)
            if beyond < QUERIES:
                mbarrier.expect(landed, 2 * q.block_type.nbytes + 2 * lse.block_type.nbytes)
                copy_in(q, [row, column], landed, qs.index(stage))
                copy_in(lse, [at], landed, levels.index(stage))
                copy_in(g, [row, column], landed, gs.index(stage))
                copy_in(delta, [at], landed, means.index(stage))
                # Where there are no queries this is for a look ahead, and nobody's.
                last = _token(plain, eights, gl.maximum(start + length - 1, 0), column, D)
                mbarrier.wait(landed, landed_phase)
                landed_phase ^= 1
                _repeat(qs.index(stage), beyond, last, QUERIES, D, 1024 // D)
                _zero(gs.index(stage), beyond, QUERIES, D)
                _tell(full.index(stage))
            else:
                mbarrier.expect(full.index(stage), 2 * q.block_type.nbytes + 2 * lse.block_type.nbytes)
                copy_in(q, [row, column], full.index(stage), qs.index(stage))
                copy_in(lse, [at], full.index(stage), levels.index(stage))
                copy_in(g, [row, column], full.index(stage), gs.index(stage))
                copy_in(delta, [at], full.index(stage), means.index(stage))
            stage, phase = onward(stage, phase, STAGES)


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dk_out, dv_out, dk_plain, dv_plain, sums, ks, vs, qs, gs, ds, staged, levels, means,
    kv_full, full, empty, ready, other_ready, free, other_free, done, other_done,
    table, rows, heads, section, groups, slots, scale, root,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, QUERIES: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, TURNS: gl.constexpr, LINE: gl.constexpr,
):  # fmt: skip
    """dK and dV of one half of a block of keys, and half of its part of dQ. Scores are transposed here.

    A group is `ready` when its dS is in shared memory, and has left both halves of it `free` when it has
    multiplied them; it need not wait for itself.
    """
    dtype: gl.constexpr = dk_out.dtype
    PER: gl.constexpr = 2 * ROWS // QUERIES
    PART: gl.constexpr = D // PER  # columns of dQ of one group
    LINES: gl.constexpr = 64 * PART // LINE
    score: gl.constexpr = product_layout(QUERIES)
    total: gl.constexpr = product_layout(D)
    part: gl.constexpr = product_layout(PART)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=total, k_width=2)
    across: gl.constexpr = gl.SliceLayout(0, score)
    head, block, _, key_start, keys, start, length, sequence = _block(table, rows, heads, section)
    key = block * 2 * ROWS
    staging = staged.index(HALF)
    zero = gl.zeros([ROWS, QUERIES], gl.float32, score)
    none = gl.zeros([64, PART], gl.float32, part)
    own = key + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, score))
    columns = gl.arange(0, QUERIES, across)
    dk = gl.zeros([ROWS, D], gl.float32, total)
    dv = gl.zeros([ROWS, D], gl.float32, total)
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(kv_full.index(1), 0)
    stage = 0
    phase = 0
    # The first step adds zeros to the rows that it will add to, so that no step differs.
    ds.index(HALF).store(gl.zeros([ROWS, QUERIES], dtype, score))
    fence_async_shared()
    mbarrier.arrive(ready.index(0), count=1)
    step = 1
    first, count, tiles = _span(block, length, keys, CAUSAL, ROWS, QUERIES)
    slot = start // (2 * ROWS) + sequence
    last = (((head * groups * slots + slot) * PER + first) * 2 + HALF) * LINES
    if AHEAD:
        mbarrier.wait(full.index(0), 0)
        s = warpgroup_mma(ks.index(HALF), qs.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
    for member in range(0, groups):
        base = ((head * groups + member) * slots + slot) * PER
        for i in range(0, count):
            j = first + i
            if not CAUSAL:
                j = gl.where(j >= tiles, j - tiles, j)
            at = ((base + j) * 2 + HALF) * LINES
            turn = step % TURNS
            parity = step // TURNS % 2
            hidden = opaque(step)
            k = ks.index(hidden + HALF)
            v = vs.index(hidden + HALF)
            q = qs.index(stage)
            g = gs.index(stage)
            if not AHEAD:
                mbarrier.wait(full.index(stage), phase)
                s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, g.permute((1, 0)), zero, use_acc=False, is_async=True)
            if not AHEAD:
                s = warpgroup_mma_wait(1, deps=[s])
            level = levels.index(stage).load(across)
            p = gl.exp2(s * scale - gl.expand_dims(level, 0))
            if CAUSAL:
                # Cuts the last block of keys for every query of the sequence, too; others have the probability 0.
                if j * QUERIES < key + 2 * ROWS - 1 - (keys - length):
                    queries = gl.expand_dims(columns + (j * QUERIES + keys - length), 0)
                    p = gl.where(queries >= gl.expand_dims(own, 1), p, 0.0)
            else:  # a constexpr by itself: Triton leaves the code out
                if key + (HALF + 1) * ROWS > keys:
                    p = gl.where(gl.expand_dims(own < keys, 1), p, 0.0)
            weights = gl.convert_layout(p.to(dtype), operand)
            dv = warpgroup_mma(weights, g, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            mean = means.index(stage).load(across)
            change = (p * (dp - gl.expand_dims(mean, 0))).to(dtype)
            mbarrier.wait(other_free.index(turn), parity ^ 1)
            ds.index(2 * turn + HALF).store(change)
            fence_async_shared()
            mbarrier.arrive(ready.index(turn), count=1)
            change = gl.convert_layout(change, operand)
            hidden = opaque(step)
            following = stage + 1
            then = phase
            if following == STAGES:
                following = 0
                then ^= 1
            behind = (step - 1) % TURNS
            mbarrier.wait(other_ready.index(behind), (step - 1) // TURNS % 2)
            dq = _product(ds, ks, behind, hidden, none, HALF, QUERIES, PART)
            dk = warpgroup_mma(change, q, dk, is_async=True)
            # What was staged a step ago may still be read.
            tma.store_wait(pendings=0)
            dv, weights, dq = warpgroup_mma_wait(1, deps=[dv, weights, dq])
            _add(sums, dq, staging, last, PART, LINE)
            mbarrier.arrive(free.index(behind), count=1)
            if AHEAD:
                mbarrier.wait(full.index(following), then)
                ahead_q = qs.index(following).permute((1, 0))
                s = warpgroup_mma(ks.index(hidden + HALF), ahead_q, zero, use_acc=False, is_async=True)
            dk, change = warpgroup_mma_wait(0 + AHEAD, deps=[dk, change])
            mbarrier.arrive(empty.index(stage), count=1)
            last = at
            step += 1
            stage = following
            phase = then
            if AHEAD:
                # Nothing may be in flight at the end of a loop's body: ptxas would serialize all products.
                s = warpgroup_mma_wait(0, deps=[s])
    behind = (step - 1) % TURNS
    mbarrier.wait(other_ready.index(behind), (step - 1) // TURNS % 2)
    dq = _product(ds, ks, behind, 0, none, HALF, QUERIES, PART)
    tma.store_wait(pendings=0)
    dq = warpgroup_mma_wait(0, deps=[dq])
    # Without queries these are zeros, to an empty sequence's own slot or by a program without a block.
    _add(sums, dq, staging, last, PART, LINE)
    # The other half may still multiply with this half's K, which the results go over.
    mbarrier.arrive(done.index(0), count=1)
    mbarrier.wait(other_done.index(0), 0)
    row = key + HALF * ROWS
    _write(dk_out, dk_plain, (dk * root).to(dtype), ks.index(HALF), key_start, row, keys, head, heads, ROWS, D)
    _write(dv_out, dv_plain, dv.to(dtype), vs.index(HALF), key_start, row, keys, head, heads, ROWS, D)
    # Rows that were not written by tiles leave the last addition unwaited for.
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["eights", "rows", "heads", "section", "groups", "slots"])
def _all(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, plain, eights: tl.int64, lse, delta, dk, dv, dk_plain, dv_plain, sums,
    table, rows, heads, section, groups, slots, scale, root,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, QUERIES: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, TURNS: gl.constexpr, REGISTERS: gl.constexpr, LINE: gl.constexpr,
    SWAP: gl.constexpr,
):  # fmt: skip
    """One block of keys of one of `heads` key heads, over all its query heads: dK and dV, and its part of dQ·√D
    added to `sums`. `plain` is `q` as a pointer, of tokens that are 8 · `eights` numbers apart; `root` is 1/√D.
    """
    ks = gl.allocate_shared_memory(k.dtype, [2, ROWS, D], k.layout)
    vs = gl.allocate_shared_memory(k.dtype, [2, ROWS, D], v.layout)
    qs = gl.allocate_shared_memory(k.dtype, [STAGES, QUERIES, D], q.layout)
    gs = gl.allocate_shared_memory(k.dtype, [STAGES, QUERIES, D], g.layout)
    ds = gl.allocate_shared_memory(k.dtype, [2 * TURNS, ROWS, QUERIES], SWAP)
    staged = gl.allocate_shared_memory(sums.dtype, [2, QUERIES * D // 2 // LINE, LINE], sums.layout)
    levels = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], lse.layout)
    means = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], lse.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready0 = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    ready1 = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    free0 = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    free1 = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    done0 = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    done1 = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
    for i in gl.static_range(TURNS):
        mbarrier.init(ready0.index(i), count=1)
        mbarrier.init(ready1.index(i), count=1)
        mbarrier.init(free0.index(i), count=1)
        mbarrier.init(free1.index(i), count=1)
    mbarrier.init(done0.index(0), count=1)
    mbarrier.init(done1.index(0), count=1)
    mbarrier.init(landed, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _feed,
                (
                    q, g, k, v, plain, eights, lse, delta, ks, vs, qs, gs, levels, means,
                    kv_full, full, empty, landed,
                    table, rows, heads, section, groups, slots, CAUSAL, ROWS, QUERIES, D, STAGES, AHEAD,
                ),
            ),
            (
                _compute,
                (
                    dk, dv, dk_plain, dv_plain, sums, ks, vs, qs, gs, ds, staged, levels, means,
                    kv_full, full, empty, ready0, ready1, free0, free1, done0, done1,
                    table, rows, heads, section, groups, slots, scale, root,
                    0, CAUSAL, ROWS, QUERIES, D, STAGES, AHEAD, TURNS, LINE,
                ),
            ),
            (
                _compute,
                (
                    dk, dv, dk_plain, dv_plain, sums, ks, vs, qs, gs, ds, staged, levels, means,
                    kv_full, full, empty, ready1, ready0, free1, free0, done1, done0,
                    table, rows, heads, section, groups, slots, scale, root,
                    1, CAUSAL, ROWS, QUERIES, D, STAGES, AHEAD, TURNS, LINE,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "heads", "slots"])
def _settle(  # type: ignore[no-untyped-def]  # Triton's types are its own
    sums, out, table, rows, heads, slots, root, D: tl.constexpr, ROWS: tl.constexpr
):
    """64 rows of dQ of a listed block of queries, as far as the sequence has them."""
    piece = tl.program_id(0) % 2
    unit = tl.program_id(0) // 2
    row = table + unit // heads * FIELDS
    if unit // heads >= tl.load(table + rows * FIELDS):
        return
    start = tl.load(row)
    length = tl.load(row + 1)
    within = unit - tl.load(row + 4) * heads
    blocks = tl.load(row + 5)
    head = within // blocks
    first = (within - head * blocks) * 2 * ROWS + piece * ROWS
    slot = head.to(tl.int64) * slots + start // (2 * ROWS) + tl.load(row + 6)
    x = tl.load(sums + (slot * 2 * ROWS + first) * D + tl.arange(0, ROWS * D))
    x = (x * root).to(out.dtype.element_ty)
    x = x.reshape(D // 8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(ROWS, D)
    own = first + tl.arange(0, ROWS)
    places = out + ((start + own).to(tl.int64) * heads + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(places, x, mask=(own < length)[:, None])


def fits(level: torch.Tensor) -> bool:
    """Whether coordinates of the statistics, and of the accumulator, are 32-bit numbers."""
    return level.numel() < 1 << 31


def scheduled(D: int, causal: bool, tokens: int, sequences: int, longest: int) -> Schedule:
    """The dense kernel's schedule where the mean length is 0.9 of the longest or more, as the host knows without
    waiting for the device: over equal lengths tiles of 64 queries take 6 % longer on an H200.
    """
    even = tokens >= 0.9 * sequences * longest
    return (dense.SCHEDULES if even else SCHEDULES)[D, causal]


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
    schedule: Schedule | None = None,
) -> None:
    """Writes dq, dk and dv, contiguous as `grad` is; arguments as for the two kernels' `backward`. Takes room for
    dq in fp32, each sequence filled up to whole blocks.
    """
    H, D = q.shape[1:]
    slots = lse.shape[1]
    heads = k.shape[1]
    # There is a slot for each whole block of all tokens, and one for each sequence.
    s = schedule or scheduled(D, causal, len(q), slots - len(q) // (2 * ROWS), longest)
    tq, tg = (packed(x, s.rows) for x in (q, grad))
    tk, tv, tdk, tdv = (packed(x, ROWS) for x in (k, v, dk, dv))
    tlse, tdelta = (Tiles(x, [x.numel()], [1], [s.rows], _flat(1)) for x in (lse, delta))
    sums = torch.zeros(lse.numel() * D // LINE, LINE, dtype=torch.float32, device=q.device)
    tsums = Tiles(sums, list(sums.shape), [LINE, 1], [s.rows * D // 2 // LINE, LINE], _flat(2))
    root = 1 / math.sqrt(D)
    constants = (
        causal, ROWS, s.rows, D, s.stages, s.ahead, TURNS, REGISTERS, LINE, _layout(ROWS, s.rows, q.dtype),
    )  # fmt: skip
    section = together(longest, D, H // heads, heads) if causal else 1
    with on(q):
        launch(
            _all, (_all, q.device, q.dtype, *constants), listed_keys[1] * heads,
            tq, tg, tk, tv, q, q.stride(0) // 8, tlse, tdelta, tdk, tdv, dk, dv, tsums, *listed_keys,
            heads, section, H // heads, slots, LOG2E * root, root, *constants,
        )  # fmt: skip
        _settle[(2 * listed[1] * H,)](sums, dq, *listed, H, slots, root, D, ROWS, num_warps=D // 16)
