"""Matrix products for Hopper (compute capability 9.0), in Gluon: out = A · Bᵀ with scales, a bias or a gate.

One warp, the producer, loads tiles of A and B through the tensor memory accelerator into a ring of stages. One to
three warp groups, the consumers, multiply 64 or 128 rows of the tile each and write them. Programs are persistent,
one a multiprocessor, so that the producer loads the next tile while the consumers write this one. This is the
"persistent cooperative" schedule of CUTLASS, without clusters. A producer of four warps would issue each of its
instructions four times, beside those of the consumers.

Barriers of a stage, all in shared memory:

=====  ====================================  ==================  ================================================
name   what its phase says                   arrivals            waited for by
=====  ====================================  ==================  ================================================
full   the stage's tiles have arrived        1 (and the bytes)   each consumer, before it multiplies them
empty  no consumer reads the stage any more  one a consumer      the producer, before it loads the next tiles
=====  ====================================  ==================  ================================================

Work is counted in steps of K. Whole tiles are dealt out one after the other. What is left of the last round, or
all of a product too small to fill the device, is shared out by steps (Stream-K, Osama et al., arXiv 2301.03598):
each program takes an equal run of the remaining steps, and a tile that several programs computed is added up, in
the order of K, by the one that finishes last. Nobody waits, and the result does not depend on who is last. Of two
parts the last one's own stays in its registers; more are loaded a few at a time.

FP8 products with a scale for each 128 steps of K add up 128 products in the matrix units, which keep about 14
bits, and then scale and add that sum in fp32, as DeepGEMM does. A consumer with two sums, of 128 rows or of two
pieces of B, does so one after the other, so that the other consumer's products run under its additions. Of two
pieces it loads its rows of A to registers first, once for both; the matrix units would read them from shared
memory once for each.

Such scales are staged where they can be: the producer has them copied with the tiles, under the same barriers. A
consumer that loads its own can do so one step ahead at most, and waits for memory where they are in no cache.
"""
# Without `from __future__ import annotations`: aggregates read the types of their fields.

import functools
from collections.abc import Callable

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
from triton.language.core import _aggregate as aggregate

from .._common import cdiv, multiprocessors, on
from .._grid_barrier import counters
from .._hopper import (
    Placed,
    Says,
    TensorMap,
    flat_mapping,
    kernel_key,
    launch,
    placed,
    plain_layout,
    thread_barrier,
)
from .._launch import room
from .._pipeline import Handshake, add_out, barriers, copy_in, copy_out, cursor, viewed
from ._schedules import Schedule

TENSOR = gl.constexpr("tensor")
ROW = gl.constexpr("row")
GROUPED = gl.constexpr("group")
TILED = gl.constexpr("tile")
PRODUCER = gl.constexpr(24)
"""Registers of a producer's thread."""


@aggregate
class Ring(Handshake):
    """Stages of tiles of A (groups a stage) and of B (one, or a gate's two), of scales that are staged, and their
    barriers.
    """

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    a_scales: gl.shared_memory_descriptor
    b_scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, a, b, a_scales, b_scales, full, empty):  # type: ignore[no-untyped-def]  # as above
        self.a = a
        self.b = b
        self.a_scales = a_scales
        self.b_scales = b_scales
        self.full = full
        self.empty = empty


@aggregate
class Work:
    """Tiles and who computes them. `dealt` tiles are dealt out whole, the others are shared out by steps of K.

    A program's work is a run of positions: the steps of its whole tiles, then its share of the other tiles' steps.
    """

    row_tiles: gl.tensor
    column_tiles: gl.tensor
    steps: gl.tensor
    dealt: gl.tensor
    section: gl.tensor

    @gluon.constexpr_function
    def __init__(self, row_tiles, column_tiles, steps, dealt, section):  # type: ignore[no-untyped-def]  # as above
        self.row_tiles = row_tiles
        self.column_tiles = column_tiles
        self.steps = steps
        self.dealt = dealt
        self.section = section

    @gluon.jit
    def shared(self):  # type: ignore[no-untyped-def]  # Triton's types are its own
        """Steps that are shared out."""
        return (self.row_tiles * self.column_tiles - self.dealt) * self.steps

    @gluon.jit
    def whole(self):  # type: ignore[no-untyped-def]  # Triton's types are its own
        """Positions of this program's whole tiles."""
        return (self.dealt - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * self.steps

    @gluon.jit
    def share(self, program):  # type: ignore[no-untyped-def]  # Triton's types are its own
        """Where a program's run of the shared steps begins."""
        return program * self.shared() // gl.num_programs(0)

    @gluon.jit
    def owner(self, step):  # type: ignore[no-untyped-def]  # Triton's types are its own
        """Whose a shared step is: the inverse of `share`."""
        return ((step + 1) * gl.num_programs(0) - 1) // self.shared()

    @gluon.jit
    def positions(self, SHARED: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
        """How many positions this program has."""
        count = self.whole()
        if SHARED:
            count += self.share(gl.program_id(0) + 1) - self.share(gl.program_id(0))
        return count

    @gluon.jit
    def unit(self, at, SHARED: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
        """(tile, its first step, the step after its last) at a position: all of a tile or a part of one."""
        tile = gl.program_id(0) + at // self.steps * gl.num_programs(0)
        begin = at * 0
        end = begin + self.steps
        if SHARED:
            whole = self.whole()
            step = self.share(gl.program_id(0)) + at - whole
            left = self.share(gl.program_id(0) + 1) - step
            apart = at >= whole
            tile = gl.where(apart, self.dealt + step // self.steps, tile)
            begin = gl.where(apart, step % self.steps, begin)
            end = gl.where(apart, gl.minimum(begin + left, self.steps), end)
        return tile, begin, end

    @gluon.jit
    def place(self, tile):  # type: ignore[no-untyped-def]  # Triton's types are its own
        """(row, column) of a tile: sections of `section` rows of tiles, of each one column after the other."""
        first = tile // (self.section * self.column_tiles) * self.section
        nth = tile - first * self.column_tiles
        height = gl.minimum(self.section, self.row_tiles - first)
        column = nth // height
        return first + nth - column * height, column

    @gluon.jit
    def origin(self, tile, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
        """(first row, first column) of a tile."""
        row, column = self.place(tile)
        return row * (c.groups * c.rows), column * c.width


@aggregate
class Scales:
    """Scales in fp32: one, one a row, or one a block, which lie `row` and `step` numbers apart."""

    a: gl.tensor
    b: gl.tensor
    a_row: gl.tensor
    a_step: gl.tensor
    b_row: gl.tensor
    b_step: gl.tensor

    @gluon.constexpr_function
    def __init__(self, a, b, a_row, a_step, b_row, b_step):  # type: ignore[no-untyped-def]  # as above
        self.a = a
        self.b = b
        self.a_row = a_row
        self.a_step = a_step
        self.b_row = b_row
        self.b_step = b_step


@aggregate
class StagedScales:
    """Scales in fp32 that come with the stages' tiles: maps of all numbers of A's and B's in a row, how far apart
    there those of two blocks and of two steps lie, and blocks from a piece of B to the next. Of single rows those
    of one step are neighbours. Of one tile, whose first row and column are given, and where its group's begin.
    """

    a: tma.tensor_descriptor
    b: tma.tensor_descriptor
    a_row: gl.tensor
    a_step: gl.tensor
    b_row: gl.tensor
    b_step: gl.tensor
    apart: gl.tensor
    row: gl.tensor
    column: gl.tensor
    a_from: gl.tensor
    b_from: gl.tensor

    @gluon.constexpr_function
    def __init__(  # type: ignore[no-untyped-def]  # as above
        self, a, b, a_row, a_step, b_row, b_step, apart, row, column, a_from, b_from
    ):
        self.a = a
        self.b = b
        self.a_row = a_row
        self.a_step = a_step
        self.b_row = b_row
        self.b_step = b_step
        self.apart = apart
        self.row = row
        self.column = column
        self.a_from = a_from
        self.b_from = b_from

    @gluon.jit
    def of(self, row, column, a_from, b_from):  # type: ignore[no-untyped-def]  # Triton's types are its own
        """The same for a tile."""
        return StagedScales(
            self.a,
            self.b,
            self.a_row,
            self.a_step,
            self.b_row,
            self.b_step,
            self.apart,
            row,
            column,
            a_from,
            b_from,
        )

    @gluon.jit
    def a_place(self, k, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
        """Which of all numbers is the scale of a consumer's first row in step k."""
        row = self.row + GROUP * c.rows
        if c.scales == TILED:
            row = row // 128 * self.a_row
        return self.a_from + row + k * self.a_step

    @gluon.jit
    def b_place(self, k, c: gl.constexpr, PIECE: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
        """Which of all numbers is the scale of a piece's first column in step k."""
        column = self.column
        if c.scales != GROUPED:
            column = (column // 128 + PIECE * self.apart) * self.b_row
        return self.b_from + column + k * self.b_step


@aggregate
class Output:
    """Where results go: the output's map and buffers, the bias, its size, and partial sums of shared tiles."""

    tiles: tma.tensor_descriptor
    buffers: gl.shared_memory_descriptor
    bias: gl.tensor
    partial: gl.tensor
    counter: gl.tensor
    M: gl.tensor
    N: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tiles, buffers, bias, partial, counter, M, N):  # type: ignore[no-untyped-def]  # as above
        self.tiles = tiles
        self.buffers = buffers
        self.bias = bias
        self.partial = partial
        self.counter = counter
        self.M = M
        self.N = N

    @gluon.jit
    def send(self, row, column, buffer):  # type: ignore[no-untyped-def]  # Triton's types are its own
        """Has a tile's rows, up to 64, and a buffer's columns written."""
        copy_out(self.tiles, [row, column], buffer)


@gluon.constexpr_function
def product_layout(columns, dtype):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Of what a warp group multiplies: 64 rows and so many columns, 32 bytes of K an instruction."""
    depth = 256 // dtype.primitive_bitwidth
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, depth])


@gluon.constexpr_function
def plain_shared():  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Of single numbers in a row."""
    return gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])


@gluon.constexpr_function
def words_layout():  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Of the 64 × 32 words that a warp group makes operands of: eight neighbouring ones of rows r and r + 8 a
    thread.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )


@gluon.jit
def stages(a, b, c: gl.constexpr, a_scales=None, b_scales=None):  # type: ignore[no-untyped-def]  # as above
    """An empty ring."""
    STAGES: gl.constexpr = c.stages
    ROWS: gl.constexpr = c.rows if c.filled > 0 else a.block_type.shape[0]
    A: gl.constexpr = [STAGES * c.groups, ROWS, a.block_type.shape[1]]
    B: gl.constexpr = [STAGES * c.pieces] + b.block_type.shape  # noqa: RUF005  # a kernel knows no unpacking
    a_tiles = gl.allocate_shared_memory(a.dtype, A, a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, B, b.layout)
    full = barriers(c.stages, 1)
    empty = barriers(c.stages, c.groups)
    if c.staged:
        A_SCALES: gl.constexpr = [STAGES * c.groups, c.a_scales]
        B_SCALES: gl.constexpr = [STAGES * c.pieces, c.b_scales]
        a_numbers = gl.allocate_shared_memory(gl.float32, A_SCALES, a_scales.layout)
        b_numbers = gl.allocate_shared_memory(gl.float32, B_SCALES, b_scales.layout)
    else:
        a_numbers = full
        b_numbers = full
    return Ring(a_tiles, b_tiles, a_numbers, b_numbers, full, empty)


@gluon.jit
def _begin(nth):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Where numbers are copied from so that one is among the first four: at 16 bytes, elsewhere is an illegal
    instruction.
    """
    return nth // 4 * 4


@gluon.jit
def fetch(  # type: ignore[no-untyped-def]  # Triton's types are its own
    a, b, ring, at, begin, end, row, column, pieces_apart, c: gl.constexpr, scales=None
):
    """The next place after the tiles of A from `row` on and of B from its row `column` on, step by step. Pieces of
    B lie `pieces_apart` rows apart. Scales that are staged are copied as numbers in a row: of rows that A does not
    have come any, which are not written.
    """
    PIECES: gl.constexpr = c.pieces
    GROUPS: gl.constexpr = c.groups
    for k in range(begin, end):
        depth = k * c.step
        if c.staged:
            full = ring.acquire(
                at,
                c.groups * (a.block_type.nbytes + scales.a.block_type.nbytes)
                + c.pieces * (b.block_type.nbytes + scales.b.block_type.nbytes),
            )
            for i in gl.static_range(GROUPS):
                first = scales.a_place(k, c, i)
                if c.scales == TILED:
                    first = _begin(first)
                copy_in(scales.a, [first], full, ring.a_scales.index(at.stage * c.groups + i))
            for i in gl.static_range(PIECES):
                first = scales.b_place(k, c, i)
                if c.scales != GROUPED:
                    first = _begin(first)
                copy_in(scales.b, [first], full, ring.b_scales.index(at.stage * c.pieces + i))
        else:
            full = ring.acquire(at, c.groups * a.block_type.nbytes + PIECES * b.block_type.nbytes)
        for i in gl.static_range(GROUPS):
            target = ring.a.index(at.stage * c.groups + i)
            if c.a_turned:
                copy_in(a, [depth, row + i * c.rows], full, target)
            else:
                copy_in(a, [row + i * c.rows, depth // c.packed], full, target)
        for i in gl.static_range(PIECES):
            target = ring.b.index(at.stage * PIECES + i)
            if c.b_turned:
                copy_in(b, [depth, column + i * pieces_apart], full, target)
            else:
                copy_in(b, [column + i * pieces_apart, depth], full, target)
        at = at.advanced()
    return at


@gluon.jit
def load(a, b, ring, work, N, c: gl.constexpr, scales=None):  # type: ignore[no-untyped-def]  # as above
    """The producer: tiles of A and B, step by step, tile by tile. A gate's other factor lies N rows of B after
    it.
    """
    pieces_apart = c.columns if c.paired else N
    at = cursor(1, c.stages)
    position = gl.program_id(0) * 0
    while position < work.positions(c.shared):
        tile, begin, end = work.unit(position, c.shared)
        row, column = work.origin(tile, c)
        own = scales.of(row, column, tile * 0, tile * 0) if c.staged else None
        at = fetch(a, b, ring, at, begin, end, row, column, pieces_apart, c, own)
        position += end - begin


@gluon.jit
def _operands(ring, at, c: gl.constexpr, GROUP: gl.constexpr, PIECE: gl.constexpr):  # type: ignore[no-untyped-def]
    """(this consumer's rows of A, Bᵀ) of a stage."""
    a = ring.a.index(at.stage * c.groups + GROUP)
    b = ring.b.index(at.stage * c.pieces + PIECE)
    if c.a_turned:
        a = a.permute((1, 0))
    if not c.b_turned:
        b = b.permute((1, 0))
    return a, b


@gluon.jit
def product(ring, at, count, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """(sums over `count` steps, those of the second piece of B or the same, the next place). While one step's
    product runs the one before is waited for and its stage released.
    """
    layout: gl.constexpr = product_layout(c.columns, ring.a.dtype)
    SHAPE: gl.constexpr = [c.rows, c.columns]
    acc = gl.zeros(SHAPE, gl.float32, layout)
    other = acc
    # Not the cursor's own stage: a name that begins as the very value that the loop assigns again is unchanged to
    # Triton, and every step would release the first stage.
    before = gl.to_tensor(0)
    for k in range(0, count):
        ring.wait(at)
        a, b = _operands(ring, at, c, GROUP, 0)
        acc = warpgroup_mma(a, b, acc, is_async=True)  # acc += A @ B.T
        if c.pieces == 2:
            a, b = _operands(ring, at, c, GROUP, 1)
            other = warpgroup_mma(a, b, other, is_async=True)  # other += A @ B₂.T
            acc, other = warpgroup_mma_wait(2, deps=[acc, other])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(ring.empty.index(before), count=1, pred=k > 0)
        before = at.stage
        at = at.advanced()
    if c.pieces == 2:
        acc, other = warpgroup_mma_wait(0, deps=[acc, other])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
        other = acc
    mbarrier.arrive(ring.empty.index(before), count=1)
    return acc, other, at


@gluon.jit
def _part(a, b, zero):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """A @ B.T of one step."""
    part = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[part])


@gluon.jit
def scaled_product(  # type: ignore[no-untyped-def]  # Triton's types are its own
    ring, at, begin, end, row, column, scales, M, N, c: gl.constexpr, GROUP: gl.constexpr
):
    """(sums, those of the lower 64 rows or of the second piece of B or the same, the next place) where each step
    has scales of its own: acc += (A @ B.T) · a_scale · b_scale. Scales are loaded one step ahead.

    A block's scale of B is the same for all threads. Of two pieces each thread loads its own nevertheless, from a
    place that the compiler cannot know to be the same: what it knew to be so it moved to uniform registers between
    the instructions of the step's first product, and waited for the load there.
    """
    layout: gl.constexpr = product_layout(c.columns, ring.a.dtype)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=4)
    along: gl.constexpr = gl.SliceLayout(1, layout)
    SHAPE: gl.constexpr = [64, c.columns]
    zero = gl.zeros(SHAPE, gl.float32, layout)
    acc = zero
    other = zero
    A_HEIGHT: gl.constexpr = 128 if c.scales == TILED else 1
    upper_rows = row + gl.arange(0, 64, along)
    lower_rows = upper_rows + 64
    upper_at = upper_rows // A_HEIGHT * scales.a_row
    lower_at = lower_rows // A_HEIGHT * scales.a_row
    a_at = scales.a + begin * scales.a_step
    upper_next = gl.load(a_at + upper_at, upper_rows < M, 0.0)
    lower_next = upper_next
    if c.rows == 128:
        lower_next = gl.load(a_at + lower_at, lower_rows < M, 0.0)
    COLUMNS: gl.constexpr = c.columns
    b_at = scales.b + begin * scales.b_step
    other_next = 1.0
    no_further = gl.minimum(upper_rows, 0)  # 0
    if c.scales == GROUPED:
        b_rows = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        each_at = b_rows * scales.b_row
        each_next = gl.load(b_at + each_at, b_rows < N, 0.0)
        b_next = 1.0
    else:
        block = gl.minimum(column, N - 1) // 128
        if c.pieces == 2:
            # A gate's other factor begins with a block of its own.
            second = block + (N + 127) // 128 if c.gated else gl.minimum(column + c.columns, N - 1) // 128
            other_at = b_at + second * scales.b_row
            other_next = gl.load(other_at + no_further)
        b_at += block * scales.b_row
        b_next = gl.load(b_at + no_further) if c.pieces == 2 else gl.load(b_at)
    for k in range(begin, end):
        upper_scale = upper_next * b_next
        other_scale = upper_next * other_next if c.pieces == 2 else lower_next * b_next
        later = k + 1 < end
        a_at += scales.a_step
        b_at += scales.b_step
        upper_next = gl.load(a_at + upper_at, (upper_rows < M) & later, 0.0)
        if c.rows == 128:
            lower_next = gl.load(a_at + lower_at, (lower_rows < M) & later, 0.0)
        if c.scales == GROUPED:
            each = each_next
            each_next = gl.load(b_at + each_at, (b_rows < N) & later, 0.0)
        elif c.pieces == 2:
            other_at += scales.b_step
            b_next = gl.load(b_at + no_further, (upper_rows < M) & later, 0.0)
            other_next = gl.load(other_at + no_further, (upper_rows < M) & later, 0.0)
        else:
            b_next = gl.load(b_at, later, 0.0)
        ring.wait(at)
        a, b = _operands(ring, at, c, GROUP, 0)
        upper = a.slice(0, 64, 0)
        if c.pieces == 2:
            upper = upper.load(OPERAND)
        part = _part(upper, b, zero)
        if not c.doubled:
            ring.release(at)
        if c.scales == GROUPED:
            part = part * gl.expand_dims(each, 0)
        acc = acc + part * gl.expand_dims(upper_scale, 1)
        if c.doubled:
            if c.rows == 128:
                part = _part(a.slice(64, 64, 0), b, zero)
            else:
                _, b = _operands(ring, at, c, GROUP, 1)
                part = _part(upper, b, zero)
            ring.release(at)
            if c.scales == GROUPED:
                part = part * gl.expand_dims(each, 0)
            other = other + part * gl.expand_dims(other_scale, 1)
        at = at.advanced()
    return acc, other, at


@gluon.jit
def _begun(  # type: ignore[no-untyped-def]  # Triton's types are its own
    ring,
    at,
    half: gl.constexpr,
    zero,
    c: gl.constexpr,
    GROUP: gl.constexpr,
    use_acc=False,
    PIECE: gl.constexpr = 0,
):
    """A @ B.T of 64 of this consumer's rows and one step, on its way."""
    a, b = _operands(ring, at, c, GROUP, PIECE)
    return warpgroup_mma(a.slice(64 * half, 64, 0), b, zero, use_acc=use_acc, is_async=True)


@gluon.jit
def _one(lines, line, nth):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The number that was the one of all: among the first four of a line that was copied. Each thread loads it
    alone; of four that are loaded it would take as many instructions to choose as a quarter of a step's additions.
    """
    LINES: gl.constexpr = lines.shape[0]
    WIDTH: gl.constexpr = lines.shape[1]
    singles = viewed(lines, gl.float32, [LINES * WIDTH, 1], plain_shared())
    return gl.sum(singles.index(line * WIDTH + nth % 4).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _factors(  # type: ignore[no-untyped-def]  # Triton's types are its own
    ring, at, half: gl.constexpr, a_nth, b_nth, c: gl.constexpr, GROUP: gl.constexpr, PIECE: gl.constexpr = 0
):
    """(what each of 64 rows is to be multiplied by, what each column is or 1) of a stage; where a block has one
    scale it is the so-maniest of all.
    """
    layout: gl.constexpr = product_layout(c.columns, ring.a.dtype)
    b_line = at.stage * c.pieces + PIECE
    if c.scales == TILED:
        rows = _one(ring.a_scales, at.stage * c.groups + GROUP, a_nth) * _one(ring.b_scales, b_line, b_nth)
        columns = 1.0
    else:
        a = ring.a_scales.index(at.stage * c.groups + GROUP)
        rows = a.slice(64 * half, 64, 0).load(gl.SliceLayout(1, layout))
        if c.scales == GROUPED:
            columns = ring.b_scales.index(b_line).load(gl.SliceLayout(0, layout))
        else:
            rows = rows * _one(ring.b_scales, b_line, b_nth)
            columns = 1.0
    return rows, columns


@gluon.jit
def multiply_add(x, y, z):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """x · y + z, where it stands. The compiler takes additions past the next product, whose sums overwrite x: it
    would copy them, or wait.
    """
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _added(acc, part, rows, columns, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """acc + part · rows · columns."""
    if c.scales == GROUPED:
        part = part * gl.expand_dims(columns, 0)
    if c.scales != TILED:
        rows = gl.expand_dims(rows, 1)
    return multiply_add(part, rows, acc)


@gluon.jit
def _release(ring, at, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """A consumer has read the stage. Where its scales are loaded while products run, and used after them, a load
    may still be under way: it is ordered before what other threads store, but not before what the tensor memory
    accelerator does. Else scales were multiplied with each other before the product began.
    """
    if c.scales == GROUPED or c.ahead > 0:
        fence_async_shared()
    ring.release(at)


@gluon.jit
def staged_product(  # type: ignore[no-untyped-def]  # Triton's types are its own
    ring, at, begin, end, scales, c: gl.constexpr, GROUP: gl.constexpr
):
    """As `scaled_product`, of steps whose scales lie in their stages. With `c.ahead` one step's sums are
    added up while the next step's products run; two steps a round of the loop, since what is on its way cannot
    change its registers. Else scales are read before the products begin: what is read between the instructions
    of a product holds the next ones up.
    """
    layout: gl.constexpr = product_layout(c.columns, ring.a.dtype)
    SHAPE: gl.constexpr = [64, c.columns]
    zero = gl.zeros(SHAPE, gl.float32, layout)
    acc = zero
    other = zero
    count = end - begin
    LOWER: gl.constexpr = 1 if c.rows == 128 else 0
    SECOND: gl.constexpr = 1 if c.pieces == 2 else 0
    a_nth = scales.a_place(begin, c, GROUP)
    b_nth = scales.b_place(begin, c, 0)
    other_nth = scales.b_place(begin, c, SECOND)
    if c.ahead > 0:
        PAIRS: gl.constexpr = c.ahead // 2
        for _ in range(0, count // c.ahead):
            ring.wait(at)
            even = _begun(ring, at, 0, zero, c, GROUP)
            for i in gl.static_range(PAIRS):
                following = at.advanced()
                ring.wait(following)
                odd = _begun(ring, following, 0, zero, c, GROUP)
                rows, columns = _factors(ring, at, 0, a_nth, b_nth, c, GROUP)
                even, odd = warpgroup_mma_wait(1, deps=[even, odd])
                _release(ring, at, c)
                acc = _added(acc, even, rows, columns, c)
                at = following.advanced()
                a_nth += scales.a_step
                b_nth += scales.b_step
                if i + 1 < PAIRS:
                    ring.wait(at)
                    even = _begun(ring, at, 0, zero, c, GROUP)
                    rows, columns = _factors(ring, following, 0, a_nth, b_nth, c, GROUP)
                    odd, even = warpgroup_mma_wait(1, deps=[odd, even])
                else:
                    rows, columns = _factors(ring, following, 0, a_nth, b_nth, c, GROUP)
                    odd = warpgroup_mma_wait(0, deps=[odd])
                _release(ring, following, c)
                acc = _added(acc, odd, rows, columns, c)
                a_nth += scales.a_step
                b_nth += scales.b_step
    if c.doubled:
        # Products that might add to the sums before them get their registers: others there are none.
        never = count < 0
        part = zero
        for _ in range(0, count):
            ring.wait(at)
            rows, columns = _factors(ring, at, 0, a_nth, b_nth, c, GROUP)
            other_rows, other_columns = _factors(ring, at, LOWER, a_nth, other_nth, c, GROUP, SECOND)
            part = _begun(ring, at, 0, part, c, GROUP, never)
            part = warpgroup_mma_wait(0, deps=[part])
            acc = _added(acc, part, rows, columns, c)
            part = _begun(ring, at, LOWER, part, c, GROUP, never, SECOND)
            part = warpgroup_mma_wait(0, deps=[part])
            _release(ring, at, c)
            other = _added(other, part, other_rows, other_columns, c)
            at = at.advanced()
            a_nth += scales.a_step
            b_nth += scales.b_step
            other_nth += scales.b_step
    else:
        for _ in range(0, count % c.ahead if c.ahead > 0 else count):
            ring.wait(at)
            rows, columns = _factors(ring, at, 0, a_nth, b_nth, c, GROUP)
            part = _begun(ring, at, 0, zero, c, GROUP)
            part = warpgroup_mma_wait(0, deps=[part])
            _release(ring, at, c)
            acc = _added(acc, part, rows, columns, c)
            at = at.advanced()
            a_nth += scales.a_step
            b_nth += scales.b_step
    return acc, other, at


@gluon.jit
def _partial(output, slot, part, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Pointers (64, columns) to a program's partial sums of a tile."""
    PARTS: gl.constexpr = 2 if c.doubled else 1
    layout: gl.constexpr = product_layout(c.columns, gl.float32)
    rows = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    COLUMNS: gl.constexpr = c.columns
    columns = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    nth = (slot * c.groups + GROUP) * PARTS + part
    return output.partial + nth * (64 * c.columns) + rows * c.columns + columns


@gluon.jit
def _left(output, q, last, late, part, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """What program q left of a tile, in its second slot if it came late; zeros behind the last."""
    layout: gl.constexpr = product_layout(c.columns, gl.float32)
    there = gl.full([64, c.columns], q, gl.int32, layout) <= last
    return gl.load(_partial(output, 2 * q + late, part, c, GROUP), there, 0.0, cache_modifier=".cg")


@gluon.jit
def _total(output, first, last, late, part, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """What the programs from `first` to `last` left, added in that order. A few are loaded at a time: one after
    the other each would wait for memory.
    """
    BATCH: gl.constexpr = 128 // c.columns if c.columns < 128 else 1
    total = _left(output, first, last, late, part, c, GROUP)
    for q in range(first + 1, last + 1, BATCH):
        one = _left(output, q, last, 0, part, c, GROUP)
        if BATCH > 1:
            two = _left(output, q + 1, last, 0, part, c, GROUP)
        if BATCH > 2:
            three = _left(output, q + 2, last, 0, part, c, GROUP)
            four = _left(output, q + 3, last, 0, part, c, GROUP)
        total = total + one
        if BATCH > 1:
            total = total + two
        if BATCH > 2:
            total = total + three
            total = total + four
    return total


@gluon.jit
def add_up(acc, other, tile, output, work, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """(sums over all of K, whether they are): leaves this program's part of a tile for the others or, if it is
    the last to come, adds all parts up in the order of K. Of two the order does not matter, and its own stays in
    its registers.
    """
    layout: gl.constexpr = product_layout(c.columns, gl.float32)
    own: gl.constexpr = acc.type.layout
    nth = tile - work.dealt
    first = work.owner(nth * work.steps)
    last = work.owner((nth + 1) * work.steps - 1)
    program = gl.program_id(0)
    # The slot of a program's second tile is its second: only the first of a tile's programs can have had another.
    late = gl.where(work.share(first) // work.steps == nth, 0, 1)
    two = last - first == 1
    count = output.counter + 2 * (nth * c.groups + GROUP)
    done = nth < 0
    if two & (program == first) & (late > 0):
        # It is likely to be the last, and then leaves nothing.
        done = gl.atomic_add(count, 0, sem="acquire") == 1
    if not done:
        slot = 2 * program + gl.where(program == first, late, 0)
        gl.store(_partial(output, slot, 0, c, GROUP), gl.convert_layout(acc, layout))
        if c.doubled:
            gl.store(_partial(output, slot, 1, c, GROUP), gl.convert_layout(other, layout))
        thread_barrier()
        done = gl.atomic_add(count, 1, sem="acq_rel") == last - first
    if done:
        gl.atomic_xchg(count, 0, sem="relaxed")
        if two:
            them = first + last - program
            late = gl.where(them == first, late, 0)
            acc = acc + gl.convert_layout(_left(output, them, last, late, 0, c, GROUP), own)
            if c.doubled:
                other = other + gl.convert_layout(_left(output, them, last, late, 1, c, GROUP), own)
        else:
            acc = gl.convert_layout(_total(output, first, last, late, 0, c, GROUP), own)
            if c.doubled:
                other = gl.convert_layout(_total(output, first, last, late, 1, c, GROUP), own)
    return acc, other, done


@gluon.jit
def _columns(x, nth: gl.constexpr, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Columns `nth` · WIDTH and on, WIDTH of them or all; they stay in the registers they are in."""
    if x.shape[1] <= WIDTH:
        return x
    else:
        HALF: gl.constexpr = x.shape[1] // 2
        a, b = gl.split(x.reshape([x.shape[0], 2, HALF]).permute((0, 2, 1)))
        if nth * WIDTH < HALF:
            return _columns(a, nth, WIDTH)
        else:
            return _columns(b, nth - HALF // WIDTH, WIDTH)


@gluon.jit
def _turned(acc, y, rows, scales, i: gl.constexpr, c: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Chunk i of a tile's columns, whose pairs are half a head apart: a · cos - b · sin of the first half,
    b · cos + a · sin of the second. `scales` are the tables and how far apart their rows lie, one a position.
    """
    WIDTH: gl.constexpr = c.chunk
    APART: gl.constexpr = c.head // 2 // WIDTH
    SECOND: gl.constexpr = i // APART % 2
    other = gl.convert_layout(_columns(acc, i - APART if SECOND else i + APART, WIDTH), layout)
    columns = i % APART * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    lead = gl.multiple_of(scales.a_row, 8)
    at = gl.expand_dims(rows % scales.b_row * lead, 1) + gl.expand_dims(columns, 0)
    cos = gl.load(gl.multiple_of(scales.a, 16) + at).to(gl.float32)
    sin = gl.load(gl.multiple_of(scales.b, 16) + at).to(gl.float32)
    return y * cos + other * sin if SECOND else y * cos - other * sin


@gluon.jit
def clamped(gate, up, LIMIT: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """gate · sigmoid(1.702 · gate) · (up + 1) of gate up to the limit and up within both; what is NaN stays so."""
    gate = gl.where(gate > LIMIT, LIMIT, gate)
    up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
    return gate * (up + 1.0) / (1.0 + gl.exp2(gate * (-1.4426950408889634 * 1.702)))


@gluon.jit
def _write(acc, other, row, column, output, scales, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """64 rows of a tile through this consumer's two buffers: out = acc · a_scale · b_scale + bias, or the gated
    silu(acc) · other, or these two clamped; or heads turned by their rows' positions, or out += acc.
    """
    CHUNK_COLUMNS: gl.constexpr = c.chunk
    BUFFERS: gl.constexpr = c.buffers
    layout: gl.constexpr = product_layout(CHUNK_COLUMNS, gl.float32)
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    row_scale = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, layout))
    if c.scales == TENSOR:
        row_scale = row_scale * (gl.load(scales.a) * gl.load(scales.b))
    if c.scales == ROW:
        row_scale = gl.load(scales.a + rows * scales.a_row, rows < output.M, 0.0)
    CHUNKS: gl.constexpr = c.columns // CHUNK_COLUMNS
    for i in gl.static_range(CHUNKS):
        y = gl.convert_layout(_columns(acc, i, CHUNK_COLUMNS), layout)
        columns = column + i * CHUNK_COLUMNS + gl.arange(0, CHUNK_COLUMNS, gl.SliceLayout(0, layout))
        if c.scales == TENSOR or c.scales == ROW:
            y = y * gl.expand_dims(row_scale, 1)
        if c.scales == ROW:
            column_scale = gl.load(scales.b + columns * scales.b_row, columns < output.N, 0.0)
            y = y * gl.expand_dims(column_scale, 0)
        if c.bias:
            bias = gl.load(output.bias + columns, columns < output.N, 0.0).to(gl.float32)
            y = y + gl.expand_dims(bias, 0)
        if c.gated:
            # silu(g) · u = g · u / (1 + exp(-g))
            up = gl.convert_layout(_columns(other, i, CHUNK_COLUMNS), layout)
            y = clamped(y, up, c.limit) if c.limit > 0 else y * up / (1.0 + gl.exp2(y * -1.4426950408889634))
        if c.head > 0:
            y = _turned(acc, y, rows, scales, i, c, layout)
        buffer = output.buffers.index(BUFFERS * GROUP + i % BUFFERS)
        # Of the last two one may still be read.
        tma.store_wait(pendings=1 if CHUNKS > 1 and BUFFERS > 1 else 0)
        buffer.store(y.to(output.tiles.dtype))
        fence_async_shared()
        if c.adds:
            add_out(output.tiles, [row, column + i * CHUNK_COLUMNS], buffer)
        else:
            output.send(row, column + i * CHUNK_COLUMNS, buffer)


@gluon.jit
def write(acc, other, row, column, output, scales, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """A consumer's part of a tile."""
    _write(acc, other, row, column, output, scales, c, GROUP)
    if c.rows == 128:
        _write(other, other, row + 64, column, output, scales, c, GROUP)
    if c.paired:
        _write(other, other, row, column + c.columns, output, scales, c, GROUP)


@gluon.jit
def _compute(ring, work, scales, output, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """A consumer: its rows of every tile."""
    at = cursor(0, c.stages)
    position = gl.program_id(0) * 0
    while position < work.positions(c.shared):
        tile, begin, end = work.unit(position, c.shared)
        row, column = work.origin(tile, c)
        row += GROUP * c.rows
        if c.staged:
            own = scales.of(row - GROUP * c.rows, column, tile * 0, tile * 0)
            acc, other, at = staged_product(ring, at, begin, end, own, c, GROUP)
        elif c.promoted:
            acc, other, at = scaled_product(
                ring, at, begin, end, row, column, scales, output.M, output.N, c, GROUP
            )
        else:
            acc, other, at = product(ring, at, end - begin, c, GROUP)
        if c.shared:
            done = begin == begin
            if end - begin < work.steps:
                acc, other, done = add_up(acc, other, tile, output, work, c, GROUP)
            if done:
                write(acc, other, row, column, output, scales, c, GROUP)
        else:
            write(acc, other, row, column, output, scales, c, GROUP)
        position += end - begin
    tma.store_wait(pendings=0)


@gluon.jit(
    do_not_specialize=["M", "N", "steps", "dealt", "section", "a_row", "a_step", "b_row", "b_step"],
    do_not_specialize_on_alignment=["scale_a", "scale_b", "bias", "partial", "counter"],
)
def kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    a, b, out, a_scales, b_scales, scale_a, scale_b, bias, partial, counter, M, N, steps, dealt, section,
    a_row, a_step, b_row, b_step, c: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, then the warp groups. out is (M, N). `a_scales` and `b_scales` are maps of scales that
    are staged, or None.
    """
    GROUPS: gl.constexpr = c.groups
    BUFFERS: gl.constexpr = c.buffers
    CHUNK_COLUMNS: gl.constexpr = c.chunk
    ring = stages(a, b, c, a_scales, b_scales)
    buffers = gl.allocate_shared_memory(out.dtype, [BUFFERS * GROUPS, 64, CHUNK_COLUMNS], out.layout)
    work = Work(
        (M + c.groups * c.rows - 1) // (c.groups * c.rows), (N + c.width - 1) // c.width, steps, dealt, section
    )
    scales = Scales(scale_a, scale_b, a_row, a_step, b_row, b_step)
    if c.staged:
        zero = M * 0
        scales = StagedScales(
            a_scales, b_scales, a_row, a_step, b_row, b_step, zero + 1, zero, zero, zero, zero
        )  # fmt: skip
    output = Output(out, buffers, bias, partial, counter, M, N)
    R: gl.constexpr = c.registers
    if c.groups == 1:
        gl.warp_specialize(
            [
                (_compute, (ring, work, scales, output, c, 0)),
                (load, (a, b, ring, work, N, c, scales)),
            ],
            [1],
            [PRODUCER],
        )
    elif c.groups == 2:
        gl.warp_specialize(
            [
                (_compute, (ring, work, scales, output, c, 0)),
                (_compute, (ring, work, scales, output, c, 1)),
                (load, (a, b, ring, work, N, c, scales)),
            ],
            [4, 1],
            [R, PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (ring, work, scales, output, c, 0)),
                (_compute, (ring, work, scales, output, c, 1)),
                (_compute, (ring, work, scales, output, c, 2)),
                (load, (a, b, ring, work, N, c, scales)),
            ],
            [4, 4, 1],
            [R, R, PRODUCER],
        )


_ELEMENTS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
}


@functools.cache
def _layout(shape: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(shape), _ELEMENTS[dtype])


@functools.lru_cache(4096)
def _says(shape: torch.Size, lead: int, block: tuple[int, int], dtype: torch.dtype) -> Says:
    """What the tensor map of a matrix whose rows are so far apart says, but for where it is."""
    return Says(vars(TensorMap(None, [*shape], [lead, 1], [*block], _layout(block, dtype))))


@functools.lru_cache(4096)
def _says_numbers(length: int, count: int) -> Says:
    return flat_mapping([length], [count], plain_layout(1))


def _says_tiles(x: torch.Tensor, rows: int, columns: int, turned: bool = False) -> Says:
    """What the tensor map says of tiles of a matrix, which lies in memory row by row, or `turned`: column by
    column.
    """
    if turned:
        x, rows, columns = x.t(), columns, rows
    return _says(x.shape, x.stride(0), (rows, columns), x.dtype)


def _tiles(x: torch.Tensor, rows: int, columns: int) -> Placed:
    """Tiles of a matrix."""
    return placed(x, _says_tiles(x, rows, columns))


def _says_all(x: torch.Tensor, count: int) -> Says:
    """What the tensor map says of so many numbers at a time of all that lie behind a matrix, in a row."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return _says_numbers(length, count)


def _numbers(x: torch.Tensor, count: int) -> Placed:
    """All numbers of a matrix."""
    return placed(x, _says_all(x, count))


def stageable(scale_a: torch.Tensor, scale_b: torch.Tensor, scales: str) -> bool:
    """Whether scales can come with the stages' tiles: those of single rows lie column by column, those of each
    step, and of each group if there are groups, begin at 16 bytes.
    """
    of_rows = [x for x, each in ((scale_a, scales != "tile"), (scale_b, scales == "group")) if each]
    if any(x.stride(-2) != 1 or (x.stride(-1) % 4 and x.shape[-1] > 1) for x in of_rows):
        return False
    if any(x.dim() == 3 and x.stride(0) % 4 and x.shape[0] > 1 for x in of_rows):
        return False
    return scale_a.data_ptr() % 16 == 0 and scale_b.data_ptr() % 16 == 0


def staged_copy(scale: torch.Tensor) -> torch.Tensor:
    """Scales of rows (…, R, steps) column by column, each column at 16 bytes: they can be staged."""
    *groups, R, steps = scale.shape
    laid = torch.empty(*groups, steps, -(-R // 4) * 4, dtype=scale.dtype, device=scale.device)
    return laid.mT[..., :R, :].copy_(scale)


def turned(x: torch.Tensor) -> bool:
    """Whether a matrix lies in memory column by column."""
    return x.stride(1) != 1


def mapped(x: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can load a matrix: rows (or columns) at multiples of 16 bytes."""
    one, other = (x.stride(0), x.stride(1)) if turned(x) else (x.stride(1), x.stride(0))
    size = x.element_size()
    return one == 1 and other * size % 16 == 0 and other >= x.shape[turned(x) ^ 1] and x.data_ptr() % 16 == 0


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Room for a matrix of that shape, row by row, each row at a multiple of 16 bytes."""
    rows, columns = x.shape
    unit = 16 // x.element_size()
    return x.new_empty(rows, -(-columns // unit) * unit)[:, :columns]


def loadable(x: torch.Tensor) -> torch.Tensor:
    """A matrix as it is where it is mapped and, of 8 bits, lies row by row; else a copy that lies so: what cannot
    be mapped would be loaded element by element, once for each tile, and a copy reads it once.
    """
    return x if mapped(x) and (x.element_size() > 1 or not turned(x)) else aligned(x).copy_(x)


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    schedule: Schedule,
    dealt: int,
    section: int,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    split: int = 0,
) -> None:
    """out (M, N) = a (M, K) · b (N, K)ᵀ, with `schedule.gated` b (2N, K). Scales are fp32: single numbers, (M, 1)
    and (N, 1), or (M, ⌈K / 128⌉) and (⌈N / 128⌉, ⌈K / 128⌉), or as the schedule says. The first `dealt` tiles
    are dealt out whole; the tiles of `section` rows of tiles are neighbours. `split`: how many programs compute a
    tile where all are shared out. For matrices that are `mapped`, and scales that are `stageable` if staged.

    With `schedule.head` there are tables in the place of scales: cosines and sines (S, head / 2), row by row, at
    16 bytes; rows are positions, S by S. With `schedule.adds` the product is added to out.
    """
    with on(a):
        planned(a, b, out, schedule, dealt, section, scale_a, scale_b, bias, split)(
            a, b, out, scale_a, scale_b, bias
        )


def planned(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    schedule: Schedule,
    dealt: int,
    section: int,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    split: int = 0,
) -> Callable[..., None]:
    """`multiply` of all tensors that are alike, as a function of (a, b, out, scale_a, scale_b, bias), to be called
    where their device is the current one: all but memory and addresses is decided here. Of what that is called
    with only addresses are read, so that transposes and other views of the same memory do as well.
    """
    M, K = a.shape
    N = out.shape[1]
    device = a.device
    programs = multiprocessors(a)
    tiles = cdiv(M, schedule.rows * schedule.groups) * cdiv(N, schedule.width)
    size = counted = 0
    if schedule.shared:
        # A program without a step would be counted among those that add to a tile.
        programs = min(tiles * split or programs, (tiles - dealt) * cdiv(K, schedule.step))
        parts = 2 if schedule.doubled else 1
        size = 2 * programs * schedule.groups * parts * 64 * schedule.columns
        counted = (tiles - dealt) * schedule.groups
    else:
        programs, dealt = min(programs, tiles), tiles
    strides = [0, 0, 0, 0]
    if scale_a is not None and scale_b is not None:
        strides = [*_strides(scale_a), *_strides(scale_b)]
    if schedule.head and scale_b is not None:
        strides[2] = len(scale_b)
    of_scales = scale_a is not None and scale_a.dtype
    key = kernel_key(kernel, device, a.dtype, out.dtype, bias is not None and bias.dtype, of_scales, schedule)
    numbers = M, N, cdiv(K, schedule.step), dealt, section, *strides, schedule
    of_a = _says_tiles(a, schedule.loaded_rows, schedule.step, schedule.a_turned)
    of_b = _says_tiles(b, schedule.columns, schedule.step, schedule.b_turned)
    of_out = _says_tiles(out, schedule.written_rows, schedule.chunk)
    of_maps = None
    if schedule.staged and scale_a is not None and scale_b is not None:
        of_maps = _says_all(scale_a, schedule.a_scales), _says_all(scale_b, schedule.b_scales)
    of_partial = room((size,), torch.float32, device)

    def run(
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        partial = counter = out
        if size:
            partial = of_partial()
            counter = counters(a, counted)
        maps: tuple[Placed | None, ...] = (None, None)
        if of_maps is not None and scale_a is not None and scale_b is not None:
            maps = placed(scale_a, of_maps[0]), placed(scale_b, of_maps[1])
        launch(
            kernel, key, programs, placed(a, of_a), placed(b, of_b), placed(out, of_out), *maps,
            out if scale_a is None else scale_a, out if scale_b is None else scale_b,
            out if bias is None else bias, partial, counter, *numbers,
        )  # fmt: skip

    return run


def _strides(scale: torch.Tensor) -> tuple[int, int]:
    """How far apart the scales of rows and of steps lie."""
    return (scale.stride(0) if scale.dim() else 0), (scale.stride(1) if scale.dim() == 2 else 0)
