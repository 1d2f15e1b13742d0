"""Dual products for Hopper, in Gluon: silu(A · B₁ᵀ) · (A · B₂ᵀ) of two weights as they lie in memory.

The schedule, the ring and the products are those of `_matmul_hopper.py`, and so are the barriers of a stage:

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `full` | each stage | the producer's copies of A and of both B | 1, bytes | each consumer, 0 |
| `empty` | each stage | each consumer, its products with the stage done | groups | producer, 1 |

A stage has a tile of rows of B₁ and behind it one of B₂. Rows of a tile are 128 bytes, swizzled eight by eight, so
that the two are one tile of twice the rows: one instruction multiplies by both, and reads A from shared memory
once, where that of `matmul`'s gate, whose pieces are multiplied by one after the other, reads it twice. A
consumer's sums are of as many columns of the gate and then as many of the other factor, in its own registers.

The epilogue writes their gated product and, where the backward pass will ask for them, both as they are before.
"""
# Without `from __future__ import annotations`, as in `_matmul_hopper.py`.

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.language.core import _aggregate as aggregate

from .._common import cdiv, multiprocessors, on
from .._hopper import kernel_key, launch
from .._pipeline import barriers, copy_in, copy_out, cursor, viewed
from ._matmul_hopper import (
    PRODUCER,
    Ring,
    Work,
    _columns,
    _tiles,
    aligned,
    mapped,
    product,
    product_layout,
    turned,
)
from ._schedules import DualSchedule


@aggregate
class Outputs:
    """Where results go: maps of the gated product, of gate and of the other factor, and buffers."""

    out: tma.tensor_descriptor
    gate: tma.tensor_descriptor
    up: tma.tensor_descriptor
    buffers: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, out, gate, up, buffers):  # type: ignore[no-untyped-def]  # Triton's types are its own
        self.out = out
        self.gate = gate
        self.up = up
        self.buffers = buffers


@gluon.jit
def _load(a, gate, up, ring, pieces, work, c: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """The producer: tiles of A and of both weights, step by step, tile by tile."""
    GROUPS: gl.constexpr = c.groups
    at = cursor(1, c.stages)
    tile = gl.program_id(0)
    while tile < work.dealt:
        row, column = work.origin(tile, c)
        for k in range(0, work.steps):
            full = ring.acquire(at, GROUPS * a.block_type.nbytes + 2 * gate.block_type.nbytes)
            for i in gl.static_range(GROUPS):
                copy_in(a, [row + i * c.rows, k * c.step], full, ring.a.index(at.stage * GROUPS + i))
            copy_in(gate, [column, k * c.step], full, pieces.index(2 * at.stage))
            copy_in(up, [column, k * c.step], full, pieces.index(2 * at.stage + 1))
            at = at.advanced()
        tile += gl.num_programs(0)


@gluon.jit
def _send(y, tiles, row, column, outputs, nth: gl.constexpr, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Has the nth piece of a consumer's results written, through its buffers in turn."""
    BUFFERS: gl.constexpr = c.buffers
    SENT: gl.constexpr = c.width // c.chunk * (3 if c.preactivations else 1)
    buffer = outputs.buffers.index(BUFFERS * GROUP + nth % BUFFERS)
    # The others may still be read. A tile's first piece takes the first buffer, which may have been the last one
    # of the tile before.
    tma.store_wait(pendings=0 if nth == 0 and SENT % BUFFERS else BUFFERS - 1)
    buffer.store(y.to(tiles.dtype))
    fence_async_shared()
    copy_out(tiles, [row, column], buffer)


@gluon.jit
def _write(acc, row, column, outputs, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """64 rows of a tile: silu(gate) · up, and both as they are."""
    WIDTH: gl.constexpr = c.chunk
    CHUNKS: gl.constexpr = c.width // WIDTH
    EACH: gl.constexpr = 3 if c.preactivations else 1
    layout: gl.constexpr = product_layout(WIDTH, gl.float32)
    for i in gl.static_range(CHUNKS):
        gate = gl.convert_layout(_columns(acc, i, WIDTH), layout)
        up = gl.convert_layout(_columns(acc, CHUNKS + i, WIDTH), layout)
        if c.preactivations:
            _send(gate, outputs.gate, row, column + i * WIDTH, outputs, EACH * i, c, GROUP)
            _send(up, outputs.up, row, column + i * WIDTH, outputs, EACH * i + 1, c, GROUP)
        # silu(g) · u = g · u / (1 + exp(-g))
        y = gate * up / (1.0 + gl.exp2(gate * -1.4426950408889634))
        _send(y, outputs.out, row, column + i * WIDTH, outputs, EACH * i + EACH - 1, c, GROUP)


@gluon.jit
def _compute(ring, work, outputs, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """A consumer: its rows of every tile."""
    at = cursor(0, c.stages)
    tile = gl.program_id(0)
    while tile < work.dealt:
        row, column = work.origin(tile, c)
        acc, _, at = product(ring, at, work.steps, c, GROUP)
        _write(acc, row + GROUP * c.rows, column, outputs, c, GROUP)
        tile += gl.num_programs(0)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["M", "N", "steps", "section"])
def kernel(a, gate, up, out, of_gate, of_up, M, N, steps, section, c: gl.constexpr):  # type: ignore[no-untyped-def]
    """Buffers and barriers, then the warp groups. The outputs are (M, N)."""
    STAGES: gl.constexpr = c.stages
    GROUPS: gl.constexpr = c.groups
    BUFFERS: gl.constexpr = c.buffers
    WIDTH: gl.constexpr = c.chunk
    A: gl.constexpr = [STAGES * GROUPS, c.rows, c.step]
    PIECES: gl.constexpr = [2 * STAGES, c.width, c.step]
    BOTH: gl.constexpr = [STAGES, c.columns, c.step]
    DTYPE: gl.constexpr = gate.dtype
    LAYOUT: gl.constexpr = gate.layout
    a_tiles = gl.allocate_shared_memory(a.dtype, A, a.layout)
    pieces = gl.allocate_shared_memory(DTYPE, PIECES, LAYOUT)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, GROUPS)
    ring = Ring(a_tiles, viewed(pieces, DTYPE, BOTH, LAYOUT), full, full, full, empty)
    buffers = gl.allocate_shared_memory(out.dtype, [BUFFERS * GROUPS, 64, WIDTH], out.layout)
    row_tiles = (M + c.groups * c.rows - 1) // (c.groups * c.rows)
    column_tiles = (N + c.width - 1) // c.width
    work = Work(row_tiles, column_tiles, steps, row_tiles * column_tiles, section)
    outputs = Outputs(out, of_gate, of_up, buffers)
    R: gl.constexpr = c.registers
    if c.groups == 1:
        gl.warp_specialize(
            [
                (_compute, (ring, work, outputs, c, 0)),
                (_load, (a, gate, up, ring, pieces, work, c)),
            ],
            [1],
            [PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (ring, work, outputs, c, 0)),
                (_compute, (ring, work, outputs, c, 1)),
                (_load, (a, gate, up, ring, pieces, work, c)),
            ],
            [4, 1],
            [R, PRODUCER],
        )


def loadable(x: torch.Tensor) -> torch.Tensor:
    """A matrix as it is where it is mapped and lies row by row, else a copy that does: weights of a model do."""
    return x if mapped(x) and not turned(x) else aligned(x).copy_(x)


def multiply(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    outputs: tuple[torch.Tensor, ...],
    schedule: DualSchedule,
    section: int,
) -> None:
    """The first of the outputs (M, N) = silu(x · gateᵀ) · (x · upᵀ) of x (M, K) and weights (N, K), and with
    `schedule.preactivations` two more, the products themselves. For matrices that are `mapped` and lie row by row.
    """
    (M, K), N = x.shape, outputs[0].shape[1]
    tiles = cdiv(M, schedule.groups * schedule.rows) * cdiv(N, schedule.width)
    of_weight = functools.partial(_tiles, rows=schedule.width, columns=schedule.step)
    out, of_gate, of_up = (
        _tiles(y, 64, schedule.chunk)
        for y in (outputs if schedule.preactivations else (outputs[0],) * 3)
    )  # fmt: skip
    with on(x):
        launch(
            kernel, kernel_key(kernel, x.device, x.dtype, schedule), min(multiprocessors(x), tiles),
            _tiles(x, schedule.rows, schedule.step), of_weight(gate), of_weight(up), out, of_gate, of_up,
            M, N, cdiv(K, schedule.step), section, schedule,
        )  # fmt: skip
