"""The forward pass of attention for Hopper in tiles of values of 64 or 128 columns, with a dynamic persistent
tile scheduler.

A producer warp group loads tiles of Q, K and V through the tensor memory accelerator, consumer warp groups compute
64 rows each, and in each the scores of the next block of keys are multiplied while the values of this one are:
FlashAttention-3's schedule (Shah et al., arXiv 2407.08608). The step over a block is in `_softmax.py`.

At 64 columns a block's exponentials take the exponential unit about as long as its products take the matrix
units. Two groups leave both idle while they look for maxima, add up and round; a third has work for them then, as
in FlashAttention-3's tiles of 192 rows, and the three take turns at the matrix units (ping-pong). Where tiles of
128 rows leave less of a short sequence's last tile empty, or divide the work better among the multiprocessors,
two groups are faster (`division`). At 128 columns registers hold only two, which are as fast without turns, and
under a causal mask faster.

Queries and keys may have other columns than values, up to 192: latent attention's have 128 and 64 that are turned
beside values of 128. 192 is no power of two, so their tiles lie in three pieces of 64 columns, as the tensor
memory accelerator and the matrix units take them anyway, and S is the sum of three products. Shared memory has
room for 64 columns of results then: they are written one half after the other.

A tile is 128 or 192 query rows of one head. A row's place is counted in keys: the last query's is the last
key's, also where there are more of these than queries, so that under a causal mask a row's place is the last
key that it sees. Under a full mask the first tile begins at the first query and the last one may end after the
last; under a causal mask tiles are aligned to the last key, rounded up to 64 of them, and the first one, which
is the shortest, may begin before the first query. A group whose rows all lie outside computes one block of keys
and stores nothing. What the tensor memory accelerator reads outside of a head's rows is zeros. It writes
nothing beyond the last row; a tile that begins before the first it cannot write (on an H200 a negative row was
an illegal instruction), so that the rows of a group that the first query lies within are written through
pointers. Under a full mask keys beyond the last are hidden, under a causal one every row that is stored lies
before them.

Groups start at their own diagonal: blocks of keys that all of a group's rows lie before are released unread, so
that each group masks one block, its first. Under a sliding window a tile's walk over the keys starts and ends at
it, and so does each group's within the tile's; the blocks that an end of the window cuts, one or two at each, are
steps of their own before and after the others, which know no mask.

Programs are persistent, one a multiprocessor, and take the next tile as they come to it, by a counter that the
last one to take leaves at 0 (`_grid_barrier.counter`). Tiles come in sections of heads, as many as the caller
says, the longest first, so that what is short evens out the end. Who computes a row does not change its
numbers.

Keys may come while the kernel runs, as those of other GPUs do (`forward_as_they_come`). Queries are those of two
chunks then, and a tile is of one of them. It walks its own chunk as above, and then, with no mask, others in the
order of a table (`_chunks.py`), which is that in which they come: the online softmax goes on from one to the next.
Before the first block of a chunk the producer, and nobody else, waits until a word in memory says that it has
come. What is waited for must need no multiprocessor: programs that wait may hold all of them.

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `q.full` | each group's rows of Q | the producer's copy | 1, bytes | that group, 0 |
| `q.empty` | the same | that group, after its last S | 1 | producer, 1 |
| `k.full`, `v.full` | each buffer | the producer's copy | 1, bytes | all groups, 0 |
| `k.empty` | each buffer | each group, after S = Q·Kᵀ | groups | producer, 1 |
| `v.empty` | each buffer | each group, after O += P·V | groups | producer, 1 |
| `pingpong` | each group | the group before, its products issued | 1 | that group, 1 for the first, else 0 |
| `tiles.ready` | the next tile | producer | 1 | all groups, 0 |
| `tiles.free` | the same | each group, the tile read | groups | producer, 1 |

Taken for what `takes` approves of.
No `from __future__ import annotations` here: an aggregate reads the types of its fields from their annotations.
"""

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .._common import multiprocessors, on, power_of_2
from .._grid_barrier import counter
from .._hopper import (
    KEYS,
    ROWS,
    Says,
    Strides,
    fits,
    kernel_key,
    launch,
    loadable,
    mapping,
    placed,
    product_layout,
    sectioned,
)
from .._pipeline import (
    Cursors,
    Pipes,
    aggregate,
    at_buffer,
    barriers,
    copy_out,
    cursor,
    pieces,
    ring,
    take,
    tile_buffers,
    tile_queue,
)
from ._chunks import FIELDS as _FIELDS
from ._chunks import TABLE as _TABLE
from ._softmax import apply_mask, capped, first_block, last_values, scales, scores, skip_block, step, with_sink

TABLE, FIELDS = gl.constexpr(_TABLE), gl.constexpr(_FIELDS)


@dataclass(frozen=True)
class Config:
    """A kernel at compile time: columns of a tile of values; the mask, a window of 0 being none; whether keys
    beyond the last must be hidden; whether the first query may lie within a group; the values' head dimension;
    consumer groups, whether they take turns at the matrix units, buffers of K and of V, registers of a consumer's
    thread; what products of queries and keys are multiplied with before tanh, 0 without a cap; pieces that tiles
    of Q and K have by columns, and columns of one, 0 for as many as values have; rows of a group, keys of a block;
    whether queries and keys are in chunks, as a table says.
    """

    width: int
    causal: bool
    window: int
    tail: bool
    straddled: bool
    D: int
    groups: int
    pingpong: bool
    stages: int
    registers: int
    inner: float = 0.0
    pieces: int = 1
    part: int = 0
    rows: int = ROWS
    keys: int = KEYS
    chunked: bool = False

    @property
    def columns(self) -> int:
        """Of a piece of Q and K."""
        return self.part or self.width

    @property
    def staged(self) -> int:
        """Columns of results that lie in shared memory at a time: all, or half of them."""
        return self.width if self.pieces == 1 else self.width // 2

    @property
    def ahead(self) -> int:
        """Keys after itself that a query sees under a window."""
        return self.window - 1 if self.window and not self.causal else 0


DIVISIONS = {64: (3, True, 3, 160), 128: (2, False, 2, 240)}
"""A tile's groups, whether they take turns, buffers and registers, by columns; what a smaller D leaves of these is
zeros. Registers are what a multiprocessor has for so many groups, the producer left 32."""
MIXED = {(64, 128): (2, False, 3, 240), (128, 64): (3, True, 3, 160), (192, 128): (2, False, 2, 240)}
"""The same where queries and keys have other columns than values: the former's, then the latter's."""
SMALLER = (2, False, 3, 240)
"""The same for tiles of 128 rows in place of 192."""
PIECE = 64
"""Columns of a piece where queries and keys have 192: what 128 bytes hold, over which tiles are swizzled."""


def columns(D: int) -> int:
    """Of a tile of queries or keys: a power of two, or 192."""
    return 192 if 128 < D <= 192 else power_of_2(D)


def divided(D: int) -> tuple[int, int]:
    """(pieces, columns of a piece) of a tile of queries or keys."""
    return (3, PIECE) if columns(D) == 192 else (1, columns(D))


def division(D: int, Dv: int, rows: int, heads: int, processors: int) -> tuple[int, bool, int, int]:
    """How tiles of heads of so many rows are divided. Smaller ones take an H200 up to an eighth longer a row: they
    are chosen where the most rows that one of its multiprocessors has are so much fewer.
    """
    width = power_of_2(Dv)
    found = DIVISIONS[width] if Dv == D else MIXED[columns(D), width]

    def longest(groups: int) -> int:
        tile = groups * ROWS
        return -(-heads * -(-rows // tile) // processors) * tile

    return SMALLER if found[0] == 3 and 8 * longest(2) <= 7 * longest(3) else found


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether this kernel computes attention of such tensors; the device is not looked at."""
    D, Dv = q.shape[-1], v.shape[-1]
    if Dv == D:
        return fits(q, k, v)
    mixed = (columns(D), power_of_2(Dv)) in MIXED and D % 8 == 0 and Dv % 8 == 0
    return mixed and loadable(q, k, v)


@aggregate
class Grid:
    """The tiles of a launch: `n` of each of `heads`, B·H, of which a batch has `per_batch` and `groups` share a
    key head, taken in sections of heads; a head's queries and keys; the place that tiles are aligned to. Of chunks
    queries, keys and place are those of one, and of a head's tiles each half is of one chunk of queries.
    """

    n: gl.tensor
    heads: gl.tensor
    per_batch: gl.tensor
    groups: gl.tensor
    section: gl.tensor
    queries: gl.tensor
    keys: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(  # type: ignore[no-untyped-def]  # Triton's types are its own
        self, n, heads, per_batch, groups, section, queries, keys, end
    ):
        self.n = n
        self.heads = heads
        self.per_batch = per_batch
        self.groups = groups
        self.section = section
        self.queries = queries
        self.keys = keys
        self.end = end


@gluon.jit
def _tile(t, grid, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(batch·head, place of the first row, which may be negative, first and last block of keys) of tile t."""
    head, nth = sectioned(t, grid.n, grid.heads, grid.section)
    if c.chunked:
        nth = nth % (grid.n // 2)
    start = grid.end - (nth + 1) * (c.rows * c.groups)
    low = nth * 0  # a number of the device's, as it is under a window
    last = low + (grid.keys + c.keys - 1) // c.keys - 1
    if c.causal:
        last = gl.maximum(start + (c.rows * c.groups) - 1, 0) // c.keys
    elif c.window:
        last = gl.minimum(gl.maximum(start + (c.rows * c.groups) + c.window - 2, 0) // c.keys, last)
    if c.window:
        low = gl.maximum(start - c.window + 1, 0) // c.keys
    return head, start, low, last


@gluon.jit
def _chunk(t, grid, chunks):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """What the table says of the chunk that tile t is of: where its queries begin, and its keys; how many blocks
    of other keys its rows see; where the list of these keys' chunks begins.
    """
    _, nth = sectioned(t, grid.n, grid.heads, grid.section)
    says = chunks + (TABLE + nth // (grid.n // 2) * FIELDS)
    return gl.load(says), gl.load(says + 1), gl.load(says + 2), gl.load(says + 3)


@gluon.jit
def await_word(word, number):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Until a word that only goes up is `number` or more; what is copied into shared memory after that is as it
    was when the word was written. For each thread, so that it does not matter which one asks for copies.
    """
    # System scope, as no thread of this device wrote it. By the difference, as numbers go round.
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred before;
        .reg .b32 found;
        AGAIN:
        ld.acquire.sys.global.b32 found, [$1];
        sub.s32 found, found, $2;
        setp.lt.s32 before, found, 0;
        @before bra AGAIN;
        bar.warp.sync 0xffffffff;
        fence.proxy.async.global;
        mov.b32 $0, 0;
        }
        """,
        "=r,l,r,~{memory}", [word.to(gl.int64), number], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _producer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, pipes, grid, counter, chunks, begun, c: gl.constexpr
):
    """Loads each tile's parts of Q and its blocks of K and V, the last keys first, and takes the next tile. Blocks
    of other chunks count on downwards: -1 is the first one's last.
    """
    GROUPS: gl.constexpr = c.groups
    at_k = cursor(1, c.stages)
    at_v = cursor(1, c.stages)
    q_phase = 1
    tile_phase = 1
    came = 0  # of the chunks that are waited for, those that are known to be there
    if c.chunked:
        each = gl.load(chunks + 1)
    total = grid.n * grid.heads
    t = gl.program_id(0)
    while t < total:
        head, start, low, last = _tile(t, grid, c)
        batch = head // grid.per_batch
        head = head % grid.per_batch
        key_head = head // grid.groups
        row = start - (grid.keys - grid.queries)
        key = last * c.keys
        if c.chunked:
            first_row, first_key, others, entry = _chunk(t, grid, chunks)
            row += first_row
            key += first_key
            low -= others
            change = last + 1  # the block with which another chunk begins
        # Keys do not wait for those who still use the queries before.
        pipes.k.fetch(at_k, k, [batch, key_head, key, 0], c.pieces)
        for i in gl.static_range(GROUPS):
            pipes.q.fetch(at_buffer(i, q_phase), q, [batch, head, row + i * c.rows, 0], c.pieces)
        q_phase ^= 1
        for j in range(0, last + 1 - low):
            at_k = at_k.advanced()
            pipes.v.fetch(at_v, v, [batch, key_head, key - j * c.keys, 0])
            at_v = at_v.advanced()
            if j < last - low:
                if c.chunked:  # noqa: SIM102  # known when it is compiled
                    if j + 1 == change:
                        number = gl.load(chunks + entry + 1)
                        number = gl.where(number > 0, number + batch * each, 0)
                        if number > came:
                            await_word(chunks, begun + number)
                            came = number
                        key = gl.load(chunks + entry) + change * c.keys
                        entry += 2
                        change += grid.keys // c.keys
                pipes.k.fetch(at_k, k, [batch, key_head, key - (j + 1) * c.keys, 0], c.pieces)
        t = take(counter, total)
        tile_phase = pipes.tiles.push(t, tile_phase)


@gluon.jit
def _consumer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, plain, lse, sinks, staged, pipes, grid, scale, chunks, c: gl.constexpr, GROUP: gl.constexpr
):
    """One group's rows of every tile: online softmax in base 2 over blocks of keys, the last keys first. In the
    loop K runs one block ahead of V. A sink is counted when a tile's keys are.

    Run 0 of steps is cut by the window's end, 1 is seen by every row, 2 is cut by the window's start. Where a
    window is so narrow that both ends cut a block, each is looked for in it.
    """
    WINDOW: gl.constexpr = c.window
    AHEAD: gl.constexpr = c.ahead
    SPAN: gl.constexpr = WINDOW + AHEAD  # keys that it sees
    NARROW: gl.constexpr = WINDOW > 0 and c.keys > WINDOW
    FROM: gl.constexpr = 0 if AHEAD else 1
    UNTIL: gl.constexpr = 3 if WINDOW else 2
    ROWS: gl.constexpr = c.rows
    KEYS: gl.constexpr = c.keys
    WIDTH: gl.constexpr = c.width
    score: gl.constexpr = product_layout(KEYS)
    sums: gl.constexpr = product_layout(WIDTH)
    score_rows: gl.constexpr = gl.SliceLayout(1, score)
    sums_rows: gl.constexpr = gl.SliceLayout(1, sums)
    q = pieces(pipes.q.buffers, GROUP, c.pieces)
    zero = gl.zeros([ROWS, KEYS], gl.float32, score)
    rows = gl.arange(0, c.rows, score_rows)
    at = Cursors(cursor(0, c.stages), cursor(0, c.stages), gl.to_tensor(1 if GROUP == 0 else 0))
    q_phase = 0
    tile_phase = 0
    ahead = grid.keys - grid.queries  # the first query's place
    total = grid.n * grid.heads
    t = gl.program_id(0)
    while t < total:
        head, start, low, last = _tile(t, grid, c)
        if c.chunked:
            first_row, _, others, _ = _chunk(t, grid, chunks)
            low -= others
        own = start + GROUP * c.rows
        outside = (own + c.rows <= ahead) | (own >= grid.keys)
        # Blocks of keys that this group begins and ends with.
        end = low
        if c.causal:
            first = gl.maximum(own + c.rows - 1, 0) // c.keys
        elif WINDOW:
            first = gl.minimum(gl.maximum(own + c.rows - 1 + AHEAD, 0) // c.keys, last)
        else:
            first = last
        if WINDOW:
            end = gl.where(outside, low, gl.maximum(own - WINDOW + 1, 0) // c.keys)
        first = gl.where(outside, low, first)
        for _ in range(first, last):
            at = skip_block(pipes, at, c, GROUP)
        pipes.q.wait(at_buffer(GROUP, q_phase))
        q_phase ^= 1
        s, at = scores(q, pipes, zero, at)
        s = capped(s, c.inner, out.dtype)
        if c.causal or WINDOW:
            limit = rows + (own + AHEAD - first * c.keys)
            if c.tail and NARROW:
                s = apply_mask(s, limit, SPAN, True, True)
                s = apply_mask(s, rows * 0 + (grid.keys - 1 - first * c.keys), 0, True, False)
            elif c.tail:
                s = apply_mask(s, gl.minimum(limit, grid.keys - 1 - first * c.keys), SPAN, True, False)
            else:
                s = apply_mask(s, limit, SPAN, True, NARROW)
        elif c.tail:
            s = apply_mask(s, rows * 0 + (grid.keys - 1 - first * c.keys), 0, True, False)
        state = first_block(s, gl.zeros([ROWS, WIDTH], gl.float32, sums), scale, out.dtype)
        count = first + 1 - end
        begin = 1
        for run in gl.static_range(FROM, UNTIL):
            until = count
            if WINDOW and run == 0:  # the blocks after the last that all rows see as a whole
                until = gl.minimum(gl.maximum(first + 1 - gl.maximum(own + WINDOW, 0) // c.keys, 1), count)
            elif WINDOW and run == 1:  # from there to the first such
                until = gl.minimum(first + 1 - gl.maximum(own + c.rows - WINDOW + c.keys - 1, 0) // c.keys, count)
                until = gl.maximum(until, begin)
            for j in range(begin, until):
                limit = rows + (own + AHEAD - (first - j) * c.keys)
                state, at = step(
                    q, pipes, zero, state, at, limit, scale, c,
                    GROUP, SPAN, run != 1 and (run == 0 or NARROW), run != 1 and (run == 2 or NARROW), c.inner,
                )  # fmt: skip
            begin = until
        # The last product with Q is done: the next tile's can be loaded.
        pipes.q.release(at_buffer(GROUP, q_phase))
        acc, at = last_values(state, pipes, at)
        if WINDOW:
            for _ in range(low, end):
                at = skip_block(pipes, at, c, GROUP)
        if (own + c.rows > ahead) & (own < grid.keys):
            row = own - ahead
            row_sum = gl.convert_layout(gl.sum(state.row_sum, 1), score_rows)
            row_max, row_sum, shrunk, empty = with_sink(state.row_max, row_sum, sinks, head % grid.per_batch)
            level = gl.where(empty, float("inf"), row_max + gl.log2(row_sum))
            stored = (rows + row >= 0) & (rows + row < grid.queries)
            line = head * grid.queries + row
            if c.chunked:
                row += first_row
                line = head * 2 * grid.queries + row
            gl.store(lse + line + rows, level, mask=stored)
            share = gl.where(empty, 0.0, shrunk / row_sum)
            acc = acc * gl.expand_dims(gl.convert_layout(share, sums_rows), 1)
            _store(out, plain, acc, staged.index(GROUP), head, row, grid, c)
        t, tile_phase = pipes.tiles.pop(tile_phase)
    tma.store_wait(pendings=0)


@gluon.jit
def _store(out, plain, acc, staged, head, row, grid, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """A group's results of rows from `row` on, in one piece or in two."""
    if c.straddled and row < 0:
        _write(out, plain, acc, head, row, grid, c)
    elif c.staged == c.width:
        _copy(out, acc, staged, head, row, grid, 0)
    else:
        left, right = gl.split(acc.reshape([c.rows, 2, c.staged]).permute((0, 2, 1)))
        _copy(out, left, staged, head, row, grid, 0)
        _copy(out, right, staged, head, row, grid, c.staged)


@gluon.jit
def _copy(out, results, staged, head, row, grid, COLUMN: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """A group's results of the columns from COLUMN on through shared memory: of rows from `row` on, as far as the
    tensor goes.
    """
    tma.store_wait(pendings=0)  # of what was copied before, which the buffer still held
    staged.store(results.to(out.dtype))
    fence_async_shared()
    copy_out(out, [head // grid.per_batch, head % grid.per_batch, row, COLUMN], staged)


@gluon.jit
def _write(out, plain, acc, head, row, grid, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """A group's results through pointers: of rows from `row` on, which may be negative, those that there are."""
    layout: gl.constexpr = acc.type.layout
    rows = row + gl.arange(0, c.rows, gl.SliceLayout(1, layout))
    columns = gl.arange(0, c.width, gl.SliceLayout(0, layout))
    origin = (head // grid.per_batch) * out.strides[0] + (head % grid.per_batch) * out.strides[1]
    places = gl.expand_dims(origin + rows * out.strides[2], 1) + gl.expand_dims(columns, 0)
    there = gl.expand_dims((rows >= 0) & (rows < grid.queries), 1)
    gl.store(plain + places, acc.to(out.dtype), mask=there & gl.expand_dims(columns < c.D, 0))


@gluon.jit(
    do_not_specialize=["begun", "n", "heads", "per_batch", "groups", "section", "queries", "keys", "end"],
    do_not_specialize_on_alignment=["sinks"],
)
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, out, plain, lse, sinks, counter, chunks, begun,
    n, heads, per_batch, groups, section, queries, keys, end, scale, c: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, then the warp groups. `plain` is `out` as a pointer; `sinks` (H,) are logits beside
    the scores, without values, None for none; numbers as in `Grid`. With a cap `scale` is that times log₂e. Of
    chunks there are the word and the table in memory (`_as_they_come.py`) and what the word was before any came.
    """
    grid = Grid(n, heads, per_batch, groups, section, queries, keys, end)
    q_ring = ring(q, c.rows, c.columns, c.groups, 1, c.pieces)
    staged = tile_buffers(q.dtype, c.groups, c.rows, c.staged)
    k_ring = ring(k, c.keys, c.columns, c.stages, c.groups, c.pieces)
    v_ring = ring(v, c.keys, c.width, c.stages, c.groups)
    pipes = Pipes(q_ring, k_ring, v_ring, barriers(c.groups, 1 if c.pingpong else 0), tile_queue(c.groups))
    gl.warp_specialize(
        [
            (_producer, (q, k, v, pipes, grid, counter, chunks, begun, c)),
            (_consumer, (out, plain, lse, sinks, staged, pipes, grid, scale, chunks, c, 0)),
            (_consumer, (out, plain, lse, sinks, staged, pipes, grid, scale, chunks, c, 1)),
            (_consumer, (out, plain, lse, sinks, staged, pipes, grid, scale, chunks, c, 2)),
        ][: c.groups + 1],
        [4, 4, 4][: c.groups],
        [c.registers, c.registers, c.registers][: c.groups],
    )


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    window: int,
    section: int,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> None:
    """Writes the output and its base-2 log-sum-exp (B, H, S), +inf for a row that sees nothing. A window of 0 is
    none, as is a cap. The last query and the last key are in one place. `section`: query heads whose tiles are
    taken before others' are. For inputs that `takes` approves of; sinks (H,) are contiguous.
    """
    of_sinks = None if sinks is None else sinks.dtype
    with on(q):
        run(planned(q, k, v, out, causal, window, section, of_sinks, cap), q, k, v, out, lse, sinks)


def planned(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    causal: bool,
    window: int,
    section: int,
    of_sinks: torch.dtype | None = None,
    cap: float = 0.0,
    chunked: bool = False,
) -> "Plan":
    """What holds for all tensors of these shapes, strides, dtypes and device."""
    strides = q.stride(), k.stride(), v.stride(), out.stride()
    given = q.dtype, q.device, multiprocessors(q), causal, window, section, of_sinks, cap, chunked
    return _plan(q.shape, k.shape, v.shape[-1], *strides, *given)


def run(
    plan: "Plan",
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None = None,
    chunks: torch.Tensor | None = None,
    begun: int | None = None,
) -> None:
    """`forward` of tensors that the plan is for, on the current device."""
    launch(
        _kernel, plan.key, plan.programs,
        placed(q, plan.q), placed(k, plan.k), placed(v, plan.v), placed(out, plan.out), out, lse, sinks,
        counter(q), chunks, begun, *plan.numbers,
    )  # fmt: skip


def forward_as_they_come(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    section: int,
    chunks: torch.Tensor,
    begun: int,
) -> None:
    """`forward` of two chunks of queries (B, H, 2·L, D), L a multiple of KEYS, to all chunks of keys that there
    are, (B, Hkv, n·L, D), which come while it runs, of one sequence after the other: as `chunks` says, int32
    (`_as_they_come.py`), whose word goes up by one a chunk from `begun` on. Each chunk of queries has its own mask
    with its own keys, and sees others whole.
    """
    with on(q):
        run(planned(q, k, v, out, causal, 0, section, chunked=True), q, k, v, out, lse, None, chunks, begun)


class Plan(NamedTuple):
    """What a launch does not have to think about again for the same shapes and strides: what the compiled kernel
    depends on, how many programs it has, its numbers and its configuration, what tensor maps say.
    """

    key: Hashable
    programs: int
    numbers: tuple[int | float | Config, ...]
    q: Says
    k: Says
    v: Says
    out: Says


@functools.lru_cache(4096)
def _plan(
    of_q: torch.Size,
    of_k: torch.Size,
    Dv: int,
    q_strides: Strides,
    k_strides: Strides,
    v_strides: Strides,
    out_strides: Strides,
    dtype: torch.dtype,
    device: torch.device,
    processors: int,
    causal: bool,
    window: int,
    section: int,
    of_sinks: torch.dtype | None,
    cap: float,
    chunked: bool,
) -> Plan:
    B, H, S, D = of_q
    heads, keys = of_k[1:3]
    chunks = 2 if chunked else 1
    if chunked:
        S = keys = S // chunks
    width = power_of_2(Dv)
    count, part = divided(D)
    ahead = keys - S
    # Under a causal mask a group's 64 rows begin at a multiple of 64, so that the diagonal cuts one block of keys.
    end = -(-keys // ROWS) * ROWS
    rows = end - ahead if causal else S
    tail, straddled = not causal and keys % KEYS != 0, causal and ahead % ROWS != 0
    scale, inner = scales(D, cap)
    chosen = division(D, Dv, rows, B * H * chunks, processors)
    c = Config(width, causal, window, tail, straddled, Dv, *chosen, inner, count, part, chunked=chunked)
    tile = c.rows * c.groups
    n = -(-rows // tile)
    if not causal:
        end = ahead + n * tile
    n *= chunks
    return Plan(
        kernel_key(_kernel, device, dtype, of_sinks, c),
        min(B * H * n, processors),
        (n, B * H, H, H // heads, min(section, B * H), S, keys, end, scale, c),
        mapping(of_q, q_strides, c.rows, dtype, part),
        mapping(of_k, k_strides, c.keys, dtype, part),
        mapping(torch.Size((*of_k[:3], Dv)), v_strides, c.keys, dtype),
        mapping(torch.Size((*of_q[:3], Dv)), out_strides, c.rows, dtype, c.staged),
    )
