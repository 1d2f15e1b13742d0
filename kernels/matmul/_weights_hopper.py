"""Products of up to 64 rows with weights in MXFP4 for Hopper, in Gluon: the weights are read once, as they are
stored.

The schedule is that of `_matmul_hopper.py` with the operands' roles exchanged: a tile has 64 rows of weights a
consumer, and the rows of x are its columns. A consumer widens its weights in registers, from which the matrix
units take their first operand: outᵀ = W · xᵀ. It widens the second half of a step while the first one's product
runs.

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `full` | each stage | the producer's copies of codes and of x | 1, bytes | each consumer, 0 |
| `empty` | each stage | each consumer, its products with the stage done | groups | producer, 1 |

A thread holds 32 neighbouring numbers of two rows of weights for each 128 steps of K, which share a scale. Of a
word of eight numbers it makes four words of two in bf16, each by shifting and masking: numbers i and i + 4. So
the order of K that the matrix units see is another, and x's columns are laid in it before (`ordered`), within
each 128:

=====================  ======  ======  ======  ======
digit of a column      32      8       4       1
=====================  ======  ======  ======  ======
in x                   t (4)   w (4)   e (2)   i (4)
in the matrix units    w (4)   i (4)   t (4)   e (2), with digits 32, 8, 2, 1
=====================  ======  ======  ======  ======

with t a thread of the four that share a row, w a word, i its numbers of four bits, e a half of the words made of
them.

The number that a code's exponent and fraction are in bf16 is 2^-126 of what it stands for. It is multiplied by the
group's scale times 2^120, so that scales up to 2^7 are bf16 numbers; larger ones become NaN. The rest, 2^6, is
multiplied by in fp32, at the end.
"""
# Without `from __future__ import annotations`, as in `_matmul_hopper.py`.

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from .._common import cdiv, multiprocessors, on
from .._grid_barrier import counters
from .._hopper import TensorMap, launch, thread_barrier, unpack
from .._pipeline import Handshake, barriers, copy_in, cursor
from ._matmul_hopper import Schedule, Work, add_up, product_layout

BLOCK = 256
"""Steps of K whose weights a thread holds at a time, and of a stage."""
DEPTH = gl.constexpr(BLOCK // 2)
PIECE = 1024
"""Numbers that a program of `_order` moves."""
REST = gl.constexpr(64.0)
"""What products are multiplied by at the end."""


@dataclass(frozen=True)
class Few(Schedule):
    """`turns`: groups of consumers that take one step after the other in turn, whose sums are added up at the end
    of a tile. `early`: launched before `_order` has ended. `ahead`: a
    step's first half is widened while the product of the last step's second half runs. `multiplied`: a code's
    sign and the rest of it get to their places by one product. `apart`: a step's second half is widened after the first one's product, in the
    same registers. `helped`: a warp group of its own lays x's columns in order, in place.
    """

    step: int = BLOCK
    packed: int = 8
    turns: int = 1
    early: bool = False
    ahead: bool = False
    multiplied: bool = False
    apart: bool = False
    helped: bool = False


@aggregate
class Ring(Handshake):
    """Stages of tiles of codes and of scales (groups a stage) and of x, and their barriers."""

    codes: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    stored: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, codes, scales, x, stored, full, empty):  # type: ignore[no-untyped-def]  # as above
        self.codes = codes
        self.scales = scales
        self.x = x
        self.stored = stored
        self.full = full
        self.empty = empty


@aggregate
class Sums:
    """Where the second of two consumers hands its sums of a tile to the first: (groups, 64, columns), and a
    barrier a group that they are there and one that they have been read.
    """

    buffers: gl.shared_memory_descriptor
    there: gl.shared_memory_descriptor
    taken: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, buffers, there, taken):  # type: ignore[no-untyped-def]  # Triton's types are its own
        self.buffers = buffers
        self.there = there
        self.taken = taken


@aggregate
class Result:
    """Where results go: out (M, N), partial sums of shared tiles and who has added to them."""

    out: gl.tensor
    partial: gl.tensor
    counter: gl.tensor
    M: gl.tensor
    N: gl.tensor

    @gluon.constexpr_function
    def __init__(self, out, partial, counter, M, N):  # type: ignore[no-untyped-def]  # as above
        self.out = out
        self.partial = partial
        self.counter = counter
        self.M = M
        self.N = N


@triton.jit
def _order(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, out, scales, padded, M, K, lead, width, across, stride, count, SIZE: tl.constexpr, EARLY: tl.constexpr
):
    """Columns of x in the order in which the matrix units see K, zeros from K to `width`; behind them, `count` of
    scales in rows that lie `stride` apart.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    pieces = tl.cdiv(width, SIZE)
    nth = tl.program_id(0)
    if nth < M * pieces:
        row = (nth // pieces).to(tl.int64)
        place = nth % pieces * SIZE + tl.arange(0, SIZE)
        inner = place % 256
        column = place - inner + inner // 2 % 4 * 64 + inner // 32 % 4 * 8 + inner % 2 * 4 + inner // 8 % 4
        column += inner // 128 * 32
        value = tl.load(x + row * lead + column, column < K, 0.0)
        tl.store(out + row * width + place, value, place < width)
    else:
        to = (nth - M * pieces).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        nth_row = to // stride
        group = to - nth_row * stride
        scale = tl.load(scales + nth_row * across + group, (to < count) & (group < across), 0)
        tl.store(padded + to, scale, to < count)


@gluon.constexpr_function
def words_layout():  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Of a consumer's words (64, 32): eight neighbouring ones of rows r and r + 8 a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )


@gluon.constexpr_function
def scales_layout():  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Of a consumer's scales (64, 16) of two steps: those of a thread's words."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [8, 0]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 16],
    )


@gluon.constexpr_function
def _nibbles(multiplied):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """PTX that makes four words of two bf16 numbers of a word of eight codes, times a pair of scales."""
    if multiplied:
        lines = "shr.u32 m, $4, 8;" + "".join(
            f"and.b32 t, {'$4' if i < 2 else 'm'}, {0x00F000F0 if i % 2 else 0x000F000F};"
            f" mul.lo.u32 t, t, {0x104 if i % 2 else 0x1040}; and.b32 t, t, 0x81C081C0; mul.bf16x2 ${i}, t, $5;"
            for i in range(4)
        )
    else:
        lines = "".join(
            f"shl.b32 t, $4, {12 - 4 * i}; shr.u32 m, t, 6; and.b32 m, m, 0x01C001C0; and.b32 t, t, 0x80008000;"
            f" or.b32 t, t, m; mul.bf16x2 ${i}, t, $5;"
            for i in range(4)
        )
    return f"{{ .reg .b32 t, m; {lines} }}"


@gluon.jit
def widened(words, scale, c: gl.constexpr, OPERAND: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Words (64, 4, 4) of eight codes and scales (64, 4) as bytes: the operand (64, 128) in bf16."""
    power = gl.where(scale > 134, 0x7FC07FC0, scale * 0x00800080 + 0x3C003C00)
    pair = gl.expand_dims(power, 2) + gl.zeros_like(words)
    p0, p1, p2, p3 = gl.inline_asm_elementwise(
        _nibbles(c.multiplied), "=&r,=&r,=&r,=&r,r,r", [words, pair],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    packed = gl.join(gl.join(p0, p1), gl.join(p2, p3))  # row, t, w, i % 2, i // 2
    packed = packed.permute((0, 2, 4, 3, 1)).reshape([64, DEPTH // 2])
    return unpack(packed, gl.bfloat16, OPERAND)


@gluon.jit
def _follow(EARLY: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Waits until `_order` has ended and what it wrote is visible."""
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load(q, scales, x, ring, work, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """The producer: tiles of codes, of scales and of x, step by step, tile by tile. It asks for the first codes
    before it waits for x. Of a row's scales it takes those of two steps: a tile has
    16 bytes at least, and begins at a multiple of them.
    """
    GROUPS: gl.constexpr = c.groups
    OF_X: gl.constexpr = x.block_type.nbytes
    OF_WEIGHTS: gl.constexpr = GROUPS * (q.block_type.nbytes + scales.block_type.nbytes)
    NBYTES: gl.constexpr = OF_WEIGHTS + (0 if c.helped else OF_X)
    at = cursor(1, c.stages)
    position = gl.program_id(0) * 0
    while position < work.positions(c.shared):
        tile, begin, end = work.unit(position, c.shared)
        row_tile, column_tile = work.place(tile)
        row = row_tile * (c.groups * 64)
        column = column_tile * c.columns
        first = begin
        if c.early:  # noqa: SIM102  # the one is the compiler's, the other the device's
            if position == 0:
                first = gl.minimum(begin + c.stages, end)
                for k in range(begin, first):
                    full = ring.acquire(at, NBYTES)
                    for i in gl.static_range(GROUPS):
                        copy_in(q, [row + i * 64, k * 32], full, ring.codes.index(at.stage * GROUPS + i))
                    at = at.advanced()
                _follow(c.early)
                for k in range(begin, first):
                    nth = k - begin
                    full = ring.full.index(nth)
                    copy_in(x, [column, k * c.step], full, ring.x.index(nth))
                    for i in gl.static_range(GROUPS):
                        copy_in(scales, [row + i * 64, k // 2 * 16], full, ring.scales.index(nth * GROUPS + i))
        for k in range(first, end):
            full = ring.acquire(at, NBYTES)
            for i in gl.static_range(GROUPS):
                copy_in(q, [row + i * 64, k * 32], full, ring.codes.index(at.stage * GROUPS + i))
                copy_in(scales, [row + i * 64, k // 2 * 16], full, ring.scales.index(at.stage * GROUPS + i))
            if c.helped:
                full = ring.stored.index(at.stage)
                mbarrier.expect(full, OF_X)
            copy_in(x, [column, k * c.step], full, ring.x.index(at.stage))
            at = at.advanced()
        position += end - begin


@gluon.constexpr_function
def columns_layout():  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Of 16 rows of x (16, 256): what of a thread's columns lies side by side before and after it is ordered."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 64], [0, 128]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]],
        warp_bases=[[0, 32], [8, 0]],
        block_bases=[],
        shape=[16, 256],
    )


@gluon.jit
def _arrange(ring, work, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """The helper: lays the columns of each step of x in the order in which the matrix units see K."""
    PARTS: gl.constexpr = c.columns // 16
    at = cursor(0, c.stages)
    for _n in range(0, work.positions(c.shared)):
        mbarrier.wait(ring.stored.index(at.stage), at.phase)
        for i in gl.static_range(PARTS):
            tile = ring.x.index(at.stage).slice(i * 16, 16, 0)
            x = tile.load(columns_layout())
            thread_barrier()
            x = x.reshape([16, 4, 2, 4, 2, 4]).permute(
                (0, 2, 3, 5, 1, 4)
            )  # row, t, j, w, e, i → row, j, w, i, t, e
            tile.store(x.reshape([16, 256]))
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(ring.full.index(at.stage), count=1)
        at = at.advanced()


@gluon.jit
def _halves(  # type: ignore[no-untyped-def]  # as above
    ring, stage, k, SCALES: gl.constexpr, c: gl.constexpr, GROUP: gl.constexpr
):
    """A consumer's words (64, 4, 4) and scales (64, 4) of both halves of step k."""
    words = ring.codes.index(stage * c.groups + GROUP).load(words_layout())
    one, two = gl.split(words.reshape([64, 4, 2, 4]).permute((0, 1, 3, 2)))
    scales = ring.scales.index(stage * c.groups + GROUP).load(scales_layout()).to(gl.int32)
    even, odd = gl.split(scales.reshape([64, 2, 4, 2]).permute((0, 2, 3, 1)))
    a, b = gl.split(gl.where(k % 2 == 0, even, odd))
    a = gl.convert_layout(a, SCALES, assert_trivial=True)
    b = gl.convert_layout(b, SCALES, assert_trivial=True)
    return one, two, a, b


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]  # as above
    ring, work, sums, result, c: gl.constexpr, GROUP: gl.constexpr, TURN: gl.constexpr
):
    """A consumer: its 64 rows of weights of every tile, every step or every second one."""
    layout: gl.constexpr = product_layout(c.columns, gl.bfloat16)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    SHAPE: gl.constexpr = [64, c.columns]
    COLUMNS: gl.constexpr = c.columns
    WORDS: gl.constexpr = gl.split(
        gl.zeros([64, 32], gl.int32, words_layout()).reshape([64, 4, 2, 4]).permute((0, 1, 3, 2))
    )[0].type.layout
    SCALES: gl.constexpr = gl.SliceLayout(2, WORDS)
    at = cursor(0, c.stages)
    if TURN == 1:
        at = at.advanced()
    handed = gl.to_tensor(0)
    position = gl.program_id(0) * 0
    while position < work.positions(c.shared):
        tile, begin, end = work.unit(position, c.shared)
        row_tile, column_tile = work.place(tile)
        row = (row_tile * c.groups + GROUP) * 64
        column = column_tile * COLUMNS
        first = begin
        if c.turns == 2:
            first = begin + (position + TURN) % 2
        acc = gl.zeros(SHAPE, gl.float32, layout)
        last = gl.zeros([64, DEPTH], gl.bfloat16, OPERAND)
        before = gl.to_tensor(0)  # not the cursor's own stage: see `product` in `_matmul_hopper.py`
        for k in range(first, end, c.turns):
            ring.wait(at)
            x = ring.x.index(at.stage).permute((1, 0))
            words, others, one, two = _halves(ring, at.stage, k, SCALES, c, GROUP)
            a = widened(words, one, c, OPERAND)
            if c.ahead:
                acc, last = warpgroup_mma_wait(0, deps=[acc, last])
                mbarrier.arrive(ring.empty.index(before), count=1, pred=k > first)
            acc = warpgroup_mma(a, x.slice(0, DEPTH, 0), acc, is_async=True)  # acc += W @ X.T
            if c.apart:
                acc, a = warpgroup_mma_wait(0, deps=[acc, a])
            last = widened(others, two, c, OPERAND)  # while that product runs
            acc = warpgroup_mma(last, x.slice(DEPTH, DEPTH, 0), acc, is_async=True)
            if c.ahead:
                acc, a = warpgroup_mma_wait(1, deps=[acc, a])
                before = at.stage
            else:
                acc, a, last = warpgroup_mma_wait(0, deps=[acc, a, last])
                ring.release(at)
            at = at.advanced()
            if c.turns == 2:
                at = at.advanced()
        if c.ahead:
            acc, last = warpgroup_mma_wait(0, deps=[acc, last])
            mbarrier.arrive(ring.empty.index(before), count=1, pred=first < end)
        if TURN == 1:
            mbarrier.wait(sums.taken.index(GROUP), handed ^ 1)
            sums.buffers.index(GROUP).store(acc)
            thread_barrier()
            mbarrier.arrive(sums.there.index(GROUP), count=1)
            handed = handed ^ 1
        else:
            if c.turns == 2:
                mbarrier.wait(sums.there.index(GROUP), handed)
                acc = acc + sums.buffers.index(GROUP).load(layout)
                thread_barrier()
                mbarrier.arrive(sums.taken.index(GROUP), count=1)
                handed = handed ^ 1
            done = begin == begin
            if c.shared:  # noqa: SIM102  # as above
                if end - begin < work.steps:
                    acc, _, done = add_up(acc, acc, tile, result, work, c, GROUP)
            if done:
                rows = gl.expand_dims(row + gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
                columns = gl.expand_dims(column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
                to = result.out + columns * result.N + rows
                gl.store(to, (acc * REST).to(gl.bfloat16), (rows < result.N) & (columns < result.M))
        position += end - begin


@gluon.jit(
    do_not_specialize=["M", "N", "steps", "dealt", "section"],
    do_not_specialize_on_alignment=["out", "partial", "counter"],
)
def kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, scales, x, out, partial, counter, M, N, steps, dealt, section, c: gl.constexpr
):
    """Buffers and barriers, then the warp groups. out is (M, N)."""
    STAGES: gl.constexpr = c.stages
    GROUPS: gl.constexpr = c.groups
    TURNS: gl.constexpr = c.turns
    COLUMNS: gl.constexpr = c.columns
    CODES: gl.constexpr = [STAGES * GROUPS] + q.block_type.shape  # noqa: RUF005  # a kernel knows no unpacking
    SCALES: gl.constexpr = [STAGES * GROUPS] + scales.block_type.shape  # noqa: RUF005  # as above
    X: gl.constexpr = [STAGES] + x.block_type.shape  # noqa: RUF005  # as above
    ring = Ring(
        gl.allocate_shared_memory(q.dtype, CODES, q.layout),
        gl.allocate_shared_memory(scales.dtype, SCALES, scales.layout),
        gl.allocate_shared_memory(x.dtype, X, x.layout),
        barriers(c.stages, 1 if c.helped else 0),
        barriers(c.stages, 2 if c.helped else 1),
        barriers(c.stages, c.groups),
    )
    if TURNS == 2:
        ROOM: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        buffers = gl.allocate_shared_memory(gl.float32, [GROUPS, 64, COLUMNS], ROOM)
        sums = Sums(buffers, barriers(c.groups, 1), barriers(c.groups, 1))
    else:
        sums = Sums(ring.full, ring.full, ring.full)
    work = Work(
        (N + c.groups * 64 - 1) // (c.groups * 64), (M + c.columns - 1) // c.columns, steps, dealt, section
    )
    result = Result(out, partial, counter, M, N)
    FIRST: gl.constexpr = 0 if c.helped else 1
    LAST: gl.constexpr = GROUPS * TURNS + 2
    gl.warp_specialize(
        [
            (_arrange, (ring, work, c)),
            (_load, (q, scales, x, ring, work, c)),
            (_compute, (ring, work, sums, result, c, 0, 0)),
            (_compute, (ring, work, sums, result, c, 1 % c.groups, 1 // c.groups)),
            (_compute, (ring, work, sums, result, c, 2 % c.groups, 2 // c.groups)),
            (_compute, (ring, work, sums, result, c, 3 % c.groups, 3 // c.groups)),
        ][FIRST:LAST],
        [4, 4, 4, 4, 4][FIRST : LAST - 1],
        [32, c.registers, c.registers, c.registers, c.registers][FIRST : LAST - 1],
    )


def candidates(M: int) -> list[Few]:
    """Schedules for M up to 64 rows of x."""
    columns = 16 if M <= 16 else 32 if M <= 32 else 64
    most = {16: 8, 32: 6, 64: 4}[columns]
    four = Few(
        groups=2, turns=2, stages=most - (columns == 64) * 2, registers=112, columns=columns, early=True,
        multiplied=True, apart=columns == 64,
    )  # fmt: skip
    two = replace(four, turns=1, stages=most, registers=224, apart=False)
    helped = replace(two, helped=True, early=False, registers=200)
    return [
        four,
        two,
        replace(two, ahead=True),
        helped,
        replace(helped, ahead=True),
        replace(two, stages=5 if columns == 16 else 4 if columns == 32 else 3, early=False),
        replace(two, multiplied=False),
        replace(four, stages=4 if columns < 64 else 2, groups=1),
    ]


def schedule(M: int) -> Few:
    """For M up to 64 rows of x."""
    return candidates(M)[0]


def fits(q: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator takes the codes (N, K / 2): whole words at multiples of 16 bytes."""
    return q.is_contiguous() and q.shape[1] % 16 == 0 and q.data_ptr() % 16 == 0


def ordered(
    x: torch.Tensor, scales: torch.Tensor, early: bool = False, helped: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) with its columns in the order in which the matrix units see them, filled up to a multiple of 256,
    unless it is `helped`; scales in rows at multiples of 16 bytes. `early`: what is launched next may begin before
    this ends.
    """
    (M, K), (N, across) = x.shape, scales.shape
    width, stride = cdiv(K, BLOCK) * BLOCK, cdiv(across, 16) * 16
    out, rows = x, 0
    if not helped:
        out, rows = torch.empty(M, width, dtype=x.dtype, device=x.device), M
    padded, count = scales, 0
    if stride != across or scales.data_ptr() % 16:
        padded, count = torch.empty(N, stride, dtype=scales.dtype, device=x.device), N * stride
    grid = rows * cdiv(width, PIECE) + cdiv(count, PIECE)
    if grid:
        _order[(grid,)](
            x, out, scales, padded, rows, K, x.stride(0), width, across, stride, count, PIECE, early, num_warps=4
        )  # fmt: skip
    return out, padded


def few_rows(
    x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, given: Few | None = None
) -> None:
    """out (M, N) = x (M, K) · weightsᵀ for M up to 64, codes q (N, K / 2) that `fits` approves of, and scales as
    contiguous bytes (N, ⌈K / 32⌉).
    """
    (M, K), N = x.shape, q.shape[0]
    c = schedule(M) if given is None else given
    if c.helped and (x.data_ptr() % 16 or x.stride(0) % 8):
        c = replace(c, helped=False)
    words = q.view(torch.int32)
    tiles, steps = cdiv(N, 64 * c.groups) * cdiv(M, c.columns), cdiv(K, c.step)
    programs = min(multiprocessors(x), tiles * steps)
    dealt = 0
    rest = tiles % programs
    if 0 < 8 * rest < 7 * programs:  # else the last round is full enough to leave tiles whole
        c = replace(c, shared=True)
        size = 2 * programs * c.groups * 64 * c.columns
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counter = counters(x, tiles * c.groups)
    else:
        programs, dealt = min(programs, tiles), tiles
        partial = counter = out
    with on(x):
        x, scales = ordered(x, scales, c.early, c.helped)
        launch(
            kernel, (kernel, x.device, c), programs,
            _map(words, 64, c.step // 8), _map(scales, 64, 16), _map(x, c.columns, c.step),
            out, partial, counter, M, N, steps, dealt, 8, c,
            **({"launch_pdl": True} if c.early else {}),
        )  # fmt: skip


def _map(x: torch.Tensor, rows: int, columns: int) -> TensorMap:
    """Tiles of words, of bytes or of 16-bit numbers."""
    return TensorMap(x, [*x.shape], [x.stride(0), 1], [rows, columns], _layout(rows, columns, x.dtype))


_ELEMENTS = {torch.int32: gl.int32, torch.uint8: gl.uint8, torch.bfloat16: gl.bfloat16}


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _ELEMENTS[dtype])
