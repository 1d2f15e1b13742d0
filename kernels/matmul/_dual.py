"""Dual products on any GPU, in Triton: silu(A · B₁ᵀ) · (A · B₂ᵀ) of two weights as they lie, one tile a program.

Hopper has a kernel of its own (`_dual_hopper.py`). This one takes what that leaves, as `_matmul.py` does, from
which it has its tiles.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from .._common import INTERPRETING, cdiv, on, sigmoid, tf32
from ._matmul import place, tile


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, gate, up, out, of_gate, of_up, M, N, K, x_row, x_step, gate_row, gate_step, up_row, up_step,
    PREACTIVATIONS: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """out (M, N) of x (M, K), gate and up (N, K), and what stands before the activation where it is asked for."""
    ROWS: tl.constexpr = c.rows
    COLUMNS: tl.constexpr = c.columns
    STEP: tl.constexpr = c.step
    row_tile, column_tile = place(tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS), c.section)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    # Rows beyond the last are another's, computed once more and not written.
    x_rows = (rows % M).to(tl.int64)[:, None]
    weight_rows = (columns % N).to(tl.int64)[None, :]
    depth = tl.arange(0, STEP)
    x_at = x + x_rows * x_row + depth[None, :] * x_step
    gate_at = gate + weight_rows * gate_row + depth[:, None] * gate_step
    up_at = up + weight_rows * up_row + depth[:, None] * up_step
    first = tl.zeros([ROWS, COLUMNS], tl.float32)
    second = first
    for k in range(0, tl.cdiv(K, STEP)):
        if c.even:
            a = tl.load(x_at)
            b = tl.load(gate_at)
            d = tl.load(up_at)
        else:
            left = K - k * STEP
            a = tl.load(x_at, depth[None, :] < left, 0.0)
            b = tl.load(gate_at, depth[:, None] < left, 0.0)
            d = tl.load(up_at, depth[:, None] < left, 0.0)
        if INTERPRETING:  # which multiplies the bits of 16-bit numbers
            a = a.to(tl.float32)
            b = b.to(tl.float32)
            d = d.to(tl.float32)
        first = tl.dot(a, b, first, input_precision=tf32())  # first += X @ gate.T
        second = tl.dot(a, d, second, input_precision=tf32())  # second += X @ up.T
        # A step's numbers may lie more than 32 bits on.
        x_at += tl.cast(x_step, tl.int64) * STEP
        gate_at += tl.cast(gate_step, tl.int64) * STEP
        up_at += tl.cast(up_step, tl.int64) * STEP
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if PREACTIVATIONS:
        tl.store(of_gate + at, first.to(out.dtype.element_ty), inside)
        tl.store(of_up + at, second.to(out.dtype.element_ty), inside)
    # silu(g) · u
    tl.store(out + at, (first * sigmoid(first) * second).to(out.dtype.element_ty), inside)


def multiply(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    outputs: tuple[torch.Tensor, ...],
) -> None:
    """The first of the outputs (M, N) = silu(x · gateᵀ) · (x · upᵀ) of x (M, K) and weights (N, K) of any strides;
    two more are the products themselves. Outputs are contiguous.
    """
    (M, K), N = x.shape, outputs[0].shape[1]
    out, of_gate, of_up = outputs if len(outputs) == 3 else outputs * 3
    chosen, warps, stages = tile(M, N, x.element_size(), "", True)
    constants = replace(chosen, even=K % chosen.step == 0)
    with on(x):
        _kernel[(cdiv(M, chosen.rows) * cdiv(N, chosen.columns),)](
            x, gate, up, out, of_gate, of_up, M, N, K, *x.stride(), *gate.stride(), *up.stride(),
            len(outputs) == 3, constants, num_warps=warps, num_stages=stages,
        )  # fmt: skip
