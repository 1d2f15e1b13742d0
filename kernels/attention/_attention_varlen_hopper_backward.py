"""The backward pass of attention over packed sequences for Hopper in one kernel of five products, and a small one.

The schedule is that of `_attention_hopper_backward.py`, the list of blocks and who sees whom that of
`_attention_varlen_hopper_backward_deterministic.py`. The order of additions is not fixed here either: dQ is not
the same to the bit in every run, dK and dV are. The accumulator of dQ is laid out as the statistics are, (H,
slots, 128, columns of a tile): each sequence begins a slot, so that what is added beyond its end is nobody's.
`_convert_dq` takes the rest. Taken for what `_attention_varlen_hopper.takes` and `fits` here approve of.

Under a window a block walks from the first tile of queries that sees any of its keys to the last, which may be no
tile where a sequence has more keys than queries. Keys and tiles of queries begin anywhere beside each other then:
what the window's edges, the diagonal or the end of the keys cut is masked. Heads of 40 to 120 columns that are not
64 have maps with a dimension of heads, so that columns beyond a head's are zeros and are not written. Sinks are in
the log-sum-exp that is read, and nowhere else here. Caps of scores are as in the dense kernel.

What the tensor memory accelerator reads beyond the end of a sequence is overwritten by the producer, before it
tells the others: queries with the last one and dO with zeros, as in the two kernels, and keys and values with
zeros, because dQ is multiplied with all keys of a block, and 0 · NaN is NaN. Such a tile arrives at a barrier
of its own first, `landed`, and the producer arrives at `full` in the place of its copy. The probabilities of keys
beyond the end are hidden: 2^(0 - level) can overflow.

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `resident.full` | each half of K and V | the copy, or with a tail the producer | 1, bytes | both consumers, 0 |
| `stream.full` | each buffer of Q, dO, lse, delta | the same | 1, bytes | both consumers, 0 |
| `stream.empty` | the same | each consumer, after dK += dSᵀ·Q | 2 | producer, 1 |
| `landed` | a tile that has a tail | the producer's copy | 1, bytes | producer, 0 |
| `ready` | each buffer of dS, each consumer | that consumer, its dS stored | 1 | the other, 0 |
| `free` | the same | that consumer, after dQ = dS·K of both halves | 1 | the other, 1 |

No `from __future__ import annotations` here: an aggregate reads the types of its fields from their annotations.
"""

import math
from dataclasses import dataclass, field, replace

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import base_value

from .._common import on, power_of_2
from .._hopper import (
    ROWS,
    TensorMap,
    launch,
    plain_layout,
    product_layout,
    shared_layout,
    thread_barrier,
    visible,
)
from .._pipeline import BackwardPipes, Statistics, aggregate, copy_in, cursor, pair, pair_ring
from . import _attention_hopper_backward as dense
from ._attention_hopper_backward import LINE, Schedule
from ._attention_hopper_backward_deterministic import heads_per_l2_group
from ._attention_varlen_hopper import FIELDS, place_of_tile, tile_of_head, tiles_of
from ._attention_varlen_hopper_backward_deterministic import (
    Listed,
    fill_tail,
    first_tile,
    own_block,
    token_row,
    write_rows,
)
from ._gradients import add_last, add_step, exchanges, first_scores, offer_zeros, place_of_ds, probabilities
from ._softmax import scales

AVAILABLE = dense.AVAILABLE
NARROW = Schedule(64, 4)
SCHEDULES = {**dense.SCHEDULES, (64, True): NARROW}
"""Over lengths that differ, by width and whether causal: the dense kernel's, but for D = 64 under a causal mask,
where tiles of 64 queries waste less at the ends of sequences. See `scheduled`."""


@dataclass(frozen=True)
class Config(dense.Config):
    """The dense kernel's, with columns of a head, of which a tile may have more."""

    D: int = field(kw_only=True)


@aggregate
class Streamed:
    """What is streamed: Q and dO, their statistics, and Q as a pointer, of tokens that are 8 · `eights` numbers
    apart, and heads 8 · `apart`.
    """

    q: base_value
    g: base_value
    lse: base_value
    delta: base_value
    plain: gl.tensor
    eights: gl.tensor
    apart: gl.tensor

    @gluon.constexpr_function
    def __init__(self, q, g, lse, delta, plain, eights, apart):  # type: ignore[no-untyped-def]  # as above
        self.q = q
        self.g = g
        self.lse = lse
        self.delta = delta
        self.plain = plain
        self.eights = eights
        self.apart = apart


@gluon.jit
def _span(  # type: ignore[no-untyped-def]  # Triton's types are its own
    block, length, keys, CAUSAL: gl.constexpr, ROWS: gl.constexpr, QUERIES: gl.constexpr, WINDOW: gl.constexpr
):
    """(first tile of queries, how many, how many in the sequence) of a block of keys: none without queries, nor
    where all come too late for a window. Under neither mask nor window each block starts at its own place, and
    after the last tile comes the first.
    """
    tiles = (length + QUERIES - 1) // QUERIES
    if WINDOW:
        BACK: gl.constexpr = 0 if CAUSAL else WINDOW - 1
        first = first_tile(block * 2 * ROWS - BACK, keys - length, length, True, QUERIES)
        # The first query that does not see the last key.
        until = (block + 1) * 2 * ROWS - 1 + WINDOW - (keys - length)
        end = gl.minimum((gl.maximum(until, 0) + QUERIES - 1) // QUERIES, tiles)
        count = gl.maximum(end - first, 0)
    elif CAUSAL:
        first = first_tile(block * 2 * ROWS, keys - length, length, CAUSAL, QUERIES)
        count = tiles - first
    else:
        first = block * (2 * ROWS // QUERIES) % gl.maximum(tiles, 1)
        count = tiles
    return first, count, tiles


@gluon.jit
def _cut(  # type: ignore[no-untyped-def]  # Triton's types are its own
    ahead, CAUSAL: gl.constexpr, ROWS: gl.constexpr, QUERIES: gl.constexpr, WINDOW: gl.constexpr
):
    """Whether the diagonal or a window cuts a tile of queries, the first of which is so many places ahead of the
    first key of a block: not all of the one see all of the other.
    """
    LOW: gl.constexpr = 2 * ROWS - 1 if CAUSAL else 2 * ROWS - WINDOW
    return (ahead < LOW) | (ahead > WINDOW - QUERIES)


@gluon.jit
def _masked(  # type: ignore[no-untyped-def]  # Triton's types are its own
    p, j, own, columns, key, length, keys, c: gl.constexpr, HALF: gl.constexpr
):
    """P of `own` keys, of a block that begins at `key`, with the jth tile of queries: 0 where these see none."""
    if c.window:
        ahead = j * c.queries + (keys - length) - key
        # Under a causal mask keys beyond the end come after every query.
        beyond = False if c.causal else key + 2 * c.rows > keys
        if _cut(ahead, c.causal, c.rows, c.queries, c.window) | beyond:
            queries = gl.expand_dims(columns + (j * c.queries + keys - length), 0)
            of_keys = gl.expand_dims(own, 1)
            seen = visible(queries, of_keys, c.causal, c.window)
            if not c.causal:
                seen = seen & (of_keys < keys)
            p = gl.where(seen, p, 0.0)
    elif c.causal:
        # Cuts the last block of keys for every query of the sequence, too; others have the probability 0.
        if j * c.queries < key + 2 * c.rows - 1 - (keys - length):
            queries = gl.expand_dims(columns + (j * c.queries + keys - length), 0)
            p = gl.where(queries >= gl.expand_dims(own, 1), p, 0.0)
    else:  # a constexpr by itself: Triton leaves the code out
        if key + (HALF + 1) * c.rows > keys:
            p = gl.where(gl.expand_dims(own < keys, 1), p, 0.0)
    return p


@gluon.jit
def _zero_tail(buffer, beyond, SIZE: gl.constexpr, D: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Zeros over rows from `beyond` on, in pieces of eight numbers a thread: the producer has 24 registers."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    fill_tail(buffer, beyond, gl.zeros([1, D], buffer.dtype, layout), SIZE, D, 1024 // D)


@gluon.jit
def _hand_over(full):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """What was overwritten can be multiplied."""
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def _fetch(streamed, full, stream, statistics, stage, tile, at):  # type: ignore[no-untyped-def]  # as above
    """Asks for a tile of what is streamed, whose statistics begin `at`, to arrive at `full`."""
    mbarrier.expect(full, 2 * streamed.q.block_type.nbytes + 2 * streamed.lse.block_type.nbytes)
    copy_in(streamed.q, tile, full, stream.first.index(stage))
    copy_in(streamed.lse, [at], full, statistics.lse.index(stage))
    copy_in(streamed.g, tile, full, stream.second.index(stage))
    copy_in(streamed.delta, [at], full, statistics.delta.index(stage))


@gluon.jit
def _producer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    streamed, k, v, resident, stream, statistics, landed, listed, c: gl.constexpr
):
    """Loads a block of K and V in halves, then the queries that see it, their dO and their statistics."""
    head, block, _, key_start, keys, start, length, sequence = own_block(listed)
    key = block * 2 * c.rows
    landed_phase = 0
    for half in gl.static_range(2):
        beyond = keys - key - half * c.rows
        at = key_start + key + half * c.rows
        if beyond < c.rows:
            mbarrier.expect(landed, 2 * k.block_type.nbytes)
            copy_in(k, tile_of_head(at, head, c.D, c.width), landed, resident.first.index(half))
            copy_in(v, tile_of_head(at, head, c.D, c.width), landed, resident.second.index(half))
            mbarrier.wait(landed, landed_phase)
            landed_phase ^= 1
            _zero_tail(resident.first.index(half), beyond, c.rows, c.width)
            _zero_tail(resident.second.index(half), beyond, c.rows, c.width)
            _hand_over(resident.full.index(half))
        else:
            resident.fetch(half, k, v, tile_of_head(at, head, c.D, c.width))
    place = cursor(1, c.stages)
    first, count, tiles = _span(block, length, keys, c.causal, c.rows, c.queries, c.window)
    for member in range(0, listed.groups):
        if c.width == c.D:
            column = (head * listed.groups + member) * c.width
            within = column
        else:
            column = head * listed.groups + member
            within = column * (streamed.apart * 8)
        base = ((head * listed.groups + member) * listed.slots + start // (2 * c.rows) + sequence) * c.ratio
        more = count
        if c.schedule.ahead:
            # The last step looks one ahead: it gets the last tile once more.
            more = count + gl.where(member == listed.groups - 1, 1, 0)
        for i in range(0, more):
            j = first + gl.maximum(gl.minimum(i, count - 1), 0)
            if not c.causal and not c.window:
                j = gl.where(j >= tiles, gl.maximum(j - tiles, 0), j)
            at = (base + j) * c.queries
            tile = place_of_tile(start + j * c.queries, column, c.D, c.width)
            beyond = length - j * c.queries
            full = stream.full.index(place.stage)
            mbarrier.wait(stream.empty.index(place.stage), place.phase)
            if beyond < c.queries:
                _fetch(streamed, landed, stream, statistics, place.stage, tile, at)
                # Where there are no queries this is for a look ahead, and nobody's.
                token = gl.maximum(start + length - 1, 0)
                last = token_row(streamed.plain, streamed.eights, token, within, c.D, c.width)
                mbarrier.wait(landed, landed_phase)
                landed_phase ^= 1
                fill_tail(stream.first.index(place.stage), beyond, last, c.queries, c.width, 1024 // c.width)
                _zero_tail(stream.second.index(place.stage), beyond, c.queries, c.width)
                _hand_over(full)
            else:
                _fetch(streamed, full, stream, statistics, place.stage, tile, at)
            place = place.advanced()


@gluon.jit
def _consumer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dk_out, dv_out, dk_plain, dv_plain, sums, pipes, listed, scale, root,
    c: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """dK and dV of one half of a block of keys, and half of its part of dQ. Scores are transposed here."""
    dtype: gl.constexpr = dk_out.dtype
    LINES: gl.constexpr = 64 * c.part // c.line
    ROWS: gl.constexpr = c.rows
    QUERIES: gl.constexpr = c.queries
    PART: gl.constexpr = c.part
    WIDTH: gl.constexpr = c.width
    score: gl.constexpr = product_layout(QUERIES)
    total: gl.constexpr = product_layout(WIDTH)
    head, block, _, key_start, keys, start, length, sequence = own_block(listed)
    key = block * 2 * c.rows
    zero = gl.zeros([ROWS, QUERIES], gl.float32, score)
    none = gl.zeros([64, PART], gl.float32, product_layout(PART))
    own = key + HALF * c.rows + gl.arange(0, c.rows, gl.SliceLayout(1, score))
    columns = gl.arange(0, c.queries, gl.SliceLayout(0, score))
    dk = gl.zeros([ROWS, WIDTH], gl.float32, total)
    dv = gl.zeros([ROWS, WIDTH], gl.float32, total)
    pipes.resident.wait(0)
    pipes.resident.wait(1)
    at = cursor(0, c.stages)
    step = offer_zeros(pipes, gl.to_tensor(0), c, HALF)
    first, count, tiles = _span(block, length, keys, c.causal, c.rows, c.queries, c.window)
    slot = start // (2 * c.rows) + sequence
    last = (((head * listed.groups * listed.slots + slot) * c.ratio + first) * 2 + HALF) * LINES
    s = first_scores(pipes, zero, c, HALF)
    for member in range(0, listed.groups):
        base = ((head * listed.groups + member) * listed.slots + slot) * c.ratio
        for i in range(0, count):
            j = first + i
            if not c.causal and not c.window:
                j = gl.where(j >= tiles, j - tiles, j)
            place = ((base + j) * 2 + HALF) * LINES
            to = place_of_ds(step, c)
            p, slope, dp = probabilities(s, step, at, pipes, zero, scale, c, HALF, c.inner)
            p = _masked(p, j, own, columns, key, length, keys, c, HALF)
            s, dk, dv, at, step = add_step(
                p, slope, dp, s, dk, dv, at, step, to, last, pipes, sums, zero, none, c, HALF, c.inner
            )
            last = place
    # Without queries these are zeros, to an empty sequence's own slot or by a program without a block.
    add_last(step, last, pipes, sums, none, c, HALF)
    row = key + HALF * c.rows
    k = pipes.resident.first.index(HALF)
    v = pipes.resident.second.index(HALF)
    write_rows(
        dk_out, dk_plain, (dk * root).to(dtype), k, key_start, row, keys, head, listed.heads, c.rows, c.D, c.width
    )
    write_rows(dv_out, dv_plain, dv.to(dtype), v, key_start, row, keys, head, listed.heads, c.rows, c.D, c.width)
    # Rows that were not written by tiles leave the last addition unwaited for.
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["eights", "apart", "rows", "heads", "section", "groups", "slots"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, eights: tl.int64, apart: tl.int64, lse, delta, dk, dv, plain, sums,
    rows, heads, section, groups, slots, scale, root, c: gl.constexpr,
):  # fmt: skip
    """One block of keys of one of `heads` key heads, over all its query heads: dK and dV, and its part of dQ·√D
    added to `sums`. `plain` has pointers: to Q, whose tokens are 8 · `eights` numbers apart and heads 8 · `apart`,
    to dK and dV, and to the list, with room for so many rows; `root` is 1/√D.
    """
    resident = pair(k, v, c.rows, c.width)
    stream = pair_ring(q, g, c.queries, c.width, c.stages)
    statistics = Statistics(
        gl.allocate_shared_memory(gl.float32, [c.stages, c.queries], lse.layout),
        gl.allocate_shared_memory(gl.float32, [c.stages, c.queries], lse.layout),
        stream.full,
    )
    one, other = exchanges(sums, k.dtype, c)
    upper = BackwardPipes(resident, stream, statistics, one)
    lower = BackwardPipes(resident, stream, statistics, other)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    listed = Listed(plain[3], rows, heads, section, groups, slots)
    streamed = Streamed(q, g, lse, delta, plain[0], eights, apart)
    dk_plain = plain[1]
    dv_plain = plain[2]
    gl.warp_specialize(
        [
            (_producer, (streamed, k, v, resident, stream, statistics, landed, listed, c)),
            (
                _consumer,
                (
                    dk, dv, dk_plain, dv_plain, sums, upper, listed, scale, root,
                    c, 0,
                ),
            ),
            (
                _consumer,
                (
                    dk, dv, dk_plain, dv_plain, sums, lower, listed, scale, root,
                    c, 1,
                ),
            ),
        ],
        [4, 4],
        [c.registers, c.registers],
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "heads", "slots"])
def _convert_dq(  # type: ignore[no-untyped-def]  # Triton's types are its own
    sums, out, table, rows, heads, slots, root, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """64 rows of dQ of a listed block of queries, as far as the sequence has them."""
    piece = tl.program_id(0) % 2
    unit = tl.program_id(0) // 2
    row = table + unit // heads * FIELDS
    if unit // heads >= tl.load(table + rows * FIELDS):
        return
    start = tl.load(row)
    length = tl.load(row + 1)
    within = unit - tl.load(row + 4) * heads
    blocks = tl.load(row + 5)
    head = within // blocks
    first = (within - head * blocks) * 2 * ROWS + piece * ROWS
    slot = head.to(tl.int64) * slots + start // (2 * ROWS) + tl.load(row + 6)
    x = tl.load(sums + (slot * 2 * ROWS + first) * WIDTH + tl.arange(0, ROWS * WIDTH))
    x = (x * root).to(out.dtype.element_ty)
    x = x.reshape(WIDTH // 8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(ROWS, WIDTH)
    own = first + tl.arange(0, ROWS)
    places = out + ((start + own).to(tl.int64) * heads + head)[:, None] * D
    columns = tl.arange(0, WIDTH)[None, :]
    places += columns
    inside = (own < length)[:, None]
    if WIDTH != D:
        inside = inside & (columns < D)
    tl.store(places, x, mask=inside)


def fits(heads: int, slots: int) -> bool:
    """Whether coordinates of the statistics, and of the accumulator, are 32-bit numbers."""
    return heads * slots * 2 * ROWS < 1 << 31


def scheduled(width: int, causal: bool, tokens: int, sequences: int, longest: int, plain: bool = True) -> Schedule:
    """The dense kernel's schedule where the mean length is 0.9 of the longest or more, as the host knows without
    waiting for the device: over equal lengths tiles of 64 queries take 6 % longer on an H200.

    With a window or a cap of scores 64 columns have tiles of 64 queries always: those of 128 spill up to 588
    bytes, these 16. Neither was timed.
    """
    if width == 64 and not plain:
        return NARROW
    even = tokens >= 0.9 * sequences * longest
    return (dense.SCHEDULES if even else SCHEDULES)[width, causal]


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
    window: int = 0,
    cap: float = 0.0,
    schedule: Schedule | None = None,
) -> None:
    """Writes dq, dk and dv, contiguous as `grad` is; arguments as for the deterministic `backward`. A window of 0
    is none, as is a cap. Takes room for dq in fp32, each sequence filled up to whole blocks and columns to a power
    of two.
    """
    H, D = q.shape[1:]
    width = power_of_2(D)
    slots = lse.shape[1]
    heads = k.shape[1]
    scale, inner = scales(D, cap)
    # There is a slot for each whole block of all tokens, and one for each sequence.
    sequences = slots - len(q) // (2 * ROWS)
    s = schedule or scheduled(width, causal, len(q), sequences, longest, not window and not cap)
    s = replace(s, apart=False)  # Q has no barrier of its own here
    c = Config(width, causal, window, False, s, shared_layout(ROWS, s.rows, q.dtype), inner=inner, D=D)
    tq, tg = (tiles_of(x, s.rows) for x in (q, grad))
    tk, tv, tdk, tdv = (tiles_of(x, ROWS) for x in (k, v, dk, dv))
    tlse, tdelta = (TensorMap(x, [x.numel()], [1], [s.rows], plain_layout(1)) for x in (lse, delta))
    sums = torch.zeros(lse.numel() * width // LINE, LINE, dtype=torch.float32, device=q.device)
    tsums = TensorMap(sums, list(sums.shape), [LINE, 1], [s.rows * width // 2 // LINE, LINE], plain_layout(2))
    root = 1 / math.sqrt(D)
    section = heads_per_l2_group(longest, width, H // heads, heads) if causal and not window else 1
    table, rows = listed_keys
    with on(q):
        launch(
            _kernel, (_kernel, q.device, q.dtype, c), rows * heads,
            tq, tg, tk, tv, q.stride(0) // 8, q.stride(1) // 8, tlse, tdelta, tdk, tdv, (q, dk, dv, table), tsums,
            rows, heads, section, H // heads, slots, scale, root, c,
        )  # fmt: skip
        _convert_dq[(2 * listed[1] * H,)](sums, dq, *listed, H, slots, root, D, width, ROWS, num_warps=width // 16)
