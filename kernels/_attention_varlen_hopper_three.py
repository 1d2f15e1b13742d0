"""The forward pass of attention over packed sequences for Hopper in tiles of 64 columns, by three computing warp
groups, in Gluon.

The schedule is that of `_attention_hopper_three.py`, for the same reason: at 64 columns a block's exponentials
take the exponential unit about as long as its products take the matrix units, and a third group has work for both
while the others look for maxima, add up and round, as in FlashAttention-3's tiles of 192 rows (Shah et al., arXiv
2407.08608). One warp group feeds tiles through the tensor memory accelerator, the others compute 64 rows each and
take turns at the matrix units, with the scores of the next block of keys under the values of this one.

A unit of work is one tile: 192 query rows of one head of one sequence. Tiles are aligned to their sequence's end,
as the causal mask is: the first of a sequence may begin before it, where what it reads is computed and not stored,
and a group whose rows all lie there computes one block of keys. So no row sees a key beyond its sequence under a
causal mask, and the rows that are missing are missing where keys are fewest. Blocks of keys start where the
sequence does; the last is read beyond it, where keys are hidden and values overwritten with zeros, as in
`_attention_varlen_hopper.py`.

Each group starts at its own diagonal: blocks of keys that all of its rows lie before are released unread. Its
first block is masked, and the next one where the diagonal of its 64 rows lies across two.

Programs are persistent, one a multiprocessor, and take the next unit as they come to it, by a counter in the list
of `attention_varlen.listed`. That has sequences by their keys, the most first; a sequence's tiles come in sections
of heads whose K and V fit into L2 together, of each the longest first. Who computes a row does not change its
numbers.

Taken for what `_attention_varlen_hopper.fits` approves of with D = 64.
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

from ._attention_hopper import KEYS, LOG2E, LOWEST, ROWS, _pack, _unpack, launch, onward, sectioned
from ._attention_hopper_three import GROUPS, REGISTERS, STAGES, WIDTH, _hide, _pass_over, _step
from ._attention_varlen_hopper import FIELDS, _clean, packed
from ._common import multiprocessors, on

UNIT = GROUPS * ROWS
"""Rows of a tile, which is a unit of the list."""
SECTION = 24 << 20
"""Bytes of K and V that a section of heads may have, to stay in L2."""


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
        tma.async_copy_global_to_shared(k, [key, key_column], k_full.index(k_stage), ks.index(k_stage))
        for i in gl.static_range(GROUPS):
            mbarrier.wait(q_empty.index(i), q_phase)
            mbarrier.expect(q_full.index(i), q.block_type.nbytes)
            tma.async_copy_global_to_shared(q, [row + i * ROWS, column], q_full.index(i), qs.index(i))
        q_phase ^= 1
        for j in range(0, last + 1):
            k_stage, k_phase = onward(k_stage, k_phase, STAGES)
            mbarrier.wait(v_empty.index(v_stage), v_phase)
            mbarrier.expect(v_full.index(v_stage), v.block_type.nbytes)
            tma.async_copy_global_to_shared(v, [key, key_column], v_full.index(v_stage), vs.index(v_stage))
            v_stage, v_phase = onward(v_stage, v_phase, STAGES)
            key = key - KEYS
            if j < last:
                mbarrier.wait(k_empty.index(k_stage), k_phase)
                mbarrier.expect(k_full.index(k_stage), k.block_type.nbytes)
                tma.async_copy_global_to_shared(k, [key, key_column], k_full.index(k_stage), ks.index(k_stage))
        unit = gl.num_programs(0) + gl.atomic_add(table + rows * FIELDS + 1, 1, sem="relaxed")
        mbarrier.wait(heard, told_phase)
        told_phase ^= 1
        following.store(gl.full([1], unit, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
        mbarrier.arrive(told, count=1)


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, plain, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
    following, told, heard, table, rows, heads, groups, hold, tokens, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, KEYS: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One group's rows of every tile: online softmax in base 2 over blocks of keys, the last keys first. In the
    loop K runs one block ahead of V.
    """
    NEXT: gl.constexpr = (GROUP + 1) % GROUPS
    dtype: gl.constexpr = out.dtype
    score: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16]
    )
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
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
                GROUP, NEXT, STAGES,
            )  # fmt: skip
        mbarrier.wait(q_full.index(GROUP), q_phase)
        q_phase ^= 1
        mbarrier.wait(k_full.index(k_stage), k_phase)
        s = warpgroup_mma(q, ks.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        k_stage, k_phase = onward(k_stage, k_phase, STAGES)
        if start + KEYS > keys:
            mbarrier.wait(v_full.index(v_stage), v_phase)
            _clean(vs.index(v_stage), keys - start, KEYS, D)
        limits = within + (edge - start) if CAUSAL else within * 0 + (keys - 1 - start)
        s = _hide(s, limits, 0, True, False, ROWS, KEYS)
        highest = gl.maximum(gl.max(s, 1) * scale, LOWEST)
        p = gl.exp2(s * scale - gl.expand_dims(highest, 1))
        weight = gl.sum(p, 1)
        packed = _pack(p, dtype, ROWS, KEYS, operand, True)
        acc = gl.zeros([ROWS, D], gl.float32, sums)
        if CAUSAL:
            # By j, though it is 0: what did not change in the loop would be compared before it, needed or not.
            for j in range(0, cut):
                limit = within + (edge - start + (j + 1) * KEYS)
                acc, packed, weight, highest, k_stage, k_phase, v_stage, v_phase, turn_phase = _step(
                    q, ks, vs, k_full, k_empty, v_full, v_empty, turn, zero, acc, packed, weight, highest,
                    k_stage, k_phase, v_stage, v_phase, turn_phase, limit, scale,
                    0, True, False, GROUP, NEXT, ROWS, KEYS, STAGES,
                )  # fmt: skip
        for _ in range(cut, first):
            acc, packed, weight, highest, k_stage, k_phase, v_stage, v_phase, turn_phase = _step(
                q, ks, vs, k_full, k_empty, v_full, v_empty, turn, zero, acc, packed, weight, highest,
                k_stage, k_phase, v_stage, v_phase, turn_phase, within, scale,
                0, False, False, GROUP, NEXT, ROWS, KEYS, STAGES,
            )  # fmt: skip
        # The last product with Q is done: the next tile's can be loaded.
        mbarrier.arrive(q_empty.index(GROUP), count=1)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        weights = _unpack(packed, dtype, ROWS, KEYS, operand, True)
        acc = warpgroup_mma(weights, vs.index(v_stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        v_stage, v_phase = onward(v_stage, v_phase, STAGES)
        if row + ROWS > 0:
            at = within + row
            blind = highest == LOWEST
            level = gl.where(blind, float("inf"), highest + gl.log2(weight))
            gl.store(lse + head.to(gl.int64) * tokens + begin + at, level, mask=at >= 0)
            share = gl.where(blind, 0.0, 1.0 / weight)
            acc = acc * gl.expand_dims(gl.convert_layout(share, sums_rows), 1)
            if row >= 0:
                tma.store_wait(pendings=0)  # of the tile before, which the buffer still held
                o.store(acc.to(dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(out, [begin + row, head * D], o)
            else:
                # A tile's store would begin in the sequence before.
                own = row + gl.arange(0, ROWS, sums_rows)
                columns = head * D + gl.arange(0, D, gl.SliceLayout(0, sums))
                places = gl.expand_dims((begin + own).to(gl.int64) * (heads * D), 1) + gl.expand_dims(columns, 0)
                gl.store(plain + places, acc.to(dtype), mask=gl.expand_dims(own >= 0, 1))
        mbarrier.wait(told, told_phase)
        told_phase ^= 1
        unit = gl.max(following.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        mbarrier.arrive(heard, count=1)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["rows", "heads", "groups", "hold", "tokens"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, out, plain, lse, table, rows, heads, groups, hold, tokens, scale,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
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
    # Always waited for, as the dense kernel's: see there.
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
                    q, k, v, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, following, told, heard,
                    table, rows, heads, groups, hold, CAUSAL, ROWS, GROUPS, KEYS, D, STAGES,
                ),
            ),
            (
                _compute,
                (
                    out, plain, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    following, told, heard, table, rows, heads, groups, hold, tokens, scale,
                    0, CAUSAL, ROWS, GROUPS, KEYS, D, STAGES,
                ),
            ),
            (
                _compute,
                (
                    out, plain, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    following, told, heard, table, rows, heads, groups, hold, tokens, scale,
                    1, CAUSAL, ROWS, GROUPS, KEYS, D, STAGES,
                ),
            ),
            (
                _compute,
                (
                    out, plain, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    following, told, heard, table, rows, heads, groups, hold, tokens, scale,
                    2, CAUSAL, ROWS, GROUPS, KEYS, D, STAGES,
                ),
            ),
        ],
        [4, 4, 4],
        [REGISTERS, REGISTERS, REGISTERS],
    )  # fmt: skip


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
    of `UNIT` rows of queries. For inputs that `_attention_varlen_hopper.fits` approves of, of WIDTH. A list is
    good for one call: what is taken is counted in it.
    """
    T, H, D = q.shape
    hold = SECTION // (2 * D * k.element_size())
    with on(q):
        launch(
            _kernel, (_kernel, q.device, q.dtype, causal), min(rows * H, multiprocessors(q)),
            packed(q, ROWS), packed(k, KEYS), packed(v, KEYS), packed(out, ROWS), out, lse, table,
            rows, H, H // k.shape[1], hold, T, LOG2E / math.sqrt(D),
            causal, ROWS, GROUPS, KEYS, WIDTH, STAGES, REGISTERS,
        )  # fmt: skip
