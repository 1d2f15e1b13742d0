"""Ours against each baseline of a case, where a row says only how it stands to the fastest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..store.journal import Journal
from ..store.metric import summarized
from ..store.record import PROVIDER, Key, baseline
from .rows import Row, speedup


class Speedup(NamedTuple):
    """How many times better ours is, with the 95 % interval over paired replicates where there is one."""

    value: float
    low: float | None
    high: float | None


def standing_alone(journal: Journal, found: Iterable[Row]) -> tuple[Row, ...]:
    """The rows but those of systems that are there for an exchange of a part, which are read beside their base."""
    exchanged = journal.header.request.exchanged
    return tuple(x for x in found if (x.operator, x.case, x.implementation) not in exchanged)


def peers(journal: Journal, found: Iterable[Row]) -> Mapping[Key, Mapping[str, Speedup]]:
    """By row of ours and implementation, for baselines that have a value of the same case and cache state."""
    timed = {x.identity: x for x in standing_alone(journal, found) if x.value() is not None}
    values = values_by_replicate(journal, timed.values())
    rivals: dict[tuple[str, str, str], list[Row]] = {}
    for row in timed.values():
        if baseline(row.provider, row.implementation):
            rivals.setdefault((row.operator, row.case, row.cache), []).append(row)
    out: dict[Key, dict[str, Speedup]] = {}
    for key, row in timed.items():
        better = journal.metric(row.primary).better
        if row.provider != PROVIDER or better == "neither":
            continue
        for rival in rivals.get((row.operator, row.case, row.cache), ()):
            ratio, low, high = speedup(values[rival.identity], values[key], better)
            if ratio is not None:
                out.setdefault(key, {})[rival.implementation] = Speedup(ratio, low, high)
    return out


def values_by_replicate(journal: Journal, timed: Iterable[Row]) -> dict[Key, dict[int, float]]:
    """By row, its processes' values of the primary metric."""
    wanted = {x.identity: x.primary for x in timed}
    values: dict[Key, dict[int, float]] = {}
    for record in journal.records:
        primary = wanted.get(record.identity)
        if primary is not None and record.measurement is not None and primary in record.measurement.samples:
            value = summarized(record.measurement.samples[primary], journal.metric(primary).summary)
            values.setdefault(record.identity, {})[record.replicate] = value
    return values
