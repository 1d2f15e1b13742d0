"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467) and SwiGLU (Shazeer, arXiv 2002.05202) that write E4M3 with a
scale for 128 columns: one read, and the activation is never in memory in 16 bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, cdiv, check, needs_e4m3, on, operator, power_of_2, rows, sigmoid

GROUP = 128
"""Columns that share a scale."""

LARGEST = 448.0
"""E4M3's largest number."""

HELD = 4 if INTERPRETED else 128
"""Groups of a row that are held in registers; longer rows are read twice, the second time from the L2 cache."""

NORM_GROUPS = 16
"""Groups of a program of the norm: of several rows, where rows are short."""

GATED_ROWS, GATED_GROUPS = 8, 2
"""Rows, which is how scales lie together, and groups of each of a program of the gated activation."""


def quantized_activation(
    x: torch.Tensor, norm_weight: torch.Tensor | None = None, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scale) with q · scale ≈ x / √(mean x² + eps) · norm_weight or, without a weight, ≈ silu(gate) · up of
    gate and up side by side in x.

    x (M, K), without a weight (M, 2K), in bf16, fp16 or fp32; norm_weight (K,) in the same. q (M, K) is
    float8_e4m3fn, rounded to nearest even of what was computed in fp32. scale (M, ⌈K / 128⌉) is fp32 and lies in
    memory column by column, as `fp8_matmul` reads it fastest; the largest of each 128 columns is 448. A group
    whose magnitudes are below 1e-30 counts as 1e-30 large.
    Not differentiable.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device, NotImplementedError on GPUs
    that do not convert to E4M3; the message names the argument.
    """
    check("x", x, dim=2)
    if norm_weight is not None:
        check("norm_weight", norm_weight, shape=x.shape[1:], like=x, dtypes=(x.dtype,))
    elif x.shape[1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected an even number of columns: gate and up")
    quantized: tuple[torch.Tensor, torch.Tensor] = _quantized_activation(x, norm_weight, eps)
    return quantized


@triton.jit
def _put(  # type: ignore[no-untyped-def]  # Triton's types are its own
    y, q, scale_at, target, there, inside, LARGEST: tl.constexpr
):
    """Groups y (…, groups, 128) as q = y / scale and their scales = max |y| / 448, of groups that are there."""
    last: tl.constexpr = len(y.shape) - 1
    largest = tl.maximum(tl.max(tl.abs(y), last), 1e-30)
    tl.store(scale_at, largest / LARGEST, there)
    tl.store(q + target, (y * tl.expand_dims(LARGEST / largest, last)).to(q.dtype.element_ty), inside)


@triton.jit
def _norm(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    weight,
    q,
    scales,
    M,
    units,
    x_units,
    scale_step,
    eps,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """ROWS whole rows a program, of up to GROUPS groups of 128 columns. Rows have `units` · UNIT columns and lie
    `x_units` · UNIT apart: so the compiler knows what addresses are multiples of.
    """
    K = units * UNIT
    x_step = x_units * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = (row < M)[:, None, None] & (column < K)[None, :, :]
    value = tl.load(x + row[:, None, None] * x_step + column[None, :, :], inside, 0.0).to(tl.float32)
    # Read before the sum, which hides the wait.
    w = tl.load(weight + column, column < K, 0.0, eviction_policy="evict_last").to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(tl.sum(value * value, 2), 1) / K + eps)
    # y = x / √(mean x² + ε) · w
    y = value * rstd[:, None, None] * w[None, :, :]
    at = scales + row[:, None] + group[None, :] * scale_step
    there = (row < M)[:, None] & (group * 128 < K)[None, :]
    _put(y, q, at, row[:, None, None] * K + column[None, :, :], there, inside, LARGEST)


@triton.jit
def _long_norm(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, weight, q, scales, K, x_step, scale_step, eps, LARGEST: tl.constexpr, GROUPS: tl.constexpr
):
    """One row a program, GROUPS groups of 128 columns at a time, read twice."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x += row * x_step
    q += row * K
    scales += row
    squares = tl.zeros([GROUPS, 128], tl.float32)
    for start in range(0, K, GROUPS * 128):
        at = start + column
        value = tl.load(x + at, at < K, 0.0, eviction_policy="evict_last").to(tl.float32)
        squares += value * value
    rstd = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)
    # y = x / √(mean x² + ε) · w
    for start in range(0, K, GROUPS * 128):
        at = start + column
        value = tl.load(x + at, at < K, 0.0, eviction_policy="evict_first").to(tl.float32)
        w = tl.load(weight + at, at < K, 0.0, eviction_policy="evict_last").to(tl.float32)
        there = start + group * 128 < K
        _put(value * rstd * w, q, scales + (start // 128 + group) * scale_step, at, there, at < K, LARGEST)


@triton.jit
def _gated(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    q,
    scales,
    M,
    units,
    x_units,
    scale_step,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """GROUPS groups of 128 columns of each of ROWS rows a program, `units` and `x_units` as in `_norm`. Rows are
    what runs fastest, as scales lie.
    """
    K = units * UNIT
    x_step = x_units * UNIT
    index = tl.arange(0, ROWS * GROUPS)
    row = (tl.program_id(0) * ROWS + index % ROWS).to(tl.int64)
    group = tl.program_id(1) * GROUPS + index // ROWS
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = (row < M)[:, None] & (column < K)
    at = x + row[:, None] * x_step + column
    gate = tl.load(at, inside, 0.0).to(tl.float32)
    up = tl.load(at + K, inside, 0.0).to(tl.float32)
    # y = silu(g) · u = g · σ(g) · u
    there = (row < M) & (group * 128 < K)
    target = row[:, None] * K + column
    _put(gate * sigmoid(gate) * up, q, scales + row + group * scale_step, target, there, inside, LARGEST)


def _empty(x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    M, width = x.shape
    K = width if norm_weight is not None else width // 2
    q = torch.empty(M, K, dtype=torch.float8_e4m3fn, device=x.device)
    return q, torch.empty(cdiv(K, GROUP), M, dtype=torch.float32, device=x.device).t()


def _launch(x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = _empty(x, norm_weight, eps)
    if q.numel() == 0:
        return q, scale
    needs_e4m3("quantized_activation", x)
    x = rows(x)
    (M, K), across = q.shape, scale.shape[1]
    unit = math.gcd(K, x.stride(0), 16)
    with on(x):
        if norm_weight is None:
            _gated[(cdiv(M, GATED_ROWS), cdiv(across, GATED_GROUPS))](
                x, q, scale, M, K // unit, x.stride(0) // unit, M, LARGEST, GATED_ROWS, GATED_GROUPS, unit,
                num_warps=4,
            )  # fmt: skip
        else:
            weight = norm_weight.contiguous()
            if across > HELD:
                _long_norm[(M,)](x, weight, q, scale, K, x.stride(0), M, eps, LARGEST, HELD, num_warps=16)
                return q, scale
            groups = power_of_2(across)
            tall = power_of_2(max(1, min(NORM_GROUPS // groups, M)))
            _norm[(cdiv(M, tall),)](
                x, weight, q, scale, M, K // unit, x.stride(0) // unit, M, eps, LARGEST, tall, groups, unit,
                num_warps=min(max(tall * groups // 8, 2), 16),
            )  # fmt: skip
    return q, scale


_quantized_activation = operator(
    "quantized_activation(Tensor x, Tensor? norm_weight, float eps) -> (Tensor, Tensor)", _launch, _empty
)
