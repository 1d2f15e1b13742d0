"""A plan cut by case, so that several GPUs or machines measure it at once. Pure.

All implementations of a case stay together: they share inputs and are compared within one process.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ..registry.errors import InputError
from ..registry.store.record import Case
from .plan import Cell, Plan

BYTES_PER_S = 2e9
FLOPS_PER_S = 2e12
"""What building and checking a case gets through, roughly: its reference is computed in fp64 by plain calls."""


def parse(text: str) -> tuple[int, int]:
    """`2/4` as (2, 4): the second of four. Raises `InputError` for anything else."""
    found = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
    if found is None or int(found[1]) > int(found[2]):
        raise InputError(f"--shard {text!r} is no shard: i/n, such as 2/4, with i from 1 to n.")
    return int(found[1]), int(found[2])


def cut(plan: Plan, cells: Sequence[Cell], shard: tuple[int, int]) -> Plan:
    """One of n parts of a plan, of about the same expected time each; the same cut on every machine.

    Raises `InputError` if there are fewer cases than parts.
    """
    index, count = shard
    if count > len(plan.cases):
        raise InputError(f"plan {plan.name!r} has {len(plan.cases)} cases here, too few for {count} shards.")
    rows = Counter((x.case.operator, x.case.name) for x in cells)
    costs = {(x.operator, x.name): _seconds(plan, x, rows[x.operator, x.name]) for x in plan.cases}
    loads = [0.0] * count
    mine: set[tuple[str, str]] = set()
    # The longest first, each to whoever has the least so far (Graham, SIAM J. Appl. Math. 17 (1969) 416).
    for key in sorted(costs, key=lambda x: (-costs[x], x)):
        lightest = min(range(count), key=lambda i: (loads[i], i))
        loads[lightest] += costs[key]
        if lightest == index - 1:
            mine.add(key)
    cases = tuple(x for x in plan.cases if (x.operator, x.name) in mine)
    only = {key: names for key, names in plan.only.items() if tuple(key.split("/", 1)) in mine}
    return replace(plan, cases=cases, only=only)


def _seconds(plan: Plan, case: Case, rows: int) -> float:
    """What a case takes in one replicate, expected."""
    each = plan.sampling.warmup_s + plan.sampling.max_seconds
    return rows * each + case.bytes / BYTES_PER_S + case.flops / FLOPS_PER_S
