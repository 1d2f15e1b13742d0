"""From an estimate and its variance to interval, p-values and what could have been seen. Over all rows at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from ..analysis.statistics import median_interval
from ..figures import signed
from .comparison import Comparison, Options
from .noise import TRIM_MANY, Estimate, Floats

TRIMMING = 1.06
"""Variance of a mean trimmed by a tenth at each end over that of the mean, of normal values."""
POWER = 0.8
"""Detectable effects and needed pairs are stated for finding the truth four times in five."""
SPENT = (0.7, 0.2, 0.1)
"""Shares of a row's level that the looks at its fresh pairs may spend, stage two first."""
FLAGGED = 3.0
UNDECIDED = 0.6
"""Levels, in units of `Options.false_calls`, of rows that looked changed at first, and of rows that were only too
noisy. At most one unchanged row in ten is flagged, however noisy it is, and its level is one-sided; that of the
others is halved between the sides. tests/calibration/rates.py counts what comes of it."""
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
    none_slower: Floats
    """One-sided, against "not slower at all"."""
    none_faster: Floats
    detectable: Floats
    needed: Floats
    """Pairs, besides those there are, that would probably settle the row; infinite if more than are worth it."""
    fresh: Floats
    """Fresh pairs that find a change of `fail_above`, or one as large as this one is beyond doubt."""


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
    warn, fail = math.log1p(options.warn_above), math.log1p(options.fail_above)
    one_sided = special.stdtrit(df, 1 - options.level)
    reserve = special.stdtrit(df, POWER)
    sure = special.stdtrit(df, 1 - surest(options))
    size = np.abs(change)
    # An effect that would not even warn is settled by an interval inside the margin, a larger one by its tests.
    small = size < warn
    room = np.where(small, fail - size, size - null)
    quantiles = np.where(small, special.stdtrit(df, 1 - level / 2), one_sided) + reserve
    wanted = variance * np.square(quantiles / np.maximum(room, 1e-6))
    certain = np.where(small, 0.0, variance * np.square((sure + reserve) / np.maximum(size, 1e-6)))
    needed = np.maximum(np.ceil(np.maximum(wanted, certain)) - count, 1)
    return Assessment(
        change=change,
        low=change - half,
        high=change + half,
        within=size + deciding < fail,
        p_slower=special.stdtr(df, (null - change) / error),
        p_faster=special.stdtr(df, (null + change) / error),
        none_slower=special.stdtr(df, -change / error),
        none_faster=special.stdtr(df, change / error),
        detectable=np.maximum.reduce(
            [null + (one_sided + reserve) * error, (sure + reserve) * error, warn + reserve * error]
        ),
        needed=np.where(needed <= options.maximum_pairs, needed, np.inf),
        fresh=_fresh(variance, np.maximum(size - half, fail), options),
    )


def confirming(options: Options, stage: int, flagged: bool) -> float:
    """The one-sided level of a stage's look at fresh pairs."""
    share = SPENT[min(stage - 2, len(SPENT) - 1)] * options.false_calls
    return share * FLAGGED if flagged else share * UNDECIDED / 2


def surest(options: Options) -> float:
    """The strictest level of stage two, which decides how many pairs are asked for."""
    return confirming(options, 2, False)


def _fresh(variance: Floats, size: Floats, options: Options) -> Floats:
    """Pairs that find a change of this size with the power asked for, at the level of the first confirmation.

    By iteration, because the quantiles hang on the degrees of freedom, and these on the number of pairs.
    """
    count = np.full(len(size), float(options.rerun_pairs))
    for _ in range(4):
        df = np.maximum((1 - 2 * TRIM_MANY) * count - 1, 5.0)
        both = special.stdtrit(df, 1 - surest(options)) + special.stdtrit(df, options.power)
        count = np.clip(variance * np.square(both / size), options.rerun_pairs, options.maximum_pairs)
    return np.asarray(np.ceil(count))


def machine_shift(
    comparisons: list[Comparison], estimate: Estimate, usable: NDArray[np.bool_], options: Options
) -> str | None:
    """Why the machine, and not the code, must be thought to have changed; None if it need not be.

    Witnesses are rows whose code the two commits share: many by the order-statistic interval of their median,
    so that a handful of noisy rows does not close the gate, few by Student's interval of their mean, in which
    each brings its own spread. Without any, all rows are, provided they are of so many operators that no
    single change of code explains them. The interval must lie beyond the limit on one side.
    """
    control = np.array([c.control for c in comparisons], dtype=bool) & usable
    if 0 < control.sum() < MINIMUM_WITNESSES:
        rows, name = control, "rows of unchanged code" if control.sum() > 1 else "row of unchanged code"
        interval = _few(estimate, rows, options)
    else:
        rows, name = control, "rows of unchanged code"
        if not control.any():
            operators = {c.key.operator for c, is_usable in zip(comparisons, usable, strict=True) if is_usable}
            if usable.sum() < MINIMUM_ROWS or len(operators) < MINIMUM_OPERATORS:
                return None
            rows, name = usable, "rows"
        interval = median_interval(estimate.mean[rows].tolist())
    limit = math.log1p(options.shift_above)
    if interval is None or not (interval[0] > limit or interval[1] < -limit):
        return None
    median = math.expm1(float(np.median(estimate.mean[rows])))
    return f"the machine changed: the median of {int(rows.sum())} {name} moved by {signed(median)}"


def _few(estimate: Estimate, rows: NDArray[np.bool_], options: Options) -> tuple[float, float] | None:
    """The interval of what few rows moved by together: their spread among each other or within, the larger."""
    means, count = estimate.mean[rows], int(rows.sum())
    df = float(estimate.df[rows].sum())
    if df < 1:
        return None
    within = float((estimate.variance[rows] / np.maximum(estimate.count[rows], 1)).mean()) / count
    between = float(means.var(ddof=1)) / count if count > 1 else 0.0
    if between > within:
        df = count - 1.0
    # Twice as strict as a row's: the verdict of all the others hangs on it.
    half = float(special.stdtrit(df, 1 - options.level / 4)) * math.sqrt(max(within, between))
    middle = float(means.mean())
    return middle - half, middle + half


def noise_settled(fresh: int, options: Options) -> float:
    """How much processes may vary (as a share) for so many fresh pairs to find a change of `fail_above`."""
    df = max((1 - 2 * TRIM_MANY) * fresh - 1, 1.0)
    both = float(special.stdtrit(df, 1 - surest(options)) + special.stdtrit(df, options.power))
    # Of a pair's two processes, and what trimming costs.
    return math.log1p(options.fail_above) * math.sqrt(fresh / (2 * TRIMMING)) / both
