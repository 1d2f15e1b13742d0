"""Whether two commits are equivalent in a metric: two one-sided tests on paired differences. Pure.

Of a loss, an accuracy or a numerical error one does not ask "is it slower?" but "is it as good?", and a small
sample that shows no difference is no answer to that. The two one-sided tests (Schuirmann, J. Pharmacokinet.
Biopharm. 15 (1987) 657) reject "it differs by the margin or more"; with each side at 2.5 % they ask whether the
95 % interval of the mean paired difference lies within the margin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from ..analysis.statistics import t_quantile
from ..store.metric import Better, Equivalence

Outcome: TypeAlias = Literal["equivalent", "worse", "better", "inconclusive"]
MINIMUM_PAIRS = 3
MOST_PAIRS = 100
"""A row that would need more is not promised anything."""
POWER = 0.8


class Equivalent(msgspec.Struct, frozen=True):
    """How a paired difference stands to its margin. `change` and bounds are of current - base, as the margin is:
    fractions of the base for a relative one. `needed` is how many pairs would settle it, four times in five.
    """

    kind: Outcome
    reason: str
    change: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    needed: int | None = None


def equivalent(
    base: Sequence[float], current: Sequence[float], rule: Equivalence, better: Better = "lower"
) -> Equivalent:
    """Judges pairs of processes; a pair without both values is left out."""
    both = [(b, c) for b, c in zip(base, current, strict=False) if math.isfinite(b) and math.isfinite(c)]
    known = len(both)
    if rule.relative:
        both = [(b, c) for b, c in both if b != 0]
    pairs = np.array(both, dtype=np.float64).reshape(-1, 2)
    with np.errstate(over="ignore"):
        differences = pairs[:, 1] - pairs[:, 0]
        differences = differences / np.abs(pairs[:, 0]) if rule.relative else differences
    count = len(differences)
    if count < MINIMUM_PAIRS:
        reason = f"{count} usable pairs, at least {MINIMUM_PAIRS} needed"
        if known > count:  # more of them would be no better
            reason += f"; {known - count} with a base of 0, of which nothing is a fraction"
            return Equivalent("inconclusive", reason, pairs=count)
        return Equivalent("inconclusive", reason, pairs=count, needed=MINIMUM_PAIRS - count)
    with np.errstate(over="ignore", invalid="ignore"):
        change, sd = float(differences.mean()), float(differences.std(ddof=1))
    half = t_quantile(count - 1) * sd / math.sqrt(count)
    low, high = change - half, change + half
    if not (math.isfinite(low) and math.isfinite(high)):
        return Equivalent("inconclusive", "the values are too far apart to be numbers", pairs=count)
    told = f"{_told(change, rule)} [{_told(low, rule)}, {_told(high, rule)}]"
    within = f"within ±{_told(rule.margin, rule).lstrip('+')}"
    if -rule.margin <= low and high <= rule.margin:
        return Equivalent("equivalent", f"{told}, {within}", change, low, high, count)
    if low > rule.margin or high < -rule.margin:
        up = change > 0
        kind: Outcome = "worse" if better == "neither" or up == (better == "lower") else "better"
        return Equivalent(kind, f"{told}, not {within}", change, low, high, count)
    needed = _needed(change, sd, rule.margin)
    more = f"about {needed} pairs in all would settle it" if needed else f"more than {MOST_PAIRS} pairs needed"
    reason = f"{told}, neither inside nor outside ±{_told(rule.margin, rule).lstrip('+')}; {more}"
    fresh = max(needed - count, 1) if needed else None
    return Equivalent("inconclusive", reason, change, low, high, count, fresh)


def _needed(change: float, sd: float, margin: float) -> int | None:
    """How many pairs would put the interval to one side of the margin, if this is the truth; None for too many."""
    room = abs(margin - abs(change))
    for count in range(MINIMUM_PAIRS, MOST_PAIRS + 1):
        reach = (t_quantile(count - 1) + t_quantile(count - 1, POWER)) * sd / math.sqrt(count)
        if reach <= room:
            return count
    return None


def _told(value: float, rule: Equivalence) -> str:
    return f"{value:+.2%}" if rule.relative else f"{value:+.4g}"
