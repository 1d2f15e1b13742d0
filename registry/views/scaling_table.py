"""Efficiency on several GPUs beside the time of one, as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..analysis.rows import Row
from ..analysis.scaling import Scaled, efficiencies

if TYPE_CHECKING:
    from rich.console import RenderableType

HEADINGS = ("case", "implementation", "GPUs", "scaling", "time ms", "one GPU ms", "by", "efficiency")


def scaling_table(rows: Iterable[Row]) -> RenderableType | None:
    """All cases on several GPUs that the run has on one as well; None where there is none."""
    from rich import box
    from rich.table import Table

    found = efficiencies(rows)
    if not found:
        return None
    table = Table(title="scaling", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in HEADINGS:
        left = heading in ("case", "implementation", "scaling", "by")
        fixed = heading != "case"
        table.add_column(
            heading, justify="left" if left else "right", no_wrap=fixed, min_width=None if fixed else 24
        )
    for x in sorted(found, key=lambda x: (x.row.operator, x.world, x.row.case, x.value)):
        table.add_row(*cells(x))
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
        x.alone_by,
        f"{100 * x.efficiency:.1f} %",
    )
