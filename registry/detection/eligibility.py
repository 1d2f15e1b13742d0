"""Which rows can be decided by their times, and what the others end in. Statuses and conditions only."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..figures import percent
from ..store.metric import Equivalence
from ..store.record import SLOWED
from .comparison import Comparison, Options, Side
from .verdict import Kind, Mode

MINIMUM_PAIRS = 3
"""Fewer pairs have no spread worth the name."""
THROTTLED_APART = 0.5
"""Share of processes by which two sides lie apart if one was throttled and the other not."""


def usable(value: float) -> bool:
    """Whether a number can be a time."""
    return math.isfinite(value) and value > 0


def by_difference(comparison: Comparison) -> bool:
    """Whether the primary metric is judged by differences: these take no logarithm, and an accuracy may be 0."""
    return isinstance(comparison.metric.judged, Equivalence)


def value_of(comparison: Comparison, value: float) -> bool:
    """Whether a number can be a value of the row's primary metric."""
    return math.isfinite(value) if by_difference(comparison) else usable(value)


def pairs(comparison: Comparison) -> int:
    """Number of pairs in which both processes have a usable value."""
    both = zip(comparison.base.medians, comparison.current.medians, strict=False)
    return sum(value_of(comparison, b) and value_of(comparison, c) for b, c in both)


def exclusion(comparison: Comparison, mode: Mode, options: Options) -> tuple[Kind, str] | None:
    """The verdict of a row that its times cannot decide, with the reason; None for a row to be decided."""
    base, current = comparison.base, comparison.current
    if comparison.differing:
        return "not comparable", "differs in " + "; ".join(comparison.differing)
    had, has = _timed(base), _timed(current)
    if mode == "stored":
        had = had or bool(comparison.history.runs)
    wrong = current.status == "incorrect" or bool(current.failures.get("incorrect"))
    if had and wrong and not base.failures.get("incorrect"):
        return "incorrect", f"the result is wrong now: {current.reason or 'it failed verification'}"
    if not had and not has:
        return "skipped", f"no time on either side: {_why(base)} / {_why(current)}"
    if not had:
        return "new", f"no time in the baseline ({_why(base)})"
    if not has:
        return "missing", f"no time now ({_why(current)})"
    if mode == "stored" and (side := _throttled(base, current)):
        return "not comparable", f"clocks were throttled throughout on the {side} side only"
    if mode == "ab" and comparison.same is not None:
        return "no change", comparison.same
    return _too_little(comparison, mode, options)


def _throttled(base: Side, current: Side) -> str | None:
    """Which of two stored sides was throttled alone.

    In an A/B, whose processes alternate, only code does that, or chance.
    """
    # A stored baseline may be known by its runs' means alone, which say nothing of clocks.
    apart = current.throttled - base.throttled if base.medians else 0.0
    if abs(apart) < THROTTLED_APART:
        return None
    cold, hot = (base.clock, current.clock) if apart > 0 else (current.clock, base.clock)
    if cold and hot and hot > (1 - SLOWED) * cold:
        return None
    return "current" if apart > 0 else "baseline"


def _timed(side: Side) -> bool:
    return side.status == "ok"


def _why(side: Side) -> str:
    if side.status is None:
        return "no such row"
    return f"{side.status}: {side.reason}" if side.reason else side.status


def _too_little(comparison: Comparison, mode: Mode, options: Options) -> tuple[Kind, str] | None:
    if mode == "ab":
        made = max(len(comparison.base.medians), len(comparison.current.medians))
        good = pairs(comparison)
        if good < MINIMUM_PAIRS:
            return "inconclusive", f"{_of(good, made, 'pairs')} usable, at least {MINIMUM_PAIRS} needed"
        return None
    if by_difference(comparison):
        return "inconclusive", "equivalence is judged on pairs: by an A/B"
    medians = comparison.current.medians
    made, good = len(medians), sum(value_of(comparison, x) for x in medians)
    if good < options.minimum_processes:
        return (
            "inconclusive",
            f"{_of(good, made, 'processes')} usable, at least {options.minimum_processes} needed",
        )
    runs = unchanged_runs(comparison, options)
    if len(runs) < options.minimum_runs:
        return "inconclusive", f"{len(runs)} unchanged runs on record, at least {options.minimum_runs} needed"
    return None


def unchanged_runs(comparison: Comparison, options: Options) -> list[float]:
    """The usable ones of the last runs on record."""
    return [run for run in comparison.history.runs if usable(run)][-options.maximum_runs :]


def notes(comparison: Comparison) -> tuple[str, ...]:
    """What a reader should know although it did not decide."""
    out = list(comparison.notes)
    for name, side in (("baseline", comparison.base), ("current", comparison.current)):
        if side.status == "ok":
            bad = sum(not value_of(comparison, x) for x in side.medians) - sum(side.failures.values())
            if bad > 0:
                what = "value (none, NaN)" if by_difference(comparison) else "time (none, NaN, 0 or below)"
                out.append(f"{name}: {bad} of {len(side.medians)} processes gave no usable {what}")
            out.extend(
                f"{name}: {status} in {n} of {len(side.medians)} processes" for status, n in side.failures.items()
            )
            if _constant(side.medians) and not by_difference(comparison):
                out.append(
                    f"{name}: all processes gave the same time; the timer's resolution is taken as the spread"
                )
        if side.throttled > 0:
            out.append(f"{name}: throttled throughout in {percent(side.throttled)} of processes")
    return tuple(out)


def _constant(medians: Sequence[float]) -> bool:
    times = [x for x in medians if usable(x)]
    return len(times) > 1 and len(set(times)) == 1


def _of(good: int, made: int, what: str) -> str:
    return f"{good} of {made} {what}"
