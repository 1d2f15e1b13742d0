"""Block-sparse attention: every block of 128 queries attends to a list of blocks of 128 keys.

A list is in descending order. So the block that a causal mask cuts, and the one that the sequence's end cuts, can
only be the first of it: nothing else is masked. Lists are made on the device, from a mask of blocks in one launch
or from pooled scores in two, in rows of the same length: nothing waits for the host, and a CUDA graph can hold it.

Choosing k of n scores is exact and needs no sort: the k-th largest is found bit by bit.

On compute capability 9.0 the kernel of `_attention_sparse_hopper.py` walks the lists for the shapes that
`_hopper.py` names. The backward pass is `_attention_sparse_backward.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from .._common import capability, cdiv, check, choice, needs_gradient, on, operator, power_of_2, roomy
from .._online_softmax import weighted
from ._attention_sparse_backward import gradients
from ._dispatch import hopper_modules
from ._tile_functions import LOG2E, load_tile, program_place, store_contiguous
from ._tiling import (
    Tiles,
    describable,
    heads_in_l2,
    like,
    modest,
    row_contiguous,
    source,
    tile_width,
)
from ._tiling import tiles as dense_tiles

BLOCK = 128
"""Queries, and keys, of a block."""
LONGEST = 1 << 18
"""Most tokens among whose blocks a row chooses: its scores stay in registers."""


@dataclass(frozen=True)
class Config:
    """The attention kernel at compile time: head dimension, queries, and keys, of a listed block, rows of a tile
    of queries and of keys, columns of both, the mask, and whether the tensor memory accelerator loads.
    """

    D: int
    block: int
    queries: int
    keys: int
    width: int
    causal: bool
    tma: bool


def attention_sparse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"] = "causal",
    sparsity: int = 90,
    blocks: torch.Tensor | None = None,
    gate_q: torch.Tensor | None = None,
    gate_k: torch.Tensor | None = None,
    threshold: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q·kᵀ / √D)·v of q (B, H, S, D), k and v (B, Hkv, S, D) over blocks of 128 keys: like q, contiguous.

    With `blocks`, (1, n, n) or (H, n, n) bool and n = ⌈S / 128⌉, block i of queries attends to the blocks j of
    keys with blocks[h, i, j]; a query that sees nothing gives zeros. `sparsity` and the gates are not looked at.

    Without, (output, blocks (B, H, n, n) bool) is returned: of the w blocks that the mask lets it see, a block of
    queries chooses max(1, ⌊w · (100 − sparsity) / 100 + ½⌋), its own and then those with the largest product of
    mean query and mean key, of equal ones the first; NaN counts as −inf. With gate_q (H, D, G) and gate_k
    (Hkv, D, G), G up to 256, means are multiplied by these first. All of it is computed in fp32. S up to 2¹⁸. With
    a `threshold` in place of `sparsity`, a block of queries chooses its own and all with a product at most so far
    below the largest of the others.

    q, k, v and the gates in one of bf16, fp16, fp32, on one device; D from 1 to 256; Hkv divides H, and query head
    h reads key head h // (H / Hkv). `mask` "causal" hides the keys after a query.

    The output is differentiable once in q, k and v, for the blocks that were chosen: the choice has no derivative,
    and gates learn otherwise (`suite/operators/_gates.py`). Gradients are the same bits in every run.

    Raises `TypeError` for a wrong dtype and `ValueError` for a wrong shape, device, mask or sparsity.
    """
    choice("mask", mask, ("causal", "full"))
    check("q", q, dim=4)
    B, H, S, D = q.shape
    if not 1 <= D <= 256:
        raise ValueError(f"q has head dimension {D}, expected 1 to 256")
    check("k", k, dim=4, dtypes=(q.dtype,), like=q)
    heads = k.shape[1]
    if H and (heads == 0 or H % heads):
        raise ValueError(f"k has {heads} heads, which do not divide the {H} of q")
    check("k", k, shape=(B, heads, S, D))
    check("v", v, shape=(B, heads, S, D), dtypes=(q.dtype,), like=q)
    if blocks is not None:
        across = cdiv(S, BLOCK)
        check("blocks", blocks, dim=3, dtypes=(torch.bool,), like=q)
        check("blocks", blocks, shape=(1 if blocks.shape[0] == 1 else H, across, across), dtypes=(torch.bool,))
        output: torch.Tensor = _given(q, k, v, blocks, mask == "causal", needs_gradient(q, k, v))[0]
        return output
    if not isinstance(sparsity, int) or not 0 <= sparsity < 100:
        raise ValueError(f"sparsity is {sparsity}, expected a whole number from 0 to 99")
    if threshold is not None and not threshold >= 0:
        raise ValueError(f"threshold is {threshold}, expected 0 or more")
    if S > LONGEST:
        raise ValueError(f"q has {S} tokens, expected at most {LONGEST} to choose among")
    if gate_q is not None or gate_k is not None:
        check("gate_q", gate_q, dim=3, dtypes=(q.dtype,), like=q)
        assert gate_q is not None
        if not 1 <= gate_q.shape[2] <= 256:
            raise ValueError(f"gate_q has {gate_q.shape[2]} features, expected 1 to 256")
        check("gate_q", gate_q, shape=(H, D, gate_q.shape[2]))
        check("gate_k", gate_k, shape=(heads, D, gate_q.shape[2]), dtypes=(q.dtype,), like=q)
        assert gate_k is not None
        # Else autograd would walk back for a gate alone, for which no log-sum-exp was kept.
        gate_q, gate_k = gate_q.detach(), gate_k.detach()
    output, blocks, *_ = _chosen(
        q, k, v, gate_q, gate_k, mask == "causal", sparsity, -1.0 if threshold is None else float(threshold),
        needs_gradient(q, k, v),
    )  # fmt: skip
    return output, blocks


def tiles_left_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"] = "causal",
    sparsity: int = 90,
    blocks: torch.Tensor | None = None,
    gate_q: torch.Tensor | None = None,
    gate_k: torch.Tensor | None = None,
    threshold: float | None = None,
) -> float:
    """The share of dense attention's tiles of 128 by 128 that `attention_sparse` of these inputs does not execute:
    all but the blocks of the lists that its kernels walk, in every pass.
    """
    causal = mask == "causal"
    S = q.shape[2]
    if blocks is not None:
        counts = listed(blocks, causal)[1]
    else:
        least = -1.0 if threshold is None else float(threshold)
        counts = chosen(q, k, gate_q, gate_k, causal, sparsity, least)[2]
    if hopper_modules(q.device) is not None and _lists().fits(q, k, v):
        # There an empty list has a block too, which is computed and does not count.
        counts = counts.clamp(min=1)
    n = cdiv(S, BLOCK)
    dense = n * (n + 1) // 2 if causal else n * n
    return 1 - float(counts.sum()) / max(1, dense * counts.shape[0])


attention_sparse.tiles_left_out = tiles_left_out  # type: ignore[attr-defined]  # what the harness asks for


# ---------------------------------------------------------------------------------------------------------
# Lists of blocks.


@triton.jit
def _write(  # type: ignore[no-untyped-def]  # Triton's types are its own
    lists, counts, kept, head, row, column, n, ASCENDING: tl.constexpr
):  # fmt: skip
    """The list of each row, its largest column first or, ascending, last; of an empty row, its own block, which is
    not counted.
    """
    at = head.to(tl.int64) * n + row
    count = tl.sum(kept.to(tl.int32), 1)
    place = count[:, None] - tl.cumsum(kept.to(tl.int32), 1)
    if ASCENDING:
        place = count[:, None] - 1 - place
    inside = (row < n)[:, None]
    wide = row[:, None] + 0 * column[None, :]
    tl.store(lists + at[:, None] * n + place, 0 * wide + column[None, :], kept & inside)
    tl.store(lists + at * n, row, (row < n) & (count == 0))
    tl.store(counts + at, count, row < n)


@triton.jit(do_not_specialize=["n"])
def _list(  # type: ignore[no-untyped-def]  # Triton's types are its own
    blocks, lists, counts, n, stride_h, stride_r, stride_c,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """Lists (heads, n, n) and counts (heads, n) of ROWS rows of a mask of blocks, descending; with OF_KEYS of rows
    that are blocks of keys, whose columns are queries, ascending.
    """
    tiles = tl.cdiv(n, ROWS)
    head = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < n)[:, None] & (column < n)[None, :]
    if CAUSAL:
        if OF_KEYS:
            inside = inside & (column[None, :] >= row[:, None])
        else:
            inside = inside & (column[None, :] <= row[:, None])
    at = head.to(tl.int64) * stride_h + row.to(tl.int64)[:, None] * stride_r + column[None, :] * stride_c
    kept = inside & (tl.load(blocks + at, inside, 0) != 0)
    _write(lists, counts, kept, head, row, column, n, OF_KEYS)


@triton.jit
def _pool_of(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, gate, features, program, strides, heads, S, n, D, G,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The features of one block of one head: the mean of its tokens, through the gate if there is one."""
    place, block = program // n, program % n
    batch, head = place // heads, place % heads
    row = block * BLOCK
    tile = load_tile(x, batch, head, row, strides, S, D, BLOCK, WIDTH, False, True)
    mean = tl.sum(tile.to(tl.float32), 0) / tl.minimum(BLOCK, S - row)
    lane = tl.arange(0, FEATURES)
    if GATED:
        width = tl.arange(0, WIDTH)
        weights = tl.load(
            gate + head.to(tl.int64) * D * G + width[:, None] * G + lane[None, :],
            (width < D)[:, None] & (lane < G)[None, :],
            0.0,
        )
        mean = tl.sum(mean[:, None] * weights.to(tl.float32), 0)
    tl.store(features + program.to(tl.int64) * G + lane, mean, lane < G)


@triton.jit(do_not_specialize=["H", "heads", "S", "n", "queries"])
def _pool(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, gate_q, gate_k, features_q, features_k, q_strides, k_strides, H, heads, S, n, queries,
    D: tl.constexpr, G: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Features (B·H, n, G) of the queries, by the first `queries` programs, and (B·Hkv, n, G) of the keys."""
    program = tl.program_id(0)
    if program < queries:
        _pool_of(
            q, gate_q, features_q, program, q_strides, H, S, n, D, G, BLOCK, WIDTH, FEATURES, GATED
        )  # fmt: skip
    else:
        _pool_of(
            k, gate_k, features_k, program - queries, k_strides, heads, S, n, D, G, BLOCK, WIDTH, FEATURES, GATED
        )  # fmt: skip


@triton.jit(do_not_specialize=["n", "groups", "share"])
def _choose(  # type: ignore[no-untyped-def]  # Triton's types are its own
    features_q, features_k, blocks, lists, counts, n, groups, share, threshold,
    G: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    OVER: tl.constexpr,
):  # fmt: skip
    """Chooses the blocks of ROWS rows of one head: `share` hundredths of those that they see, or with OVER those
    that are not further than `threshold` below the largest.

    Scores become unsigned numbers of the same order, of which the k-th largest is built from its highest bit
    down: a bit belongs to it if at least k scores have it, after the same higher ones.
    """
    tiles = tl.cdiv(n, ROWS)
    head = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    lane = tl.arange(0, STEP)
    queries = features_q + head.to(tl.int64) * n * G
    keys = features_k + (head // groups).to(tl.int64) * n * G
    scores = tl.zeros([ROWS, COLUMNS], tl.float32)
    for low in tl.range(0, G, STEP, num_stages=1):
        feature = low + lane
        a = tl.load(
            queries + row[:, None] * G + feature[None, :], (row < n)[:, None] & (feature < G)[None, :], 0.0
        )
        b = tl.load(
            keys + column[None, :] * G + feature[:, None], (column < n)[None, :] & (feature < G)[:, None], 0.0
        )
        # scores += mean query · mean key
        scores = tl.dot(a, b, scores, input_precision="ieee")
    seen = (row < n)[:, None] & (column < n)[None, :]
    visible = tl.zeros([ROWS], tl.int32) + n
    if CAUSAL:
        seen = seen & (column[None, :] <= row[:, None])
        visible = row + 1
    wanted = tl.maximum(1, (visible * share + 50) // 100)
    scores = tl.where(scores == scores, scores + 0.0, float("-inf"))  # -0 and 0 are equal
    own = column[None, :] == row[:, None]
    if OVER:
        others = tl.where(seen & (own == 0), scores, float("-inf"))
        limit = tl.max(others, 1) - threshold
        kept = seen & (own | ((scores >= limit[:, None]) & (scores > float("-inf"))))
    else:
        scores = tl.where(own, float("inf"), scores)
        bits = scores.to(tl.int32, bitcast=True)
        signed = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        # Below every score, and so 0 in the unsigned order.
        signed = tl.where(seen, signed, -0x80000000)
        order = signed.to(tl.uint32, bitcast=True) ^ 0x80000000
        least = tl.zeros([ROWS], tl.uint32)
        bit = tl.full([ROWS], 0x80000000, tl.uint32)
        for _ in tl.range(0, 32):
            tried = least | bit
            least = tl.where(tl.sum((order >= tried[:, None]).to(tl.int32), 1) >= wanted, tried, least)
            bit = bit >> 1
        above = order > least[:, None]
        equal = seen & (order == least[:, None])
        spare = wanted - tl.sum(above.to(tl.int32), 1)
        kept = above | (equal & (tl.cumsum(equal.to(tl.int32), 1) <= spare[:, None]))
    at = head.to(tl.int64) * n + row
    tl.store(
        blocks + at[:, None] * n + column[None, :], kept.to(tl.int8), (row < n)[:, None] & (column < n)[None, :]
    )
    _write(lists, counts, kept, head, row, column, n, False)


# ---------------------------------------------------------------------------------------------------------
# Attention over lists.


@triton.jit
def _attend(  # type: ignore[no-untyped-def]  # Triton's types are its own
    state, q, k, v, batch, head, first, chosen, low, high, k_strides, v_strides, S, scale,
    c: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds tiles `low` to `high` of the listed blocks to an online softmax's state: (sums, row max, row sum).
    `scale` includes log₂e.
    """
    total, row_max, row_sum = state
    rows = first + tl.arange(0, c.queries)
    for i in tl.range(low, high):
        within: tl.constexpr = c.block // c.keys
        start = tl.load(chosen + i // within) * c.block + i % within * c.keys
        keys = load_tile(k, batch, head, start, k_strides, S, c.D, c.keys, c.width, c.tma, MASKED)
        # S = Q·Kᵀ
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if MASKED:
            columns = start + tl.arange(0, c.keys)
            if c.causal:
                # Keys beyond S are hidden too: they come after every row that is stored.
                scores = tl.where(rows[:, None] >= columns[None, :], scores, float("-inf"))
            else:
                scores = tl.where((columns < S)[None, :], scores, float("-inf"))
        # Every row sees the first key of a listed block: the maximum is never -inf.
        weights, correction, row_max, row_sum = weighted(scores, row_max, row_sum, scale)
        total = total * correction[:, None]
        values = load_tile(v, batch, head, start, v_strides, S, c.D, c.keys, c.width, c.tma, MASKED)
        # O += P·V
        total = tl.dot(weights.to(values.dtype), values, total, input_precision="ieee")
    return total, row_max, row_sum


@triton.jit(do_not_specialize=["B", "H", "shared", "n", "heads"])
def _walk(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, out, lists, counts, q_strides, k_strides, v_strides, B, H, S, groups, shared, n, heads, scale, lse,
    c: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head over their block's list. `heads` lists there are: 1, H or B·H. `lse` (B, H, S)
    gets the base-2 log of the sum of 2^score, +inf for a row without a block; None leaves it out.
    """
    QUERIES: tl.constexpr = c.queries
    WIDTH: tl.constexpr = c.width
    tile, place = program_place(tl.cdiv(S, c.queries), B * H, shared, c.causal)
    batch, head = place // H, place % H
    first = tile * c.queries
    queries = load_tile(q, batch, head, first, q_strides, S, c.D, c.queries, c.width, c.tma, True)
    at = (place % heads).to(tl.int64) * n + first // c.block
    chosen = lists + at * n
    count = tl.load(counts + at)
    tiles: tl.constexpr = c.block // c.keys
    total = tl.zeros([QUERIES, WIDTH], tl.float32)
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    row_sum = tl.zeros([QUERIES], tl.float32)
    state = (total, row_max, row_sum)
    state = _attend(
        state, queries, k, v, batch, head // groups, first, chosen, 0, tl.minimum(count, 1) * tiles,
        k_strides, v_strides, S, scale, c, True,
    )  # fmt: skip
    state = _attend(
        state, queries, k, v, batch, head // groups, first, chosen, tiles, count * tiles,
        k_strides, v_strides, S, scale, c, False,
    )  # fmt: skip
    total, row_max, row_sum = state
    row_sum = tl.where(count == 0, 1.0, row_sum)
    if lse is not None:
        rows = first + tl.arange(0, c.queries)
        level = tl.where(count == 0, float("inf"), row_max + tl.log2(row_sum))
        tl.store(lse + place.to(tl.int64) * S + rows, level, rows < S)
    store_contiguous(out, total / row_sum[:, None], batch, head, first, H, S, c.D, c.queries, c.width)


# ---------------------------------------------------------------------------------------------------------
# Launch.


def _rows(n: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program that holds whole rows of n blocks."""
    columns = max(16, power_of_2(n))
    return 16, columns, 4 if columns <= 256 else 8 if columns <= 1024 else 16


def listed(blocks: torch.Tensor, causal: bool, of_keys: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists (heads, n, n) int32 and counts (heads, n) int32 of a mask of blocks (heads, n, n): of the keys of each
    block of queries in descending order, or `of_keys`, of the queries of each block of keys in ascending order.
    """
    heads, n, _ = blocks.shape
    of_head, *strides = blocks.stride()
    if of_keys:
        strides.reverse()
    lists = torch.empty((heads, n, n), dtype=torch.int32, device=blocks.device)
    counts = torch.empty((heads, n), dtype=torch.int32, device=blocks.device)
    # Fewer rows a program than where there is more to do with them: the grid is small.
    rows, columns, warps = 4, max(16, power_of_2(n)), 4
    with on(blocks):
        _list[(cdiv(n, rows) * heads,)](
            blocks.view(torch.int8), lists, counts, n, of_head, *strides, causal, rows, columns, of_keys,
            num_warps=warps,
        )  # fmt: skip
    return lists, counts


def chosen(
    q: torch.Tensor,
    k: torch.Tensor,
    gate_q: torch.Tensor | None,
    gate_k: torch.Tensor | None,
    causal: bool,
    sparsity: int,
    threshold: float = -1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks (B, H, n, n) bool, lists (B·H, n, n) and counts (B·H, n) of what is chosen by scores.

    By a share of what a row sees or, where `threshold` is not negative, by how far scores lie below the largest.
    """
    B, H, S, D = q.shape
    heads, n = k.shape[1], cdiv(S, BLOCK)
    q, k = row_contiguous(q), row_contiguous(k)
    gated = gate_q is not None and gate_k is not None
    G = gate_q.shape[2] if gate_q is not None and gated else D
    gates = (q, k) if gate_q is None or gate_k is None else (gate_q.contiguous(), gate_k.contiguous())
    features_q = torch.empty((B * H, n, G), dtype=torch.float32, device=q.device)
    features_k = torch.empty((B * heads, n, G), dtype=torch.float32, device=q.device)
    blocks = torch.empty((B, H, n, n), dtype=torch.bool, device=q.device)
    lists = torch.empty((B * H, n, n), dtype=torch.int32, device=q.device)
    counts = torch.empty((B * H, n), dtype=torch.int32, device=q.device)
    width = tile_width(D)
    rows, columns, warps = _rows(n)
    with on(q):
        _pool[(B * (H + heads) * n,)](
            q, k, *gates, features_q, features_k, q.stride()[:3], k.stride()[:3],
            H, heads, S, n, B * H * n, D, G,
            BLOCK, width, max(16, power_of_2(G)) if gated else width, gated, num_warps=4,
        )  # fmt: skip
        _choose[(cdiv(n, rows) * B * H,)](
            features_q, features_k, blocks.view(torch.int8), lists, counts, n, H // heads, 100 - sparsity,
            threshold, G, causal, rows, columns, 32 if columns <= 512 else 16, threshold >= 0, num_warps=warps,
        )  # fmt: skip
    return blocks, lists, counts


def tiles(q: torch.Tensor) -> Tiles:
    """As the dense kernel's, in parts of a block."""
    D = q.shape[-1]
    if q.dtype == torch.float32:
        return Tiles(32, 32, 4, 1) if D > 64 else Tiles(64, 32, 4, 2)
    if not roomy(capability(q.device)):
        return modest("forward", D)
    return Tiles(128, 64, 8, 2) if D > 64 else Tiles(128, 128, 8, 2)


@cache
def _lists() -> ModuleType:
    """The kernel for Hopper."""
    from . import _attention_sparse_hopper

    return _attention_sparse_hopper


def walk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    causal: bool,
    portable: bool = False,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over lists (heads, n, n), heads being 1, H or B·H; `portable` leaves kernels for Hopper out. `lse`
    (B, H, S) fp32 gets the base-2 log-sum-exp of each row, +inf where nothing is seen.
    """
    B, H, S, D = q.shape
    groups = H // k.shape[1]
    out = q.new_empty(q.shape)
    hopper = None if portable else hopper_modules(q.device)
    if hopper is not None and _lists().fits(q, k, v):
        _lists().forward(q, k, v, out, lists, counts, causal, heads_in_l2(k, groups), lse)
        return out
    q, k, v = row_contiguous(q), row_contiguous(k), row_contiguous(v)
    t = tiles(q)
    tma = describable(q, k, v)
    c = Config(D, BLOCK, t.resident, t.streamed, tile_width(D), causal, tma)
    with on(q):
        _walk[(cdiv(S, t.resident) * B * H,)](
            source(q, t.resident, tma), source(k, t.streamed, tma), source(v, t.streamed, tma), out, lists, counts,
            q.stride()[:3], k.stride()[:3], v.stride()[:3],
            B, H, S, groups, heads_in_l2(k, groups), lists.shape[1], lists.shape[0], LOG2E / math.sqrt(D), lse, c,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return out


def _levels(q: torch.Tensor, training: bool) -> torch.Tensor:
    """Memory for the log-sum-exp that the backward pass needs; of no elements where there will be none."""
    return q.new_empty(q.shape[:3] if training else (0,), dtype=torch.float32)


def _launch_given(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, causal: bool, training: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if q.numel() == 0:
        return _empty_given(q, k, v, blocks, causal, training)
    lse = _levels(q, training)
    return walk(q, k, v, *listed(blocks, causal), causal, lse=lse if training else None), lse


def _launch_chosen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate_q: torch.Tensor | None,
    gate_k: torch.Tensor | None,
    causal: bool,
    sparsity: int,
    threshold: float,
    training: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if q.numel() == 0:
        return _empty(q, k, v, gate_q, gate_k, causal, sparsity, threshold, training)
    blocks, lists, counts = chosen(q, k, gate_q, gate_k, causal, sparsity, threshold)
    lse = _levels(q, training)
    return walk(q, k, v, lists, counts, causal, lse=lse if training else None), blocks, lse


def _empty_given(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the output and the log-sum-exp."""
    return q.new_empty(q.shape), _levels(q, rest[-1])


def _empty(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for the output, the choice and the log-sum-exp."""
    B, H, S = q.shape[:3]
    n = cdiv(S, BLOCK)
    out, lse = _empty_given(q, *rest)
    return out, q.new_empty((B, H, n, n), dtype=torch.bool), lse


# ---------------------------------------------------------------------------------------------------------
# Autograd. What is kept is the mask of blocks, from which both walks' lists are made in a launch each.


def _launch_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    blocks: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if q.numel() == 0:
        return tuple(like(x).zero_() for x in (q, k, v))  # type: ignore[return-value]  # of three
    of_queries, of_keys = listed(blocks, causal), listed(blocks, causal, of_keys=True)
    sizes = dense_tiles("keys", q), dense_tiles("queries", q)
    return gradients(grad, q, k, v, out, lse, of_queries, of_keys, causal, *sizes)


def _save_given(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, blocks, ctx.causal, _ = inputs
    ctx.save_for_backward(q, k, v, *output, blocks)


def _save_chosen(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, *_, ctx.causal, _, _, _ = inputs
    out, blocks, lse = output
    ctx.save_for_backward(q, k, v, out, lse, blocks.flatten(0, 1))


def _differentiate_given(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    return *_gradients(grad, *ctx.saved_tensors, ctx.causal), None, None, None


def _differentiate_chosen(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    return *_gradients(grad, *ctx.saved_tensors, ctx.causal), *(None,) * 6


_given = operator(
    "attention_sparse(Tensor q, Tensor k, Tensor v, Tensor blocks, bool causal, bool training)"
    " -> (Tensor, Tensor)",
    _launch_given,
    _empty_given,
    _save_given,
    _differentiate_given,
    hidden=1,
)

_chosen = operator(
    "attention_sparse_chosen(Tensor q, Tensor k, Tensor v, Tensor? gate_q, Tensor? gate_k, bool causal,"
    " int sparsity, float threshold, bool training) -> (Tensor, Tensor, Tensor)",
    _launch_chosen,
    _empty,
    _save_chosen,
    _differentiate_chosen,
    hidden=1,
)

_gradients = operator(
    "attention_sparse_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor blocks,"
    " bool causal) -> (Tensor, Tensor, Tensor)",
    _launch_backward,
    lambda grad, q, k, v, *_: (like(q), like(k), like(v)),
)
