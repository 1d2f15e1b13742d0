"""Devices as rows: what eager PyTorch and ours took there, and the improvement, over the cases that all have.

The rows are the devices that the project was asked about and those that were measured. Another device's cases say
nothing of this one's time: so times are geometric means over the cases that every measured device has. A device
that nobody measured says `not run` and no more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .. import figures
from ..analysis.statistics import geometric_mean
from .device_table import NOT_RUN, DeviceCell, DeviceComparison, DeviceRow
from .table import Column, Table, Text

ASKED = (
    ("NVIDIA T4", r"\bT4\b"),
    ("NVIDIA L4", r"\bL4\b"),
    ("NVIDIA RTX 4090", r"\b4090\b"),
    ("NVIDIA A100", r"\bA100\b"),
    ("NVIDIA H100", r"\bH100\b"),
    ("NVIDIA H200", r"\bH200\b"),
    ("NVIDIA B200", r"\bG?B200\b"),
    ("AMD MI250", r"\bMI2[015]0X?\b"),
    ("AMD MI300", r"\bMI3\d\dX?\b"),
    ("Intel Arc, XPU", r"\bArc\b|Data Center GPU"),
    ("Apple GPU (MPS)", r"^Apple M\d"),
    ("CPU: Intel", r"^CPU: .*Intel"),
    ("CPU: AMD", r"^CPU: .*(AMD|EPYC|Ryzen)"),
    ("CPU: Apple", r"^CPU: Apple"),
)
"""The hardware of the tables that this project was asked for, each with what its name looks like in a journal."""


def hardware_table(comparison: DeviceComparison) -> Table:
    """A line a device: eager PyTorch, ours, ours over it and over the best baseline."""
    # A device whose runs have none of these rows was not measured, and takes no case from the others.
    measured = [y for y in comparison.devices if any(_measured(x.cells.get(y)) for x in comparison.rows)]
    shared = [x for x in comparison.rows if measured and all(_measured(x.cells.get(y)) for y in measured)]
    of = f"{len(shared)} cases that all measured devices have" if shared else "each device's own cases"
    table = Table(
        (
            Column("hardware"),
            Column("native PyTorch", number=True),
            Column("ours", number=True),
            Column("improvement", number=True),
            Column("over the best", number=True),
            Column("cases", number=True),
        ),
        f"Hardware, geometric means over {of}",
    )
    for name, cells in lines(comparison, shared):
        table.add(name, *(Text(x, "dim" if x == NOT_RUN else "") for x in cells))
    return table


def lines(comparison: DeviceComparison, shared: Sequence[DeviceRow]) -> list[tuple[str, tuple[str, ...]]]:
    """By device its cells: those that were asked for in their order, then the others that were measured."""
    found: list[tuple[str, tuple[str, ...]]] = []
    left = list(comparison.devices)
    for name, pattern in ASKED:
        mine = [x for x in left if re.search(pattern, x)]
        left = [x for x in left if x not in mine]
        found += [(x, _cells(x, comparison, shared)) for x in mine] or [(name, (NOT_RUN,) * 5)]
    return found + [(x, _cells(x, comparison, shared)) for x in left]


def _cells(device: str, comparison: DeviceComparison, shared: Sequence[DeviceRow]) -> tuple[str, ...]:
    own = [x.cells[device] for x in (shared or comparison.rows) if _measured(x.cells.get(device))]
    if not own:
        return (NOT_RUN,) * 5
    one_unit = len({x.unit for x in own}) == 1
    means = (geometric_mean(x.eager for x in own), geometric_mean(x.value for x in own))
    # Other cases, or other metrics, have no common time.
    times = [figures.measured(x, own[0].unit) if x is not None and shared and one_unit else "–" for x in means]
    told = [f"{x} {own[0].unit}" if x != "–" else x for x in times]
    ratios = (geometric_mean(x.over_eager for x in own), geometric_mean(x.over_best for x in own))
    return (*told, *map(figures.ratio, ratios), str(len(own)))


def _measured(cell: DeviceCell | None) -> bool:
    return cell is not None and cell.value is not None and cell.eager is not None
