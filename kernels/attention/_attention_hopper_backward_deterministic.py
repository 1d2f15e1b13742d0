"""The deterministic backward pass of attention for Hopper (compute capability 9.0), in Gluon.

As in `_portable_backward.py`, one kernel makes dK and dV of a block of keys and one dQ of a block of queries,
without atomics; the algorithm is FlashAttention-2's (Dao, arXiv 2307.08691). A producer warp group loads tiles
through the tensor memory accelerator, two consumers own 64 rows each, whose gradients stay in their registers. The
products of a step are issued asynchronously: P is computed while dP = dO·Vᵀ is multiplied, and dS while dV is.

Queries and keys may have other columns than values. Where they have 192, as latent attention's, their tiles lie in
three pieces, as in `_attention_hopper_forward.py`. A consumer's dK and dV take 160 registers of a thread then, so
that steps are over 32 queries: scores of 64 had no room.

Under a window each block walks from the first tile that any of its rows sees, or is seen by, to the last. Tiles
that the window's edges or the causal mask cut are masked, the others not.

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `resident.full` | each half of the two resident tiles | the producer's copy | 1, bytes | its consumer, 0 |
| `stream.full` | each buffer of the other two | the producer's copy | 1, bytes | both consumers, 0 |
| `stream.empty` | the same | each consumer, its products done | 2 | producer, 1 |

Taken for what `_attention_hopper_forward.takes` does, of as many keys as queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
)

from .._common import on, power_of_2
from .._hopper import LOG2E, ROWS, kernel_key, launch, product_layout, sectioned, tensor_map, visible
from .._launch import room
from .._pipeline import Blocks, copy_out, cursor, pair, pair_ring, pieces
from ._attention_hopper_forward import divided
from ._gradients import add_to_keys, add_to_queries, opaque, scored

STAGES = {64: 4, 128: 3}
"""Streamed tiles in flight, by the wider one's columns."""
FEW = 32
"""Queries of a step over the queries of a block of keys of 192 columns."""
FEW_STAGES = 6
"""Steps in flight then."""
REGISTERS = 240
"""Registers a thread of the consumers."""
L2 = 32 << 20
"""Bytes of Q, dO and dQ that heads whose blocks are taken together may have."""


@dataclass(frozen=True)
class Config:
    """A kernel at compile time: columns of a tile of values, the mask, a window of 0 being none, whether the last
    block is not whole, streamed tiles in flight, registers of a consumer's thread; rows of a consumer and of a
    streamed tile; pieces that tiles of Q and K have by columns, and columns of one, 0 for as many as values have;
    for dQ, what products of queries and keys are multiplied with before tanh, 0 without a cap.
    """

    width: int
    causal: bool
    window: int
    tail: bool
    stages: int
    registers: int = REGISTERS
    rows: int = ROWS
    tile: int = ROWS
    pieces: int = 1
    part: int = 0
    inner: float = 0.0

    @property
    def columns(self) -> int:
        """Of a piece of Q and K."""
        return self.part or self.width

    @property
    def ratio(self) -> int:
        """Streamed tiles in a block's rows."""
        return 2 * self.rows // self.tile


@gluon.jit
def _walk(  # type: ignore[no-untyped-def]  # Triton's types are its own
    block, tiles, BEFORE: gl.constexpr, AFTER: gl.constexpr, ROWS: gl.constexpr, WINDOW: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """(first tile, end) of a block's walk over so many tiles. BEFORE and AFTER: whether what lies before and
    after it is visible.
    """
    RATIO: gl.constexpr = 2 * ROWS // TILE
    first = 0
    end = tiles
    if WINDOW:
        first = gl.maximum(RATIO * block - (WINDOW + TILE - 2) // TILE, 0)
        end = gl.minimum(RATIO * block + (WINDOW + 2 * ROWS - 2) // TILE + 1, tiles)
    if not BEFORE:
        first = RATIO * block
    if not AFTER:
        end = gl.minimum(RATIO * block + RATIO, tiles)
    return first, end


@gluon.jit
def _cut(  # type: ignore[no-untyped-def]  # Triton's types are its own
    ahead, BEFORE: gl.constexpr, AFTER: gl.constexpr, ROWS: gl.constexpr, WINDOW: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """Whether a tile, `ahead` of a block's first by so many, needs a mask: not all of the one sees the other.
    Not called where everything is visible.
    """
    LOW: gl.constexpr = (2 * ROWS - WINDOW + TILE - 1) // TILE if BEFORE else 2 * ROWS // TILE
    HIGH: gl.constexpr = WINDOW // TILE - 1 if AFTER else -1
    if WINDOW:
        cut = (ahead < LOW) | (ahead > HIGH)
    elif BEFORE:
        cut = ahead > HIGH
    else:
        cut = ahead < LOW
    return cut


@gluon.jit
def _tiles(blocks, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Streamed tiles of a head."""
    return (blocks.length + c.tile - 1) // c.tile


@gluon.jit
def _masked(p, rows, columns, block, j, blocks, c: gl.constexpr, OF_KEYS: gl.constexpr):  # type: ignore[no-untyped-def]
    """P of a block's rows with a tile's columns, by their places, hidden as the mask, the window and the end of
    the sequence say; tiles that none of them cuts are left as they are. OF_KEYS: rows are keys and columns
    queries.
    """
    BEFORE: gl.constexpr = not (c.causal and OF_KEYS)
    AFTER: gl.constexpr = not c.causal or OF_KEYS
    if c.causal or c.window or c.tail:
        cut = j < 0
        if c.causal or c.window:
            cut = _cut(j - c.ratio * block, BEFORE, AFTER, c.rows, c.window, c.tile)
        if c.tail:
            cut = cut | (j == _tiles(blocks, c) - 1) | (block == blocks.n - 1)
        if cut:
            one = gl.expand_dims(rows, 1)
            other = gl.expand_dims(columns + j * c.tile, 0)
            if c.causal or c.window:
                if OF_KEYS:
                    p = gl.where(visible(other, one, c.causal, c.window), p, 0.0)
                else:
                    p = gl.where(visible(one, other, c.causal, c.window), p, 0.0)
            if c.tail:
                p = gl.where((one < blocks.length) & (other < blocks.length), p, 0.0)
    return p


@gluon.jit
def _nothing(c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """A consumer's gradient in Q or K before its first step: zeros, a tensor for each piece of columns."""
    SHAPE: gl.constexpr = [c.rows, c.columns]
    COLUMNS: gl.constexpr = c.columns
    zeros = gl.zeros(SHAPE, gl.float32, product_layout(COLUMNS))
    return (zeros,) if c.pieces == 1 else (zeros, zeros, zeros)


@gluon.jit
def _keys_producer(q, g, k, v, resident, stream, blocks, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Loads a block of K and V in halves, then the queries that see it and their dO, head by head."""
    head, block = sectioned(gl.program_id(0), blocks.n, blocks.heads, blocks.section)
    batch = head // blocks.per_batch
    head = head % blocks.per_batch
    for i in gl.static_range(2):
        resident.fetch(i, k, v, [batch, head, block * 2 * c.rows + i * c.rows, 0], c.pieces)
    at = cursor(1, c.stages)
    first, end = _walk(block, _tiles(blocks, c), not c.causal, True, c.rows, c.window, c.tile)
    for member in range(0, blocks.groups):
        for j in range(first, end):
            stream.fetch(at, q, g, [batch, head * blocks.groups + member, j * c.tile, 0], c.pieces)
            at = at.advanced()


@gluon.jit
def _keys_consumer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dk_out, dv_out, lse, delta, resident, stream, blocks, scale, root, c: gl.constexpr, HALF: gl.constexpr
):
    """dK and dV of one half of a block of keys. Scores are transposed here: keys by queries."""
    dtype: gl.constexpr = dk_out.dtype
    ROWS: gl.constexpr = c.rows
    TILE: gl.constexpr = c.tile
    WIDTH: gl.constexpr = c.width
    score: gl.constexpr = product_layout(TILE)
    head, block = sectioned(gl.program_id(0), blocks.n, blocks.heads, blocks.section)
    zero = gl.zeros([ROWS, TILE], gl.float32, score)
    rows = (block * 2 + HALF) * c.rows + gl.arange(0, c.rows, gl.SliceLayout(1, score))
    columns = gl.arange(0, c.tile, gl.SliceLayout(0, score))
    dk = _nothing(c)
    dv = gl.zeros([ROWS, WIDTH], gl.float32, product_layout(WIDTH))
    resident.wait(HALF)
    at = cursor(0, c.stages)
    first, end = _walk(block, _tiles(blocks, c), not c.causal, True, c.rows, c.window, c.tile)
    for member in range(0, blocks.groups):
        base = (head * blocks.groups + member) * blocks.n * 2 * c.rows
        for j in range(first, end):
            hidden = opaque(at.stage)
            k = pieces(resident.first, HALF + hidden, c.pieces)
            v = resident.second.index(HALF + hidden)
            level = gl.load(lse + base + j * c.tile + columns)
            stream.wait(at)
            q = pieces(stream.first, at.stage, c.pieces)
            g = stream.second.index(at.stage)
            p, dp = scored(k, v, q, g, level, zero, scale, 0)
            p = _masked(p, rows, columns, block, j, blocks, c, True)
            dk, dv = add_to_keys(p, dp, dk, dv, stream, at, delta, base, j, columns, c)
            at = at.advanced()
    PIECES: gl.constexpr = c.pieces
    k = pieces(resident.first, HALF, c.pieces)
    v = resident.second.index(HALF)
    for i in gl.static_range(PIECES):
        k[i].store((dk[i] * root).to(dtype))
    v.store(dv.to(dtype))
    fence_async_shared()
    row = block * 2 * c.rows + HALF * c.rows
    for i in gl.static_range(PIECES):
        copy_out(dk_out, [head // blocks.per_batch, head % blocks.per_batch, row, i * c.columns], k[i])
    copy_out(dv_out, [head // blocks.per_batch, head % blocks.per_batch, row, 0], v)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["n", "heads", "per_batch", "section", "groups", "length"])
def _keys(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, dk, dv, lse, delta, n, heads, per_batch, section, groups, length, scale, root, c: gl.constexpr
):
    """One block of keys of one key head, over all its query heads. `lse` and `delta` have room for whole blocks,
    `root` is 1/√D; numbers as in `Blocks`.
    """
    resident = pair(k, v, c.rows, c.width, c.pieces, c.columns)
    stream = pair_ring(q, g, c.tile, c.width, c.stages, c.pieces, c.columns)
    blocks = Blocks(n, heads, per_batch, section, groups, length)
    gl.warp_specialize(
        [
            (_keys_producer, (q, g, k, v, resident, stream, blocks, c)),
            (_keys_consumer, (dk, dv, lse, delta, resident, stream, blocks, scale, root, c, 0)),
            (_keys_consumer, (dk, dv, lse, delta, resident, stream, blocks, scale, root, c, 1)),
        ],
        [4, 4],
        [c.registers, c.registers],
    )


@gluon.jit
def _own_block(blocks, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(head, block of queries) of this program, the last ones first under a causal mask: they are the longest."""
    head, block = sectioned(gl.program_id(0), blocks.n, blocks.heads, blocks.section)
    if c.causal:
        block = blocks.n - 1 - block
    return head, block


@gluon.jit
def _queries_producer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, resident, stream, blocks, c: gl.constexpr
):
    """Loads a block of Q and dO in halves, then the keys that it sees and their V."""
    head, block = _own_block(blocks, c)
    batch = head // blocks.per_batch
    head = head % blocks.per_batch
    first, end = _walk(block, _tiles(blocks, c), True, not c.causal, c.rows, c.window, c.tile)
    for i in gl.static_range(2):
        resident.fetch(i, q, g, [batch, head, block * 2 * c.rows + i * c.rows, 0], c.pieces)
    at = cursor(1, c.stages)
    for j in range(first, end):
        stream.fetch(at, k, v, [batch, head // blocks.groups, j * c.tile, 0], c.pieces)
        at = at.advanced()


@gluon.jit
def _queries_consumer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dq_out, lse, delta, resident, stream, blocks, scale, root, c: gl.constexpr, HALF: gl.constexpr
):
    """dQ of one half of a block of queries."""
    dtype: gl.constexpr = dq_out.dtype
    ROWS: gl.constexpr = c.rows
    TILE: gl.constexpr = c.tile
    PIECES: gl.constexpr = c.pieces
    score: gl.constexpr = product_layout(TILE)
    head, block = _own_block(blocks, c)
    first, end = _walk(block, _tiles(blocks, c), True, not c.causal, c.rows, c.window, c.tile)
    q = pieces(resident.first, HALF, c.pieces)
    g = resident.second.index(HALF)
    zero = gl.zeros([ROWS, TILE], gl.float32, score)
    rows = gl.arange(0, c.rows, gl.SliceLayout(1, score))
    columns = gl.arange(0, c.tile, gl.SliceLayout(0, score))
    row = (head * blocks.n + block) * 2 * c.rows + HALF * c.rows
    level = gl.load(lse + row + rows)
    of_row = gl.load(delta + row + rows)
    rows = (block * 2 + HALF) * c.rows + rows
    dq = _nothing(c)
    resident.wait(HALF)
    at = cursor(0, c.stages)
    for j in range(first, end):
        stream.wait(at)
        k = pieces(stream.first, at.stage, c.pieces)
        v = stream.second.index(at.stage)
        p, dp = scored(q, g, k, v, level, zero, scale, 1, c.inner)
        p = _masked(p, rows, columns, block, j, blocks, c, False)
        dq = add_to_queries(p, dp, dq, of_row, stream, at)
        at = at.advanced()
    for i in gl.static_range(PIECES):
        q[i].store((dq[i] * root).to(dtype))
    fence_async_shared()
    row = block * 2 * c.rows + HALF * c.rows
    for i in gl.static_range(PIECES):
        copy_out(dq_out, [head // blocks.per_batch, head % blocks.per_batch, row, i * c.columns], q[i])
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["n", "heads", "per_batch", "section", "groups", "length"])
def _queries(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, dq, lse, delta, n, heads, per_batch, section, groups, length, scale, root, c: gl.constexpr
):
    """One block of queries of one head."""
    resident = pair(q, g, c.rows, c.width, c.pieces, c.columns)
    stream = pair_ring(k, v, c.tile, c.width, c.stages, c.pieces, c.columns)
    blocks = Blocks(n, heads, per_batch, section, groups, length)
    gl.warp_specialize(
        [
            (_queries_producer, (q, g, k, v, resident, stream, blocks, c)),
            (_queries_consumer, (dq, lse, delta, resident, stream, blocks, scale, root, c, 0)),
            (_queries_consumer, (dq, lse, delta, resident, stream, blocks, scale, root, c, 1)),
        ],
        [4, 4],
        [c.registers, c.registers],
    )


@triton.jit(do_not_specialize=["ob", "oh", "os", "gb", "gh", "gs", "H", "S", "room", "blocks"])
def _statistics(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, grad, lse, levels, delta, sums,
    ob: tl.int64, oh: tl.int64, os: tl.int64, gb: tl.int64, gh: tl.int64, gs: tl.int64, H, S, room, blocks,
    D: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(O ∘ dO) of 64 rows and, PADDED, their log-sum-exp, as `statistics` lays them out; and zeros
    in an accumulator of dQ, if there is one: one launch less. Strides are in units of 8 numbers.
    """
    head = tl.program_id(0) // blocks
    rows = tl.program_id(0) % blocks * 64 + tl.arange(0, 64)
    columns = tl.arange(0, WIDTH)[None, :]
    inside = (rows < S)[:, None]
    if WIDTH != D:
        inside = inside & (columns < D)
    at = rows.to(tl.int64)
    a = (((head // H) * ob + (head % H) * oh + at * os) * 8)[:, None] + columns
    b = (((head // H) * gb + (head % H) * gh + at * gs) * 8)[:, None] + columns
    x = tl.load(out + a, mask=inside, other=0.0).to(tl.float32) * tl.load(grad + b, mask=inside, other=0.0)
    tl.store(delta + head.to(tl.int64) * room + rows, tl.sum(x, 1), mask=rows < room)
    if sums is not None:
        part = sums + tl.program_id(0).to(tl.int64) * 64 * WIDTH
        tl.store(part + tl.arange(0, 64 * WIDTH), tl.zeros([64 * WIDTH], tl.float32))
    if PADDED:
        level = tl.load(lse + head.to(tl.int64) * S + rows, mask=rows < S, other=float("inf"))
        tl.store(levels + head.to(tl.int64) * room + rows, level, mask=rows < room)


def statistics(out: torch.Tensor, grad: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-sum-exp, delta), both (B, H, rows) in fp32 with room for whole blocks of 128 rows, filled up with
    +inf and 0: of an output and a gradient that are `mappable`.
    """
    with on(out):
        return run_statistics(planned_statistics(out, grad), out, grad, lse)


class StatisticsPlan(NamedTuple):
    """What a launch does not have to think about again for the same shapes and strides."""

    key: Hashable
    programs: int
    shape: tuple[int, int, int]
    of_delta: Callable[[], torch.Tensor]
    padded: bool
    zeroed: bool
    numbers: tuple[int | bool, ...]


def planned_statistics(out: torch.Tensor, grad: torch.Tensor, zeroed: bool = False) -> StatisticsPlan:
    """What holds for all tensors of these shapes, strides, dtype and device; whether an accumulator is zeroed."""
    B, H, S, D = out.shape
    height = -(-S // (2 * ROWS)) * 2 * ROWS
    strides = (x // 8 for y in (out, grad) for x in y.stride()[:3])
    constants = (D, max(16, power_of_2(D)), height != S)
    return StatisticsPlan(
        kernel_key(_statistics, out.device, out.dtype, zeroed, constants),
        B * H * height // 64,
        (B, H, height),
        room((B, H, height), torch.float32, out.device),
        height != S,
        zeroed,
        (*strides, H, S, height, height // 64, *constants),
    )


def run_statistics(
    plan: StatisticsPlan,
    out: torch.Tensor,
    grad: torch.Tensor,
    lse: torch.Tensor,
    sums: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`statistics` of tensors that the plan is for, on the current device; zeros in `sums`, dQ's accumulator in
    fp32 with such room.
    """
    assert (sums is not None) == plan.zeroed
    delta = plan.of_delta()
    levels = plan.of_delta() if plan.padded else lse
    launch(_statistics, plan.key, plan.programs, out, grad, lse, levels, delta, sums, *plan.numbers)
    return levels, delta


def heads_per_l2_group(S: int, width: int, groups: int, heads: int) -> int:
    """Key heads whose blocks of keys come before others' under a causal mask.

    A head's first block is seen by all of its queries, its last by few: with one head after the other the long
    blocks of the last one begin when the others are nearly done, and most multiprocessors wait for them. Of few
    heads at a time Q, dO and dQ in fp32 stay in L2; four are as many as even the end out, by arithmetic: steps
    of blocks dealt out to 132 multiprocessors.
    """
    return even(heads, max(4, L2 // (groups * S * width * 8)))


def even(heads: int, most: int) -> int:
    """Heads in each of as few equal sections as there are of so many at most."""
    return -(-heads // -(-heads // min(heads, most)))


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
    """Writes dq, dk and dv. `lse` is in base 2, `delta` the sum of O ∘ dO over rows, both (B, H, rows) in fp32
    with room for whole blocks of 128 rows, filled up with +inf and 0. A window of 0 is none.

    For inputs that `_attention_hopper_forward.takes` approves of, as many keys as queries; gradients are
    `mappable`.
    """
    B, H, S, D = q.shape
    heads = k.shape[1]
    width = power_of_2(v.shape[-1])
    count, part = divided(D)
    stages = STAGES[max(width, part)] if count == 1 else 3
    of_queries = Config(width, causal, window, S % (2 * ROWS) != 0, stages, pieces=count, part=part)
    of_keys = replace(of_queries, tile=FEW, stages=FEW_STAGES) if count > 1 else of_queries
    tq, tk, tdq, tdk = (tensor_map(x, ROWS, part) for x in (q, k, dq, dk))
    tg, tv, tdv = (tensor_map(x, ROWS) for x in (grad, v, dv))
    streamed = tensor_map(q, of_keys.tile, part), tensor_map(grad, of_keys.tile)
    n = -(-S // (2 * ROWS))
    root = 1 / math.sqrt(D)
    key = (q.device, q.dtype)
    section = heads_per_l2_group(S, count * part, H // heads, B * heads) if causal and not window else 1
    query_section = section * (H // heads) if causal and not window else 1
    rest = (H // heads, S, LOG2E * root, root)
    with on(q):
        launch(
            _keys, (_keys, *key, of_keys), B * heads * n,
            *streamed, tk, tv, tdk, tdv, lse, delta, n, B * heads, heads, section, *rest, of_keys,
        )  # fmt: skip
        launch(
            _queries, (_queries, *key, of_queries), B * H * n,
            tq, tg, tk, tv, tdq, lse, delta, n, B * H, H, query_section, *rest, of_queries,
        )  # fmt: skip
