"""Keeping a run within a time: which cells are left out of it. Pure.

Left out is what says least. First implementations that are a library's own plain reference, which nobody would
pick and which take longest. Then cases: of each operator the one is kept first that its plan names first, then
always the one that is least like those that are kept, operators in turns. The implementations of a case stay
together, as only they compare.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest

from ..registry.store.record import REFERENCE, Case, Key
from .estimate import Cost
from .plan import Cell, Plan

START_S = 8.0
"""Until a worker has loaded torch and measured the ceilings; each environment of each replicate pays it."""
APART = 2.0
"""How unlike another dtype, pass or option makes two cases: as much as a size four times as large."""


def fit(
    cells: Sequence[Cell], replicates: int, budget_s: float, cost: Cost, control: str | None = None
) -> tuple[Cell, ...]:
    """The cells that a budget is likely to suffice for, in their order; one case at least, and `control`
    (operator/case), which every shard of a run has.
    """
    left = budget_s - replicates * _starts(cells, cost) * START_S
    kept: set[Key] = set()
    cases: set[str] = set()
    for case in sorted(ranked(cells), key=lambda x: x[0].case.full_name != control):
        name = case[0].case.full_name
        needed = replicates * cost(case)
        if needed <= left or not kept or name == control:
            kept |= {x.identity for x in case}
            cases.add(name)
            left -= needed
    for cell in cells:
        needed = replicates * cost([cell])
        if _reference(cell) and cell.identity not in kept and needed <= left and cell.case.full_name in cases:
            kept.add(cell.identity)
            left -= needed
    return tuple(x for x in cells if x.identity in kept)


def ranked(cells: Iterable[Cell]) -> list[list[Cell]]:
    """The cells by case, what says most first; without references, but for cases that have nothing else."""
    cells = tuple(cells)
    others = {x.case.full_name for x in cells if not _reference(x)}
    cases: dict[str, dict[tuple[str, str], list[Cell]]] = {}
    for cell in cells:
        if not _reference(cell) or cell.case.full_name not in others:
            mine = cases.setdefault(cell.case.operator, {})
            mine.setdefault((cell.case.name, cell.cache), []).append(cell)
    by_operator = [_spread(list(x.values())) for x in cases.values()]
    return [case for turn in zip_longest(*by_operator) for case in turn if case is not None]


def first(walk: Iterable[Cell], cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """The walk of a replicate through `cells`, the cases that say most first: if time ends, least is lost."""
    place: dict[str, int] = {}
    for case in ranked(cells):
        place.setdefault(case[0].case.full_name, len(place))
    return tuple(sorted(walk, key=lambda x: place[x.case.full_name]))


def _reference(cell: Cell) -> bool:
    return cell.implementation.name.endswith(REFERENCE)


def _spread(cases: list[list[Cell]]) -> list[list[Cell]]:
    """The first, then always the one that is farthest from all that went before (Gonzalez 1985)."""
    out, left = cases[:1], cases[1:]
    nearest = [_distance(x[0].case, cases[0][0].case) for x in left]
    while left:
        place = max(range(len(left)), key=lambda i: nearest[i])
        chosen = left.pop(place)
        nearest.pop(place)
        out.append(chosen)
        nearest = [min(y, _distance(x[0].case, chosen[0].case)) for x, y in zip(left, nearest, strict=True)]
    return out


def _distance(a: Case, b: Case) -> float:
    """Of two cases of one operator: doublings of sizes, and what else differs."""
    sizes = sum(abs(math.log2((a.axes[x] + 1) / (b.axes.get(x, 0) + 1))) for x in a.axes)
    others = sum(a.options[x] != b.options.get(x) for x in a.options)
    return sizes + APART * (others + (a.dtype != b.dtype) + (a.pass_ != b.pass_))


def seconds(cells: Collection[Cell], replicates: int, cost: Cost) -> float:
    """What a run of these cells is likely to take."""
    return replicates * (_starts(cells, cost) * START_S + cost(cells))


def _starts(cells: Iterable[Cell], cost: Cost) -> int:
    """How many workers a replicate has: one for each environment in which anything runs."""
    return len({x.implementation.environment for x in cells if cost([x]) > 0})


def without(cells: Iterable[Cell], kept: Iterable[Cell]) -> tuple[Cell, ...]:
    """The cells that are not kept."""
    names = {x.identity for x in kept}
    return tuple(x for x in cells if x.identity not in names)


def narrowed(plan: Plan, cells: Collection[Cell]) -> Plan:
    """The plan of these cells alone."""
    names: dict[str, dict[str, None]] = {}
    for cell in cells:
        names.setdefault(cell.case.full_name, {}).setdefault(cell.implementation.name)
    cases = tuple(x for x in plan.cases if x.full_name in names)
    return replace(plan, cases=cases, only={key: tuple(x) for key, x in names.items()})
