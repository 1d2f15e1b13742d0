"""Queries, keys and values of one token, for a step of decoding: the RMS norm of a row times their weights, rotary
positions and the paged cache in one launch, so that what is a few numbers is no launch of its own.

A program has pairs of rows of the weight, those of dimensions i and i + D/2 of a head, which turn with each other.
As in `_few_rows.py` a row is multiplied outside of the matrix units, and what is in flight decides how fast a
weight is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, check, operator, power_of_2
from .._launch import Launch, prepared, room
from ._few_rows import check_norm, check_row

PAIRS = 4
"""Pairs of rows of a program."""
STEP = 32 if INTERPRETED else 256
"""Numbers of each at a time."""
STAGES, WARPS = 6, 2


def row_turned(
    h: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor,
    b: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    eps: float = 1e-6,
) -> torch.Tensor:
    """`rope_cache_write` of one new token whose queries, keys and values are `row_normed(h, squares, weight, b)`,
    one behind the other, rounded as by itself: the turned queries (1, 1, H, D), contiguous; caches are written in
    place.

    h (1, K), squares, weight (K,) and b (K, (H + 2 · Hkv) · D) as there; cos and sin (positions, D/2) of one
    dtype, the caches (pages, page, Hkv, D) of h's, `block_table` (1, n) and `lengths` (1,) in int32 as in
    `rope_cache_write`, by its layout "half". D/2 is a multiple of 4. Not differentiable. Raises TypeError for a
    wrong type or dtype, ValueError for a wrong shape, layout or device; the message names the argument.
    NotImplementedError where `rows_here` says no.
    """
    q: torch.Tensor = _row_turned(h, squares, weight, b, cos, sin, k_cache, v_cache, block_table, lengths, eps)
    return q


def turns(head: int) -> bool:
    """Whether heads of so many dimensions are turned so."""
    return head % (2 * PAIRS) == 0


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    row,
    weight,
    tables,
    out,
    caches,
    where,
    sizes,
    k_places,
    v_places,
    weight_lead,
    eps,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """PAIRS pairs of one head a program. Strides of the caches are those of page, token and head."""
    h, gain, squares = row
    cos, sin = tables
    k_cache, v_cache = caches
    table, lengths = where
    K, H, Hkv, page, parts = sizes
    head = tl.program_id(0) // (HALF // PAIRS)
    pair = tl.program_id(0) % (HALF // PAIRS) * PAIRS + tl.arange(0, PAIRS)
    depth = tl.arange(0, STEP)[None, :]
    at = weight + (head * (2 * HALF) + pair).to(tl.int64)[:, None] * weight_lead + depth
    other = tl.cast(HALF, tl.int64) * weight_lead
    first = tl.zeros([PAIRS, STEP], tl.float32)
    second = tl.zeros([PAIRS, STEP], tl.float32)
    for k in tl.range(0, tl.cdiv(K, STEP), num_stages=STAGES):
        here = k * STEP + depth
        if EVEN:
            z = tl.load(h + here).to(tl.float32) * tl.load(gain + here).to(tl.float32)
            y = tl.load(at)
            y_other = tl.load(at + other)
        else:
            z = tl.load(h + here, here < K, 0.0).to(tl.float32) * tl.load(gain + here, here < K, 0.0).to(
                tl.float32
            )
            y = tl.load(at, here < K, 0.0)
            y_other = tl.load(at + other, here < K, 0.0)
        first += y.to(tl.float32) * z
        second += y_other.to(tl.float32) * z
        at += STEP
    # y = h / √(Σ h² / K + ε) · w, and y · weightᵀ: the root is the same for all of K.
    part = tl.arange(0, PARTS)
    rstd = 1.0 / tl.sqrt(tl.sum(tl.load(squares + part, part < parts, 0.0), 0) / K + eps)
    a = (tl.sum(first, 1) * rstd).to(out.dtype.element_ty).to(tl.float32)
    b = (tl.sum(second, 1) * rstd).to(out.dtype.element_ty).to(tl.float32)
    position = (tl.load(lengths) - 1).to(tl.int64)
    if head < H + Hkv:
        # (a, b) → (a · cos − b · sin, b · cos + a · sin)
        c = tl.load(cos + position * HALF + pair).to(tl.float32)
        s = tl.load(sin + position * HALF + pair).to(tl.float32)
        turned = a * c - b * s
        b = b * c + a * s
        a = turned
    a = a.to(out.dtype.element_ty)
    b = b.to(out.dtype.element_ty)
    if head < H:
        y = out + head * (2 * HALF) + pair
        tl.store(y, a)
        tl.store(y + HALF, b)
    else:
        place = tl.load(table + position // page).to(tl.int64)
        within = position % page
        if head < H + Hkv:
            y = k_cache + place * k_places[0] + within * k_places[1] + (head - H).to(tl.int64) * k_places[2] + pair
            tl.store(y, a)
            tl.store(y + HALF, b)
        else:
            y = (
                v_cache
                + place * v_places[0]
                + within * v_places[1]
                + (head - H - Hkv).to(tl.int64) * v_places[2]
                + pair
            )
            tl.store(y, a)
            tl.store(y + HALF, b)


def _heads(b: torch.Tensor, k_cache: torch.Tensor) -> tuple[int, int, int]:
    """H, Hkv and D."""
    Hkv, D = k_cache.shape[2:]
    return b.shape[1] // max(D, 1) - 2 * Hkv, Hkv, D


def _check(h: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, b: torch.Tensor, *others: Any) -> None:
    cos, sin, k_cache, v_cache, block_table, lengths, _ = others
    check_row("h", h, b)
    check_norm(squares, weight, h)
    check("k_cache", k_cache, dim=4, like=h, dtypes=(h.dtype,))
    check("v_cache", v_cache, shape=k_cache.shape, like=h, dtypes=(h.dtype,))
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(3) != 1:
            raise ValueError(f"{name} has stride {x.stride(3)} in its last dimension, expected 1")
    H, Hkv, D = _heads(b, k_cache)
    if not turns(D):
        raise ValueError(
            f"k_cache has shape {tuple(k_cache.shape)}, expected a multiple of {2 * PAIRS} at the end"
        )
    if H < 1 or b.shape[1] != (H + 2 * Hkv) * D:
        raise ValueError(
            f"b has shape {tuple(b.shape)}, expected whole heads of {D}, {2 * Hkv} of keys and values"
        )
    check("cos", cos, dim=2, like=h)
    check("cos", cos, shape=(cos.shape[0], D // 2))
    check("sin", sin, shape=cos.shape, like=h, dtypes=(cos.dtype,))
    check("block_table", block_table, dim=2, like=h, dtypes=(torch.int32,))
    check("block_table", block_table, shape=(1, block_table.shape[1]), dtypes=(torch.int32,))
    check("lengths", lengths, shape=(1,), like=h, dtypes=(torch.int32,))


def _prepare(
    h: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, b: torch.Tensor, *others: Any
) -> Callable[..., torch.Tensor]:
    k_cache, v_cache, eps = others[2], others[3], float(others[-1])
    H, Hkv, D = _heads(b, k_cache)
    K, device = h.shape[1], h.device
    made = room((1, 1, H, D), h.dtype, device)
    launch = Launch(
        _kernel,
        ((H + 2 * Hkv) * (D // (2 * PAIRS)),),
        (K, H, Hkv, k_cache.shape[1], len(squares)),
        k_cache.stride()[:3],
        v_cache.stride()[:3],
        b.stride(1),
        eps,
        HALF=D // 2,
        PAIRS=PAIRS,
        STEP=STEP,
        STAGES=STAGES,
        PARTS=power_of_2(len(squares)),
        EVEN=K % STEP == 0,
        num_warps=WARPS,
    )

    def run(
        h: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, b: torch.Tensor, *others: Any
    ) -> torch.Tensor:
        cos, sin, k_cache, v_cache, block_table, lengths, _ = others
        q = made()
        row = h.contiguous(), weight.contiguous(), squares.contiguous()
        tables = cos.contiguous(), sin.contiguous()
        launch(device, row, b.t(), tables, q, (k_cache, v_cache), (block_table.contiguous(), lengths))
        return q

    return run


def _empty(h: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor, b: torch.Tensor, *others: Any) -> Any:
    H, _, D = _heads(b, others[2])
    return h.new_empty(1, 1, H, D)


_row_turned = operator(
    "matmul_row_turned(Tensor h, Tensor squares, Tensor weight, Tensor b, Tensor cos, Tensor sin, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_table, Tensor lengths, float eps) -> Tensor",
    prepared(_prepare, _check),
    _empty,
    check=_check,
)
