"""The backward pass of attention for Hopper (compute capability 9.0), in Gluon.

As in `attention.py`, one kernel makes dK and dV of a block of keys and one dQ of a block of queries, without
atomics; the algorithm is FlashAttention-2's (Dao, arXiv 2307.08691). One warp group feeds tiles through the
tensor memory accelerator, two others own 64 rows each, whose gradients stay in their registers. The products
of a step are issued asynchronously: probabilities are computed while dP = dO·Vᵀ is multiplied, and dS while
dV is. Taken for what `_attention_hopper.fits` approves of.

Under a window each block walks from the first tile that any of its rows sees, or is seen by, to the last. Tiles
that the window's edges or the causal mask cut are masked, the others not.
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

from .._common import on, power_of_2
from ._attention_hopper import copy_in, copy_out, launch, onward, product_layout, sectioned, tiles, visible

LOG2E = 1.4426950408889634
ROWS = 64
"""Rows of one computing warp group, and of one streamed tile; a block has two of them."""
STAGES = {64: 4, 128: 3}
"""Streamed tiles in flight, by width."""
REGISTERS = 240
"""Registers a thread of the computing warp groups."""
L2 = 32 << 20
"""Bytes of Q, dO and dQ that heads whose blocks are taken together may have."""


@gluon.jit
def opaque(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """0, which the compiler does not know to be. Added to a buffer's index within a loop it keeps the addresses
    that follow from it, dozens of them, from being computed before the loop and spilled.
    """
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _walk(  # type: ignore[no-untyped-def]  # Triton's types are its own
    block, n, BEFORE: gl.constexpr, AFTER: gl.constexpr, ROWS: gl.constexpr, WINDOW: gl.constexpr
):
    """(first tile, end) of a block's walk. BEFORE and AFTER: whether what lies before and after it is visible."""
    first = 0
    end = 2 * n
    if WINDOW:
        first = gl.maximum(2 * block - (WINDOW + ROWS - 2) // ROWS, 0)
        end = gl.minimum(2 * block + (WINDOW + 2 * ROWS - 2) // ROWS + 1, 2 * n)
    if not BEFORE:
        first = 2 * block
    if not AFTER:
        end = 2 * block + 2
    return first, end


@gluon.jit
def _cut(  # type: ignore[no-untyped-def]  # Triton's types are its own
    ahead, BEFORE: gl.constexpr, AFTER: gl.constexpr, ROWS: gl.constexpr, WINDOW: gl.constexpr
):
    """Whether a tile, `ahead` of a block's first by so many, needs a mask: not all of the one sees the other.
    Not called where everything is visible.
    """
    LOW: gl.constexpr = (2 * ROWS - WINDOW + ROWS - 1) // ROWS if BEFORE else 2
    HIGH: gl.constexpr = WINDOW // ROWS - 1 if AFTER else -1
    if WINDOW:
        cut = (ahead < LOW) | (ahead > HIGH)
    elif BEFORE:
        cut = ahead > HIGH
    else:
        cut = ahead < LOW
    return cut


@gluon.jit
def _keys_feed(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, ks, vs, qs, gs, kv_full, full, empty, n, heads, section, groups,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Loads a block of K and V in halves, then the queries that see it and their dO, head by head."""
    place, block = sectioned(gl.program_id(0), n, heads, section)
    row = (place * n + block) * 2 * ROWS
    for i in gl.static_range(2):
        mbarrier.expect(kv_full.index(i), 2 * k.block_type.nbytes)
        copy_in(k, [row + i * ROWS, 0], kv_full.index(i), ks.index(i))
        copy_in(v, [row + i * ROWS, 0], kv_full.index(i), vs.index(i))
    stage = 0
    phase = 1
    first, end = _walk(block, n, not CAUSAL, True, ROWS, WINDOW)
    for member in range(0, groups):
        base = (place * groups + member) * n * 2 * ROWS
        for j in range(first, end):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), 2 * q.block_type.nbytes)
            copy_in(q, [base + j * ROWS, 0], full.index(stage), qs.index(stage))
            copy_in(g, [base + j * ROWS, 0], full.index(stage), gs.index(stage))
            stage, phase = onward(stage, phase, STAGES)


@gluon.jit
def _keys_compute(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dk_out, dv_out, lse, delta, ks, vs, qs, gs, kv_full, full, empty, n, heads, section, groups, scale, root,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """dK and dV of one half of a block of keys. Scores are transposed here: keys by queries."""
    dtype: gl.constexpr = dk_out.dtype
    score: gl.constexpr = product_layout(ROWS)
    total: gl.constexpr = product_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=total, k_width=2)
    place, block = sectioned(gl.program_id(0), n, heads, section)
    k = ks.index(HALF)
    v = vs.index(HALF)
    zero = gl.zeros([ROWS, ROWS], gl.float32, score)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, score))
    columns = gl.arange(0, ROWS, gl.SliceLayout(0, score))
    dk = gl.zeros([ROWS, D], gl.float32, total)
    dv = gl.zeros([ROWS, D], gl.float32, total)
    mbarrier.wait(kv_full.index(HALF), 0)
    stage = 0
    phase = 0
    first, end = _walk(block, n, not CAUSAL, True, ROWS, WINDOW)
    for member in range(0, groups):
        base = (place * groups + member) * n * 2 * ROWS
        for j in range(first, end):
            hidden = opaque(stage)
            k = ks.index(HALF + hidden)
            v = vs.index(HALF + hidden)
            level = gl.load(lse + base + j * ROWS + columns)
            mbarrier.wait(full.index(stage), phase)
            q = qs.index(stage)
            g = gs.index(stage)
            s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, g.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            p = gl.exp2(s * scale - gl.expand_dims(level, 0))
            if CAUSAL or WINDOW:
                ahead = j - 2 * block
                if _cut(ahead, not CAUSAL, True, ROWS, WINDOW):
                    queries = gl.expand_dims(columns + ahead * ROWS, 0)
                    keys = gl.expand_dims(rows + HALF * ROWS, 1)
                    p = gl.where(visible(queries, keys, CAUSAL, WINDOW), p, 0.0)
            weights = gl.convert_layout(p.to(dtype), operand)
            dv = warpgroup_mma(weights, g, dv, is_async=True)
            mean = gl.load(delta + base + j * ROWS + columns)
            dp = warpgroup_mma_wait(1, deps=[dp])
            change = gl.convert_layout((p * (dp - gl.expand_dims(mean, 0))).to(dtype), operand)
            dk = warpgroup_mma(change, q, dk, is_async=True)
            dv, dk, weights, change = warpgroup_mma_wait(0, deps=[dv, dk, weights, change])
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = onward(stage, phase, STAGES)
    k.store((dk * root).to(dtype))
    v.store(dv.to(dtype))
    fence_async_shared()
    row = (place * n + block) * 2 * ROWS + HALF * ROWS
    copy_out(dk_out, [row, 0], k)
    copy_out(dv_out, [row, 0], v)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["n", "heads", "section", "groups"])
def _keys(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, dk, dv, lse, delta, n, heads, section, groups, scale, root,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """One block of keys of one key head, over all its query heads. `n` is S / 128, `root` 1/√D."""
    ks = gl.allocate_shared_memory(k.dtype, [2, ROWS, D], k.layout)
    vs = gl.allocate_shared_memory(k.dtype, [2, ROWS, D], v.layout)
    qs = gl.allocate_shared_memory(k.dtype, [STAGES, ROWS, D], q.layout)
    gs = gl.allocate_shared_memory(k.dtype, [STAGES, ROWS, D], g.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _keys_feed,
                (
                    q, g, k, v, ks, vs, qs, gs, kv_full, full, empty, n, heads, section, groups,
                    CAUSAL, ROWS, D, STAGES, WINDOW,
                ),
            ),
            (
                _keys_compute,
                (
                    dk, dv, lse, delta, ks, vs, qs, gs, kv_full, full, empty,
                    n, heads, section, groups, scale, root, 0, CAUSAL, ROWS, D, STAGES, WINDOW,
                ),
            ),
            (
                _keys_compute,
                (
                    dk, dv, lse, delta, ks, vs, qs, gs, kv_full, full, empty,
                    n, heads, section, groups, scale, root, 1, CAUSAL, ROWS, D, STAGES, WINDOW,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


@gluon.jit
def _queries_feed(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, qs, gs, ks, vs, q_full, full, empty, n, heads, section, groups,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Loads a block of Q and dO in halves, then the keys that it sees and their V."""
    place, block = sectioned(gl.program_id(0), n, heads, section)
    if CAUSAL:
        block = n - 1 - block
    first, end = _walk(block, n, True, not CAUSAL, ROWS, WINDOW)
    row = (place * n + block) * 2 * ROWS
    for i in gl.static_range(2):
        mbarrier.expect(q_full.index(i), 2 * q.block_type.nbytes)
        copy_in(q, [row + i * ROWS, 0], q_full.index(i), qs.index(i))
        copy_in(g, [row + i * ROWS, 0], q_full.index(i), gs.index(i))
    stage = 0
    phase = 1
    base = place // groups * n * 2 * ROWS
    for j in range(first, end):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), 2 * k.block_type.nbytes)
        copy_in(k, [base + j * ROWS, 0], full.index(stage), ks.index(stage))
        copy_in(v, [base + j * ROWS, 0], full.index(stage), vs.index(stage))
        stage, phase = onward(stage, phase, STAGES)


@gluon.jit
def _queries_compute(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dq_out, lse, delta, qs, gs, ks, vs, q_full, full, empty, n, heads, section, scale, root,
    HALF: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """dQ of one half of a block of queries."""
    dtype: gl.constexpr = dq_out.dtype
    score: gl.constexpr = product_layout(ROWS)
    total: gl.constexpr = product_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=total, k_width=2)
    place, block = sectioned(gl.program_id(0), n, heads, section)
    if CAUSAL:
        block = n - 1 - block
    first, end = _walk(block, n, True, not CAUSAL, ROWS, WINDOW)
    q = qs.index(HALF)
    g = gs.index(HALF)
    zero = gl.zeros([ROWS, ROWS], gl.float32, score)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, score))
    columns = gl.arange(0, ROWS, gl.SliceLayout(0, score))
    row = (place * n + block) * 2 * ROWS + HALF * ROWS
    level = gl.load(lse + row + rows)
    mean = gl.load(delta + row + rows)
    dq = gl.zeros([ROWS, D], gl.float32, total)
    mbarrier.wait(q_full.index(HALF), 0)
    stage = 0
    phase = 0
    for j in range(first, end):
        mbarrier.wait(full.index(stage), phase)
        k = ks.index(stage)
        v = vs.index(stage)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(g, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        p = gl.exp2(s * scale - gl.expand_dims(level, 1))
        if CAUSAL or WINDOW:
            ahead = j - 2 * block
            if _cut(ahead, True, not CAUSAL, ROWS, WINDOW):
                queries = gl.expand_dims(rows + HALF * ROWS, 1)
                keys = gl.expand_dims(columns + ahead * ROWS, 0)
                p = gl.where(visible(queries, keys, CAUSAL, WINDOW), p, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        change = gl.convert_layout((p * (dp - gl.expand_dims(mean, 1))).to(dtype), operand)
        dq = warpgroup_mma(change, k, dq, is_async=True)
        dq, change = warpgroup_mma_wait(0, deps=[dq, change])
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = onward(stage, phase, STAGES)
    q.store((dq * root).to(dtype))
    fence_async_shared()
    copy_out(dq_out, [row, 0], q)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["n", "heads", "section", "groups"])
def _queries(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, dq, lse, delta, n, heads, section, groups, scale, root,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """One block of queries of one head, the last ones first under a causal mask: they are the longest."""
    qs = gl.allocate_shared_memory(k.dtype, [2, ROWS, D], q.layout)
    gs = gl.allocate_shared_memory(k.dtype, [2, ROWS, D], g.layout)
    ks = gl.allocate_shared_memory(k.dtype, [STAGES, ROWS, D], k.layout)
    vs = gl.allocate_shared_memory(k.dtype, [STAGES, ROWS, D], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _queries_feed,
                (
                    q, g, k, v, qs, gs, ks, vs, q_full, full, empty, n, heads, section, groups,
                    CAUSAL, ROWS, D, STAGES, WINDOW,
                ),
            ),
            (
                _queries_compute,
                (
                    dq, lse, delta, qs, gs, ks, vs, q_full, full, empty, n, heads, section, scale, root,
                    0, CAUSAL, ROWS, D, STAGES, WINDOW,
                ),
            ),
            (
                _queries_compute,
                (
                    dq, lse, delta, qs, gs, ks, vs, q_full, full, empty, n, heads, section, scale, root,
                    1, CAUSAL, ROWS, D, STAGES, WINDOW,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


def together(S: int, width: int, groups: int, heads: int) -> int:
    """Key heads whose blocks of keys come before others' under a causal mask.

    A head's first block is seen by all of its queries, its last by few: with one head after the other the long
    blocks of the last one begin when the others are nearly done, and most multiprocessors wait for them. Of few
    heads at a time Q, dO and dQ in fp32 stay in L2; four are as many as even the end out, by arithmetic: steps
    of blocks dealt out to 132 multiprocessors.
    """
    most = min(heads, max(4, L2 // (groups * S * width * 8)))
    return -(-heads // -(-heads // most))


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
) -> None:
    """Writes dq, dk and dv. `lse` is in base 2, `delta` the sum of O ∘ dO over rows, both (B, H, S) in fp32.
    A window of 0 is none.

    All contiguous; for inputs that `_attention_hopper.fits` approves of.
    """
    B, H, S, D = q.shape
    heads = k.shape[1]
    tq, tg, tk, tv, tdq, tdk, tdv = (tiles(x, ROWS) for x in (q, grad, k, v, dq, dk, dv))
    n = S // (2 * ROWS)
    root = 1 / math.sqrt(D)
    scale = LOG2E * root
    width = power_of_2(D)
    constants = (causal, ROWS, width, STAGES[width], REGISTERS, window)
    key = (q.device, q.dtype, *constants)
    section = together(S, width, H // heads, B * heads) if causal and not window else 1
    of_queries = section * (H // heads) if causal and not window else 1
    rest = (H // heads, scale, root, *constants)
    with on(q):
        launch(
            _keys, (_keys, key), B * heads * n, tq, tg, tk, tv, tdk, tdv, lse, delta, n, B * heads, section, *rest
        )
        launch(
            _queries, (_queries, key), B * H * n,
            tq, tg, tk, tv, tdq, lse, delta, n, B * H, of_queries, *rest,
        )  # fmt: skip
