"""The forward pass of attention for Hopper (compute capability 9.0), in Gluon.

The schedule is FlashAttention-3's (Shah et al., arXiv 2407.08608), as far as Gluon has the means: one warp
group feeds tiles of Q, K and V through the tensor memory accelerator, two others compute 64 rows each, and
within each of them the scores of the next block of keys are multiplied while the values of this one are.

Programs are persistent: one a multiprocessor, each with its share of the work. A unit of work is a pair of
query blocks of one head, the first with the last, the second with the last but one: under a causal mask all
units are equally long. Consecutive units belong to one head, so that its K and V stay in L2.

Under a window the walk over the keys starts and ends at it. The blocks that its edges or the causal mask cut are
steps of their own before and after the others, which know no mask.

Tiles are 64, 128 or 256 columns wide. A head dimension between these is filled up with zeros by the tensor memory
accelerator, which also leaves out what lies beyond it when it stores. At 256 columns keys come in blocks of 64
and the output goes through the buffer of Q: registers and shared memory hold no more.

Taken for bf16 and fp16, D a multiple of 8 from 40 on, S a multiple of 256 and at least 1024, contiguous tensors:
`fits`. Tiles of 64 and 128 columns are left to `_attention_hopper_dealt.py`, unless a schedule is asked for.
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

from .._common import multiprocessors, on, power_of_2

copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""Of tiles, by the tensor memory accelerator: their names from Triton 3.9 on, and before."""
LOG2E = 1.4426950408889634
LOWEST = gl.constexpr(-3.4028234663852886e38)
"""The lowest finite fp32 number, below which no maximum goes: unlike -inf it can be subtracted from -inf."""
ROWS = 64
"""Query rows of one computing warp group; a tile has two of them."""
KEYS = 128
"""Keys of one step; as many as a tile has rows, so that the causal mask cuts one block of keys only."""
WIDTHS = (64, 128)
"""Columns of tiles that both passes have, and lists of blocks (`_attention_sparse_hopper.py`)."""
FORWARD_WIDTHS = (64, 128, 256)
"""Columns of tiles that the forward pass has."""


@dataclass(frozen=True)
class Schedule:
    """Blocks of K and V in flight, whether the two groups take turns at the matrix units, the share of
    exponentials that the FMA units compute (one of so many, 0: none), registers, and keys of a block.
    """

    stages: int
    turns: bool
    share: int = 0
    registers: int = 240
    keys: int = KEYS


SCHEDULES = {
    (64, True): Schedule(3, True, share=8),
    (64, False): Schedule(3, True),
    (128, True): Schedule(2, False),
    (128, False): Schedule(2, True),
    (256, True): Schedule(2, False, keys=64),
    (256, False): Schedule(2, False, keys=64),
}
"""By width and whether causal, as measured on an H200 before tiles were dealt out: taking turns keeps one group's
exponentials under the other's products, but at D = 128 the diagonal's uneven work makes the waiting cost more. One
exponential of eight on the FMA units pays at D = 64 causal only. Those of 64 and 128 columns are taken where one
is asked for, as docs/stages does; `_attention_hopper_dealt.py` is faster. Those of 256 follow from what fits, not
from a measurement."""


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, widths: tuple[int, ...] = WIDTHS) -> bool:
    """Whether tiles of one of these widths take the inputs; the device is not looked at."""
    _, _, S, D = q.shape
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and D % 8 == 0
        and power_of_2(D) in widths
        and S >= 1024
        and S % (4 * ROWS) == 0
        and q.numel() // D < 1 << 31
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k, v))
    )


def dense(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, and at an address that a descriptor takes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


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


@gluon.constexpr_function
def product_layout(columns):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Of what a warp group multiplies: 64 rows and so many columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def sectioned(nth, n, heads, section):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(head, which of its n blocks) is the nth piece of work where sections of heads come one after the other, of
    each the first block of every head, then the second.
    """
    first = nth // (section * n) * section
    nth -= first * n
    width = gl.minimum(section, heads - first)
    block = nth // width
    return first + nth - block * width, block


@gluon.jit
def onward(stage, phase, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The next buffer of a ring, and the phase of its barriers: another each time round."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def scores(q, ks, zero, full, empty, stage, phase, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """(products of queries with a tile's first block of keys, the next stage and phase)."""
    mbarrier.wait(full.index(stage), phase)
    s = warpgroup_mma(q, ks.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(empty.index(stage), count=1)
    stage, phase = onward(stage, phase, STAGES)
    return s, stage, phase


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
def visible(queries, keys, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Whether a query sees a key, by their places, which broadcast against each other."""
    if CAUSAL:
        seen = queries >= keys
        if WINDOW:
            seen = seen & (queries < keys + WINDOW)
    else:
        seen = (queries < keys + WINDOW) & (keys < queries + WINDOW)
    return seen


@gluon.jit
def _unit(  # type: ignore[no-untyped-def]  # Triton's types are its own
    step, units, n, CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, WINDOW: gl.constexpr
):
    """(batch·head, query block, blocks of keys, the last of them) of a program's step: two steps make a unit."""
    PER: gl.constexpr = 2 * ROWS // KEYS  # blocks of keys in a tile's rows
    unit = gl.program_id(0) + step // 2 * gl.num_programs(0)
    pairs = n // 2
    place = unit // pairs
    first = unit % pairs
    block = first if step % 2 == 1 else n - 1 - first
    count = n * PER
    if CAUSAL:
        count = (block + 1) * PER
    last = count - 1
    if WINDOW:
        # From the last block that the tile's last row sees to the first that its first row sees.
        if not CAUSAL:
            last = gl.minimum(block * PER + (WINDOW + 2 * ROWS - 2) // KEYS, last)
        count = last + 1 - gl.maximum(block * PER - (WINDOW + KEYS - 2) // KEYS, 0)
    return place, block, count, last


@gluon.jit
def _end(  # type: ignore[no-untyped-def]  # Triton's types are its own
    run: gl.constexpr, begin, count, distance,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Where a run of steps ends that begins at `begin`, of `count` blocks the first `distance` after the tile's
    own first. Run 0 is cut by the causal mask or the window's end, 1 is seen by every row, 2 is cut by the
    window's start.
    """
    end = count
    if run == 0:
        CLEAN_AFTER: gl.constexpr = -1 if CAUSAL else WINDOW // KEYS - 1
        end = gl.minimum(gl.maximum(distance - CLEAN_AFTER, 1), count)
    elif WINDOW and run == 1:
        CLEAN_BEFORE: gl.constexpr = (WINDOW - 2 * ROWS) // KEYS
        end = gl.maximum(gl.minimum(distance + CLEAN_BEFORE + 1, count), begin)
    return end


@gluon.jit
def _steps(units):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Steps of this program."""
    return 2 * ((units - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0))


@gluon.jit
def _feed(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, qs, ks, vs, q_full, q_empty, k_full, k_empty, v_full, v_empty, units, n, groups,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Loads each tile's two halves of Q, then its blocks of K and V, the last keys first."""
    stage = 0
    phase = 1
    q_phase = 1
    for step in range(0, _steps(units)):
        place, block, count, last = _unit(step, units, n, CAUSAL, ROWS, KEYS, WINDOW)
        row = (place * n + block) * 2 * ROWS
        for i in gl.static_range(2):
            mbarrier.wait(q_empty.index(i), q_phase)
            mbarrier.expect(q_full.index(i), q.block_type.nbytes)
            copy_in(q, [row + i * ROWS, 0], q_full.index(i), qs.index(i))
        q_phase ^= 1
        last = place // groups * n * 2 * ROWS + last * KEYS
        for j in range(0, count):
            key = last - j * KEYS
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
            copy_in(k, [key, 0], k_full.index(stage), ks.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
            copy_in(v, [key, 0], v_full.index(stage), vs.index(stage))
            stage, phase = onward(stage, phase, STAGES)


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn, units, n, scale,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, SHARE: gl.constexpr, WINDOW: gl.constexpr,
    REUSE: gl.constexpr,
):  # fmt: skip
    """One half of every tile: online softmax in base 2 over blocks of keys, the last keys first.

    Without a window only the first blocks, on the diagonal, need the causal mask. In the loop K runs one block
    ahead of V. A row may see nothing in its first blocks.
    """
    PER: gl.constexpr = 2 * ROWS // KEYS
    # Runs of steps as `_end` numbers them.
    FROM: gl.constexpr = 0 if (CAUSAL and PER > 1) or (WINDOW and not CAUSAL) else 1
    UNTIL: gl.constexpr = 3 if WINDOW else 2
    dtype: gl.constexpr = out.dtype
    score: gl.constexpr = product_layout(KEYS)
    total: gl.constexpr = product_layout(D)
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
        place, block, count, last = _unit(step, units, n, CAUSAL, ROWS, KEYS, WINDOW)
        distance = last - block * PER  # of the first block, in blocks of keys
        # How far this half's first row is from that block's first key.
        below = HALF * ROWS
        if CAUSAL:
            below -= (PER - 1) * KEYS
        elif WINDOW:
            below -= distance * KEYS
        mbarrier.wait(q_full.index(HALF), q_phase)
        q_phase ^= 1
        s, k_stage, k_phase = scores(q, ks, zero, k_full, k_empty, k_stage, k_phase, STAGES)
        if CAUSAL or WINDOW:
            seen = visible(gl.expand_dims(rows + below, 1), gl.expand_dims(columns, 0), CAUSAL, WINDOW)
            s = gl.where(seen, s, float("-inf"))
        highest = gl.maximum(gl.max(s, 1) * scale, LOWEST)
        p = _exp2(s * scale - gl.expand_dims(highest, 1), SHARE)
        weight = gl.sum(p, 1)
        weights = gl.convert_layout(p.to(dtype), operand)
        acc = gl.zeros([ROWS, D], gl.float32, total)
        begin = 1
        for run in gl.static_range(FROM, UNTIL):
            end = _end(run, begin, count, distance, CAUSAL, ROWS, KEYS, WINDOW)
            for j in range(begin, end):
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
                if run != 1:
                    ahead = below + j * KEYS
                    seen = visible(gl.expand_dims(rows + ahead, 1), gl.expand_dims(columns, 0), CAUSAL, WINDOW)
                    s = gl.where(seen, s, float("-inf"))
                raised = gl.maximum(highest, gl.max(s, 1) * scale)
                p = _exp2(s * scale - gl.expand_dims(raised, 1), SHARE)
                shrink = gl.exp2(highest - raised)
                weight = weight * shrink + gl.sum(p, 1)
                highest = raised
                acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
                mbarrier.arrive(v_empty.index(v_stage), count=1)
                acc = acc * gl.expand_dims(gl.convert_layout(shrink, total_rows), 1)
                weights = gl.convert_layout(p.to(dtype), operand)
                k_stage, k_phase = onward(k_stage, k_phase, STAGES)
                v_stage, v_phase = onward(v_stage, v_phase, STAGES)
            begin = end
        if not REUSE:
            # The last product with Q is done: the next tile's can be loaded.
            mbarrier.arrive(q_empty.index(HALF), count=1)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        acc = warpgroup_mma(weights, vs.index(v_stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        v_stage, v_phase = onward(v_stage, v_phase, STAGES)
        row = (place * n + block) * 2 * ROWS + HALF * ROWS
        # Not by its weight, which is that of what the FMA units computed: 2^-126 for -inf.
        empty = highest == LOWEST
        gl.store(lse + row + rows, gl.where(empty, float("inf"), highest + gl.log2(weight)))
        share = gl.where(empty, 0.0, 1.0 / weight)
        acc = acc * gl.expand_dims(gl.convert_layout(share, total_rows), 1)
        if not REUSE:
            tma.store_wait(pendings=0)  # of the tile before, which the buffer still held
        o.store(acc.to(dtype))
        fence_async_shared()
        copy_out(out, [row, 0], o)
        if REUSE:
            tma.store_wait(pendings=0)
            mbarrier.arrive(q_empty.index(HALF), count=1)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["units", "n", "groups"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, out, lse, units, n, groups, scale,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, SHARE: gl.constexpr, REGISTERS: gl.constexpr,
    WINDOW: gl.constexpr, REUSE: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, then the three warp groups. `n` is S / (2 · ROWS), `units` B·H·n / 2."""
    qs = gl.allocate_shared_memory(q.dtype, [2, ROWS, D], q.layout)
    os = qs if REUSE else gl.allocate_shared_memory(q.dtype, [2, ROWS, D], out.layout)
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
        if TURNS:  # over a barrier that nothing waits for Triton may lay something else
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
                    units, n, groups, CAUSAL, ROWS, KEYS, STAGES, WINDOW,
                ),
            ),
            (
                _compute,
                (
                    out, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    units, n, scale, 0, CAUSAL, ROWS, KEYS, D, STAGES, TURNS, SHARE, WINDOW, REUSE,
                ),
            ),
            (
                _compute,
                (
                    out, lse, qs, ks, vs, os, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
                    units, n, scale, 1, CAUSAL, ROWS, KEYS, D, STAGES, TURNS, SHARE, WINDOW, REUSE,
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
    """Blocks of `rows` rows of a contiguous (…, D) tensor, their columns a power of two."""
    D = x.shape[-1]
    width = power_of_2(D)
    return Tiles(x, [x.numel() // D, D], [D, 1], [rows, width], _layout(rows, width, x.dtype))


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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    window: int = 0,
    schedule: Schedule | None = None,
) -> None:
    """Writes the output and its base-2 log-sum-exp (B, H, S), +inf for a row that sees nothing. A window of 0 is
    none. For inputs that `fits` approves of for FORWARD_WIDTHS.
    """
    B, H, S, D = q.shape
    width = power_of_2(D)
    schedule = schedule or SCHEDULES[width, causal]
    n = S // (2 * ROWS)
    units = B * H * n // 2
    constants = (
        causal, ROWS, schedule.keys, width, schedule.stages, schedule.turns, schedule.share, schedule.registers,
        window, width > 128,
    )  # fmt: skip
    with on(q):
        launch(
            _kernel, (_kernel, q.device, q.dtype, *constants), min(units, multiprocessors(q)),
            tiles(q, ROWS), tiles(k, schedule.keys), tiles(v, schedule.keys), tiles(out, ROWS), lse,
            units, n, H // k.shape[1], LOG2E / math.sqrt(D), *constants,
        )  # fmt: skip
