"""One case on several devices side by side: what each device's newest run says of it. Empty cells were not run.

Devices differ in their conditions by nature, so nothing here is a comparison of commits; ratios stay within a
device's own run, where all implementations had the same inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from .. import figures
from ..analysis.rows import rows
from ..analysis.selection import EVERYTHING, Selection
from ..analysis.statistics import geometric_mean
from ..errors import InputError
from ..store.journal import Journal
from ..store.record import EAGER, PROVIDER, Cache, Status
from .grouping import CaseRows, cases
from .summary import device_name
from .table import Column, Table, Text

NOT_RUN = "not run"


class DeviceCell(msgspec.Struct, frozen=True):
    """A case on a device: ours, what eager PyTorch and the best baseline of the same run took, and the ratios.

    `value` is the primary metric in `unit`; None with a status and a reason where ours has none.
    """

    run: str
    commit: str | None
    status: Status
    reason: str | None
    unit: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    eager: float | None = None
    best: str | None = None
    best_value: float | None = None
    over_eager: float | None = None
    over_best: float | None = None
    fraction_of_limit: float | None = None


class DeviceRow(msgspec.Struct, frozen=True):
    """A case in one cache state; `cells` by device, a device missing where it was not run."""

    operator: str
    case: str
    cache: Cache
    cells: dict[str, DeviceCell]


class DeviceComparison(msgspec.Struct, frozen=True):
    """All cases that any device has, in the order met."""

    devices: tuple[str, ...]
    rows: tuple[DeviceRow, ...]

    def to_builtins(self) -> dict[str, Any]:
        """As `kernelmark compare --by device --json` prints it: every row has a cell for each device, null where
        it was not run.
        """
        out = [
            msgspec.to_builtins(x) | {"cells": {y: msgspec.to_builtins(x.cells.get(y)) for y in self.devices}}
            for x in self.rows
        ]
        return {"schema_version": 1, "devices": list(self.devices), "rows": out}

    def flat(self) -> list[dict[str, Any]]:
        """A row a case and device, for CSV."""
        return [
            {
                "operator": x.operator,
                "case": x.case,
                "cache": x.cache,
                "device": device,
                **msgspec.to_builtins(cell),
            }
            for x in self.rows
            for device, cell in x.cells.items()
        ]


def by_device(journals: Iterable[Journal], selection: Selection = EVERYTHING) -> DeviceComparison:
    """Of each device and case the newest run that has it. Journals are read one at a time, in any order.

    Raises `InputError` where no run has a row of those that are asked for, saying what the last one lacks, and
    where none of them is ours.
    """
    lacking: InputError | None = None
    found: dict[tuple[str, str, Cache], dict[str, tuple[tuple[str, str], DeviceCell]]] = {}
    devices: set[str] = set()
    for journal in journals:
        device = device_name(journal.header)
        devices.add(device)
        made = journal.header.created, journal.header.run
        try:
            asked = {x.identity for x in selection.rows(rows(journal))}
        except InputError as error:  # another run may have them
            lacking = error
            continue
        for case in cases(rows(journal)):
            if case.ours is None or case.ours.identity not in asked:
                continue
            if (cell := _cell(case, journal)) is not None:
                cells = found.setdefault((case.operator, case.name, case.first.cache), {})
                cells[device] = max(cells.get(device, (made, cell)), (made, cell), key=lambda x: x[0])
    if not found:
        raise lacking or InputError(
            f"no row of {PROVIDER} is among those asked for, and a device's column is about those: choose by "
            "operator, case, dtype, pass or axis; the best baseline of each case stands beside ours."
        )
    named = {key: {x: cell for x, (_, cell) in sorted(cells.items())} for key, cells in found.items()}
    return DeviceComparison(tuple(sorted(devices)), tuple(DeviceRow(*key, cells) for key, cells in named.items()))


def _cell(case: CaseRows, journal: Journal) -> DeviceCell | None:
    """None where the run has none of ours: a device's column is about ours."""
    ours = case.ours
    if ours is None:
        return None
    low, high = ours.bounds()
    by_name = {x.implementation: x.value() for x in case.rows}
    return DeviceCell(
        run=journal.header.run,
        commit=journal.header.commit,
        status=ours.status,
        reason=ours.reason,
        unit=journal.metric(ours.primary).unit,
        value=ours.value(),
        low=low,
        high=high,
        eager=by_name.get(EAGER),
        best=ours.best_baseline,
        best_value=by_name.get(ours.best_baseline or ""),
        over_eager=ours.speedup_vs_eager,
        over_best=ours.speedup_vs_best_baseline,
        fraction_of_limit=ours.fraction_of_limit,
    )


def device_table(comparison: DeviceComparison) -> Table:
    """Operators by devices: ours over eager PyTorch and over the best baseline, geometric means over cases."""
    table = _table(
        "Ours over eager PyTorch / over the best baseline, geometric mean", "operator", comparison.devices
    )
    operators: dict[str, list[DeviceRow]] = {}
    for row in comparison.rows:
        operators.setdefault(row.operator, []).append(row)
    for operator, found in sorted(operators.items()):
        cells = (_mean([x.cells[y] for x in found if y in x.cells], len(found)) for y in comparison.devices)
        _add(table, [operator, *cells])
    return table


def case_table(comparison: DeviceComparison, operator: str) -> Table:
    """Cases of an operator by devices: our value, and ours over eager PyTorch and over the best baseline."""
    table = _table(f"{operator}: ours, over eager PyTorch / over the best baseline", "case", comparison.devices)
    for row in comparison.rows:
        if row.operator == operator:
            name = row.case if row.cache == "cold" else f"{row.case} ({row.cache})"
            _add(table, [name, *(_told(row.cells.get(x)) for x in comparison.devices)])
    return table


def _mean(cells: Sequence[DeviceCell], cases_: int) -> str:
    if not cells:
        return NOT_RUN
    means = geometric_mean(x.over_eager for x in cells), geometric_mean(x.over_best for x in cells)
    text = " / ".join(map(figures.ratio, means))
    return text if len(cells) == cases_ else f"{text} ({len(cells)} of {cases_} cases)"


def _told(cell: DeviceCell | None) -> str:
    if cell is None:
        return NOT_RUN
    if cell.value is None:
        return cell.status.replace("_", " ")
    value = figures.measured(cell.value, cell.unit)
    shown = value if cell.unit in ("B", "J", "1") else f"{value} {cell.unit}"
    return f"{shown}, {figures.ratio(cell.over_eager)} / {figures.ratio(cell.over_best)}"


def _table(title: str, first: str, devices: Sequence[str]) -> Table:
    return Table((Column(first, folds=20), *(Column(x, number=True, folds=12) for x in devices)), title)


def _add(table: Table, cells: Iterable[str]) -> None:
    table.add(*(Text(x, "dim" if x == NOT_RUN else "") for x in cells))
