"""Products of up to 64 rows with 2:4 weights for Hopper, in Gluon: the weights are read once, as they are stored,
and never lie in memory in dense form.

The schedule is that of `_weights_hopper.py`: consumers make their operand in registers, here of values and
positions. A thread has eight neighbouring groups of four columns of two rows for each 128 of K: a word of two
values each, and one word of eight positions. Of a group it makes two words of two numbers, a selection of bytes
each. So the order of K that the matrix units see is another, and x's columns are laid in it before (`ordered`),
within each 128:

=====================  ======  ======  ======  ======
digit of a column      32      4       2       1
=====================  ======  ======  ======  ======
in x                   t (4)   i (8)   h (2)   e (2)
in the matrix units    i (8)   h (2)   t (4)   e (2), with digits 16, 8, 2, 1
=====================  ======  ======  ======  ======

with t a thread of the four that share a row, i its groups, h the halves of a group.

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `full` | each stage | the producer's copies of values, of positions and of x | 1, bytes | each consumer, 0 |
| `empty` | each stage | each consumer, its products with the stage done | groups | producer, 1 |
"""
# Without `from __future__ import annotations`, as in `_matmul_hopper.py`.

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from .._common import cdiv, multiprocessors, on
from .._grid_barrier import counters
from .._hopper import TensorMap, launch, unpack
from .._pipeline import Handshake, copy_in, cursor
from ._matmul_hopper import Work, add_up, product_layout, words_layout
from ._schedules import Schedule

BLOCK = 128
"""Steps of K whose numbers a thread makes at a time, and what K is a multiple of."""
DEPTH = gl.constexpr(BLOCK)


@aggregate
class Ring(Handshake):
    """Stages of tiles of values and positions (groups a stage) and of x, and their barriers."""

    values: gl.shared_memory_descriptor
    positions: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, values, positions, x, full, empty):  # type: ignore[no-untyped-def]  # Triton's types are its own
        self.values = values
        self.positions = positions
        self.x = x
        self.full = full
        self.empty = empty


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
def _order(x, out, M, K, lead, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Columns of x in the order in which the matrix units see K."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inner = place % 128
    column = place - inner + inner // 2 % 4 * 32 + inner // 16 * 4 + inner // 8 % 2 * 2 + inner % 2
    tl.store(out + row * K + place, tl.load(x + row * lead + column, column < K, 0.0), place < K)


@gluon.constexpr_function
def _select():  # type: ignore[no-untyped-def]  # Triton's types are its own
    """PTX that puts a pair of values at the places that four bits say: bytes 4 are zeros, 0 to 3 the pair's."""
    return (
        "{ .reg .b32 f, s; shl.b32 f, $3, 3; and.b32 f, f, 24; shl.b32 s, $3, 1; and.b32 s, s, 24;"
        " shl.b32 f, 0x54, f; shl.b32 s, 0x76, s; xor.b32 f, f, s; xor.b32 f, f, 0x44444444;"
        " prmt.b32 $0, $2, 0, f; shr.u32 f, f, 16; prmt.b32 $1, $2, 0, f; }"
    )


@gluon.jit
def placed(pairs, positions, dtype: gl.constexpr, OPERAND: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Words (64, 32) of two values and (64, 4) of eight groups' positions: the operand (64, 128)."""
    pairs = pairs.reshape([64, 4, 8])  # row, t, i
    ALONG: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, pairs.type.layout))
    shift = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, ALONG) * 4, 0), 1)
    codes = (gl.expand_dims(positions, 2) + gl.zeros_like(pairs)) >> shift
    low, high = gl.inline_asm_elementwise(
        _select(), "=&r,=&r,r,r", [pairs, codes], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    packed = gl.join(low, high).permute((0, 2, 3, 1)).reshape([64, DEPTH // 2])  # row, i, h, t
    return unpack(packed, dtype, OPERAND)


@gluon.jit
def _operand(ring, at, c: gl.constexpr, GROUP: gl.constexpr, NTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """A consumer's rows of weights, the NTH 128 of K of a stage."""
    layout: gl.constexpr = product_layout(c.columns, ring.x.dtype)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    WORDS: gl.constexpr = gl.zeros([64, 32], gl.int32, words_layout()).reshape([64, 4, 8]).type.layout
    values = ring.values.index(at.stage * c.groups + GROUP)
    positions = ring.positions.index(at.stage * c.groups + GROUP)
    return placed(
        values.slice(NTH * 32, 32, 1).load(words_layout()),
        positions.slice(NTH * 4, 4, 1).load(gl.SliceLayout(2, WORDS)),
        ring.x.dtype,
        OPERAND,
    )


@gluon.jit
def _load(values, positions, x, ring, work, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """The producer: tiles of values, positions and x, step by step, tile by tile."""
    GROUPS: gl.constexpr = c.groups
    at = cursor(1, c.stages)
    position = gl.program_id(0) * 0
    while position < work.positions(c.shared):
        tile, begin, end = work.unit(position, c.shared)
        row_tile, column_tile = work.place(tile)
        for k in range(begin, end):
            depth = k * c.step
            size: gl.constexpr = (
                GROUPS * (values.block_type.nbytes + positions.block_type.nbytes) + x.block_type.nbytes
            )
            full = ring.acquire(at, size)
            for i in gl.static_range(GROUPS):
                row = (row_tile * GROUPS + i) * 64
                copy_in(values, [row, depth // 4], full, ring.values.index(at.stage * GROUPS + i))
                copy_in(positions, [row, depth // 32], full, ring.positions.index(at.stage * GROUPS + i))
            copy_in(x, [column_tile * c.columns, depth], full, ring.x.index(at.stage))
            at = at.advanced()
        position += end - begin


@gluon.jit
def _compute(ring, work, result, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """A consumer: its 64 rows of weights of every tile."""
    layout: gl.constexpr = product_layout(c.columns, ring.x.dtype)
    SHAPE: gl.constexpr = [64, c.columns]
    BLOCKS: gl.constexpr = c.step // DEPTH
    COLUMNS: gl.constexpr = c.columns
    at = cursor(0, c.stages)
    position = gl.program_id(0) * 0
    while position < work.positions(c.shared):
        tile, begin, end = work.unit(position, c.shared)
        row_tile, column_tile = work.place(tile)
        row = (row_tile * c.groups + GROUP) * 64
        column = column_tile * COLUMNS
        acc = gl.zeros(SHAPE, gl.float32, layout)
        for _k in range(begin, end):
            ring.wait(at)
            x = ring.x.index(at.stage).permute((1, 0))
            a = _operand(ring, at, c, GROUP, 0)
            for j in gl.static_range(BLOCKS):
                acc = warpgroup_mma(a, x.slice(j * DEPTH, DEPTH, 0), acc, is_async=True)  # acc += W @ X.T
                after = a
                if j + 1 < BLOCKS:  # while that product runs
                    after = _operand(ring, at, c, GROUP, j + 1)
                acc, a = warpgroup_mma_wait(0, deps=[acc, a])
                a = after
            ring.release(at)
            at = at.advanced()
        done = begin == begin
        if c.shared:  # noqa: SIM102  # the one is the compiler's, the other the device's
            if end - begin < work.steps:
                acc, _, done = add_up(acc, acc, tile, result, work, c, GROUP)
        if done:
            rows = gl.expand_dims(row + gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
            columns = gl.expand_dims(column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
            to = result.out + columns * result.N + rows
            gl.store(to, acc.to(ring.x.dtype), (rows < result.N) & (columns < result.M))
        position += end - begin


@gluon.jit(
    do_not_specialize=["M", "N", "steps", "dealt", "section"],
    do_not_specialize_on_alignment=["out", "partial", "counter"],
)
def kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    values, positions, x, out, partial, counter, M, N, steps, dealt, section, c: gl.constexpr
):
    """Buffers and barriers, then the warp groups. out is (M, N)."""
    STAGES: gl.constexpr = c.stages
    GROUPS: gl.constexpr = c.groups
    VALUES: gl.constexpr = [STAGES * GROUPS] + values.block_type.shape  # noqa: RUF005  # a kernel knows no unpacking
    POSITIONS: gl.constexpr = [STAGES * GROUPS] + positions.block_type.shape  # noqa: RUF005  # as above
    X: gl.constexpr = [STAGES] + x.block_type.shape  # noqa: RUF005  # as above
    ring = Ring(
        gl.allocate_shared_memory(values.dtype, VALUES, values.layout),
        gl.allocate_shared_memory(positions.dtype, POSITIONS, positions.layout),
        gl.allocate_shared_memory(x.dtype, X, x.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(i), count=1)
        mbarrier.init(ring.empty.index(i), count=c.groups)
    work = Work(
        (N + c.groups * 64 - 1) // (c.groups * 64), (M + c.columns - 1) // c.columns, steps, dealt, section
    )
    result = Result(out, partial, counter, M, N)
    gl.warp_specialize(
        [
            (_load, (values, positions, x, ring, work, c)),
            (_compute, (ring, work, result, c, 0)),
            (_compute, (ring, work, result, c, 1)),
        ][: GROUPS + 1],
        [4, 4][:GROUPS],
        [c.registers, c.registers][:GROUPS],
    )


def schedule(M: int) -> Schedule:
    """For M up to 64 rows of x."""
    columns = 16 if M <= 16 else 32 if M <= 32 else 64
    return Schedule(columns=columns, step=256, stages={16: 4, 32: 4, 64: 3}[columns], registers=224)


def fits(values: torch.Tensor, positions: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator takes values (N, K/2) and positions (N, K/8): K in whole blocks."""
    whole = values.is_contiguous() and positions.is_contiguous() and values.shape[1] % (BLOCK // 2) == 0
    return whole and (values.data_ptr() | positions.data_ptr()) % 16 == 0


def ordered(x: torch.Tensor) -> torch.Tensor:
    """x (M, K) with its columns in the order in which the matrix units see them."""
    M, K = x.shape
    out = torch.empty(M, K, dtype=x.dtype, device=x.device)
    _order[(M, cdiv(K, 1024))](x, out, M, K, x.stride(0), 1024, num_warps=4)
    return out


def few_rows(x: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """out (M, N) = x (M, K) · weightᵀ for M up to 64, values and positions that `fits` approves of."""
    (M, K), N = x.shape, values.shape[0]
    c = schedule(M)
    tiles, steps = cdiv(N, 64 * c.groups) * cdiv(M, c.columns), cdiv(K, c.step)
    programs = min(multiprocessors(x), tiles * steps)
    dealt = 0
    rest = tiles % programs
    if 0 < 8 * rest < 7 * programs:  # else the last round is full enough to leave tiles whole
        c = replace(c, shared=True)
        partial = torch.empty(2 * programs * c.groups * 64 * c.columns, dtype=torch.float32, device=x.device)
        counter = counters(x, tiles * c.groups)
    else:
        programs, dealt = min(programs, tiles), tiles
        partial = counter = out
    with on(x):
        x = ordered(x)
        launch(
            kernel, (kernel, x.device, x.dtype, c), programs,
            _map(values.view(torch.int32), 64, c.step // 4), _map(positions.view(torch.int32), 64, c.step // 32),
            _map(x, c.columns, c.step), out, partial, counter, M, N, steps, dealt, 8, c,
        )  # fmt: skip


def _map(x: torch.Tensor, rows: int, columns: int) -> TensorMap:
    """Tiles of words or of 16-bit numbers."""
    return TensorMap(x, [*x.shape], [x.stride(0), 1], [rows, columns], _layout(rows, columns, x.dtype))


_ELEMENTS = {torch.int32: gl.int32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _ELEMENTS[dtype])
