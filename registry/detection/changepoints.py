"""Change points of a series over commits: drawn in histories, never a gate.

Hierarchical divisive estimation with the energy distance (E-divisive: Matteson and James, J. Am. Stat.
Assoc. 109 (2014) 334): the split that sets the two sides furthest apart is proposed, kept if few random
orders of the segment do as well, and its halves are searched in turn. A permutation test cannot reach the
p-values that keep a long history quiet, so what is proposed must then pass Student's t between neighbouring
segments; the weakest is taken back until all pass. Both are made for odd runs: proposals look at the series
with these pulled in, and the test is Yuen's, of trimmed means. Neighbouring runs that are alike (one state of
the machine over many commits) count for fewer than they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from scipy import special

from ..figures import signed
from .noise import FLOOR, Floats, trimmed

P = 1e-5
CHANGE = 0.02
SEGMENT = 3
"""Least number of commits on each side: a single odd run is no change."""
PROPOSAL = 0.25
"""Loose, because the t test judges after it: three commits against three have only 20 orders to differ from."""
PERMUTATIONS = 99
MINIMUM_SHARED = 2
"""Series of unchanged code that must change on one day for it to be the machine's doing."""
ODD = 4.0
"""Standard deviations from the middle of its neighbours at which a run is odd."""
NEIGHBOURS = 2
"""On each side of a run."""
CERTAIN = 1.645
"""Standard errors by which neighbours must be alike to be held so."""


class ChangePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change between `index` - 1 and `index`: `change` is new over old median of the segments, minus 1.

    `machine` says why the machine must be thought to have changed and not the code; None if it need not be.
    """

    index: int
    change: float
    p: float
    machine: str | None = None


class Dated(msgspec.Struct, frozen=True):
    """A series with its change points and the day of each value. `witness`: no commit changes its code."""

    days: tuple[str, ...]
    changes: tuple[ChangePoint, ...]
    witness: bool


def of_the_machine(series: Sequence[Dated]) -> list[tuple[ChangePoint, ...]]:
    """The change points of each series, those marked that come on a day on which half of the witnesses changed.

    A witness's code is another library's: what many of them share on one day, in one direction, no commit did.
    Only those count that have values on both sides of the day; two of them are the least.
    """
    told: dict[tuple[str, bool], str] = {}
    days = {x.days[change.index] for x in series if x.witness for change in x.changes}
    for day in days:
        able = [x for x in series if x.witness and min(x.days) < day <= max(x.days)]
        for slower in (True, False):
            moved = [
                y.change for x in able for y in x.changes if x.days[y.index] == day and (y.change > 0) == slower
            ]
            if len(moved) >= max(MINIMUM_SHARED, len(able) / 2):
                told[day, slower] = (
                    f"the machine's: {len(moved)} of {len(able)} series of code that no commit changes moved on "
                    f"{day}, by {signed(float(np.median(moved)))} in the median"
                )
    return [
        tuple(msgspec.structs.replace(y, machine=told.get((x.days[y.index], y.change > 0))) for y in x.changes)
        for x in series
    ]


def change_points(
    series: Sequence[float],
    generator: np.random.Generator,
    p: float = P,
    change: float = CHANGE,
    segment: int = SEGMENT,
) -> tuple[ChangePoint, ...]:
    """Finds the change points of positive times, one per commit and oldest first.

    Values that are no positive number are passed over. `generator` decides the random orders, so a seeded
    one makes the result repeatable.
    """
    values = np.asarray(series, dtype=np.float64)
    kept = np.flatnonzero(np.isfinite(values) & (values > 0))
    logs = np.log(values[kept])
    if _quiet(logs, change, segment):
        return ()
    cuts = sorted(_propose(_tamed(logs), 0, len(logs), segment, generator))
    while cuts:
        noise, alike = _noise(logs, cuts), _alike(logs, cuts)
        judged = [
            _judge(logs[left:cut], logs[cut:right], noise, alike)
            for left, cut, right in _neighbours(cuts, len(logs))
        ]
        # What changes too little goes first, however certain it is; then what is least certain.
        failing = [
            (abs(size) > math.log1p(change), -value, i)
            for i, (size, value) in enumerate(judged)
            if value >= p or abs(size) <= math.log1p(change)
        ]
        if not failing:
            return tuple(
                ChangePoint(int(kept[cut]), math.expm1(size), value)
                for cut, (size, value) in zip(cuts, judged, strict=True)
            )
        del cuts[min(failing)[2]]
    return ()


def _quiet(logs: Floats, change: float, segment: int) -> bool:
    """Whether no two segments' medians can lie `change` apart, however the series is cut: nothing to search for.

    A segment is a row of windows of `segment` to 2 `segment` - 1 values. More than half of each window's values
    are at most its upper median, so more than half of the segment's are at most the largest of these, and its
    median is too; from below likewise. Most series are quiet, and the search is what takes time.
    """
    if len(logs) < 2 * segment:
        return True
    windows = [
        np.sort(np.lib.stride_tricks.sliding_window_view(logs, size), axis=1)
        for size in range(segment, min(2 * segment, len(logs) + 1))
    ]
    highest = max(float(x[:, x.shape[1] // 2].max()) for x in windows)
    lowest = min(float(x[:, (x.shape[1] - 1) // 2].min()) for x in windows)
    return highest - lowest <= math.log1p(change)


def _neighbours(cuts: list[int], end: int) -> list[tuple[int, int, int]]:
    edges = [0, *cuts, end]
    return [(edges[i], edges[i + 1], edges[i + 2]) for i in range(len(cuts))]


def _propose(logs: Floats, start: int, end: int, segment: int, generator: np.random.Generator) -> list[int]:
    """Cuts of `logs[start:end]`, by recursion."""
    if end - start < 2 * segment:
        return []
    distances = np.abs(np.subtract.outer(logs[start:end], logs[start:end]))
    best, cut = _split(distances, segment)
    if best <= 0:
        return []
    as_good = 0
    for _ in range(PERMUTATIONS):
        order = generator.permutation(end - start)
        as_good += _split(distances[np.ix_(order, order)], segment)[0] >= best
        if as_good > PROPOSAL * (PERMUTATIONS + 1):
            return []
    middle = start + cut
    return [
        *_propose(logs, start, middle, segment, generator),
        middle,
        *_propose(logs, middle, end, segment, generator),
    ]


def _split(distances: Floats, segment: int) -> tuple[float, int]:
    """The largest scaled energy statistic and its cut (Matteson and James, equations 5 to 7).

    The right side may end before the segment does, so that a step up does not hide behind the step down that
    follows. Sums over blocks of the distance matrix come from its two-dimensional running sum.
    """
    size = len(distances)
    total = np.zeros((size + 1, size + 1))
    total[1:, 1:] = distances.cumsum(axis=0).cumsum(axis=1)
    cut, end = np.arange(segment, size - segment + 1)[:, None], np.arange(2 * segment, size + 1)[None, :]
    m, n = cut.astype(np.float64), np.maximum(end - cut, segment).astype(np.float64)
    left = total[cut, cut]
    cross = total[cut, end] - left
    right = total[end, end] - 2 * cross - left
    # Each pair of a side stands twice in its block.
    energy = 2 * cross / (m * n) - left / (m * (m - 1)) - right / (n * (n - 1))
    scaled = np.where(end - cut >= segment, energy * m * n / (m + n), -np.inf)
    best = int(scaled.argmax())
    return float(scaled.flat[best]), int(cut[best // scaled.shape[1], 0])


def _noise(logs: Floats, cuts: list[int]) -> float:
    """Variance about the segments' medians, from the median deviation, so that odd runs do not count."""
    deviations = np.concatenate([np.abs(part - np.median(part)) for part in np.split(logs, cuts)])
    return max(float(np.square(1.4826 * np.median(deviations))), FLOOR)


def _tamed(logs: Floats) -> Floats:
    """The series with odd runs pulled in towards their neighbours' median, which keeps steps as they are."""
    if len(logs) <= 2 * NEIGHBOURS:
        return logs
    padded = np.pad(logs, NEIGHBOURS, mode="edge")
    middle = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * NEIGHBOURS + 1), axis=1)
    apart = logs - middle
    limit = ODD * max(1.4826 * float(np.median(np.abs(apart))), math.sqrt(FLOOR))
    return np.asarray(middle + np.clip(apart, -limit, limit))


def _alike(logs: Floats, cuts: list[int]) -> float:
    """How alike neighbouring runs are beyond the segments' levels: their autocorrelation, 0 where it is in doubt.

    Deviations are pulled in, so that one odd run does not hide it, and corrected for the levels having been
    fitted to the same runs (Kendall, Biometrika 41 (1954) 403).
    """
    parts = [part - np.median(part) for part in np.split(logs, cuts)]
    flat = np.concatenate(parts)
    limit = ODD * max(1.4826 * float(np.median(np.abs(flat))), math.sqrt(FLOOR))
    parts = [np.clip(part, -limit, limit) for part in parts]
    products = sum(float(part[1:] @ part[:-1]) for part in parts)
    squares = sum(float(part @ part) for part in parts)
    if squares <= 0:
        return 0.0
    found = products / squares
    found += (1 + 3 * max(found, 0.0)) * len(parts) / len(flat)
    return min(found, 0.9) if found > CERTAIN / math.sqrt(len(flat)) else 0.0


def _judge(before: Floats, after: Floats, noise: float, alike: float) -> tuple[float, float]:
    """Size of the change between two segments, as a logarithm of medians, and Yuen's two-sided p.

    Three commits that happen to agree are no measure of the noise: the whole series' is the least assumed. And
    a side that disagrees with itself is given its own variance, or two odd runs among three would be a change.
    """
    sides = [trimmed(part[None, :]) for part in (before, after)]
    # So many independent runs would know the mean as well as these, of which neighbours are `alike`.
    worth = (1 - alike) / (1 + alike)
    counts = [max(worth * len(part), 2.0) for part in (before, after)]
    df = max(sum(float(x.df[0]) for x in sides) * worth, 1.0)
    error = math.sqrt(sum(max(float(x.variance[0]), noise) / n for x, n in zip(sides, counts, strict=True)))
    t = abs(float(sides[1].mean[0] - sides[0].mean[0])) / error
    return float(np.median(after) - np.median(before)), float(2 * special.stdtr(df, -t))
