"""How noisy a row is: robust means, their variance, and what history adds to it. Pure, over all rows at once.

Sources: Yuen, Biometrika 61 (1974) 165, for the trimmed mean's variance; Smyth, Stat. Appl. Genet. Mol.
Biol. 3 (2004) 3, for shrinking variances toward a prior fitted over the other rows; Benjamini and Hochberg,
J. R. Stat. Soc. B 57 (1995) 289.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import special

from .comparison import Noise

Floats: TypeAlias = NDArray[np.float64]

TRIM = 0.2
TRIM_MANY = 0.1
MANY = 10
"""From so many values on a tenth is cut at each end: more than odd processes are, and a tenth more precise."""
PRIOR_RUNS = 10
PRIOR_DF = 10.0
"""However long the history, today's spread keeps a say: a prior weighs at most this many degrees of freedom.

The weight is capped and not the knowledge: `Prior.df` says how well the prior is known, see `shrink`."""
FLOOR = 2e-4**2
"""Least variance of one pair: timers do not resolve less than some 0.02 %, whatever a constant series says."""
CONTRADICTED = 0.01
"""A prior that today's spread exceeds with less than this probability (F test) is not believed."""
MINIMUM_OTHERS = 5


@dataclass(frozen=True)
class Estimate:
    """Trimmed mean per row, variance of one observation, degrees of freedom, and observations used."""

    mean: Floats
    variance: Floats
    df: Floats
    count: Floats


@dataclass(frozen=True)
class Prior:
    """What is believed of each row's variance before today's data; df 0 means nothing."""

    variance: Floats
    df: Floats


def log_times(rows: Sequence[Sequence[float]], width: int | None = None) -> Floats:
    """Logarithms as a (rows, width) array; NaN for what is missing or not a positive finite time."""
    width = max((len(row) for row in rows), default=0) if width is None else width
    out = np.full((len(rows), width), np.nan)
    if rows and all(len(row) == width for row in rows):
        out[:] = rows
    else:
        for i, row in enumerate(rows):
            out[i, : min(len(row), width)] = row[:width]
    out[~(np.isfinite(out) & (out > 0))] = np.nan
    return np.asarray(np.log(out))


def trimmed(values: Floats) -> Estimate:
    """The trimmed mean of each row (a fifth off each end, of many values a tenth) and Yuen's variance.

    NaN are left out.

    The variance returned is Yuen's squared standard error times the count: that of one observation.
    """
    values = np.sort(values, axis=1)  # NaN last
    count = np.isfinite(values).sum(axis=1)
    mean = np.full(len(values), np.nan)
    variance = np.full(len(values), np.nan)
    df = np.zeros(len(values))
    for n in set(count.tolist()) - {0}:
        rows = count == n
        cut = trimmed_off(n)
        kept = n - 2 * cut
        block = values[rows, :n]
        mean[rows] = block[:, cut : n - cut].mean(axis=1)
        if n > 1:
            winsorized = np.clip(block, block[:, cut : cut + 1], block[:, n - cut - 1 : n - cut])
            variance[rows] = n * (n - 1) * winsorized.var(axis=1, ddof=1) / (kept * (kept - 1))
            df[rows] = kept - 1
    return Estimate(mean, np.maximum(variance, FLOOR), df, count.astype(np.float64))


def trimmed_off(count: int) -> int:
    """How many of so many values are cut at each end."""
    return int((TRIM_MANY if count >= MANY else TRIM) * count + 1e-9)


def run_mean(medians: Sequence[float]) -> float:
    """A run's value in ms for `History.runs`: the trimmed mean of its processes' logs; NaN if there is none."""
    return math.exp(float(trimmed(log_times([medians])).mean[0]))


def history_prior(histories: Sequence[Sequence[Noise]]) -> Prior:
    """Per row: the mean variance of the last ten comparisons, weighted by their degrees of freedom."""
    variance = np.full(len(histories), np.nan)
    df = np.zeros(len(histories))
    for i, noises in enumerate(histories):
        total = weighted = 0.0
        for noise in noises[-PRIOR_RUNS:]:
            if math.isfinite(noise.variance) and noise.variance >= 0 and 0 < noise.df < math.inf:
                total += noise.df
                weighted += noise.df * max(noise.variance, FLOOR)
        if total > 0:
            variance[i], df[i] = weighted / total, total
    return Prior(variance, df)


def empirical_prior(estimate: Estimate) -> Prior:
    """Per row: Smyth's prior fitted by moments of log variances over the *other* rows of the same run."""
    used = np.flatnonzero(estimate.df > 0)
    size = len(estimate.df)
    out = Prior(np.full(size, np.nan), np.zeros(size))
    others = len(used) - 1
    if others < MINIMUM_OTHERS:
        return out
    half = estimate.df[used] / 2
    centred = np.log(estimate.variance[used]) - special.digamma(half) + np.log(half)
    expected = special.polygamma(1, half)
    # Sums without the row itself: otherwise its own spread would be counted twice.
    mean = (centred.sum() - centred) / others
    spread = (np.square(centred).sum() - np.square(centred) - others * mean**2) / (others - 1)
    excess = spread - (expected.sum() - expected) / others
    prior_half = _inverse_trigamma(np.maximum(excess, 1e-8))
    out.variance[used] = np.exp(mean + special.digamma(prior_half) - np.log(prior_half))
    # However alike the rows are, the prior is known no better than their spreads together.
    out.df[used] = np.minimum(2 * prior_half, estimate.df.sum() - estimate.df[used])
    return out


def _inverse_trigamma(y: Floats) -> Floats:
    """Newton's method on 1/trigamma, which is nearly linear (Smyth 2004, appendix)."""
    x = 0.5 + 1 / y
    for _ in range(20):
        value = special.polygamma(1, x)
        x = x + value * (1 - value / y) / special.polygamma(2, x)
    return np.asarray(x)


def either(first: Prior, second: Prior) -> Prior:
    """The first prior where there is one, else the second."""
    there = first.df > 0
    return Prior(np.where(there, first.variance, second.variance), np.where(there, first.df, second.df))


IMPLAUSIBLE = 1e6
"""A variance of log ratios that no clock gives: a history that holds one was not written by measuring."""


def shrink(estimate: Estimate, prior: Prior) -> tuple[Floats, Floats]:
    """Posterior variance of one observation and its degrees of freedom.

    Where the prior weighs less than it is known, the degrees of freedom are those of the weighted mean of two
    variances (Satterthwaite, Biometrics Bull. 2 (1946) 110): adding up the weights would make intervals too wide.

    A prior that today's data contradict upwards is dropped: a row that became noisy must not borrow the
    calm of its past.
    """
    ratio = np.divide(estimate.variance, prior.variance, out=np.zeros_like(prior.df), where=prior.df > 0)
    believed = (
        (prior.df > 0)
        & (prior.variance < IMPLAUSIBLE)
        & (
            special.fdtrc(np.maximum(estimate.df, 1), np.maximum(prior.df, 1), np.nan_to_num(ratio))
            >= CONTRADICTED
        )
    )
    weight = np.where(believed, np.minimum(prior.df, PRIOR_DF), 0.0)
    total = weight + estimate.df
    own = np.where(estimate.df > 0, np.nan_to_num(estimate.variance), 0.0) * estimate.df
    borrowed = np.where(believed, np.nan_to_num(prior.variance), 0.0) * weight
    variance = np.divide(own + borrowed, total, out=np.full_like(total, np.nan), where=total > 0)
    spread = np.divide(np.square(weight), prior.df, out=np.zeros_like(total), where=weight > 0) + estimate.df
    df = np.divide(np.square(total), spread, out=np.zeros_like(total), where=spread > 0)
    return np.maximum(variance, FLOOR), df


def benjamini_hochberg(p: Floats, q: float) -> NDArray[np.bool_]:
    """Which hypotheses are rejected at false discovery rate `q`. NaN is never rejected and not counted."""
    rejected = np.zeros(len(p), dtype=bool)
    tested = np.flatnonzero(np.isfinite(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    passing = np.flatnonzero(p[order] <= q * np.arange(1, len(order) + 1) / max(len(order), 1))
    if len(passing):
        rejected[order[: passing[-1] + 1]] = True
    return rejected
