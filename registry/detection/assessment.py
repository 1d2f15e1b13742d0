"""From an estimate and its variance to interval, p-values and what could have been seen. Over all rows at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from ..analysis.statistics import median_interval
from .comparison import Comparison, Options
from .noise import Floats

POWER = 0.8
"""Detectable effects and needed pairs are stated for finding the truth four times in five."""
MINIMUM_WITNESSES = 6
MINIMUM_ROWS = 20
MINIMUM_OPERATORS = 5


@dataclass(frozen=True)
class Assessment:
    """Per row, in logarithms of current / base."""

    change: Floats
    low: Floats
    high: Floats
    """Bounds of the change with confidence 1 - `Options.level`, whatever level the stage decides at."""
    within: NDArray[np.bool_]
    """Whether the interval at the stage's own level lies within the margin of "no change"."""
    p_slower: Floats
    """One-sided, against "slower by at most what is tolerated"."""
    p_faster: Floats
    detectable: Floats
    needed: Floats
    """Pairs, besides those there are, that would probably settle the row; infinite if more than are worth it."""


def assess(
    change: Floats,
    variance: Floats,
    count: Floats,
    df: Floats,
    options: Options,
    level: float,
    settled: float | None = None,
) -> Assessment:
    """Student's t with shrunk variance; `variance` is of one observation, `level` the stage's.

    "No change" takes an interval of two-sided level `settled` within the margin; left out, it is `level`.
    """
    error = np.sqrt(variance / count)
    half = special.stdtrit(df, 1 - options.level / 2) * error
    deciding = special.stdtrit(df, 1 - (settled or level) / 2) * error
    null = math.log1p(options.tolerated)
    warn = math.log1p(options.warn_above)
    one_sided = special.stdtrit(df, 1 - level)
    reserve = special.stdtrit(df, POWER)
    size = np.abs(change)
    # An effect that would not even warn is settled by an interval inside the margin, a larger one by its test.
    small = size < warn
    room = np.where(small, math.log1p(options.fail_above) - size, size - null)
    quantiles = np.where(small, special.stdtrit(df, 1 - level / 2), one_sided) + reserve
    needed = np.maximum(np.ceil(variance * np.square(quantiles / np.maximum(room, 1e-6))) - count, 1)
    return Assessment(
        change=change,
        low=change - half,
        high=change + half,
        within=size + deciding < math.log1p(options.fail_above),
        p_slower=special.stdtr(df, (null - change) / error),
        p_faster=special.stdtr(df, (null + change) / error),
        detectable=np.maximum(null + (one_sided + reserve) * error, warn + reserve * error),
        needed=np.where(needed <= options.maximum_pairs, needed, np.inf),
    )


def machine_shift(
    comparisons: list[Comparison], change: Floats, usable: NDArray[np.bool_], options: Options
) -> str | None:
    """Why the machine, and not the code, must be thought to have changed; None if it need not be.

    Witnesses are rows whose code the two commits share, or, without enough of them, all rows, provided they
    are of so many operators that no single change of code explains them. The order-statistic interval of the
    median must lie beyond the limit on one side, so that a handful of noisy rows does not close the gate.
    """
    control = np.array([c.control for c in comparisons], dtype=bool) & usable
    if control.sum() >= MINIMUM_WITNESSES:
        rows, name = control, "rows of unchanged code"
    else:
        operators = {c.key.operator for c, is_usable in zip(comparisons, usable, strict=True) if is_usable}
        if usable.sum() < MINIMUM_ROWS or len(operators) < MINIMUM_OPERATORS:
            return None
        rows, name = usable, "rows"
    interval = median_interval(change[rows].tolist())
    limit = math.log1p(options.shift_above)
    if interval is None or not (interval[0] > limit or interval[1] < -limit):
        return None
    median = math.expm1(float(np.median(change[rows])))
    return f"the machine changed: the median of {int(rows.sum())} {name} moved by {median:+.1%}"
