"""The forward pass of attention over packed sequences for Hopper (compute capability 9.0), in Gluon.

The schedule is that of `_attention_hopper_dealt.py`: one warp group feeds tiles through the tensor memory
accelerator, three others at 64 columns and two at 128 compute 64 rows each, with the scores of the next block of
keys under the values of this one.

A unit of work is one tile: 192 or 128 query rows of one head of one sequence. Tiles are aligned to their
sequence's end, as the causal mask is: the first of a sequence may begin before it, where what it reads is computed
and not stored; a group whose rows all lie there computes one block of keys, under a causal mask as many as such
rows would see. So no row sees a key beyond its sequence under a causal mask, and the rows that are missing are
missing where keys are fewest. Blocks of keys start where the sequence does, at any row of the packed tensors; the
last is read beyond it, where keys are hidden and values overwritten with zeros before they are multiplied (a NaN
of a neighbour would outlive a probability of 0).

Each group starts at its own diagonal: blocks of keys that all of its rows lie before are released unread. Its
first block is masked, and the next one where the diagonal of its 64 rows lies across two.

Programs are persistent, one a multiprocessor, and take the next unit as they come to it, by a counter in the list
of `attention_varlen.listed`, as FlashAttention-3's do. That has sequences by their keys, the most first; a
sequence's tiles come in sections of heads whose K and V fit into L2 together, of each the longest first. Who
computes a row does not change its numbers.

Taken for bf16 and fp16, D of 64 or 128, sequences of more than 512 tokens among them, heads side by side: `fits`.
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
)

from .._common import multiprocessors, on
from ._attention_hopper import (
    KEYS,
    LOG2E,
    LOWEST,
    ROWS,
    Tiles,
    _layout,
    copy_in,
    copy_out,
    launch,
    onward,
    product_layout,
    scores,
    sectioned,
)
from ._attention_hopper_dealt import DIVISIONS, _first, _hear, _hide, _last, _pass_over, _step, _tell

_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""Of the threads of a warp group: its name until Triton 3.6, and since."""
FIELDS: gl.constexpr = gl.constexpr(8)
"""Numbers of a listed unit, as in `attention_varlen`."""
SECTION = 24 << 20
"""Bytes of K and V that a section of heads may have, to stay in L2."""


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
def _unit(  # type: ignore[no-untyped-def]  # Triton's types are its own
    table, unit, heads, groups, hold, CAUSAL: gl.constexpr, TILE: gl.constexpr, KEYS: gl.constexpr
):
    """(head, start, length, key start, keys, first row, which may be negative, last block of keys) of a unit. A
    block of keys there is always; it may be hidden as a whole. A section of heads may have `hold` keys.
    """
    row = table + unit // heads * FIELDS
    start = gl.load(row)
    length = gl.load(row + 1)
    key_start = gl.load(row + 2)
    keys = gl.load(row + 3)
    within = unit - gl.load(row + 4) * heads
    n = gl.load(row + 5)
    section = gl.minimum(gl.maximum(hold // gl.maximum(keys, 1), 1) * groups, heads)
    head, nth = sectioned(within, n, heads, section)
    seen = keys
    if CAUSAL:
        seen = keys - nth * TILE
    last = gl.maximum(seen - 1, 0) // KEYS
    return head, start, length, key_start, keys, length - (nth + 1) * TILE, last


@gluon.jit
def _feed(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, following, told, heard,
    table, rows, heads, groups, hold,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Loads each tile's parts of Q and its blocks of K and V, the last keys first, and takes the next tile."""
    k_stage = 0
    k_phase = 1
    v_stage = 0
    v_phase = 1
    q_phase = 1
    told_phase = 1
    total = gl.load(table + rows * FIELDS) * heads
    unit = gl.program_id(0)
    while unit < total:
        head, start, _, key_start, _, first, last = _unit(
            table, unit, heads, groups, hold, CAUSAL, ROWS * GROUPS, KEYS
        )
        row = start + first
        key = key_start + last * KEYS
        column = head * D
        key_column = head // groups * D
        # Keys do not wait for those who still use the queries before.
        mbarrier.wait(k_empty.index(k_stage), k_phase)
        mbarrier.expect(k_full.index(k_stage), k.block_type.nbytes)
        copy_in(k, [key, key_column], k_full.index(k_stage), ks.index(k_stage))
        for i in gl.static_range(GROUPS):
            mbarrier.wait(q_empty.index(i), q_phase)
            mbarrier.expect(q_full.index(i), q.block_type.nbytes)
            copy_in(q, [row + i * ROWS, column], q_full.index(i), qs.index(i))
        q_phase ^= 1
        for j in range(0, last + 1):
            k_stage, k_phase = onward(k_stage, k_phase, STAGES)
            mbarrier.wait(v_empty.index(v_stage), v_phase)
            mbarrier.expect(v_full.index(v_stage), v.block_type.nbytes)
            copy_in(v, [key, key_column], v_full.index(v_stage), vs.index(v_stage))
            v_stage, v_phase = onward(v_stage, v_phase, STAGES)
            key = key - KEYS
            if j < last:
                mbarrier.wait(k_empty.index(k_stage), k_phase)
                mbarrier.expect(k_full.index(k_stage), k.block_type.nbytes)
                copy_in(k, [key, key_column], k_full.index(k_stage), ks.index(k_stage))
        unit = gl.num_programs(0) + gl.atomic_add(table + rows * FIELDS + 1, 1, sem="relaxed")
        told_phase = _tell(unit, following, told, heard, told_phase)


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, plain, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
    following, told, heard, table, rows, heads, groups, hold, tokens, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, KEYS: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One group's rows of every tile: online softmax in base 2 over blocks of keys, the last keys first. In the
    loop K runs one block ahead of V.
    """
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
    within = gl.arange(0, ROWS, score_rows)
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    q_phase = 0
    turn_phase = 1 if GROUP == 0 else 0
    told_phase = 0
    total = gl.load(table + rows * FIELDS) * heads
    unit = gl.program_id(0)
    while unit < total:
        head, begin, length, _, keys, row, last = _unit(
            table, unit, heads, groups, hold, CAUSAL, ROWS * GROUPS, KEYS
        )
        row += GROUP * ROWS
        # The last key that this group's first row sees, before the sequence where it sees none.
        edge = row + keys - length
        if CAUSAL:
            first = gl.maximum(edge + ROWS - 1, 0) // KEYS
            cut = first - gl.maximum(edge, 0) // KEYS  # blocks after the first that the mask cuts: one or none
        else:
            first = gl.where(row + ROWS <= 0, 0, last)
            cut = 0
        start = first * KEYS
        for _ in range(first, last):
            k_stage, k_phase, v_stage, v_phase, turn_phase = _pass_over(
                k_full, k_empty, v_full, v_empty, turn, k_stage, k_phase, v_stage, v_phase, turn_phase,
                GROUP, NEXT, STAGES, TURNS,
            )  # fmt: skip
        mbarrier.wait(q_full.index(GROUP), q_phase)
        q_phase ^= 1
        s, k_stage, k_phase = scores(q, ks, zero, k_full, k_empty, k_stage, k_phase, STAGES)
        if start + KEYS > keys:
            mbarrier.wait(v_full.index(v_stage), v_phase)
            _clean(vs.index(v_stage), keys - start, KEYS, D)
        limits = within + (edge - start) if CAUSAL else within * 0 + (keys - 1 - start)
        s = _hide(s, limits, 0, True, False, ROWS, KEYS)
        highest, weight, packed = _first(s, scale, dtype, ROWS, KEYS)
        acc = gl.zeros([ROWS, D], gl.float32, sums)
        if CAUSAL:
            # By j, though it is 0: what did not change in the loop would be compared before it, needed or not.
            for j in range(0, cut):
                limit = within + (edge - start + (j + 1) * KEYS)
                acc, packed, weight, highest, k_stage, k_phase, v_stage, v_phase, turn_phase = _step(
                    q, ks, vs, k_full, k_empty, v_full, v_empty, turn, zero, acc, packed, weight, highest,
                    k_stage, k_phase, v_stage, v_phase, turn_phase, limit, scale,
                    0, True, False, GROUP, NEXT, ROWS, KEYS, STAGES, TURNS,
                )  # fmt: skip
        for _ in range(cut, first):
            acc, packed, weight, highest, k_stage, k_phase, v_stage, v_phase, turn_phase = _step(
                q, ks, vs, k_full, k_empty, v_full, v_empty, turn, zero, acc, packed, weight, highest,
                k_stage, k_phase, v_stage, v_phase, turn_phase, within, scale,
                0, False, False, GROUP, NEXT, ROWS, KEYS, STAGES, TURNS,
            )  # fmt: skip
        # The last product with Q is done: the next tile's can be loaded.
        mbarrier.arrive(q_empty.index(GROUP), count=1)
        acc, v_stage, v_phase = _last(
            packed, vs, acc, v_full, v_empty, v_stage, v_phase, operand, ROWS, KEYS, STAGES
        )
        if row + ROWS > 0:
            at = within + row
            blind = highest == LOWEST
            whole = gl.convert_layout(gl.sum(weight, 1), score_rows)
            level = gl.where(blind, float("inf"), highest + gl.log2(whole))
            gl.store(lse + head.to(gl.int64) * tokens + begin + at, level, mask=at >= 0)
            share = gl.where(blind, 0.0, 1.0 / whole)
            acc = acc * gl.expand_dims(gl.convert_layout(share, sums_rows), 1)
            if row >= 0:
                tma.store_wait(pendings=0)  # of the tile before, which the buffer still held
                o.store(acc.to(dtype))
                fence_async_shared()
                copy_out(out, [begin + row, head * D], o)
            else:
                # A tile's store would begin in the sequence before.
                own = row + gl.arange(0, ROWS, sums_rows)
                columns = head * D + gl.arange(0, D, gl.SliceLayout(0, sums))
                places = gl.expand_dims((begin + own).to(gl.int64) * (heads * D), 1) + gl.expand_dims(columns, 0)
                gl.store(plain + places, acc.to(dtype), mask=gl.expand_dims(own >= 0, 1))
        unit, told_phase = _hear(following, told, heard, told_phase)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["rows", "heads", "groups", "hold", "tokens"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, out, plain, lse, table, rows, heads, groups, hold, tokens, scale,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, then the warp groups. `plain` is `out` as a pointer, `tokens` its rows; a section of
    heads may have `hold` keys.
    """
    qs = gl.allocate_shared_memory(q.dtype, [GROUPS, ROWS, D], q.layout)
    os = gl.allocate_shared_memory(q.dtype, [GROUPS, ROWS, D], out.layout)
    ks = gl.allocate_shared_memory(q.dtype, [STAGES, KEYS, D], k.layout)
    vs = gl.allocate_shared_memory(q.dtype, [STAGES, KEYS, D], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
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
        if TURNS:  # see the dense kernel
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
                    heard, table, rows, heads, groups, hold,
                    CAUSAL, ROWS, GROUPS, KEYS, D, STAGES,
                ),
            ),
            (
                _compute,
                (
                    out, plain, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    following, told, heard, table, rows, heads, groups, hold, tokens, scale,
                    0, CAUSAL, ROWS, GROUPS, KEYS, D, STAGES, TURNS,
                ),
            ),
            (
                _compute,
                (
                    out, plain, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    following, told, heard, table, rows, heads, groups, hold, tokens, scale,
                    1, CAUSAL, ROWS, GROUPS, KEYS, D, STAGES, TURNS,
                ),
            ),
            (
                _compute,
                (
                    out, plain, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    following, told, heard, table, rows, heads, groups, hold, tokens, scale,
                    2, CAUSAL, ROWS, GROUPS, KEYS, D, STAGES, TURNS,
                ),
            ),
        ][: GROUPS + 1],
        [4, 4, 4][:GROUPS],
        [REGISTERS, REGISTERS, REGISTERS][:GROUPS],
    )  # fmt: skip


def packed(x: torch.Tensor, rows: int) -> Tiles:
    """Blocks of `rows` tokens of one head of what `fits` has approved of: head h at column h · D."""
    T, heads, D = x.shape
    return Tiles(x, [T, heads * D], [x.stride(0), 1], [rows, D], _layout(rows, D, x.dtype))


def unit(D: int) -> int:
    """Query rows of a tile, which is a unit of the list."""
    return ROWS * DIVISIONS[D].groups


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    table: torch.Tensor,
    rows: int,
    causal: bool,
) -> None:
    """Writes the output and its base-2 log-sum-exp (H, T), +inf for a row that sees nothing, from a list of units
    of `unit(D)` rows of queries. For inputs that `fits` approves of. A list is good for one call: what is taken is
    counted in it.
    """
    T, H, D = q.shape
    hold = SECTION // (2 * D * k.element_size())
    division = DIVISIONS[D]
    constants = (
        causal, ROWS, division.groups, KEYS, D, division.stages, division.turns, division.registers
    )  # fmt: skip
    with on(q):
        launch(
            _kernel, (_kernel, q.device, q.dtype, D, causal), min(rows * H, multiprocessors(q)),
            packed(q, ROWS), packed(k, KEYS), packed(v, KEYS), packed(out, ROWS), out, lse, table,
            rows, H, H // k.shape[1], hold, T, LOG2E / math.sqrt(D), *constants,
        )  # fmt: skip
