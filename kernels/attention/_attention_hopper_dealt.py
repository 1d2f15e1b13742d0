"""The forward pass of attention for Hopper in tiles of 64 or 128 columns, dealt out by a counter, in Gluon.

One warp group feeds tiles of Q, K and V through the tensor memory accelerator, others compute 64 rows each, and
in each the scores of the next block of keys are multiplied while the values of this one are: FlashAttention-3's
schedule (Shah et al., arXiv 2407.08608). Weights go round the loop two in a word.

At 64 columns a block's exponentials take the exponential unit about as long as its products take the matrix
units. Two groups leave both idle while they look for maxima, add up and round; a third has work for them then, as
in FlashAttention-3's tiles of 192 rows, and the three take turns at the matrix units. At 128 columns registers
hold only two, which are as fast without turns, and under a causal mask faster.

What is added up already is scaled down only where a row's maximum has risen by a factor of 256, as in
FlashAttention-4: until then weights are up to that large, which neither their rounding nor their sum minds. Each
lane adds up the weights of its own columns, as in FlashAttention-3, and lanes meet once a tile. The maximum is
held before the wait for the product that the softmax is to run under (`_held`): ptxas starts it after that wait
otherwise.

A tile is 128 or 192 query rows of one head. Where S is no multiple of 192, tiles are aligned to the sequence's end
and the first one begins before its start: under a causal mask it is the shortest. A group's rows are wholly inside
or wholly before the sequence, S being a multiple of 64; a group before it computes one block of keys and stores
nothing.

Groups start at their own diagonal: blocks of keys that all of a group's rows lie before are released unread, so
that each group masks one block, its first. Under a sliding window a tile's walk over the keys starts and ends at
it, and so does each group's within the tile's; the blocks that an end of the window cuts, one or two at each, are
steps of their own before and after the others, which know no mask.

Programs are persistent, one a multiprocessor, and take the next tile as they come to it, by a counter that the
last one to take leaves at 0 (`_meeting.counter`). Tiles come in sections of heads, as many as the caller says, the
longest first, so that what is short evens out the end. Who computes a row does not change its numbers.

Taken for what `_attention_hopper.fits` approves of with D up to 128.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._common import multiprocessors, on, power_of_2
from .._grid_barrier import counter
from ._attention_hopper import (
    KEYS,
    LOG2E,
    LOWEST,
    ROWS,
    copy_in,
    copy_out,
    launch,
    onward,
    product_layout,
    scores,
    sectioned,
    tiles,
)


@dataclass(frozen=True)
class Division:
    """How a tile is divided: computing warp groups, whether they take turns at the matrix units, blocks of K and
    of V in flight, and registers of a computing group's thread.
    """

    groups: int
    turns: bool
    stages: int
    registers: int


DIVISIONS = {64: Division(3, True, 3, 160), 128: Division(2, False, 2, 240)}
"""By columns of tiles; what a smaller D leaves of them is zeros. Registers are what a multiprocessor has for so
many groups, the feeding one left 32."""
SLACK = gl.constexpr(8.0)
"""How far, in base 2, a row's maximum may rise before what is added up is scaled down."""


@gluon.jit
def _tile(  # type: ignore[no-untyped-def]  # Triton's types are its own
    t, n, length, heads, section,
    CAUSAL: gl.constexpr, TILE: gl.constexpr, KEYS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """(batch·head, first row, which may be negative, first and last block of keys) of tile t."""
    head, nth = sectioned(t, n, heads, section)
    start = length - (nth + 1) * TILE
    low = nth * 0  # a number of the device's, as it is under a window
    last = low + length // KEYS - 1
    if CAUSAL:
        last = (start + TILE - 1) // KEYS
    elif WINDOW:
        last = gl.minimum((start + TILE + WINDOW - 2) // KEYS, last)
    if WINDOW:
        low = gl.maximum(start - WINDOW + 1, 0) // KEYS
    return head, start, low, last


@gluon.jit
def _take(counter, total):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The next tile, after those that programs begin with. The last one to take leaves the counter at 0."""
    taken = gl.atomic_add(counter, 1, sem="relaxed")
    if taken == total - 1:  # as many are taken as there are tiles
        gl.atomic_add(counter, -total, sem="relaxed")
    return gl.num_programs(0) + taken


@gluon.jit
def _tell(t, following, told, heard, phase):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Tells those who compute the next tile, when they have heard of the one before: the next phase."""
    mbarrier.wait(heard, phase)
    following.store(gl.full([1], t, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.arrive(told, count=1)
    return phase ^ 1


@gluon.jit
def _hear(following, told, heard, phase):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(the next tile, the next phase)."""
    mbarrier.wait(told, phase)
    t = gl.max(following.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(heard, count=1)
    return t, phase ^ 1


@gluon.jit
def _feed(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, following, told, heard, counter,
    total, n, length, heads, groups, section,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Loads each tile's parts of Q and its blocks of K and V, the last keys first, and takes the next tile."""
    k_stage = 0
    k_phase = 1
    v_stage = 0
    v_phase = 1
    q_phase = 1
    told_phase = 1
    t = gl.program_id(0)
    while t < total:
        head, start, low, last = _tile(t, n, length, heads, section, CAUSAL, ROWS * GROUPS, KEYS, WINDOW)
        row = head * length + start
        key = head // groups * length + last * KEYS
        # Keys do not wait for those who still use the queries before.
        mbarrier.wait(k_empty.index(k_stage), k_phase)
        mbarrier.expect(k_full.index(k_stage), k.block_type.nbytes)
        copy_in(k, [key, 0], k_full.index(k_stage), ks.index(k_stage))
        for i in gl.static_range(GROUPS):
            mbarrier.wait(q_empty.index(i), q_phase)
            mbarrier.expect(q_full.index(i), q.block_type.nbytes)
            copy_in(q, [row + i * ROWS, 0], q_full.index(i), qs.index(i))
        q_phase ^= 1
        for j in range(0, last + 1 - low):
            k_stage, k_phase = onward(k_stage, k_phase, STAGES)
            mbarrier.wait(v_empty.index(v_stage), v_phase)
            mbarrier.expect(v_full.index(v_stage), v.block_type.nbytes)
            copy_in(v, [key - j * KEYS, 0], v_full.index(v_stage), vs.index(v_stage))
            v_stage, v_phase = onward(v_stage, v_phase, STAGES)
            if j < last - low:
                mbarrier.wait(k_empty.index(k_stage), k_phase)
                mbarrier.expect(k_full.index(k_stage), k.block_type.nbytes)
                copy_in(k, [key - (j + 1) * KEYS, 0], k_full.index(k_stage), ks.index(k_stage))
        t = _take(counter, total)
        told_phase = _tell(t, following, told, heard, told_phase)


@gluon.jit
def _hide(  # type: ignore[no-untyped-def]  # Triton's types are its own
    s, limit, WIDE: gl.constexpr, HIGH: gl.constexpr, LOW: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr
):
    """-inf, with HIGH, beyond column `limit` of each row and, with LOW, before the last WIDE columns up to there.
    Column 8i + 2j + k is lane j's register (i, k): compared with what is left of the limit after the lane's own
    columns, i and k are constants, which take no registers.
    """
    apart = s.reshape([ROWS, KEYS // 8, 4, 2])
    layout: gl.constexpr = apart.type.layout
    no_pair: gl.constexpr = gl.SliceLayout(3, layout)
    no_lane: gl.constexpr = gl.SliceLayout(2, layout)
    of_rows: gl.constexpr = gl.SliceLayout(2, no_pair)
    limits = gl.expand_dims(gl.convert_layout(limit, gl.SliceLayout(1, of_rows)), 1)
    limits = gl.expand_dims(gl.expand_dims(limits, 2), 3)
    lanes = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, no_pair))), 0)
    lanes = gl.expand_dims(gl.expand_dims(lanes, 1), 3)
    eights = gl.expand_dims(gl.arange(0, KEYS // 8, gl.SliceLayout(0, of_rows)), 0)
    eights = gl.expand_dims(gl.expand_dims(eights, 2), 3)
    pair = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, no_lane))), 0)
    pair = gl.expand_dims(gl.expand_dims(pair, 1), 2)
    left = limits - 2 * lanes
    if HIGH:
        apart = gl.where(left >= 8 * eights + pair, apart, float("-inf"))
    if LOW:
        apart = gl.where(left - WIDE < 8 * eights + pair, apart, float("-inf"))
    return gl.convert_layout(apart.reshape([ROWS, KEYS]), s.type.layout, assert_trivial=True)


@gluon.jit
def _pass_over(  # type: ignore[no-untyped-def]  # Triton's types are its own
    k_full, k_empty, v_full, v_empty, turn, k_stage, k_phase, v_stage, v_phase, turn_phase,
    GROUP: gl.constexpr, NEXT: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Releases a block of K and of V unread, as only what is there may be, and passes the turn on."""
    mbarrier.wait(k_full.index(k_stage), k_phase)
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    k_stage, k_phase = onward(k_stage, k_phase, STAGES)
    v_stage, v_phase = onward(v_stage, v_phase, STAGES)
    if TURNS:
        mbarrier.wait(turn.index(GROUP), turn_phase)
        turn_phase ^= 1
        mbarrier.arrive(turn.index(NEXT), count=1)
    return k_stage, k_phase, v_stage, v_phase, turn_phase


@gluon.constexpr_function
def _rounding(dtype):  # type: ignore[no-untyped-def]  # Triton's types are its own
    return "cvt.rn." + ("bf16x2" if dtype == gl.bfloat16 else "f16x2") + ".f32 $0, $2, $1;"


@gluon.jit
def _pack(p, dtype: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """The weights p as they go round a loop: (ROWS, KEYS / 2) words of two, because a loop carries each 16-bit
    number in a register of its own.
    """
    a, b = gl.split(p.reshape([ROWS, KEYS // 2, 2]))
    return gl.inline_asm_elementwise(_rounding(dtype), "=r,f,f", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack(  # type: ignore[no-untyped-def]  # Triton's types are its own
    packed, dtype: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, OPERAND: gl.constexpr
):
    """What `_pack` packed as the operand of a product: the registers are the same."""
    twos = gl.zeros([ROWS, KEYS], gl.int16, OPERAND).reshape([ROWS, KEYS // 2, 2])
    HALVES: gl.constexpr = twos.type.layout
    one = gl.expand_dims(gl.convert_layout(packed, gl.SliceLayout(2, HALVES), assert_trivial=True), 2)
    two = one + gl.zeros([ROWS, KEYS // 2, 2], gl.int32, HALVES)
    half = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [two], dtype=gl.int16, is_pure=True, pack=2)
    return gl.convert_layout(half.to(dtype, bitcast=True).reshape([ROWS, KEYS]), OPERAND, assert_trivial=True)


@gluon.constexpr_function
def _scaling(count):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """PTX of `count` products of numbers and factors, which are left out where all factors of a warp are 1. Of a
    thread's numbers the first and the third lie in its two rows, each of which has one factor.
    """
    scaled = "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i}; " for i in range(count))
    return (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * count}, 0f3F800000;"
        f" setp.neu.f32 q, ${2 * count + 2}, 0f3F800000; or.pred p, p, q;"
        f" vote.sync.any.pred p, p, 0xffffffff; @!p bra done; {scaled} done: }}"
    )


@gluon.constexpr_function
def _scaling_constraints(count):  # type: ignore[no-untyped-def]  # Triton's types are its own
    # Numbers lie where their products will: so none is written before all are read.
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def _scaled(acc, shrink):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """`acc` with its rows times `shrink`, passed over by warps whose factors are all 1."""
    PACK: gl.constexpr = acc.shape[0] * acc.shape[1] // 128  # all that a thread has
    factors = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout)), 1) + gl.zeros_like(acc)
    return gl.inline_asm_elementwise(
        _scaling(PACK), _scaling_constraints(PACK), [acc, factors], dtype=gl.float32, is_pure=True, pack=PACK
    )


@gluon.jit
def _held(highest):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """`highest`, known before what is waited for after this: it is written to memory if it is a NaN that no
    instruction makes, and ptxas moves no such thing behind a wait for a product.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 i; mov.b32 i, $1; setp.eq.s32 p, i, 0x7fabcdef; @p st.shared.b32 [i], i;"
        " mov.f32 $0, $1; }",
        "=f,f", [highest], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _sums(p, ROWS: gl.constexpr, KEYS: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Sums (ROWS, 4) of what each of the four lanes that share a row has of it."""
    return gl.sum(gl.sum(p.reshape([ROWS, KEYS // 8, 4, 2]), 3), 1)


@gluon.jit
def _first(  # type: ignore[no-untyped-def]  # Triton's types are its own
    s, scale, dtype: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr
):
    """(maxima, sums by lane, packed weights) of a tile's first block of scores."""
    highest = gl.maximum(gl.max(s, 1) * scale, LOWEST)
    p = gl.exp2(s * scale - gl.expand_dims(highest, 1))
    return highest, _sums(p, ROWS, KEYS), _pack(p, dtype, ROWS, KEYS)


@gluon.jit
def _step(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, ks, vs, k_full, k_empty, v_full, v_empty, turn, zero, acc, packed, weight, highest,
    k_stage, k_phase, v_stage, v_phase, turn_phase, limit, scale,
    WIDE: gl.constexpr, HIGH: gl.constexpr, LOW: gl.constexpr, GROUP: gl.constexpr, NEXT: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One block of keys, with the values of the block before, whose weights are `packed`. HIGH and LOW: which ends
    of what rows see may cut it, as in `_hide`. Maxima lag behind by `SLACK` at most, for weights and sums alike.
    """
    dtype: gl.constexpr = vs.dtype
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    mbarrier.wait(k_full.index(k_stage), k_phase)
    if TURNS:
        mbarrier.wait(turn.index(GROUP), turn_phase)
        turn_phase ^= 1
    s = warpgroup_mma(q, ks.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    weights = _unpack(packed, dtype, ROWS, KEYS, operand)
    acc = warpgroup_mma(weights, vs.index(v_stage), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turn.index(NEXT), count=1)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    if HIGH or LOW:
        s = _hide(s, limit, WIDE, HIGH, LOW, ROWS, KEYS)
    top = gl.max(s, 1) * scale
    raised = _held(gl.where(top - highest > SLACK, top, highest))
    p = gl.exp2(s * scale - gl.expand_dims(raised, 1))
    shrink = gl.exp2(highest - raised)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    by_lane = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, weight.type.layout)), 1)
    weight = weight * by_lane + _sums(p, ROWS, KEYS)
    packed = _pack(p, dtype, ROWS, KEYS)
    # Last, because it is a branch, before which ptxas finishes what comes before it.
    acc = _scaled(acc, shrink)
    k_stage, k_phase = onward(k_stage, k_phase, STAGES)
    v_stage, v_phase = onward(v_stage, v_phase, STAGES)
    return acc, packed, weight, raised, k_stage, k_phase, v_stage, v_phase, turn_phase


@gluon.jit
def _last(  # type: ignore[no-untyped-def]  # Triton's types are its own
    packed, vs, acc, full, empty, stage, phase,
    OPERAND: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """(sums with a tile's last block of values, the next stage and phase)."""
    mbarrier.wait(full.index(stage), phase)
    weights = _unpack(packed, vs.dtype, ROWS, KEYS, OPERAND)
    acc = warpgroup_mma(weights, vs.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(stage), count=1)
    stage, phase = onward(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, following, told, heard,
    total, n, length, heads, section, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, KEYS: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """One group's rows of every tile: online softmax in base 2 over blocks of keys, the last keys first. In the
    loop K runs one block ahead of V.

    Run 0 of steps is cut by the window's end, 1 is seen by every row, 2 is cut by the window's start. Where a
    window is so narrow that both ends cut a block, each is looked for in it.
    """
    AHEAD: gl.constexpr = 0 if CAUSAL or not WINDOW else WINDOW - 1  # keys after itself that a query sees
    WIDE: gl.constexpr = WINDOW + AHEAD  # keys that it sees
    NARROW: gl.constexpr = WINDOW > 0 and WINDOW < KEYS
    FROM: gl.constexpr = 0 if AHEAD else 1
    UNTIL: gl.constexpr = 3 if WINDOW else 2
    NEXT: gl.constexpr = (GROUP + 1) % GROUPS
    dtype: gl.constexpr = out.dtype
    score: gl.constexpr = product_layout(KEYS)
    sums: gl.constexpr = product_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    score_rows: gl.constexpr = gl.SliceLayout(1, score)
    sums_rows: gl.constexpr = gl.SliceLayout(1, sums)
    q = qs.index(GROUP)
    o = os.index(GROUP)
    zero = gl.zeros([ROWS, KEYS], gl.float32, score)
    rows = gl.arange(0, ROWS, score_rows)
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    q_phase = 0
    turn_phase = 1 if GROUP == 0 else 0
    told_phase = 0
    t = gl.program_id(0)
    while t < total:
        head, start, low, last = _tile(t, n, length, heads, section, CAUSAL, ROWS * GROUPS, KEYS, WINDOW)
        own = start + GROUP * ROWS
        # Blocks of keys that this group begins and ends with.
        end = low
        if CAUSAL:
            first = gl.maximum(own + ROWS - 1, 0) // KEYS
        elif WINDOW:
            first = gl.minimum(gl.maximum(own + ROWS - 1 + AHEAD, 0) // KEYS, last)
        else:
            first = gl.where(own < 0, 0, last)
        if WINDOW:
            end = gl.maximum(own - WINDOW + 1, 0) // KEYS
            first = gl.where(own < 0, 0, first)
        for _ in range(first, last):
            k_stage, k_phase, v_stage, v_phase, turn_phase = _pass_over(
                k_full, k_empty, v_full, v_empty, turn, k_stage, k_phase, v_stage, v_phase, turn_phase,
                GROUP, NEXT, STAGES, TURNS,
            )  # fmt: skip
        mbarrier.wait(q_full.index(GROUP), q_phase)
        q_phase ^= 1
        s, k_stage, k_phase = scores(q, ks, zero, k_full, k_empty, k_stage, k_phase, STAGES)
        if CAUSAL or WINDOW:
            s = _hide(s, rows + (own + AHEAD - first * KEYS), WIDE, True, NARROW, ROWS, KEYS)
        highest, weight, packed = _first(s, scale, dtype, ROWS, KEYS)
        acc = gl.zeros([ROWS, D], gl.float32, sums)
        count = first + 1 - end
        begin = 1
        for run in gl.static_range(FROM, UNTIL):
            until = count
            if WINDOW and run == 0:  # the blocks after the last that all rows see as a whole
                until = gl.minimum(gl.maximum(first + 1 - gl.maximum(own + WINDOW, 0) // KEYS, 1), count)
            elif WINDOW and run == 1:  # from there to the first such
                until = gl.minimum(first + 1 - gl.maximum(own + ROWS - WINDOW + KEYS - 1, 0) // KEYS, count)
                until = gl.maximum(until, begin)
            for j in range(begin, until):
                limit = rows + (own + AHEAD - (first - j) * KEYS)
                acc, packed, weight, highest, k_stage, k_phase, v_stage, v_phase, turn_phase = _step(
                    q, ks, vs, k_full, k_empty, v_full, v_empty, turn, zero, acc, packed, weight, highest,
                    k_stage, k_phase, v_stage, v_phase, turn_phase, limit, scale,
                    WIDE, run != 1 and (run == 0 or NARROW), run != 1 and (run == 2 or NARROW),
                    GROUP, NEXT, ROWS, KEYS, STAGES, TURNS,
                )  # fmt: skip
            begin = until
        # The last product with Q is done: the next tile's can be loaded.
        mbarrier.arrive(q_empty.index(GROUP), count=1)
        acc, v_stage, v_phase = _last(
            packed, vs, acc, v_full, v_empty, v_stage, v_phase, operand, ROWS, KEYS, STAGES
        )
        if WINDOW:
            for _ in range(low, end):
                k_stage, k_phase, v_stage, v_phase, turn_phase = _pass_over(
                    k_full, k_empty, v_full, v_empty, turn, k_stage, k_phase, v_stage, v_phase, turn_phase,
                    GROUP, NEXT, STAGES, TURNS,
                )  # fmt: skip
        if own >= 0:
            row = head * length + own
            empty = highest == LOWEST
            whole = gl.convert_layout(gl.sum(weight, 1), score_rows)
            gl.store(lse + row + rows, gl.where(empty, float("inf"), highest + gl.log2(whole)))
            share = gl.where(empty, 0.0, 1.0 / whole)
            acc = acc * gl.expand_dims(gl.convert_layout(share, sums_rows), 1)
            tma.store_wait(pendings=0)  # of the tile before, which the buffer still held
            o.store(acc.to(dtype))
            fence_async_shared()
            copy_out(out, [row, 0], o)
        t, told_phase = _hear(following, told, heard, told_phase)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["counter", "total", "n", "length", "heads", "groups", "section"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, out, lse, counter, total, n, length, heads, groups, section, scale,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, REGISTERS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, then the warp groups. `n` tiles a head, `total` = heads · n, heads B·H."""
    qs = gl.allocate_shared_memory(q.dtype, [GROUPS, ROWS, D], q.layout)
    os = gl.allocate_shared_memory(q.dtype, [GROUPS, ROWS, D], out.layout)
    ks = gl.allocate_shared_memory(q.dtype, [STAGES, KEYS, D], k.layout)
    vs = gl.allocate_shared_memory(q.dtype, [STAGES, KEYS, D], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    # Of barriers only what is waited for is initialised: over others Triton lays scratch memory, and programs then
    # took wrong tiles on an H200.
    turn = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    following = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(told, count=1)
    mbarrier.init(heard, count=GROUPS)
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        if TURNS:
            mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    gl.warp_specialize(
        [
            (
                _feed,
                (
                    q, k, v, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, following, told,
                    heard, counter, total, n, length, heads, groups, section,
                    CAUSAL, ROWS, GROUPS, KEYS, STAGES, WINDOW,
                ),
            ),
            (
                _compute,
                (
                    out, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    following, told, heard, total, n, length, heads, section, scale,
                    0, CAUSAL, ROWS, GROUPS, KEYS, D, STAGES, TURNS, WINDOW,
                ),
            ),
            (
                _compute,
                (
                    out, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    following, told, heard, total, n, length, heads, section, scale,
                    1, CAUSAL, ROWS, GROUPS, KEYS, D, STAGES, TURNS, WINDOW,
                ),
            ),
            (
                _compute,
                (
                    out, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    following, told, heard, total, n, length, heads, section, scale,
                    2, CAUSAL, ROWS, GROUPS, KEYS, D, STAGES, TURNS, WINDOW,
                ),
            ),
        ][: GROUPS + 1],
        [4, 4, 4][:GROUPS],
        [REGISTERS, REGISTERS, REGISTERS][:GROUPS],
    )  # fmt: skip


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    window: int,
    section: int,
) -> None:
    """Writes the output and its base-2 log-sum-exp (B, H, S), +inf for a row that sees nothing. A window of 0 is
    none. `section`: query heads whose tiles are taken before others' are. For inputs that `_attention_hopper.fits`
    approves of for the columns of DIVISIONS.
    """
    B, H, S, D = q.shape
    width = power_of_2(D)
    division = DIVISIONS[width]
    n = -(-S // (ROWS * division.groups))
    total = B * H * n
    constants = (
        causal, ROWS, division.groups, KEYS, width, division.stages, division.turns, division.registers, window
    )  # fmt: skip
    with on(q):
        launch(
            _kernel, (_kernel, q.device, q.dtype, width, causal, window), min(total, multiprocessors(q)),
            tiles(q, ROWS), tiles(k, KEYS), tiles(v, KEYS), tiles(out, ROWS), lse, counter(q),
            total, n, S, B * H, H // k.shape[1], min(section, B * H), LOG2E / math.sqrt(D), *constants,
        )  # fmt: skip
