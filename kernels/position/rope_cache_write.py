"""Rotary positions of new tokens and their keys and values into a paged cache, in one launch.

A decode step has a few thousand of these numbers a sequence: one kernel in place of one that turns, two that
look up tables and two that write takes the time of a launch. Positions and places are read on the device, and the
launch follows from shapes alone: a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._common import cdiv, check, choice, on, operator, power_of_2

NUMBERS = 1024
"""Numbers of a program of four warps: 16 bytes a thread."""


def rope_cache_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    layout: str = "half",
) -> torch.Tensor:
    """q turned by its positions, contiguous; k, turned, and v are written to the caches, in place.

    q (B, Sq, H, D), k and v (B, Sq, Hkv, D) and the caches (pages, page, Hkv, D) in one of bf16, fp16 and fp32;
    cos and sin (positions, D/2) of one dtype. `block_table` (B, n) int32 gives sequence b its pages, `lengths`
    (B,) int32 counts its tokens, the Sq new ones included and last: token i is at position length − Sq + i. Each
    pair (a, b) becomes (a · cos − b · sin, b · cos + a · sin), computed in fp32; layout "half" pairs dimension i
    with i + D/2, "interleaved" 2i with 2i + 1. q, k, v and the caches may have any strides but in D.

    Positions, lengths and pages beyond the tables and the cache are not checked, because that would wait for the
    device; of two tokens that share a place, either is kept. Not differentiable. Raises TypeError for a wrong type
    or dtype, ValueError for a wrong shape, device or layout; the message names the argument.
    """
    check("q", q, dim=4)
    B, Sq, _, D = q.shape
    if D % 2:
        raise ValueError(f"q has shape {tuple(q.shape)}, expected an even last dimension")
    check("k", k, dim=4, like=q, dtypes=(q.dtype,))
    heads = k.shape[2]
    check("k", k, shape=(B, Sq, heads, D))
    check("v", v, shape=k.shape, like=q, dtypes=(q.dtype,))
    check("cos", cos, dim=2, like=q)
    check("cos", cos, shape=(cos.shape[0], D // 2))
    check("sin", sin, shape=cos.shape, like=q, dtypes=(cos.dtype,))
    check("k_cache", k_cache, dim=4, like=q, dtypes=(q.dtype,))
    check("k_cache", k_cache, shape=(*k_cache.shape[:2], heads, D))
    check("v_cache", v_cache, shape=k_cache.shape, like=q, dtypes=(q.dtype,))
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(3) != 1 and D > 1:
            raise ValueError(f"{name} has stride {x.stride(3)} in its last dimension, expected 1")
    check("block_table", block_table, dim=2, dtypes=(torch.int32,), like=q)
    check("block_table", block_table, shape=(B, block_table.shape[1]), dtypes=(torch.int32,))
    check("lengths", lengths, shape=(B,), dtypes=(torch.int32,), like=q)
    choice("layout", layout, ("half", "interleaved"))
    turned: torch.Tensor = _write(q, k, v, cos, sin, k_cache, v_cache, block_table, lengths, layout)
    return turned


@triton.jit
def _turn(x, y, c, s, head, heads, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, strides):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Heads (HEADS,) of one token: (a, b) → (a · cos − b · sin, b · cos + a · sin) from x to y."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads)[:, None] & (column < HALF)
    if INTERLEAVED:
        first_at = 2 * column
        second_at = first_at + 1
    else:
        first_at = column
        second_at = column + HALF
    x += head.to(tl.int64)[:, None] * strides[0]
    y += head.to(tl.int64)[:, None] * strides[1]
    first = tl.load(x + first_at, inside, 0.0).to(tl.float32)
    second = tl.load(x + second_at, inside, 0.0).to(tl.float32)
    tl.store(y + first_at, (first * c - second * s).to(y.dtype.element_ty), inside)
    tl.store(y + second_at, (second * c + first * s).to(y.dtype.element_ty), inside)


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, cos, sin, k_cache, v_cache, table, lengths, out, sizes, q_strides, k_strides, v_strides, k_places,
    v_places, HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """HEADS heads of q, of k or of v, of one token, a program. Strides are those of sequence (of the caches:
    page), token and head; the last of the sizes is the places of a row of the table.
    """
    Sq, H, Hkv, page, across = sizes
    token = tl.program_id(0)
    batch = (token // Sq).to(tl.int64)
    i = token % Sq
    position = tl.load(lengths + batch) - Sq + i
    group = tl.program_id(1)
    groups = tl.cdiv(H, HEADS)
    key_groups = tl.cdiv(Hkv, HEADS)
    head = tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)[None, :]
    at = position.to(tl.int64) * HALF + column
    c = tl.load(cos + at, column < HALF, 0.0).to(tl.float32)
    s = tl.load(sin + at, column < HALF, 0.0).to(tl.float32)
    if group < groups:
        x = q + batch * q_strides[0] + i.to(tl.int64) * q_strides[1]
        y = out + token.to(tl.int64) * H * (2 * HALF)
        strides = q_strides[2], 2 * HALF
        _turn(x, y, c, s, head + group * HEADS, H, HALF, BLOCK, INTERLEAVED, strides)
    else:
        place = tl.load(table + batch * across + position // page).to(tl.int64)
        within = (position % page).to(tl.int64)
        group -= groups
        if group < key_groups:
            x = k + batch * k_strides[0] + i.to(tl.int64) * k_strides[1]
            y = k_cache + place * k_places[0] + within * k_places[1]
            strides = k_strides[2], k_places[2]
            _turn(x, y, c, s, head + group * HEADS, Hkv, HALF, BLOCK, INTERLEAVED, strides)
        else:
            head += (group - key_groups) * HEADS
            wide = tl.arange(0, 2 * BLOCK)[None, :]
            inside = (head < Hkv)[:, None] & (wide < 2 * HALF)
            x = v + batch * v_strides[0] + i.to(tl.int64) * v_strides[1]
            y = v_cache + place * v_places[0] + within * v_places[1]
            value = tl.load(x + head.to(tl.int64)[:, None] * v_strides[2] + wide, inside, 0.0)
            tl.store(y + head.to(tl.int64)[:, None] * v_places[2] + wide, value, inside)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    layout: str,
) -> torch.Tensor:
    B, Sq, H, D = q.shape
    Hkv = k.shape[2]
    out = torch.empty((B, Sq, H, D), dtype=q.dtype, device=q.device)
    if q.numel() == 0 and k.numel() == 0:
        return out
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    block = power_of_2(D // 2)
    heads = power_of_2(max(1, min(NUMBERS // (2 * block), H)))
    with on(q):
        _kernel[B * Sq, cdiv(H, heads) + 2 * cdiv(Hkv, heads)](
            q, k, v, cos.contiguous(), sin.contiguous(), k_cache, v_cache, block_table.contiguous(),
            lengths.contiguous(), out, (Sq, H, Hkv, k_cache.shape[1], block_table.shape[1]),
            q.stride()[:3], k.stride()[:3], v.stride()[:3], k_cache.stride()[:3], v_cache.stride()[:3],
            D // 2, block, heads, layout == "interleaved", num_warps=4,
        )  # fmt: skip
    return out


_write = operator(
    "rope_cache_write(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor block_table, Tensor lengths, str layout) -> Tensor",
    _launch,
    lambda q, *_: torch.empty(q.shape, dtype=q.dtype, device=q.device),
)
