"""The forward pass of attention in E4M3 for Hopper (compute capability 9.0), in Gluon.

The schedule is that of `_attention_hopper.py`: a feeding warp group, two computing ones of 64 query rows, the next
block's scores multiplied while this block's values are, persistent programs over pairs of query blocks. What 8-bit
operands change:

* V is read as (B, Hkv, D, S): an 8-bit operand's summed dimension must be contiguous in shared memory.
* A thread has the scores of columns 2t, 2t + 1, 2t + 8, 2t + 9 of every 16 (t its place among four), and as an
  operand of the next product must hold keys 4t to 4t + 3. So that these are the same numbers, the rows of K stand
  in shared memory in that order: its descriptor gives 16 keys as (4, 2, 2), the two outer dimensions exchanged,
  and the tensor memory accelerator permutes. No number moves between threads; FlashAttention-3 shuffles.
* Each block's product with V starts from zero and is added to the sum of the earlier ones in fp32, by the
  multiply-add that scales that sum: the matrix units themselves keep about 14 bits.

Taken for D of 64 or 128, S a multiple of 256 and at least 1024, bf16 or fp16 output, contiguous q and k, v with
contiguous sequences: `fits`.
"""

from __future__ import annotations

import functools
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

from . import _attention_hopper
from ._attention_hopper import KEYS, LOG2E, ROWS, Tiles, _exp2, _steps, launch, pin
from ._common import multiprocessors, on

OFFSET = gl.constexpr(8.0)
"""As in `attention_fp8.py`, and so is the next."""
LEAST_SCALE = gl.constexpr(1e-37)


@dataclass(frozen=True)
class Schedule:
    """Blocks of K and V in flight, whether the two groups take turns at the matrix units, the share of
    exponentials that the FMA units compute (one of so many, 0: none), whether a group's exponentials are held
    under its own product with V, and registers.
    """

    stages: int
    turns: bool
    share: int = 8
    pinned: bool = True
    registers: int = 240


SCHEDULES = {
    (64, True): Schedule(4, True),
    (64, False): Schedule(4, True),
    (128, True): Schedule(3, True),
    (128, False): Schedule(3, True),
}
"""By head dimension and whether causal. Exponentials take as long as both products at D = 128 and twice as long at
D = 64 (16 a cycle and multiprocessor against 8192 operations), so that some go to the FMA units. Compiled for
sm_90a: no spills, registers up to R237 at D = 128, where a group's step is 526 instructions."""


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether `forward` takes these, with v (B, Hkv, D, S); the device is not looked at."""
    _, _, S, D = q.shape
    return (
        (D, True) in SCHEDULES
        and S >= 1024
        and S % (2 * KEYS) == 0
        and q.numel() // D < 1 << 31
        and out.dtype in (torch.bfloat16, torch.float16)
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k, v))
    )


@gluon.jit
def _unit(step, units, n, CAUSAL: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(batch·head, query block, blocks of keys) of a program's step: two steps make a unit."""
    unit = gl.program_id(0) + step // 2 * gl.num_programs(0)
    pairs = n // 2
    place = unit // pairs
    first = unit % pairs
    block = first if step % 2 == 1 else n - 1 - first
    count = n
    if CAUSAL:
        count = block + 1
    return place, block, count


@gluon.jit
def _feed(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, units, n, groups,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Loads each tile's two halves of Q, then its blocks of K and V, the last keys first."""
    stage = 0
    phase = 1
    q_phase = 1
    for step in range(0, _steps(units)):
        place, block, count = _unit(step, units, n, CAUSAL)
        row = (place * n + block) * KEYS
        for i in gl.static_range(2):
            mbarrier.wait(q_empty.index(i), q_phase)
            mbarrier.expect(q_full.index(i), q.block_type.nbytes)
            tma.async_copy_global_to_shared(q, [row + i * ROWS, 0], q_full.index(i), qs.index(i))
        q_phase ^= 1
        head = place // groups
        for j in range(0, count):
            key = (count - 1 - j) * KEYS
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k, [(head * n * KEYS + key) // 16, 0, 0, 0, 0], k_full.index(stage), ks.index(stage)
            )
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
            tma.async_copy_global_to_shared(v, [head * D, key], v_full.index(stage), vs.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _pack(p, ROWS: gl.constexpr, KEYS: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(ROWS, KEYS / 16, 4) words of four weights in E4M3: those of keys 4t to 4t + 3 of each 16.

    Columns are (16, 2, 4, 2) where keys are (16, 4, 2, 2). In words, because a loop carries 8-bit numbers in a
    register each, and packs them again for the product.
    """
    p = p.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    even, odd = gl.split(p)
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;"
        " mov.b32 $0, {l, h}; }",
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _operand(  # type: ignore[no-untyped-def]  # Triton's types are its own
    words, ROWS: gl.constexpr, KEYS: gl.constexpr, BYTES: gl.constexpr, OPERAND: gl.constexpr
):
    """The words as weights (ROWS, KEYS): each stands four times, for its four bytes, and is taken once."""
    words = gl.expand_dims(gl.convert_layout(words, gl.SliceLayout(3, BYTES), assert_trivial=True), 3)
    four = words + gl.zeros([ROWS, KEYS // 16, 4, 4], gl.int32, BYTES)
    p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [four], dtype=gl.int8, is_pure=True, pack=4)
    p = p.to(gl.float8e4nv, bitcast=True).reshape([ROWS, KEYS])
    return gl.convert_layout(p, OPERAND, assert_trivial=True)


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q_scale, k_scale, v_scale, out, qs, ks, vs, os,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, units, n, groups, scale,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, SHARE: gl.constexpr, PINNED: gl.constexpr,
):  # fmt: skip
    """One half of every tile: online softmax in base 2 over blocks of keys, the last keys first.

    Only the first block, on the diagonal, needs the causal mask. In the loop K runs one block ahead of V. `acc` is
    the sum of the blocks before the one whose product with V is under way, on the scale of the one before that;
    `shrink` is what brings it to the scale of the one under way.
    """
    score: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 32]
    )
    total: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 32])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=total, k_width=4)
    score_rows: gl.constexpr = gl.SliceLayout(1, score)
    total_rows: gl.constexpr = gl.SliceLayout(1, total)
    q = qs.index(HALF)
    o = os.index(HALF)
    zero = gl.zeros([ROWS, KEYS], gl.float32, score)
    nothing = gl.zeros([ROWS, D], gl.float32, total)
    rows = gl.arange(0, ROWS, score_rows)
    columns = gl.arange(0, KEYS, gl.SliceLayout(0, score))
    in_fours = gl.zeros([ROWS, KEYS], gl.int8, operand).reshape([ROWS, KEYS // 16, 4, 4])
    BYTES: gl.constexpr = in_fours.type.layout
    # The key of each column.
    columns = columns // 16 * 16 + columns % 8 // 2 * 4 + columns % 16 // 8 * 2 + columns % 2
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    q_phase = 0
    turn_phase = 1 - HALF
    for step in range(0, _steps(units)):
        place, block, count = _unit(step, units, n, CAUSAL)
        factor = gl.load(q_scale + place) * gl.load(k_scale + place // groups) * scale
        factor = gl.where(factor < LEAST_SCALE, LEAST_SCALE, factor)  # and NaN stays one
        mbarrier.wait(q_full.index(HALF), q_phase)
        q_phase ^= 1
        mbarrier.wait(k_full.index(k_stage), k_phase)
        s = warpgroup_mma(
            q, ks.index(k_stage).reshape([KEYS, D]).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        k_stage += 1
        if k_stage == STAGES:
            k_stage = 0
            k_phase ^= 1
        if CAUSAL:
            visible = gl.expand_dims(rows + HALF * ROWS, 1) >= gl.expand_dims(columns, 0)
            s = gl.where(visible, s, float("-inf"))
        highest = gl.max(s, 1) * factor
        p = _exp2(s * factor - gl.expand_dims(highest - OFFSET, 1), SHARE)
        weight = gl.sum(p, 1)
        words = _pack(p, ROWS, KEYS)
        acc = nothing
        shrink = gl.full([ROWS], 1.0, gl.float32, score_rows)
        for _ in range(1, count):
            mbarrier.wait(k_full.index(k_stage), k_phase)
            if TURNS:
                mbarrier.wait(turn.index(HALF), turn_phase)
                turn_phase ^= 1
            s = warpgroup_mma(
                q, ks.index(k_stage).reshape([KEYS, D]).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            weights = _operand(words, ROWS, KEYS, BYTES, operand)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            fresh = warpgroup_mma(
                weights, vs.index(v_stage).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            if TURNS:
                mbarrier.arrive(turn.index(1 - HALF), count=1)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(k_stage), count=1)
            raised = gl.maximum(highest, gl.max(s, 1) * factor)
            p = _exp2(s * factor - gl.expand_dims(raised - OFFSET, 1), SHARE)
            following = gl.exp2(highest - raised)
            weight = weight * following + gl.sum(p, 1)
            if PINNED:
                weight = pin(weight)
            highest = raised
            fresh = warpgroup_mma_wait(0, deps=[fresh])
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, total_rows), 1) + fresh
            shrink = following
            words = _pack(p, ROWS, KEYS)
            k_stage += 1
            if k_stage == STAGES:
                k_stage = 0
                k_phase ^= 1
            v_stage += 1
            if v_stage == STAGES:
                v_stage = 0
                v_phase ^= 1
        # The last product with Q is done: the next tile's can be loaded.
        mbarrier.arrive(q_empty.index(HALF), count=1)
        weights = _operand(words, ROWS, KEYS, BYTES, operand)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        fresh = warpgroup_mma(weights, vs.index(v_stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        fresh = warpgroup_mma_wait(0, deps=[fresh])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, total_rows), 1) + fresh
        v_stage += 1
        if v_stage == STAGES:
            v_stage = 0
            v_phase ^= 1
        share = gl.load(v_scale + place // groups) / weight
        acc = acc * gl.expand_dims(gl.convert_layout(share, total_rows), 1)
        tma.store_wait(pendings=0)  # of the tile before, which the buffer still held
        o.store(acc.to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [(place * n + block) * KEYS + HALF * ROWS, 0], o)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["units", "n", "groups"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, q_scale, k_scale, v_scale, out, units, n, groups, scale,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, SHARE: gl.constexpr, PINNED: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, then the three warp groups. `n` is S / KEYS, `units` B·H·n / 2."""
    qs = gl.allocate_shared_memory(q.dtype, [2, ROWS, D], q.layout)
    os = gl.allocate_shared_memory(out.dtype, [2, ROWS, D], out.layout)
    ks = gl.allocate_shared_memory(k.dtype, [STAGES, KEYS // 16, 2, 4, 2, D], k.layout)
    vs = gl.allocate_shared_memory(v.dtype, [STAGES, D, KEYS], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
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
                    q, k, v, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    units, n, groups, CAUSAL, ROWS, KEYS, D, STAGES,
                ),
            ),
            (
                _compute,
                (
                    q_scale, k_scale, v_scale, out, qs, ks, vs, os,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    units, n, groups, scale, 0, CAUSAL, ROWS, KEYS, D, STAGES, TURNS, SHARE, PINNED,
                ),
            ),
            (
                _compute,
                (
                    q_scale, k_scale, v_scale, out, qs, ks, vs, os,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    units, n, groups, scale, 1, CAUSAL, ROWS, KEYS, D, STAGES, TURNS, SHARE, PINNED,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


@functools.cache
def _layout(block: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.float8e4nv)


def _rows(x: torch.Tensor, rows: int) -> Tiles:
    """Blocks of `rows` rows, each as long as the last dimension or KEYS, of a contiguous tensor in E4M3."""
    width = x.shape[-1]
    block = (rows, min(width, KEYS))
    return Tiles(x, [x.numel() // width, width], [width, 1], list(block), _layout(block))


def _keys(k: torch.Tensor) -> Tiles:
    """Blocks of KEYS keys in the order of the columns of scores (module docstring)."""
    D = k.shape[-1]
    block = (KEYS // 16, 2, 4, 2, D)
    return Tiles(k, [k.numel() // D // 16, 2, 4, 2, D], [16 * D, 2 * D, 4 * D, D, 1], list(block), _layout(block))


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    out: torch.Tensor,
    causal: bool,
    schedule: Schedule | None = None,
) -> None:
    """Writes the output; v is (B, Hkv, D, S). For inputs that `fits` approves of."""
    B, H, S, D = q.shape
    n = S // KEYS
    units = B * H * n // 2
    schedule = schedule or SCHEDULES[D, causal]
    with on(q):
        launch(
            _kernel, (_kernel, q.device, out.dtype, D, causal, schedule), min(units, multiprocessors(q)),
            _rows(q, ROWS), _keys(k), _rows(v, D), q_scale, k_scale, v_scale, _attention_hopper.tiles(out, ROWS),
            units, n, H // k.shape[1], LOG2E / math.sqrt(D),
            causal, ROWS, KEYS, D, schedule.stages, schedule.turns, schedule.share, schedule.pinned,
            schedule.registers,
        )  # fmt: skip
