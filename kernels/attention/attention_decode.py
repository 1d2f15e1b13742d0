"""Attention of new tokens to a cache of keys and values: split over the cache, as Flash-Decoding (Dao, Haziza,
Massa and Sizov, 2023), over pages of a block table (Kwon et al., arXiv 2309.06180).

Decoding reads every key and value once and computes next to nothing with them: it is bound by memory. The
queries that share a key head are packed into the rows of one tile, so that the head is read once for all of
them; the cache of a sequence is split over programs until they fill the device, and a second kernel joins the
parts. On Hopper, where the sequences alone fill a quarter of it up to twice as much as it holds, programs take
equal shares of all of them instead (`_decode_shares`), if what that costs is little beside their length. Which
way, and how many parts there are, follows from shapes, dtype and device, lengths are read on the device, and
nothing is kept between calls: a CUDA graph can hold it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .._common import capability, cdiv, check, multiprocessors, on, operator, power_of_2, roomy
from ._decode_shares import attend, fit_for, shares_of
from ._decode_tiles import Config, attended, stored
from ._parts import LONGEST_PARTS, join
from ._tile_functions import LOG2E

RESIDENT = 4
"""Programs of parts that a multiprocessor is counted to hold at a time, with tiles of one wave."""
LARGEST = 64 * 1024
"""Bytes of a program's queries where shared memory is large, else half of them; of more, some tokens at a time."""


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    lengths: torch.Tensor,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
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

    A `cap` above 0 makes scores cap · tanh(score / cap). `sinks` (H,), in bf16, fp16 or fp32, are one more logit a
    head in the softmax's denominator, which has no value and no cap.
    Not differentiable.

    Raises `TypeError` for a wrong dtype and `ValueError` for a wrong shape, device or cap.
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
    if sinks is not None:
        check("sinks", sinks, shape=(H,), like=q)
    if not 0 <= cap < math.inf:
        raise ValueError(f"cap is {cap}, expected a number above 0, or 0 for none")
    output: torch.Tensor = _attention_decode(q, k_cache, v_cache, block_table, lengths, sinks, float(cap))
    return output


@triton.jit(do_not_specialize=["heads", "parts"])
def _part(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, table, lengths, out, sums, levels, q_strides, k_strides, v_strides, stride_table, heads, parts, scale,
    sinks, c: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One part of the cache of one sequence and key head, for all its queries. Strides are those of batch (of the
    caches: page), token and head.

    Key heads are the fastest coordinate: they lie side by side in the cache. Where there is one part (WHOLE) the
    output is written; else the part's mean (B, Sq, H, parts, D) and its base-2 log-sum-exp (B, Sq, H, parts) are.
    """
    program = tl.program_id(0)
    head = program % heads
    part = program // heads % parts
    batch = (program // heads // parts).to(tl.int64)
    length = tl.load(lengths + batch)
    share = tl.cdiv(tl.cdiv(length, parts), c.keys) * c.keys
    low = part * share
    mean, level = attended(
        q, k, v, table, q_strides, k_strides, v_strides, stride_table, heads, scale, sinks, batch, head, length,
        low, tl.minimum(low + share, length), c,
    )  # fmt: skip
    if WHOLE:
        stored(out, mean, batch, heads, head, c)
    else:
        row = tl.arange(0, c.rows)
        token = row // c.groups
        width = tl.arange(0, c.width)
        inside = (token < c.queries)[:, None] & (width < c.D)[None, :]
        at = ((batch * c.queries + token) * (heads * c.groups) + head * c.groups + row % c.groups) * parts + part
        tl.store(sums + at[:, None] * c.D + width[None, :], mean, inside)
        tl.store(levels + at, level, token < c.queries)


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
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
    parts: int | None = None,
    tile: Tile | None = None,
    shares: int | None = None,
) -> torch.Tensor:
    """`attention_decode` without its checks. `parts` of a sequence or `shares` of a head, 0 for none, and the tile
    are as measured best unless they are given.
    """
    B, Sq, H, D = q.shape
    out = torch.empty((B, Sq, H, D), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    if q.stride(3) != 1:
        q = q.contiguous()
    k_cache, v_cache = (x if x.stride(3) == 1 or D == 1 else x.contiguous() for x in (k_cache, v_cache))
    lengths = lengths.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    if block_table is not None:
        block_table = block_table.contiguous()
    page, heads = k_cache.shape[1], k_cache.shape[2]
    groups = H // heads
    width = max(16, power_of_2(D))
    held = LARGEST if roomy(capability(q.device)) else LARGEST // 2
    most = max(1, held // (width * groups * q.element_size()))
    if Sq > most and tile is None:
        for first in range(0, Sq, most):
            some = q[:, first : first + most]
            left = (lengths - (Sq - first - some.shape[1])).clamp_min_(0)
            out[:, first : first + most] = launch(
                some, k_cache, v_cache, block_table, left, sinks, cap, parts, None, shares
            )
        return out
    tokens = page if block_table is None else page * block_table.shape[1]
    rows, paged = max(16, power_of_2(Sq * groups)), 0 if block_table is None else page
    processors = multiprocessors(q)
    fit = fit_for(rows, D, q.element_size(), paged, capability(q.device))
    if shares is None and parts is None and tile is None and fit is not None:
        shares = shares_of(B, heads, tokens, fit, processors)
    tile = tile or tile_for(rows, D, q.element_size(), paged > 0, capability(q.device))
    c = Config(Sq, groups, D, rows, tile.keys, width, paged, tile.stages, cap)
    table, stride_table = (lengths, 0) if block_table is None else (block_table, block_table.stride(0))
    strides = q.stride()[:3], k_cache.stride()[:3], v_cache.stride()[:3], stride_table
    scale = LOG2E / math.sqrt(D)
    if shares:
        registers = None if fit is None else fit.registers
        with on(q):
            attend(q, k_cache, v_cache, table, lengths, out, strides, heads, scale, sinks, c, registers, shares)
        return out
    if parts is None:
        parts = split(B, heads, tokens, tile, processors)
    sums = levels = out
    if parts > 1:
        sums = torch.empty((B, Sq, H, parts, D), dtype=torch.float32, device=q.device)
        levels = torch.empty((B, Sq, H, parts), dtype=torch.float32, device=q.device)
    with on(q):
        _part[(B * parts * heads,)](
            q, k_cache, v_cache, table, lengths, out, sums, levels, *strides, heads, parts, scale, sinks, c,
            parts == 1, num_warps=tile.warps,
        )  # fmt: skip
        if parts > 1:
            join[(B * Sq * H,)](out, sums, levels, parts, D, power_of_2(parts), width, num_warps=4)
    return out


def _launch(*arguments: Any) -> torch.Tensor:
    return launch(*arguments)


_attention_decode = operator(
    "attention_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? block_table, Tensor lengths,"
    " Tensor? sinks, float cap) -> Tensor",
    _launch,
    lambda q, *_: torch.empty(q.shape, dtype=q.dtype, device=q.device),
)
