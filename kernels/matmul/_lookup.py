"""Rows of a table by their numbers, as an embedding looks them up: the gradient of the table."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .._common import FLOATING, INTERPRETED, cdiv, check, lined, operator
from .._launch import Launch, prepared

TILE = (2, 16) if INTERPRETED else (8, 512)
"""Rows and columns that a program adds at a time."""


@triton.jit
def _sums(x, numbers, order, sums, M, N, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """sums[n] += Σ x[order[j]] over all j with numbers[j] = n; the program where n begins makes a block of it."""
    # The blocks of a row run beside each other, and what they read lies together.
    first = tl.program_id(0).to(tl.int64)
    number = tl.load(numbers + first)
    if (first > 0) & (tl.load(numbers + tl.maximum(first - 1, 0)) == number):
        return
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Most numbers of a text stand there once: tiles of rows that are not there would take three times as long.
    total = tl.load(x + tl.load(order + first) * stride + col, col < N, 0.0).to(tl.float32)
    place = first + 1 + tl.arange(0, ROWS)
    own = (place < M) & (tl.load(numbers + place, place < M, -1) == number)
    if tl.max(own.to(tl.int32), 0) > 0:
        parts = tl.zeros([ROWS, BLOCK], tl.float32)
        same = 1
        while same > 0:
            row = tl.load(order + place, own, 0)
            inside = own[:, None] & (col < N)[None, :]
            parts += tl.load(x + row[:, None] * stride + col[None, :], inside, 0.0).to(tl.float32)
            place += ROWS
            own = (place < M) & (tl.load(numbers + place, place < M, -1) == number)
            same = tl.max(own.to(tl.int32), 0)
        total += tl.sum(parts, 0)
    own_sums = sums + number * N + col
    tl.store(own_sums, tl.load(own_sums, col < N, 0.0).to(tl.float32) + total, col < N)


def add_rows(sums: torch.Tensor, x: torch.Tensor, numbers: torch.Tensor) -> None:
    """sums[n] += the sum of all rows of x whose number is n, where `sums` lies.

    x (M, N) in bf16, fp16 or fp32; `sums` (rows, N), contiguous and of x's dtype; `numbers` (M,) int64, each of a
    row of `sums`, which nobody checks. Added in fp32, in the same order each time, and rounded once. Raises
    TypeError for a wrong type or dtype, ValueError for a wrong shape or layout.
    """
    check("x", x, dim=2, dtypes=FLOATING)
    check("numbers", numbers, like=x, shape=x.shape[:1], dtypes=(torch.int64,))
    check("sums", sums, like=x, dim=2, dtypes=(x.dtype,))
    if sums.shape[1] != x.shape[1]:
        raise ValueError(f"sums has shape {tuple(sums.shape)}, expected (rows, {x.shape[1]})")
    if not sums.is_contiguous():
        raise ValueError(f"sums has strides {sums.stride()}, expected rows one after the other")
    _add_rows(sums, x, numbers)


def _prepare(sums: torch.Tensor, x: torch.Tensor, numbers: torch.Tensor) -> Callable[..., None]:
    (M, N), device = x.shape, x.device
    if x.numel() == 0:
        return lambda sums, x, numbers: None
    rows, block = TILE
    launch = Launch(_sums, (M, cdiv(N, block)), M, N, lined(x).stride(0), ROWS=rows, BLOCK=block, num_warps=2)

    def run(sums: torch.Tensor, x: torch.Tensor, numbers: torch.Tensor) -> None:
        # Stable: so that the order is always the same.
        ordered, order = numbers.sort(stable=True)
        launch(device, lined(x), ordered, order, sums)

    return run


_add_rows = operator(
    "add_rows(Tensor(a!) sums, Tensor x, Tensor numbers) -> ()", prepared(_prepare), lambda sums, x, numbers: None
)
