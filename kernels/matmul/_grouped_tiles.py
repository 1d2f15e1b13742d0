"""Which rows of which group the tiles of a product of groups have: a list made on the device, in one launch.

How many rows a group has is known to the device only, so that the list has room for the most tiles that there can
be, and a number says how many there are. Groups without rows have no tile, and no tile has rows of two groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .._common import cdiv, on, power_of_2

CONTIGUOUS = tl.constexpr("contiguous")
COMPACT = tl.constexpr("compact")


@dataclass(frozen=True)
class TileList:
    """Of up to `most` tiles of `height` rows the groups and the first rows, int32, and how many there are."""

    height: int
    most: int
    groups: torch.Tensor
    rows: torch.Tensor
    total: torch.Tensor


@triton.jit
def _list_rows(  # type: ignore[no-untyped-def]  # Triton's types are its own
    groups_of, groups, rows, total, most, HEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """One program. `groups_of` each row: tiles whose first row has no group are left out."""
    found = 0
    for first in range(0, most, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        group = tl.load(groups_of + tile * HEIGHT, tile < most, -1)
        there = group >= 0
        place = found + tl.cumsum(there.to(tl.int32), 0) - 1
        tl.store(groups + place, group, there)
        tl.store(rows + place, tile * HEIGHT, there)
        found += tl.sum(there.to(tl.int32), 0)
    tl.store(total, found)


@triton.jit(do_not_specialize=["room"])
def _list_counted(  # type: ignore[no-untyped-def]  # Triton's types are its own
    counts, groups, rows, total, starts, E, room,
    HEIGHT: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program. A count beyond a group's `room` is taken for it: what lies behind the list is not its. Rows of
    a group count from its own first one, or, compact, all groups' follow each other, each from the beginning of a
    tile: then `starts` gets where each begins.
    """
    group = tl.arange(0, WIDE)
    count = tl.minimum(tl.load(counts + group, group < E, 0), room)
    own = (count + HEIGHT - 1) // HEIGHT
    ends = tl.cumsum(own, 0)
    if KIND == COMPACT:
        tl.store(starts + group, (ends - own) * HEIGHT, group < E)
    all_of_them = tl.sum(own, 0)
    tl.store(total, all_of_them)
    for first in range(0, all_of_them, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        # A tile is the group's before which as many groups end.
        before = ends[None, :] <= tile[:, None]
        there = tile < all_of_them
        tl.store(groups + tile, tl.sum(before.to(tl.int32), 1), there)
        nth = tile
        if KIND != COMPACT:
            nth = tile - tl.sum(tl.where(before, own[None, :], 0), 1)
        tl.store(rows + tile, nth * HEIGHT, there)


def _room(x: torch.Tensor, height: int, most: int) -> TileList:
    groups, rows = torch.empty(2, most, dtype=torch.int32, device=x.device)
    return TileList(height, most, groups, rows, torch.empty(1, dtype=torch.int32, device=x.device))


def contiguous(groups_of: torch.Tensor, height: int) -> TileList:
    """Of rows (T,) whose groups these are, -1 for none, and whose groups begin at multiples of `height`."""
    tiles = _room(groups_of, height, cdiv(groups_of.numel(), height))
    with on(groups_of):
        _list_rows[(1,)](groups_of, tiles.groups, tiles.rows, tiles.total, tiles.most, height, 1024, num_warps=4)
    return tiles


def masked(counts: torch.Tensor, height: int, rows: int) -> TileList:
    """Of groups with room for `rows` each, of which so many count (E,): rows count from a group's first one."""
    E = counts.numel()
    tiles = _room(counts, height, E * cdiv(rows, height))
    _list(counts, tiles, tiles.total, rows, "masked")
    return tiles


def compact(counts: torch.Tensor, height: int, rows: int) -> tuple[TileList, torch.Tensor]:
    """(the tiles of groups of so many rows (E,), of `rows` in all; where each group's rows begin)."""
    E = counts.numel()
    # Each group that has rows leaves one tile at most unfilled.
    tiles = _room(counts, height, rows // height + min(E, rows))
    starts = torch.empty_like(counts)
    _list(counts, tiles, starts, rows, "compact")
    return tiles, starts


def _list(counts: torch.Tensor, tiles: TileList, starts: torch.Tensor, room: int, kind: str) -> None:
    wide = power_of_2(counts.numel())
    with on(counts):
        _list_counted[(1,)](
            counts, tiles.groups, tiles.rows, tiles.total, starts, counts.numel(), room, tiles.height, kind, wide,
            max(1, 4096 // wide), num_warps=4,
        )  # fmt: skip
