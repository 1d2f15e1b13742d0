"""Products of at most 16 rows with a weight (N, K), as a step of decoding has them: bound by reading the weight.

The operands' roles are exchanged: rows of the weight are the rows of a tile, and those of x its columns, outᵀ =
W · xᵀ, so that the matrix units' tile is full of what costs something. Tiles are narrow. That makes programs
enough for all multiprocessors with no sum over K shared between them, and the order of summation does not depend
on how many there are. What is in flight at a time, not how many programs wait for it, decides how fast memory is
read: a program has several steps of K on their way.

One row is multiplied outside of the matrix units. Their products of 16 numbers of K would each wait for the one
before, which takes most of the time that the memory has for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .._common import FLOATING, INTERPRETED, INTERPRETING, capability, cdiv, on, sigmoid

MOST = 16
"""Rows of x at the most."""


@dataclass(frozen=True)
class Tile:
    """Rows of the weight and of x in a program's tile, the K of a step, and the steps under way at a time.
    `gated`: of the rows N further down, too. `even`: K is a multiple of the step.
    """

    columns: int
    rows: int
    step: int
    stages: int
    gated: bool
    bias: bool
    even: bool


@triton.jit
def _added(acc, y, z, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """acc + y · z for z (STEP, ROWS); of one row z (1, STEP) the products themselves, to be summed at the end."""
    if ROWS == 1:
        acc += y.to(tl.float32) * z.to(tl.float32)
    elif INTERPRETING:  # which multiplies the bits of 16-bit numbers
        acc = tl.dot(y.to(tl.float32), z.to(tl.float32), acc)
    else:
        acc = tl.dot(y, z, acc)
    return acc


@triton.jit(do_not_specialize=["M"])
def _kernel(x, weight, out, bias, M, N, K, x_lead, weight_lead, c: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """out (M, N) = x (M, K) · weight (N, K)ᵀ, or gated silu(x · weight[:N]ᵀ) · (x · weight[N:]ᵀ)."""
    COLUMNS: tl.constexpr = c.columns
    ROWS: tl.constexpr = c.rows
    STEP: tl.constexpr = c.step
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, STEP)
    # Beyond the last one, that one is read again and not written.
    held = tl.minimum(column, N - 1).to(tl.int64)
    weight_at = weight + held[:, None] * weight_lead + depth[None, :]
    other = tl.cast(N, tl.int64) * weight_lead
    there = (row < M)[None, :]
    if ROWS == 1:
        x_at = x + depth[None, :]
        acc = tl.zeros([COLUMNS, STEP], tl.float32)
    else:
        x_at = x + row[None, :].to(tl.int64) * x_lead + depth[:, None]
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = acc
    for k in tl.range(0, tl.cdiv(K, STEP), num_stages=c.stages):
        inside = depth < K - k * STEP
        if ROWS == 1:
            z = tl.load(x_at) if c.even else tl.load(x_at, inside[None, :], 0.0)
        else:
            z = tl.load(x_at, there if c.even else there & inside[:, None], 0.0)
        y = tl.load(weight_at) if c.even else tl.load(weight_at, inside[None, :], 0.0)
        acc = _added(acc, y, z, ROWS)
        if c.gated:
            y = tl.load(weight_at + other) if c.even else tl.load(weight_at + other, inside[None, :], 0.0)
            up = _added(up, y, z, ROWS)
        weight_at += STEP
        x_at += STEP
    if ROWS == 1:
        acc = tl.sum(acc, 1)[:, None]
        up = tl.sum(up, 1)[:, None]
    if c.bias:
        acc += tl.load(bias + held).to(tl.float32)[:, None]
    if c.gated:
        acc = acc * sigmoid(acc) * up
    at = out + row[None, :].to(tl.int64) * N + column[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), there & (column < N)[:, None])


def takes(a: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product a (M, K) · weight (N, K)ᵀ is one of these: few rows, 16 bits, the weight's rows dense, and
    a GPU that loads past registers, as NVIDIA's do from Ampere on.
    """
    few = a.shape[0] <= MOST and a.dtype in FLOATING[:2] and weight.stride(1) == 1
    return few and (INTERPRETED or capability(a.device) >= (8, 0))


def tile(M: int, K: int, gated: bool, bias: bool) -> tuple[Tile, int]:
    """(the tile for M rows, warps): 16 rows of the weight a warp, the least that the matrix units take.

    x comes from L2 again for each tile, so that tiles of more rows of x have more rows of the weight.
    """
    step, stages, warps = (128 if gated else 256), 5, (1 if M <= 4 else 2)
    columns, rows = 16 * warps, 8 if M <= 8 else MOST
    if M == 1:
        step, stages, warps, rows = 2 * step, 4, 4, 1
    if INTERPRETED:
        step = 32
    return Tile(columns, rows, step, stages, gated, bias, K % step == 0), warps


def multiply(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, gated: bool = False, bias: torch.Tensor | None = None
) -> None:
    """out (M, N) = x (M, K) · weight (N, K)ᵀ + bias (N,), or gated by a weight (2N, K): what `takes` allows."""
    (M, K), N = x.shape, out.shape[1]
    if x.stride(1) != 1:
        x = x.contiguous()
    chosen, warps = tile(M, K, gated, bias is not None)
    with on(x):
        _kernel[(cdiv(N, chosen.columns),)](
            x, weight, out, out if bias is None else bias, M, N, K, x.stride(0), weight.stride(0), chosen,
            num_warps=warps,
        )  # fmt: skip
