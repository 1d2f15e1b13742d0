"""Rotary position embedding (Su et al., arXiv 2104.09864) of queries and keys in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .._common import cdiv, check, choice, dense_like, on, operator, power_of_2

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
    check("q", q, dim=4)
    B, _, S, D = q.shape
    if D % 2:
        raise ValueError(f"q has shape {tuple(q.shape)}, expected an even last dimension")
    check("k", k, dim=4, like=q, dtypes=(q.dtype,))
    check("k", k, shape=(B, k.shape[1], S, D))
    check("cos", cos, shape=(S, D // 2), like=q)
    check("sin", sin, shape=(S, D // 2), like=q, dtypes=(cos.dtype,))
    choice("layout", layout, ("half", "interleaved"))
    turned: tuple[torch.Tensor, torch.Tensor] = _rope(q, k, cos, sin, layout, False)
    return turned


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
    HALF,
    x_b,
    x_h,
    x_s,
    y_b,
    y_h,
    y_s,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """HEADS heads of a block of positions, (HEADS, positions, BLOCK): all is loaded before anything is stored."""
    head = (head + tl.arange(0, HEADS))[:, None, None]
    position = position[None, :, None]
    x += b * x_b + head.to(tl.int64) * x_h + position.to(tl.int64) * x_s
    y += b * y_b + head.to(tl.int64) * y_h + position.to(tl.int64) * y_s
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
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    H,
    Hkv,
    S,
    HALF,
    q_b,
    q_h,
    q_s,
    k_b,
    k_h,
    k_s,
    qo_b,
    qo_h,
    qo_s,
    ko_b,
    ko_h,
    ko_s,
    POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
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
            q, q_out, c, s, head, H, b, position, S, HALF,
            q_b, q_h, q_s, qo_b, qo_h, qo_s, BLOCK, HEADS, INTERLEAVED,
        )  # fmt: skip
    else:
        _turn(
            k, k_out, c, s, head - groups * HEADS, Hkv, b, position, S, HALF,
            k_b, k_h, k_s, ko_b, ko_h, ko_s, BLOCK, HEADS, INTERLEAVED,
        )  # fmt: skip


def _empty(x: torch.Tensor) -> torch.Tensor:
    """Memory for x turned, laid out as x is where that leaves the last dimension dense."""
    y = torch.empty_like(x)
    return y if y.stride(-1) == 1 else dense_like(x)


def _launch(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out, k_out = _empty(q), _empty(k)
    B, H, S, D = q.shape
    Hkv = k.shape[1]
    if q.numel() == 0 and k.numel() == 0:
        return q_out, k_out
    if q.stride(-1) != 1:
        q = q.contiguous()
    if k.stride(-1) != 1:
        k = k.contiguous()
    block = power_of_2(D // 2)
    positions = power_of_2(max(1, min(PAIRS // (HEADS * block), S)))
    groups = cdiv(H, HEADS) + cdiv(Hkv, HEADS)
    with on(q):
        _both[(groups * cdiv(S, positions) * B,)](
            q,
            k,
            cos.contiguous(),
            sin.contiguous(),
            q_out,
            k_out,
            H,
            Hkv,
            S,
            D // 2,
            *q.stride()[:3],
            *k.stride()[:3],
            *q_out.stride()[:3],
            *k_out.stride()[:3],
            POSITIONS=positions,
            BLOCK=block,
            HEADS=HEADS,
            INTERLEAVED=layout == "interleaved",
            INVERSE=inverse,
            num_warps=4,
        )
    return q_out, k_out


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[2:4])
    ctx.layout, ctx.inverse = inputs[4:]


def _backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[Any, ...]:
    """A rotation's transpose turns the other way."""
    return *_rope(dq, dk, *ctx.saved_tensors, ctx.layout, not ctx.inverse), None, None, None, None


_rope = operator(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, str layout, bool inverse) -> (Tensor, Tensor)",
    _launch,
    lambda q, k, cos, sin, layout, inverse: (_empty(q), _empty(k)),
    _save,
    _backward,
)
