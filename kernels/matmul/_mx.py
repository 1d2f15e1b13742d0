"""Products with weights in MXFP8, MXFP4 or NVFP4, on any GPU: widened before, to bf16 or, of MXFP4, to E4M3.

Every number of these formats times its group's scale is exact in bf16, but for scales beyond its range. NVFP4's
scale of the whole tensor is multiplied by in fp32, at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, assembles, cdiv, on

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
def _top(scales, tops, N, across, row_step, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """(the exponent of a square's scale, 2^-6 of its largest group's, which is stored; its groups', and where they
    are).
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    inside = (rows < N)[:, None] & (group < across)[None, :]
    every = tl.load(scales + rows[:, None] * across + group[None, :], inside, 0).to(tl.int32)
    top = tl.maximum(tl.max(tl.max(every, 1), 0) - 6, 0)
    tl.store(tops + tl.program_id(0) * row_step + tl.program_id(1), power(top))
    return top, every, inside


@triton.jit
def _factor(own, top):  # type: ignore[no-untyped-def]  # as above
    """2^(own - top), as far as an fp32 number has it; what is 2^-100 of the largest is 0 in E4M3."""
    factor = ((tl.maximum(own - top, -100) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(own == 255, float("nan"), factor)


@triton.jit
def _reencode(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, scales, out, tops, N, K, width, across, row_step, BLOCK: tl.constexpr
):
    """One square of BLOCK rows and columns of MXFP4 weights a program: E4M3 numbers and one power of two."""
    top, _, _ = _top(scales, tops, N, across, row_step, BLOCK)
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < N)[:, None]
    place = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    there = inside & (place < width)[None, :]
    code = tl.load(q + rows[:, None] * width + place[None, :], there, 0)
    own = tl.load(scales + rows[:, None] * across + (place // 16)[None, :], there, 0).to(tl.int32)
    factor = _factor(own, top)
    # The columns of a byte side by side: a row is written by whole sectors.
    low = (e2m1(code) * factor).to(tl.float8e4nv)
    high = (e2m1(code >> 4) * factor).to(tl.float8e4nv)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = out + rows[:, None] * K + column[None, :]
    tl.store(to, tl.interleave(low, high), inside & (column < K)[None, :])


@triton.jit
def _shifted(value, factor, PLACE: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """A number times a factor as E4M3, in the so-maniest byte of a word."""
    byte = (value * factor).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return byte.to(tl.int32) << (8 * PLACE)


@triton.jit
def _by_word(x):  # type: ignore[no-untyped-def]  # as above
    """What groups have (rows, groups), for each of a group's four words."""
    each = tl.broadcast_to(tl.expand_dims(x, 2), x.shape[0], x.shape[1], 4)
    return each.reshape(x.shape[0], 4 * x.shape[1])


@triton.jit
def _byte(code, low, high):  # type: ignore[no-untyped-def]  # as above
    """The byte of the lowest four bits, without an instruction for it."""
    word = tl.where((code & 4) != 0, high, low)
    return ((word >> (code & 3) * 8) & 0x7F) | ((code & 8) << 4)


@triton.jit
def _picked(codes, low, high):  # type: ignore[no-untyped-def]  # as above
    """(four, four more) bytes of eight codes: of each the one of `low` and `high` that its three lower bits say,
    with its fourth bit as the sign.
    """
    if assembles():
        # A selector has four bits, of which the highest would repeat a byte's sign.
        first, second = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 place, sign, magnitude;
            and.b32 place, $2, 0x7777;
            prmt.b32 magnitude, $3, $4, place;
            shr.u32 sign, $2, 3;
            and.b32 place, sign, 0x1111;
            prmt.b32 place, 0x8000, 0, place;
            or.b32 $0, magnitude, place;
            shr.u32 place, $2, 16;
            and.b32 place, place, 0x7777;
            prmt.b32 magnitude, $3, $4, place;
            shr.u32 sign, sign, 16;
            and.b32 place, sign, 0x1111;
            prmt.b32 place, 0x8000, 0, place;
            or.b32 $1, magnitude, place;
            }
            """,
            "=&r,=&r,r,r,r",
            [codes, low, high],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        first = codes * 0
        second = codes * 0
        for i in tl.static_range(4):
            first |= _byte(codes >> 4 * i, low, high) << 8 * i
            second |= _byte(codes >> (16 + 4 * i), low, high) << 8 * i
    return first, second


@triton.jit
def _reencode_words(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, scales, out, tops, N, words, across, row_step, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    """As `_reencode`, of eight numbers at a time: E2M1 has eight magnitudes, so that a group's are two words of
    E4M3, out of which a code picks. Rows of whole groups are read and written 16 bytes at a time.
    """
    if WHOLE:
        words = tl.multiple_of(words, 4)
    top, own, inside = _top(scales, tops, N, across, row_step, BLOCK)
    apart = tl.where(inside, own - top, 0)
    # 0, ½, 1, 1½ and 2, 3, 4, 6. One more in the exponent is 8 more in the byte of a normal number.
    low = 0x3C383000 + apart * 0x08080800
    high = 0x4C484440 + apart * 0x08080808
    least = tl.min(tl.min(tl.where(own == 255, -128, apart), 1), 0)
    if least < -5:  # ½ is no normal number any more, or a group is NaN
        factor = _factor(own, top)
        low = _shifted(0.0, factor, 0) | _shifted(0.5, factor, 1) | _shifted(1.0, factor, 2)
        low |= _shifted(1.5, factor, 3)
        high = _shifted(2.0, factor, 0) | _shifted(3.0, factor, 1) | _shifted(4.0, factor, 2)
        high |= _shifted(6.0, factor, 3)
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(1) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    codes = tl.load(q + rows[:, None] * words + place[None, :], (rows < N)[:, None] & (place < words)[None, :], 0)
    low = _by_word(low)
    high = _by_word(high)
    first, second = _picked(codes, low, high)
    column = tl.program_id(1) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    there = (rows < N)[:, None] & (column < 2 * words)[None, :]
    tl.store(out + rows[:, None] * (2 * words) + column[None, :], tl.interleave(first, second), there)


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
    groups = scales.shape[1]
    with on(q):
        if K % 8 == 0 and q.data_ptr() % 4 == 0:
            _reencode_words[(down, across)](
                q.view(torch.int32), scales, out.view(torch.int32), tops, N, K // 8, groups, tops.stride(0),
                K % 32 == 0, 128, num_warps=4,
            )  # fmt: skip
        else:
            _reencode[(down, across)](q, scales, out, tops, N, K, width, groups, tops.stride(0), 128, num_warps=8)
    return out, tops
