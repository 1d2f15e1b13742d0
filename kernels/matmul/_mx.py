"""Products with weights in MXFP8, MXFP4 or NVFP4, on any GPU: widened before, to bf16 or, of MXFP4, to E4M3.

Every number of these formats times its group's scale is exact in bf16, but for scales beyond its range. NVFP4's
scale of the whole tensor is multiplied by in fp32, at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, cdiv, on

GROUPS = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
"""Columns that share a scale."""


@triton.jit
def power(scale):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """2^(byte - 127) in fp32, NaN for 255."""
    byte = scale.to(tl.int32)
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def shrunk(code):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """2^-126 of the number that the lowest four bits stand for: as fp32's exponent and fraction they are that."""
    wide = code.to(tl.int32)
    bits = ((wide & 7) << 22) | ((wide & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1(code):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The number that the lowest four bits stand for, in fp32."""
    return shrunk(code) * 8.507059173023462e37


@triton.jit
def _scales(at, FORMAT: tl.constexpr, inside):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Scales of groups in fp32."""
    if FORMAT == "nvfp4":
        return tl.load(at, inside, 0.0).to(tl.float32)
    else:  # Triton compiles what comes behind a return
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
    # The columns of a byte side by side: a row is written by whole sectors.
    low = (e2m1(code) * factor).to(tl.float8e4nv)
    high = (e2m1(code >> 4) * factor).to(tl.float8e4nv)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = out + rows[:, None] * K + column[None, :]
    tl.store(to, tl.interleave(low, high), inside & (column < K)[None, :])


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
