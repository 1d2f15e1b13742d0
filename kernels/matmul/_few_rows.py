"""Products of at most 16 rows with a weight (N, K), as a step of decoding has them: bound by reading the weight.

The operands' roles are exchanged: rows of the weight are the rows of a tile, and those of x its columns, outᵀ =
W · xᵀ, so that the matrix units' tile is full of what costs something. Tiles are narrow. That makes programs
enough for all multiprocessors with no sum over K shared between them, and the order of summation does not depend
on how many there are. What is in flight at a time, not how many programs wait for it, decides how fast memory is
read: a program has several steps of K on their way.

The matrix units' products of 16 numbers of K wait each for the one before, about 28 ns on an H200, so that one
warp reads no faster than that. Where programs are few, each has several warps, which share a step of K between
them (a product of three dimensions, a slice of K each) and add up at the end, in one order. One row is multiplied
outside of the matrix units.

Launches of a few numbers take as long as those of a weight, so that a product may have rows added to it and leave
what the RMS norm behind it needs, and another may multiply that norm: sums of squares go from one to the other.

A weight may be held in E4M3, with a scale for each of its rows. It becomes 16 bits in registers, exactly, and x
stays as it is: nothing is quantized in a step, and half as many bytes are read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from .._common import (
    FLOATING,
    INTERPRETED,
    INTERPRETING,
    capability,
    cdiv,
    check,
    lined,
    multiprocessors,
    on,
    sigmoid,
)
from .._launch import Launch

E4M3 = torch.float8_e4m3fn
MOST = 16
"""Rows of x at the most."""
OF_ONE = 8
"""Rows of the weight of a program that multiplies one row."""
OF_FEW = 16
"""Rows of the weight, or twice as many, of a program that multiplies more rows: what matrix units take."""
KIB = 1024
FLYING = 96 * KIB
"""Bytes of the weight that a multiprocessor has on their way: 56 to 112 KiB were fastest on an H200."""
ONCE = 16
"""Programs of one warp at the most that a multiprocessor has at once; where there are more, they take turns."""


@dataclass(frozen=True)
class Tile:
    """Rows of the weight and of x in a program's tile, the K of a step, the slices that it is multiplied in, and
    the steps under way at a time. `gated`: of the rows N further down, too. `even`: K is a multiple of the step.
    `normed`: products are over the root of the mean of so many sums of squares; 0: they are what they are.
    `added`: rows are added, and what a norm needs is left, sums of so many squares each among it; 0: nothing is.
    `e4m3`: the weight is in that format, with a scale for each of its rows.
    """

    columns: int
    rows: int
    step: int
    slices: int
    stages: int
    gated: bool
    bias: bool
    even: bool
    normed: int = 0
    added: int = 0
    e4m3: bool = False


@triton.jit
def _added(acc, y, z, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """acc + y · z, slice by slice; of one row z (1, STEP) the products themselves, to be summed at the end."""
    if ROWS == 1:
        acc += y.to(tl.float32) * z.to(tl.float32)
    elif INTERPRETING:  # which multiplies the bits of 16-bit numbers
        acc = tl.dot(y.to(tl.float32), z.to(tl.float32), acc)
    elif y.dtype == tl.float8e4nv and z.dtype == tl.bfloat16:
        # Converted at once it goes through fp16, from which bf16 is made one by one, at an eighth of the rate.
        acc = tl.dot(y.to(tl.float32).to(tl.bfloat16), z, acc)
    else:
        acc = tl.dot(y.to(z.dtype), z, acc)
    return acc


@triton.jit
def of_weight(x, weight, held, other, M, K, x_lead, weight_lead, c: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """weight[held] (COLUMNS, K) · x (M, K)ᵀ in fp32, (COLUMNS, ROWS), and the same of what lies `other` numbers
    further where it is gated.
    """
    COLUMNS: tl.constexpr = c.columns
    ROWS: tl.constexpr = c.rows
    STEP: tl.constexpr = c.step
    SLICES: tl.constexpr = c.slices
    DEPTH: tl.constexpr = STEP // SLICES
    row = tl.arange(0, ROWS)
    if ROWS == 1:
        y_depth = tl.arange(0, STEP)[None, :]
        z_depth = y_depth
        weight_at = weight + held[:, None] * weight_lead + y_depth
        x_at = x + z_depth
        acc = tl.zeros([COLUMNS, STEP], tl.float32)
    else:
        first = tl.arange(0, SLICES)[:, None, None] * DEPTH
        y_depth = first + tl.arange(0, DEPTH)[None, None, :]
        z_depth = first + tl.arange(0, DEPTH)[None, :, None]
        weight_at = weight + held[None, :, None] * weight_lead + y_depth
        x_at = x + row[None, None, :].to(tl.int64) * x_lead + z_depth
        there = (row < M)[None, None, :]
        acc = tl.zeros([SLICES, COLUMNS, ROWS], tl.float32)
    up = acc
    for k in tl.range(0, tl.cdiv(K, STEP), num_stages=c.stages):
        left = K - k * STEP
        if ROWS == 1:
            z = tl.load(x_at) if c.even else tl.load(x_at, z_depth < left, 0.0)
        else:
            z = tl.load(x_at, there if c.even else there & (z_depth < left), 0.0)
        y = tl.load(weight_at) if c.even else tl.load(weight_at, y_depth < left, 0.0)
        acc = _added(acc, y, z, ROWS)
        if c.gated:
            y = tl.load(weight_at + other) if c.even else tl.load(weight_at + other, y_depth < left, 0.0)
            up = _added(up, y, z, ROWS)
        weight_at += STEP
        x_at += STEP
    if ROWS == 1:
        acc = tl.sum(acc, 1)[:, None]
        up = tl.sum(up, 1)[:, None]
    else:
        acc = tl.sum(acc, 0)
        up = tl.sum(up, 0)
    return acc, up


@triton.jit
def reciprocal_root(squares, M, K, eps, ROWS: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """1 / √(Σ h² / K + ε) of each row, (1, ROWS), by PARTS sums of its squares each, squares (M, PARTS)."""
    WHOLE: tl.constexpr = triton.next_power_of_2(PARTS)
    AT_ONCE: tl.constexpr = WHOLE if WHOLE * ROWS <= 1024 else 1024 // ROWS
    row = tl.arange(0, ROWS)[:, None]
    part = tl.arange(0, AT_ONCE)[None, :]
    total = tl.zeros([ROWS, AT_ONCE], tl.float32)
    for first in tl.static_range(0, PARTS, AT_ONCE):
        at = squares + row * PARTS + first + part
        total += tl.load(at, (row < M) & (first + part < PARTS), 0.0)
    return (1.0 / tl.sqrt(tl.sum(total, 1) / K + eps))[None, :]


@triton.jit(do_not_specialize=["M"])
def _kernel(x, weight, out, bias, beside, M, N, K, x_lead, weight_lead, eps, c: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """out (M, N) = x (M, K) · weight (N, K)ᵀ, or gated silu(x · weight[:N]ᵀ) · (x · weight[N:]ᵀ).

    Beside them: the sums of squares (M, normed) of what x is without its norm's weight, so that the norm is
    multiplied; rows (M, N) that are added, the weight (N,) of the norm behind, the sum times that, and its sums of
    squares; a scale for each row of the weight.
    """
    squares, residual, gain, scaled, own, scales = beside
    COLUMNS: tl.constexpr = c.columns
    ROWS: tl.constexpr = c.rows
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    # Beyond the last one, that one is read again and not written.
    held = tl.minimum(column, N - 1).to(tl.int64)
    other = tl.cast(N, tl.int64) * weight_lead
    acc, up = of_weight(x, weight, held, other, M, K, x_lead, weight_lead, c)
    if c.e4m3:
        acc = acc * tl.load(scales + held)[:, None]
        if c.gated:
            up = up * tl.load(scales + N + held)[:, None]
    if c.normed:
        # y = h / √(Σ h² / K + ε) · w and y · weightᵀ, x being h · w: the root is the same for all of K.
        root = reciprocal_root(squares, M, K, eps, ROWS, c.normed)
        acc = acc * root
        up = up * root
    if c.bias:
        acc += tl.load(bias + held).to(tl.float32)[:, None]
    if c.gated:
        acc = acc * sigmoid(acc) * up
    at = row[None, :].to(tl.int64) * N + column[:, None]
    there = (row < M)[None, :] & (column < N)[:, None]
    if c.added:
        PART: tl.constexpr = c.added
        # h = x · weightᵀ, rounded as it is by itself, + residual. Squares are of what is returned.
        acc = acc.to(out.dtype.element_ty).to(tl.float32) + tl.load(residual + at, there, 0.0).to(tl.float32)
        acc = acc.to(out.dtype.element_ty).to(tl.float32)
        tl.store(scaled + at, (acc * tl.load(gain + held).to(tl.float32)[:, None]).to(out.dtype.element_ty), there)
        parts = tl.cdiv(N, PART)
        part = tl.program_id(0) * (COLUMNS // PART) + tl.arange(0, COLUMNS // PART)
        squared = tl.sum(tl.reshape(tl.where(there, acc * acc, 0.0), [COLUMNS // PART, PART, ROWS]), 1)
        tl.store(own + row[None, :] * parts + part[:, None], squared, (row < M)[None, :] & (part < parts)[:, None])
    tl.store(out + at, acc.to(out.dtype.element_ty), there)


def takes(a: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product a (M, K) · weight (N, K)ᵀ is one of these: few rows, 16 bits, the weight's rows dense, and
    a GPU that loads past registers, as NVIDIA's do from Ampere on.
    """
    few = a.shape[0] <= MOST and a.dtype in FLOATING[:2] and weight.stride(1) == 1
    return few and here(a.device)


def here(device: torch.device, e4m3: bool = False) -> bool:
    """Whether a device loads so, and where weights are in E4M3, has instructions that convert from that."""
    return INTERPRETED or capability(device) >= ((8, 9) if e4m3 else (8, 0))


def _part(M: int) -> int:
    """How many squares of one of M rows are in one sum."""
    return OF_ONE if M == 1 else OF_FEW


def parts(M: int, N: int) -> int:
    """Sums of squares that are left of each of M rows (M, N)."""
    return cdiv(N, _part(M))


def check_rows(name: str, x: torch.Tensor, b: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    """Raises what such products with something beside them say of x (M, K) and of b (K, N), which is in E4M3 where
    it has a scale (N,).
    """
    check(name, x, dim=2, dtypes=FLOATING[:2])
    check("b", b, dim=2, like=x, dtypes=(x.dtype if scale is None else E4M3,))
    if scale is not None:
        check("scale", scale, shape=b.shape[1:], like=x, dtypes=(torch.float32,))
    check(name, x, shape=(x.shape[0], b.shape[0]))
    if not 1 <= x.shape[0] <= MOST:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected 1 to {MOST} rows")
    if not here(x.device, scale is not None):
        raise NotImplementedError(
            "products of few rows with a norm need an NVIDIA GPU of compute capability 8.0 or more, 8.9 in E4M3"
        )
    if b.stride(0) != 1:
        raise ValueError(f"b has strides {b.stride()}, expected the transpose of rows that are dense")


def check_squares(squares: torch.Tensor, y: torch.Tensor) -> None:
    """The same of sums of squares (M, any number) of rows like y (M, K)."""
    check("squares", squares, dim=2, like=y, dtypes=(torch.float32,))
    check("squares", squares, shape=(y.shape[0], max(1, squares.shape[1])))


def dense(scale: torch.Tensor | None) -> torch.Tensor | None:
    """A scale as kernels read it."""
    return None if scale is None else scale.contiguous()


def room(device: torch.device) -> int:
    """Bytes of shared memory that a multiprocessor's programs may have, less than there are."""
    held = capability(device)
    return (220 if held[0] in (9, 10) else 160 if held == (8, 0) else 96 if held >= (8, 0) else 56) * KIB


@functools.lru_cache(4096)
def tile(
    M: int, N: int, K: int, gated: bool, bias: bool, processors: int, room: int, size: int = 2
) -> tuple[Tile, int]:
    """(the tile, warps) of a product on so many multiprocessors, each with so many bytes of shared memory; numbers
    of the weight have `size` bytes.

    By how many programs a multiprocessor has. All are to be there at once, as a few left for the end would read
    alone, with `FLYING` bytes of the weight on their way together. The fewer they are, the more warps each has.
    """
    if M == 1:
        many = cdiv(N, OF_ONE) > 4 * ONCE * processors
        step, warps = (512, 4) if many else (128 if gated else 256, 2)
        step = step * 2 // size
        return Tile(OF_ONE, 1, step, 1, 6, gated, bias, K % step == 0, e4m3=size == 1), warps
    rows = 8 if M <= 8 else MOST
    each = cdiv(cdiv(N, OF_FEW), processors)
    # x comes from L2 again for each tile: that should not be more than half of what the weight is. Numbers of rows
    # that cannot be loaded by 16 bytes take registers: of them a tile has few.
    fine = K % (16 // size) == 0
    wide = not gated and fine and each > (ONCE if rows == 8 else 1)
    columns = 2 * OF_FEW if wide else OF_FEW
    each = cdiv(cdiv(N, columns), processors)
    lines = columns * (2 if gated else 1)
    if each > ONCE or (wide and rows == 8):
        slices, depth, flying = (2 if wide else 1), 128 // size, 4
    else:
        slices = 4 if each <= 2 else 2 if each <= 4 else 1
        while slices > 1 and 256 * slices > K:
            slices //= 2
        depth = 128 if fine and not gated else 128 // size
        flying = _flying(each, lines, rows, slices * depth, room, size)
        if flying < 3 and depth > 64:
            depth = 64
            flying = _flying(each, lines, rows, slices * depth, room, size)
    step = slices * depth
    return Tile(columns, rows, step, slices, flying + 1, gated, bias, K % step == 0, e4m3=size == 1), slices


def interpreted(chosen: Tile, K: int) -> Tile:
    """With small steps where kernels are interpreted, so that there are several."""
    return (
        replace(chosen, step=32, slices=1 if chosen.rows == 1 else 2, even=K % 32 == 0) if INTERPRETED else chosen
    )


def _flying(each: int, lines: int, rows: int, step: int, room: int, size: int) -> int:
    """Steps on their way, of `each` programs that read so many lines of the weight, of numbers of `size` bytes."""
    wanted = cdiv(FLYING, each * lines * step * size)
    return max(2, min(7, wanted, room // (each * (lines * size + rows * 2) * step)))


def multiply(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, gated: bool = False, bias: torch.Tensor | None = None
) -> None:
    """out (M, N) = x (M, K) · weight (N, K)ᵀ + bias (N,), or gated by a weight (2N, K): what `takes` allows."""
    x = lined(x)
    with on(x):
        planned(x, weight, out, gated, bias)(x.device, x, weight, out, out if bias is None else bias, ALONE)


ALONE = (None,) * 6
"""What `planned` is called with where nothing is beside a product."""


def planned(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    gated: bool = False,
    bias: torch.Tensor | None = None,
    normed: int = 0,
    eps: float = 0.0,
    added: bool = False,
) -> Launch:
    """`multiply` of all tensors that are alike, x being `lined`: called with x, weight, out, a bias or out, and
    what is beside them (see `_kernel`), else `ALONE`.
    """
    (M, K), N = x.shape, out.shape[1]
    size = weight.element_size()
    chosen, warps = tile(M, N, K, gated, bias is not None, multiprocessors(x), room(x.device), size)
    chosen = replace(interpreted(chosen, K), normed=normed, added=_part(M) if added else 0)
    grid, numbers = (cdiv(N, chosen.columns),), (M, N, K, x.stride(0), weight.stride(0), eps)
    return Launch(_kernel, grid, *numbers, c=chosen, num_warps=warps)
