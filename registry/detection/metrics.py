"""Whether a metric beside the primary one got worse. Flagged beside the verdict, never mixed into it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np

from ..analysis.statistics import t_quantile
from ..figures import change, percent, quantity, signed
from ..store.metric import Equivalence, Metric, Ratio
from .comparison import Comparison
from .equivalence import equivalent
from .noise import Prior, log_times, shrink, trimmed
from .verdict import Flag

INTERVAL_LEVEL = 0.001
"""Of the interval of a ratio, two-sided. A metric beside the primary one is neither confirmed by fresh pairs nor
corrected for the number of rows, and the counter behind energy is coarse: at 5 % three of 1,590 rows of unchanged
code were flagged on an H200."""


def flags(comparison: Comparison) -> tuple[Flag, ...]:
    """The metrics of one row that got worse."""
    found = (_flag(comparison, metric) for metric in comparison.beside)
    return tuple(flag for flag in found if flag is not None)


def _flag(comparison: Comparison, metric: Metric) -> Flag | None:
    sides = [x.metrics.get(metric.name, ()) for x in (comparison.base, comparison.current)]
    rule = metric.judged
    if isinstance(rule, Equivalence):
        return _inequivalent(metric, rule, *sides)
    if not isinstance(rule, Ratio) or metric.better == "neither":
        return None
    test = {"median": _median, "separation": _separation, "interval": _interval}[rule.test]
    if metric.better == "lower":
        return test(metric, rule, *sides)
    sides = [tuple(max(x, rule.floor) for x in side) for side in sides]
    if (lost := _lost(metric, *sides)) is not None:
        return lost
    # Of the inverse, more is worse; what is told is of the values themselves.
    inverse = [tuple(1 / x if x else math.nan for x in side) for side in sides]
    found = test(metric, msgspec.structs.replace(rule, floor=0.0), *inverse)
    if found is None:
        return None
    before, now = 1 / found.base, 1 / found.current
    return Flag(found.metric, before, now, f"{_named(metric)} {change(now / before)}")


def _lost(metric: Metric, base: Sequence[float], current: Sequence[float]) -> Flag | None:
    """A metric of which more is better and nothing is left: 0 has no inverse, and no test would see it."""
    base, current = _finite(base), _finite(current)
    if not base or not current or median(current) > 0 or not (before := median(base)) > 0:
        return None
    return Flag(metric.name, before, 0.0, f"{_named(metric)} fell to 0")


def _median(metric: Metric, rule: Ratio, base: Sequence[float], current: Sequence[float]) -> Flag | None:
    # The median: a library that allocates its workspace once charges it to whichever case happens to come first in
    # a process, and what a call frees of earlier ones is taken off its own.
    base, current = _finite(base), _finite(current)
    if not base or not current:
        return None
    before, now = median(base), median(current)
    # Values up to the floor count as the floor: what takes no memory, as in place, may come to take some.
    if now <= max(before, rule.floor) * (1 + rule.above):
        return None
    grew = change(now / before) if before > 0 else f"grew from 0 to {quantity(now, metric.unit)}"
    return Flag(metric.name, before, now, f"{_named(metric)} {grew}")


def _separation(metric: Metric, rule: Ratio, base: Sequence[float], current: Sequence[float]) -> Flag | None:
    # Inputs are drawn afresh in every process, so the error varies: all of one side must exceed all of the other.
    base, current = _finite(base), _finite(current)
    if not base or not current:
        return None
    low, high = min(current), max(base)
    if low <= max(high * (1 + rule.above), rule.floor):
        return None
    grew = f"{low / high:.1f} times" if high > 0 else "from 0"
    return Flag(
        metric.name,
        high,
        low,
        f"{_named(metric)} grew {grew}: at most {high:.2g} before, at least {low:.2g} now",
    )


def _interval(metric: Metric, rule: Ratio, base: Sequence[float], current: Sequence[float]) -> Flag | None:
    width = min(len(base), len(current))
    if width < 3:
        return None
    logs = [log_times([[max(y, rule.floor) for y in x]], width) for x in (base, current)]
    estimate = trimmed(logs[1] - logs[0])
    if not estimate.count[0] >= 3:
        return None
    variance, df = shrink(estimate, Prior(np.array([math.nan]), np.array([0.0])))
    error = math.sqrt(float(variance[0]) / float(estimate.count[0]))
    half = t_quantile(float(df[0]), 1 - INTERVAL_LEVEL / 2) * error
    mean = float(estimate.mean[0])
    if mean - half <= math.log1p(rule.above):
        return None
    interval = f"{signed(math.expm1(mean - half))} to {signed(math.expm1(mean + half))}"
    reason = f"{_named(metric)} {signed(math.expm1(mean))} ({percent(1 - INTERVAL_LEVEL, 1)} {interval})"
    before, now = (math.exp(float(np.nanmedian(x))) for x in logs)
    return Flag(metric.name, before, now, reason)


def _inequivalent(
    metric: Metric, rule: Equivalence, base: Sequence[float], current: Sequence[float]
) -> Flag | None:
    found = equivalent(base, current, rule, metric.better)
    if found.kind != "worse" or found.low is None or found.high is None:
        return None
    before, now = (median(x for x in side if math.isfinite(x)) for side in (base, current))  # it may lie below 0
    return Flag(metric.name, before, now, f"{_named(metric)}: {found.reason}")


def _finite(values: Sequence[float]) -> list[float]:
    return [float(x) for x in values if math.isfinite(x) and x >= 0]


def _named(metric: Metric) -> str:
    return metric.label or metric.name.replace("_", " ")
