"""Products of up to 64 rows with a weight in MXFP8, MXFP4 or NVFP4, on any GPU: the weight is read once, as it is
stored, and widened to bf16 in registers. Reading it is what such a product costs.

As in `_few_rows.py` the operands' roles are exchanged, outᵀ = W · xᵀ: rows of the weight are the rows of a tile,
and those of x its columns. A byte of two 4-bit numbers has an even and an odd column of the weight, which are
multiplied by the even and by the odd columns of x in products of their own: no number has to change its place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .._common import INTERPRETING, cdiv, lined, multiprocessors, on, power_of_2
from ._few_rows import FLYING, room
from ._mx import GROUPS, e2m1, power, shrunk

MOST = 64
"""Rows of x at the most."""
_SHRUNK = tl.constexpr(1.2980742146337069e33)
"""2^110: this times NVFP4's scale makes, of 2^-126 of a 4-bit number (`shrunk`), 2^-16 of the weight, which no
scale takes out of bf16's range."""
_GROWN = tl.constexpr(65536.0)
"""What the sum is then multiplied by."""


@dataclass(frozen=True)
class Tile:
    """Rows of the weight and of x in a program's tile, bytes of a weight's row in a step, and how many bytes share
    a scale. `even`: a row is a multiple of the step.
    """

    columns: int
    rows: int
    step: int
    group: int
    format: str
    stages: int
    even: bool


@triton.jit
def _scaled(y, scale, c: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """y (COLUMNS, STEP) in fp32 times a scale for each group, in bf16."""
    COLUMNS: tl.constexpr = c.columns
    STEP: tl.constexpr = c.step
    GROUP: tl.constexpr = c.group
    wide = tl.reshape(y, [COLUMNS, STEP // GROUP, GROUP]) * scale[:, :, None]
    return tl.reshape(wide, [COLUMNS, STEP]).to(tl.bfloat16)


@triton.jit
def _added(acc, y, z):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """acc + y · z."""
    if INTERPRETING:  # which multiplies the bits of 16-bit numbers
        y = y.to(tl.float32)
        z = z.to(tl.float32)
    return tl.dot(y, z, acc)


@triton.jit(do_not_specialize=["M"])
def _kernel(x, q, scales, scale, out, M, N, K, lead, width, across, c: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """out (M, N) = x (M, K) · weight (N, K)ᵀ, `width` bytes and `across` scales a row of the weight."""
    COLUMNS: tl.constexpr = c.columns
    ROWS: tl.constexpr = c.rows
    STEP: tl.constexpr = c.step
    GROUPS_: tl.constexpr = STEP // c.group
    PACKED: tl.constexpr = c.format != "mxfp8"
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    # Beyond the last one, that one is read again and not written.
    held = tl.minimum(column, N - 1).to(tl.int64)
    place = tl.arange(0, STEP)
    group = tl.arange(0, GROUPS_)
    q_at = q + held[:, None] * width + place[None, :]
    scales_at = scales + held[:, None] * across + group[None, :]
    depth = tl.arange(0, 2 * STEP if PACKED else STEP)[None, :]
    x_at = x + row[:, None].to(tl.int64) * lead + depth
    there = (row < M)[:, None]
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for k in tl.range(0, tl.cdiv(width, STEP), num_stages=c.stages):
        left = width - k * STEP
        some = (k * GROUPS_ + group < across)[None, :]
        code = tl.load(q_at) if c.even else tl.load(q_at, (place < left)[None, :], 0.0)
        own = tl.load(scales_at) if c.even else tl.load(scales_at, some, 0.0)
        z = tl.load(x_at, there if c.even else there & (depth < K - k * STEP * (2 if PACKED else 1)), 0.0)
        own = own.to(tl.float32) * _SHRUNK if c.format == "nvfp4" else power(own)
        if PACKED:
            # K is even, so that a byte has two numbers.
            low = shrunk(code) if c.format == "nvfp4" else e2m1(code)
            high = shrunk(code >> 4) if c.format == "nvfp4" else e2m1(code >> 4)
            even, odd = tl.split(tl.reshape(z, [ROWS, STEP, 2]))
            acc = _added(acc, _scaled(low, own, c), tl.trans(even))
            acc = _added(acc, _scaled(high, own, c), tl.trans(odd))
            x_at += 2 * STEP
        else:
            acc = _added(acc, _scaled(code.to(tl.float32), own, c), tl.trans(z))
            x_at += STEP
        q_at += STEP
        scales_at += GROUPS_
    if c.format == "nvfp4":
        acc *= tl.load(scale) * _GROWN
    at = out + row[None, :].to(tl.int64) * N + column[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), (row < M)[None, :] & (column < N)[:, None])


@functools.lru_cache(4096)
def tile(M: int, N: int, width: int, format: str, processors: int, memory: int) -> tuple[Tile, int]:
    """(the tile, warps) of a product with rows of `width` bytes, on so many multiprocessors, each with so many
    bytes of shared memory. Tiles are as wide as there are programs for all.
    """
    columns = next((x for x in (64, 32) if cdiv(N, x) >= processors), 16)
    rows = max(16, power_of_2(M))
    packed = format != "mxfp8"
    group = GROUPS[format] // (2 if packed else 1)
    step = 64 if packed else 128
    each = cdiv(cdiv(N, columns), processors)
    stage = columns * step + rows * step * (4 if packed else 2)
    flying = min(cdiv(FLYING, each * columns * step), 7, memory // (each * stage) - 1)
    return Tile(columns, rows, step, group, format, max(flying, 2) + 1, width % step == 0), columns // 16


def multiply(
    x: torch.Tensor,
    q: torch.Tensor,
    scales: torch.Tensor,
    format: str,
    scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out (M, N) = x (M, K) · weight (N, K)ᵀ: x in bf16, M up to `MOST`, q and scales as `mx_matmul` has them."""
    (M, K), N, width = x.shape, *q.shape
    x = lined(x)
    chosen, warps = tile(M, N, width, format, multiprocessors(x), room(x.device))
    with on(x):
        _kernel[(cdiv(N, chosen.columns),)](
            x, q, scales, out if scale is None else scale, out, M, N, K, x.stride(0), width, scales.shape[1],
            chosen, num_warps=warps,
        )  # fmt: skip
