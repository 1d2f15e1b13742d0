"""Latent attention of new tokens to a paged cache (DeepSeek-V2, arXiv 2405.04434), split over the cache as
`attention_decode.py` is.

All heads read one vector a token, which is the key and, but for its rotary part, the value: a tile of the cache is
loaded once for both products. Queries of all heads and new tokens of a sequence are the rows of tiles; the output
of a row has 512 columns, so that a program holds few rows.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._common import capability, cdiv, check, multiprocessors, on, operator, power_of_2, roomy
from .._online_softmax import weighted_if_seen
from ._parts import LONGEST_PARTS, join
from ._tile_functions import LOG2E

MOST = (512, 128)
"""The most latent and rotary dimensions: registers and shared memory are made for 512 and 64."""


def attention_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    latent: int,
    scale: float,
) -> torch.Tensor:
    """softmax(q·cacheᵀ · scale)·cache[…, :C] of q (B, Sq, H, C + R) over the cached vectors of each sequence:
    (B, Sq, H, C), contiguous, C being `latent`.

    The cache is pages (pages, page, C + R), of which `block_table` (B, n) int32 gives sequence b those at its
    places 0 to n − 1; page is a power of two of at least 16. `lengths` (B,) int32 counts the tokens of each
    sequence in the cache, the Sq new ones included and last: token i sees the first length − Sq + i + 1. q and the
    cache are in one of bf16, fp16, fp32, with a contiguous last dimension; C from 16 to 512, a power of two, R
    from 0 to 128. A token that sees nothing gives zeros.

    Places of the block table beyond a sequence's length are not read. Lengths and pages beyond the cache are not
    checked, because that would wait for the device.
    Not differentiable.

    Raises `TypeError` for a wrong dtype and `ValueError` for a wrong shape or device.
    """
    check("q", q, dim=4)
    B, _, _, D = q.shape
    if not 16 <= latent <= MOST[0] or latent & (latent - 1) or not 0 <= D - latent <= MOST[1]:
        raise ValueError(
            f"q has {latent} latent of {D} dimensions, expected a power of two from 16 to {MOST[0]} and up to "
            f"{MOST[1]} rotary ones"
        )
    check("cache", cache, dim=3, dtypes=(q.dtype,), like=q)
    page = cache.shape[1]
    if page < 16 or page & (page - 1):
        raise ValueError(f"cache has pages of {page} tokens, expected a power of two of at least 16")
    check("cache", cache, shape=(cache.shape[0], page, D))
    check("block_table", block_table, dim=2, dtypes=(torch.int32,), like=q)
    check("block_table", block_table, shape=(B, block_table.shape[1]), dtypes=(torch.int32,))
    check("lengths", lengths, shape=(B,), dtypes=(torch.int32,), like=q)
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}, expected a finite number")
    output: torch.Tensor = _attention_mla_decode(q, cache, block_table, lengths, latent, float(scale))
    return output


@dataclass(frozen=True)
class Config:
    """The kernel at compile time: new tokens and heads of a sequence, latent and rotary dimensions, columns of a
    tile of the latter, rows and keys of a tile, tokens of a page, whether there is one part, and stages.
    """

    tokens: int
    heads: int
    latent: int
    rotary: int
    width: int
    rows: int
    keys: int
    page: int
    whole: bool
    stages: int


@triton.jit(do_not_specialize=["blocks", "parts"])
def _part(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, cache, table, lengths, out, sums, levels,
    q_strides, cache_strides, stride_table, blocks, parts, scale, c: tl.constexpr,
):  # fmt: skip
    """One part of the cache of one sequence, for one block of its rows, which are its tokens' heads.

    Blocks of rows are the fastest coordinate: they read the same vectors. Of a whole cache there is one part, and
    the output is written; else the unnormalized sum (B, Sq, H, parts, C) and its base-2 log-sum-exp are.
    """
    C: tl.constexpr = c.latent
    ROWS: tl.constexpr = c.rows
    KEYS: tl.constexpr = c.keys
    ROTARY: tl.constexpr = c.width
    program = tl.program_id(0)
    block = program % blocks
    part = program // blocks % parts
    batch = (program // blocks // parts).to(tl.int64)
    length = tl.load(lengths + batch)
    share = tl.cdiv(tl.cdiv(length, parts), KEYS) * KEYS
    low = part * share
    high = tl.minimum(low + share, length)
    row = block * ROWS + tl.arange(0, ROWS)
    token = row // c.heads
    inside = row < c.tokens * c.heads
    own = q + batch * q_strides[0] + (token * q_strides[1] + row % c.heads * q_strides[2])[:, None]
    column = tl.arange(0, C)
    turned = tl.arange(0, ROTARY)
    queries = tl.load(own + column[None, :], inside[:, None], 0.0)
    rotary = tl.load(own + C + turned[None, :], inside[:, None] & (turned < c.rotary)[None, :], 0.0)
    total = tl.zeros([ROWS, C], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    lane = tl.arange(0, KEYS)
    last = length - c.tokens + token
    for start in tl.range(low, high, KEYS, num_stages=c.stages):
        place = start + lane
        seen = place < high
        page = tl.load(table + batch * stride_table + place // c.page, seen, 0).to(tl.int64)
        at = cache + (page * cache_strides[0] + (place % c.page).to(tl.int64) * cache_strides[1])[:, None]
        vectors = tl.load(at + column[None, :], seen[:, None], 0.0)
        positions = tl.load(at + C + turned[None, :], seen[:, None] & (turned < c.rotary)[None, :], 0.0)
        # S = (Q·Cᵀ + Q_rotary·C_rotaryᵀ) · scale
        scores = tl.dot(queries, tl.trans(vectors), input_precision="ieee")
        scores = tl.dot(rotary, tl.trans(positions), scores, input_precision="ieee") * scale
        scores = tl.where(seen[None, :] & (place[None, :] <= last[:, None]), scores, float("-inf"))
        weights, correction, row_max, row_sum = weighted_if_seen(scores, row_max, row_sum)
        # O = O·2^(m_old - m) + P·C
        total = tl.dot(weights.to(vectors.dtype), vectors, total * correction[:, None], input_precision="ieee")
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    total = total / row_sum[:, None]
    row_at = batch * c.tokens * c.heads + row
    if c.whole:
        tl.store(out + row_at[:, None] * C + column[None, :], total.to(out.dtype.element_ty), inside[:, None])
    else:
        row_at = row_at * parts + part
        tl.store(sums + row_at[:, None] * C + column[None, :], total, inside[:, None])
        tl.store(levels + row_at, tl.where(empty, float("-inf"), row_max + tl.log2(row_sum)), inside)


class Tile(NamedTuple):
    """Rows and keys of a tile, warps and stages of a program. Chosen by what fits, not measured."""

    rows: int
    keys: int
    warps: int
    stages: int


def tile_for(rows: int, element: int, device: tuple[int, int]) -> Tile:
    """For `rows` rows of a sequence and numbers of `element` bytes: shared memory holds the queries' 576 columns
    and the stages' vectors of as many, registers 512 sums a row.
    """
    if element == 4:
        return Tile(16, 16, 4, 1)
    if not roomy(device):
        return Tile(16, 32, 4, 1)
    return Tile(min(64, max(16, power_of_2(rows))), 32, 8 if rows > 16 else 4, 2)


JOINED = 64
"""Columns of an output that one program joins, of 128 parts in 64 registers of a thread."""
LEAST = 128
"""Keys of a part at the least."""


def split(programs: int, tokens: int, keys: int, multiprocessors: int) -> int:
    """Parts of a cache of so many tokens, read in blocks of `keys`, that `programs` programs read as a whole. One
    fills a multiprocessor's registers: as many parts as keep the fewest of them waiting for the last round, each
    with two blocks more for its beginning and end.
    """
    blocks = cdiv(tokens, keys)
    most = max(1, min(cdiv(tokens, LEAST), LONGEST_PARTS, cdiv(2 * multiprocessors, programs)))
    return min(
        range(1, most + 1), key=lambda parts: cdiv(programs * parts, multiprocessors) * (cdiv(blocks, parts) + 2)
    )


@functools.cache
def _hopper(device: torch.device) -> ModuleType | None:
    """The kernel for Hopper, where the device is one."""
    if capability(device) != (9, 0):
        return None
    from . import _attention_mla_decode_hopper

    return _attention_mla_decode_hopper


def launch(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    latent: int,
    scale: float,
    parts: int | None = None,
) -> torch.Tensor:
    """`attention_mla_decode` without its checks; `parts` so that the device is full unless they are given."""
    B, Sq, H, D = q.shape
    out = torch.empty((B, Sq, H, latent), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    q, cache = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, cache))
    block_table, lengths = block_table.contiguous(), lengths.contiguous()
    page, tokens = cache.shape[1], cache.shape[1] * block_table.shape[1]
    tile = tile_for(Sq * H, q.element_size(), capability(q.device))
    own = _hopper(q.device)
    # The kernel for Hopper scales a row's largest score; by what is not positive another one would be the largest.
    own = own if own is not None and tokens and scale > 0 and own.takes(q, cache, latent) else None
    blocks = cdiv(Sq * H, tile.rows if own is None else own.ROWS)
    if parts is None:
        parts = split(B * blocks, tokens, tile.keys if own is None else own.KEYS, multiprocessors(q))
    sums = levels = out
    if parts > 1:
        sums = torch.empty((B, Sq, H, parts, latent), dtype=torch.float32, device=q.device)
        levels = torch.empty((B, Sq, H, parts), dtype=torch.float32, device=q.device)
    if own is not None:
        own.attend(q, cache, block_table, lengths, out, sums, levels, LOG2E * scale, parts)
    else:
        rotary = D - latent
        width = max(16, power_of_2(rotary))
        c = Config(Sq, H, latent, rotary, width, tile.rows, tile.keys, page, parts == 1, tile.stages)
        with on(q):
            _part[(B * parts * blocks,)](
                q, cache, block_table, lengths, out, sums, levels,
                q.stride()[:3], cache.stride()[:2], block_table.stride(0), blocks, parts, LOG2E * scale, c,
                num_warps=tile.warps,
            )  # fmt: skip
    if parts > 1:
        width = min(latent, JOINED)
        with on(q):
            join[(B * Sq * H, latent // width)](
                out, sums, levels, parts, latent, power_of_2(parts), width, num_warps=4
            )
    return out


def _launch(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    latent: int,
    scale: float,
) -> torch.Tensor:
    return launch(q, cache, block_table, lengths, latent, scale)


_attention_mla_decode = operator(
    "attention_mla_decode(Tensor q, Tensor cache, Tensor block_table, Tensor lengths, int latent, float scale)"
    " -> Tensor",
    _launch,
    lambda q, cache, table, lengths, latent, scale: q.new_empty((*q.shape[:3], latent)),
)
