"""The forward pass of attention over packed sequences for Hopper (compute capability 9.0), in Gluon.

The schedule is that of `_attention_hopper.py`: one warp group feeds tiles through the tensor memory accelerator,
two others compute 64 rows each, with the scores of the next block of keys under the values of this one. Programs
are persistent; a unit of work is a pair of query blocks of one head of one sequence, the first with the last, the
second with the last but one, so that the units of a sequence are equally long under a causal mask; an odd block in
the middle is a unit by itself. Units come from the list of `attention_varlen.listed`, the longest sequences first,
and programs take the next one as they come to it, by a counter in the list, as FlashAttention-3's do: one in so
many, known in advance, would use 0.88 to 0.94 of an H200's multiprocessors in the standard cases of uneven
lengths, this 0.97 and more (by arithmetic, with a block of keys as the unit of time). Who computes a row does not
change its numbers.

Blocks of queries and keys start where their sequence does, at any row of the packed tensors. The last of them are
read beyond the sequence: keys there are hidden, values there are overwritten with zeros before they are multiplied
(a NaN of a neighbour would outlive a probability of 0), and rows of the output there are not written.

Taken for bf16 and fp16, D of 64 or 128, sequences of more than 512 tokens among them, heads side by side: `fits`.
The forward pass for D = 64 is `_attention_varlen_hopper_three.py`.
"""

from __future__ import annotations

import math

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

from ._attention_hopper import (
    KEYS,
    LOG2E,
    LOWEST,
    ROWS,
    SCHEDULES,
    Tiles,
    _layout,
    _pack,
    _unpack,
    launch,
    onward,
)
from ._common import multiprocessors, on

_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""Of the threads of a warp group: its name until Triton 3.6, and since."""
UNIT = 2 * KEYS
"""Rows of a pair of query blocks."""
FIELDS: gl.constexpr = gl.constexpr(8)
"""Numbers of a listed unit, as in `attention_varlen`."""


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, longest: int) -> bool:
    """Whether the kernels for Hopper, of both passes, take these inputs, with sequences of `longest` queries at
    most; the device is not looked at. Tokens may be apart, as those of a packed projection are, but a token's
    heads not.
    """
    D = q.shape[2]
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and D in (64, 128)
        and longest > 512
        and all(
            x.data_ptr() % 16 == 0
            and x.stride(2) == 1
            and (x.stride(1) == D or x.shape[1] == 1)
            and x.stride(0) % 8 == 0
            and 0 < x.stride(0) < 1 << 39
            and x.shape[0] > 0
            for x in (q, k, v)
        )
    )


@gluon.jit
def _unit(table, unit, heads):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(head, first of the pair, start, length, key start, keys) of a unit."""
    row = table + unit // heads * FIELDS
    start = gl.load(row)
    length = gl.load(row + 1)
    key_start = gl.load(row + 2)
    keys = gl.load(row + 3)
    within = unit - gl.load(row + 4) * heads
    pairs = gl.load(row + 5)
    head = within // pairs
    return head, within - head * pairs, start, length, key_start, keys


@gluon.jit
def _tile(pair, t, length, keys, CAUSAL: gl.constexpr, KEYS: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(query block, blocks of keys, how many of them a mask cuts) of a pair's tile t, the longer one first.

    The mask is aligned to the end: a block's last query sees the keys up to `limit`, its first one those up to
    `clear`. One or two blocks are cut. A block of keys there is always; it may be hidden as a whole.
    """
    blocks = (length + KEYS - 1) // KEYS
    block = pair + (1 - t) * (blocks - 1 - 2 * pair)
    limit = keys
    clear = keys
    if CAUSAL:
        limit = gl.minimum((block + 1) * KEYS + keys - length, keys)
        clear = gl.maximum(gl.minimum(block * KEYS + keys - length + 1, keys), 0)
    count = gl.maximum((limit + KEYS - 1) // KEYS, 1)
    return block, count, count - clear // KEYS


@gluon.jit
def _tiles(pair, length, KEYS: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Tiles of a pair: two, or the one in the middle."""
    return gl.minimum((length + KEYS - 1) // KEYS - 2 * pair, 2)


@gluon.jit
def _feed(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, following, told, heard,
    table, rows, heads, groups,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    DYNAMIC: gl.constexpr,
):  # fmt: skip
    """Loads each tile's two halves of Q, then its blocks of K and V, the last keys first.

    It is ahead of those who compute. So it is also who takes the next unit, and tells them.
    """
    stage = 0
    phase = 1
    q_phase = 1
    told_phase = 1
    total = gl.load(table + rows * FIELDS) * heads
    unit = gl.program_id(0)
    while unit < total:
        head, pair, start, length, key_start, keys = _unit(table, unit, heads)
        column = head * D
        key_column = head // groups * D
        for t in range(0, _tiles(pair, length, KEYS)):
            block, count, _ = _tile(pair, t, length, keys, CAUSAL, KEYS)
            row = start + block * KEYS
            for i in gl.static_range(2):
                mbarrier.wait(q_empty.index(i), q_phase)
                mbarrier.expect(q_full.index(i), q.block_type.nbytes)
                tma.async_copy_global_to_shared(q, [row + i * ROWS, column], q_full.index(i), qs.index(i))
            q_phase ^= 1
            last = key_start + (count - 1) * KEYS
            for j in range(0, count):
                key = last - j * KEYS
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
                tma.async_copy_global_to_shared(k, [key, key_column], k_full.index(stage), ks.index(stage))
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
                tma.async_copy_global_to_shared(v, [key, key_column], v_full.index(stage), vs.index(stage))
                stage, phase = onward(stage, phase, STAGES)
        unit += gl.num_programs(0)
        if DYNAMIC:
            unit = gl.num_programs(0) + gl.atomic_add(table + rows * FIELDS + 1, 1, sem="relaxed")
            mbarrier.wait(heard, told_phase)
            told_phase ^= 1
            following.store(gl.full([1], unit, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
            mbarrier.arrive(told, count=1)


@gluon.jit
def _hide(s, edge, keys, start, ROWS: gl.constexpr, KEYS: gl.constexpr, CAUSAL: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Scores of the block of keys from `start` on; the last key that row 0 sees is `edge`."""
    layout: gl.constexpr = s.type.layout
    columns = start + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
    if CAUSAL:
        # Keys beyond the sequence are hidden too: they come after every row that is stored.
        seen = gl.expand_dims(edge + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1) >= gl.expand_dims(
            columns, 0
        )
    else:
        seen = gl.expand_dims(columns, 0) < keys
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _clean(v, beyond, KEYS: gl.constexpr, D: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Zeros over rows from `beyond` on. Each warp group that multiplies them does it, with the same result."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, layout))
    for i in gl.static_range(KEYS // 32):
        part = v.slice(i * 32, 32)
        x = part.load(layout)
        part.store(gl.where(gl.expand_dims(rows + i * 32 < beyond, 1), x, gl.zeros_like(x)))
    fence_async_shared()
    # Triton would put it where the tile is read: into the loop, for all the tiles that are whole.
    _barrier()


@gluon.jit
def _step(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, ks, vs, k_full, k_empty, v_full, v_empty, turn, zero, acc, packed, weight, highest,
    k_stage, k_phase, v_stage, v_phase, turn_phase, edge, keys, start, scale,
    MASKED: gl.constexpr, HALF: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One block of keys, with the values of the block before, whose weights are `packed`."""
    dtype: gl.constexpr = vs.dtype
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    mbarrier.wait(k_full.index(k_stage), k_phase)
    if TURNS:
        mbarrier.wait(turn.index(HALF), turn_phase)
        turn_phase ^= 1
    s = warpgroup_mma(q, ks.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    weights = _unpack(packed, dtype, ROWS, KEYS, operand, True)
    acc = warpgroup_mma(weights, vs.index(v_stage), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turn.index(1 - HALF), count=1)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    if MASKED:
        s = _hide(s, edge, keys, start, ROWS, KEYS, CAUSAL)
    raised = gl.maximum(highest, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - gl.expand_dims(raised, 1))
    shrink = gl.exp2(highest - raised)
    weight = weight * shrink + gl.sum(p, 1)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout)), 1)
    packed = _pack(p, dtype, ROWS, KEYS, operand, True)
    k_stage, k_phase = onward(k_stage, k_phase, STAGES)
    v_stage, v_phase = onward(v_stage, v_phase, STAGES)
    return acc, packed, weight, raised, k_stage, k_phase, v_stage, v_phase, turn_phase


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, plain, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
    following, told, heard, table, rows, heads, tokens, scale,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, DYNAMIC: gl.constexpr,
):  # fmt: skip
    """One half of every tile: online softmax in base 2 over blocks of keys, the last keys first.

    In the loop K runs one block ahead of V.
    """
    dtype: gl.constexpr = out.dtype
    score: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16]
    )
    total: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=total, k_width=2)
    score_rows: gl.constexpr = gl.SliceLayout(1, score)
    total_rows: gl.constexpr = gl.SliceLayout(1, total)
    q = qs.index(HALF)
    o = os.index(HALF)
    zero = gl.zeros([ROWS, KEYS], gl.float32, score)
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    q_phase = 0
    turn_phase = 1 - HALF
    told_phase = 0
    units = gl.load(table + rows * FIELDS) * heads
    unit = gl.program_id(0)
    while unit < units:
        head, pair, begin, length, _, keys = _unit(table, unit, heads)
        for t in range(0, _tiles(pair, length, KEYS)):
            block, count, masked = _tile(pair, t, length, keys, CAUSAL, KEYS)
            row = block * KEYS + HALF * ROWS
            edge = row + keys - length
            start = (count - 1) * KEYS
            mbarrier.wait(q_full.index(HALF), q_phase)
            q_phase ^= 1
            mbarrier.wait(k_full.index(k_stage), k_phase)
            s = warpgroup_mma(q, ks.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(k_stage), count=1)
            k_stage, k_phase = onward(k_stage, k_phase, STAGES)
            if start + KEYS > keys:
                mbarrier.wait(v_full.index(v_stage), v_phase)
                _clean(vs.index(v_stage), keys - start, KEYS, D)
            s = _hide(s, edge, keys, start, ROWS, KEYS, CAUSAL)
            highest = gl.maximum(gl.max(s, 1) * scale, LOWEST)
            p = gl.exp2(s * scale - gl.expand_dims(highest, 1))
            weight = gl.sum(p, 1)
            packed = _pack(p, dtype, ROWS, KEYS, operand, True)
            acc = gl.zeros([ROWS, D], gl.float32, total)
            if CAUSAL:
                for j in range(1, masked):
                    acc, packed, weight, highest, k_stage, k_phase, v_stage, v_phase, turn_phase = _step(
                        q, ks, vs, k_full, k_empty, v_full, v_empty, turn, zero, acc, packed, weight, highest,
                        k_stage, k_phase, v_stage, v_phase, turn_phase, edge, keys, start - j * KEYS, scale,
                        True, HALF, CAUSAL, ROWS, KEYS, STAGES, TURNS,
                    )  # fmt: skip
            for _ in range(gl.maximum(masked, 1), count):
                acc, packed, weight, highest, k_stage, k_phase, v_stage, v_phase, turn_phase = _step(
                    q, ks, vs, k_full, k_empty, v_full, v_empty, turn, zero, acc, packed, weight, highest,
                    k_stage, k_phase, v_stage, v_phase, turn_phase, edge, keys, start, scale,
                    False, HALF, CAUSAL, ROWS, KEYS, STAGES, TURNS,
                )  # fmt: skip
            # The last product with Q is done: the next tile's can be loaded.
            mbarrier.arrive(q_empty.index(HALF), count=1)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            weights = _unpack(packed, dtype, ROWS, KEYS, operand, True)
            acc = warpgroup_mma(weights, vs.index(v_stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            v_stage, v_phase = onward(v_stage, v_phase, STAGES)
            at = row + gl.arange(0, ROWS, score_rows)
            blind = highest == LOWEST
            level = gl.where(blind, float("inf"), highest + gl.log2(weight))
            gl.store(lse + head.to(gl.int64) * tokens + begin + at, level, mask=at < length)
            inverse = gl.where(blind, 0.0, 1.0 / weight)
            acc = acc * gl.expand_dims(gl.convert_layout(inverse, total_rows), 1)
            if row + ROWS <= length:
                tma.store_wait(pendings=0)  # of the tile before, which the buffer still held
                o.store(acc.to(dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(out, [begin + row, head * D], o)
            else:
                # A tile's store would go on into the next sequence.
                own = row + gl.arange(0, ROWS, total_rows)
                columns = head * D + gl.arange(0, D, gl.SliceLayout(0, total))
                places = gl.expand_dims((begin + own).to(gl.int64) * (heads * D), 1) + gl.expand_dims(columns, 0)
                gl.store(plain + places, acc.to(dtype), mask=gl.expand_dims(own < length, 1))
        unit += gl.num_programs(0)
        if DYNAMIC:
            mbarrier.wait(told, told_phase)
            told_phase ^= 1
            unit = gl.max(following.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
            mbarrier.arrive(heard, count=1)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["rows", "heads", "groups", "tokens"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, out, plain, lse, table, rows, heads, groups, tokens, scale,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, DYNAMIC: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, then the three warp groups. `plain` is `out` as a pointer, `tokens` its rows."""
    qs = gl.allocate_shared_memory(q.dtype, [2, ROWS, D], q.layout)
    os = gl.allocate_shared_memory(q.dtype, [2, ROWS, D], out.layout)
    ks = gl.allocate_shared_memory(q.dtype, [STAGES, KEYS, D], k.layout)
    vs = gl.allocate_shared_memory(q.dtype, [STAGES, KEYS, D], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    following = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    # Only what is used: over barriers that are initialised and never used Triton puts scratch memory of the warp
    # groups, through which the next unit goes. See `_attention_varlen_hopper_three.py`.
    if DYNAMIC:
        mbarrier.init(told, count=1)
        mbarrier.init(heard, count=2)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        if TURNS:
            mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _feed,
                (
                    q, k, v, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, following, told, heard,
                    table, rows, heads, groups, CAUSAL, ROWS, KEYS, D, STAGES, DYNAMIC,
                ),
            ),
            (
                _compute,
                (
                    out, plain, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    following, told, heard, table, rows, heads, tokens, scale,
                    0, CAUSAL, ROWS, KEYS, D, STAGES, TURNS, DYNAMIC,
                ),
            ),
            (
                _compute,
                (
                    out, plain, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    following, told, heard, table, rows, heads, tokens, scale,
                    1, CAUSAL, ROWS, KEYS, D, STAGES, TURNS, DYNAMIC,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


def packed(x: torch.Tensor, rows: int) -> Tiles:
    """Blocks of `rows` tokens of one head of what `fits` has approved of: head h at column h · D."""
    T, heads, D = x.shape
    return Tiles(x, [T, heads * D], [x.stride(0), 1], [rows, D], _layout(rows, D, x.dtype))


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    table: torch.Tensor,
    rows: int,
    causal: bool,
    dynamic: bool = True,
) -> None:
    """Writes the output and its base-2 log-sum-exp (H, T), from a list of units of `UNIT` rows of queries. Unless
    `dynamic`, programs take one unit in so many: on an H200 faster for equal lengths, above all short ones, and
    slower for unequal ones.

    For inputs that `fits` approves of, with D = 128. A list is good for one call: what is taken is counted in it.
    """
    T, H, D = q.shape
    s = SCHEDULES[D, causal]
    with on(q):
        launch(
            _kernel, (_kernel, q.device, q.dtype, causal, dynamic), min(rows * H, multiprocessors(q)),
            packed(q, ROWS), packed(k, KEYS), packed(v, KEYS), packed(out, ROWS), out, lse, table,
            rows, H, H // k.shape[1], T, LOG2E / math.sqrt(D),
            causal, ROWS, KEYS, D, s.stages, s.turns, dynamic, s.registers,
        )  # fmt: skip
