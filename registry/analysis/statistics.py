"""The statistics that summaries and stopping rest on. Pure; times in any unit, as given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

CONFIDENCE = 0.95


@lru_cache(maxsize=4096)
def median_ranks(n: int) -> tuple[int, int] | None:
    """Zero-based order statistics that enclose the median with at least 95 % confidence.

    From the binomial distribution of the number of samples below the median, so no shape is assumed
    (Conover, Practical Nonparametric Statistics, 3.2). None for fewer than 6 samples: no pair does it.
    """
    if n < 6:
        return None
    low = 0
    while float(special.bdtr(low, n, 0.5)) <= (1 - CONFIDENCE) / 2:
        low += 1
    return low - 1, n - low


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the median, or None for fewer than 6 samples."""
    ranks = median_ranks(len(samples))
    if ranks is None:
        return None
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    return float(ordered[ranks[0]]), float(ordered[ranks[1]])


def mean_and_sd(values: NDArray[np.float64]) -> tuple[float, float | None]:
    """Mean and standard deviation (n - 1), None for a single value: what `values.mean()` and `values.std(ddof=1)`
    give, to the last digit, without what these take beside the sums. A large journal has 100,000 of them.
    """
    count = len(values)
    mean = float(np.add.reduce(values)) / count
    if count < 2:
        return mean, None
    apart = values - mean
    return mean, math.sqrt(float(np.add.reduce(apart * apart)) / (count - 1))


@lru_cache(maxsize=4096)
def t_quantile(degrees_of_freedom: float, probability: float = 0.5 + CONFIDENCE / 2) -> float:
    """The quantile of Student's t; `scipy.special` because `scipy.stats` takes a second to import."""
    return float(special.stdtrit(degrees_of_freedom, probability))


def log_mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of positive values with the 95 % t interval of the mean of their logarithms.

    One value has no spread of its own: its interval is (0, inf).
    """
    logs = np.log(np.asarray(values, dtype=np.float64))
    mean, sd = mean_and_sd(logs)
    if sd is None:
        return math.exp(mean), 0.0, math.inf
    half = t_quantile(len(logs) - 1) * sd / math.sqrt(len(logs))
    return exponential(mean), exponential(mean - half), exponential(mean + half)


def welch(parts: Sequence[tuple[float, int]], probability: float = 0.5 + CONFIDENCE / 2) -> float:
    """Half the width of Welch's interval of a sum of independent means (Biometrika 34 (1947) 28).

    A part is the variance of one mean and the number, at least 2, of values that it is of; each has a spread of
    its own, never pooled. t with Satterthwaite's degrees of freedom, two-sided at 95 % by default.
    """
    variance = math.fsum(x for x, _ in parts)
    if variance <= 0:
        return 0.0
    # Each part over the sum first: the squares of tiny variances would vanish.
    freedom = 1 / math.fsum((x / variance) ** 2 / (n - 1) for x, n in parts)
    return t_quantile(freedom, probability) * math.sqrt(variance)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of the known values above 0; None if there is none."""
    logs = [math.log(x) for x in values if x is not None and x > 0]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def exponential(x: float) -> float:
    """The exponential; infinite where a float holds it no more."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def coefficient_of_variation(values: Sequence[float]) -> float | None:
    """Standard deviation over mean; None for fewer than two values or a mean of 0."""
    mean, sd = mean_and_sd(np.asarray(values, dtype=np.float64))
    return sd / mean if sd is not None and mean else None
