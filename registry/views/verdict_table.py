"""A finished comparison of two commits as a page for a terminal: worst first."""

from __future__ import annotations

from ..detection.comparison_report import ComparisonReport
from ..detection.descriptive import Descriptive
from ..detection.verdict import tally
from ..detection.verdict_text import counted, counts, foldable, kind, numbers, unit, why, worst_detectable
from ..store.record import Key
from .table import Column, Page, Table, Text, line

_STYLES: dict[str, str] = {
    "regression": "bold red",
    "incorrect": "bold red",
    "missing": "red",
    "not comparable": "magenta",
    "warning": "yellow",
    "inconclusive": "cyan",
    "improvement": "green",
    "below the limit": "blue",
}


def verdict_table(report: ComparisonReport, everything: bool = False) -> Page:
    """Unchanged rows are folded into the last line unless `everything` is asked for."""
    shown = [v for v in report.verdicts if everything or not foldable(v)]
    folded = [] if everything else [v for v in report.verdicts if foldable(v)]
    told = f"{report.headline}: {counts(report)}."
    if folded:
        told += f" Folded: {counted(tally(folded).items())}; detectable up to {worst_detectable(folded)}."
    in_unit = unit(shown)
    names = [x.replace("_", " ") for x in Descriptive.__struct_fields__[:4]] if report.statistics else []
    # A narrow terminal drops what decides nothing, then "detectable", then both values.
    table = Table(
        (
            Column("verdict"),
            Column("row", folds=16),
            Column(f"base{in_unit}", number=True, drop=2),
            Column(f"current{in_unit}", number=True, drop=1),
            Column("change (95 %)", number=True),
            Column("detectable", number=True, drop=3),
            *(Column(f"({x})", number=True, drop=4) for x in [*names, "outliers"] if names),
            Column("why", folds=12),
        ),
        f"{report.base} → {report.current}",
    )
    for verdict in shown:
        cells = (str(verdict.key), *numbers(verdict), *_statistics(report, verdict.key), why(verdict))
        table.add(Text(kind(verdict), _STYLES.get(verdict.kind, "")), *cells)
    return [table, line(told)]


def _statistics(report: ComparisonReport, key: Key) -> list[str]:
    if not report.statistics:
        return []
    row = report.statistics.get(key)
    if row is None:
        return ["–"] * 5
    values = (row.welch_t, row.welch_p, row.cohens_d, row.mann_whitney_p)
    return [
        *("–" if x is None else f"{x:.2g}" for x in values),
        f"{row.outliers_base} / {row.outliers_current}",
    ]
