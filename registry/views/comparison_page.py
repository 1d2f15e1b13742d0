"""Two runs side by side as a page for a terminal: what changed most comes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from .. import figures
from ..store.record import PROVIDER
from .comparison_table import OperatorChange, RowComparison, RunComparison, Standing
from .table import Block, Column, Page, Table, Text, line
from .tables import CASE_WIDTH, MOST_REASONS, narrow

Order: TypeAlias = Literal["change", "case"]
_STYLES: Mapping[Standing, str] = {"faster": "green", "undecided": "", "slower": "red"}
_UNTIMED: Mapping[Standing, str] = {"faster": "better", "undecided": "undecided", "slower": "worse"}
"""The words of what is neither a time nor a rate."""


def comparison_page(comparison: RunComparison, order: Order = "change", only_changed: bool = False) -> Page:
    """The conditions that differ, how each operator stands, the rows that can be compared, and why the others
    cannot.

    Rows are in the `order` of their change, the largest first and what is decided before what is not, or of their
    cases; `only_changed` leaves out what is undecided.
    """
    page: list[Block] = []
    for name, side in (("first ", comparison.first), ("second", comparison.second)):
        commit = (side.commit or "no commit")[:12] + (" + uncommitted changes" if side.dirty else "")
        page.append(line(f"{name} {side.run} · commit {commit} · key {side.key}", style="bold"))
    for x in comparison.differences:
        page.append(line(f"  {x.condition}: {figures.value(x.first)} → {figures.value(x.second)}", style="yellow"))
    compared = comparison.compared
    if compared:
        total = [comparison.overall] if len(comparison.operators) > 1 else []
        timed = all(x.timed for x in compared)
        page += [line(""), _operators([*comparison.operators, *total], timed)]
    asked = shown(comparison, order, only_changed)
    by_unit: dict[tuple[str, str], list[RowComparison]] = {}
    for row in asked:
        by_unit.setdefault((row.metric, row.unit), []).append(row)
    for (metric, unit), found in by_unit.items():
        page += [line(""), _table(metric if len(by_unit) > 1 else "", unit, found)]
    if compared and not asked:
        page += [line(""), line("No row is decided: every interval holds 1.")]
    page += _beside(comparison)
    page += _not_compared(comparison)
    if compared:
        about = "Change: second over first, with its 95 % interval; of 100 unchanged rows about five leave out 0."
        page += [line(""), line(f"{figures.counted(len(compared), 'row')} compared. {about}", style="dim")]
    return page


def shown(comparison: RunComparison, order: Order, only_changed: bool) -> list[RowComparison]:
    """The compared rows that are asked for, in their order."""
    found = [x for x in comparison.compared if x.standing != "undecided" or not only_changed]
    return sorted(found, key=lambda x: (x.standing == "undecided", -x.size)) if order == "change" else found


def _operators(changes: Sequence[OperatorChange], timed: bool) -> Table:
    standings = [x if timed else _UNTIMED[x] for x in _STYLES]
    table = Table(
        (
            Column("operator"),
            *(Column(x, number=True) for x in ("rows", *standings)),
            Column("change (geometric mean)", number=True),
        )
    )
    for x in changes:
        cells = *map(str, (x.rows, x.faster, x.undecided, x.slower)), narrow(figures.change(x.ratio))
        table.add(x.operator, *cells, style="bold" if x.operator == "all" else "")
    return table


def _table(title: str, unit: str, found: Sequence[RowComparison]) -> Table:
    # A narrow terminal drops the verdict, which the interval says too, then the first and the second value.
    table = Table(
        (
            Column("operator"),
            Column("case", folds=CASE_WIDTH),
            Column("implementation"),
            Column("verdict", drop=3),
            Column(f"first {unit}".rstrip(), number=True, drop=2),
            Column(f"second {unit}".rstrip(), number=True, drop=1),
            Column("change", number=True),
            Column("95 % interval", number=True),
        ),
        title,
    )
    for row in found:
        bounds = figures.DASH
        if row.ratio_low is not None and row.ratio_high is not None:
            low, high = (figures.change(x).removesuffix(" %") for x in (row.ratio_low, row.ratio_high))
            bounds = f"[{low}, {high}]"
        table.add(
            row.operator,
            row.case + ("" if row.cache == "cold" else f" ({row.cache})"),
            row.implementation + ("*" if row.notes else ""),
            Text(row.standing if row.timed else _UNTIMED[row.standing], _STYLES[row.standing]),
            figures.number(row.first_value),
            figures.number(row.second_value),
            Text(narrow(figures.change(row.ratio)), _STYLES[row.standing]),
            bounds,
            style="bold" if row.implementation == PROVIDER else "",
        )
    return table


def _beside(comparison: RunComparison) -> Page:
    """The judged metrics beside the primary one: how many rows got worse, and which."""
    if not comparison.beside:
        return []
    page: list[Block] = [line(""), line("Other metrics", style="bold")]
    for x in comparison.beside:
        told = f"  {x.metric.replace('_', ' ')}: {x.worse or 'none'} of {figures.counted(x.rows, 'row')} worse"
        page.append(line(told, style="red" if x.worse else ""))
    worse = [
        f"    {row.operator} {row.case} {row.implementation}: {flag.reason}"
        for row in comparison.compared
        for flag in row.flags
    ]
    page += [line(x) for x in worse[:MOST_REASONS]]
    if len(worse) > MOST_REASONS:
        page.append(line(f"    and {len(worse) - MOST_REASONS} more: kernelmark compare --csv has all of them"))
    return page


def _not_compared(comparison: RunComparison) -> Page:
    reasons: dict[str, int] = {}
    for row in comparison.rows:
        if row.outcome != "compared":
            reason = f"{row.outcome}: {row.reason}" if row.reason else row.outcome
            reasons[reason] = reasons.get(reason, 0) + 1
    notes = dict.fromkeys(f"{x.implementation}: {y}" for x in comparison.compared for y in x.notes)
    page: list[Block] = [line(f"* {x}", style="dim") for x in list(notes)[:MOST_REASONS]]
    if reasons:
        page += [line(""), line("Not compared", style="bold")]
        page += [line(f"  ×{count}  {reason}") for reason, count in list(reasons.items())[:MOST_REASONS]]
    return page
