"""Efficiency on several GPUs beside the time of one, as a table for a terminal."""

from __future__ import annotations

from collections.abc import Collection

from .. import figures
from ..analysis.rows import Row
from ..analysis.scaling import Scaled, by_each, each_gpu, efficiencies, strong_besides
from ..store.journal import Journal
from ..store.record import GPUS
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
        x.one.implementation + (f", slowest of {x.one.axes[GPUS]} GPUs" if by_each(x.one) else ""),
        figures.percent(x.efficiency, 1),
    )


def each_table(journal: Journal) -> Table | None:
    """The one-GPU times that were taken on each of several GPUs, the slowest named; None where there is none."""
    found = each_gpu(journal)
    if not found:
        return None
    headings = ("case", "implementation", "slowest", "each GPU's ms, by rank")
    table = Table([Column(x, number=False, folds=20 if x == "case" else 0) for x in headings], "one GPU")
    for key, times in sorted(found.items()):
        slowest = f"rank {times.index(max(times))} of {len(times)}"
        table.add(f"{key.operator} {key.case}", key.implementation, slowest, ", ".join(f"{x:.4g}" for x in times))
    return table
