"""Rows over their runs: where their keys break and what changed, change points, how far reruns lie apart."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from ..analysis.statistics import t_quantile
from ..detection.changepoints import SEGMENT
from ..detection.earlier import Mean
from ..detection.history import commit_time, over_commits
from ..detection.noise import Estimate, empirical_prior, shrink
from ..store.index import Entry
from ..store.record import VERSION, Key, versions_count
from .facts import Fact, Run

COMMITS = 60
"""Newest commits of a key that are searched for change points: the search grows with their square."""

Measured = tuple[Run, Fact]


class Change(msgspec.Struct, frozen=True, array_like=True):
    """A change point: `change` is new over old level, minus 1, from the run's commit on. `worse` by the metric's
    direction; `machine` says why it is not the code's, None where it need not be.
    """

    run: str
    change: float
    p: float
    worse: bool
    machine: str | None = None


@dataclass(frozen=True)
class Band:
    """Where 95 % of reruns of unchanged code lie about a level, from one run to another."""

    first: str
    last: str
    low: float
    high: float


@dataclass(frozen=True)
class Break:
    """From this run on the row is not comparable with what it was before, because of what is named."""

    run: str
    what: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """One row on one device, over its runs, oldest first."""

    device: str
    key: Key
    points: tuple[Measured, ...]
    breaks: tuple[Break, ...] = ()
    changes: tuple[Change, ...] = ()
    bands: tuple[Band, ...] = ()

    @property
    def ours(self) -> bool:
        """Whether it is our implementation's."""
        return self.points[-1][1].ours

    @property
    def watched(self) -> bool:
        """Whether it has the commits under one key that a change point takes."""
        known = {(fact.key, run.code) for run, fact in self.points if run.code == run.commit}
        return max(Counter(key for key, _ in known).values(), default=0) >= 2 * SEGMENT


class Memory(Protocol):
    """What remembers answers: the ledger."""

    def remembered(self, what: str, inputs: str) -> bytes | None:
        """An answer from the same inputs."""

    def remember(self, answers: Iterable[tuple[str, str, bytes]]) -> None:
        """Keeps answers."""


def ordered(runs: Iterable[Run], times: Mapping[str, int]) -> list[Run]:
    """Runs by when their commits were made, then by when they were; `times` in seconds since 1970."""

    def when(run: Run) -> tuple[float, str, str]:
        known = times.get(run.commit or "") if not run.dirty else None
        return commit_time(known, run.created), run.created, run.name

    return sorted(runs, key=when)


def timelines(
    operator: str, measured: Sequence[Measured], times: Mapping[str, int], memory: Memory
) -> tuple[Line, ...]:
    """The lines of an operator's rows that have a value, from facts in the order of `ordered`."""
    found: dict[tuple[str, Key], list[Measured]] = {}
    for run, fact in measured:
        if fact.number is not None and run.arm is None:  # an attribution's arm holds configurations fixed
            found.setdefault((run.device, fact.identity), []).append((run, fact))
    lines = [Line(device, key, tuple(points), _breaks(points)) for (device, key), points in found.items()]
    changes = _all_changes(operator, measured, times, memory)
    lines = [replace(x, changes=_of_line(x, changes)) for x in lines]
    bands = _bands(lines)
    return tuple(replace(x, bands=y) for x, y in zip(lines, bands, strict=True))


def _breaks(points: Sequence[Measured]) -> tuple[Break, ...]:
    """Where a key is met for the first time, but for the first point."""
    seen = {points[0][1].key}
    out = []
    for before, after in pairwise(points):
        if after[1].key not in seen:
            seen.add(after[1].key)
            out.append(Break(after[0].name, what_changed(before, after)))
    return tuple(out)


def what_changed(before: Measured, after: Measured) -> tuple[str, ...]:
    """Why two facts of a row are not comparable: each condition with both values."""
    told = list(conditions_changed(before[0], after[0]))
    if before[1].spec != after[1].spec:
        told.append(f"case definition: {before[1].spec} → {after[1].spec}")
    if before[1].version != after[1].version and versions_count(after[0].conditions):
        told.append(f"{VERSION}: {before[1].version or 'unknown'} → {after[1].version or 'unknown'}")
    if before[1].timer != after[1].timer:
        told.append(f"timer: {before[1].timer} → {after[1].timer}")
    return tuple(told) or ("comparability key",)


def conditions_changed(before: Run, after: Run) -> tuple[str, ...]:
    """The conditions in which two runs differ, with both values."""
    names = sorted(before.conditions.keys() | after.conditions.keys())
    return tuple(
        f"{x}: {_value(before, x)} → {_value(after, x)}" for x in names if _value(before, x) != _value(after, x)
    )


def _value(run: Run, name: str) -> object:
    return run.conditions.get(name, "not recorded")


def _all_changes(
    operator: str, measured: Sequence[Measured], times: Mapping[str, int], memory: Memory
) -> dict[tuple[str, str, Key], tuple[Change, ...]]:
    """Change points by device, comparability key of the run, and row; those searched before are remembered."""
    groups: dict[tuple[str, str], dict[str, list[Measured]]] = {}
    for run, fact in measured:
        if fact.number is not None and run.arm is None and run.code == run.commit:
            groups.setdefault((run.device, run.key), {}).setdefault(run.name, []).append((run, fact))
    out = {}
    answers = []
    for (device, key), by_run in groups.items():
        recent = list(dict.fromkeys(x[0][0].code for x in reversed(by_run.values())))[:COMMITS]
        runs = [x for x in by_run.values() if x[0][0].code in set(recent)]
        what, inputs = "\n".join(("changes", operator, device, key)), _inputs(runs, times)
        answer = memory.remembered(what, inputs)
        if answer is None:
            found = [(x, y) for x, y in _search(operator, runs, times).items() if y]
            answer = msgspec.msgpack.encode(found)
            answers.append((what, inputs, answer))
        for row, changes in msgspec.msgpack.decode(answer, type=list[tuple[Key, tuple[Change, ...]]]):
            out[device, key, row] = changes
    memory.remember(answers)
    return out


def _inputs(runs: Sequence[Sequence[Measured]], times: Mapping[str, int]) -> str:
    digest = hashlib.sha256()
    for of_run in runs:
        run = of_run[0][0]
        digest.update(repr((run.name, run.code, run.created, times.get(run.code))).encode(errors="replace"))
        for _, x in of_run:
            digest.update(repr((x.identity, x.number, x.key, x.provider)).encode(errors="replace"))
    return digest.hexdigest()


def _search(
    operator: str, runs: Sequence[Sequence[Measured]], times: Mapping[str, int]
) -> dict[Key, tuple[Change, ...]]:
    """As `kernelmark history` finds them: over commits, each the geometric mean of its runs."""
    given = [
        (_entry(x[0][0]), {fact.identity: _mean(run, fact) for run, fact in x if _positive(fact)}) for x in runs
    ]
    first: dict[tuple[str, Key], str] = {}  # a commit's first run may be without the row
    for x in runs:
        for run, fact in x:
            if _positive(fact):
                first.setdefault((run.code, fact.identity), run.name)
    better = {fact.identity: fact.better for x in runs for _, fact in x}
    return {
        x.key: tuple(
            Change(
                first[x.points[y.index].commit, x.key],
                y.change,
                y.p,
                (y.change > 0) == (better[x.key] != "higher"),
                y.machine,
            )
            for y in x.changes
        )
        for x in over_commits(given, operator, times).series
    }


def _entry(run: Run) -> Entry:
    return Entry(
        run.name, Path(), run.commit, False, run.key, run.kind, run.created, run.plan, run.replicates, 0, 0
    )


def _mean(run: Run, fact: Fact) -> Mean:
    number = fact.number
    definition = f"{fact.spec}/{fact.timer}" + (f"/{fact.version}" if versions_count(run.conditions) else "")
    return Mean(number[0] if number else math.nan, fact.processes, fact.provider, definition)


def _positive(fact: Fact) -> bool:
    return fact.number is not None and 0 < fact.number[0] < math.inf


def _of_line(line: Line, changes: Mapping[tuple[str, str, Key], tuple[Change, ...]]) -> tuple[Change, ...]:
    """The line's change points, oldest first."""
    keys = dict.fromkeys(run.key for run, _ in line.points)
    names = {run.name for run, _ in line.points}
    return tuple(y for x in keys for y in changes.get((line.device, x, line.key), ()) if y.run in names)


def _bands(lines: Sequence[Line]) -> list[tuple[Band, ...]]:
    """Of reruns of the same code, A/A. Another library's code is the same under one version, whatever our commit.

    Each row's spread leans on the other rows' (Smyth 2004), as in comparisons: two reruns alone say little.
    """
    places: list[tuple[int, str]] = []
    variances, freedoms, counts = [], [], []
    for place, line in enumerate(lines):
        for key in dict.fromkeys(fact.key for _, fact in line.points):
            variance, freedom, count = _pooled([x for x in line.points if x[1].key == key and _positive(x[1])])
            places.append((place, key))
            variances.append(variance)
            freedoms.append(freedom)
            counts.append(count)
    out: list[list[Band]] = [[] for _ in lines]
    if places:
        df = np.asarray(freedoms, dtype=np.float64)
        floored = np.where(df > 0, np.maximum(variances, np.finfo(float).tiny), np.nan)
        estimate = Estimate(np.zeros(len(df)), floored, df, np.asarray(counts, dtype=np.float64))
        posterior, certain = shrink(estimate, empirical_prior(estimate))
        for (place, key), own, variance, freedom in zip(places, freedoms, posterior, certain, strict=True):
            if own > 0:
                half = t_quantile(float(freedom)) * math.sqrt(float(variance))
                out[place] += _levels(lines[place], key, half)
    return [tuple(x) for x in out]


def _pooled(points: Sequence[Measured]) -> tuple[float, float, int]:
    """The variance of logarithms within groups of unchanged code, its degrees of freedom, and all that count."""
    groups: dict[str, list[float]] = {}
    for run, fact in points:
        code = run.code if fact.ours else str(fact.version)
        groups.setdefault(code, []).append(math.log(fact.number[0] if fact.number else math.nan))
    means = {code: math.fsum(x) / len(x) for code, x in groups.items()}
    squares = math.fsum((x - means[code]) ** 2 for code, found in groups.items() for x in found)
    freedom = len(points) - len(groups)
    return (squares / freedom if freedom else 0.0), float(freedom), len(points)


def _levels(line: Line, key: str, half: float) -> list[Band]:
    """A band about each level between the line's change points."""
    cuts = {x.run for x in line.changes}
    parts: list[list[Measured]] = [[]]
    for point in line.points:
        if point[1].key == key and _positive(point[1]):
            if point[0].name in cuts and parts[-1]:
                parts.append([])
            parts[-1].append(point)
    out = []
    for part in parts:
        if part:
            middle = statistics.median(math.log(x.number[0]) for _, x in part if x.number)
            if middle + half < 700:  # what a float holds
                low, high = math.exp(middle - half), math.exp(middle + half)
                out.append(Band(part[0][0].name, part[-1][0].name, low, high))
    return out
