"""Statistics that people ask for and that decide nothing: `statistics all`.

Each answers another question than "did this commit make it slower", and on unchanged code each cries wolf
(docs/deciding.md). Nothing in `decision.py` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..store.processes import by_row
from ..store.record import Key, Record
from .noise import Floats

WHY_NOT = {
    "welch_t": "Welch's t treats the iterations of a process as independent; they are not. More iterations make "
    "it worse: it calls 62 % of unchanged rows different at 10 iterations and 94 % at 1,000.",
    "welch_p": "Follows from Welch's t, so it is small whenever two processes differ by anything at all.",
    "cohens_d": "Measures the difference in units of the spread within a process, which says nothing of the "
    "spread between processes: |d| >= 0.8 in 29 to 40 % of comparisons of unchanged code.",
    "mann_whitney_p": "Needs no normal distribution but independent samples all the same: 65 % of unchanged rows "
    "are called different on pooled iterations. On process medians it is mute below 8 processes.",
    "outliers": "Tukey's fences count samples beyond 1.5 interquartile ranges. Removing them shrinks the spread "
    "and raised false alarms from 50 to 68 %, so they are counted and kept.",
}
"""Why each statistic does not decide; for help texts and the documentation."""

FENCE = 1.5


class Descriptive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The statistics of one row over all samples of all processes; None where the data do not allow one.

    Signs: above 0 the current side is slower.
    """

    welch_t: float | None
    welch_p: float | None
    cohens_d: float | None
    mann_whitney_p: float | None
    outliers_base: int
    outliers_current: int
    samples_base: int
    samples_current: int


def describe(base: Sequence[float], current: Sequence[float]) -> Descriptive:
    """The statistics of two heaps of samples; what is no finite number is left out."""
    x, y = (np.asarray(side, dtype=np.float64) for side in (base, current))
    x, y = x[np.isfinite(x)], y[np.isfinite(y)]
    t, p, d = _welch(x, y)
    return Descriptive(
        welch_t=t,
        welch_p=p,
        cohens_d=d,
        mann_whitney_p=_mann_whitney(x, y),
        outliers_base=tukey_outliers(x),
        outliers_current=tukey_outliers(y),
        samples_base=len(x),
        samples_current=len(y),
    )


def describe_records(
    base: Iterable[Record], current: Iterable[Record], rates: Collection[str] = ()
) -> Mapping[Key, Descriptive]:
    """The statistics of every row that has samples on both sides. Of `rates`, metrics of which more is better, the
    negative values are looked at, so that signs say the same.
    """
    before, after = _samples(base, rates), _samples(current, rates)
    return {key: describe(before[key], after[key]) for key in before if key in after}


def tukey_outliers(samples: Sequence[float] | Floats) -> int:
    """Number of samples beyond 1.5 interquartile ranges from the quartiles (Tukey 1977); 0 below 4 samples."""
    values = np.asarray(samples, dtype=np.float64)
    if len(values) < 4:
        return 0
    low, high = np.percentile(values, [25, 75])
    reach = FENCE * (high - low)
    return int(((values < low - reach) | (values > high + reach)).sum())


def _samples(records: Iterable[Record], rates: Collection[str]) -> dict[Key, list[float]]:
    out: dict[Key, list[float]] = {}
    for record in (x for mine in by_row(records).values() for x in mine):
        if record.measurement is not None:
            sign = -1 if record.case.primary in rates else 1
            out.setdefault(record.identity, []).extend(sign * x for x in record.primary)
    return out


def _welch(x: Floats, y: Floats) -> tuple[float | None, float | None, float | None]:
    """t and p after Welch, Biometrika 34 (1947) 28; d after Cohen (1988), pooled standard deviation."""
    m, n = len(x), len(y)
    if m < 2 or n < 2:
        return None, None, None
    from scipy import special

    a, b = float(x.var(ddof=1)) / m, float(y.var(ddof=1)) / n
    difference = float(y.mean() - x.mean())
    pooled = (a * m * (m - 1) + b * n * (n - 1)) / (m + n - 2)
    if not a + b > 0 or not pooled > 0:
        return None, None, None
    t = difference / math.sqrt(a + b)
    share = a / (a + b)  # not a**2 / (a + b)**2: the squares of tiny variances vanish
    df = 1 / (share**2 / (m - 1) + (1 - share) ** 2 / (n - 1))
    return t, float(2 * special.stdtr(df, -abs(t))), difference / math.sqrt(pooled)


def _mann_whitney(x: Floats, y: Floats) -> float | None:
    if not len(x) or not len(y):
        return None
    # Imported here: scipy.stats takes about a second, and only this column needs it.
    from scipy.stats import mannwhitneyu, rankdata

    both = np.concatenate([x, y])
    if np.ptp(both) == 0:
        return 1.0
    few, many = sorted((len(x), len(y)))
    if few <= EXACT and many <= EXACT_BESIDE and len(np.unique(both)) < len(both):
        ranks = np.rint(2 * rankdata(both)).astype(int)  # doubled, so that ranks of ties are whole
        return _exact(ranks, ranks[: len(x)] if len(x) == few else ranks[len(x) :])
    return float(mannwhitneyu(x, y, alternative="two-sided").pvalue)  # which is exact for as few without ties


EXACT, EXACT_BESIDE = 8, 200
"""Up to so many values on one side, and on the other, ties are counted out. Beyond, a normal distribution does."""


def _exact(ranks: NDArray[np.int_], chosen: NDArray[np.int_]) -> float:
    """Twice the share of all choices of as many ranks whose sum is as far out as that of the chosen, 1 at most."""
    most = int(np.sort(ranks)[-len(chosen) :].sum())
    ways = np.zeros((len(chosen) + 1, most + 1))  # by how many ranks, and their sum; below 2**53, so exact
    ways[0, 0] = 1
    for rank in ranks.tolist():
        ways[1:, rank:] += ways[:-1, : most + 1 - rank].copy()
    found, place = ways[-1], int(chosen.sum())
    return float(min(1.0, 2 * min(found[: place + 1].sum(), found[place:].sum()) / found.sum()))
