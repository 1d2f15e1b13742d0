"""Sums of columns: the gradient of a bias that a product adds."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .._common import FLOATING, INTERPRETED, add_parts, cdiv, check, lined, multiprocessors, operator, power_of_2
from .._launch import Launch, prepared, room

TILE = (4, 16) if INTERPRETED else (32, 64)
"""Rows and columns that a program has at a time."""

PROGRAMS = 8
"""A multiprocessor, where there are rows for so many. Tuned on an H200, as the tile is."""


@triton.jit
def _sums(x, parts, M, N, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """A block of columns, summed over every n-th group of ROWS rows, to parts (groups, N)."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    # In 64 bits: the last step may go beyond 32.
    for start in tl.range(tl.program_id(1).to(tl.int64) * ROWS, M, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < M)[:, None] & (col < N)[None, :]
        total += tl.load(x + row[:, None] * stride + col[None, :], inside, 0.0).to(tl.float32)
    tl.store(parts + tl.program_id(1).to(tl.int64) * N + col, tl.sum(total, 0), col < N)


def sums_of_columns(x: torch.Tensor) -> torch.Tensor:
    """Of x (M, N) in bf16, fp16 or fp32 to (N,), summed in fp32, in the same order each time, and rounded once.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape.
    """
    found: torch.Tensor = _summed(x)
    return found


def _check(x: torch.Tensor) -> None:
    check("x", x, dim=2, dtypes=FLOATING)


def _empty(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[1])


def _prepare(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    (M, N), device = x.shape, x.device
    if x.numel() == 0:
        return lambda x: x.new_zeros(x.shape[1])
    rows, block = TILE
    across, tiles = cdiv(N, block), cdiv(M, rows)
    # As many tiles for each program.
    groups = cdiv(tiles, cdiv(tiles, cdiv(PROGRAMS * multiprocessors(x), across)))
    make = Launch(_sums, (across, groups), M, N, lined(x).stride(0), ROWS=rows, BLOCK=block, num_warps=4)
    add = Launch(add_parts, (cdiv(N, 32),), groups, N, ROWS=min(power_of_2(groups), 256), BLOCK=32, num_warps=8)
    of_parts, of_sums = room((groups, N), torch.float32, device), room((N,), x.dtype, device)

    def run(x: torch.Tensor) -> torch.Tensor:
        parts, sums = of_parts(), of_sums()
        make(device, lined(x), parts)
        add(device, parts, sums)
        return sums

    return run


_summed = operator("sums_of_columns(Tensor x) -> Tensor", prepared(_prepare, _check), _empty, check=_check)
