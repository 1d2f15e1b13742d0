"""Whether peak memory, numerical error or energy got worse. Flagged beside the verdict on time, never mixed in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np

from ..analysis.statistics import t_quantile
from .comparison import Comparison, Options
from .noise import Prior, log_times, shrink, trimmed
from .verdict import Flag

ERROR_FLOOR = 1e-6
"""A relative error below this is rounding in any dtype, so growing from 0 to it is not worse."""
ENERGY_LEVEL = 0.001
"""Of the interval of a ratio of energies, two-sided. Energy is neither confirmed by fresh pairs nor corrected for
the number of rows, and the counter behind it is coarse: at 5 % three of 1,590 rows of unchanged code were flagged
on an H200."""


def flags(comparison: Comparison, options: Options) -> tuple[Flag, ...]:
    """The metrics of one row that got worse."""
    found = (_memory(comparison, options), _error(comparison, options), _energy(comparison, options))
    return tuple(flag for flag in found if flag is not None)


def _memory(comparison: Comparison, options: Options) -> Flag | None:
    # The median: a library that allocates its workspace once charges it to whichever case happens to come first in
    # a process, and what a call frees of earlier ones is taken off its own.
    base, current = _finite(comparison.base.memory), _finite(comparison.current.memory)
    if not base or not current:
        return None
    before, now = median(base), median(current)
    if before <= 0 or now <= before * (1 + options.memory_above):
        return None
    return Flag("memory", before, now, f"peak memory {now / before - 1:+.1%}")


def _error(comparison: Comparison, options: Options) -> Flag | None:
    # Inputs are drawn afresh in every process, so the error varies: all of one side must exceed all of the other.
    base, current = _finite(comparison.base.error), _finite(comparison.current.error)
    if not base or not current:
        return None
    low, high = min(current), max(base)
    if low <= max(high * options.error_factor, ERROR_FLOOR):
        return None
    grew = f"{low / high:.1f} times" if high > 0 else "from 0"
    return Flag(
        "error", high, low, f"numerical error grew {grew}: at most {high:.2g} before, at least {low:.2g} now"
    )


def _energy(comparison: Comparison, options: Options) -> Flag | None:
    width = min(len(comparison.base.energy), len(comparison.current.energy))
    if width < 3:
        return None
    base, current = (
        log_times([[math.nan if x is None else x for x in side.energy]], width)
        for side in (comparison.base, comparison.current)
    )
    estimate = trimmed(current - base)
    if not estimate.count[0] >= 3:
        return None
    variance, df = shrink(estimate, Prior(np.array([math.nan]), np.array([0.0])))
    error = math.sqrt(float(variance[0]) / float(estimate.count[0]))
    half = t_quantile(float(df[0]), 1 - ENERGY_LEVEL / 2) * error
    mean = float(estimate.mean[0])
    if mean - half <= math.log1p(options.energy_above):
        return None
    interval = f"{math.expm1(mean - half):+.1%} to {math.expm1(mean + half):+.1%}"
    reason = f"energy {math.expm1(mean):+.1%} ({1 - ENERGY_LEVEL:.1%} {interval})"
    return Flag("energy", math.exp(float(np.nanmedian(base))), math.exp(float(np.nanmedian(current))), reason)


def _finite(values: Sequence[float | None] | Iterable[int | None]) -> list[float]:
    return [float(x) for x in values if x is not None and math.isfinite(x) and x >= 0]
