"""An operator's times over commits, with the change points in them. Drawn and told, never a gate."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import numpy as np

from ..detection.changepoints import ChangePoint, Dated, change_points, of_the_machine
from ..store.index import Entry, Index, Mean
from ..store.record import PROVIDER, Key

RUNS = 200
"""Newest runs that are looked at: each that was not met before is read whole, once."""


class Point(msgspec.Struct, frozen=True):
    """A commit's time: the geometric mean over its runs of their process means, in ms."""

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


@dataclass(frozen=True)
class OperatorHistory:
    """All rows of one operator under one comparability key; `others` counts runs under other keys."""

    operator: str
    comparability_key: str
    series: tuple[Series, ...]
    others: int

    def to_builtins(self) -> dict[str, Any]:
        """For machines."""
        return {
            "schema_version": 1,
            "operator": self.operator,
            "comparability_key": self.comparability_key,
            "runs_under_other_keys": self.others,
            "series": [
                {
                    **msgspec.to_builtins(x.key),
                    "points": msgspec.to_builtins(x.points),
                    "change_points": [
                        {"commit": x.points[y.index].commit, **msgspec.to_builtins(y)} for y in x.changes
                    ],
                }
                for x in self.series
            ],
        }


def runs_of(
    index: Index, operator: str, case: str | None = None, device: str | None = None
) -> tuple[list[tuple[Entry, dict[Key, Mean]]], int]:
    """The runs that know the operator's rows, of the key measured last, oldest first; and how many of others."""
    found = []
    for entry in index.runs(device=device, limit=RUNS):
        means = {
            key: mean
            for key, mean in index.means(entry).items()
            if key.operator == operator and case in (None, key.case)
        }
        if means:
            found.append((entry, means))
    mine = [x for x in found if x[0].key == found[0][0].key]
    return mine[::-1], len(found) - len(mine)


def over_commits(
    runs: list[tuple[Entry, dict[Key, Mean]]], operator: str, others: int, times: Mapping[str, int]
) -> OperatorHistory:
    """Puts runs, oldest first, together by commit, in the order of `times`, seconds since 1970.

    A commit that has none stands by when it was first measured. Of a case that was defined anew only the
    last definition is kept: the others computed something else.
    """
    first: dict[str, str] = {}
    for entry, _ in runs:
        first.setdefault(str(entry.commit), entry.created)
    by_time = sorted(first, key=lambda x: (_seconds(times.get(x), first[x]), first[x]))
    keys = sorted({key for _, means in runs for key in means})
    series = []
    providers = {key: mean.provider for _, means in runs for key, mean in means.items()}
    for key in keys:
        measured = [(str(entry.commit), means[key]) for entry, means in runs if key in means]
        last = measured[-1][1].definition
        values: dict[str, list[float]] = {}
        for commit, mean in measured:
            if mean.definition == last:
                values.setdefault(commit, []).append(mean.ms)
        points = tuple(
            Point(commit, first[commit], statistics.geometric_mean(values[commit]), len(values[commit]))
            for commit in by_time
            if commit in values
        )
        changes = change_points([x.ms for x in points], np.random.default_rng(0))
        series.append(Series(key, points, changes))
    dated = [
        Dated(tuple(y.created[:10] for y in x.points), x.changes, providers[x.key] != PROVIDER) for x in series
    ]
    marked = zip(series, of_the_machine(dated), strict=True)
    series = [msgspec.structs.replace(x, changes=changes) for x, changes in marked]
    return OperatorHistory(operator, runs[0][0].key if runs else "", tuple(series), others)


def _seconds(known: int | None, created: str) -> float:
    if known is not None:
        return known
    try:
        return datetime.fromisoformat(created).timestamp()
    except ValueError:
        return 0.0
