"""Speedups over several cases, and what follows from a row for readers who think in samples. Pure.

ours = over(rows(journal), "kernelmark")
print(sentence("Ours", ours.geometric))    # Ours: 1.93x speedup, +93% throughput
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

from ..store.metric import PEAKS
from .rows import Row
from .statistics import geometric_mean


def excludes_one(low: float | None, high: float | None) -> bool:
    """Whether a ratio's interval leaves out 1, so that it says faster or slower."""
    return low is not None and high is not None and (low > 1 or high < 1)


def mean_bounds(bounds: Iterable[tuple[float | None, float | None]]) -> tuple[float, float] | None:
    """The geometric means of ratios' bounds: an interval of the ratios' mean that is wide enough however much
    their errors move together. None where a ratio has no interval.
    """
    lows, highs = [], []
    for low, high in bounds:
        if low is None or high is None:
            return None
        lows.append(low)
        highs.append(high)
    low, high = geometric_mean(lows), geometric_mean(highs)
    return None if low is None or high is None else (low, high)


@dataclass(frozen=True)
class Speedups:
    """Of one implementation over a baseline: how many cases, and the speedups' mean, median and extremes."""

    implementation: str
    baseline: str
    cases: int
    mean: float
    geometric: float
    """What the ratios' product says; the arithmetic mean of ratios favours whoever is divided by."""
    median: float
    lowest: float
    highest: float


def over(rows: Iterable[Row], implementation: str, baseline: str | None = None) -> Speedups | None:
    """Over a named baseline, or the best one of each case; None where no case has both."""
    given = tuple(rows)
    theirs = {(x.operator, x.case, x.cache): x.value() for x in given if x.implementation == baseline}
    found = []
    for row in given:
        if row.implementation != implementation or row.value() is None:
            continue
        if baseline is None:
            found.append(row.speedup_vs_best_baseline)
            continue
        other, mine = theirs.get((row.operator, row.case, row.cache)), row.value()
        higher = row.metrics[row.primary].better == "higher"
        found.append(None if not other or not mine else mine / other if higher else other / mine)
    ratios = [x for x in found if x is not None and x > 0]
    geometric = geometric_mean(ratios)
    if geometric is None:
        return None
    return Speedups(
        implementation,
        baseline or "the best baseline of each case",
        len(ratios),
        fmean(ratios),
        geometric,
        median(ratios),
        min(ratios),
        max(ratios),
    )


def sentence(name: str, speedup: float) -> str:
    """A speedup and what it means for throughput: `Ours: 1.93x speedup, +93% throughput`."""
    return f"{name}: {speedup:.2f}x speedup, {(speedup - 1) * 100:+.0f}% throughput"


def samples_per_s(row: Row) -> float | None:
    """Samples are what the axis B counts; None without one, or without a time."""
    found = row.get()
    batch = row.axes.get("B")
    if found is None or found.unit != "ms" or found.value <= 0 or not batch:
        return None
    return batch / (found.value / 1e3)


def peak(row: Row) -> float | None:
    """Bytes of peak memory, by the metric that the row has of it."""
    return next((found for x in PEAKS if (found := row.value(x)) is not None), None)


def memory_per_sample(row: Row) -> float | None:
    """Bytes of peak memory a sample."""
    found, batch = peak(row), row.axes.get("B")
    return found / batch if found is not None and batch else None


def memory_saving(row: Row, baseline: Row) -> float | None:
    """What it saves of a baseline's peak memory, as a fraction: 0.15 is 15 % better than the baseline."""
    ours, theirs = peak(row), peak(baseline)
    return 1 - ours / theirs if ours is not None and theirs else None
