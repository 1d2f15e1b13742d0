"""An operator's times over commits, with the change points in them. Drawn and told, never a gate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from ..analysis.statistics import geometric_mean
from ..store.index import Entry
from ..store.journal import read_header
from ..store.metric import LATENCY, Better
from ..store.processes import Processes
from ..store.record import PROVIDER, Header, Key
from .changepoints import ChangePoint, Dated, change_points, of_the_machine
from .earlier import Mean, run_means
from .pairing import differing

RUNS = 200
"""Newest runs that are looked at: each that was not met before is read whole, once."""


class Point(msgspec.Struct, frozen=True):
    """A commit's value: the geometric mean over its runs of their process means, in ms or its series' unit."""

    commit: str
    created: str
    """When it was first measured, UTC."""
    ms: float
    runs: int


class Series(msgspec.Struct, frozen=True):
    """One row over commits, oldest first."""

    key: Key
    points: tuple[Point, ...]
    changes: tuple[ChangePoint, ...]
    provider: str = ""
    unit: str = LATENCY.unit
    better: Better = LATENCY.better


class LeftOut(msgspec.Struct, frozen=True):
    """Runs of one key that are not compared with the newest one, and the conditions in which they differ from it,
    with both values, theirs first.
    """

    comparability_key: str
    runs: int
    differing: tuple[str, ...]


class Course(msgspec.Struct, frozen=True):
    """Several rows over commits as one: the geometric mean of their times over their last ones, oldest first."""

    commits: tuple[str, ...]
    relative: tuple[float, ...]

    @property
    def change(self) -> float | None:
        """The last over the first; None of a single commit, which has no earlier one to change from."""
        return self.relative[-1] / self.relative[0] if len(self.commits) > 1 else None


@dataclass(frozen=True)
class OperatorHistory:
    """All rows of one operator under one comparability key, over `commits`, oldest first; `left_out` is what was
    measured of it under other keys, the newest first.
    """

    operator: str
    comparability_key: str
    series: tuple[Series, ...]
    left_out: tuple[LeftOut, ...] = ()
    commits: tuple[str, ...] = ()

    @property
    def others(self) -> int:
        """How many runs are left out."""
        return sum(x.runs for x in self.left_out)

    @property
    def changed(self) -> tuple[Series, ...]:
        """The rows with a change point, the one that changed last first."""
        found = [x for x in self.series if x.changes]
        return tuple(sorted(found, key=lambda x: x.changes[-1].index - len(x.points), reverse=True))

    def course(self) -> Course:
        """All rows together; a commit counts by the rows that it has."""
        logs: dict[str, list[float]] = {}
        for x in self.series:
            for point in x.points:
                logs.setdefault(point.commit, []).append(math.log(point.ms / x.points[-1].ms))
        ordered = [x for x in self.commits if x in logs]
        return Course(tuple(ordered), tuple(math.exp(statistics.fmean(logs[x])) for x in ordered))

    def to_builtins(self) -> dict[str, Any]:
        """For machines."""
        return {
            "schema_version": 1,
            "operator": self.operator,
            "comparability_key": self.comparability_key,
            "runs_under_other_keys": self.others,
            "left_out": msgspec.to_builtins(self.left_out),
            "series": [
                {
                    **msgspec.to_builtins(x.key),
                    "unit": x.unit,
                    "better": x.better,
                    "points": [_told(y, x.unit) for y in x.points],
                    "change_points": [
                        {"commit": x.points[y.index].commit, **msgspec.to_builtins(y)} for y in x.changes
                    ],
                }
                for x in self.series
            ],
        }


def _told(point: Point, unit: str) -> dict[str, Any]:
    """For machines: what is no time is no `ms`."""
    out: dict[str, Any] = msgspec.to_builtins(point)
    return {("value" if name == "ms" and unit != "ms" else name): value for name, value in out.items()}


def measured_in(history: OperatorHistory, newest: Path) -> OperatorHistory:
    """The same with what each row's primary metric is measured in, as its newest run's header says it."""
    header = _header(newest)
    if header is None:
        return history
    known = {x.name: x for x in (LATENCY, *header.metrics)}
    mine = [x for x in header.request.cases if x.operator == history.operator and x.primary in known]
    by_case = {x.name: known[x.primary] for x in mine}
    usual = next(iter(by_case.values()), LATENCY)  # of a case that the newest run is without
    metrics = [by_case.get(x.key.case, usual) for x in history.series]
    series = zip(history.series, metrics, strict=True)
    told = tuple(msgspec.structs.replace(x, unit=y.unit, better=y.better) for x, y in series)
    return replace(history, series=told)


Runs: TypeAlias = list[tuple[Entry, dict[Key, Mean]]]


def runs_by_operator(
    stored: Iterable[tuple[Entry, Mapping[Key, Processes]]],
) -> dict[str, tuple[Runs, list[Entry]]]:
    """By operator the runs that know its rows, of the key measured last, oldest first; and those of others, the
    newest first.

    `stored` are the index's runs with their rows, newest first.
    """
    found: dict[str, Runs] = {}
    for entry, rows in stored:
        by_operator: dict[str, dict[Key, Mean]] = {}
        for key, mean in run_means(rows).items():
            by_operator.setdefault(key.operator, {})[key] = mean
        for operator, mine in by_operator.items():
            found.setdefault(operator, []).append((entry, mine))
    out = {}
    for operator, runs in sorted(found.items()):
        alike = [x for x in runs if x[0].key == runs[0][0].key]
        out[operator] = alike[::-1], [x for x, _ in runs if x.key != runs[0][0].key]
    return out


def left_out(newest: Entry, others: Iterable[Entry]) -> tuple[LeftOut, ...]:
    """What the newest run's conditions part from it, by key. Reads a header of each."""
    by_key: dict[str, list[Entry]] = {}
    for entry in others:
        by_key.setdefault(entry.key, []).append(entry)
    now = _header(newest.path) if by_key else None
    out = []
    for key, entries in by_key.items():
        then = _header(entries[0].path)
        out.append(LeftOut(key, len(entries), differing(then, now) if then and now else ()))
    return tuple(out)


@lru_cache(maxsize=256)
def _header(path: Path) -> Header | None:
    """Once for all operators: a header never changes."""
    return read_header(path)


def over_commits(
    runs: Runs, operator: str, times: Mapping[str, int], others: Iterable[Entry] = ()
) -> OperatorHistory:
    """Puts runs, oldest first, together by commit, in the order of `times`, seconds since 1970.

    A commit that has none stands by when it was first measured. Of a case that was defined anew only the
    last definition is kept: the others computed something else. `others` are runs that cannot be put beside them.
    """
    first: dict[str, str] = {}
    for entry, _ in runs:
        first.setdefault(str(entry.commit), entry.created)
    by_time = sorted(first, key=lambda x: (commit_time(times.get(x), first[x]), first[x]))
    keys = sorted({key for _, rows in runs for key in rows})
    series = []
    providers = {key: mean.provider for _, rows in runs for key, mean in rows.items()}
    for key in keys:
        measured = [(str(entry.commit), rows[key]) for entry, rows in runs if key in rows]
        last = measured[-1][1].definition
        values: dict[str, list[float]] = {}
        for commit, mean in measured:
            if mean.definition == last:
                values.setdefault(commit, []).append(mean.ms)
        points = tuple(
            Point(commit, first[commit], ms, len(values[commit]))
            for commit in by_time
            if (ms := geometric_mean(values.get(commit, ()))) is not None
        )
        changes = change_points([x.ms for x in points], np.random.default_rng(0))
        series.append(Series(key, points, changes, providers[key]))
    dated = [
        Dated(tuple(y.created[:10] for y in x.points), x.changes, providers[x.key] != PROVIDER) for x in series
    ]
    marked = zip(series, of_the_machine(dated), strict=True)
    series = [msgspec.structs.replace(x, changes=changes) for x, changes in marked]
    apart = left_out(runs[-1][0], others) if runs else ()
    return OperatorHistory(operator, runs[0][0].key if runs else "", tuple(series), apart, tuple(by_time))


def commit_time(known: int | None, created: str) -> float:
    """When a commit was made, in seconds since 1970; where that is not known, when it was measured, ISO 8601."""
    if known is not None:
        return known
    try:
        return datetime.fromisoformat(created).timestamp()
    except ValueError:
        return 0.0
