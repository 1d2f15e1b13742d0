"""Queries, keys and values of one token of each of few sequences, for a step of decoding: an RMS norm times their
weights, rotary positions and the paged cache in one launch, so that what is a few numbers is no launch of its own.

A program has pairs of rows of the weight, those of dimensions i and i + D/2 of a head, which turn with each other:
a tile of `_few_rows.py` that is otherwise finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from .._common import cdiv, check, lined, multiprocessors, operator
from .._launch import Launch, prepared, room
from . import _few_rows as few_rows
from ._few_rows import check_rows, check_squares, of_weight, reciprocal_root

PAIRS = few_rows.OF_ONE // 2
"""Pairs of rows of a program for one sequence."""


def rows_turned(
    y: torch.Tensor,
    squares: torch.Tensor,
    b: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    eps: float = 1e-6,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rope_cache_write` of one new token of each of M sequences whose queries, keys and values are
    `rows_normed(y, squares, b)`, one behind the other, rounded as by itself: the turned queries (M, 1, H, D),
    contiguous; caches are written in place.

    y (M, K), squares (M, parts), b (K, (H + 2 · Hkv) · D) and its scale as there; cos and sin (positions, D/2) of
    one dtype, the caches (pages, page, Hkv, D) of y's, `block_table` (M, n) and `lengths` (M,) in int32 as in
    `rope_cache_write`, by its layout "half". D/2 is a multiple of 4. Not differentiable. Raises TypeError for a
    wrong type or dtype, ValueError for a wrong shape, layout or device; the message names the argument.
    NotImplementedError where `rows_here` says no.
    """
    q: torch.Tensor = _rows_turned(y, squares, b, cos, sin, k_cache, v_cache, block_table, lengths, eps, scale)
    return q


def turns(head: int) -> bool:
    """Whether heads of so many dimensions are turned so."""
    return head % (2 * PAIRS) == 0


@triton.jit(do_not_specialize=["M"])
def _kernel(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, weight, beside, tables, out, caches, where, M, K, sizes, k_places, v_places, x_lead, weight_lead,
    table_lead, eps, HALF: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Pairs of one head a program, COLUMNS rows of the weight, with its scales. Strides of the caches are those of
    page, token and head.
    """
    squares, scales = beside
    cos, sin = tables
    k_cache, v_cache = caches
    table, lengths = where
    H, Hkv, page = sizes
    COLUMNS: tl.constexpr = c.columns
    ROWS: tl.constexpr = c.rows
    PAIRS: tl.constexpr = COLUMNS // 2
    EACH: tl.constexpr = (HALF + PAIRS - 1) // PAIRS
    head = tl.program_id(0) // EACH
    first = tl.program_id(0) % EACH * PAIRS
    # The first of all pairs, then the second. Beyond the last one of a head, that one is read again, not written.
    column = tl.arange(0, COLUMNS)
    held = head * (2 * HALF) + column // PAIRS * HALF + tl.minimum(first + column % PAIRS, HALF - 1)
    acc, _ = of_weight(x, weight, held.to(tl.int64), 0, M, K, x_lead, weight_lead, c)
    if c.e4m3:
        acc = acc * tl.load(scales + held)[:, None]
    # y = h / √(Σ h² / K + ε) · w and y · weightᵀ, x being h · w: the root is the same for all of K.
    acc = (acc * reciprocal_root(squares, M, K, eps, ROWS, c.normed)).to(out.dtype.element_ty).to(tl.float32)
    a, b = tl.split(tl.permute(tl.reshape(acc, [2, PAIRS, ROWS]), [1, 2, 0]))
    row = tl.arange(0, ROWS)[None, :]
    pair = first + tl.arange(0, PAIRS)[:, None]
    there = (row < M) & (pair < HALF)
    position = (tl.load(lengths + row, row < M, 1) - 1).to(tl.int64)
    if head < H + Hkv:
        # (a, b) → (a · cos − b · sin, b · cos + a · sin)
        at = position * HALF + pair
        turn_cos = tl.load(cos + at, there, 0.0).to(tl.float32)
        turn_sin = tl.load(sin + at, there, 0.0).to(tl.float32)
        turned = a * turn_cos - b * turn_sin
        b = b * turn_cos + a * turn_sin
        a = turned
    a = a.to(out.dtype.element_ty)
    b = b.to(out.dtype.element_ty)
    if head < H:
        q = out + (row.to(tl.int64) * H + head) * (2 * HALF) + pair
        tl.store(q, a, there)
        tl.store(q + HALF, b, there)
    else:
        place = tl.load(table + row.to(tl.int64) * table_lead + position // page, row < M, 0).to(tl.int64)
        within = position % page
        if head < H + Hkv:
            k = k_cache + place * k_places[0] + within * k_places[1] + (head - H).to(tl.int64) * k_places[2] + pair
            tl.store(k, a, there)
            tl.store(k + HALF, b, there)
        else:
            v = (
                v_cache
                + place * v_places[0]
                + within * v_places[1]
                + (head - H - Hkv).to(tl.int64) * v_places[2]
                + pair
            )
            tl.store(v, a, there)
            tl.store(v + HALF, b, there)


def _heads(b: torch.Tensor, k_cache: torch.Tensor) -> tuple[int, int, int]:
    """H, Hkv and D."""
    Hkv, D = k_cache.shape[2:]
    return b.shape[1] // max(D, 1) - 2 * Hkv, Hkv, D


def _check(y: torch.Tensor, squares: torch.Tensor, b: torch.Tensor, *others: Any) -> None:
    cos, sin, k_cache, v_cache, block_table, lengths, _, scale = others
    check_rows("y", y, b, scale)
    check_squares(squares, y)
    if y.shape[1] == 0:
        raise ValueError(f"y has shape {tuple(y.shape)}, expected numbers to multiply")
    check("k_cache", k_cache, dim=4, like=y, dtypes=(y.dtype,))
    check("v_cache", v_cache, shape=k_cache.shape, like=y, dtypes=(y.dtype,))
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
    check("cos", cos, dim=2, like=y)
    check("cos", cos, shape=(cos.shape[0], D // 2))
    check("sin", sin, shape=cos.shape, like=y, dtypes=(cos.dtype,))
    check("block_table", block_table, dim=2, like=y, dtypes=(torch.int32,))
    check("block_table", block_table, shape=(len(y), block_table.shape[1]), dtypes=(torch.int32,))
    check("lengths", lengths, shape=(len(y),), like=y, dtypes=(torch.int32,))


def _prepare(y: torch.Tensor, squares: torch.Tensor, b: torch.Tensor, *others: Any) -> Callable[..., torch.Tensor]:
    k_cache, v_cache, eps = others[2], others[3], float(others[6])
    (M, K), (H, Hkv, D), device = y.shape, _heads(b, k_cache), y.device
    made = room((M, 1, H, D), y.dtype, device)
    heads, half = H + 2 * Hkv, D // 2
    chosen, warps = few_rows.tile(
        M, heads * D, K, False, False, multiprocessors(y), few_rows.room(device), b.element_size()
    )
    chosen = replace(few_rows.interpreted(chosen, K), normed=squares.shape[1])
    launch = Launch(
        _kernel,
        (heads * cdiv(half, chosen.columns // 2),),
        M,
        K,
        (H, Hkv, k_cache.shape[1]),
        k_cache.stride()[:3],
        v_cache.stride()[:3],
        lined(y).stride(0),
        b.stride(1),
        others[4].shape[1],
        eps,
        HALF=half,
        c=chosen,
        num_warps=warps,
    )

    def run(y: torch.Tensor, squares: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor:
        cos, sin, k_cache, v_cache, block_table, lengths, _, scale = others
        q = made()
        beside = squares.contiguous(), few_rows.dense(scale)
        tables = cos.contiguous(), sin.contiguous()
        where = block_table.contiguous(), lengths.contiguous()
        launch(device, lined(y), b.t(), beside, tables, q, (k_cache, v_cache), where)
        return q

    return run


def _empty(y: torch.Tensor, squares: torch.Tensor, b: torch.Tensor, *others: Any) -> Any:
    H, _, D = _heads(b, others[2])
    return y.new_empty(len(y), 1, H, D)


_rows_turned = operator(
    "matmul_rows_turned(Tensor y, Tensor squares, Tensor b, Tensor cos, Tensor sin, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor block_table, Tensor lengths, float eps, Tensor? scale) -> Tensor",
    prepared(_prepare, _check),
    _empty,
    check=_check,
)
