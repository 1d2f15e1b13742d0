"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467) and SwiGLU (Shazeer, arXiv 2002.05202) that write E4M3 with a
scale for 128 columns: one read, and the activation is never in memory in 16 bits.
"""

from __future__ import annotations

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
def _put(y, q, scale_at, target, inside, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types
    """Groups y (groups, 128) as q = y / scale and their scales = max |y| / 448."""
    largest = tl.maximum(tl.max(tl.abs(y), 1), 1e-30)
    tl.store(scale_at, largest / LARGEST, tl.max(inside.to(tl.int32), 1) > 0)
    tl.store(q + target, (y * (LARGEST / largest)[:, None]).to(q.dtype.element_ty), inside)


@triton.jit
def _norm(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    weight,
    q,
    scales,
    K,
    x_step,
    scale_step,
    eps,
    LARGEST: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One row a program, GROUPS groups of 128 columns at a time; WHOLE: it has no more, and is read once."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x += row * x_step
    q += row * K
    scales += row
    value = tl.load(x + column, column < K, 0.0).to(tl.float32)
    squares = value * value
    if not WHOLE:
        for start in range(GROUPS * 128, K, GROUPS * 128):
            more = tl.load(x + start + column, start + column < K, 0.0, eviction_policy="evict_last").to(
                tl.float32
            )
            squares += more * more
    rstd = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)
    # y = x / √(mean x² + ε) · w
    w = tl.load(weight + column, column < K, 0.0, eviction_policy="evict_last").to(tl.float32)
    _put(value * rstd * w, q, scales + group * scale_step, column, column < K, LARGEST)
    if not WHOLE:
        for start in range(GROUPS * 128, K, GROUPS * 128):
            at = start + column
            value = tl.load(x + at, at < K, 0.0, eviction_policy="evict_first").to(tl.float32)
            w = tl.load(weight + at, at < K, 0.0, eviction_policy="evict_last").to(tl.float32)
            _put(value * rstd * w, q, scales + (start // 128 + group) * scale_step, at, at < K, LARGEST)


@triton.jit
def _gated(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, q, scales, M, K, x_step, scale_step, LARGEST: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr
):
    """GROUPS groups of 128 columns of each of ROWS rows a program. Rows are what runs fastest, as scales lie."""
    index = tl.arange(0, ROWS * GROUPS)
    row = (tl.program_id(0) * ROWS + index % ROWS).to(tl.int64)
    group = tl.program_id(1) * GROUPS + index // ROWS
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = (row < M)[:, None] & (column < K)
    at = x + row[:, None] * x_step + column
    gate = tl.load(at, inside, 0.0).to(tl.float32)
    up = tl.load(at + K, inside, 0.0).to(tl.float32)
    # y = silu(g) · u = g · σ(g) · u
    _put(
        gate * sigmoid(gate) * up, q, scales + row + group * scale_step, row[:, None] * K + column, inside, LARGEST
    )


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
    with on(x):
        if norm_weight is None:
            _gated[(cdiv(M, GATED_ROWS), cdiv(across, GATED_GROUPS))](
                x, q, scale, M, K, x.stride(0), M, LARGEST, GATED_ROWS, GATED_GROUPS, num_warps=4
            )
        else:
            groups = min(power_of_2(across), HELD)
            warps = min(max(groups // 4, 1), 16)
            _norm[(M,)](
                x, norm_weight.contiguous(), q, scale, K, x.stride(0), M, eps, LARGEST, groups, across <= groups,
                num_warps=warps,
            )  # fmt: skip
    return q, scale


_quantized_activation = operator(
    "quantized_activation(Tensor x, Tensor? norm_weight, float eps) -> (Tensor, Tensor)", _launch, _empty
)
