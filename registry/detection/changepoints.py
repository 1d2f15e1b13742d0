"""Change points of a series over commits: drawn in histories, never a gate.

Hierarchical divisive estimation with the energy distance (E-divisive: Matteson and James, J. Am. Stat.
Assoc. 109 (2014) 334): the split that sets the two sides furthest apart is proposed, kept if few random
orders of the segment do as well, and its halves are searched in turn. A permutation test cannot reach the
p-values that keep a long history quiet, so what is proposed must then pass Student's t between neighbouring
segments; the weakest is taken back until all pass (docs/deciding.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from scipy import special

from .noise import FLOOR, Floats

P = 1e-5
CHANGE = 0.02
SEGMENT = 3
"""Least number of commits on each side: a single odd run is no change."""
PROPOSAL = 0.25
"""Loose, because the t test judges after it: three commits against three have only 20 orders to differ from."""
PERMUTATIONS = 99


class ChangePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change between `index` - 1 and `index`: `change` is new over old median of the segments, minus 1."""

    index: int
    change: float
    p: float


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
    cuts = sorted(_propose(logs, 0, len(logs), segment, generator))
    while cuts:
        noise = _noise(logs, cuts)
        judged = [_judge(logs, left, cut, right, noise) for left, cut, right in _neighbours(cuts, len(logs))]
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


def _judge(logs: Floats, left: int, cut: int, right: int, noise: float) -> tuple[float, float]:
    """Size of the change between two segments, as a logarithm of medians, and Student's two-sided p.

    Three commits that happen to agree are no measure of the noise: the whole series' is the least assumed. And
    a side that disagrees with itself is given its own variance, or two odd runs among three would be a change.
    """
    before, after = logs[left:cut], logs[cut:right]
    m, n = len(before), len(after)
    spreads = float(before.var(ddof=1)), float(after.var(ddof=1))
    least = max(((m - 1) * spreads[0] + (n - 1) * spreads[1]) / (m + n - 2), noise)
    error = math.sqrt(max(spreads[0], least) / m + max(spreads[1], least) / n)
    t = abs(float(after.mean() - before.mean())) / error
    return float(np.median(after) - np.median(before)), float(2 * special.stdtr(m + n - 2, -t))
