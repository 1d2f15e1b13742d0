"""Which schedule a product takes on Hopper: a pure function of its size, with what was tuned as data.

`TUNED` holds what was fastest of `candidates` at the shapes that were measured; a product of another size takes
what `estimate` finds cheapest. Nothing is searched for at run time, so that two processes compute alike.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ._matmul_hopper import Schedule

SIXTEEN = "16"
FAST = "fp8"
PROMOTED = "fp8_block"
"""Kinds of products: of 16-bit numbers; of 8-bit ones with scales that the sum is multiplied by; and with scales
for each 128 steps of K."""


@dataclass(frozen=True)
class Choice:
    """A schedule, how many of its tiles are dealt out whole, and rows of tiles that are neighbours."""

    schedule: Schedule
    dealt: int
    section: int


def candidates(kind: str, gated: bool) -> tuple[Schedule, ...]:
    """What a product can be computed by, the largest tiles first."""
    if gated:
        return (
            Schedule(columns=128, stages=4, gated=True),
            Schedule(groups=1, columns=128, stages=5, gated=True),
            Schedule(groups=1, columns=64, stages=8, gated=True),
        )
    if kind == PROMOTED:
        return (
            Schedule(rows=128, columns=128, step=128, stages=4, scales="block"),
            Schedule(columns=128, step=128, stages=6, scales="block"),
            Schedule(groups=1, columns=128, step=128, stages=8, scales="block"),
            Schedule(groups=1, columns=64, step=128, stages=12, scales="block"),
        )
    step = 64 if kind == SIXTEEN else 128
    return (
        Schedule(columns=256, step=step, stages=4),
        Schedule(columns=128, step=step, stages=6),
        Schedule(groups=1, columns=256, step=step, stages=5),
        Schedule(groups=1, columns=128, step=step, stages=8),
        Schedule(groups=1, columns=64, step=step, stages=12),
    )


def tiles(schedule: Schedule, M: int, N: int) -> int:
    """Tiles of a product."""
    return -(-M // (schedule.groups * schedule.rows)) * -(-N // schedule.columns)


def dealt(count: int, programs: int) -> int:
    """Of `count` tiles, how many are dealt out whole: all, if the last round is nearly full; else all rounds but
    the last full one and what follows it, so that a program's share is between one tile and two, or less than one
    of too few tiles.
    """
    rounds, left = divmod(count, programs)
    if left == 0 or left * 8 > programs * 7 or rounds >= 12:
        return count
    return max(rounds - 1, 0) * programs


def estimate(schedule: Schedule, M: int, N: int, K: int, whole: int, programs: int) -> float:
    """About how many cycles a product takes: of the busiest program, steps times what each takes the matrix units
    or the loads, whichever is more, and what begins and ends each tile.
    """
    count = tiles(schedule, M, N)
    steps = -(-K // schedule.step)
    pieces = 2 if schedule.gated else 1
    size = 2 if schedule.step == 64 else 1
    height = schedule.groups * schedule.rows
    columns = schedule.columns * pieces
    products = height * columns * schedule.step / (2048 * 2 // size)
    if columns < 128 or schedule.groups == 1:
        products *= 1.15  # one group leaves the matrix units idle between its products
    if schedule.scales == "block":
        products *= 1.1
    loads = (min(height, M) + columns) * schedule.step * size / 48
    from_memory = columns * schedule.step * size / 19 if height >= M else 0.0
    rounds = -(-whole // programs)
    shared = (count - whole) / programs
    ends = 1200 * (rounds + (2 if shared else 0)) + (2500 if shared else 0)
    return (rounds + shared) * steps * max(products, loads, from_memory) + ends


TUNED: dict[tuple[str, int, int, int], tuple[int, bool, int]] = {}
"""By kind, `height` of M, N and K: which of `candidates`, whether tiles are shared out by steps, the section."""


def height(M: int) -> int:
    """The number of rows that a product is looked up by: few rows take as long as a few more."""
    return next((most for most in (16, 64, 128) if most >= M), M)


@functools.lru_cache(4096)
def choose(kind: str, M: int, N: int, K: int, gated: bool, programs: int) -> Choice:
    """The schedule of a product, before what its operands add: how they lie, scales, a bias."""
    some = candidates(kind, gated)
    known = None if gated else TUNED.get((kind, height(M), N, K))
    if known is not None:
        nth, shares, section = known
        count = tiles(some[nth], M, N)
        return choice(some[nth], shared_out(count, programs) if shares else count, count, section)
    best: tuple[float, Choice] | None = None
    for schedule in some:
        count = tiles(schedule, M, N)
        wholes = {count, dealt(count, programs)}
        if count < 2 * programs:
            wholes.add(0)
        for whole in sorted(wholes):
            cost = estimate(schedule, M, N, K, whole, programs)
            if best is None or cost < best[0]:
                best = cost, choice(schedule, whole, count, 8)
    assert best is not None
    return best[1]


def shared_out(count: int, programs: int) -> int:
    """As `dealt`, but some tiles are shared out in any case."""
    whole = dealt(count, programs)
    return whole if whole < count else 0


def choice(schedule: Schedule, whole: int, count: int, section: int) -> Choice:
    """With tiles shared out if not all are dealt."""
    return Choice(replace(schedule, shared=whole < count), whole, section)
