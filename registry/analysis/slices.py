"""A model that is larger than a GPU, from slices of its first layers: what a further layer costs, and what follows
of the whole model. Pure.

A slice has all that comes before and after the layers, so two of them differ in layers alone. The difference a
layer, (t₈ - t₄) / 4, is of what was measured. The whole, t₄ + (L - 4) × that difference, was never computed by
anybody: it is an extrapolation, has no row, and nothing is judged by it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean

import msgspec

from ..store.journal import Journal
from ..store.metric import PEAKS
from ..store.processes import by_process, by_row
from ..store.record import Case, Key, Record, ended
from .statistics import mean_interval

SLICE = "slice"
"""The option of a case that says of which layers it is."""
_FIRST = re.compile(r"first([1-9]\d*)")


class Estimate(msgspec.Struct, frozen=True):
    """A mean over processes with its 95 % interval; without one where a single process has both slices."""

    value: float
    low: float | None = None
    high: float | None = None


class Extrapolated(msgspec.Struct, frozen=True):
    """One metric of two slices."""

    metric: str
    unit: str
    small: float
    large: float
    """As they were measured, means over the processes that have both."""
    layer: Estimate
    """The difference a layer."""
    whole: Estimate | None
    """EXTRAPOLATED to all layers; None where the run does not say how many the model has."""


class Sliced(msgspec.Struct, frozen=True):
    """One implementation of two slices of a model."""

    operator: str
    case: str
    """The smaller slice's."""
    other: str
    implementation: str
    layers: tuple[int, int]
    of: int | None
    """The whole model's layers."""
    metrics: tuple[Extrapolated, ...] = ()
    """The case's time, then its peak memory where it was measured."""
    processes: int = 0
    missing: str = ""
    """Why there is no difference."""


def sliced(journal: Journal) -> tuple[Sliced, ...]:
    """Every implementation of every two slices of a run that differ in layers alone: of several the smallest, and
    the next larger one.
    """
    found = by_row(journal.records)
    groups: dict[object, dict[int, Case]] = {}
    for mine in found.values():
        case = mine[0].case
        if (layers := layers_of(case)) is not None:
            groups.setdefault(case.but_for(SLICE), {})[layers] = case
    out = []
    for cases in groups.values():
        if len(cases) > 1:
            small, large = sorted(cases)[:2]
            one, other = cases[small], cases[large]
            named = (x for x in found if (x.operator, x.case) in {(one.operator, y.name) for y in (one, other)})
            rows = dict.fromkeys((x.implementation, x.cache) for x in named)
            for name, cache in rows:
                keys = [Key(x.operator, x.name, name, cache) for x in (one, other)]
                of = journal.header.request.layers.get(one.full_name)
                made = Sliced(one.operator, one.name, other.name, name, (small, large), of)
                out.append(_filled(journal, made, *(found.get(x, []) for x in keys)))
    return tuple(out)


def layers_of(case: Case) -> int | None:
    """How many first layers a case is of; None of a whole model, or of none."""
    matched = _FIRST.fullmatch(str(case.options.get(SLICE, "")))
    return int(matched[1]) if matched else None


def _filled(journal: Journal, x: Sliced, small: Sequence[Record], large: Sequence[Record]) -> Sliced:
    for name, records in ((x.case, small), (x.other, large)):
        status, reason = ended(records) if records else ("unavailable", "not measured")
        if status != "ok":
            return msgspec.structs.replace(x, missing=f"{name}: {status.replace('_', ' ')}: {reason}")
    metrics = []
    processes = 0
    for metric in (small[0].case.primary, *PEAKS):
        known = journal.metric(metric)
        one, other = (by_process(y, known) for y in (small, large))
        both = sorted(one.keys() & other.keys())
        # Rates do not add up over layers.
        if both and known.unit in ("ms", "s", "B"):
            pairs = [(one[y], other[y]) for y in both]
            metrics.append(_extrapolated(metric, known.unit, pairs, x))
            processes = max(processes, len(both))
    if not metrics:
        return msgspec.structs.replace(x, missing="no process has a time of both slices")
    return msgspec.structs.replace(x, metrics=tuple(metrics), processes=processes)


def _extrapolated(metric: str, unit: str, pairs: Sequence[tuple[float, float]], x: Sliced) -> Extrapolated:
    small, large = x.layers
    each = [(b - a) / (large - small) for a, b in pairs]
    whole = None
    if x.of is not None:
        more = x.of - small
        whole = _estimate([a + more * layer for (a, _), layer in zip(pairs, each, strict=True)])
    return Extrapolated(
        metric, unit, fmean(a for a, _ in pairs), fmean(b for _, b in pairs), _estimate(each), whole
    )


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(fmean(values), *(mean_interval(values) or (None, None)))
