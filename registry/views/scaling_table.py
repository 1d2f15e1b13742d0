"""Efficiency on several GPUs beside the time of one, as a table for a terminal."""

from __future__ import annotations

from collections.abc import Collection

from .. import figures
from ..analysis.rows import Row
from ..analysis.scaling import Scaled, efficiencies, strong_besides
from .table import Column, Table

HEADINGS = ("case", "implementation", "GPUs", "scaling", "time ms", "one GPU ms", "by", "efficiency")


_TEXTS = ("case", "implementation", "scaling", "by")


def scaling_table(rows: Collection[Row]) -> Table | None:
    """All cases on several GPUs that the run has on one as well; None where there is none."""
    found = (*efficiencies(rows), *strong_besides(rows))
    if not found:
        return None
    table = Table([Column(x, number=x not in _TEXTS, folds=20 if x == "case" else 0) for x in HEADINGS], "scaling")
    for x in sorted(found, key=lambda x: (x.row.operator, x.world, x.row.case, x.value)):
        table.add(*cells(x))
    return table


def cells(x: Scaled) -> tuple[str, ...]:
    """A row's texts, in the order of `HEADINGS`."""
    return (
        f"{x.row.operator} {x.row.case}",
        x.row.implementation,
        str(x.world),
        x.kind,
        f"{x.value:.4g}",
        f"{x.alone:.4g}",
        x.one.implementation,
        figures.percent(x.efficiency, 1),
    )
