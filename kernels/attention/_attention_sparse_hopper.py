"""Block-sparse attention for Hopper in tiles of 64 or 128 columns, by two consumer warp groups, in Gluon.

The schedule within a tile is that of `_attention_hopper_forward.py`: a producer warp group loads tiles through
the tensor memory accelerator, two others compute 64 rows each, at 64 columns in turns at the matrix units, and
in each the scores of the next block of keys are multiplied while the values of this one are. A third group,
which the dense kernel has at 64 columns, would have no rows with the same list: a tile of 192 rows would walk
the union of two lists, and groups with lists of their own would read K and V once per 64 rows, a byte for 64
operations.

Lists are short, and so are tiles: what lies between them counts. Programs are persistent, one a multiprocessor,
and take the next tile as they come to it, by a counter that the last one to take leaves at 0
(`_grid_barrier.counter`); lists that differ in length even out so. A tile's first block of K is asked for
before its Q, which waits until the tile before has done with its own. Tiles come in sections of heads whose K
and V fit into L2 together, the last queries first, whose lists are the longest under a causal mask. Who
computes a row does not change its numbers.

A list is in descending order, so that the causal mask can cut only its first block.

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `q.full` | each group's rows of Q | the producer's copy | 1, bytes | that group, 0 |
| `q.empty` | the same | that group, after its last S | 1 | producer, 1 |
| `k.full`, `v.full` | each buffer | the producer's copy | 1, bytes | both groups, 0 |
| `k.empty` | each buffer | each group, after S = Q·Kᵀ | 2 | producer, 1 |
| `v.empty` | each buffer | each group, after O += P·V | 2 | producer, 1 |
| `pingpong` (64 columns) | a group | the other, its products issued | 1 | that group, 1 for the first, else 0 |
| `tiles.ready` | the next tile | producer | 1 | both groups, 0 |
| `tiles.free` | the same | each group, the tile read | 2 | producer, 1 |

Taken for contiguous tensors, S a multiple of 256 and at least 1024, of what `_hopper.fits` approves of: `fits`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .. import _hopper as common
from .._common import multiprocessors, on, power_of_2
from .._grid_barrier import counter
from .._hopper import KEYS, LOG2E, LOWEST, ROWS, flat_map, launch, product_layout, sectioned
from .._pipeline import (
    Cursors,
    Pipes,
    at_buffer,
    barriers,
    copy_in,
    copy_out,
    cursor,
    ring,
    take,
    tile_buffers,
    tile_queue,
)
from ._softmax import apply_mask, first_block, last_values, scores, step


@dataclass(frozen=True)
class Config:
    """A kernel at compile time: columns of a tile, the mask; whether the two groups take turns at the matrix
    units, buffers of K and of V; registers of a consumer's thread, groups, their rows, keys of a block.
    """

    width: int
    causal: bool
    pingpong: bool
    stages: int
    registers: int = 240
    groups: int = 2
    rows: int = ROWS
    keys: int = KEYS


DIVISIONS = {64: (True, 3), 128: (False, 2)}
"""Whether groups take turns, and buffers, by columns of tiles; what a smaller D leaves of these is zeros."""


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernel takes the inputs: whole blocks, and contiguous tensors; the device is not looked at."""
    S = q.shape[2]
    return S >= 1024 and S % (2 * KEYS) == 0 and common.fits(q, k, v) and all(x.is_contiguous() for x in (q, k, v))


@gluon.jit
def _tile(t, n, heads, section):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(batch·head, block of queries) of tile t."""
    head, nth = sectioned(t, n, heads, section)
    return head, n - 1 - nth


@gluon.jit
def _producer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, pipes, lists, counts, counter, total, n, heads, listed, groups, section, c: gl.constexpr
):
    """Loads each tile's halves of Q and the listed blocks of K and V, and takes the next tile."""
    at_k = cursor(1, c.stages)
    at_v = cursor(1, c.stages)
    q_phase = 1
    tile_phase = 1
    t = gl.program_id(0)
    while t < total:
        head, block = _tile(t, n, heads, section)
        at = head % listed * n + block
        chosen = lists + at.to(gl.int64) * n
        last = gl.maximum(gl.load(counts + at), 1) - 1
        row = (head * n + block) * c.keys
        base = head // groups * n
        key = (base + gl.load(chosen)) * c.keys
        # Keys do not wait for those who still use the queries before.
        pipes.k.fetch(at_k, k, [key, 0])
        for i in gl.static_range(2):
            full = pipes.q.acquire(at_buffer(i, q_phase), q.block_type.nbytes)
            copy_in(q, [row + i * c.rows, 0], full, pipes.q.buffers.index(i))
        q_phase ^= 1
        for j in range(0, last + 1):
            # Before this block is waited for, so that the next one's place is known in time.
            ahead = (base + gl.load(chosen + gl.minimum(j + 1, last))) * c.keys
            at_k = at_k.advanced()
            pipes.v.fetch(at_v, v, [key, 0])
            at_v = at_v.advanced()
            key = ahead
            if j < last:
                pipes.k.fetch(at_k, k, [key, 0])
        t = take(counter, total)
        tile_phase = pipes.tiles.push(t, tile_phase)


@gluon.jit
def _consumer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, staged, pipes, lists, counts, total, n, heads, listed, section, scale, lse, c: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """One half of every tile: online softmax in base 2 over the listed blocks of keys. In the loop K runs one
    block ahead of V. A list has a block at least, which may not count. `lse` may be None.
    """
    ROWS: gl.constexpr = c.rows
    KEYS: gl.constexpr = c.keys
    WIDTH: gl.constexpr = c.width
    score: gl.constexpr = product_layout(KEYS)
    sums: gl.constexpr = product_layout(WIDTH)
    score_rows: gl.constexpr = gl.SliceLayout(1, score)
    sums_rows: gl.constexpr = gl.SliceLayout(1, sums)
    q = (pipes.q.buffers.index(GROUP),)
    o = staged.index(GROUP)
    zero = gl.zeros([ROWS, KEYS], gl.float32, score)
    rows = gl.arange(0, c.rows, score_rows)
    places = Cursors(cursor(0, c.stages), cursor(0, c.stages), gl.to_tensor(1 - GROUP))
    q_phase = 0
    tile_phase = 0
    t = gl.program_id(0)
    while t < total:
        head, block = _tile(t, n, heads, section)
        at = head % listed * n + block
        count = gl.load(counts + at)
        # How far this half's first row is from the first key.
        below = GROUP * c.rows
        if c.causal:
            below += (block - gl.load(lists + at.to(gl.int64) * n)) * c.keys
        pipes.q.wait(at_buffer(GROUP, q_phase))
        q_phase ^= 1
        s, places = scores(q, pipes, zero, places)
        if c.causal:
            s = apply_mask(s, rows + below, 0, True, False)
        state = first_block(s, gl.zeros([ROWS, WIDTH], gl.float32, sums), scale, out.dtype)
        for _ in range(1, count):
            state, places = step(q, pipes, zero, state, places, rows, scale, c, GROUP, 0, False, False)
        # The last product with Q is done: the next tile's can be loaded.
        pipes.q.release(at_buffer(GROUP, q_phase))
        acc, places = last_values(state, pipes, places)
        row_sum = gl.convert_layout(gl.sum(state.row_sum, 1), score_rows)
        if lse is not None:
            level = gl.where(state.row_max == LOWEST, float("inf"), state.row_max + gl.log2(row_sum))
            level = gl.where(count > 0, level, float("inf"))
            gl.store(lse + ((head * n + block) * c.keys + GROUP * c.rows) + rows, level)
        share = gl.where(state.row_max == LOWEST, 0.0, 1.0 / row_sum)
        acc = acc * gl.expand_dims(gl.convert_layout(share, sums_rows), 1)
        acc = gl.where(count > 0, acc, 0.0)
        tma.store_wait(pendings=0)  # of the tile before, which the buffer still held
        o.store(acc.to(out.dtype))
        fence_async_shared()
        copy_out(out, [(head * n + block) * c.keys + GROUP * c.rows, 0], o)
        t, tile_phase = pipes.tiles.pop(tile_phase)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["counter", "total", "n", "heads", "listed", "groups", "section"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, out, lists, counts, counter, total, n, heads, listed, groups, section, scale, lse,
    c: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, then the warp groups. `n` blocks a head, `total` = heads · n, heads B·H; lists
    (listed, n, n) in descending order, counts (listed, n), listed 1, H or B·H. `lse` (B, H, S) or None.
    """
    queries = ring(q, c.rows, c.width, c.groups, 1)
    staged = tile_buffers(q.dtype, c.groups, c.rows, c.width)
    keys = ring(k, c.keys, c.width, c.stages, c.groups)
    values = ring(v, c.keys, c.width, c.stages, c.groups)
    pipes = Pipes(queries, keys, values, barriers(c.groups, 1 if c.pingpong else 0), tile_queue(c.groups))
    gl.warp_specialize(
        [
            (_producer, (q, k, v, pipes, lists, counts, counter, total, n, heads, listed, groups, section, c)),
            (_consumer, (out, staged, pipes, lists, counts, total, n, heads, listed, section, scale, lse, c, 0)),
            (_consumer, (out, staged, pipes, lists, counts, total, n, heads, listed, section, scale, lse, c, 1)),
        ],
        [4, 4],
        [c.registers, c.registers],
    )


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    causal: bool,
    section: int,
    lse: torch.Tensor | None = None,
) -> None:
    """Writes the output over lists (heads, n, n) of blocks of keys in descending order, of which counts (heads, n)
    are read; heads is 1, H or B·H. `section`: query heads whose tiles are taken before others' are. `lse` (B, H,
    S) gets the base-2 log-sum-exp of each row, +inf where nothing is seen. For inputs that `fits` approves of.
    """
    B, H, S, D = q.shape
    width = power_of_2(D)
    c = Config(width, causal, *DIVISIONS[width])
    n = S // c.keys
    total = B * H * n
    with on(q):
        launch(
            _kernel, (_kernel, q.device, q.dtype, c, lse is None), min(total, multiprocessors(q)),
            flat_map(q, c.rows), flat_map(k, c.keys), flat_map(v, c.keys), flat_map(out, c.rows),
            lists, counts, counter(q), total, n, B * H, lists.shape[0], H // k.shape[1], section,
            LOG2E / math.sqrt(D), lse, c,
        )  # fmt: skip
