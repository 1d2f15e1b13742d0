"""Rotary position embedding (Su et al., arXiv 2104.09864) of queries and keys in one launch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from .._common import cdiv, check, choice, dense_like, lined, operator, power_of_2
from .._launch import Launch, prepared, room

HEADS = 2
"""Heads of a program, which share what it read of cos and sin."""

PAIRS = 1024
"""Pairs of a program of four warps: 8 a thread, two 16-byte loads in flight."""


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str = "half"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, k) with each pair (a, b) turned to (a · cos - b · sin, b · cos + a · sin), in new tensors.

    q (B, H, S, D) and k (B, Hkv, S, D) of one dtype, cos and sin (S, D/2) of one dtype, in bf16, fp16 or
    fp32; computed in fp32. Layout "half" pairs dimension i with i + D/2, "interleaved" 2i with 2i + 1.
    Any strides: what has stride 1 in D is read where it lies. Differentiable in q and k. Raises TypeError
    for a wrong type or dtype, ValueError for a wrong shape, device or layout; the message names the argument.
    """
    turned: tuple[torch.Tensor, torch.Tensor] = _rope(q, k, cos, sin, layout, False)
    return turned


def turned_back(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The other way, which is the transpose: gradients before `rope` from those behind it; layout "half"."""
    turned: tuple[torch.Tensor, torch.Tensor] = _rope(q, k, cos, sin, "half", True)
    return turned


def _check(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str, inverse: bool
) -> None:
    check("q", q, dim=4)
    B, _, S, D = q.shape
    if D % 2:
        raise ValueError(f"q has shape {tuple(q.shape)}, expected an even last dimension")
    check("k", k, dim=4, like=q, dtypes=(q.dtype,))
    check("k", k, shape=(B, k.shape[1], S, D))
    check("cos", cos, shape=(S, D // 2), like=q)
    check("sin", sin, shape=(S, D // 2), like=q, dtypes=(cos.dtype,))
    choice("layout", layout, ("half", "interleaved"))


@triton.jit
def _turn(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    y,
    c,
    s,
    head,
    heads,
    b,
    position,
    S,
    x_strides,
    y_strides,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """HEADS heads of a block of positions, (HEADS, positions, BLOCK): all is loaded before anything is stored.

    (a, b) → (a · cos - b · sin, b · cos + a · sin).

    Strides are in units of UNIT elements, so that the compiler knows what it may read at once.
    """
    head = (head + tl.arange(0, HEADS))[:, None, None]
    position = position[None, :, None]
    x += (b * x_strides[0] + head.to(tl.int64) * x_strides[1] + position.to(tl.int64) * x_strides[2]) * UNIT
    y += (b * y_strides[0] + head.to(tl.int64) * y_strides[1] + position.to(tl.int64) * y_strides[2]) * UNIT
    inside = (head < heads) & (position < S)
    if INTERLEAVED:
        # Both of a pair in one 16-byte access; they lie in one thread, so splitting moves nothing.
        col = tl.arange(0, 2 * BLOCK)[None, None, :]
        inside &= col < 2 * HALF
        pair = tl.load(x + col, inside).to(tl.float32)
        first, second = tl.split(tl.reshape(pair, [HEADS, pair.shape[1], BLOCK, 2]))
        turned = tl.join(first * c - second * s, second * c + first * s)
        turned = tl.reshape(turned, [HEADS, pair.shape[1], 2 * BLOCK])
        tl.store(y + col, turned.to(y.dtype.element_ty), inside)
    else:
        col = tl.arange(0, BLOCK)[None, None, :]
        inside &= col < HALF
        first = tl.load(x + col, inside).to(tl.float32)
        second = tl.load(x + HALF + col, inside).to(tl.float32)
        tl.store(y + col, (first * c - second * s).to(y.dtype.element_ty), inside)
        tl.store(y + HALF + col, (second * c + first * s).to(y.dtype.element_ty), inside)


@triton.jit
def _both(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs,
    outputs,
    sizes,
    q_strides,
    k_strides,
    q_out_strides,
    k_out_strides,
    HALF: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """HEADS heads of q or of k at POSITIONS positions a program."""
    q, k, cos, sin = inputs
    q_out, k_out = outputs
    H, Hkv, S = sizes
    groups = tl.cdiv(H, HEADS)
    all_groups = groups + tl.cdiv(Hkv, HEADS)
    blocks = tl.cdiv(S, POSITIONS)
    # Positions run fastest: programs at work together are side by side in memory. cos and sin stay in L2.
    pid = tl.program_id(0)
    position = pid % blocks * POSITIONS + tl.arange(0, POSITIONS)
    group = pid // blocks % all_groups
    b = (pid // (all_groups * blocks)).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, None, :]
    inside = (position < S)[None, :, None] & (col < HALF)
    at = position.to(tl.int64)[None, :, None] * HALF + col
    c = tl.load(cos + at, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    s = tl.load(sin + at, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    if INVERSE:
        s = -s
    # Called twice and not with a chosen pointer, so that the compiler keeps the alignment of each.
    head = group * HEADS
    if head < groups * HEADS:
        _turn(
            q, q_out, c, s, head, H, b, position, S, q_strides, q_out_strides,
            HALF, BLOCK, HEADS, UNIT, INTERLEAVED,
        )  # fmt: skip
    else:
        head -= groups * HEADS
        _turn(
            k, k_out, c, s, head, Hkv, b, position, S, k_strides, k_out_strides,
            HALF, BLOCK, HEADS, UNIT, INTERLEAVED,
        )  # fmt: skip


def _empty(x: torch.Tensor) -> torch.Tensor:
    """Memory for x turned, laid out as x is where that leaves the last dimension dense."""
    y = torch.empty_like(x)
    return y if y.stride(-1) == 1 else dense_like(x)


def _prepare(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str, inverse: bool
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    B, H, S, D = q.shape
    Hkv = k.shape[1]
    if q.numel() == 0 and k.numel() == 0:
        return lambda q, k, *_: (_empty(q), _empty(k))
    block = power_of_2(D // 2)
    positions = power_of_2(max(1, min(PAIRS // (HEADS * block), S)))
    groups = cdiv(H, HEADS) + cdiv(Hkv, HEADS)
    strides = [lined(x).stride()[:3] for x in (q, k)] + [_empty(x).stride()[:3] for x in (q, k)]
    unit = math.gcd(16 // q.element_size(), *(stride for of in strides for stride in of))
    launch = Launch(
        _both,
        (groups * cdiv(S, positions) * B,),
        (H, Hkv, S),
        *(tuple(stride // unit for stride in of) for of in strides),
        HALF=D // 2,
        POSITIONS=positions,
        BLOCK=block,
        HEADS=HEADS,
        UNIT=unit,
        INTERLEAVED=layout == "interleaved",
        INVERSE=inverse,
        num_warps=4,
    )
    device = q.device
    of_q, of_k = (room(x.shape, x.dtype, device, _empty(x).stride()) for x in (q, k))
    copied = not (q.stride(3) == k.stride(3) == 1 and cos.is_contiguous() and sin.is_contiguous())

    def run(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        results = of_q(), of_k()
        if copied:
            q, k, cos, sin = lined(q), lined(k), cos.contiguous(), sin.contiguous()
        launch(device, (q, k, cos, sin), results)
        return results

    return run


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[2:4])
    ctx.layout, ctx.inverse = inputs[4:]


def _backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[Any, ...]:
    """A rotation's transpose turns the other way."""
    return *_rope(dq, dk, *ctx.saved_tensors, ctx.layout, not ctx.inverse), None, None, None, None


_rope = operator(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, str layout, bool inverse) -> (Tensor, Tensor)",
    prepared(_prepare, _check),
    lambda q, k, cos, sin, layout, inverse: (_empty(q), _empty(k)),
    _save,
    _backward,
    check=_check,
)
