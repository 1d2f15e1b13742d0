"""The backward pass of attention for Hopper in one kernel of five products; a small one puts dQ in its place.

A program owns 128 keys of one key head and walks over the queries that see them, as `_keys` of
`_attention_hopper_backward.py` does; beside dK and dV it makes its part of dQ. As in FlashAttention-3's backward
(Shah et al., arXiv 2407.08608) the two warp groups exchange dS through shared memory, each multiplies all 128 keys
for half of a tile's dQ, and the copy engine adds that to an fp32 accumulator in memory. dQ is multiplied a step
late, from the dS of the step before, for which no group waits then.

The order of those additions is not fixed: dQ is not the same to the bit in every run. dK and dV are.

The accumulator is not laid out as dQ is. A thread of a warp group holds, of every 8 columns, pairs of two rows
that are 8 apart; these four numbers lie together, the threads' one after the other: a warp stores 512 bytes in a
row, and a piece is one box for the copy engine. `_settle` puts things in their place.

The addition is `cp.reduce.async.bulk.tensor`, which Gluon's builder has (`create_async_tma_reduce`) and its Python
does not: `_reduce` is all that is missing, and AVAILABLE says whether the builder does. Taken for what
`_attention_hopper.fits` approves of.

Under a window a block walks from the first tile of queries that sees any of its keys to the last. Tiles that the
window's edges or the causal mask cut are masked, the others not.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton._C.libtriton import gluon_ir, ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._common import on, power_of_2
from ._attention_hopper import Tiles, _layout, copy_in, copy_out, launch, product_layout, sectioned, tiles, visible
from ._attention_hopper_backward import REGISTERS, ROWS, opaque, together

LOG2E = 1.4426950408889634
LINE = 256
"""Numbers in a row of the accumulator as the copy engine sees it: the longest box."""
TURNS = 2
"""Buffers of dS: of this step, and of the one before, which dQ is multiplied from."""
AVAILABLE = hasattr(gluon_ir.GluonOpBuilder, "create_async_tma_reduce") and hasattr(ir, "DESCRIPTOR_REDUCE_KIND")
"""Whether this Triton can have the copy engine add."""


@dataclass(frozen=True)
class Schedule:
    """Queries of a step, steps in flight, and whether the scores of the next step are issued before this one's
    last products are waited for.
    """

    rows: int
    stages: int
    ahead: bool = True


SCHEDULES = {
    (64, True): Schedule(128, 2, ahead=False),
    (64, False): Schedule(128, 2),
    (128, True): Schedule(64, 3),
    (128, False): Schedule(64, 3),
}
"""By width and whether causal, as measured on an H200."""


@builtin
def _reduce(descriptor, coord, source, _semantic=None):  # type: ignore[no-untyped-def]
    """As `tma.async_copy_shared_to_global`, adding to what is there; `tma.store_wait` waits for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coord, source.handle
    )


@gluon.jit
def _span(  # type: ignore[no-untyped-def]  # Triton's types are its own
    block, n, CAUSAL: gl.constexpr, ROWS: gl.constexpr, QUERIES: gl.constexpr, WINDOW: gl.constexpr
):
    """(first tile of queries, how many) of a block of keys. Under neither mask nor window each block starts at its
    own place too, so that not all of a head add to the same rows at a time; after a head's last tile comes its
    first.
    """
    PER: gl.constexpr = 2 * ROWS // QUERIES
    first = PER * block
    end = PER * n
    if WINDOW:
        end = gl.minimum(first + (WINDOW + 2 * ROWS - 2) // QUERIES + 1, end)
        if not CAUSAL:
            first = gl.maximum(first - (WINDOW + QUERIES - 2) // QUERIES, 0)
    count = end
    if CAUSAL or WINDOW:
        count -= first
    return first, count


@gluon.jit
def _cut(  # type: ignore[no-untyped-def]  # Triton's types are its own
    ahead, CAUSAL: gl.constexpr, ROWS: gl.constexpr, QUERIES: gl.constexpr, WINDOW: gl.constexpr
):
    """Whether a tile of queries, `ahead` of a block of keys' first by so many, needs a mask: not all of it sees
    all of them. Not called where everything is visible.
    """
    LOW: gl.constexpr = 2 * ROWS // QUERIES if CAUSAL else (2 * ROWS - WINDOW + QUERIES - 1) // QUERIES
    cut = ahead < LOW
    if WINDOW:
        cut = cut | (ahead > WINDOW // QUERIES - 1)
    return cut


@gluon.jit
def _feed(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, lse, delta, ks, vs, qs, gs, levels, means, kv_full, full, empty, n, heads, section, groups,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Loads a block of K and V in halves, then the queries that see it, their dO and their statistics."""
    PER: gl.constexpr = 2 * ROWS // QUERIES
    place, block = sectioned(gl.program_id(0), n, heads, section)
    row = (place * n + block) * 2 * ROWS
    for half in gl.static_range(2):
        mbarrier.expect(kv_full.index(half), 2 * k.block_type.nbytes)
        copy_in(k, [row + half * ROWS, 0], kv_full.index(half), ks.index(half))
        copy_in(v, [row + half * ROWS, 0], kv_full.index(half), vs.index(half))
    stage = 0
    phase = 1
    first, count = _span(block, n, CAUSAL, ROWS, QUERIES, WINDOW)
    for member in range(0, groups):
        base = (place * groups + member) * n * PER
        more = count
        if AHEAD:
            # The last step looks one ahead: it gets the last tile once more.
            more = count + gl.where(member == groups - 1, 1, 0)
        for i in range(0, more):
            j = first + gl.minimum(i, count - 1)
            if not CAUSAL and not WINDOW:
                j = gl.where(j >= PER * n, j - PER * n, j)
            at = (base + j) * QUERIES
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), 2 * q.block_type.nbytes + 2 * lse.block_type.nbytes)
            copy_in(q, [at, 0], full.index(stage), qs.index(stage))
            copy_in(lse, [at], full.index(stage), levels.index(stage))
            copy_in(g, [at, 0], full.index(stage), gs.index(stage))
            copy_in(delta, [at], full.index(stage), means.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _product(  # type: ignore[no-untyped-def]  # Triton's types are its own
    ds, ks, turn, hidden, none, HALF: gl.constexpr, QUERIES: gl.constexpr, PART: gl.constexpr
):
    """Issues a group's part of dQ: 64 queries, or PART columns of D, over the keys of both halves."""
    ROW: gl.constexpr = HALF * 64 if QUERIES == 128 else 0
    COLUMN: gl.constexpr = HALF * PART if QUERIES == 64 else 0
    at = 2 * turn + hidden
    one = ds.index(at).slice(ROW, 64, 1).permute((1, 0))
    other = ds.index(at + 1).slice(ROW, 64, 1).permute((1, 0))
    dq = warpgroup_mma(one, ks.index(hidden).slice(COLUMN, PART, 1), none, use_acc=False, is_async=True)
    return warpgroup_mma(other, ks.index(hidden + 1).slice(COLUMN, PART, 1), dq, is_async=True)


@gluon.jit
def _add(sums, dq, staging, at, PART: gl.constexpr, LINE: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Has 64×PART numbers added to the accumulator's rows from `at` on: four of a thread together."""
    flat = dq.reshape([4, 2, 8, PART // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([64 * PART // LINE, LINE])
    staging.store(flat)
    fence_async_shared()
    _reduce(sums, [at, 0], staging)


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dk_out, dv_out, sums, ks, vs, qs, gs, ds, staged, levels, means,
    kv_full, full, empty, ready, other_ready, free, other_free, done, other_done,
    n, heads, section, groups, scale, root,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, QUERIES: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, TURNS: gl.constexpr, LINE: gl.constexpr,
    WINDOW: gl.constexpr,
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
    place, block = sectioned(gl.program_id(0), n, heads, section)
    staging = staged.index(HALF)
    zero = gl.zeros([ROWS, QUERIES], gl.float32, score)
    none = gl.zeros([64, PART], gl.float32, part)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, score))
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
    first, count = _span(block, n, CAUSAL, ROWS, QUERIES, WINDOW)
    last = ((place * groups * PER * n + first) * 2 + HALF) * LINES
    if AHEAD:
        mbarrier.wait(full.index(0), 0)
        s = warpgroup_mma(ks.index(HALF), qs.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
    for member in range(0, groups):
        base = (place * groups + member) * n * PER
        for i in range(0, count):
            j = first + i
            if not CAUSAL and not WINDOW:
                j = gl.where(j >= PER * n, j - PER * n, j)
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
            if CAUSAL or WINDOW:
                ahead = j - PER * block
                if _cut(ahead, CAUSAL, ROWS, QUERIES, WINDOW):
                    queries = gl.expand_dims(columns + ahead * QUERIES, 0)
                    keys = gl.expand_dims(rows + HALF * ROWS, 1)
                    p = gl.where(visible(queries, keys, CAUSAL, WINDOW), p, 0.0)
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
    _add(sums, dq, staging, last, PART, LINE)
    # The other half may still multiply with this half's K, which the results go over.
    mbarrier.arrive(done.index(0), count=1)
    mbarrier.wait(other_done.index(0), 0)
    k = ks.index(HALF)
    v = vs.index(HALF)
    k.store((dk * root).to(dtype))
    v.store(dv.to(dtype))
    fence_async_shared()
    row = (place * n + block) * 2 * ROWS + HALF * ROWS
    copy_out(dk_out, [row, 0], k)
    copy_out(dv_out, [row, 0], v)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["n", "heads", "section", "groups"])
def _all(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, lse, delta, dk, dv, sums, n, heads, section, groups, scale, root,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, QUERIES: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, TURNS: gl.constexpr, REGISTERS: gl.constexpr, LINE: gl.constexpr,
    SWAP: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """One block of keys of one key head, over all its query heads: its dK and dV, and its part of dQ·√D added to
    `sums`. `n` is S / 128, `root` 1/√D, D the width of tiles.
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
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
    for i in gl.static_range(TURNS):
        mbarrier.init(ready0.index(i), count=1)
        mbarrier.init(ready1.index(i), count=1)
        mbarrier.init(free0.index(i), count=1)
        mbarrier.init(free1.index(i), count=1)
    mbarrier.init(done0.index(0), count=1)
    mbarrier.init(done1.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _feed,
                (
                    q, g, k, v, lse, delta, ks, vs, qs, gs, levels, means, kv_full, full, empty,
                    n, heads, section, groups, CAUSAL, ROWS, QUERIES, STAGES, AHEAD, WINDOW,
                ),
            ),
            (
                _compute,
                (
                    dk, dv, sums, ks, vs, qs, gs, ds, staged, levels, means,
                    kv_full, full, empty, ready0, ready1, free0, free1, done0, done1,
                    n, heads, section, groups, scale, root,
                    0, CAUSAL, ROWS, QUERIES, D, STAGES, AHEAD, TURNS, LINE, WINDOW,
                ),
            ),
            (
                _compute,
                (
                    dk, dv, sums, ks, vs, qs, gs, ds, staged, levels, means,
                    kv_full, full, empty, ready1, ready0, free1, free0, done1, done0,
                    n, heads, section, groups, scale, root,
                    1, CAUSAL, ROWS, QUERIES, D, STAGES, AHEAD, TURNS, LINE, WINDOW,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


@triton.jit
def _settle(sums, out, root, D: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """64 rows of dQ from the accumulator, whose order within them `_add` says."""
    start = tl.program_id(0).to(tl.int64) * 64
    x = tl.load(sums + start * WIDTH + tl.arange(0, 64 * WIDTH))
    x = (x * root).to(out.dtype.element_ty)
    x = x.reshape(WIDTH // 8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, WIDTH)
    columns = tl.arange(0, WIDTH)[None, :]
    places = out + start * D + tl.arange(0, 64)[:, None] * D + columns
    if WIDTH == D:
        tl.store(places, x)
    else:
        tl.store(places, x, mask=columns < D)


@functools.cache
def _flat(rank: int) -> gl.NVMMASharedLayout:
    """fp32 as it lies in memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)


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
    causal: bool,
    window: int = 0,
    schedule: Schedule | None = None,
) -> None:
    """Writes dq, dk and dv. `lse` is in base 2, `delta` the sum of O ∘ dO over rows, both (B, H, S) in fp32.
    A window of 0 is none.

    All contiguous; for inputs that `_attention_hopper.fits` approves of. Takes memory for dq in fp32, its columns
    filled up to a power of two.
    """
    B, H, S, D = q.shape
    heads = k.shape[1]
    width = power_of_2(D)
    schedule = schedule or SCHEDULES[width, causal]
    queries = schedule.rows
    tq, tg = (tiles(x, queries) for x in (q, grad))
    tk, tv, tdk, tdv = (tiles(x, ROWS) for x in (k, v, dk, dv))
    tlse, tdelta = (Tiles(x, [x.numel()], [1], [queries], _flat(1)) for x in (lse, delta))
    sums = torch.zeros(B * H * S * width // LINE, LINE, dtype=torch.float32, device=q.device)
    tsums = Tiles(sums, list(sums.shape), [LINE, 1], [queries * width // 2 // LINE, LINE], _flat(2))
    n = S // (2 * ROWS)
    root = 1 / math.sqrt(D)
    constants = (
        causal, ROWS, queries, width, schedule.stages, schedule.ahead, TURNS, REGISTERS, LINE,
        _layout(ROWS, queries, q.dtype), window,
    )  # fmt: skip
    section = together(S, width, H // heads, B * heads) if causal and not window else 1
    with on(q):
        launch(
            _all, (_all, q.device, q.dtype, *constants), B * heads * n,
            tq, tg, tk, tv, tlse, tdelta, tdk, tdv, tsums,
            n, B * heads, section, H // heads, LOG2E * root, root, *constants,
        )  # fmt: skip
        _settle[(B * H * S // 64,)](sums, dq, root, D, width, num_warps=width // 16)
