"""Decoding attention whose programs take equal shares of all sequences.

There are as many programs as the device holds at a time. Those of a key head divide the tiles of keys of all
sequences, laid end to end, into equal shares, as stream-K divides a product (Osama et al., arXiv 2301.03598): none
ends long before another, however many the sequences are and however unlike their lengths. A share may begin or end
within a sequence; what it has of such a one is a part, and a second kernel joins the parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .._common import most_registers, power_of_2
from ._decode_tiles import Config, attended, stored

WARPS = 4
LONG = 2560
"""Tokens of a cache beside which it costs little that programs look up what is theirs and parts are joined."""
LEAST = 1024
"""Tokens of one where a short second wave costs more than that."""
JOINED = 16
"""Parts of a sequence that are joined at a time."""


@triton.jit
def _tiles(lengths, at, B, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Tiles of the sequences `at`: one at the least, as an empty one has an output too, and none beyond B."""
    tokens = tl.load(lengths + at, at < B, 0)
    return tl.where(at < B, tl.maximum(tl.cdiv(tokens, KEYS), 1), 0)


@triton.jit
def _begin(share, shares, total):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The first tile of a share: the first shares have what is left over, one tile each, and are all that have any
    where tiles are fewer. Products of all three would need 64 bits.
    """
    return share * (total // shares) + tl.minimum(share, total % shares)


@triton.jit
def _share_of(tile, shares, total):  # type: ignore[no-untyped-def]  # as above
    """The share that has a tile."""
    each = total // shares
    longer = total % shares
    first = longer * (each + 1)
    return tl.where(tile < first, tile // (each + 1), longer + (tile - first) // each)


@triton.jit(do_not_specialize=["B", "heads", "shares"])
def _share(  # type: ignore[no-untyped-def]  # as above
    q, k, v, table, lengths, out, sums, levels, q_strides, k_strides, v_strides, stride_table, B, heads, shares,
    scale, sinks, c: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """One share of a key head's tiles, of which key heads are the fastest coordinate too.

    Of a sequence that lies in the share as a whole the output is written; else the part's mean (shares, 2, Hkv,
    queries times groups, D) and its base-2 log-sum-exp (shares, 2, Hkv, queries times groups) are, second where
    the sequence begins in the share, and first where it began before.
    """
    program = tl.program_id(0)
    head = program % heads
    share = program // heads
    sequences = tl.arange(0, SEVERAL)
    each = _tiles(lengths, sequences, B, c.keys)
    total = tl.sum(each)
    low = _begin(share, shares, total)
    high = _begin(share + 1, shares, total)
    # The sequence of the first tile, and the tiles before it.
    over = (sequences < B) & (tl.cumsum(each, 0) <= low)
    batch = tl.sum(over.to(tl.int32))
    before = tl.sum(tl.where(over, each, 0))
    while low < high:
        length = tl.load(lengths + batch)
        tiles = tl.maximum(tl.cdiv(length, c.keys), 1)
        begins = low == before
        mean, level = attended(
            q, k, v, table, q_strides, k_strides, v_strides, stride_table, heads, scale, sinks, batch.to(tl.int64),
            head, length, (low - before) * c.keys, tl.minimum((high - before) * c.keys, length), c,
        )  # fmt: skip
        if begins & (before + tiles <= high):
            stored(out, mean, batch.to(tl.int64), heads, head, c)
        else:
            row = tl.arange(0, c.rows)
            width = tl.arange(0, c.width)
            real = row < c.queries * c.groups
            at = _part_at(share, begins, heads, head, c) + row
            tl.store(sums + at[:, None] * c.D + width[None, :], mean, real[:, None] & (width < c.D)[None, :])
            tl.store(levels + at, level, real)
        before += tiles
        low = before
        batch += 1


@triton.jit
def _part_at(share, begins, heads, head, c: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Where the rows of a part begin."""
    return ((share * 2 + begins.to(tl.int32)) * heads + head) * (c.queries * c.groups)


@triton.jit(do_not_specialize=["B", "heads", "shares"])
def _join(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, sums, levels, lengths, B, heads, shares, c: tl.constexpr, SEVERAL: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The output of one query of a sequence that has parts: their means, weighed by the sums of exponentials they
    stand for, PARTS of them at a time.
    """
    WIDTH: tl.constexpr = c.width
    program = tl.program_id(0)
    row = program % (c.queries * c.groups)
    head = program // (c.queries * c.groups) % heads
    batch = program // (c.queries * c.groups) // heads
    sequences = tl.arange(0, SEVERAL)
    each = _tiles(lengths, sequences, B, c.keys)
    total = tl.sum(each)
    before = tl.sum(tl.where(sequences < batch, each, 0))
    shares = tl.minimum(shares, total)  # more have no tile
    after = before + tl.sum(tl.where(sequences == batch, each, 0))
    opens = _share_of(before, shares, total)
    closes = _share_of(after - 1, shares, total)
    if opens < closes:
        width = tl.arange(0, c.width)
        acc = tl.zeros([WIDTH], tl.float32)
        highest = float("-inf")
        weight = 0.0
        for first in range(opens, closes + 1, PARTS):
            share = first + tl.arange(0, PARTS)
            at = _part_at(share, share == opens, heads, head, c) + row
            level = tl.load(levels + at, share <= closes, float("-inf"))
            now = tl.maximum(highest, tl.max(level, 0))
            base = tl.where(now == float("-inf"), 0.0, now)
            weights = tl.exp2(level - base)
            inside = (share <= closes)[:, None] & (width < c.D)[None, :]
            means = tl.load(sums + at[:, None] * c.D + width[None, :], inside, 0.0)
            correction = tl.exp2(highest - base)
            acc = acc * correction + tl.sum(means * weights[:, None], 0)
            weight = weight * correction + tl.sum(weights, 0)
            highest = now
        acc = acc / tl.where(weight == 0.0, 1.0, weight)
        token = row // c.groups
        at = (batch.to(tl.int64) * c.queries + token) * (heads * c.groups) + head * c.groups + row % c.groups
        tl.store(out + at * c.D + width, acc.to(out.dtype.element_ty), width < c.D)


class Fit(NamedTuple):
    """Programs of shares that a multiprocessor holds, with as many registers as that leaves, and from how many
    to how many programs of whole sequences for each multiprocessor are a second wave that is a short one.
    """

    shares: int
    short: tuple[float, float] = (0.0, 0.0)

    @property
    def registers(self) -> int:
        """The most of a thread of a program of shares."""
        return 65536 // (32 * WARPS * self.shares) // 8 * 8


FITS = {128: Fit(4, (5.0, 6.4)), 256: Fit(3)}
"""By head dimension."""
PAGE = 64
"""Tokens of a page at the least: of smaller ones a tile of keys has several, whose numbers take registers too."""


def fit_for(rows: int, D: int, element: int, page: int, device: tuple[int, int]) -> Fit | None:
    """How programs fit of `rows` rows of queries and numbers of `element` bytes, in pages of so many tokens (0: a
    contiguous cache), on a device of that compute capability; None where parts and whole sequences are faster: of
    other dimensions, and of more rows, programs of shares need too many registers, and what is gained in a
    contiguous cache is less. How many fit on other GPUs than Hopper's was not measured.
    """
    return FITS.get(D) if rows <= 16 and element == 2 and page >= PAGE and device == (9, 0) else None


def shares_of(B: int, heads: int, tokens: int, fit: Fit, processors: int) -> int:
    """Programs of each of `heads` key heads, for B sequences in caches with room for `tokens` each: together
    about as many as the device holds at a time, because a second wave would last as long as the first. 0 where
    other ways are taken: few sequences are better split each into as many parts, and of many the programs that
    begin as others end even out what these take.

    As measured on an H200, lengths that differ by more than a factor of two gain most. Those that are alike have
    nothing to even out and lose up to 4 %, but where a second wave of whole sequences would be a short one; of
    shorter caches that is all that is gained, and lengths from half on lose what equal ones gain by half. Where
    there are about as many sequences as shares, each is one, so that equal ones have no parts to be joined.
    """
    held, programs = fit.shares * processors, B * heads
    share = held // heads
    low, high = fit.short
    uneven = tokens >= LONG and 0.25 < programs / held <= 2
    last = tokens >= LEAST and low < programs / processors <= high
    if not (uneven or last):
        return 0
    return B if 0.8 * share <= B <= share else share


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    strides: tuple[Any, ...],
    heads: int,
    scale: float,
    sinks: torch.Tensor | None,
    c: Config,
    registers: int | None,
    shares: int,
) -> None:
    """Writes `out`, by so many shares of a key head; the device is that of q."""
    B, Sq, H, D = q.shape
    sums = levels = out
    if shares > 1:
        sums = torch.empty((shares, 2, heads, c.queries * c.groups, D), dtype=torch.float32, device=q.device)
        levels = torch.empty((shares, 2, heads, c.queries * c.groups), dtype=torch.float32, device=q.device)
    several = power_of_2(B)
    _share[(shares * heads,)](
        q, k_cache, v_cache, table, lengths, out, sums, levels, *strides, B, heads, shares, scale, sinks, c,
        several, num_warps=WARPS, **most_registers(q, registers),
    )  # fmt: skip
    if shares > 1:
        _join[(B * H * Sq,)](out, sums, levels, lengths, B, heads, shares, c, several, JOINED, num_warps=2)
