"""The backward pass of attention for Hopper in one kernel of five products; a small one converts dQ.

A block of work is 128 keys of one key head: a program walks over the queries that see them, as `_keys` of
`_attention_hopper_backward_deterministic.py` does; beside dK and dV it makes its part of dQ. As in
FlashAttention-3's backward (Shah et al., arXiv 2407.08608) the two consumers exchange dS through shared memory,
each multiplies all 128 keys for half of a tile's dQ, and the copy engine adds that to an fp32 accumulator in
memory. dQ is multiplied a step late, from the dS of the step before, for which no consumer waits then.

The order of those additions is not fixed: dQ is not the same to the bit in every run. dK and dV are.

At 64 columns shared memory has room for two blocks of K and V. Programs are persistent there, one a
multiprocessor: each takes the next block as it comes to it, as the forward pass takes tiles, and loads that and
its first queries while the last steps of the block before are computed. Starting a program and waiting for its
first tiles takes an H200 as long as three steps; a sequence of 512 tokens has four.

The accumulator is not laid out as dQ is. A thread of a warp group holds, of every 8 columns, pairs of two rows
that are 8 apart; these four numbers lie together, the threads' one after the other: a warp stores 512 bytes in a
row, and a piece is one box for the copy engine. `_convert_dq` puts things in their place.

The addition is `cp.reduce.async.bulk.tensor`, `add_out` of `_pipeline.py`; AVAILABLE says whether Triton has it.

Under a window a block walks from the first tile of queries that sees any of its keys to the last. Tiles that the
window's edges or the causal mask cut are masked, the others not.

Where every query sees every key there may be more or fewer keys than queries (`uneven`), both in whole blocks.
So context parallel attention has the gradients of a rank's queries and of the keys before them.

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `resident.full` | each half of K and V | the producer's copy | 1, bytes | both consumers, 0 |
| `resident.empty` | each of two blocks of K and V | each consumer, dK and dV copied out | 2 | producer, 1 |
| `stream.full` | each buffer of Q, dO, lse, delta | the producer's copy | 1, bytes | both consumers, 0 |
| `q_full` | each buffer of Q, where it is apart | the producer's copy | 1, bytes | both consumers, 0 |
| `stream.empty` | the same | each consumer, after dK += dSᵀ·Q | 2 | producer, 1 |
| `ready` | each buffer of dS, each consumer | that consumer, its dS stored | 1 | the other, 0 |
| `free` | the same | that consumer, after dQ = dS·K of both halves | 1 | the other, 1 |
| `queue.ready` | the next block, where programs are persistent | producer | 1 | both consumers, 0 |
| `queue.free` | the same | each consumer, the block read | 2 | producer, 1 |

Taken for what `_hopper.fits` approves of.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .._common import multiprocessors, on, power_of_2
from .._grid_barrier import counter
from .._hopper import (
    ROWS,
    Says,
    flat_mapping,
    kernel_key,
    launch,
    mapping,
    placed,
    plain_layout,
    product_layout,
    sectioned,
    shared_layout,
    visible,
)
from .._pipeline import (
    ADDS,
    BackwardPipes,
    Blocks,
    Statistics,
    barriers,
    copy_in,
    copy_out,
    cursor,
    pair,
    pair_ring,
    take,
    tile_queue,
)
from ._attention_hopper_backward_deterministic import REGISTERS, even, heads_per_l2_group
from ._gradients import add_last, add_step, exchanges, first_scores, offer_zeros, place_of_ds, probabilities
from ._softmax import scales

LINE = 256
"""Numbers in a row of the accumulator as the copy engine sees it: the longest box."""
BUFFERS = 2
"""Buffers of dS: of this step, and of the one before, which dQ is multiplied from."""
BLOCKS = {64: 2, 128: 1}
"""Blocks of K and V in shared memory by width, as many as fit: where scores are not multiplied a step ahead, nor
capped, for which no registers are left."""
PROGRAMS = 192
"""Blocks of keys of a section of heads that take turns, or four heads where these have more."""
SHORT = 2048
"""Tokens up to which heads take turns at 128 columns, where a group has fewer than MANY."""
MANY = 6
AVAILABLE = ADDS
"""Whether this Triton can have the copy engine add."""


@dataclass(frozen=True)
class Schedule:
    """Queries of a step, steps in flight, whether the scores of the next step are issued before this one's last
    products are waited for, and whether Q has a barrier of its own, so that these do not wait for the step's dO.
    """

    rows: int
    stages: int
    ahead: bool = True
    apart: bool = False


@dataclass(frozen=True)
class Config:
    """A kernel at compile time: columns of a tile, the mask, a window of 0 being none, whether the last block is
    not whole, the schedule, the layout of dS in shared memory; whether there are not as many keys as queries; what
    products of queries and keys are multiplied with before tanh, 0 without a cap; blocks of K and V in shared
    memory, of which two make programs persistent; whether heads of a group take turns; rows of a consumer, buffers
    of dS, a line of the accumulator, a consumer's registers.
    """

    width: int
    causal: bool
    window: int
    tail: bool
    schedule: Schedule
    exchanged: gl.NVMMASharedLayout
    uneven: bool = False
    inner: float = 0.0
    blocks: int = 1
    turns: bool = False
    rows: int = ROWS
    buffers: int = BUFFERS
    line: int = LINE
    registers: int = REGISTERS

    @property
    def queries(self) -> int:
        """Of a step."""
        return self.schedule.rows

    @property
    def stages(self) -> int:
        """Steps in flight."""
        return self.schedule.stages

    @property
    def ratio(self) -> int:
        """Steps in a block's rows."""
        return 2 * self.rows // self.queries

    @property
    def part(self) -> int:
        """Columns of dQ of one consumer."""
        return self.width // self.ratio


SCHEDULES = {
    (64, True): Schedule(128, 2, ahead=False),
    (64, False): Schedule(128, 2, ahead=False),
    (128, True): Schedule(64, 3),
    (128, False): Schedule(64, 3, apart=True),
}
"""By width and whether causal, as measured on an H200."""


@gluon.jit
def _span(  # type: ignore[no-untyped-def]  # Triton's types are its own
    block, tiles, CAUSAL: gl.constexpr, ROWS: gl.constexpr, QUERIES: gl.constexpr, WINDOW: gl.constexpr,
    UNEVEN: gl.constexpr = False,
):  # fmt: skip
    """(first tile of queries, of so many, how many) of a block of keys. Under neither mask nor window each
    block starts at its own place too, so that not all of a head add to the same rows at a time; after a head's
    last tile comes its first.
    """
    PER: gl.constexpr = 2 * ROWS // QUERIES
    first = PER * block
    end = tiles
    if UNEVEN:
        first = first % tiles
    if WINDOW:
        end = gl.minimum(first + (WINDOW + 2 * ROWS - 2) // QUERIES + 1, end)
        if not CAUSAL:
            first = gl.maximum(first - (WINDOW + QUERIES - 2) // QUERIES, 0)
    count = end
    if CAUSAL or WINDOW:
        count -= first
    return first, count


@gluon.jit
def _loops(groups, count, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(Steps of the outer loop, of the inner): heads of a group, and tiles of queries of each; where heads take
    turns one loop has all. A loop over heads within one over tiles would hold a tile's mask in registers.
    """
    outer = groups
    inner = count
    if c.turns:
        outer = 1
        inner = groups * count
    return outer, inner


@gluon.jit
def _at(outer, inner, whose, turn, first, tiles, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """(Head of the group, tile of queries) of a step, `whose` and `turn` where heads take turns."""
    member = outer
    j = first + inner
    if not c.causal and not c.window:
        j = gl.where(j >= tiles, j - tiles, j)
    if c.turns:
        member = whose
        j = gl.maximum(turn, first)
    return member, j


@gluon.jit
def _next(whose, turn, block, groups, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Whose turn is next, and at which tile.

    The last tile comes first. So blocks of keys that begin together walk together, until one has no further
    queries: of a whole group Q, dO and dQ of some tiles are in use at a time, not of all. Each block begins with
    another head, so that not all add to the same rows of dQ.
    """
    if c.turns:
        whose = gl.where(whose == groups - 1, 0, whose + 1)
        turn = gl.where(whose == block % groups, turn - 1, turn)
    return whose, turn


@gluon.jit
def _first_tile(head, tiles, blocks, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Of a query head, of so many tiles, in statistics and accumulator, whose heads have room for whole blocks."""
    place = head * blocks.n * c.ratio
    if c.uneven:
        place = head * tiles
    return place


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
def _load(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, lse, delta, resident, stream, statistics, blocks, nth, at, own, c: gl.constexpr
):
    """Loads the nth block of K and V in halves, then the queries that see it, their dO and their statistics. The
    next place in their ring.
    """
    head, block = sectioned(nth, blocks.n, blocks.heads, blocks.section)
    batch = head // blocks.per_batch
    key_head = head % blocks.per_batch
    if c.blocks > 1:
        mbarrier.wait(resident.empty.index(own.stage), own.phase)
    for half in gl.static_range(2):
        place = [batch, key_head, block * 2 * c.rows + half * c.rows, 0]
        resident.fetch(2 * own.stage + half, k, v, place)
    tiles = (blocks.length + c.queries - 1) // c.queries
    first, count = _span(block, tiles, c.causal, c.rows, c.queries, c.window, c.uneven)
    outer, inner = _loops(blocks.groups, count, c)
    whose = block % blocks.groups
    turn = tiles - 1
    for lap in range(0, outer):
        more = inner
        if c.schedule.ahead:
            # The last step looks one ahead: it gets the last tile once more.
            more = inner + gl.where(lap == outer - 1, 1, 0)
        for i in range(0, more):
            member, j = _at(lap, gl.minimum(i, inner - 1), whose, turn, first, tiles, c)
            query_head = key_head * blocks.groups + member
            row = (_first_tile(head * blocks.groups + member, tiles, blocks, c) + j) * c.queries
            full = stream.full.index(at.stage)
            mbarrier.wait(stream.empty.index(at.stage), at.phase)
            if c.schedule.apart:
                q_full = statistics.q_full.index(at.stage)
                mbarrier.expect(q_full, q.block_type.nbytes)
                mbarrier.expect(full, q.block_type.nbytes + 2 * lse.block_type.nbytes)
                copy_in(q, [batch, query_head, j * c.queries, 0], q_full, stream.first.index(at.stage))
            else:
                mbarrier.expect(full, 2 * q.block_type.nbytes + 2 * lse.block_type.nbytes)
                copy_in(q, [batch, query_head, j * c.queries, 0], full, stream.first.index(at.stage))
            copy_in(lse, [row], full, statistics.lse.index(at.stage))
            copy_in(g, [batch, query_head, j * c.queries, 0], full, stream.second.index(at.stage))
            copy_in(delta, [row], full, statistics.delta.index(at.stage))
            at = at.advanced()
            whose, turn = _next(whose, turn, block, blocks.groups, c)
    return at


@gluon.jit
def _producer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, g, k, v, lse, delta, counter, resident, stream, statistics, queue, blocks, c: gl.constexpr
):
    """Loads what a program's block needs, or that of each of its blocks, and takes the next."""
    at = cursor(1, c.stages)
    own = cursor(1, c.blocks)
    nth = gl.program_id(0)
    if c.blocks == 1:
        _load(q, g, k, v, lse, delta, resident, stream, statistics, blocks, nth, at, own, c)
    else:
        total = blocks.n * blocks.heads
        phase = 1
        while nth < total:
            at = _load(q, g, k, v, lse, delta, resident, stream, statistics, blocks, nth, at, own, c)
            own = own.advanced()
            nth = take(counter, total)
            phase = queue.push(nth, phase)


@gluon.jit
def _block(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dk_out, dv_out, sums, pipes, blocks, scale, root, nth, at, step, own, c: gl.constexpr, HALF: gl.constexpr
):
    """dK and dV of one half of the nth block of keys, and half of its part of dQ. The next place in the ring of
    queries, and the next step. Scores are transposed here.
    """
    dtype: gl.constexpr = dk_out.dtype
    LINES: gl.constexpr = 64 * c.part // c.line
    ROWS: gl.constexpr = c.rows
    QUERIES: gl.constexpr = c.queries
    PART: gl.constexpr = c.part
    WIDTH: gl.constexpr = c.width
    score: gl.constexpr = product_layout(QUERIES)
    total: gl.constexpr = product_layout(WIDTH)
    head, block = sectioned(nth, blocks.n, blocks.heads, blocks.section)
    zero = gl.zeros([ROWS, QUERIES], gl.float32, score)
    none = gl.zeros([64, PART], gl.float32, product_layout(PART))
    rows = gl.arange(0, c.rows, gl.SliceLayout(1, score))
    columns = gl.arange(0, c.queries, gl.SliceLayout(0, score))
    dk = gl.zeros([ROWS, WIDTH], gl.float32, total)
    dv = gl.zeros([ROWS, WIDTH], gl.float32, total)
    half = 2 * own.stage
    pipes.resident.wait(half, own.phase)
    pipes.resident.wait(half + 1, own.phase)
    step = offer_zeros(pipes, step, c, HALF)
    tiles = (blocks.length + c.queries - 1) // c.queries
    first, count = _span(block, tiles, c.causal, c.rows, c.queries, c.window, c.uneven)
    last = ((head * blocks.groups * c.ratio * blocks.n + first) * 2 + HALF) * LINES
    if c.uneven:
        last = ((head * blocks.groups * tiles + first) * 2 + HALF) * LINES
    s = first_scores(pipes, zero, c, HALF)
    outer, inner = _loops(blocks.groups, count, c)
    whose = block % blocks.groups
    turn = tiles - 1
    for lap in range(0, outer):
        for i in range(0, inner):
            member, j = _at(lap, i, whose, turn, first, tiles, c)
            place = ((_first_tile(head * blocks.groups + member, tiles, blocks, c) + j) * 2 + HALF) * LINES
            to = place_of_ds(step, c)
            p, slope, dp = probabilities(s, step, at, pipes, zero, scale, c, HALF, c.inner, half)
            if c.causal or c.window or c.tail:
                ahead = j - c.ratio * block
                cut = j < 0
                if c.causal or c.window:
                    cut = _cut(ahead, c.causal, c.rows, c.queries, c.window)
                if c.tail:
                    cut = cut | (j == tiles - 1) | (block == blocks.n - 1)
                if cut:
                    queries = gl.expand_dims(columns + ahead * c.queries, 0)
                    keys = gl.expand_dims(rows + HALF * c.rows, 1)
                    if c.causal or c.window:
                        p = gl.where(visible(queries, keys, c.causal, c.window), p, 0.0)
                    if c.tail:
                        limit = blocks.length - block * 2 * c.rows
                        p = gl.where((queries < limit) & (keys < limit), p, 0.0)
            s, dk, dv, at, step = add_step(
                p, slope, dp, s, dk, dv, at, step, to, last, pipes, sums, zero, none, c, HALF, c.inner, half
            )
            last = place
            whose, turn = _next(whose, turn, block, blocks.groups, c)
    if c.schedule.ahead and c.schedule.apart:
        pipes.stream.wait(at)  # nothing may still be on its way when the program ends
    add_last(step, last, pipes, sums, none, c, HALF, half)
    k = pipes.resident.first.index(half + HALF)
    v = pipes.resident.second.index(half + HALF)
    k.store((dk * root).to(dtype))
    v.store(dv.to(dtype))
    fence_async_shared()
    row = block * 2 * c.rows + HALF * c.rows
    copy_out(dk_out, [head // blocks.per_batch, head % blocks.per_batch, row, 0], k)
    copy_out(dv_out, [head // blocks.per_batch, head % blocks.per_batch, row, 0], v)
    tma.store_wait(pendings=0)
    if c.blocks > 1:
        mbarrier.arrive(pipes.resident.empty.index(own.stage), count=1)
    return at, step


@gluon.jit
def _consumer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dk_out, dv_out, sums, pipes, queue, blocks, scale, root, c: gl.constexpr, HALF: gl.constexpr
):
    """One half of a program's block of keys, or of each of its blocks."""
    at = cursor(0, c.stages)
    own = cursor(0, c.blocks)
    step = gl.to_tensor(0)
    nth = gl.program_id(0)
    if c.blocks == 1:
        _block(dk_out, dv_out, sums, pipes, blocks, scale, root, nth, at, step, own, c, HALF)
    else:
        total = blocks.n * blocks.heads
        phase = 0
        while nth < total:
            at, step = _block(dk_out, dv_out, sums, pipes, blocks, scale, root, nth, at, step, own, c, HALF)
            own = own.advanced()
            nth, phase = queue.pop(phase)


@gluon.jit(do_not_specialize=["n", "heads", "per_batch", "section", "groups", "length"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q,
    g,
    k,
    v,
    lse,
    delta,
    dk,
    dv,
    sums,
    counter,
    n,
    heads,
    per_batch,
    section,
    groups,
    length,
    scale,
    root,
    c: gl.constexpr,
):
    """Blocks of keys of one key head, each over all its query heads: its dK and dV, and its part of dQ·√D added to
    `sums`. `root` is 1/√D; numbers as in `Blocks`. `counter` is None where a program has one block.
    """
    resident = pair(k, v, c.rows, c.width, BLOCKS=c.blocks)
    stream = pair_ring(q, g, c.queries, c.width, c.stages)
    statistics = Statistics(
        gl.allocate_shared_memory(gl.float32, [c.stages, c.queries], lse.layout),
        gl.allocate_shared_memory(gl.float32, [c.stages, c.queries], lse.layout),
        barriers(c.stages, 1) if c.schedule.apart else stream.full,
    )
    one, other = exchanges(sums, k.dtype, c)
    upper = BackwardPipes(resident, stream, statistics, one)
    lower = BackwardPipes(resident, stream, statistics, other)
    blocks = Blocks(n, heads, per_batch, section, groups, length)
    if c.blocks > 1:
        queue = tile_queue(2)
    else:
        queue: gl.constexpr = None
    gl.warp_specialize(
        [
            (_producer, (q, g, k, v, lse, delta, counter, resident, stream, statistics, queue, blocks, c)),
            (_consumer, (dk, dv, sums, upper, queue, blocks, scale, root, c, 0)),
            (_consumer, (dk, dv, sums, lower, queue, blocks, scale, root, c, 1)),
        ],
        [4, 4],
        [c.registers, c.registers],
    )


@triton.jit(do_not_specialize=["stride_b", "stride_h", "stride_s", "H", "pieces", "S"])
def _convert_dq(  # type: ignore[no-untyped-def]  # Triton's types are its own
    sums, out, stride_b: tl.int64, stride_h: tl.int64, stride_s: tl.int64, H, pieces, S, root,
    D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """64 rows of dQ from the accumulator, of which a head has so many pieces; `add_dq` says their order.
    Strides are in units of 8 numbers.
    """
    head = tl.program_id(0) // pieces
    x = tl.load(sums + tl.program_id(0).to(tl.int64) * 64 * WIDTH + tl.arange(0, 64 * WIDTH))
    x = (x * root).to(out.dtype.element_ty)
    x = x.reshape(WIDTH // 8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, WIDTH)
    rows = tl.program_id(0) % pieces * 64 + tl.arange(0, 64)
    columns = tl.arange(0, WIDTH)[None, :]
    start = (head // H) * stride_b + (head % H) * stride_h
    places = ((start + rows.to(tl.int64) * stride_s) * 8)[:, None] + columns
    inside = (rows < S)[:, None]
    if WIDTH != D:
        inside = inside & (columns < D)
    tl.store(out + places, x, mask=inside)


def order(S: int, width: int, groups: int, heads: int) -> tuple[bool, int]:
    """Whether heads of a group take turns under a causal mask, and how many key heads of so many are a section.

    By times of 19 shapes on an H200: turns are up to 1.35 times as fast. Of sequences longer than SHORT at 128
    columns groups of 4 and 5 lost 5 to 6 % by them, and of 1 and 3 gained nothing.
    """
    if not (width == 64 or S <= SHORT or groups >= MANY):
        return False, heads_per_l2_group(S, width, groups, heads)
    return True, even(heads, max(4, PROGRAMS // -(-S // (2 * ROWS))))


def takes(queries: int, keys: int, causal: bool, window: int) -> bool:
    """Whether the kernel takes a head of so many queries and keys: as many, or any whole blocks that all see each
    other.
    """
    return queries == keys or not (causal or window or queries % (2 * ROWS) or keys % (2 * ROWS))


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
    cap: float = 0.0,
) -> None:
    """Writes dq, dk and dv. `lse` is in base 2, `delta` the sum of O ∘ dO over rows, both (B, H, rows) in fp32
    with room for whole blocks of 128 rows, filled up with +inf and 0. A window of 0 is
    none, as is a cap.

    For inputs that `_hopper.fits` approves of, of lengths that `takes` does; gradients are `mappable`. Takes
    memory for dq in fp32, its rows filled up to whole blocks and its columns to a power of two.
    """
    plan = planned(grad, q, k, v, dq, dk, dv, causal, window, schedule, cap)
    sums = torch.zeros(plan.sums, dtype=torch.float32, device=q.device)
    with on(q):
        run(plan, grad, q, k, v, lse, delta, dq, dk, dv, sums)


class Plan(NamedTuple):
    """What a launch does not have to think about again for the same shapes and strides: what the compiled kernels
    depend on, how many programs they have, their numbers and constants, what tensor maps say, and the shape of the
    accumulator.
    """

    keys: tuple[Hashable, Hashable]
    persistent: bool
    programs: tuple[int, int]
    numbers: tuple[int | float | Config, ...]
    converted: tuple[int | float, ...]
    warps: int
    maps: tuple[Says, ...]
    statistics: Says
    sums: tuple[int, int]
    summed: Says


def planned(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    causal: bool,
    window: int,
    schedule: Schedule | None = None,
    cap: float = 0.0,
) -> Plan:
    """What holds for all tensors of these shapes, strides, dtype and device."""
    B, H, S, D = q.shape
    heads, Sk = k.shape[1:3]
    width = power_of_2(D)
    schedule = schedule or SCHEDULES[width, causal]
    queries = schedule.rows
    scale, inner = scales(D, cap)
    exchanged = shared_layout(ROWS, queries, q.dtype)
    blocks = 1 if schedule.ahead or cap else BLOCKS[width]
    turns, section = order(S, width, H // heads, B * heads) if causal and not window else (False, 1)
    c = Config(width, causal, window, S % (2 * ROWS) != 0, schedule, exchanged, Sk != S, inner, blocks, turns)
    streamed = [mapping(x.shape, x.stride(), queries, x.dtype) for x in (q, grad)]
    resident = [mapping(x.shape, x.stride(), ROWS, x.dtype) for x in (k, v, dk, dv)]
    n, of_keys = (-(-x // (2 * ROWS)) for x in (S, Sk))
    sums = B * H * n * 2 * ROWS * width // LINE, LINE
    root = 1 / math.sqrt(D)
    programs = B * heads * of_keys
    if blocks > 1:
        programs = min(programs, multiprocessors(q))
    return Plan(
        (kernel_key(_kernel, q.device, q.dtype, c), kernel_key(_convert_dq, q.device, q.dtype, D)),
        blocks > 1,
        (programs, B * H * n * 2),
        (of_keys, B * heads, heads, section, H // heads, S, scale, root, c),
        (*(x // 8 for x in dq.stride()[:3]), H, n * 2, S, root, D, width),
        width // 16,
        (*streamed, *resident),
        flat_mapping([B * H * n * 2 * ROWS], [queries], plain_layout(1)),
        sums,
        flat_mapping(sums, [queries * width // 2 // LINE, LINE], plain_layout(2)),
    )


def run(
    plan: Plan,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """`backward` of tensors that the plan is for, on the current device, with an accumulator in fp32 of its shape
    that holds zeros.
    """
    tq, tg, tk, tv, tdk, tdv = map(placed, (q, grad, k, v, dk, dv), plan.maps)
    taken = counter(q) if plan.persistent else None
    launch(
        _kernel, plan.keys[0], plan.programs[0],
        tq, tg, tk, tv, placed(lse, plan.statistics), placed(delta, plan.statistics), tdk, tdv,
        placed(sums, plan.summed), taken, *plan.numbers,
    )  # fmt: skip
    launch(_convert_dq, plan.keys[1], plan.programs[1], sums, dq, *plan.converted, num_warps=plan.warps)
