"""From which length of sequence on an operator of O(S) is ahead of attention, which is O(S²): in time, in memory.

Pure: a view over a run's records. Compared are curves of equal width (the numbers that a token has: heads by head
dimension, or channels) and of implementations of the same standing: ours, the fastest baselines, eager PyTorch.
Between two measured lengths a curve is a straight line in the logarithms of both axes, as powers of S are; beyond
the lengths that both curves have nothing is said.

The interval is a percentile bootstrap (Efron, Annals of Statistics 7, 1979) over processes: replicates are drawn
whole, as the two curves of a replicate saw the same state of the device. Of n medians even the range covers the
true one with a probability of 1 - 2^(1 - n) only, so that is the confidence it claims where it is below 95 %.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, Literal, TypeAlias

import numpy as np

from .. import figures
from ..analysis.rows import Row, rows
from ..analysis.statistics import CONFIDENCE
from ..store.journal import Journal
from ..store.metric import LATENCY, MEMORY, summarized
from ..store.record import EAGER, PROVIDER, YARDSTICK, Key, Measurement, baseline

WIDTH: Mapping[str, tuple[str, ...]] = {
    "attention": ("H", "D"),
    "linear_attention": ("H", "D"),
    "selective_scan": ("D",),
    "ssd": ("H", "P"),
}
"""The axes whose product is an operator's width."""
QUADRATIC = "attention"
LENGTH = "S"
EXACT = 7
"""Up to so many replicates every resample is looked at; of more, `DRAWS` random ones."""
DRAWS = 4000
EQUAL = 1e-9
"""Relative differences below this are rounding."""

Measure: TypeAlias = Literal["time", "memory"]
MEASURES: tuple[Measure, ...] = ("time", "memory")
Curve: TypeAlias = Mapping[int, Mapping[int, float]]
"""Values by length and replicate, all above 0: process medians in ms, or peak memory in bytes."""


@dataclass(frozen=True)
class Series:
    """One implementation of one operator at one width, over lengths. `sizes` is what else its cases have."""

    operator: str
    implementation: str
    provider: str
    sizes: str
    time: Curve
    memory: Curve
    ended: tuple[int, str] | None = None
    """The first length beyond its last time that was asked for, and how that ended."""

    def curve(self, measure: Measure) -> Curve:
        """Its times or its memory."""
        return self.time if measure == "time" else self.memory

    @property
    def name(self) -> str:
        """`ssd (kernelmark)`."""
        return f"{self.operator} ({self.implementation})"


@dataclass(frozen=True)
class Crossing:
    """Where the linear curve comes to lie below the quadratic one for good, within the lengths both have.

    `at` is -inf where it does so at every length, and inf where it does not at the last; the bounds likewise.
    They are None for a single replicate.
    """

    at: float
    first: int
    last: int
    order: tuple[int, ...]
    """Which is below along the lengths: 1 the linear one, -1 the quadratic one, changes only; () if equal."""
    replicates: int
    low: float | None = None
    high: float | None = None
    confidence: float | None = None


@dataclass(frozen=True)
class Contest:
    """Attention and the linear operators beside it: the same width, batch, dtype, pass and cache state."""

    side: str
    width: int
    common: str
    quadratic: Series
    linear: tuple[Series, ...]

    @property
    def series(self) -> tuple[Series, ...]:
        """All of them, attention first."""
        return (self.quadratic, *self.linear)

    @cached_property
    def crossings(self) -> Mapping[tuple[str, str, Measure], Crossing | None]:
        """See `crossing`, by operator, sizes and measure."""
        return {
            (x.operator, x.sizes, y): crossing(self.quadratic.curve(y), x.curve(y))
            for x in self.linear
            for y in MEASURES
        }

    def crossing(self, other: Series, measure: Measure) -> Crossing | None:
        """That of one of the linear ones."""
        return self.crossings[other.operator, other.sizes, measure]

    def told(self, other: Series, measure: Measure) -> str:
        """The crossing as a sentence."""
        found = self.crossing(other, measure)
        return tell(found, other.operator, self.quadratic.operator, measure) if found else figures.DASH


# --- where two curves cross -----------------------------------------------------------------------------


def crossing(quadratic: Curve, linear: Curve) -> Crossing | None:
    """Where `linear` comes to lie below `quadratic`; None unless both are known over a common stretch."""
    if not quadratic or not linear:
        return None
    first, last = max(min(quadratic), min(linear)), min(max(quadratic), max(linear))
    if first >= last:
        return None
    lengths = np.array(sorted(x for x in {*quadratic, *linear} if first <= x <= last), dtype=np.float64)
    whole = [_logs([[median(x.values())] for _, x in sorted(curve.items())]) for curve in (quadratic, linear)]
    ways = [_between(curve, lengths) for curve in (quadratic, linear)]
    (column,) = (ways[0] @ whole[0] - ways[1] @ whole[1]).T
    at, order = _meeting(lengths, column)
    common = set.intersection(*(set(x) for curve in (quadratic, linear) for x in curve.values()))
    found = Crossing(at, int(first), int(last), order, len(common))
    if len(common) < 2:
        return found
    draws, weights = resamples(len(common))
    drawn = []
    for curve, way in zip((quadratic, linear), ways, strict=True):
        values = np.array([[x[r] for r in sorted(common)] for _, x in sorted(curve.items())])
        drawn.append(way @ _logs(np.median(values[:, draws], axis=-1)))
    places = [_meeting(lengths, x)[0] for x in (drawn[0] - drawn[1]).T]
    confidence = min(CONFIDENCE, 1 - 2.0 ** (1 - len(common)))
    low, high = _percentiles(places, weights, (1 - CONFIDENCE) / 2)
    return Crossing(at, int(first), int(last), order, len(common), min(low, at), max(high, at), confidence)


def _logs(values: Any) -> Any:
    return np.log(np.asarray(values, dtype=np.float64))


def _between(curve: Curve, lengths: Any) -> Any:
    """The matrix that takes logarithms at a curve's own lengths to those at `lengths`."""
    own = _logs(sorted(curve))
    return np.array([np.interp(_logs(lengths), own, row) for row in np.eye(len(own))]).T


def _meeting(lengths: Any, ahead: Any) -> tuple[float, tuple[int, ...]]:
    """(`Crossing.at`, `Crossing.order`) of log(quadratic / linear) at increasing lengths."""
    signs = np.where(np.abs(ahead) < EQUAL, 0, np.sign(ahead)).astype(int)
    order = tuple(x for x, _ in itertools.groupby(int(x) for x in signs if x))
    if signs[-1] <= 0:
        return math.inf, order
    behind = np.flatnonzero(signs <= 0)
    if not len(behind):
        return -math.inf, order
    i = int(behind[-1])
    share = 0.0 if signs[i] == 0 else float(ahead[i] / (ahead[i] - ahead[i + 1]))
    return float(lengths[i] * (lengths[i + 1] / lengths[i]) ** share), order


def resamples(n: int) -> tuple[Any, Any]:
    """Resamples of n things with replacement, (count, n) indices, and the probability of each.

    All of them where they are few, each multiset once; else random ones, always the same.
    """
    if n > EXACT:
        return np.random.default_rng(n).integers(n, size=(DRAWS, n)), np.full(DRAWS, 1 / DRAWS)
    draws = list(itertools.combinations_with_replacement(range(n), n))
    ways = [math.factorial(n) / math.prod(math.factorial(x.count(i)) for i in range(n)) for x in draws]
    return np.array(draws), np.array(ways) / n**n


def _percentiles(places: Sequence[float], weights: Any, tail: float) -> tuple[float, float]:
    """The values with a probability of `tail` at or below, and at or above; infinite ones have their place."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    found = []
    for way in (order, order[::-1]):
        heap = itertools.accumulate(float(weights[i]) for i in way)
        found.append(next((places[i] for i, x in zip(way, heap, strict=True) if x > tail), places[way[-1]]))
    return found[0], found[1]


# --- which curves a run has -----------------------------------------------------------------------------


def contests(journal: Journal, found: Iterable[Row]) -> tuple[Contest, ...]:
    """Every comparison that a run's rows allow; none unless attention and another have times over lengths."""
    settings: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        width = _width(row)
        if width is not None and row.provider != YARDSTICK:
            key = (width, row.axes.get("B", 1), row.dtype, row.pass_, row.cache)
            settings.setdefault(key, []).append(row)
    measured: dict[Key, dict[int, Measurement]] = {}
    for record in journal.records:
        if record.measurement is not None:
            measured.setdefault(record.identity, {})[record.replicate] = record.measurement
    out: list[Contest] = []
    for (width, batch, dtype, pass_, cache), alike in settings.items():
        common = f"B{batch} · {dtype} · {pass_.replace('_', ' ')}"
        common += "" if cache == "cold" else f" · {cache} cache"
        out += _contests(_series(alike, measured), width, common)
    return tuple(out)


def _width(row: Row) -> int | None:
    """None for what has none, and for attention that is not causal."""
    axes = WIDTH.get(row.operator)
    if axes is None or LENGTH not in row.axes or any(x not in row.axes for x in axes):
        return None
    if row.options.get("mask", "causal") != "causal":
        return None
    return math.prod(row.axes[x] for x in axes)


def _series(found: Iterable[Row], measured: Mapping[Key, Mapping[int, Measurement]]) -> list[Series]:
    """The rows' implementations over lengths: those with two times or more."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in found:
        sizes = [f"{name}{size}" for name, size in row.axes.items() if name not in ("B", LENGTH)]
        sizes += [
            name if x is True else str(x) for name, x in row.options.items() if x not in (False, "causal", 0)
        ]
        groups.setdefault((row.operator, " ".join(sizes), row.implementation), []).append(row)
    out = []
    for (operator, text, implementation), group in groups.items():
        time: dict[int, dict[int, float]] = {}
        memory: dict[int, dict[int, float]] = {}
        for row in (x for x in group if x.value(LATENCY.name)):
            seen = measured[row.identity]
            length = row.axes[LENGTH]
            time[length] = {r: summarized(x.samples[LATENCY.name], LATENCY.summary) for r, x in seen.items()}
            peaks = {r: x.samples.get(MEMORY.name, (0.0,))[0] for r, x in seen.items()}
            if any(peaks.values()):
                memory[length] = {r: x for r, x in peaks.items() if x}
        if len(time) > 1 and all(x > 0 for point in time.values() for x in point.values()):
            beyond = [x for x in group if x.value() is None and x.axes[LENGTH] > max(time)]
            end = min(beyond, key=lambda x: x.axes[LENGTH], default=None)
            ended = None if end is None else (end.axes[LENGTH], end.status.replace("_", " "))
            out.append(Series(operator, implementation, group[0].provider, text, time, memory, ended))
    return out


def _contests(found: Sequence[Series], width: int, common: str) -> list[Contest]:
    """Of all series of one width: ours, the fastest baselines, and eager PyTorch where that is not the same."""
    variants: dict[tuple[str, str], list[Series]] = {}
    for x in found:
        variants.setdefault((x.operator, x.sizes), []).append(x)
    sides: dict[str, Callable[[Series], bool]] = {
        "kernelmark": lambda x: x.provider == PROVIDER,
        "fastest baselines": lambda x: baseline(x.provider, x.implementation),
        "eager PyTorch": lambda x: x.implementation == EAGER,
    }
    out: list[Contest] = []
    for (operator, _), attention in variants.items():
        if operator != QUADRATIC:
            continue
        for side, belongs in sides.items():
            quadratic = fastest([x for x in attention if belongs(x)])
            others = [fastest([x for x in y if belongs(x)]) for (o, _), y in variants.items() if o != QUADRATIC]
            linear = tuple(x for x in others if x is not None)
            if quadratic is None or not linear:
                continue
            contest = Contest(side, width, common, quadratic, linear)
            if all((contest.quadratic, contest.linear) != (x.quadratic, x.linear) for x in out):
                out.append(contest)
    return out


def fastest(found: Sequence[Series]) -> Series | None:
    """The one that is fastest at most lengths; of several such the one that is fastest on the whole."""
    won: dict[str, int] = {}
    for length in {x for series in found for x in series.time}:
        best = min((x for x in found if length in x.time), key=lambda x: median(x.time[length].values()))
        won[best.implementation] = won.get(best.implementation, 0) + 1

    def place(x: Series) -> tuple[int, float]:
        logs = [math.log(median(values.values())) for values in x.time.values()]
        return -won.get(x.implementation, 0), math.fsum(logs) / len(logs)

    return min(found, key=place, default=None)


# --- in words -------------------------------------------------------------------------------------------


def tell(found: Crossing, linear: str, quadratic: str, measure: Measure) -> str:
    """One sentence: `ssd is faster from S = 9,312 on [9,100, 9,500] (94 %)`."""
    ahead, more = ("is faster", "faster") if measure == "time" else ("needs less memory", "less")
    if not found.order:
        text = f"no difference from S = {found.first:,} to {found.last:,}"
    elif found.at == math.inf:
        text = f"{quadratic} {ahead} up to S = {found.last:,}, the longest that both have"
        if found.order[0] > 0 or len(found.order) > 1:
            text += f", though {linear} is {more} before: they cross {_times(len(found.order) - 1)}"
    elif found.at == -math.inf:
        text = f"{linear} {ahead} from S = {found.first:,} on, the shortest that both have"
    else:
        text = f"{linear} {ahead} from S = {figures.number(found.at)} on"
        if len(found.order) > 2:
            text += f", the last of {len(found.order) - 1} crossings"
    return f"{text} {bounds(found)}".rstrip()


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def bounds(found: Crossing) -> str:
    """`[9,100, 9,500] (94 %)`; `< 1,024` and `> 131,072` for what lies beyond the measured lengths."""
    if found.low is None or found.high is None or found.confidence is None:
        return "(one replicate: no interval)"
    if found.low == found.high:
        return "" if math.isinf(found.at) else "(the same in every replicate)"

    def bound(x: float) -> str:
        if math.isinf(x):
            return f"> {found.last:,}" if x > 0 else f"< {found.first:,}"
        return figures.number(x)

    few = f": {found.replicates} replicates are few" if found.confidence < 0.9 else ""
    return f"[{bound(found.low)}, {bound(found.high)}] ({figures.percent(found.confidence)}{few})"


def summarize(journal: Journal) -> list[dict[str, Any]]:
    """As `kernelmark show --json` prints it. Lengths beyond the measured ones are null; `ahead` says which way."""
    out = []
    for contest in contests(journal, rows(journal)):
        for other in contest.linear:
            for measure in MEASURES:
                found = contest.crossing(other, measure)
                if found is not None:
                    out.append(
                        {
                            "side": contest.side,
                            "width": contest.width,
                            "common": contest.common,
                            "measure": measure,
                            "quadratic": _named(contest.quadratic),
                            "linear": _named(other),
                            "from": found.first,
                            "to": found.last,
                            "crossing": _finite(found.at),
                            "ahead": _ahead(found),
                            "low": _finite(found.low),
                            "high": _finite(found.high),
                            "confidence": found.confidence,
                            "replicates": found.replicates,
                        }
                    )
    return out


def _named(series: Series) -> dict[str, str]:
    return {"operator": series.operator, "implementation": series.implementation, "sizes": series.sizes}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _ahead(found: Crossing) -> str:
    """Which curve is lower at the longest length."""
    if not found.order:
        return "neither"
    return "quadratic" if found.at == math.inf else "linear"
