"""The deterministic backward pass of attention over packed sequences for Hopper (compute capability 9.0), in
Gluon.

The schedule is that of `_attention_hopper_backward_deterministic.py`: one kernel for dK and dV of a block of
keys and one for dQ of a block of queries, a producer and two consumers that own 64 rows each. Blocks come from
the list of `attention_varlen.listed`; a program beyond its end loads something, computes nothing and writes
nothing.

What is streamed beyond the end of a sequence is overwritten before it is multiplied: with zeros, as in
`_attention_varlen_hopper.py`, but queries with the sequence's last, whose scores are numbers where its own are.
So their log-sum-exp of +inf makes their probabilities 0 without a mask; scores of zeros would be NaN beside a key
of -inf. What is resident beyond the end has rows of its own, which are not written. Taken for what
`_attention_varlen_hopper.fits` approves of.

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `resident.full` | each half of the two resident tiles | the producer's copy | 1, bytes | its consumer, 0 |
| `stream.full` | each buffer of the other two | the producer's copy | 1, bytes | both consumers, 0 |
| `stream.empty` | the same | each consumer, its products done | 2 | producer, 1 |

No `from __future__ import annotations` here: an aggregate reads the types of its fields from their annotations.
"""

import math

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
)

from .._common import on
from .._hopper import LOG2E, ROWS, launch, product_layout, sectioned
from .._pipeline import aggregate, copy_out, cursor, pair, pair_ring
from ._attention_hopper_backward_deterministic import STAGES, Config, heads_per_l2_group
from ._attention_varlen_hopper import FIELDS, clear_tail, packed, tile_of_head
from ._gradients import add_to_keys, add_to_queries, scored

BLOCK = 2 * ROWS
"""Rows of a resident block."""


@aggregate
class Listed:
    """The list of `attention_varlen.listed` with its room for rows; heads, of them those of a section and those
    that share a key head; and slots of the statistics.
    """

    table: gl.tensor
    rows: gl.tensor
    heads: gl.tensor
    section: gl.tensor
    groups: gl.tensor
    slots: gl.tensor

    @gluon.constexpr_function
    def __init__(self, table, rows, heads, section, groups, slots):  # type: ignore[no-untyped-def]  # as above
        self.table = table
        self.rows = rows
        self.heads = heads
        self.section = section
        self.groups = groups
        self.slots = slots


@gluon.jit
def own_block(listed):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(head, block, blocks, start, length, other start, other length, sequence) of this program: a sequence's
    blocks are `sectioned`.

    Beyond the list it is the first block of a sequence of no tokens.
    """
    sequence = 0
    start = 0
    length = 0
    other_start = 0
    other = 0
    within = 0
    blocks = 1
    row = listed.table + gl.program_id(0) // listed.heads * FIELDS
    if gl.program_id(0) < gl.load(listed.table + listed.rows * FIELDS) * listed.heads:
        start = gl.load(row)
        length = gl.load(row + 1)
        other_start = gl.load(row + 2)
        other = gl.load(row + 3)
        within = gl.program_id(0) - gl.load(row + 4) * listed.heads
        blocks = gl.load(row + 5)
        sequence = gl.load(row + 6)
    head, block = sectioned(within, blocks, listed.heads, listed.section)
    return head, block, blocks, start, length, other_start, other, sequence


@gluon.jit
def write_rows(  # type: ignore[no-untyped-def]  # Triton's types are its own
    tiles, plain, x, buffer, start, row, length, head, heads, ROWS: gl.constexpr, D: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """Rows `row` to `row + ROWS` of a head of a contiguous (T, heads, D) tensor, as far as the sequence has them:
    whole tiles by the tensor memory accelerator, which would go on into the next sequence with others. Tiles have
    WIDTH columns.
    """
    if row + ROWS <= length:
        buffer.store(x)
        fence_async_shared()
        copy_out(tiles, tile_of_head(start + row, head, D, WIDTH), buffer)
        tma.store_wait(pendings=0)
    else:
        layout: gl.constexpr = x.type.layout
        own = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        column = head * D
        within = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        columns = column + within
        places = gl.expand_dims(gl.cast(start + own, gl.int64) * (heads * D), 1) + gl.expand_dims(columns, 0)
        there = gl.expand_dims(own < length, 1)
        if WIDTH != D:
            there = there & gl.expand_dims(within < D, 0)
        gl.store(plain + places, x, mask=there)


@gluon.jit
def first_tile(key, offset, length, CAUSAL: gl.constexpr, ROWS: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The first tile of queries that sees a key."""
    first = 0
    if CAUSAL:
        first = gl.maximum(gl.minimum(key - offset, length), 0) // ROWS
    return first


@gluon.jit
def token_row(  # type: ignore[no-untyped-def]  # Triton's types are its own
    plain, eights, token, column, D: gl.constexpr, WIDTH: gl.constexpr
):
    """The D numbers from `column` of a token, filled up with zeros (1, WIDTH); tokens are 8 · `eights` numbers
    apart.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    within = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    columns = column + within
    places = plain + gl.cast(token, gl.int64) * (eights * 8) + columns
    row = gl.load(places) if WIDTH == D else gl.load(places, mask=within < D, other=0.0)
    return gl.expand_dims(row, 0)


@gluon.jit
def fill_tail(buffer, beyond, row, SIZE: gl.constexpr, D: gl.constexpr, PIECE: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """A row over those from `beyond` on, PIECE at a time. Nobody is told yet."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows = gl.arange(0, PIECE, gl.SliceLayout(1, layout))
    for i in gl.static_range(SIZE // PIECE):
        if (i + 1) * PIECE > beyond:
            part = buffer.slice(i * PIECE, PIECE)
            x = part.load(layout)
            part.store(gl.where(gl.expand_dims(rows + i * PIECE < beyond, 1), x, row))


@gluon.jit
def _keys_producer(q, g, k, v, resident, stream, listed, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Loads a block of K and V in halves, then the queries that see it and their dO, head by head."""
    head, block, _, key_start, keys, start, length, _ = own_block(listed)
    row = key_start + block * 2 * c.rows
    for i in gl.static_range(2):
        resident.fetch(i, k, v, [row + i * c.rows, head * c.width])
    at = cursor(1, c.stages)
    first = first_tile(block * 2 * c.rows, keys - length, length, c.causal, c.rows)
    for member in range(0, listed.groups):
        column = (head * listed.groups + member) * c.width
        for j in range(first, (length + c.rows - 1) // c.rows):
            stream.fetch(at, q, g, [start + j * c.rows, column])
            at = at.advanced()


@gluon.jit
def _keys_consumer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    plain, eights, dk_out, dv_out, dk_plain, dv_plain, lse, delta, resident, stream, listed, scale, root,
    c: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """dK and dV of one half of a block of keys. Scores are transposed here: keys by queries."""
    dtype: gl.constexpr = dk_out.dtype
    ROWS: gl.constexpr = c.rows
    WIDTH: gl.constexpr = c.width
    score: gl.constexpr = product_layout(ROWS)
    sums: gl.constexpr = product_layout(WIDTH)
    head, block, _, key_start, keys, start, length, sequence = own_block(listed)
    key = block * 2 * c.rows
    offset = keys - length
    k = resident.first.index(HALF)
    v = resident.second.index(HALF)
    zero = gl.zeros([ROWS, ROWS], gl.float32, score)
    # The first query that sees a key, in tokens of the sequence.
    seer = key + HALF * c.rows - offset + gl.arange(0, c.rows, gl.SliceLayout(1, score))
    columns = gl.arange(0, c.rows, gl.SliceLayout(0, score))
    dk = (gl.zeros([ROWS, WIDTH], gl.float32, sums),)
    dv = gl.zeros([ROWS, WIDTH], gl.float32, sums)
    resident.wait(HALF)
    at = cursor(0, c.stages)
    first = first_tile(key, offset, length, c.causal, c.rows)
    for member in range(0, listed.groups):
        query_head = head * listed.groups + member
        slot = gl.cast(query_head, gl.int64) * listed.slots + start // (2 * c.rows) + sequence
        place = slot * 2 * c.rows
        for j in range(first, (length + c.rows - 1) // c.rows):
            level = gl.load(lse + place + j * c.rows + columns)
            stream.wait(at)
            q = stream.first.index(at.stage)
            g = stream.second.index(at.stage)
            if (j + 1) * c.rows > length:
                token = start + length - 1
                row = token_row(plain, eights, token, query_head * c.width, c.width, c.width)
                fill_tail(q, length - j * c.rows, row, c.rows, c.width, 32)
                # With a fence and a barrier, for both.
                clear_tail(g, length - j * c.rows, c.rows, c.width)
            p, dp = scored((k,), v, (q,), g, level, zero, scale, 0)
            if c.causal:  # noqa: SIM102  # a constexpr by itself: Triton leaves the code out
                if j * c.rows < key + 2 * c.rows - 1 - offset:
                    p = gl.where(gl.expand_dims(j * c.rows + columns, 0) >= gl.expand_dims(seer, 1), p, 0.0)
            dk, dv = add_to_keys(p, dp, dk, dv, stream, at, delta, place, j, columns, c)
            at = at.advanced()
    row = key + HALF * c.rows
    write_rows(
        dk_out, dk_plain, (dk[0] * root).to(dtype), k, key_start, row, keys, head, listed.heads,
        c.rows, c.width, c.width,
    )  # fmt: skip
    write_rows(
        dv_out, dv_plain, dv.to(dtype), v, key_start, row, keys, head, listed.heads, c.rows, c.width, c.width
    )


@gluon.jit(do_not_specialize=["eights", "rows", "heads", "section", "groups", "slots"])
def _keys(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, plain, eights: tl.int64, dk, dv, plain_grads, lse, delta,
    table, rows, heads, section, groups, slots, scale, root, c: gl.constexpr,
):  # fmt: skip
    """One block of keys of one of `heads` key heads, over all its query heads. `plain` is `q` as a pointer, of
    tokens that are 8 · `eights` numbers apart, `plain_grads` are dK and dV as pointers; `root` is 1/√D.
    """
    resident = pair(k, v, c.rows, c.width)
    stream = pair_ring(q, g, c.rows, c.width, c.stages)
    listed = Listed(table, rows, heads, section, groups, slots)
    dk_plain = plain_grads[0]
    dv_plain = plain_grads[1]
    gl.warp_specialize(
        [
            (_keys_producer, (q, g, k, v, resident, stream, listed, c)),
            (
                _keys_consumer,
                (
                    plain, eights, dk, dv, dk_plain, dv_plain, lse, delta, resident, stream, listed, scale, root,
                    c, 0,
                ),
            ),
            (
                _keys_consumer,
                (
                    plain, eights, dk, dv, dk_plain, dv_plain, lse, delta, resident, stream, listed, scale, root,
                    c, 1,
                ),
            ),
        ],
        [4, 4],
        [c.registers, c.registers],
    )  # fmt: skip


@gluon.jit
def _seen(block, blocks, length, keys, CAUSAL: gl.constexpr, ROWS: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(query block, tiles of keys that it sees), the last block first under a causal mask: it is the longest."""
    limit = keys
    if CAUSAL:
        block = blocks - 1 - block
        limit = gl.minimum((block + 1) * 2 * ROWS + keys - length, keys)
    return block, gl.maximum(limit + ROWS - 1, 0) // ROWS


@gluon.jit
def _queries_producer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, resident, stream, listed, c: gl.constexpr
):
    """Loads a block of Q and dO in halves, then the keys that it sees and their V."""
    head, block, blocks, start, length, key_start, keys, _ = own_block(listed)
    block, count = _seen(block, blocks, length, keys, c.causal, c.rows)
    row = start + block * 2 * c.rows
    for i in gl.static_range(2):
        resident.fetch(i, q, g, [row + i * c.rows, head * c.width])
    at = cursor(1, c.stages)
    column = head // listed.groups * c.width
    for j in range(0, count):
        stream.fetch(at, k, v, [key_start + j * c.rows, column])
        at = at.advanced()


@gluon.jit
def _queries_consumer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dq_out, dq_plain, lse, delta, resident, stream, listed, scale, root, c: gl.constexpr, HALF: gl.constexpr
):
    """dQ of one half of a block of queries."""
    dtype: gl.constexpr = dq_out.dtype
    ROWS: gl.constexpr = c.rows
    WIDTH: gl.constexpr = c.width
    score: gl.constexpr = product_layout(ROWS)
    sums: gl.constexpr = product_layout(WIDTH)
    head, block, blocks, start, length, _, keys, sequence = own_block(listed)
    block, count = _seen(block, blocks, length, keys, c.causal, c.rows)
    q = resident.first.index(HALF)
    g = resident.second.index(HALF)
    zero = gl.zeros([ROWS, ROWS], gl.float32, score)
    row = block * 2 * c.rows + HALF * c.rows
    own = row + gl.arange(0, c.rows, gl.SliceLayout(1, score))
    columns = gl.arange(0, c.rows, gl.SliceLayout(0, score))
    clear = keys
    if c.causal:
        clear = gl.minimum(row + keys - length + 1, keys)
    place = (gl.cast(head, gl.int64) * listed.slots + start // (2 * c.rows) + sequence) * 2 * c.rows
    level = gl.load(lse + place + own)
    of_row = gl.load(delta + place + own)
    dq = (gl.zeros([ROWS, WIDTH], gl.float32, sums),)
    resident.wait(HALF)
    at = cursor(0, c.stages)
    for j in range(0, count):
        stream.wait(at)
        k = stream.first.index(at.stage)
        v = stream.second.index(at.stage)
        if (j + 1) * c.rows > keys:
            clear_tail(k, keys - j * c.rows, c.rows, c.width)
            clear_tail(v, keys - j * c.rows, c.rows, c.width)
        p, dp = scored((q,), g, (k,), v, level, zero, scale, 1)
        if (j + 1) * c.rows > clear:
            # Of keys beyond the sequence too: 2^(0 - lse) can overflow, and inf · 0 is NaN.
            if c.causal:
                seen = gl.expand_dims(own + (keys - length), 1) >= gl.expand_dims(columns + j * c.rows, 0)
            else:
                seen = gl.expand_dims(columns + j * c.rows, 0) < keys
            p = gl.where(seen, p, 0.0)
        dq = add_to_queries(p, dp, dq, of_row, stream, at)
        at = at.advanced()
    write_rows(
        dq_out, dq_plain, (dq[0] * root).to(dtype), q, start, row, length, head, listed.heads,
        c.rows, c.width, c.width,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["rows", "heads", "section", "groups", "slots"])
def _queries(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, dq, dq_plain, lse, delta, table, rows, heads, section, groups, slots, scale, root, c: gl.constexpr
):
    """One block of queries of one of `heads` heads."""
    resident = pair(q, g, c.rows, c.width)
    stream = pair_ring(k, v, c.rows, c.width, c.stages)
    listed = Listed(table, rows, heads, section, groups, slots)
    gl.warp_specialize(
        [
            (_queries_producer, (q, g, k, v, resident, stream, listed, c)),
            (_queries_consumer, (dq, dq_plain, lse, delta, resident, stream, listed, scale, root, c, 0)),
            (_queries_consumer, (dq, dq_plain, lse, delta, resident, stream, listed, scale, root, c, 1)),
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
    listed: tuple[torch.Tensor, int],
    listed_keys: tuple[torch.Tensor, int],
    causal: bool,
    longest: int,
) -> None:
    """Writes dq, dk and dv, contiguous as `grad` is. `longest` is how many queries a sequence has at most.

    The lists are of blocks of `BLOCK` queries and keys; `lse`, in base 2, and `delta`, the sums of O ∘ dO over
    rows, are laid out by `attention_varlen.statistics`.
    """
    H, D = q.shape[1:]
    slots = lse.shape[1]
    heads = k.shape[1]
    c = Config(D, causal, 0, False, STAGES[D])
    tq, tg, tk, tv, tdq, tdk, tdv = (packed(x, c.rows) for x in (q, grad, k, v, dq, dk, dv))
    root = 1 / math.sqrt(D)
    scale = LOG2E * root
    key = (q.device, q.dtype, c)
    section = heads_per_l2_group(longest, D, H // heads, heads) if causal else 1
    of_queries = section * (H // heads) if causal else 1
    with on(q):
        launch(
            _keys, (_keys, key), listed_keys[1] * heads,
            tq, tg, tk, tv, q, q.stride(0) // 8, tdk, tdv, (dk, dv), lse, delta,
            *listed_keys, heads, section, H // heads, slots, scale, root, c,
        )  # fmt: skip
        launch(
            _queries, (_queries, key), listed[1] * H, tq, tg, tk, tv, tdq, dq, lse, delta,
            *listed, H, of_queries, H // heads, slots, scale, root, c,
        )  # fmt: skip
