"""Products with weights in MXFP8, MXFP4 or NVFP4, on any GPU: widened on the way to the matrix units, or before.

Every number of these formats times its group's scale is exact in bf16, but for scales beyond its range. NVFP4's
scale of the whole tensor is multiplied by in fp32, at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, INTERPRETING, cdiv, on

GROUPS = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
"""Columns that share a scale."""
SPLIT = 4096
"""Steps of K that one program computes of a product of few rows."""


@triton.jit
def power(scale):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """2^(byte - 127) in fp32, NaN for 255."""
    byte = scale.to(tl.int32)
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e2m1(code):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The number that the lowest four bits stand for, in fp32: as an exponent and a fraction they are it /
    2^126."""
    wide = code.to(tl.int32)
    bits = ((wide & 7) << 22) | ((wide & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _scales(at, FORMAT: tl.constexpr, inside):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Scales of groups in fp32."""
    if FORMAT == "nvfp4":
        return tl.load(at, inside, 0.0).to(tl.float32)
    return power(tl.load(at, inside, 0))


@triton.jit
def _widen(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, scales, out, N, K, width, across, FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """One row of weights a program and BLOCK bytes of it at a time, to bf16."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    code = tl.load(q + row * width + place, inside, 0.0)
    out += row * K
    if FORMAT == "mxfp8":
        y = code.to(tl.float32) * _scales(scales + row * across + place // GROUP, FORMAT, inside)
        tl.store(out + place, y.to(tl.bfloat16), inside)
    else:
        scale = _scales(scales + row * across + 2 * place // GROUP, FORMAT, inside)
        column = 2 * place
        tl.store(out + column, (e2m1(code) * scale).to(tl.bfloat16), inside)
        tl.store(out + column + 1, (e2m1(code >> 4) * scale).to(tl.bfloat16), inside & (column + 1 < K))


def widen(q: torch.Tensor, scales: torch.Tensor, format: str, K: int) -> torch.Tensor:
    """Weights (N, K) in bf16, without NVFP4's scale of the whole tensor. q and scales as bytes, or E4M3."""
    N, width = q.shape
    out = torch.empty(N, K, dtype=torch.bfloat16, device=q.device)
    block = 64 if INTERPRETED else 1024
    with on(q):
        _widen[(N, cdiv(width, block))](
            q, scales, out, N, K, width, scales.shape[1], format, GROUPS[format], block
        )
    return out


@triton.jit
def _reencode(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, scales, out, tops, N, K, width, across, row_step, BLOCK: tl.constexpr
):
    """One square of BLOCK rows and columns of MXFP4 weights a program: E4M3 numbers and one power of two."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    inside = (rows < N)[:, None]
    every = tl.load(scales + rows[:, None] * across + group[None, :], inside & (group < across)[None, :], 0)
    top = tl.maximum(tl.max(tl.max(every.to(tl.int32), 1), 0) - 6, 0)
    tl.store(tops + tl.program_id(0) * row_step + tl.program_id(1), power(top))
    place = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    there = inside & (place < width)[None, :]
    code = tl.load(q + rows[:, None] * width + place[None, :], there, 0)
    own = tl.load(scales + rows[:, None] * across + (place // 16)[None, :], there, 0).to(tl.int32)
    # 2^(own - top), as far as an fp32 number has it; what is 2^-100 of the largest is 0 in E4M3.
    factor = ((tl.maximum(own - top, -100) + 127) << 23).to(tl.float32, bitcast=True)
    factor = tl.where(own == 255, float("nan"), factor)
    to = out + rows[:, None] * K + 2 * place[None, :]
    tl.store(to, (e2m1(code) * factor).to(tl.float8e4nv), there)
    tl.store(to + 1, (e2m1(code >> 4) * factor).to(tl.float8e4nv), there)


def reencode(q: torch.Tensor, scales: torch.Tensor, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 weights as (E4M3 (N, K), fp32 scales (⌈N / 128⌉, ⌈K / 128⌉)), as products with blocks of scales take
    them.

    A block's scale is 2^-6 of its largest group's, so that E2M1's largest, 6, is 384. Numbers are the same to the
    bit where no group's scale is less than 2^-14 of that: 2^-8 times ½ is E4M3's smallest. Smaller groups are
    rounded.
    """
    N, width = q.shape
    out = torch.empty(N, K, dtype=torch.float8_e4m3fn, device=q.device)
    down, across = cdiv(N, 128), cdiv(K, 128)
    tops = torch.empty(down, cdiv(across, 4) * 4, dtype=torch.float32, device=q.device)[:, :across]
    with on(q):
        _reencode[(down, across)](
            q, scales, out, tops, N, K, width, scales.shape[1], tops.stride(0), 128, num_warps=8
        )
    return out, tops


@triton.jit
def _few_rows(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, q, scales, partial, M, N, K, lead, width, across,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Partial sums (splits, M, N) in fp32: of a tile over SPLIT steps of K. STEP counts bytes of weights."""
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    some = (columns % N).to(tl.int64)
    PER: tl.constexpr = 1 if FORMAT == "mxfp8" else 2  # numbers of a byte
    first = tl.program_id(1) * SPLIT
    byte = tl.arange(0, STEP)
    inside = (rows < M)[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(first, tl.minimum(first + SPLIT, K), STEP * PER):
        place = k // PER + byte
        column = place * PER
        code = tl.load(q + some[None, :] * width + place[:, None], (place < width)[:, None], 0.0)
        scale = _scales(
            scales + some[None, :] * across + (column // GROUP)[:, None], FORMAT, (column < K)[:, None]
        )
        at = x + rows[:, None] * lead + column[None, :]
        even = tl.load(at, inside & (column < K)[None, :], 0.0)
        if FORMAT == "mxfp8":
            low = (code.to(tl.float32) * scale).to(x.dtype.element_ty)
        else:
            low = (e2m1(code) * scale).to(x.dtype.element_ty)
            high = (e2m1(code >> 4) * scale).to(x.dtype.element_ty)
            odd = tl.load(at + 1, inside & (column + 1 < K)[None, :], 0.0)
            if INTERPRETING:  # which multiplies the bits of 16-bit numbers
                odd = odd.to(tl.float32)
                high = high.to(tl.float32)
            acc = tl.dot(odd, high, acc)  # acc += X[:, 1::2] @ W[:, 1::2].T
        if INTERPRETING:
            even = even.to(tl.float32)
            low = low.to(tl.float32)
        acc = tl.dot(even, low, acc)  # acc += X[:, ::2] @ W[:, ::2].T
    at = partial + (tl.program_id(1) * M + rows.to(tl.int64))[:, None] * N + columns[None, :]
    tl.store(at, acc, inside & (columns < N)[None, :])


@triton.jit
def _sum(partial, scale, out, count, splits, SCALED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of the partial sums, in order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(0, splits):
        acc += tl.load(partial + tl.cast(i, tl.int64) * count + place, inside, 0.0)
    if SCALED:
        acc *= tl.load(scale)
    tl.store(out + place, acc.to(out.dtype.element_ty), inside)


def few_rows(
    x: torch.Tensor,
    q: torch.Tensor,
    scales: torch.Tensor,
    scale: torch.Tensor | None,
    format: str,
    out: torch.Tensor,
) -> None:
    """out (M, N) = x (M, K) · weightsᵀ for M up to 64: the weights are read once."""
    (M, K), N = x.shape, q.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    columns, step, split = (32, 32, 128) if INTERPRETED else (64, 64, SPLIT)
    splits = cdiv(K, split)
    partial = torch.empty(splits, M, N, dtype=torch.float32, device=x.device)
    height = 16 if M <= 16 else 32 if M <= 32 else 64
    block = 256 if INTERPRETED else 1024
    with on(x):
        _few_rows[(cdiv(N, columns), splits)](
            x, q, scales, partial, M, N, K, x.stride(0), q.shape[1], scales.shape[1],
            format, GROUPS[format], height, columns, step, split, num_warps=4, num_stages=4,
        )  # fmt: skip
        _sum[(cdiv(M * N, block),)](
            partial, partial if scale is None else scale, out, M * N, splits, scale is not None, block
        )
