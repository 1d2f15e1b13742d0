"""The forward pass of attention for Hopper (compute capability 9.0), in Gluon.

The schedule is FlashAttention-3's (Shah et al., arXiv 2407.08608), as far as Gluon has the means: one warp
group feeds tiles of Q, K and V through the tensor memory accelerator, two others compute 64 rows each, and
within each of them the scores of the next block of keys are multiplied while the values of this one are.

Programs are persistent: one a multiprocessor, each with its share of the work. A unit of work is a pair of
query blocks of one head, the first with the last, the second with the last but one: under a causal mask all
units are equally long. Consecutive units belong to one head, so that its K and V stay in L2.

With SPARSE the blocks of keys of a query block come from a list (`attention_sparse.py`).

Taken for bf16 and fp16, D of 64 or 128, S a multiple of 256 and at least 1024, contiguous tensors: `fits`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ._common import multiprocessors, on

LOG2E = 1.4426950408889634
ROWS = 64
"""Query rows of one computing warp group; a tile has two of them."""
KEYS = 128
"""Keys of one step; as many as a tile has rows, so that the causal mask cuts one block of keys only."""


@dataclass(frozen=True)
class Schedule:
    """Blocks of K and V in flight, whether the two groups take turns at the matrix units, the share of
    exponentials that the FMA units compute (one of so many, 0: none), and registers.
    """

    stages: int
    turns: bool
    share: int = 0
    registers: int = 240


SCHEDULES = {
    (64, True): Schedule(3, True, share=8),
    (64, False): Schedule(3, True),
    (128, True): Schedule(2, False),
    (128, False): Schedule(2, True),
}
"""By head dimension and whether causal, as measured on an H200: taking turns keeps one group's exponentials
under the other's products, but at D = 128 the diagonal's uneven work makes the waiting cost more. One
exponential of eight on the FMA units took D = 64 causal from 0.954 to 1.013 of cuDNN's speed (B = 2, H = 32,
S = 8192) and cost the other three 1 to 5 %."""

SPARSE_SCHEDULES = {
    (64, True): Schedule(3, True),
    (64, False): Schedule(3, True),
    (128, True): Schedule(2, False),
    (128, False): Schedule(2, True),
}
"""The same for lists of blocks."""

SPARSE_PROGRAMS = 4
"""Programs a multiprocessor over lists, whose lengths differ: one that is done early takes the next."""


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `forward` takes these inputs; the device is not looked at."""
    _, _, S, D = q.shape
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and (D, True) in SCHEDULES
        and S >= 1024
        and S % (2 * KEYS) == 0
        and q.numel() // D < 1 << 31
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k, v))
    )


@gluon.constexpr_function
def _exp2_of(count):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """PTX of 2^x of `count` numbers: the last as a polynomial, the others on the exponential unit."""
    unit = "".join(f"ex2.approx.ftz.f32 ${i}, ${count + i};" for i in range(count - 1))
    return (
        f"{{ .reg .f32 t, n, f, p; {unit} max.f32 f, ${2 * count - 1}, 0fC2FC0000; add.rn.f32 t, f, 0f4B400000;"
        " sub.rn.f32 n, t, 0f4B400000; sub.rn.f32 f, f, n; fma.rn.f32 p, f, 0f3D61A4AC, 0f3E786D32;"
        " fma.rn.f32 p, p, f, 0f3F317A8D; fma.rn.f32 p, p, f, 0f3F7FFB58; .reg .b32 i, j;"
        f" mov.b32 i, t; shl.b32 i, i, 23; mov.b32 j, p; add.s32 j, i, j; mov.b32 ${count - 1}, j; }}"
    )


@gluon.constexpr_function
def _constraints_of(count):  # type: ignore[no-untyped-def]  # Triton's types are its own
    return ",".join(["=f"] * count + ["f"] * count)


@gluon.jit
def _exp2(x, SHARE: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """2^x of x ≤ 0. One of SHARE numbers is computed by the FMA units instead of the exponential unit, which
    at D = 64 is as busy as the matrix units; 0: none.

    That one is split into an integer, added to the exponent's bits, and a fraction in [-½, ½], whose power is
    a polynomial of degree 3 (relative error 8e-5, a fiftieth of bf16's rounding): FlashAttention-4's remedy.
    """
    if SHARE == 0:
        p = gl.exp2(x)
    else:
        p = gl.inline_asm_elementwise(
            _exp2_of(SHARE), _constraints_of(SHARE), [x], dtype=gl.float32, is_pure=True, pack=SHARE
        )
    return p


@gluon.jit
def _unit(  # type: ignore[no-untyped-def]  # Triton's types are its own
    step, units, n, lists, counts, heads, CAUSAL: gl.constexpr, SPARSE: gl.constexpr
):
    """(batch·head, query block, blocks of keys, its list and how many of it count) of a program's step: two steps
    make a unit. A list has a block at least, which may not count.
    """
    unit = gl.program_id(0) + step // 2 * gl.num_programs(0)
    pairs = n // 2
    place = unit // pairs
    first = unit % pairs
    block = first if step % 2 == 1 else n - 1 - first
    count = n
    if CAUSAL:
        count = block + 1
    listed = count
    if SPARSE:
        at = place % heads * n + block
        lists += at.to(gl.int64) * n
        listed = gl.load(counts + at)
        count = gl.maximum(listed, 1)
    return place, block, count, lists, listed


@gluon.jit
def _steps(units):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Steps of this program."""
    return 2 * ((units - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0))


@gluon.jit
def _feed(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, units, n, groups,
    lists, counts, heads,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, SPARSE: gl.constexpr,
):  # fmt: skip
    """Loads each tile's two halves of Q, then its blocks of K and V, the last keys first."""
    stage = 0
    phase = 1
    q_phase = 1
    for step in range(0, _steps(units)):
        place, block, count, chosen, _ = _unit(step, units, n, lists, counts, heads, CAUSAL, SPARSE)
        row = (place * n + block) * KEYS
        for i in gl.static_range(2):
            mbarrier.wait(q_empty.index(i), q_phase)
            mbarrier.expect(q_full.index(i), q.block_type.nbytes)
            tma.async_copy_global_to_shared(q, [row + i * ROWS, 0], q_full.index(i), qs.index(i))
        q_phase ^= 1
        if SPARSE:
            last = place // groups * n
            following = gl.load(chosen)
        else:
            last = (place // groups * n + count - 1) * KEYS
            following = 0
        for j in range(0, count):
            if SPARSE:
                key = (last + following) * KEYS
                # Before this block is waited for, so that the next one's place is known in time.
                following = gl.load(chosen + gl.minimum(j + 1, count - 1))
            else:
                key = last - j * KEYS
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
            tma.async_copy_global_to_shared(k, [key, 0], k_full.index(stage), ks.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
            tma.async_copy_global_to_shared(v, [key, 0], v_full.index(stage), vs.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, units, n, scale,
    lists, counts, heads,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, SHARE: gl.constexpr, SPARSE: gl.constexpr,
):  # fmt: skip
    """One half of every tile: online softmax in base 2 over blocks of keys, the last keys first.

    Only the first block, on the diagonal unless a list leaves that out, needs the causal mask. In the loop K runs
    one block ahead of V.
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
    rows = gl.arange(0, ROWS, score_rows)
    columns = gl.arange(0, KEYS, gl.SliceLayout(0, score))
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    q_phase = 0
    turn_phase = 1 - HALF
    for step in range(0, _steps(units)):
        place, block, count, chosen, listed = _unit(step, units, n, lists, counts, heads, CAUSAL, SPARSE)
        below = HALF * ROWS
        if SPARSE and CAUSAL:
            below += (block - gl.load(chosen)) * KEYS
        mbarrier.wait(q_full.index(HALF), q_phase)
        q_phase ^= 1
        mbarrier.wait(k_full.index(k_stage), k_phase)
        s = warpgroup_mma(q, ks.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        k_stage += 1
        if k_stage == STAGES:
            k_stage = 0
            k_phase ^= 1
        if CAUSAL:
            visible = gl.expand_dims(rows + below, 1) >= gl.expand_dims(columns, 0)
            s = gl.where(visible, s, float("-inf"))
        highest = gl.max(s, 1) * scale
        p = _exp2(s * scale - gl.expand_dims(highest, 1), SHARE)
        weight = gl.sum(p, 1)
        weights = gl.convert_layout(p.to(dtype), operand)
        acc = gl.zeros([ROWS, D], gl.float32, total)
        for _ in range(1, count):
            mbarrier.wait(k_full.index(k_stage), k_phase)
            if TURNS:
                mbarrier.wait(turn.index(HALF), turn_phase)
                turn_phase ^= 1
            s = warpgroup_mma(q, ks.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            acc = warpgroup_mma(weights, vs.index(v_stage), acc, is_async=True)
            if TURNS:
                mbarrier.arrive(turn.index(1 - HALF), count=1)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(k_stage), count=1)
            raised = gl.maximum(highest, gl.max(s, 1) * scale)
            p = _exp2(s * scale - gl.expand_dims(raised, 1), SHARE)
            shrink = gl.exp2(highest - raised)
            weight = weight * shrink + gl.sum(p, 1)
            highest = raised
            acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, total_rows), 1)
            weights = gl.convert_layout(p.to(dtype), operand)
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
        mbarrier.wait(v_full.index(v_stage), v_phase)
        acc = warpgroup_mma(weights, vs.index(v_stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        v_stage += 1
        if v_stage == STAGES:
            v_stage = 0
            v_phase ^= 1
        row = (place * n + block) * KEYS + HALF * ROWS
        if not SPARSE:
            gl.store(lse + row + rows, highest + gl.log2(weight))
        acc = acc * gl.expand_dims(gl.convert_layout(1.0 / weight, total_rows), 1)
        if SPARSE:
            acc = gl.where(listed > 0, acc, 0.0)
        tma.store_wait(pendings=0)  # of the tile before, which the buffer still held
        o.store(acc.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [row, 0], o)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["units", "n", "groups", "heads"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, out, lse, lists, counts, units, n, groups, heads, scale,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, SHARE: gl.constexpr, REGISTERS: gl.constexpr,
    SPARSE: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, then the three warp groups. `n` is S / KEYS, `units` B·H·n / 2.

    With SPARSE: lists (heads, n, n) in descending order, counts (heads, n), heads 1, H or B·H; no `lse`.
    """
    qs = gl.allocate_shared_memory(q.dtype, [2, ROWS, D], q.layout)
    os = gl.allocate_shared_memory(q.dtype, [2, ROWS, D], out.layout)
    ks = gl.allocate_shared_memory(q.dtype, [STAGES, KEYS, D], k.layout)
    vs = gl.allocate_shared_memory(q.dtype, [STAGES, KEYS, D], v.layout)
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
                    units, n, groups, lists, counts, heads, CAUSAL, ROWS, KEYS, STAGES, SPARSE,
                ),
            ),
            (
                _compute,
                (
                    out, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    units, n, scale, lists, counts, heads, 0, CAUSAL, ROWS, KEYS, D, STAGES, TURNS, SHARE, SPARSE,
                ),
            ),
            (
                _compute,
                (
                    out, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    units, n, scale, lists, counts, heads, 1, CAUSAL, ROWS, KEYS, D, STAGES, TURNS, SHARE, SPARSE,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


class Tiles(TensorDescriptor):
    """A descriptor of what `fits` has approved of: made without checks, which take longer than the launch."""

    def __post_init__(self) -> None: ...


@functools.cache
def _layout(rows: int, D: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([rows, D], element)


def tiles(x: torch.Tensor, rows: int) -> Tiles:
    """Blocks of `rows` rows of a contiguous (…, D) tensor."""
    D = x.shape[-1]
    return Tiles(x, [x.numel() // D, D], [D, 1], [rows, D], _layout(rows, D, x.dtype))


_compiled: dict[Hashable, Any] = {}


def launch(kernel: Any, key: Hashable, grid: int, *arguments: Any) -> None:
    """`kernel[(grid,)](*arguments)`, past the just-in-time compiler's look at each argument, which takes longer
    than the launch. `key` must hold all that the compiled code depends on, the device included.
    """
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(grid,)](*arguments, num_warps=4)
    else:
        compiled[(grid, 1, 1)](*arguments)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, causal: bool
) -> None:
    """Writes the output and its base-2 log-sum-exp (B, H, S). For inputs that `fits` approves of."""
    units = q.shape[0] * q.shape[1] * q.shape[2] // KEYS // 2
    # What is passed for lists is not read.
    _run(
        q,
        k,
        v,
        out,
        lse,
        lse,
        lse,
        causal,
        SCHEDULES[q.shape[3], causal],
        min(units, multiprocessors(q)),
        1,
        False,
    )


def sparse_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    causal: bool,
    schedule: Schedule | None = None,
    programs: int = SPARSE_PROGRAMS,
) -> None:
    """Writes the output over lists (heads, n, n) of blocks of keys in descending order, of which counts (heads, n)
    are read; heads is 1, H or B·H. For inputs that `fits` approves of.
    """
    units = q.shape[0] * q.shape[1] * q.shape[2] // KEYS // 2
    schedule = schedule or SPARSE_SCHEDULES[q.shape[3], causal]
    grid = min(units, programs * multiprocessors(q))
    _run(q, k, v, out, counts, lists, counts, causal, schedule, grid, lists.shape[0], True)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    causal: bool,
    schedule: Schedule,
    grid: int,
    heads: int,
    sparse: bool,
) -> None:
    B, H, S, D = q.shape
    n = S // KEYS
    with on(q):
        launch(
            _kernel, (_kernel, q.device, q.dtype, D, causal, schedule, sparse), grid,
            tiles(q, ROWS), tiles(k, KEYS), tiles(v, KEYS), tiles(out, ROWS), lse, lists, counts,
            B * H * n // 2, n, H // k.shape[1], heads, LOG2E / math.sqrt(D),
            causal, ROWS, KEYS, D, schedule.stages, schedule.turns, schedule.share, schedule.registers, sparse,
        )  # fmt: skip
