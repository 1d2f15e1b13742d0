"""Products of up to 64 rows with weights in MXFP4 for Hopper, in Gluon: the weights are read once, as they are
stored.

The schedule is that of `_matmul_hopper.py` with the operands' roles exchanged: a tile has 64 rows of weights a
consumer, and the rows of x are its columns. A consumer widens its weights in registers, from which the matrix
units take their first operand: outᵀ = W · xᵀ. It widens the second half of a step while the first one's product
runs, and up to 32 rows of x the next step's first half while the second one's does.

| barrier | one for | arrives | arrivals | waits, and the phase it starts at |
|---|---|---|---|---|
| `full` | each stage | the producer's copies of codes and of x | 1, bytes | each consumer, 0 |
| `empty` | each stage | each consumer, its products with the stage done | groups | producer, 1 |

A thread holds 64 neighbouring numbers of two rows of weights for each 256 steps of K, which have two scales. Of a
word of eight numbers it makes four words of two in bf16: numbers i and i + 4. So the order of K that the matrix
units see is another, and x's columns are laid in it before (`ordered`), within each 256:

=====================  ======  ======  ======  ======  ======
digit of a column      64      32      8       4       1
=====================  ======  ======  ======  ======  ======
in x                   t (4)   h (2)   w (4)   e (2)   i (4)
in the matrix units    h (2)   w (4)   i (4)   t (4)   e (2), with digits 128, 32, 8, 2, 1
=====================  ======  ======  ======  ======  ======

with t a thread of the four that share a row, h a half of its numbers, w a word, i its numbers of four bits, e a
half of the words made of them.

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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from .._common import cdiv, multiprocessors, on
from .._grid_barrier import counters
from .._hopper import TensorMap, launch, unpack
from .._pipeline import cursor
from ._matmul_hopper import Work, add_up, load, product_layout, stages, words_layout
from ._schedules import Schedule

BLOCK = 256
"""Steps of K whose weights a thread holds at a time, and of a stage."""
DEPTH = gl.constexpr(BLOCK // 2)
REST = gl.constexpr(64.0)
"""What products are multiplied by at the end."""


@dataclass(frozen=True)
class Few(Schedule):
    """`scales_paired`: a thread loads its two scales of a step at once. `overlapped`: a step's first half is
    widened while the product of the last step's second half runs.
    """

    step: int = BLOCK
    packed: int = 8
    scales_paired: bool = False
    overlapped: bool = False


@aggregate
class Result:
    """Where results go: out (M, N), partial sums of shared tiles and who has added to them, the weights'
    scales."""

    out: gl.tensor
    scales: gl.tensor
    partial: gl.tensor
    counter: gl.tensor
    M: gl.tensor
    N: gl.tensor
    across: gl.tensor

    @gluon.constexpr_function
    def __init__(self, out, scales, partial, counter, M, N, across):  # type: ignore[no-untyped-def]  # as above
        self.out = out
        self.scales = scales
        self.partial = partial
        self.counter = counter
        self.M = M
        self.N = N
        self.across = across


@triton.jit
def _order(x, out, M, K, lead, width, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Columns of x in the order in which the matrix units see K, zeros from K to `width`."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inner = place % 256
    column = place - inner + inner // 2 % 4 * 64 + inner // 32 % 4 * 8 + inner % 2 * 4 + inner // 8 % 4
    column += inner // 128 * 32
    value = tl.load(x + row * lead + column, column < K, 0.0)
    tl.store(out + row * width + place, value, place < width)


@gluon.constexpr_function
def _nibbles():  # type: ignore[no-untyped-def]  # Triton's types are its own
    """PTX that makes four words of two bf16 numbers of a word of eight codes, times a pair of scales. A product
    puts two copies of a code where its sign and the rest of it belong: multipliers have a unit of their own, and
    shifts and masks would all be one unit's.
    """
    lines = "".join(
        f"and.b32 t, {'$4' if i < 2 else 'm'}, {0x00F000F0 if i % 2 else 0x000F000F};"
        f" mul.lo.u32 t, t, {0x104 if i % 2 else 0x1040}; and.b32 t, t, 0x81C081C0; mul.bf16x2 ${i}, t, $5;"
        for i in range(4)
    )
    return f"{{ .reg .b32 t, m; shr.u32 m, $4, 8; {lines} }}"


@gluon.jit
def widened(words, scale, OPERAND: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Words (64, 4, 4) of eight codes and scales (64, 4) as bytes: the operand (64, 128) in bf16."""
    power = gl.where(scale > 134, 0x7FC07FC0, scale * 0x00800080 + 0x3C003C00)
    pair = gl.expand_dims(power, 2) + gl.zeros_like(words)
    p0, p1, p2, p3 = gl.inline_asm_elementwise(
        _nibbles(), "=&r,=&r,=&r,=&r,r,r", [words, pair],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    packed = gl.join(gl.join(p0, p1), gl.join(p2, p3))  # row, t, w, i % 2, i // 2
    packed = packed.permute((0, 2, 4, 3, 1)).reshape([64, DEPTH // 2])
    return unpack(packed, gl.bfloat16, OPERAND)


@gluon.jit
def _scales(result, rows, k, c: gl.constexpr, SCALES: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Scales (64, 4) of rows, of the first and of the second half of a thread's numbers of step k, as bytes.
    Beyond a row's last scale it is that one: numbers of x are 0 there, and what it makes NaN is so already.
    """
    t = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, SCALES)), 0)
    if c.scales_paired:
        both = gl.load(result.scales + (rows + gl.minimum(k * 4 + t, result.across - 1))).to(gl.int32)
        return both & 255, (both >> 8) & 255
    else:
        first = gl.load(result.scales + (rows + gl.minimum(k * 8 + 2 * t, result.across - 1)))
        second = gl.load(result.scales + (rows + gl.minimum(k * 8 + 2 * t + 1, result.across - 1)))
        return first.to(gl.int32), second.to(gl.int32)


@gluon.jit
def _halves(ring, stage, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """A consumer's words (64, 4, 4) of both halves of a step."""
    words = ring.a.index(stage * c.groups + GROUP).load(words_layout())
    return gl.split(words.reshape([64, 4, 2, 4]).permute((0, 1, 3, 2)))


@gluon.jit
def _compute(ring, work, result, c: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """A consumer: its 64 rows of weights of every tile."""
    layout: gl.constexpr = product_layout(c.columns, gl.bfloat16)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    SHAPE: gl.constexpr = [64, c.columns]
    COLUMNS: gl.constexpr = c.columns
    WORDS: gl.constexpr = gl.split(
        gl.zeros([64, 32], gl.int32, words_layout()).reshape([64, 4, 2, 4]).permute((0, 1, 3, 2))
    )[0].type.layout
    SCALES: gl.constexpr = gl.SliceLayout(2, WORDS)
    at = cursor(0, c.stages)
    position = gl.program_id(0) * 0
    while position < work.positions(c.shared):
        tile, begin, end = work.unit(position, c.shared)
        row_tile, column_tile = work.place(tile)
        row = (row_tile * c.groups + GROUP) * 64
        column = column_tile * COLUMNS
        acc = gl.zeros(SHAPE, gl.float32, layout)
        own = gl.expand_dims(row + gl.arange(0, 64, gl.SliceLayout(1, SCALES)), 1)
        own = gl.minimum(own, result.N - 1) * result.across
        one, two = _scales(result, own, begin, c, SCALES)
        last = gl.zeros([64, DEPTH], gl.bfloat16, OPERAND)
        before = gl.to_tensor(0)  # not the cursor's own stage: see `product` in `_matmul_hopper.py`
        for k in range(begin, end):
            ring.wait(at)
            x = ring.b.index(at.stage).permute((1, 0))
            words, others = _halves(ring, at.stage, c, GROUP)
            a = widened(words, one, OPERAND)
            other = two
            one, two = _scales(result, own, k + 1, c, SCALES)
            if c.overlapped:
                acc, last = warpgroup_mma_wait(0, deps=[acc, last])
                mbarrier.arrive(ring.empty.index(before), count=1, pred=k > begin)
            acc = warpgroup_mma(a, x.slice(0, DEPTH, 0), acc, is_async=True)  # acc += W @ X.T
            last = widened(others, other, OPERAND)  # while that product runs
            acc = warpgroup_mma(last, x.slice(DEPTH, DEPTH, 0), acc, is_async=True)
            if c.overlapped:
                acc, a = warpgroup_mma_wait(1, deps=[acc, a])
                before = at.stage
            else:
                acc, a, last = warpgroup_mma_wait(0, deps=[acc, a, last])
                ring.release(at)
            at = at.advanced()
        if c.overlapped:
            acc, last = warpgroup_mma_wait(0, deps=[acc, last])
            mbarrier.arrive(ring.empty.index(before), count=1)
        done = begin == begin
        if c.shared:  # noqa: SIM102  # the one is the compiler's, the other the device's
            if end - begin < work.steps:
                acc, _, done = add_up(acc, acc, tile, result, work, c, GROUP)
        if done:
            rows = gl.expand_dims(row + gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
            columns = gl.expand_dims(column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
            to = result.out + columns * result.N + rows
            gl.store(to, (acc * REST).to(gl.bfloat16), (rows < result.N) & (columns < result.M))
        position += end - begin


@gluon.jit(
    do_not_specialize=["M", "N", "across", "steps", "dealt", "section"],
    do_not_specialize_on_alignment=["out", "scales", "partial", "counter"],
)
def kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, x, out, scales, partial, counter, M, N, across, steps, dealt, section, c: gl.constexpr
):
    """Buffers and barriers, then the warp groups. out is (M, N)."""
    ring = stages(q, x, c)
    work = Work(
        (N + c.groups * 64 - 1) // (c.groups * 64), (M + c.columns - 1) // c.columns, steps, dealt, section
    )
    result = Result(out, scales, partial, counter, M, N, across)
    gl.warp_specialize(
        [
            (load, (q, x, ring, work, M, c)),
            (_compute, (ring, work, result, c, 0)),
            (_compute, (ring, work, result, c, 1)),
        ],
        [4, 4],
        [c.registers, c.registers],
    )


def schedule(M: int) -> Few:
    """For M up to 64 rows of x. Where they are more than 32, registers have no room for both halves of a step and
    for the next one's.
    """
    columns = 16 if M <= 16 else 32 if M <= 32 else 64
    return Few(columns=columns, stages={16: 8, 32: 6, 64: 4}[columns], registers=224, overlapped=columns < 64)


def fits(q: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator takes the codes (N, K / 2): whole words at multiples of 16 bytes."""
    return q.is_contiguous() and q.shape[1] % 16 == 0 and q.data_ptr() % 16 == 0


def ordered(x: torch.Tensor) -> torch.Tensor:
    """x (M, K) with its columns in the order in which the matrix units see them, filled up to a multiple of
    256.
    """
    M, K = x.shape
    width = cdiv(K, BLOCK) * BLOCK
    out = torch.empty(M, width, dtype=x.dtype, device=x.device)
    _order[(M, cdiv(width, 1024))](x, out, M, K, x.stride(0), width, 1024, num_warps=4)
    return out


def few_rows(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """out (M, N) = x (M, K) · weightsᵀ for M up to 64, codes q (N, K / 2) that `fits` approves of, and scales as
    contiguous bytes (N, ⌈K / 32⌉).
    """
    (M, K), N = x.shape, q.shape[0]
    c = schedule(M)
    if scales.shape[1] % 2 == 0 and scales.data_ptr() % 2 == 0:
        c, scales = replace(c, scales_paired=True), scales.view(torch.int16)
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
        x = ordered(x)
        launch(
            kernel, (kernel, x.device, c), programs,
            _map(words, 64, c.step // 8), _map(x, c.columns, c.step),
            out, scales, partial, counter, M, N, scales.shape[1], steps, dealt, 8, c,
        )  # fmt: skip


def _map(x: torch.Tensor, rows: int, columns: int) -> TensorMap:
    """Tiles of words or of 16-bit numbers."""
    return TensorMap(x, [*x.shape], [x.stride(0), 1], [rows, columns], _layout(rows, columns, x.element_size()))


@functools.cache
def _layout(rows: int, columns: int, size: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.int32 if size == 4 else gl.bfloat16)
