"""What comparing begins with: two states of the code that share rows of ours, and a run of ours beside others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..analysis.speedups import excludes_one, mean_bounds
from ..analysis.statistics import geometric_mean
from .facts import ONE_PROCESS, Fact, Run
from .timeline import Measured

OFFERED = 40
"""Newest states of the code on a device among which two are looked for that share most rows."""
WITHIN = "within their intervals"
"""How a row stands whose ratio's interval holds 1."""


@dataclass(frozen=True)
class Ratio:
    """How many times better a row became. Without an interval on both sides it has no `bounds`."""

    value: float
    bounds: tuple[float, float] | None

    @property
    def outcome(self) -> str:
        """Better and worse by the interval alone."""
        if self.bounds is None:
            return ONE_PROCESS
        if not excludes_one(*self.bounds):
            return WITHIN
        return "better" if self.bounds[0] > 1 else "worse"


@dataclass(frozen=True)
class Change:
    """The rows of an operator, or of all of them."""

    operator: str
    ratios: tuple[Ratio, ...]

    @cached_property
    def counted(self) -> tuple[Ratio, ...]:
        """What means are of: the rows that have an interval, or all of them where none has."""
        return tuple(x for x in self.ratios if x.bounds) or self.ratios

    @cached_property
    def outcomes(self) -> Counter[str]:
        """How many rows are better, worse, and so on."""
        return Counter(x.outcome for x in self.ratios)

    @property
    def certain(self) -> int:
        """How many rows have an interval: only of those anything can be said."""
        return len(self.ratios) - self.outcomes[ONE_PROCESS]

    @property
    def mean(self) -> float | None:
        """The geometric mean of what counts."""
        return geometric_mean(x.value for x in self.counted)

    @property
    def decided(self) -> bool:
        """Whether the mean's interval leaves out 1."""
        return excludes_one(*(mean_bounds(x.bounds or (None, None) for x in self.counted) or (None, None)))

    @property
    def extremes(self) -> tuple[float, float]:
        """The least and the most of what counts."""
        found = [x.value for x in self.counted]
        return min(found), max(found)


@dataclass(frozen=True)
class Pair:
    """Two states of the code on a device, by their newest runs, and their rows by operator."""

    before: Run
    after: Run
    changes: tuple[Change, ...]

    @cached_property
    def overall(self) -> Change:
        """All rows."""
        return Change("all operators", tuple(y for x in self.changes for y in x.ratios))


_Rows = Mapping[tuple[Any, str], Measured]
"""Rows of ours of a state of the code, by their identities and keys."""


def newest_two(by_source: Mapping[tuple[str, str], Sequence[Measured]]) -> list[Pair]:
    """Of each device the newest two states of the code that share most rows of ours with intervals; where no two
    share such a row, most rows. The device with most of them comes first.

    The newest of all may be a run of four rows that no other has.
    """
    devices: dict[str, list[_Rows]] = {}
    for (device, _), found in by_source.items():
        mine = {(x.identity, x.key): (run, x) for run, x in found if x.ours and x.number and x.number[0] > 0}
        devices.setdefault(device, []).append(mine)
    out = []
    for states in devices.values():
        certain = [{row for row, (_, x) in y.items() if None not in x.interval} for y in states]
        places = _sharing(certain) or _sharing([x.keys() for x in states])
        if places:
            out.append(_pair(*(states[x] for x in places)))
    return sorted(out, key=lambda x: (-x.overall.certain, -len(x.overall.ratios)))


def _sharing(states: Sequence[Collection[Any]]) -> tuple[int, int] | None:
    """The places of the newest two that share at least half as many rows as any two do, the earlier first."""
    kept = [x for x, rows in enumerate(states) if rows][-OFFERED:]
    rows = {x: set(states[x]) for x in kept}
    shared = {(x, y): len(rows[x] & rows[y]) for x in kept for y in kept if y < x}
    most = max(shared.values(), default=0)
    if not most:
        return None
    later, before = max(pair for pair, count in shared.items() if 2 * count >= most)
    return before, later


def _pair(before: _Rows, after: _Rows) -> Pair:
    ratios: dict[str, list[Ratio]] = {}
    for row, (_, then) in before.items():
        if row in after:
            ratios.setdefault(then.operator, []).append(_ratio(then, after[row][1]))
    changes = (Change(x, tuple(found)) for x, found in sorted(ratios.items()))
    return Pair(_newest(before), _newest(after), tuple(changes))


def _newest(state: _Rows) -> Run:
    return max((run for run, _ in state.values()), key=lambda run: run.created)


def _ratio(then: Fact, now: Fact) -> Ratio:
    """One mean is of both, times and what is better the higher it is."""
    less, more = (then, now) if now.better == "higher" else (now, then)
    assert less.number
    assert more.number
    (low, high), (least, most) = more.interval, less.interval
    bounds = None
    if low is not None and high is not None and least is not None and most is not None:
        bounds = low / most, high / least
    return Ratio(more.number[0] / less.number[0], bounds)


def beside_others(by_source: Mapping[tuple[str, str], Sequence[Measured]]) -> Run | None:
    """A run of the newest state of the code that has most rows of ours beside others."""
    beside = {
        place: sum(x.ours and x.speedup is not None for _, x in found)
        for place, found in enumerate(by_source.values())
    }
    most = max(beside.values(), default=0)
    if not most:
        return None
    place = max(x for x, count in beside.items() if 2 * count >= most)
    return [*by_source.values()][place][-1][0]
