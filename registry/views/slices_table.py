"""Models that are larger than a GPU, from slices of their layers, as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from .. import figures
from ..analysis.slices import Estimate, Sliced, sliced
from ..store.journal import Journal
from .table import Column, Page, Table, line

HEADINGS = (
    "slices",
    "implementation",
    "of",
    "small",
    "large",
    "a layer",
    "95 %",
    "whole, extrapolated",
    "its 95 %",
)
_TEXTS = ("slices", "implementation", "of")
_DROPS = {"95 %": 1, "its 95 %": 2, "large": 3, "small": 3}
"""What a narrow terminal does without, the highest first."""
ABOUT = (
    "EXTRAPOLATED from slices of a model's first layers, not measured: the smaller slice, and for each further "
    "layer the difference of both over the layers between them. No verdict rests on it."
)


def slices_table(journal: Journal) -> Page:
    """Every implementation of two slices; empty for a run without any."""
    found = sliced(journal)
    if not found:
        return []
    folds = {"slices": 20}
    columns = [Column(x, x not in _TEXTS, folds.get(x, 0), _DROPS.get(x, 0)) for x in HEADINGS]
    table = Table(columns, "larger than a GPU · from slices")
    for x in found:
        for row in cells(x):
            table.add(*row)
    return [table, *(line(x, style="dim") for x in missing(found)), line(ABOUT)]


def missing(found: Iterable[Sliced]) -> list[str]:
    """Why there is no difference of those that have none."""
    return [f"{x.operator} {named(x)} {x.implementation}: {x.missing}" for x in found if x.missing]


def named(x: Sliced) -> str:
    """`B4-S2048-llama-3.1-70b-first4-plain-bf16-program and first8, of 80 layers`."""
    whole = "" if x.of is None else f", of {x.of} layers"
    return f"{x.case} and first{x.layers[1]}{whole}"


def cells(x: Sliced) -> list[tuple[str, ...]]:
    """Texts by metric, in the order of `HEADINGS`; the first row alone says of what it is."""
    rows = []
    for i, metric in enumerate(x.metrics):
        first = (f"{x.operator} {named(x)}", x.implementation) if i == 0 else ("", "")
        values = (figures.quantity(y, metric.unit) for y in (metric.small, metric.large))
        of = "memory" if metric.unit == "B" else "time"
        rows.append((*first, of, *values, *_told(metric.layer, metric.unit), *_told(metric.whole, metric.unit)))
    return rows


def _told(x: Estimate | None, unit: str) -> tuple[str, str]:
    if x is None:
        return figures.DASH, figures.DASH
    value = figures.quantity(x.value, unit)
    if x.low is None or x.high is None:
        return value, figures.DASH
    return value, "–".join(figures.quantity(y, unit) for y in (x.low, x.high))
