"""Products of at most 16 rows with a weight (N, K), as a step of decoding has them: bound by reading the weight.

The operands' roles are exchanged: rows of the weight are the rows of a tile, and those of x its columns, outᵀ =
W · xᵀ, so that the matrix units' tile is full of what costs something. Tiles are narrow. That makes programs
enough for all multiprocessors with no sum over K shared between them, and the order of summation does not depend
on how many there are. What is in flight at a time, not how many programs wait for it, decides how fast memory is
read: a program has several steps of K on their way.

The matrix units' products of 16 numbers of K wait each for the one before, about 28 ns on an H200, so that one
warp reads no faster than that. Where programs are few, each has several warps, which share a step of K between
them (a product of three dimensions, a slice of K each) and add up at the end, in one order. One row is multiplied
outside of the matrix units, and may be the RMS norm of a row, computed where it is read, and have a row added to
its product: launches of a few numbers take as long as those of a weight.
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

MOST = 16
"""Rows of x at the most."""
OF_ONE = 8
"""Rows of the weight of a program that multiplies one row."""
KIB = 1024
FLYING = 96 * KIB
"""Bytes of the weight that a multiprocessor has on their way: 56 to 112 KiB were fastest on an H200."""
ONCE = 16
"""Programs of one warp at the most that a multiprocessor has at once; where there are more, they take turns."""


@dataclass(frozen=True)
class Tile:
    """Rows of the weight and of x in a program's tile, the K of a step, the slices that it is multiplied in, and
    the steps under way at a time. `gated`: of the rows N further down, too. `even`: K is a multiple of the step.
    `normed`: x is to be normalized, by so many sums of its squares; 0: it is taken as it is. `added`: a row is
    added.
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
    added: bool = False


@triton.jit
def _added(acc, y, z, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """acc + y · z, slice by slice; of one row z (1, STEP) the products themselves, to be summed at the end."""
    if ROWS == 1:
        acc += y.to(tl.float32) * z.to(tl.float32)
    elif INTERPRETING:  # which multiplies the bits of 16-bit numbers
        acc = tl.dot(y.to(tl.float32), z.to(tl.float32), acc)
    else:
        acc = tl.dot(y, z, acc)
    return acc


@triton.jit(do_not_specialize=["M"])
def _kernel(x, weight, out, bias, beside, M, N, K, x_lead, weight_lead, eps, c: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """out (M, N) = x (M, K) · weight (N, K)ᵀ, or gated silu(x · weight[:N]ᵀ) · (x · weight[N:]ᵀ).

    Beside one row: its norm's weight (K,), sums of its squares; a row (N,) that is added, and where the sum of
    this program's squares of the result goes.
    """
    gain, squares, residual, own = beside
    COLUMNS: tl.constexpr = c.columns
    ROWS: tl.constexpr = c.rows
    STEP: tl.constexpr = c.step
    SLICES: tl.constexpr = c.slices
    DEPTH: tl.constexpr = STEP // SLICES
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    # Beyond the last one, that one is read again and not written.
    held = tl.minimum(column, N - 1).to(tl.int64)
    other = tl.cast(N, tl.int64) * weight_lead
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
            if c.normed:
                by = gain + k * STEP + z_depth
                by = tl.load(by) if c.even else tl.load(by, z_depth < left, 0.0)
                z = z.to(tl.float32) * by.to(tl.float32)
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
    if c.normed:
        # y = x / √(Σ x² / K + ε) · w, and y · weightᵀ: the root is the same for all of K.
        part = tl.arange(0, triton.next_power_of_2(c.normed))
        total = tl.sum(tl.load(squares + part, part < c.normed, 0.0), 0)
        rstd = 1.0 / tl.sqrt(total / K + eps)
        acc = acc * rstd
        up = up * rstd
    if c.bias:
        acc += tl.load(bias + held).to(tl.float32)[:, None]
    if c.gated:
        acc = acc * sigmoid(acc) * up
    if c.added:
        # h = x · weightᵀ, rounded as it is by itself, + residual. Squares are of what is returned.
        acc = acc.to(out.dtype.element_ty).to(tl.float32) + tl.load(residual + held).to(tl.float32)[:, None]
        acc = acc.to(out.dtype.element_ty).to(tl.float32)
        there = (column < N)[:, None]
        tl.store(own + tl.program_id(0), tl.sum(tl.sum(tl.where(there, acc * acc, 0.0), 1), 0))
    at = out + row[None, :].to(tl.int64) * N + column[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), (row < M)[None, :] & (column < N)[:, None])


def takes(a: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product a (M, K) · weight (N, K)ᵀ is one of these: few rows, 16 bits, the weight's rows dense, and
    a GPU that loads past registers, as NVIDIA's do from Ampere on.
    """
    few = a.shape[0] <= MOST and a.dtype in FLOATING[:2] and weight.stride(1) == 1
    return few and here(a.device)


def here(device: torch.device) -> bool:
    """Whether a device loads so."""
    return INTERPRETED or capability(device) >= (8, 0)


def check_row(name: str, x: torch.Tensor, b: torch.Tensor) -> None:
    """Raises what products of one row say of it, x (1, K), and of b (K, N)."""
    check(name, x, dim=2, dtypes=FLOATING[:2])
    check("b", b, dim=2, like=x, dtypes=(x.dtype,))
    check(name, x, shape=(1, b.shape[0]))
    if not here(x.device):
        raise NotImplementedError("products of one row need an NVIDIA GPU of compute capability 8.0 or more")
    if b.stride(0) != 1:
        raise ValueError(f"b has strides {b.stride()}, expected the transpose of rows that are dense")


def check_norm(squares: torch.Tensor, weight: torch.Tensor, h: torch.Tensor) -> None:
    """The same of what a row's norm is computed by."""
    check("squares", squares, dim=1, like=h, dtypes=(torch.float32,))
    check("weight", weight, shape=h.shape[1:], like=h, dtypes=(h.dtype,))


def room(device: torch.device) -> int:
    """Bytes of shared memory that a multiprocessor's programs may have, less than there are."""
    held = capability(device)
    return (220 if held[0] in (9, 10) else 160 if held == (8, 0) else 96 if held >= (8, 0) else 56) * KIB


@functools.lru_cache(4096)
def tile(M: int, N: int, K: int, gated: bool, bias: bool, processors: int, room: int) -> tuple[Tile, int]:
    """(the tile, warps) of a product on so many multiprocessors, each with so many bytes of shared memory.

    By how many programs a multiprocessor has. All are to be there at once, as a few left for the end would read
    alone, with `FLYING` bytes of the weight on their way together. The fewer they are, the more warps each has.
    """
    if M == 1:
        many = cdiv(N, OF_ONE) > 4 * ONCE * processors
        step, warps = (512, 4) if many else (128 if gated else 256, 2)
        return Tile(OF_ONE, 1, step, 1, 6, gated, bias, K % step == 0), warps
    rows = 8 if M <= 8 else MOST
    each = cdiv(cdiv(N, 16), processors)
    # x comes from L2 again for each tile: that should not be more than half of what the weight is. Numbers of rows
    # that cannot be loaded by 16 bytes take registers: of them a tile has few.
    fine = K % 8 == 0
    wide = not gated and fine and each > (ONCE if rows == 8 else 1)
    columns = 32 if wide else 16
    each = cdiv(cdiv(N, columns), processors)
    lines = columns * (2 if gated else 1)
    if each > ONCE or (wide and rows == 8):
        slices, depth, flying = (2 if wide else 1), 64, 4
    else:
        slices = 4 if each <= 2 else 2 if each <= 4 else 1
        while slices > 1 and 256 * slices > K:
            slices //= 2
        depth = 128 if fine and not gated else 64
        flying = _flying(each, lines, rows, slices * depth, room)
        if flying < 3 and depth == 128:
            depth = 64
            flying = _flying(each, lines, rows, slices * depth, room)
    step = slices * depth
    return Tile(columns, rows, step, slices, flying + 1, gated, bias, K % step == 0), slices


def _flying(each: int, lines: int, rows: int, step: int, room: int) -> int:
    """Steps on their way, of `each` programs that read so many lines of the weight."""
    wanted = cdiv(FLYING, each * lines * step * 2)
    return max(2, min(7, wanted, room // (each * (lines + rows) * step * 2)))


def multiply(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, gated: bool = False, bias: torch.Tensor | None = None
) -> None:
    """out (M, N) = x (M, K) · weight (N, K)ᵀ + bias (N,), or gated by a weight (2N, K): what `takes` allows."""
    x = lined(x)
    with on(x):
        planned(x, weight, out, gated, bias)(x.device, x, weight, out, out if bias is None else bias, ALONE)


ALONE = (None, None, None, None)
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
    what is beside them (see `_kernel`; of one row alone), else `ALONE`.
    """
    (M, K), N = x.shape, out.shape[1]
    chosen, warps = tile(M, N, K, gated, bias is not None, multiprocessors(x), room(x.device))
    if INTERPRETED:  # small steps, so that there are several
        chosen = replace(chosen, step=32, slices=1 if M == 1 else 2, even=K % 32 == 0)
    chosen = replace(chosen, normed=normed, added=added)
    grid = (cdiv(N, chosen.columns),)
    return Launch(_kernel, grid, M, N, K, x.stride(0), weight.stride(0), eps, c=chosen, num_warps=warps)
