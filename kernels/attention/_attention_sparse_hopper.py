"""Block-sparse attention for Hopper in tiles of 64 or 128 columns, by two computing warp groups, in Gluon.

The schedule within a tile is that of `_attention_hopper_dealt.py`: one warp group feeds tiles through the tensor
memory accelerator, two others compute 64 rows each, at 64 columns in turns at the matrix units, and in each the
scores of the next block of keys are multiplied while the values of this one are. A third group, which the dense
kernel has at 64 columns, would have no rows with the same list: a tile of 192 rows would walk the union of two
lists, and groups with lists of their own would read K and V once per 64 rows, a byte for 64 operations.

Lists are short, and so are tiles: what lies between them counts. Programs are persistent, one a multiprocessor,
and take the next tile as they come to it, by a counter that the last one to take leaves at 0
(`_meeting.counter`); lists that differ in length even out so. A tile's first block of K is asked for before its Q,
which waits until the tile before has done with its own. Tiles come in sections of heads whose K and V fit into L2
together, the last queries first, whose lists are the longest under a causal mask. Who computes a row does not
change its numbers.

A list is in descending order, so that the causal mask can cut only its first block.

Taken for what `_attention_hopper.fits` approves of with D up to 128.
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
from ._attention_hopper_dealt import _first, _hear, _hide, _last, _step, _take, _tell

STAGES = {64: 3, 128: 2}
"""Blocks of K and of V in flight, by columns of tiles; what a smaller D leaves of them is zeros."""
TURNS = {64: True, 128: False}
"""Whether the two groups take turns at the matrix units."""
REGISTERS = 240
"""Of a thread of a computing group."""


@gluon.jit
def _tile(t, n, heads, section):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(batch·head, block of queries) of tile t."""
    head, nth = sectioned(t, n, heads, section)
    return head, n - 1 - nth


@gluon.jit
def _feed(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, following, told, heard, counter,
    lists, counts, total, n, heads, listed, groups, section,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Loads each tile's halves of Q and the listed blocks of K and V, and takes the next tile."""
    k_stage = 0
    k_phase = 1
    v_stage = 0
    v_phase = 1
    q_phase = 1
    told_phase = 1
    t = gl.program_id(0)
    while t < total:
        head, block = _tile(t, n, heads, section)
        at = head % listed * n + block
        chosen = lists + at.to(gl.int64) * n
        last = gl.maximum(gl.load(counts + at), 1) - 1
        row = (head * n + block) * KEYS
        base = head // groups * n
        key = (base + gl.load(chosen)) * KEYS
        # Keys do not wait for those who still use the queries before.
        mbarrier.wait(k_empty.index(k_stage), k_phase)
        mbarrier.expect(k_full.index(k_stage), k.block_type.nbytes)
        copy_in(k, [key, 0], k_full.index(k_stage), ks.index(k_stage))
        for i in gl.static_range(2):
            mbarrier.wait(q_empty.index(i), q_phase)
            mbarrier.expect(q_full.index(i), q.block_type.nbytes)
            copy_in(q, [row + i * ROWS, 0], q_full.index(i), qs.index(i))
        q_phase ^= 1
        for j in range(0, last + 1):
            # Before this block is waited for, so that the next one's place is known in time.
            ahead = (base + gl.load(chosen + gl.minimum(j + 1, last))) * KEYS
            k_stage, k_phase = onward(k_stage, k_phase, STAGES)
            mbarrier.wait(v_empty.index(v_stage), v_phase)
            mbarrier.expect(v_full.index(v_stage), v.block_type.nbytes)
            copy_in(v, [key, 0], v_full.index(v_stage), vs.index(v_stage))
            v_stage, v_phase = onward(v_stage, v_phase, STAGES)
            key = ahead
            if j < last:
                mbarrier.wait(k_empty.index(k_stage), k_phase)
                mbarrier.expect(k_full.index(k_stage), k.block_type.nbytes)
                copy_in(k, [key, 0], k_full.index(k_stage), ks.index(k_stage))
        t = _take(counter, total)
        told_phase = _tell(t, following, told, heard, told_phase)


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, following, told, heard,
    lists, counts, total, n, heads, listed, section, scale,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One half of every tile: online softmax in base 2 over the listed blocks of keys. In the loop K runs one
    block ahead of V. A list has a block at least, which may not count.
    """
    dtype: gl.constexpr = out.dtype
    score: gl.constexpr = product_layout(KEYS)
    sums: gl.constexpr = product_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    score_rows: gl.constexpr = gl.SliceLayout(1, score)
    sums_rows: gl.constexpr = gl.SliceLayout(1, sums)
    q = qs.index(HALF)
    o = os.index(HALF)
    zero = gl.zeros([ROWS, KEYS], gl.float32, score)
    rows = gl.arange(0, ROWS, score_rows)
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    q_phase = 0
    turn_phase = 1 - HALF
    told_phase = 0
    t = gl.program_id(0)
    while t < total:
        head, block = _tile(t, n, heads, section)
        at = head % listed * n + block
        count = gl.load(counts + at)
        # How far this half's first row is from the first key.
        below = HALF * ROWS
        if CAUSAL:
            below += (block - gl.load(lists + at.to(gl.int64) * n)) * KEYS
        mbarrier.wait(q_full.index(HALF), q_phase)
        q_phase ^= 1
        s, k_stage, k_phase = scores(q, ks, zero, k_full, k_empty, k_stage, k_phase, STAGES)
        if CAUSAL:
            s = _hide(s, rows + below, 0, True, False, ROWS, KEYS)
        highest, weight, packed = _first(s, scale, dtype, ROWS, KEYS)
        acc = gl.zeros([ROWS, D], gl.float32, sums)
        for _ in range(1, count):
            acc, packed, weight, highest, k_stage, k_phase, v_stage, v_phase, turn_phase = _step(
                q, ks, vs, k_full, k_empty, v_full, v_empty, turn, zero, acc, packed, weight, highest,
                k_stage, k_phase, v_stage, v_phase, turn_phase, rows, scale,
                0, False, False, HALF, 1 - HALF, ROWS, KEYS, STAGES, TURNS,
            )  # fmt: skip
        # The last product with Q is done: the next tile's can be loaded.
        mbarrier.arrive(q_empty.index(HALF), count=1)
        acc, v_stage, v_phase = _last(
            packed, vs, acc, v_full, v_empty, v_stage, v_phase, operand, ROWS, KEYS, STAGES
        )
        whole = gl.convert_layout(gl.sum(weight, 1), score_rows)
        share = gl.where(highest == LOWEST, 0.0, 1.0 / whole)
        acc = acc * gl.expand_dims(gl.convert_layout(share, sums_rows), 1)
        acc = gl.where(count > 0, acc, 0.0)
        tma.store_wait(pendings=0)  # of the tile before, which the buffer still held
        o.store(acc.to(dtype))
        fence_async_shared()
        copy_out(out, [(head * n + block) * KEYS + HALF * ROWS, 0], o)
        t, told_phase = _hear(following, told, heard, told_phase)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["counter", "total", "n", "heads", "listed", "groups", "section"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, out, lists, counts, counter, total, n, heads, listed, groups, section, scale,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, then the warp groups. `n` blocks a head, `total` = heads · n, heads B·H; lists
    (listed, n, n) in descending order, counts (listed, n), listed 1, H or B·H.
    """
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
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(told, count=1)
    mbarrier.init(heard, count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        if TURNS:  # see `_attention_hopper_dealt.py`
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
                    counter, lists, counts, total, n, heads, listed, groups, section,
                    ROWS, KEYS, STAGES,
                ),
            ),
            (
                _compute,
                (
                    out, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, following, told,
                    heard, lists, counts, total, n, heads, listed, section, scale,
                    0, CAUSAL, ROWS, KEYS, D, STAGES, TURNS,
                ),
            ),
            (
                _compute,
                (
                    out, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, following, told,
                    heard, lists, counts, total, n, heads, listed, section, scale,
                    1, CAUSAL, ROWS, KEYS, D, STAGES, TURNS,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    causal: bool,
    section: int,
) -> None:
    """Writes the output over lists (heads, n, n) of blocks of keys in descending order, of which counts (heads, n)
    are read; heads is 1, H or B·H. `section`: query heads whose tiles are taken before others' are. For inputs
    that `_attention_hopper.fits` approves of for the columns of STAGES.
    """
    B, H, S, D = q.shape
    n = S // KEYS
    total = B * H * n
    width = power_of_2(D)
    constants = (causal, ROWS, KEYS, width, STAGES[width], TURNS[width], REGISTERS)
    with on(q):
        launch(
            _kernel, (_kernel, q.device, q.dtype, width, causal), min(total, multiprocessors(q)),
            tiles(q, ROWS), tiles(k, KEYS), tiles(v, KEYS), tiles(out, ROWS), lists, counts, counter(q),
            total, n, B * H, lists.shape[0], H // k.shape[1], section, LOG2E / math.sqrt(D), *constants,
        )  # fmt: skip
