"""Dynamic quantization to 8-bit floats (Micikevicius et al., arXiv 2209.05433): one read, one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._common import INTERPRETED, cdiv, check, choice, on, operator, power_of_2, rows

GROUP = 128
"""Columns that share a scale with granularity "block"."""

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}

LIMIT = 512 if INTERPRETED else 32768
"""Longest row held in registers; longer ones are read twice, the second time from the L2 cache."""

PIECE = 256 if INTERPRETED else 8192
"""Piece of a longer row."""


def fp8_quant(
    x: torch.Tensor, granularity: str = "row", format: str = "e4m3"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scale) with q · scale ≈ x and the largest magnitude of each group at the largest fp8 number.

    x (…, N) in bf16, fp16 or fp32. q has x's shape, in float8_e4m3fn ("e4m3") or float8_e5m2 ("e5m2"),
    rounded to nearest even; scale is fp32, (…, 1) with granularity "row", (…, ceil(N/128)) with "block". A
    group whose magnitudes are below 1e-30 counts as 1e-30 large. Raises TypeError for a wrong type or dtype,
    ValueError for a wrong shape, device, granularity or format; the message names the argument.
    """
    check("x", x)
    if x.dim() == 0:
        raise ValueError("x has shape (), expected at least one dimension")
    choice("granularity", granularity, ("row", "block"))
    choice("format", format, tuple(FORMATS))
    quantized: tuple[torch.Tensor, torch.Tensor] = _fp8_quant(x, granularity, format)
    return quantized


@triton.jit
def _row(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, q, scales, M, N, stride, LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """ROWS whole rows a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row < M)[:, None] & (col < N)[None, :]
    value = tl.load(x + row[:, None] * stride + col[None, :], inside, 0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(value), 1), 1e-30)
    tl.store(scales + row, largest / LARGEST, row < M)
    value = value * (LARGEST / largest)[:, None]
    tl.store(q + row[:, None] * N + col[None, :], value.to(q.dtype.element_ty), inside)


@triton.jit
def _long_row(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, q, scales, M, N, stride, LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """One row a program, in pieces, twice."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + col, col < N, 0.0, eviction_policy="evict_last")
        most = tl.maximum(most, tl.abs(value.to(tl.float32)))
    largest = tl.maximum(tl.max(most, 0), 1e-30)
    tl.store(scales + row, largest / LARGEST)
    factor = LARGEST / largest
    for start in range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + col, col < N, 0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(q + row * N + col, (value * factor).to(q.dtype.element_ty), col < N)


@triton.jit
def _block(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, q, scales, M, N, stride, LARGEST: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr
):
    """GROUPS groups a program, each in 16 threads of one warp, so that maxima need no shared memory."""
    across = tl.cdiv(N, GROUP)
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    row = group // across
    col = ((group % across) * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    inside = (row < M)[:, None] & (col < N)
    value = tl.load(x + row[:, None] * stride + col, inside, 0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(value), 1), 1e-30)
    tl.store(scales + group, largest / LARGEST, row < M)
    value = value * (LARGEST / largest)[:, None]
    tl.store(q + row[:, None] * N + col, value.to(q.dtype.element_ty), inside)


def _empty(x: torch.Tensor, granularity: str, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for q and scale."""
    groups = 1 if granularity == "row" else -(-x.shape[-1] // GROUP)
    q = torch.empty(x.shape, dtype=FORMATS[format], device=x.device)
    return q, torch.empty(*x.shape[:-1], groups, dtype=torch.float32, device=x.device)


def _launch(x: torch.Tensor, granularity: str, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = _empty(x, granularity, format)
    if x.numel() == 0:
        return q, scale.fill_(1e-30 / LARGEST[format])
    flat = rows(x)
    M, N = flat.shape
    block = power_of_2(N)
    arguments = (flat, q, scale, M, N, flat.stride(0), LARGEST[format])
    with on(x):
        if granularity == "block":
            _block[(cdiv(scale.numel(), 32),)](*arguments, GROUPS=32, GROUP=GROUP, num_warps=4)
        elif block <= LIMIT:
            height = power_of_2(max(1, min(4096 // block, M)))
            warps = min(max(height * block // 1024, 4), 32)
            _row[(cdiv(M, height),)](*arguments, ROWS=height, BLOCK=block, num_warps=warps)
        else:
            _long_row[(M,)](*arguments, ROWS=1, BLOCK=PIECE, num_warps=16)
    return q, scale


_fp8_quant = operator("fp8_quant(Tensor x, str granularity, str format) -> (Tensor, Tensor)", _launch, _empty)
