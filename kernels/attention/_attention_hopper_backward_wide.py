"""The backward pass of attention for Hopper with heads of more than 128 columns, up to 256.

As in `_attention_hopper_backward_deterministic.py` one kernel makes dK and dV of a block of keys and one dQ of a
block of queries, without atomics. dQ is that module's kernel, over steps of 32 keys. For dK and dV of 64 keys a
warp group would need 256 registers of a thread. So a program has one block of 64 keys and two groups: one
computes P and dV += Pᵀ·dO, the other dP and dK += dSᵀ·Q. P goes from the one to the other through shared memory,
in fp32: rounded twice, gradients would have larger errors. Where scores are capped it goes times their slope,
which dS alone has. The groups wait for nothing else, so that the matrix units have one's products while the other
computes P or dS.

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `resident` | the block's K and V | the producer's copy | 1, bytes | both, 0 |
| `stream.full` | each buffer of Q and dO | the producer's copy | 1, bytes | both, 0 |
| `stream.empty` | the same | each, its last product of the step done | 2 | producer, 1 |
| `ready` | P | the group of dV | 1 | that of dK, 0 |
| `free` | the same | the group of dK, P read | 1 | that of dV, 1 |

No `from __future__ import annotations` here: an aggregate reads the types of its fields from their annotations.
"""

import math
from dataclasses import replace

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

from .._common import on
from .._hopper import ROWS, fits, kernel_key, launch, product_layout, sectioned, tensor_map
from .._pipeline import Blocks, PairRing, aggregate, barriers, copy_in, copy_out, cursor, pair_ring, tile_buffers
from ._attention_hopper_backward_deterministic import (
    Config,
    _masked,
    _queries,
    _tiles,
    _walk,
    heads_per_l2_group,
)
from ._gradients import opaque
from ._softmax import capped, scales

WIDTH = 256
"""Columns of a tile; what a smaller D leaves of these is zeros."""
FEW = 32
"""Keys of a step over the keys of a block of queries: more would leave no room for three of them."""


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernels compute gradients of such tensors, of as many keys as queries; the device is not looked
    at.
    """
    return fits(q, k, v, (WIDTH,))


@aggregate
class Pipes:
    """A block's K and V (ROWS, WIDTH) and their barrier; Q and dO; P (ROWS, TILE) in fp32 and its barriers."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    resident: gl.shared_memory_descriptor
    stream: PairRing
    p: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k, v, resident, stream, p, ready, free):  # type: ignore[no-untyped-def]  # Triton's types are its own
        self.k = k
        self.v = v
        self.resident = resident
        self.stream = stream
        self.p = p
        self.ready = ready
        self.free = free


@gluon.jit
def _producer(q, g, k, v, pipes, blocks, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Loads a block of K and V, then the queries that see it and their dO, head by head."""
    head, block = sectioned(gl.program_id(0), blocks.n, blocks.heads, blocks.section)
    batch = head // blocks.per_batch
    head = head % blocks.per_batch
    mbarrier.expect(pipes.resident, k.block_type.nbytes + v.block_type.nbytes)
    copy_in(k, [batch, head, block * 2 * c.rows, 0], pipes.resident, pipes.k.index(0))
    copy_in(v, [batch, head, block * 2 * c.rows, 0], pipes.resident, pipes.v.index(0))
    at = cursor(1, c.stages)
    first, end = _walk(block, _tiles(blocks, c), not c.causal, True, c.rows, c.window, c.tile)
    for member in range(0, blocks.groups):
        for j in range(first, end):
            pipes.stream.fetch(at, q, g, [batch, head * blocks.groups + member, j * c.tile, 0])
            at = at.advanced()


@gluon.jit
def _write(out, x, buffer, head, block, blocks, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """A block's gradient, by a buffer that is no operand any more."""
    buffer.store(x.to(out.dtype))
    fence_async_shared()
    copy_out(out, [head // blocks.per_batch, head % blocks.per_batch, block * 2 * c.rows, 0], buffer)
    tma.store_wait(pendings=0)


@gluon.jit
def _of_values(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, lse, pipes, blocks, room, scale, c: gl.constexpr
):
    """P, and dV of a block. Scores are transposed here: keys by queries."""
    ROWS: gl.constexpr = 2 * c.rows
    TILE: gl.constexpr = c.tile
    WIDTH: gl.constexpr = c.width
    score: gl.constexpr = product_layout(TILE)
    sums: gl.constexpr = product_layout(WIDTH)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    head, block = sectioned(gl.program_id(0), blocks.n, blocks.heads, blocks.section)
    zero = gl.zeros([ROWS, TILE], gl.float32, score)
    rows = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, score))
    columns = gl.arange(0, c.tile, gl.SliceLayout(0, score))
    dv = gl.zeros([ROWS, WIDTH], gl.float32, sums)
    at = cursor(0, c.stages)
    phase = 1
    mbarrier.wait(pipes.resident, 0)
    first, end = _walk(block, _tiles(blocks, c), not c.causal, True, c.rows, c.window, c.tile)
    for member in range(0, blocks.groups):
        base = (head * blocks.groups + member) * room
        for j in range(first, end):
            k = pipes.k.index(opaque(at.stage))
            level = gl.load(lse + base + j * c.tile + columns)
            pipes.stream.wait(at)
            q = pipes.stream.first.index(at.stage)
            g = pipes.stream.second.index(at.stage)
            # Sᵀ = K·Qᵀ
            s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            s = capped(s, c.inner, q.dtype)
            # P = 2^(S·scale - lse)
            p = gl.exp2(s * scale - gl.expand_dims(level, 0))
            p = _masked(p, rows, columns, block, j, blocks, c, True)
            told = p
            if c.inner > 0:
                told = p * (1.0 - s * s)
            mbarrier.wait(pipes.free, phase)
            phase ^= 1
            pipes.p.store(told)
            mbarrier.arrive(pipes.ready, count=1)
            weights = gl.convert_layout(p.to(g.dtype), operand)
            # dV += Pᵀ·dO
            dv = warpgroup_mma(weights, g, dv, is_async=True)
            dv, weights = warpgroup_mma_wait(0, deps=[dv, weights])
            pipes.stream.release(at)
            at = at.advanced()
    _write(out, dv, pipes.k.index(0), head, block, blocks, c)  # nobody else reads K


@gluon.jit
def _of_keys(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, delta, pipes, blocks, room, root, c: gl.constexpr
):
    """dP and dS, and dK of a block."""
    ROWS: gl.constexpr = 2 * c.rows
    TILE: gl.constexpr = c.tile
    WIDTH: gl.constexpr = c.width
    score: gl.constexpr = product_layout(TILE)
    sums: gl.constexpr = product_layout(WIDTH)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    head, block = sectioned(gl.program_id(0), blocks.n, blocks.heads, blocks.section)
    zero = gl.zeros([ROWS, TILE], gl.float32, score)
    columns = gl.arange(0, c.tile, gl.SliceLayout(0, score))
    dk = gl.zeros([ROWS, WIDTH], gl.float32, sums)
    at = cursor(0, c.stages)
    phase = 0
    mbarrier.wait(pipes.resident, 0)
    first, end = _walk(block, _tiles(blocks, c), not c.causal, True, c.rows, c.window, c.tile)
    for member in range(0, blocks.groups):
        base = (head * blocks.groups + member) * room
        for j in range(first, end):
            v = pipes.v.index(opaque(at.stage))
            of_row = gl.load(delta + base + j * c.tile + columns)
            pipes.stream.wait(at)
            q = pipes.stream.first.index(at.stage)
            g = pipes.stream.second.index(at.stage)
            # dPᵀ = V·dOᵀ
            dp = warpgroup_mma(v, g.permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma_wait(0, deps=[dp])
            mbarrier.wait(pipes.ready, phase)
            phase ^= 1
            p = pipes.p.load(score)
            mbarrier.arrive(pipes.free, count=1)
            # dS = P ∘ (dP - delta)
            ds = gl.convert_layout((p * (dp - gl.expand_dims(of_row, 0))).to(q.dtype), operand)
            # dK += dSᵀ·Q
            dk = warpgroup_mma(ds, q, dk, is_async=True)
            dk, ds = warpgroup_mma_wait(0, deps=[dk, ds])
            pipes.stream.release(at)
            at = at.advanced()
    _write(out, dk * root, pipes.v.index(0), head, block, blocks, c)  # nobody else reads V


@gluon.jit(do_not_specialize=["n", "heads", "per_batch", "section", "groups", "length", "room"])
def _keys(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, dk, dv, lse, delta, n, heads, per_batch, section, groups, length, room, scale, root,
    c: gl.constexpr,
):  # fmt: skip
    """One block of keys of one key head, over all its query heads. `lse` and `delta` have `room` for a head's
    rows, `root` is 1/√D; numbers as in `Blocks`.
    """
    ROWS: gl.constexpr = 2 * c.rows
    SHAPE: gl.constexpr = [ROWS, c.tile]
    pipes = Pipes(
        tile_buffers(k.dtype, 1, ROWS, c.width),
        tile_buffers(v.dtype, 1, ROWS, c.width),
        barriers(1, 1).index(0),
        pair_ring(q, g, c.tile, c.width, c.stages),
        gl.allocate_shared_memory(gl.float32, SHAPE, gl.SwizzledSharedLayout(8, 1, 8, [1, 0])),
        barriers(1, 1).index(0),
        barriers(1, 1).index(0),
    )
    blocks = Blocks(n, heads, per_batch, section, groups, length)
    gl.warp_specialize(
        [
            (_producer, (q, g, k, v, pipes, blocks, c)),
            (_of_values, (dv, lse, pipes, blocks, room, scale, c)),
            (_of_keys, (dk, delta, pipes, blocks, room, root, c)),
        ],
        [4, 4],
        [c.registers, c.registers],
    )


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
    cap: float = 0.0,
) -> None:
    """Writes dq, dk and dv. `lse` is in base 2, `delta` the sum of O ∘ dO over rows, both (B, H, rows) in fp32
    with room for whole blocks of 128 rows, filled up with +inf and 0. A window of 0 is none, as is a cap.

    For inputs that `takes` approves of, as many keys as queries; gradients are `mappable`.
    """
    B, H, S, D = q.shape
    heads, room = k.shape[1], lse.shape[2]
    scale, inner = scales(D, cap)
    of_queries = Config(WIDTH, causal, window, S % (2 * ROWS) != 0, 3, tile=FEW, inner=inner)
    of_keys = replace(of_queries, rows=ROWS // 2, tile=ROWS, stages=2, tail=S % ROWS != 0)
    tq, tg, tk, tv, tdq, tdk, tdv = (tensor_map(x, ROWS) for x in (q, grad, k, v, dq, dk, dv))
    streamed = tensor_map(k, FEW), tensor_map(v, FEW)
    root = 1 / math.sqrt(D)
    section = heads_per_l2_group(S, WIDTH, H // heads, B * heads) if causal and not window else 1
    query_section = section * (H // heads) if causal and not window else 1
    n, of_rows = -(-S // ROWS), -(-S // (2 * ROWS))
    with on(q):
        launch(
            _keys, kernel_key(_keys, q.device, q.dtype, of_keys), B * heads * n,
            tq, tg, tk, tv, tdk, tdv, lse, delta, n, B * heads, heads, section, H // heads, S, room,
            scale, root, of_keys,
        )  # fmt: skip
        launch(
            _queries, kernel_key(_queries, q.device, q.dtype, of_queries), B * H * of_rows,
            tq, tg, *streamed, tdq, lse, delta, of_rows, B * H, H, query_section, H // heads, S,
            scale, root, of_queries,
        )  # fmt: skip
