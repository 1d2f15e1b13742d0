"""Products of at most 16 rows with a weight (N, K), as a step of decoding has them: bound by reading the weight.

The operands' roles are exchanged: rows of the weight are the rows of a tile, and those of x its columns, outᵀ =
W · xᵀ, so that the matrix units' tile is full of what costs something. Tiles are narrow. That makes programs
enough for all multiprocessors with no sum over K shared between them, and the order of summation does not depend
on how many there are. What is in flight at a time, not how many programs wait for it, decides how fast memory is
read: of each step of K a program has several on their way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .._common import FLOATING, INTERPRETED, INTERPRETING, cdiv, on, sigmoid

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
    x_at = x + row[None, :].to(tl.int64) * x_lead + depth[:, None]
    there = (row < M)[None, :]
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = acc
    for k in tl.range(0, tl.cdiv(K, STEP), num_stages=c.stages):
        left = K - k * STEP
        if c.even:
            y = tl.load(weight_at)
            z = tl.load(x_at, there, 0.0)
        else:
            y = tl.load(weight_at, depth[None, :] < left, 0.0)
            z = tl.load(x_at, there & (depth[:, None] < left), 0.0)
        if INTERPRETING:  # which multiplies the bits of 16-bit numbers
            y = y.to(tl.float32)
            z = z.to(tl.float32)
        acc = tl.dot(y, z, acc)  # acc += W @ x.T
        if c.gated:
            y = tl.load(weight_at + other) if c.even else tl.load(weight_at + other, depth[None, :] < left, 0.0)
            if INTERPRETING:
                y = y.to(tl.float32)
            up = tl.dot(y, z, up)  # up += W₂ @ x.T
        weight_at += STEP
        x_at += STEP
    if c.bias:
        acc += tl.load(bias + held).to(tl.float32)[:, None]
    if c.gated:
        acc = acc * sigmoid(acc) * up
    at = out + row[None, :].to(tl.int64) * N + column[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), there & (column < N)[:, None])


def takes(a: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product a (M, K) · weight (N, K)ᵀ is one of these: few rows, 16 bits, the weight's rows dense."""
    return a.shape[0] <= MOST and a.dtype in FLOATING[:2] and weight.stride(1) == 1


def tile(M: int, K: int, gated: bool, bias: bool) -> tuple[Tile, int]:
    """(the tile for M rows, warps): each warp has 16 rows of the weight, the least that the matrix units take.

    x comes from L2 again for each tile, so that tiles of more rows of x have more rows of the weight.
    """
    columns = 16 if M <= 4 else 32
    step, stages = (128, 5) if gated else (256, 5)
    if INTERPRETED:
        step = 32
    return Tile(columns, 8 if M <= 8 else MOST, step, stages, gated, bias, K % step == 0), columns // 16


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
