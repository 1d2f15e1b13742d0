"""The backward pass of block-sparse attention: one kernel over blocks of keys (dK, dV), one over blocks of queries
(dQ), as the portable one of dense attention. Nothing is added up in memory: gradients are the same in every run.

A block of queries walks its list again. A block of keys walks the list of those queries that chose it, which is
made from the same mask of blocks: in ascending order, so that the block which a causal mask cuts is the first of
it. What is left out costs nothing in either kernel.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .._common import cdiv, on
from ._portable_backward import row_products, with_keys, with_queries
from ._tile_functions import LOG2E, load_tile, program_place, store_strided
from ._tiling import (
    Config,
    Tiles,
    configured,
    describable,
    heads_in_l2,
    like,
    row_contiguous,
    source,
    tile_width,
)

LN2 = tl.constexpr(1 / LOG2E)


@triton.jit(do_not_specialize=["B", "H", "shared", "heads"])
def _backward_keys(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, grad, lse, delta, dk_out, dv_out, lists, counts, strides, out_strides, B, H, S, groups, shared, heads,
    scale, c: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys of one key head, over all its query heads, of each the blocks of queries that
    chose the tile's block. `strides` are those of q, k, v and grad, `out_strides` of dK and dV. `heads` lists
    there are: 1, H or B·H.
    """
    BLOCK: tl.constexpr = 128
    KEYS: tl.constexpr = c.keys
    WIDTH: tl.constexpr = c.width
    tile, place = program_place(tl.cdiv(S, c.keys), B * (H // groups), shared, False)
    batch, head = place // (H // groups), place % (H // groups)
    first = tile * c.keys
    keys = load_tile(k, batch, head, first, strides[1], S, c.D, c.keys, c.width, c.tma, True)
    values = load_tile(v, batch, head, first, strides[2], S, c.D, c.keys, c.width, c.tma, True)
    n = tl.cdiv(S, BLOCK)
    within: tl.constexpr = BLOCK // c.queries
    sums = (tl.zeros([KEYS, WIDTH], tl.float32), tl.zeros([KEYS, WIDTH], tl.float32))
    sizes = (S, S)
    for member in tl.range(0, groups, num_stages=1):
        query_head = head * groups + member
        row = batch * H + query_head
        at = (row % heads).to(tl.int64) * n + first // BLOCK
        count = tl.load(counts + at)
        chosen = lists + at * n
        low = 0
        if c.causal:
            low = tl.minimum(count, 1) * within
            for i in tl.range(0, low):
                start = tl.load(chosen) * BLOCK + i * c.queries
                sums = with_queries(
                    sums, keys, values, q, grad, lse, delta, batch, query_head, row, first, start, strides[0],
                    strides[3], sizes, scale, c, True,
                )  # fmt: skip
        for i in tl.range(low, count * within):
            start = tl.load(chosen + i // within) * BLOCK + i % within * c.queries
            sums = with_queries(
                sums, keys, values, q, grad, lse, delta, batch, query_head, row, first, start, strides[0],
                strides[3], sizes, scale, c, False,
            )  # fmt: skip
    dk, dv = sums
    store_strided(dk_out, dk * (scale * LN2), batch, head, first, out_strides[0], S, c.D, c.keys, c.width)
    store_strided(dv_out, dv, batch, head, first, out_strides[1], S, c.D, c.keys, c.width)


@triton.jit(do_not_specialize=["B", "H", "shared", "heads"])
def _backward_queries(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, grad, lse, delta, dq_out, lists, counts, strides, out_strides, B, H, S, groups, shared, heads, scale,
    c: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries of one head over their block's list, which is descending. As `_backward_keys`."""
    BLOCK: tl.constexpr = 128
    QUERIES: tl.constexpr = c.queries
    WIDTH: tl.constexpr = c.width
    tile, place = program_place(tl.cdiv(S, c.queries), B * H, shared, c.causal)
    batch, head = place // H, place % H
    first = tile * c.queries
    rows = first + tl.arange(0, c.queries)
    queries = load_tile(q, batch, head, first, strides[0], S, c.D, c.queries, c.width, c.tma, True)
    g = load_tile(grad, batch, head, first, strides[3], S, c.D, c.queries, c.width, c.tma, True)
    level = tl.load(lse + place.to(tl.int64) * S + rows, mask=rows < S, other=float("inf"))
    of_row = tl.load(delta + place.to(tl.int64) * S + rows, mask=rows < S, other=0.0)
    n = tl.cdiv(S, BLOCK)
    within: tl.constexpr = BLOCK // c.keys
    at = (place % heads).to(tl.int64) * n + first // BLOCK
    count = tl.load(counts + at)
    chosen = lists + at * n
    low = tl.minimum(count, 1) * within
    dq = tl.zeros([QUERIES, WIDTH], tl.float32)
    for i in tl.range(0, low):
        start = tl.load(chosen) * BLOCK + i * c.keys
        dq = with_keys(
            dq, queries, g, level, of_row, k, v, batch, head // groups, first, start, strides[1], strides[2], S,
            scale, c, True,
        )  # fmt: skip
    for i in tl.range(low, count * within):
        start = tl.load(chosen + i // within) * BLOCK + i % within * c.keys
        dq = with_keys(
            dq, queries, g, level, of_row, k, v, batch, head // groups, first, start, strides[1], strides[2], S,
            scale, c, False,
        )  # fmt: skip
    store_strided(dq_out, dq * (scale * LN2), batch, head, first, out_strides, S, c.D, c.queries, c.width)


def gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    columns: tuple[torch.Tensor, torch.Tensor],
    causal: bool,
    of_keys: Tiles,
    of_queries: Tiles,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV) of q (B, H, S, D), k and v (B, Hkv, S, D), laid out like these, from the gradient of the
    contiguous output and its base-2 log-sum-exp (B, H, S).

    `rows` are lists (heads, n, n) in descending order and counts (heads, n) of the blocks of keys that a block of
    queries chose; `columns` in ascending order of the blocks of queries that chose one of keys. heads is 1, H or
    B·H.
    """
    B, H, S, D = q.shape
    heads = k.shape[1]
    groups = H // heads
    dq, dk, dv = like(q), like(k), like(v)
    q, k, v, grad = row_contiguous(q), row_contiguous(k), row_contiguous(v), row_contiguous(grad)
    tma = describable(q, k, v, grad)
    strides = tuple(x.stride()[:3] for x in (q, k, v, grad))
    scale, shared = LOG2E / math.sqrt(D), heads_in_l2(k, groups)
    delta = torch.empty_like(lse)
    t, u = of_keys, of_queries
    c: Config = configured(q, v, t, True, causal, 0, tma, 0.0)
    d: Config = configured(q, v, u, False, causal, 0, tma, 0.0)
    blocks = cdiv(S, 64)
    with on(q):
        row_products[(blocks * B * H,)](
            out, grad, delta, out.stride()[:3], grad.stride()[:3], H, S, blocks, D, 64, tile_width(D), num_warps=4
        )
        _backward_keys[(cdiv(S, t.resident) * B * heads,)](
            source(q, t.streamed, tma), source(k, t.resident, tma), source(v, t.resident, tma),
            source(grad, t.streamed, tma), lse, delta, dk, dv, *columns,
            strides, (dk.stride()[:3], dv.stride()[:3]), B, H, S, groups, max(1, shared // groups // groups),
            len(columns[0]), scale, c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
        _backward_queries[(cdiv(S, u.resident) * B * H,)](
            source(q, u.resident, tma), source(k, u.streamed, tma), source(v, u.streamed, tma),
            source(grad, u.resident, tma), lse, delta, dq, *rows,
            strides, dq.stride()[:3], B, H, S, groups, shared, len(rows[0]), scale, d,
            num_warps=u.warps, num_stages=u.stages,
        )  # fmt: skip
    return dq, dk, dv
