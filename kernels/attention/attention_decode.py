"""Attention of new tokens to a cache of keys and values: split over the cache, as Flash-Decoding (Dao, Haziza,
Massa and Sizov, 2023), over pages of a block table (Kwon et al., arXiv 2309.06180).

Decoding reads every key and value once and computes next to nothing with them: it is bound by memory. The
queries that share a key head are packed into the rows of one tile, so that the head is read once for all of
them; the cache of a sequence is split over programs until they fill the device, and a second kernel joins
the parts. How many parts there are follows from shapes alone, lengths are read on the device, and nothing is
kept between calls: a CUDA graph can hold it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .._common import capability, cdiv, check, multiprocessors, on, operator, power_of_2, roomy

LOG2E = 1.4426950408889634
RESIDENT = 4
"""Programs that a multiprocessor holds at a time, with tiles of one wave."""
LONGEST_PARTS = 128
"""Most parts of one sequence; joining them reads them all."""


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v of q (B, Sq, H, D) over the cached tokens of each sequence: like q, contiguous.

    The cache is (B, S, Hkv, D) with `block_table` None, or pages (pages, page, Hkv, D), of which
    `block_table` (B, n) int32 gives sequence b those at its places 0 to n − 1; page is a power of two of at
    least 16. `lengths` (B,) int32 counts the tokens of each sequence in the cache, the Sq new ones included
    and last: token i sees the first length − Sq + i + 1. Query head h reads key head h // (H / Hkv). q and
    the cache are in one of bf16, fp16, fp32, the caches with a contiguous last dimension; D from 1 to 256.
    A token that sees nothing gives zeros.

    Places of the block table beyond a sequence's length are not read. Lengths and pages beyond the cache are
    not checked, because that would wait for the device.

    Raises `TypeError` for a wrong dtype and `ValueError` for a wrong shape or device.
    """
    check("q", q, dim=4)
    B, _, H, D = q.shape
    if not 1 <= D <= 256:
        raise ValueError(f"q has head dimension {D}, expected 1 to 256")
    check("k_cache", k_cache, dim=4, dtypes=(q.dtype,), like=q)
    heads = k_cache.shape[2]
    if H and (heads == 0 or H % heads):
        raise ValueError(f"k_cache has {heads} heads, which do not divide the {H} of q")
    if block_table is None:
        check("k_cache", k_cache, shape=(B, k_cache.shape[1], heads, D))
    else:
        page = k_cache.shape[1]
        if page < 16 or page & (page - 1):
            raise ValueError(f"k_cache has pages of {page} tokens, expected a power of two of at least 16")
        check("k_cache", k_cache, shape=(k_cache.shape[0], page, heads, D))
        check("block_table", block_table, dim=2, dtypes=(torch.int32,), like=q)
        check("block_table", block_table, shape=(B, block_table.shape[1]), dtypes=(torch.int32,))
    check("v_cache", v_cache, shape=k_cache.shape, dtypes=(q.dtype,), like=q)
    check("lengths", lengths, shape=(B,), dtypes=(torch.int32,), like=q)
    output: torch.Tensor = _attention_decode(q, k_cache, v_cache, block_table, lengths)
    return output


@triton.jit(do_not_specialize=["heads", "parts"])
def _part(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, table, lengths, out, sums, levels,
    stride_qb, stride_qs, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh,
    stride_table, heads, parts, scale,
    SQ: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of the cache of one sequence and key head, for all its queries.

    Key heads are the fastest coordinate: they lie side by side in the cache. With WHOLE there is one part,
    and the output is written; else the unnormalized sum (B, Sq, H, parts, D) and its base-2 log-sum-exp
    (B, Sq, H, parts) are. PAGE is 0 for a contiguous cache; a tile of keys lies within one page of KEYS or more.
    """
    program = tl.program_id(0)
    head = program % heads
    part = program // heads % parts
    batch = (program // heads // parts).to(tl.int64)
    length = tl.load(lengths + batch)
    share = tl.cdiv(tl.cdiv(length, parts), KEYS) * KEYS
    low = part * share
    high = tl.minimum(low + share, length)
    row = tl.arange(0, ROWS)
    token = row // GROUPS
    query_head = head * GROUPS + row % GROUPS
    width = tl.arange(0, WIDTH)
    inside = (token < SQ)[:, None] & (width < D)[None, :]
    queries = tl.load(
        q + batch * stride_qb + (token * stride_qs + query_head * stride_qh)[:, None] + width[None, :], inside, 0.0
    )
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    lane = tl.arange(0, KEYS)
    last = length - SQ + token
    for start in tl.range(low, high, KEYS, num_stages=STAGES):
        column = start + lane
        seen = column < high
        if PAGE:
            if PAGE < KEYS:
                place = tl.load(table + batch * stride_table + column // PAGE, seen, 0).to(tl.int64)
            else:
                place = tl.load(table + batch * stride_table + start // PAGE).to(tl.int64)
            within = column % PAGE
        else:
            place = batch
            within = column
        key_at = place * stride_kp + within.to(tl.int64) * stride_kt + head * stride_kh
        value_at = place * stride_vp + within.to(tl.int64) * stride_vt + head * stride_vh
        loaded = seen[:, None] & (width < D)[None, :]
        keys = tl.load(k + key_at[:, None] + width[None, :], loaded, 0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :] & (column[None, :] <= last[:, None]), scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        # A token that has seen nothing yet: -inf - -inf would be NaN.
        level = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(highest - level)
        weight = weight * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None]
        values = tl.load(v + value_at[:, None] + width[None, :], loaded, 0.0)
        total = tl.dot(weights.to(values.dtype), values, total, input_precision=PRECISION)
        highest = raised
    at = (batch * SQ + token) * (heads * GROUPS) + query_head
    blind = weight == 0.0
    weight = tl.where(blind, 1.0, weight)
    total = total / weight[:, None]
    if WHOLE:
        tl.store(out + at[:, None] * D + width[None, :], total.to(out.dtype.element_ty), inside)
    else:
        at = at * parts + part
        tl.store(sums + at[:, None] * D + width[None, :], total, inside)
        tl.store(levels + at, tl.where(blind, float("-inf"), highest + tl.log2(weight)), token < SQ)


@triton.jit(do_not_specialize=["parts"])
def _join(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, sums, levels, parts, D: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The output of one query: the mean of its parts, weighed by the sums of exponentials they stand for."""
    at = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    width = tl.arange(0, WIDTH)
    level = tl.load(levels + at * parts + part, part < parts, float("-inf"))
    highest = tl.max(level, 0)
    weight = tl.exp2(level - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weight, 0)
    inside = (part < parts)[:, None] & (width < D)[None, :]
    values = tl.load(sums + (at * parts + part)[:, None] * D + width[None, :], inside, 0.0)
    value = tl.sum(values * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + at * D + width, value.to(out.dtype.element_ty), width < D)


class Tile(NamedTuple):
    """Keys of a tile, warps and stages of a program, and whether RESIDENT programs of them fit."""

    keys: int
    warps: int
    stages: int
    fits: bool


def tile_for(rows: int, D: int, element: int, paged: bool, device: tuple[int, int]) -> Tile:
    """As measured best on an H200, for `rows` rows of queries and numbers of `element` bytes, where a device of
    that compute capability holds it.
    """
    if element == 4 or D > 128:
        return Tile(32, 4, 3, rows <= 16)
    if rows <= 16 and not paged and roomy(device):
        # In a contiguous cache sequences lie apart by powers of two, and longer tiles take less harm from it.
        return Tile(128, 8, 3, True)
    if rows == 32 and D > 64 and paged:
        # A block table takes two stages for itself: its numbers are loaded before the keys that they lead to.
        return Tile(32, 2, 5, True)
    return Tile(64, 4, 3, rows <= 16)


def split(B: int, heads: int, tokens: int, tile: Tile, processors: int) -> int:
    """Parts of one sequence's cache of `tokens`: as many programs as the device holds at a time, not one more,
    because a second wave would last as long as the first; none without a tile.

    Where fewer are resident than RESIDENT, two waves of half the length lose less.
    """
    programs, resident = max(1, B * heads), RESIDENT * processors
    wanted = resident // programs if tile.fits else cdiv(resident, programs)
    return max(1, min(wanted, cdiv(tokens, tile.keys), LONGEST_PARTS))


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    lengths: torch.Tensor,
    parts: int | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """`attention_decode` without its checks; `parts` and the tile as measured best unless they are given."""
    B, Sq, H, D = q.shape
    out = torch.empty((B, Sq, H, D), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    if q.stride(3) != 1:
        q = q.contiguous()
    k_cache, v_cache = (x if x.stride(3) == 1 or D == 1 else x.contiguous() for x in (k_cache, v_cache))
    page, heads = k_cache.shape[1], k_cache.shape[2]
    groups = H // heads
    tokens = page if block_table is None else page * block_table.shape[1]
    rows = max(16, power_of_2(Sq * groups))
    tile = tile or tile_for(rows, D, q.element_size(), block_table is not None, capability(q.device))
    if parts is None:
        parts = split(B, heads, tokens, tile, multiprocessors(q))
    sums = levels = out
    if parts > 1:
        sums = torch.empty((B, Sq, H, parts, D), dtype=torch.float32, device=q.device)
        levels = torch.empty((B, Sq, H, parts), dtype=torch.float32, device=q.device)
    width = max(16, power_of_2(D))
    with on(q):
        _part[(B * parts * heads,)](
            q, k_cache, v_cache, lengths if block_table is None else block_table, lengths, out, sums, levels,
            *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3],
            0 if block_table is None else block_table.stride(0),
            heads, parts, LOG2E / math.sqrt(D),
            Sq, groups, D, rows, tile.keys, width,
            0 if block_table is None else page, parts == 1, tile.stages,
            "ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=tile.warps,
        )  # fmt: skip
        if parts > 1:
            _join[(B * Sq * H,)](out, sums, levels, parts, D, power_of_2(parts), width, num_warps=4)
    return out


def _launch(*arguments: Any) -> torch.Tensor:
    return launch(*arguments)


_attention_decode = operator(
    "attention_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? block_table, Tensor lengths) -> Tensor",
    _launch,
    lambda q, *_: torch.empty(q.shape, dtype=q.dtype, device=q.device),
)
