"""What kernels are worth in a model, as a table for a terminal."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from ..analysis.worth import Worth, worths
from ..store.journal import Journal

if TYPE_CHECKING:
    from rich.console import RenderableType

HEADINGS = ("part", "put in", "calls", "alone ×", "expected ×", "measured ×", "95 %", "gained ms", "expected ms")


def worth_table(journal: Journal) -> RenderableType | None:
    """All exchanges of a run, a table for each base system; None for a run without any."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    found = worths(journal)
    if not found:
        return None
    lines: list[RenderableType] = []
    for (step, base), group in groupby(found, key=lambda x: (x.exchange.step, x.exchange.base)):
        rows = list(group)
        known = next((x.base_ms for x in rows if x.base_ms is not None), None)
        title = f"worth · {step} · base {base}" + (f", {known:.2f} ms" if known is not None else "")
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for i, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if i < 2 else "right", no_wrap=True)
        for x in rows:
            if x.status == "ok":
                table.add_row(*cells(x), style="dim" if x.null else None)
        lines.append(table)
        lines += [
            Text(f"{x.exchange.part} {x.exchange.implementation}: {x.status}, {x.reason}", style="dim")
            for x in rows
            if x.status != "ok"
        ]
    lines.append(Text("Dim: the interval holds 1, so that nothing is shown. Differences between expected and"))
    lines.append(Text("measured are layouts, fusion and launches, which an isolated call does not have."))
    return Group(*lines)


def cells(x: Worth) -> tuple[str, ...]:
    """A row's texts, in the order of `HEADINGS`."""
    return (
        x.exchange.part,
        x.exchange.implementation,
        str(x.exchange.calls),
        _ratio(x.alone, 2),
        _ratio(x.expected, 4),
        _ratio(x.measured, 4),
        "–" if x.low is None or x.high is None or x.processes < 2 else f"{x.low:.4f}–{x.high:.4f}",
        _ratio(x.gained_ms, 3),
        _ratio(x.expected_ms, 3),
    )


def _ratio(x: float | None, digits: int) -> str:
    return "–" if x is None else f"{x:.{digits}f}"
