"""The statistics that summaries and stopping rest on. Pure; times in any unit, as given.

A large journal has 100,000 short lists of samples, for each of which NumPy would take longer to be called than to
compute. What is computed of all is computed of a matrix at a time (`matrices`), to the same last digit.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from statistics import median
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ..store.metric import Summary, summarized

CONFIDENCE = 0.95
NO_RATIO = "a value is 0 or below, and of such there is no ratio"
"""Of an accuracy, say, that a process found to be 0."""
_NUMBERS = 1 << 17
"""Of a matrix: a MiB, which a processor's cache holds."""


def matrices(
    found: Sequence[Sequence[Sequence[float]]],
) -> Iterator[tuple[Sequence[int], NDArray[np.float64]]]:
    """Lists of numbers as rows of matrices: those of equal length together, each matrix with its rows' places.

    A list may come in several parts.
    """
    by_length: dict[int, list[int]] = {}
    for place, parts in enumerate(found):
        by_length.setdefault(len(parts[0]) if len(parts) == 1 else sum(map(len, parts)), []).append(place)
    for length, places in by_length.items():
        most = max(1, _NUMBERS // max(1, length))
        for begin in range(0, len(places), most):
            some = places[begin : begin + most]
            yield some, _numbers([x for i in some for x in found[i]]).reshape(len(some), length)


def _numbers(parts: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """All in a row. Samples that were read for looking at are arrays (`journal.read`), and are not taken apart."""
    if all(isinstance(x, array) and x.typecode == "d" for x in parts):
        return np.frombuffer(b"".join(cast("Sequence[bytes]", parts)), np.float64)
    return np.fromiter(chain.from_iterable(parts), np.float64, sum(map(len, parts)))


def _lists(found: Sequence[Sequence[float]]) -> Iterator[tuple[Sequence[int], NDArray[np.float64]]]:
    return matrices([(x,) for x in found])


def summaries(found: Sequence[Sequence[float]], summary: Summary) -> list[float]:
    """What `metric.summarized` gives for each list of samples."""
    if summary != "median":
        return [summarized(x, summary) for x in found]
    out = [0.0] * len(found)
    for places, matrix in _lists(found):
        for place, value in zip(places, medians(np.sort(matrix)).tolist(), strict=True):
            out[place] = value
    return out


def medians(ordered: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each row of sorted values, as `statistics.median` has it."""
    half = ordered.shape[1] // 2
    if ordered.shape[1] % 2:
        return ordered[:, half]
    middle: NDArray[np.float64] = (ordered[:, half - 1] + ordered[:, half]) / 2
    return middle


def quantiles(ordered: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Of each row of sorted values, with a straight line between two of them, as NumPy has it by default."""
    last = ordered.shape[1] - 1
    place = last * share
    below = int(place)
    low, high = ordered[:, below], ordered[:, min(below + 1, last)]
    rest = place - below
    between: NDArray[np.float64] = low + (high - low) * rest if rest < 0.5 else high - (high - low) * (1 - rest)
    return between


@lru_cache(maxsize=4096)
def median_ranks(n: int) -> tuple[int, int] | None:
    """Zero-based order statistics that enclose the median with at least 95 % confidence.

    From the binomial distribution of the number of samples below the median, so no shape is assumed
    (Conover, Practical Nonparametric Statistics, 3.2). None for fewer than 6 samples: no pair does it.
    """
    if n < 6:
        return None
    from scipy import special

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


def means_and_variances(matrix: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Mean and variance (n - 1) of each row; no variance of single values. What `mean(axis=1)` and
    `var(axis=1, ddof=1)` give, to the last digit, without what these take beside the sums.
    """
    count = matrix.shape[1]
    means = np.add.reduce(matrix, axis=1) / count
    if count < 2:
        return means, None
    apart = matrix - means[:, None]
    return means, np.add.reduce(apart * apart, axis=1) / (count - 1)


def means_and_sds(matrix: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Mean and standard deviation (n - 1) of each row; no deviation of single values."""
    means, variances = means_and_variances(matrix)
    return means, None if variances is None else np.sqrt(variances)


@lru_cache(maxsize=4096)
def t_quantile(degrees_of_freedom: float, probability: float = 0.5 + CONFIDENCE / 2) -> float:
    """The quantile of Student's t; `scipy.special` because `scipy.stats` takes a second to import, and imported
    here because it takes a quarter of one, for which commands that compute nothing need not wait.
    """
    from scipy import special

    return float(special.stdtrit(degrees_of_freedom, probability))


def log_mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of positive values with the 95 % t interval of the mean of their logarithms.

    One value has no spread of its own: its interval is (0, inf).
    """
    return log_mean_intervals([values])[0]


def log_mean_intervals(found: Sequence[Sequence[float]]) -> list[tuple[float, float, float]]:
    """`log_mean_interval` of each list."""
    out = [(math.nan, 0.0, math.inf)] * len(found)
    for places, matrix in _lists(found):
        means, sds = means_and_sds(np.log(matrix))
        if sds is None:
            for place, mean in zip(places, means.tolist(), strict=True):
                out[place] = math.exp(mean), 0.0, math.inf
            continue
        count = matrix.shape[1]
        halves = t_quantile(count - 1) * sds / math.sqrt(count)
        for place, *logs in zip(
            places, means.tolist(), (means - halves).tolist(), (means + halves).tolist(), strict=True
        ):
            mean, low, high = map(exponential, logs)
            out[place] = mean, low, high
    return out


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


class Logs(NamedTuple):
    """Positive values by their logarithms: the values' median, the mean of the logarithms, the variance of that
    mean (0 for a single one) and how many they are.
    """

    middle: float
    mean: float
    variance: float
    number: int


def logarithms(found: Sequence[Sequence[float]]) -> list[Logs | None]:
    """`Logs` of each list; None where a value is not positive."""
    out: list[Logs | None] = [None] * len(found)
    positive = [x for x, values in enumerate(found) if min(values) > 0]
    for places, matrix in _lists([found[x] for x in positive]):
        count = matrix.shape[1]
        means, variances = means_and_variances(np.log(matrix))
        errors = [0.0] * len(places) if variances is None else (variances / count).tolist()
        middles = medians(np.sort(matrix)).tolist()
        for place, middle, mean, error in zip(places, middles, means.tolist(), errors, strict=True):
            out[positive[place]] = Logs(middle, mean, error, count)
    return out


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


def coefficients_of_variation(found: Sequence[Sequence[float]]) -> list[float | None]:
    """Standard deviation over mean of each list; None for fewer than two values or a mean of 0."""
    out: list[float | None] = [None] * len(found)
    for places, matrix in _lists(found):
        means, sds = means_and_sds(matrix)
        if sds is not None:
            for place, mean, sd in zip(places, means.tolist(), sds.tolist(), strict=True):
                out[place] = sd / mean if mean else None
    return out


def mean_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % t interval of the mean, or None for fewer than 2 samples."""
    (mean,), sds = means_and_sds(np.asarray(samples, dtype=np.float64)[None, :])
    if sds is None:
        return None
    half = t_quantile(len(samples) - 1) * float(sds[0]) / math.sqrt(len(samples))
    return float(mean) - half, float(mean) + half


def intervals(
    values: Sequence[Sequence[float]], samples: Sequence[Sequence[float]], summary: Summary = "median"
) -> list[tuple[float | None, float | None]]:
    """The 95 % interval of a metric's value over processes, of each list of processes' values.

    The unit is the process: t over the logarithms of the processes' values, stretched to hold the value itself. A
    single process has only its own `samples` to go by: the interval of their median or of their mean, as its value
    is the one or the other. Of the last or the least of them the others do not say how it varies, and there is
    none. None too where there are too few, or where a value is not positive and has no logarithm.
    """
    of_one = {"median": median_interval, "mean": mean_interval}.get(summary)
    out: list[tuple[float | None, float | None]] = [(None, None)] * len(values)
    several = []
    for place, x in enumerate(values):
        if min(x) <= 0:
            continue
        if len(x) == 1:
            out[place] = (of_one(samples[place]) if of_one else None) or (None, None)
        else:
            several.append(place)
    found = [values[x] for x in several]
    for place, x, (_, low, high) in zip(several, found, log_mean_intervals(found), strict=True):
        middle = median(x)
        out[place] = min(low, middle), max(high, middle) if math.isfinite(high) else None
    return out
