"""Quantization to the block formats MXFP8, MXFP4 and NVFP4: one read, one write.

The formats are those of the OCP Microscaling specification 1.0 (Rouhani et al., arXiv 2310.10537) and NVIDIA's
NVFP4 (arXiv 2509.25149). Elements are rounded to nearest even. The four-bit format E2M1 has the magnitudes 0, ½,
1, 1½, 2, 3, 4, 6 for the codes 0 to 7; hardware before Blackwell cannot convert to it, so codes are computed: that
of a magnitude y is the rounded minimum of the lines 2y, y + 2 and y / 2 + 4. The last may be flatter where it
crosses 6½, between the codes 6 and 7, and then needs no bound at 7.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, cdiv, check, choice, needs_e4m3, on, on_e4m3, operator, rows

GROUPS = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
"""Columns that share a scale."""

LARGEST = {"mxfp8": 448.0, "mxfp4": 6.0, "nvfp4": 6.0}
"""Largest number of the elements' format."""

TILE = 256 if INTERPRETED else 4096
"""Elements of a program."""

WARPS = 4

PAIRS = (
    {"mxfp4": (64, 1, 2), "nvfp4": (64, 1, 2)} if INTERPRETED else {"mxfp4": (2048, 2, 2), "nvfp4": (2048, 4, 4)}
)
"""Elements at a time, warps and rounds of a program that makes four bits of pairs: 0.94 and 0.89 of a copy's speed
at 16384×4096 on an H200, with one round 0.84 and 0.79.
"""


def mx_quant(
    x: torch.Tensor, format: str = "mxfp8", scale: torch.Tensor | None = None, rounding: str = "floor"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales) with q · scales ≈ x for "mxfp8" and "mxfp4", q · scales · scale ≈ x for "nvfp4".

    x (…, N) in bf16, fp16 or fp32.

    ========  ==========================================  ====================================================
    format    q                                           scales
    ========  ==========================================  ====================================================
    mxfp8     float8_e4m3fn (…, N)                        float8_e8m0fnu (…, ceil(N/32)), powers of two
    mxfp4     float4_e2m1fn_x2 (…, ceil(N/2))             float8_e8m0fnu (…, ceil(N/32)), powers of two
    nvfp4     float4_e2m1fn_x2 (…, ceil(N/2))             float8_e4m3fn (…, ceil(N/16))
    ========  ==========================================  ====================================================

    The element with the lower column is in the lower four bits of a byte; scales are row-major. With `rounding`
    "floor" a power of two is that of the specification, 2^(floor(log2(largest magnitude)) - 8) for E4M3 and - 2
    for E2M1, and what is then beyond the format's largest number becomes that number; with "up" it is the smallest
    that leaves nothing beyond (Mishra et al., arXiv 2506.08027). "nvfp4" rounds the group's largest magnitude /
    (6 · scale) to the nearest E4M3 and needs `scale`, fp32 with one element, usually x's largest magnitude /
    (6 · 448). The scale of a group with a NaN or, for powers of two, an infinity is NaN.
    Not differentiable.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or option; the message names
    the argument.
    """
    check("x", x)
    if x.dim() == 0:
        raise ValueError("x has shape (), expected at least one dimension")
    choice("format", format, tuple(GROUPS))
    choice("rounding", rounding, ("floor", "up"))
    if format == "nvfp4":
        check("scale", scale, like=x, dtypes=(torch.float32,))
        assert scale is not None
        if scale.numel() != 1:
            raise ValueError(f"scale has shape {tuple(scale.shape)}, expected one element")
    elif scale is not None:
        raise ValueError(f"scale is given, but {format} has none")
    q, scales = _mx_quant(x, format, scale, rounding)
    return (
        q.view(torch.float8_e4m3fn if format == "mxfp8" else torch.float4_e2m1fn_x2),
        scales.view(torch.float8_e4m3fn if format == "nvfp4" else torch.float8_e8m0fnu),
    )


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]  # Triton's types are its own
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _codes(y, EXACT: tl.constexpr, CLAMP: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Codes of magnitudes 0 ≤ y < 8 (any with CLAMP) in the four-bit format, in the lowest bits of an integer.

    The lines are exact for numbers of bf16 and fp16; of fp32 they could round a number beside a tie onto it.
    """
    if EXACT:
        code = (y > 0.25).to(tl.int32) + (y >= 0.75).to(tl.int32) + (y > 1.25).to(tl.int32)
        code += (y >= 1.75).to(tl.int32) + (y > 2.5).to(tl.int32) + (y >= 3.5).to(tl.int32)
        return code + (y > 5.0).to(tl.int32)
    if CLAMP:
        y = tl.minimum(y, 8.0)
    half = tl.minimum(tl.minimum(y, 0.5 * y + 1.0), 0.125 * y + 2.625)
    # The sum with 2^23 has the rounded number in its lowest bits.
    return (2.0 * half + 8388608.0).to(tl.int32, bitcast=True)


@triton.jit
def _factors(  # type: ignore[no-untyped-def]  # Triton's types are its own
    largest, scale, NIBBLES: tl.constexpr, POWER: tl.constexpr, UP: tl.constexpr
):
    """Scales of groups, as bytes, and 1 / what they stand for, from the groups' largest magnitudes."""
    if POWER:
        bits = largest.to(tl.int32, bitcast=True)
        exponent = bits >> 23
        if NIBBLES:
            power = exponent - 2
            if UP:
                power += ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)
        else:
            power = exponent - 8
            if UP:
                power += ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        power = tl.where(exponent == 255, 255, tl.maximum(power, 0))
        factor = tl.where(exponent == 255, 0x7FC00000, (254 - power) << 23).to(tl.float32, bitcast=True)
        return power.to(tl.uint8), factor
    whole = tl.load(scale)
    # Of a tensor of zeros the scale over all is 0 as well, and 0 / 0 no number.
    wanted = tl.where(largest == 0.0, 0.0, largest / (6.0 * whole))
    wanted = tl.where(wanted > 448.0, 448.0, wanted)
    part = on_e4m3(wanted) * whole
    return wanted.to(tl.float8e4nv).to(tl.uint8, bitcast=True), tl.where(part == 0.0, 0.0, 1.0 / part)


@triton.jit
def _quantize(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    q,
    scales,
    scale,
    N,
    width,
    across,
    blocks,
    stride,
    GROUP: tl.constexpr,
    COUNT: tl.constexpr,
    NIBBLES: tl.constexpr,
    POWER: tl.constexpr,
    UP: tl.constexpr,
    EXACT: tl.constexpr,
    HINT: tl.constexpr,
):
    """COUNT groups of one row: scales, then elements. POWER: scales are powers of two, in E8M0."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * COUNT
    left = tl.minimum(N - first * GROUP, COUNT * GROUP).to(tl.int32)
    groups = tl.arange(0, COUNT)
    col = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x + row * stride + first * GROUP + col, col < left, 0.0, eviction_policy=HINT).to(tl.float32)
    power, factor = _factors(tl.reduce(tl.abs(value), 1, _larger), scale, NIBBLES, POWER, UP)
    tl.store(scales + row * across + first + groups, power, groups < tl.cdiv(left, GROUP))
    if NIBBLES:
        code = _codes(tl.abs(value) * factor[:, None], EXACT, not POWER)
        code |= (value.to(tl.int32, bitcast=True) >> 28) & 8
        even, odd = tl.split(tl.reshape(code, [COUNT, GROUP // 2, 2]))
        byte = groups[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        left = tl.minimum(width - first * (GROUP // 2), COUNT * GROUP // 2).to(tl.int32)
        at = row * width + first * (GROUP // 2) + byte
        tl.store(q + at, (even | (odd << 4)).to(tl.uint8), byte < left, eviction_policy=HINT)
    else:
        y = value * factor[:, None]
        y = tl.minimum(y, 448.0, propagate_nan=tl.PropagateNan.ALL)
        y = tl.maximum(y, -448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
        tl.store(q + row * N + first * GROUP + col, y.to(tl.uint8, bitcast=True), col < left, eviction_policy=HINT)


@triton.jit
def _quantize_pairs(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    q,
    scales,
    scale,
    width,
    across,
    blocks,
    stride,
    GROUP: tl.constexpr,
    COUNT: tl.constexpr,
    LOOP: tl.constexpr,
    HALF: tl.constexpr,
    POWER: tl.constexpr,
    UP: tl.constexpr,
    HINT: tl.constexpr,
):
    """As `_quantize` to four bits, for pairs of bf16 (fp16 with HALF) read as integers: a quarter fewer
    instructions, which are what this takes its time for. `width` is the number of pairs of a row, `stride` that
    from row to row. A program has LOOP times COUNT groups and reads the next ones before it works on these.
    """
    row = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * (COUNT * LOOP)
    x += row * stride + first * (GROUP // 2)
    q += row * width + first * (GROUP // 2)
    scales += row * across + first
    left = tl.minimum(width - first * (GROUP // 2), COUNT * LOOP * GROUP // 2).to(tl.int32)
    groups = tl.arange(0, COUNT)
    pair = groups[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    following = tl.load(x + pair, pair < left, 0, eviction_policy=HINT)
    for index in tl.static_range(LOOP):
        both = following
        at = index * (COUNT * GROUP // 2) + pair
        if index + 1 < LOOP:
            later = at + COUNT * GROUP // 2
            following = tl.load(x + later, later < left, 0, eviction_policy=HINT)
        if HALF:
            even = tl.abs(both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
            odd = tl.abs((both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))
        else:
            # A bf16 is the upper half of an fp32.
            even = tl.abs((both << 16).to(tl.float32, bitcast=True))
            odd = tl.abs((both & -65536).to(tl.float32, bitcast=True))
        power, factor = _factors(tl.reduce(_larger(even, odd), 1, _larger), scale, True, POWER, UP)
        group = index * COUNT + groups
        tl.store(scales + group, power, group * (GROUP // 2) < left)
        codes = _codes(even * factor[:, None], False, not POWER)
        codes += _codes(odd * factor[:, None], False, not POWER) << 16
        # Codes are at bits 0 and 16, signs at 15 and 31: those come to 3 and 19, and the upper four bits to 4.
        codes |= (both >> 12) & 0x80008
        tl.store(q + at, (codes + (codes >> 12)).to(tl.uint8), at < left, eviction_policy=HINT)


def _empty(
    x: torch.Tensor, format: str, scale: torch.Tensor | None, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for q and scales, as bytes."""
    *rest, N = x.shape
    width = N if format == "mxfp8" else -(-N // 2)
    return (
        torch.empty(*rest, width, dtype=torch.uint8, device=x.device),
        torch.empty(*rest, -(-N // GROUPS[format]), dtype=torch.uint8, device=x.device),
    )


def _launch(
    x: torch.Tensor,
    format: str,
    scale: torch.Tensor | None,
    rounding: str,
    tile: int = TILE,
    warps: int = WARPS,
    hint: str = "evict_first",
    pair_tile: int | None = None,
    pair_warps: int | None = None,
    loop: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, scales = _empty(x, format, scale, rounding)
    if x.numel() == 0:
        return q, scales
    needs_e4m3("mx_quant", x)
    group = GROUPS[format]
    flat = rows(x)
    if flat.shape[1] % group == 0 and flat.is_contiguous():
        # Groups do not know rows: one row, and no programs that end with it.
        flat = flat.view(1, -1)
    M, N = flat.shape
    across = cdiv(N, group)
    options: dict[str, Any] = {"GROUP": group, "POWER": format != "nvfp4", "UP": rounding == "up", "HINT": hint}
    whole = scales if scale is None else scale
    pairs = format != "mxfp8" and x.dtype != torch.float32 and N % 2 == 0 and flat.stride(0) % 2 == 0
    if pairs and flat.data_ptr() % 4 == 0:
        both = flat.view(torch.int32)
        pair_tile, pair_warps, loop = (
            y if x is None else x for x, y in zip((pair_tile, pair_warps, loop), PAIRS[format], strict=True)
        )
        blocks = cdiv(across, pair_tile // group * loop)
        with on(x):
            _quantize_pairs[(M * blocks,)](
                both,
                q,
                scales,
                whole,
                N // 2,
                across,
                blocks,
                both.stride(0),
                COUNT=pair_tile // group,
                LOOP=loop,
                HALF=x.dtype == torch.float16,
                **options,
                num_warps=pair_warps,
            )
        return q, scales
    blocks = cdiv(across, tile // group)
    with on(x):
        _quantize[(M * blocks,)](
            flat,
            q,
            scales,
            whole,
            N,
            q.numel() // M,
            across,
            blocks,
            flat.stride(0),
            COUNT=tile // group,
            NIBBLES=format != "mxfp8",
            EXACT=x.dtype == torch.float32 and format == "mxfp4",
            **options,
            num_warps=warps,
        )
    return q, scales


_mx_quant = operator(
    "mx_quant(Tensor x, str format, Tensor? scale, str rounding) -> (Tensor, Tensor)", _launch, _empty
)
