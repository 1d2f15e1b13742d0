"""A plan cut by case, so that several GPUs or machines measure it at once. Pure.

All implementations of a case stay together: they share inputs and are compared within one process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..registry.errors import InputError, short
from .estimate import estimate
from .plan import Cell, Plan


def parse(text: str) -> tuple[int, int]:
    """`2/4` as (2, 4): the second of four. Raises `InputError` for anything else."""
    found = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
    if found is None or int(found[1]) > int(found[2]):
        raise InputError(f"--shard {text!r} is no shard: i/n, such as 2/4, with i from 1 to n.")
    return int(found[1]), int(found[2])


def cut(plan: Plan, cells: Sequence[Cell], shard: tuple[int, int], control: str | None = None) -> Plan:
    """One of n parts of a plan, of about the same expected time each; the same cut on every machine.

    `control` is a case (operator/case) that every part has, so that hosts can be held against each other. Raises
    `InputError` if there are fewer cases than parts.
    """
    index, count = shard
    mine = _parts(plan, _costs(plan, cells), count, control)[index - 1]
    cases = tuple(x for x in plan.cases if x.full_name in mine)
    return replace(plan, cases=cases, only={key: names for key, names in plan.only.items() if key in mine})


def measured(plan: Plan, cells: Sequence[Cell]) -> Plan:
    """The plan with the cases alone that have a cell: none of a run's shards shall have nothing to measure.

    A comparison is cut without it: what one of its commits lacks is among its verdicts.
    """
    names = {x.case.full_name for x in cells}
    cases = tuple(x for x in plan.cases if x.full_name in names)
    return replace(plan, cases=cases, only={key: chosen for key, chosen in plan.only.items() if key in names})


def seconds(plan: Plan, cells: Sequence[Cell], count: int, control: str | None = None) -> tuple[float, ...]:
    """What each of n parts takes, expected, in one replicate."""
    costs = _costs(plan, cells)
    return tuple(sum(costs[x] for x in part) for part in _parts(plan, costs, count, control))


def control_case(plan: Plan, cells: Sequence[Cell]) -> str:
    """A case fit to be in every part: the cheapest of the half that moves most, as launches alone tell little."""
    costs = _costs(plan, cells)
    by_size = sorted(plan.cases, key=lambda x: (-x.bytes, x.full_name))
    return min((x.full_name for x in by_size[: (len(by_size) + 1) // 2]), key=lambda x: (costs[x], x))


def _parts(plan: Plan, costs: Mapping[str, float], count: int, control: str | None) -> list[set[str]]:
    if control is not None and control not in costs:
        raise InputError(
            f"plan {plan.name!r} has no case {short(control)!r} to control with: name one as OPERATOR/CASE."
        )
    if count > len(costs):
        raise InputError(f"plan {plan.name!r} has {len(costs)} cases here, too few for {count} shards.")
    loads = [0.0] * count
    parts: list[set[str]] = [set() for _ in range(count)]
    # The longest first, each to whoever has the least so far (Graham, SIAM J. Appl. Math. 17 (1969) 416).
    for name in sorted(costs, key=lambda x: (-costs[x], x)):
        lightest = min(range(count), key=lambda i: (loads[i], i))
        loads[lightest] += costs[name]
        parts[lightest].add(name)
    if control is not None:
        for part in parts:
            part.add(control)
    return parts


def _costs(plan: Plan, cells: Sequence[Cell]) -> dict[str, float]:
    """What each case takes in one replicate, expected, in seconds: by the plan alone, as machines differ."""
    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.case.full_name, []).append(cell)
    cost = estimate(plan.sampling)
    return {x.full_name: cost(rows.get(x.full_name, ())) for x in plan.cases}
