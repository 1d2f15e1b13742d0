"""A plan cut by case, so that several GPUs or machines measure it at once. Pure.

All implementations of a case stay together: they share inputs and are compared within one process. A case whose
replicates are seeds, and that takes longer than a part should, is cut by seed: of each, too, all stay together.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from ..registry.errors import InputError, short
from ..registry.figures import counted
from .estimate import estimate
from .plan import Cell, Plan

Part: TypeAlias = dict[str, tuple[int, ...]]
"""By operator/case, the replicates that a part of the plan has."""
EACH_ITS_OWN = (
    "shards would each leave out rows by themselves. Take it out of the plan; --operator or fewer cases make a "
    "run shorter."
)
"""Why a plan that has a budget is not cut."""


def parse(text: str) -> tuple[int, int]:
    """`2/4` as (2, 4): the second of four. Raises `InputError` for anything else."""
    found = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
    if found is None or int(found[1]) > int(found[2]):
        raise InputError(f"--shard {text!r} is no shard: i/n, such as 2/4, with i from 1 to n.")
    return int(found[1]), int(found[2])


def cut(
    plan: Plan, cells: Sequence[Cell], shard: tuple[int, int], control: str | None = None, *, by_seed: bool = True
) -> Plan:
    """One of n parts of a plan, of about the same expected time each; the same cut on every machine.

    `control` is a case (operator/case) that every part has, so that hosts can be held against each other. A
    comparison, whose replicates are as many as it takes, is not cut `by_seed`. Raises `InputError` if there are
    fewer cases, and seeds, than parts.
    """
    index, count = shard
    parts = _parts(plan, cells, count, control, by_seed)
    mine = parts[index - 1]
    cases = tuple(x for x in plan.cases if x.full_name in mine)
    only = {key: names for key, names in plan.only.items() if key in mine}
    seeds = {key: numbers for key, numbers in mine.items() if len(numbers) < plan.replicates}
    return replace(plan, cases=cases, only=only, seeds=seeds, cut=_digest(plan, parts))


def _digest(plan: Plan, parts: Sequence[Part]) -> str:
    """Tells one cut of a plan from that of another: all that its parts have, and by which definitions."""
    specs = {x.full_name: x.spec for x in plan.cases}
    said = [sorted((name, specs[name], sorted(numbers)) for name, numbers in part.items()) for part in parts]
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def measured(plan: Plan, cells: Sequence[Cell]) -> Plan:
    """The plan with the cases alone that have a cell: none of a run's shards shall have nothing to measure.

    A comparison is cut without it: what one of its commits lacks is among its verdicts.
    """
    names = {x.case.full_name for x in cells}
    cases = tuple(x for x in plan.cases if x.full_name in names)
    return replace(plan, cases=cases, only={key: chosen for key, chosen in plan.only.items() if key in names})


def seconds(
    plan: Plan, cells: Sequence[Cell], count: int, control: str | None = None, *, by_seed: bool = True
) -> tuple[float, ...]:
    """What each of n parts takes, expected, in one replicate; of a case it has some seeds of, as much of that."""
    costs = _costs(plan, cells)
    parts = _parts(plan, cells, count, control, by_seed)
    return tuple(sum(costs[x] * len(y) / plan.replicates for x, y in part.items()) for part in parts)


def most(plan: Plan, cells: Sequence[Cell]) -> int:
    """Into how many parts a plan can be cut: its cases, of seeds each one."""
    seeded = _seeded(cells)
    return sum(plan.replicates if x.full_name in seeded else 1 for x in plan.cases)


def control_case(plan: Plan, cells: Sequence[Cell]) -> str | None:
    """A case fit to be in every part: the cheapest of the half that moves most, as launches alone tell little.

    None where all are cut by seed: each part would have one of them whole.
    """
    costs, seeded = _costs(plan, cells), _seeded(cells)
    by_size = sorted((x for x in plan.cases if x.full_name not in seeded), key=lambda x: (-x.bytes, x.full_name))
    half = (x.full_name for x in by_size[: (len(by_size) + 1) // 2])
    return min(half, key=lambda x: (costs[x], x), default=None)


def _parts(plan: Plan, cells: Sequence[Cell], count: int, control: str | None, by_seed: bool) -> list[Part]:
    costs = _costs(plan, cells)
    if control is not None and control not in costs:
        raise InputError(
            f"plan {plan.name!r} has no case {short(control)!r} to control with: name one as OPERATOR/CASE."
        )
    every = tuple(range(plan.replicates))
    seeded = (_seeded(cells) if by_seed else frozenset()) - {control}
    units = _units(costs, seeded, every, sum(costs.values()) / count)
    if count > len(units):
        units = _units(costs, seeded, every, 0.0)
    if count > len(units):
        seeds = f" of {len(every)} seeds" if len(units) > len(costs) else ""
        there = counted(len(costs), "case")
        raise InputError(f"plan {plan.name!r} has {there}{seeds} here, too few for {count} shards.")
    loads = [0.0] * count
    parts: list[Part] = [{} for _ in range(count)]
    # The longest first, each to whoever has the least so far (Graham, SIAM J. Appl. Math. 17 (1969) 416).
    for cost, name, numbers in sorted(units, key=lambda x: (-x[0], *x[1:])):
        # Of equal ones to whoever has fewer: what cannot be measured here takes no time, and is a comparison's.
        lightest = min(range(count), key=lambda i: (loads[i], len(parts[i]), i))
        loads[lightest] += cost
        parts[lightest][name] = (*parts[lightest].get(name, ()), *numbers)
    if control is not None:
        for part in parts:
            part[control] = every
    return parts


def _units(
    costs: Mapping[str, float], seeded: Collection[str], every: tuple[int, ...], longest_s: float
) -> list[tuple[float, str, tuple[int, ...]]]:
    """What stays together: its seconds, its case and replicates. Of seeds those are apart that take longer."""
    found: list[tuple[float, str, tuple[int, ...]]] = []
    for name, cost in costs.items():
        if name in seeded and cost > longest_s:
            found += [(cost / len(every), name, (x,)) for x in every]
        else:
            found.append((cost, name, every))
    return found


def _seeded(cells: Sequence[Cell]) -> frozenset[str]:
    """The cases whose replicates are seeds."""
    return frozenset(x.case.full_name for x in cells if x.seeded)


def _costs(plan: Plan, cells: Sequence[Cell]) -> dict[str, float]:
    """What each case takes in one replicate, expected, in seconds: by the plan alone, as machines differ."""
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.case.full_name, []).append(cell)
    cost = estimate(plan.sampling)
    return {x.full_name: cost(rows.get(x.full_name, ())) for x in plan.cases}
