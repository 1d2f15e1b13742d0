"""Sums over the channels of a warp by tensor cores, from registers to registers.

A warp has 32 channels, a lane each, and many numbers a lane that are to be added up over the channels: the
gradients of B and C of `selective_scan.py`. A sum by shuffles takes one shuffle, two selections and one addition a
number; a product with ones would need the numbers where that product's operands lie, by way of shared memory. Here
numbers are the operands as they lie, in products of m16n8k8:

* `fours`: of 16 numbers, each summed over four neighbouring channels. The second operand has two numbers of a lane
  as rows k, with its channel's place among four, and fours of channels as columns; the first has ones where a row
  is of a number. The result has numbers as rows and fours of channels as columns, which the lanes of a four share.
* `added`: that result, as the first operand, times ones: its rows' sums, the same in all columns.

For 128 numbers that is 80 products and no shuffle. Which lane has what is told by reshapes alone: where the
compiler lays channels out otherwise, it moves them first, and sums are the same.

Operands are cut to TF32 by the tensor cores, sums are in fp32: for gradients of 16 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common import tf32


@triton.jit
def fours(numbers):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(16, 8): sums over channels 4 i to 4 i + 3, of numbers (32, 16) in fp32."""
    # Numbers 8 h + 2 i + l of channels 4 g + c, as l, h, (i, c, g).
    halves = tl.permute(tl.reshape(numbers, [8, 4, 2, 4, 2]), [3, 1, 4, 0, 2])
    low, high = tl.split(halves)
    k = tl.arange(0, 32)
    row = tl.arange(0, 16)[:, None]
    # Of both halves in all rows: those below 8 are of one, those above of the other, from the same registers.
    chosen = (row % 8 == (k // 8 * 2 + k % 2)[None, :]).to(tl.float32)
    first = tl.dot(chosen, tl.reshape(low, [32, 8]), input_precision=tf32())
    second = tl.dot(chosen, tl.reshape(high, [32, 8]), input_precision=tf32())
    return tl.where(row < 8, first, second)


@triton.jit
def _rounded(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """fp32 so that cutting it to TF32's 10 digits is off by two thirds of the last one at most, to either side.

    A third of the last digit more, up to two as the first ones say: one multiply-add, and NaN stays NaN. Half a
    digit more, as an integer, would be nearer, and would make 0 of tensor cores' NaN, which is ones alone.
    """
    return x + x * (1 / 3072)


@triton.jit
def added(sums):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(16, 8): in each column the totals of a result of `fours`."""
    rounded = _rounded(sums)
    # A product has 16 columns at least.
    filled = tl.reshape(tl.permute(tl.join(rounded, tl.zeros_like(rounded)), [0, 2, 1]), [16, 16])
    return tl.dot(filled, tl.full([16, 8], 1.0, tl.float32), input_precision=tf32())
