"""Whether training another way is as good: paired arms over several seeds. Pure.

Three questions of an arm beside its base, in which a pair is one seed (same initial weights, data and schedule):
is the loss at declared steps equivalent; does it take more steps to the loss that the base reaches near the end;
and what is its speed worth when it needs more steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from ..analysis.curves import Curve, at, reached
from ..analysis.statistics import exponential, t_quantile
from ..store.metric import Equivalence
from .equivalence import MOST_PAIRS, Equivalent, equivalent

SEEDS = 5
"""Fewer say nothing of training: the spread between seeds is larger than what is looked for."""
TARGET = 0.95
"""The base's loss at this share of its steps is what has to be reached."""
ALLOWED = 1.05
"""How many times as many steps that may take. What is not reached by the last step took more: 1 / .95 > 1.05."""
SHARE = 0.9
"""An arm bears a precision's name if this share of its products' operations runs in it."""
FACTOR = 2.0
"""How far the base's learning rate may be from the best one tried."""
RESAMPLES = 10_000

BySeed: TypeAlias = Mapping[int, float]


class Steps(msgspec.Struct, frozen=True):
    """How many times as many steps an arm takes. `unreached` seeds count as the last step, which is too few."""

    kind: Literal["within", "exceeded", "inconclusive"]
    reason: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: int = 0
    unreached: int = 0


class Matched(msgspec.Struct, frozen=True):
    """Speed at equal quality: the ratio of tokens/s over the ratio of steps, with its 95 % interval."""

    speedup: float
    low: float
    high: float


def at_step(base: BySeed, arm: BySeed, rule: Equivalence) -> Equivalent:
    """Equivalence at one step over the seeds that both have; fewer than five are inconclusive. `needed` is None
    where those that are there say that even `MOST_PAIRS` would not settle it.
    """
    both = sorted(base.keys() & arm.keys())
    found = equivalent([base[x] for x in both], [arm[x] for x in both], rule)
    if found.pairs >= SEEDS:  # a seed without a usable value says as little as one that is not there
        return found
    beyond = found.kind == "inconclusive" and found.change is not None and found.needed is None
    more = None if beyond else max(SEEDS - found.pairs, found.needed or 0)
    asked = f"more than {MOST_PAIRS} needed" if more is None else f"{more} more needed"
    told = f"; so far {found.reason.partition('], ')[0]}]" if found.change is not None else ""
    lost = f"; {len(both) - found.pairs} without a usable value" if len(both) > found.pairs else ""
    reason = f"{found.pairs} of at least {SEEDS} seeds, {asked}{lost}{told}"
    return msgspec.structs.replace(found, kind="inconclusive", reason=reason, needed=more)


def along(
    base: Mapping[int, Curve], arm: Mapping[int, Curve], rule: Equivalence
) -> dict[float, tuple[float, float, float]]:
    """By step that curves of both sides have: the paired difference over seeds as the rule takes it, between the
    bounds of its 95 % interval; between its extremes with fewer seeds than make an interval.
    """
    pairs: dict[float, list[tuple[float, float]]] = {}
    for seed in sorted(base.keys() & arm.keys()):
        other = dict(arm[seed])
        for step, value in base[seed]:
            if step in other:
                pairs.setdefault(step, []).append((value, other[step]))
    found = {}
    for step, both in pairs.items():
        apart = [(y - x) / abs(x) if rule.relative and x else y - x for x, y in both]
        seen = equivalent([x for x, _ in both], [y for _, y in both], rule)
        low = min(apart) if seen.low is None else seen.low
        high = max(apart) if seen.high is None else seen.high
        found[step] = (low, sum(apart) / len(apart), high)
    return found


def steps_ratio(base: Mapping[int, Curve], arm: Mapping[int, Curve]) -> Steps:
    """The 105 % rule: steps to the loss that the base reaches at .95 of its steps, arm over base."""
    logs, unreached = _step_logs(base, arm)
    if not logs:
        both = any(base[x] and arm[x] for x in base.keys() & arm.keys())
        why = "the base does not get below the loss that it begins with" if both else "no seed has both curves"
        return Steps("inconclusive", why)
    low, high = _bootstrap(list(logs.values()))
    mean = exponential(float(np.mean(list(logs.values()))))
    told = f"{mean:.3f} times the steps [{low:.3f}, {high:.3f}]"
    told += f", not reached in {unreached} of {len(logs)} seeds" if unreached else ""
    given = (mean, low, high, len(logs), unreached)
    if len(logs) < SEEDS:
        return Steps("inconclusive", f"{told}; {SEEDS - len(logs)} more seeds needed", *given)
    if high <= ALLOWED and not unreached:
        return Steps("within", told, *given)
    if low > ALLOWED or unreached == len(logs):
        return Steps("exceeded", told, *given)
    return Steps("inconclusive", told, *given)


def matched(
    base: Mapping[int, Curve], arm: Mapping[int, Curve], base_rate: BySeed, arm_rate: BySeed
) -> Matched | None:
    """Speed at equal quality; None with fewer than two seeds, or where a seed never reached the loss."""
    logs, unreached = _step_logs(base, arm)
    both = sorted(logs.keys() & base_rate.keys() & arm_rate.keys())
    if len(both) < 2 or unreached:
        return None
    values = [math.log(arm_rate[x] / base_rate[x]) - logs[x] for x in both]
    return Matched(exponential(float(np.mean(values))), *_bootstrap(values))


def _step_logs(base: Mapping[int, Curve], arm: Mapping[int, Curve]) -> tuple[dict[int, float], int]:
    """Logarithms of the ratio of steps by seed, and how many seeds never reached the loss."""
    logs, unreached = {}, 0
    for seed in sorted(base.keys() & arm.keys()):
        own, other = base[seed], arm[seed]
        if not own or not other:
            continue
        loss = at(own, TARGET * own[-1][0])
        needed, taken = reached(own, loss), reached(other, loss)
        if not needed:  # the base begins below it, and there is nothing to take more steps than
            continue
        if taken is None:
            unreached += 1
            taken = other[-1][0]
        logs[seed] = math.log(max(taken, 1e-9) / needed)
    return logs, unreached


def _bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the exponential of the mean, by resampling seeds; the same every time.

    The percentiles are those that make it as wide as Student's where values are normal (Hesterberg, Am. Stat. 69
    (2015) 371): the plain ones of few seeds are too narrow.
    """
    data = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(0, len(data), (RESAMPLES, len(data)))
    tail = 2.5
    if (count := len(data)) > 1:
        tail = 50 * math.erfc(t_quantile(count - 1) * math.sqrt(count / (count - 1) / 2))
    low, high = np.percentile(data[drawn].mean(axis=1), [tail, 100 - tail])
    return exponential(float(low)), exponential(float(high))


def rate_tried(losses: Mapping[float, BySeed], used: float) -> str | None:
    """What is wrong with a learning rate, given the losses by seed of each one tried; None where that is near the
    best.

    The best has the least mean loss over the seeds that all rates have. By the least loss of any seed that rate
    would win which was tried with more seeds, or had a lucky one; by means over its own, which had easier ones.
    """
    if len(losses) < 5:
        return f"{len(losses)} rates were tried, at least 5 needed"
    shared = set.intersection(*(set(x) for x in losses.values()))
    if not shared:
        return f"the {len(losses)} rates tried have no seed in common, by which they could be compared"
    best = min(losses, key=lambda x: math.fsum(losses[x][seed] for seed in shared))
    if not 1 / FACTOR <= used / best <= FACTOR:
        return f"{used:g} is more than a factor of {FACTOR:g} from the best of {len(losses)} tried, {best:g}"
    return None
