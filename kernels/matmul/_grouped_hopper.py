"""Products of groups of rows for Hopper, each with a weight of its own, in Gluon: out = A · B[group]ᵀ.

The warp groups, the ring, the products and what writes them are those of `_matmul_hopper.py`, and so are the
barriers of a stage:

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `full` | each stage | the producer's copies of A and of B | 1, bytes | each consumer, 0 |
| `empty` | each stage | each consumer, its products with the stage done | groups | producer, 1 |

What differs is where a tile lies: a list made on the device (`_grouped_tiles.py`) says its group and its first
row, and how many tiles there are, so that the host knows neither. Programs take tiles one after the other, as far
apart as there are programs. A consumer reads where its next tile lies while it computes this one; the producer is
ahead.

A tile may have rows beyond its group's. They are not another group's: groups of rows that follow each other begin
at multiples of a tile's rows, and a masked group's memory ends where the output's tensor map does. So such rows
may be loaded and written, with any numbers. Where a weight has no more columns a tile loads the next weight's;
what comes of them is beyond the output's columns, which the tensor map leaves alone.

The gated product can quantize its result: a tile has 128 columns of it, which share a scale; scales of a column of
tiles lie together.
"""
# Without `from __future__ import annotations`, as in `_matmul_hopper.py`.

import functools
from dataclasses import replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.language.core import _aggregate as aggregate

from .._common import cdiv, multiprocessors, on
from .._hopper import Placed, TensorMap, launch, sectioned
from .._pipeline import copy_out, cursor
from ._grouped import LARGEST, strides
from ._grouped_tiles import TileList
from ._matmul_hopper import (
    _ELEMENTS,
    PRODUCER,
    Scales,
    StagedScales,
    _numbers,
    clamped,
    fetch,
    product,
    scaled_product,
    stageable,
    staged_product,
    stages,
    write,
)
from ._schedules import CHUNK, GroupedSchedule

WIDE = gl.constexpr(CHUNK)
TOP = gl.constexpr(LARGEST)


@aggregate
class Tiles:
    """Where tiles lie: their groups and first rows, rows and columns of tiles, and the steps of each."""

    groups: gl.tensor
    rows: gl.tensor
    row_tiles: gl.tensor
    column_tiles: gl.tensor
    steps: gl.tensor
    section: gl.tensor

    @gluon.constexpr_function
    def __init__(self, groups, rows, row_tiles, column_tiles, steps, section):  # type: ignore[no-untyped-def]
        self.groups = groups
        self.rows = rows
        self.row_tiles = row_tiles
        self.column_tiles = column_tiles
        self.steps = steps
        self.section = section

    @gluon.jit
    def count(self):  # type: ignore[no-untyped-def]  # Triton's types are its own
        """Tiles of all."""
        return self.row_tiles * self.column_tiles

    @gluon.jit
    def find(self, tile, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
        """(group, first row, first column) of a tile; of one beyond the last, some."""
        there = tile < self.count()
        tile = gl.where(there, tile, 0)
        row_tile, column_tile = sectioned(tile, self.column_tiles, gl.maximum(self.row_tiles, 1), self.section)
        group = gl.load(self.groups + row_tile, there, 0)
        row = gl.load(self.rows + row_tile, there, 0)
        return group, row, column_tile * c.width


@aggregate
class GroupOutput:
    """Where results go: the output's map (groups with memory of their own, rows, columns) and buffers, the group's
    number there, scales, and the output's size.
    """

    tiles: tma.tensor_descriptor
    buffers: gl.shared_memory_descriptor
    shelf: gl.tensor
    scales: gl.tensor
    M: gl.tensor
    N: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tiles, buffers, shelf, scales, M, N):  # type: ignore[no-untyped-def]  # as above
        self.tiles = tiles
        self.buffers = buffers
        self.shelf = shelf
        self.scales = scales
        self.M = M
        self.N = N

    @gluon.jit
    def of(self, group, c: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
        """The same for a group's rows."""
        shelf = group if c.masked else group * 0
        return GroupOutput(self.tiles, self.buffers, shelf, self.scales, self.M, self.N)

    @gluon.jit
    def send(self, row, column, buffer):  # type: ignore[no-untyped-def]  # Triton's types are its own
        """Has a tile's rows, up to 64, and a buffer's columns written."""
        copy_out(self.tiles, [self.shelf, row, column], buffer)


@gluon.jit
def _load(a, b, ring, work, scales, a_group, b_group, M, N, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """The producer: tiles of A and of the groups' B, step by step, tile by tile. A masked group has M rows."""
    apart = M if c.masked else 0
    at = cursor(1, c.stages)
    pieces_apart = c.columns if c.paired else N
    b_rows = 2 * N if c.gated else N
    tile = gl.program_id(0)
    while tile < work.count():
        group, row, column = work.find(tile, c)
        own = scales.of(row, column, group * a_group, group * b_group) if c.staged else None
        at = fetch(
            a, b, ring, at, 0, work.steps, group * apart + row, group * b_rows + column, pieces_apart, c, own
        )  # fmt: skip
        tile += gl.num_programs(0)


@gluon.jit
def _write_quantized(acc, other, row, column, output, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """64 rows of silu(acc) · other, or of their clamped product, in E4M3, and their scales."""
    layout: gl.constexpr = acc.type.layout
    COLUMNS: gl.constexpr = c.columns
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    # silu(g) · u = g · u / (1 + exp(-g))
    y = clamped(acc, other, c.limit) if c.limit > 0 else acc * other / (1.0 + gl.exp2(acc * -1.4426950408889634))
    y = gl.where(gl.expand_dims(columns < output.N, 0), y, 0.0)
    largest = gl.maximum(gl.max(gl.maximum(y, -y), 1), 1e-30)
    to = output.scales + column // COLUMNS * output.M + rows
    own = rows < output.M
    if c.filled > 0:
        own = own & (rows < row + c.filled)
    gl.store(to, largest / TOP, own)
    y = y * gl.expand_dims(TOP / largest, 1)
    buffer = output.buffers.index(GROUP)
    tma.store_wait(pendings=0)
    buffer.store(y.to(output.tiles.dtype))
    fence_async_shared()
    output.send(row, column, buffer)


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]  # Triton's types are its own
    ring, work, scales, a_group, b_group, output, c: gl.constexpr, GROUP: gl.constexpr
):
    """A consumer: its rows of every tile. Scales of groups lie `a_group` and `b_group` numbers apart."""
    at = cursor(0, c.stages)
    tile = gl.program_id(0)
    group, row, column = work.find(tile, c)
    while tile < work.count():
        tile += gl.num_programs(0)
        next_group, next_row, next_column = work.find(tile, c)
        if c.staged:
            own = scales.of(row, column, group * a_group, group * b_group)
        else:
            wide = gl.cast(group, gl.int64)
            own = Scales(
                scales.a + wide * a_group, scales.b + wide * b_group,
                scales.a_row, scales.a_step, scales.b_row, scales.b_step,
            )  # fmt: skip
        row += GROUP * c.rows
        if c.staged:
            acc, other, at = staged_product(ring, at, 0, work.steps, own, c, GROUP)
        elif c.promoted:
            acc, other, at = scaled_product(
                ring, at, 0, work.steps, row, column, own, output.M, output.N, c, GROUP
            )
        else:
            acc, other, at = product(ring, at, work.steps, c, GROUP)
        if c.quantized:
            _write_quantized(acc, other, row, column, output.of(group, c), c, GROUP)
        else:
            write(acc, other, row, column, output.of(group, c), own, c, GROUP)
        group = next_group
        row = next_row
        column = next_column
    tma.store_wait(pendings=0)


@gluon.jit(
    do_not_specialize=[
        "M", "N", "steps", "section", "a_group", "a_row", "a_step", "b_group", "b_row", "b_step",
    ],
    do_not_specialize_on_alignment=["scale_a", "scale_b", "out_scale", "groups", "rows", "total"],
)  # fmt: skip
def kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    a, b, out, scale_a, scale_b, out_scale, groups, rows, total, M, N, steps, section,
    a_group, a_row, a_step, b_group, b_row, b_step, c: gl.constexpr,
):  # fmt: skip
    """Buffers and barriers, then the warp groups. out is (groups with memory of their own or 1, M, N). Of scales
    that are staged `scale_a` and `scale_b` are the maps.
    """
    GROUPS: gl.constexpr = c.groups
    ring = stages(a, b, c, scale_a, scale_b)
    BUFFERS: gl.constexpr = [GROUPS, 64, c.columns] if c.quantized else [c.buffers * GROUPS, 64, WIDE]
    buffers = gl.allocate_shared_memory(out.dtype, BUFFERS, out_layout(out.dtype, BUFFERS))
    work = Tiles(groups, rows, gl.load(total), (N + c.width - 1) // c.width, steps, section)
    if c.staged:
        zero = M * 0
        # A gate's other factor begins with a block of its own.
        apart = (N + 127) // 128 if c.gated else zero + 1
        scales = StagedScales(
            scale_a, scale_b, a_row, a_step, b_row, b_step, apart, zero, zero, zero, zero
        )  # fmt: skip
    else:
        scales = Scales(scale_a, scale_b, a_row, a_step, b_row, b_step)
    output = GroupOutput(out, buffers, M * 0, out_scale, M, N)
    R: gl.constexpr = c.registers
    if c.groups == 1:
        gl.warp_specialize(
            [
                (_compute, (ring, work, scales, a_group, b_group, output, c, 0)),
                (_load, (a, b, ring, work, scales, a_group, b_group, M, N, c)),
            ],
            [1],
            [PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (ring, work, scales, a_group, b_group, output, c, 0)),
                (_compute, (ring, work, scales, a_group, b_group, output, c, 1)),
                (_load, (a, b, ring, work, scales, a_group, b_group, M, N, c)),
            ],
            [4, 1],
            [R, PRODUCER],
        )


@gluon.constexpr_function
def out_layout(dtype, buffers):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Of 64 rows on their way out."""
    return gl.NVMMASharedLayout.get_default_for(buffers[1:], dtype)


@functools.cache
def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(shape), _ELEMENTS[dtype])


def _tiles(x: torch.Tensor, rows: int, columns: int) -> TensorMap:
    """Tiles of a tensor's rows of its last dimension, all groups' after each other."""
    shape = [x.shape.numel() // x.shape[-1], x.shape[-1]]
    return TensorMap(x, shape, [x.stride(-2), 1], [rows, columns], _layout((rows, columns), x.dtype))


def mapped(x: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator takes it so: rows at multiples of 16 bytes, as far apart from group to
    group as within one.
    """
    row = x.stride(-2)
    apart = x.dim() == 2 or x.shape[0] == 1 or x.stride(0) == x.shape[1] * row
    aligned = row * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x.stride(-1) == 1 and row >= x.shape[-1] and apart and aligned


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    tiles: TileList,
    schedule: GroupedSchedule,
    section: int,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> None:
    """out (T, N) = a (T, K) · b (E, N, K)ᵀ by groups, with `schedule.gated` b (E, 2N, K), `masked`: out (E, M, N)
    of a (E, M, K), of the rows that the tiles have. Scales are as in `_grouped.multiply`, those of out column by
    column. For tensors that are `mapped` and tiles as high as the schedule's.
    """
    K, M, N = a.shape[-1], *out.shape[-2:]
    programs = min(multiprocessors(a), tiles.most * cdiv(N, schedule.width))
    scales: list[torch.Tensor | Placed | None] = [scale_a, scale_b]
    if schedule.promoted and scale_a is not None and scale_b is not None and stageable(scale_a, scale_b, "block"):
        schedule = replace(schedule, staged=True)
        scales = [_numbers(scale_a, schedule.a_scales), _numbers(scale_b, schedule.b_scales)]
    rows, columns = schedule.written_rows, schedule.columns if schedule.quantized else CHUNK
    shape = [out.shape.numel() // (M * N), M, N]
    target = TensorMap(
        out,
        shape,
        [M * out.stride(-2), out.stride(-2), 1],
        [1, rows, columns],
        _layout((1, rows, columns), out.dtype),
    )
    with on(a):
        launch(
            kernel, (kernel, a.device, a.dtype, out.dtype, schedule), programs,
            _tiles(a, schedule.loaded_rows, schedule.step), _tiles(b, schedule.columns, schedule.step), target,
            *(out if x is None else x for x in (*scales, out_scale)),
            tiles.groups, tiles.rows, tiles.total,
            M, N, cdiv(K, schedule.step), section, *strides(scale_a), *strides(scale_b), schedule,
        )  # fmt: skip
