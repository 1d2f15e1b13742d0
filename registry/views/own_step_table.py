"""What implementations are worth to a captured program's step, as a table for a terminal."""

from __future__ import annotations

from .. import figures
from ..analysis.own_step import own_step
from ..store.journal import Journal
from .table import Block, Column, Page, Table, line


def own_step_table(journal: Journal) -> Page:
    """A row an implementation of a call; empty for a run that is of no captured program."""
    found = own_step(journal)
    if found is None:
        return []
    table = Table(
        (
            Column("call", folds=24),
            Column("calls", number=True, drop=1),
            Column("implementation"),
            Column("ms a step", number=True),
            Column("of the step", number=True, drop=2),
            Column("step ×", number=True),
        ),
        f"worth to your step of {found.ms:.3f} ms",
    )
    failed: list[Block] = []
    for call in found.calls:
        name = shown = f"{call.operator} {call.name}"
        count = f"{call.calls:g}"
        for x in call.offers:
            if x.ms is None:
                failed.append(line(f"{name} {x.implementation}: {x.reason}", style="dim"))
                continue
            worth = "–" if x.worth is None else f"{x.worth:.4f}"
            table.add(shown, count, x.implementation, f"{x.ms:.4f}", figures.percent(x.ms / found.ms, 1), worth)
            shown = count = ""
    best = "" if found.best is None else f" The fastest of each together: {found.best:.4f} ×."
    return [
        table,
        *failed,
        line(f"Step ×: your step over it with PyTorch's calls, timed alone, exchanged for these.{best}"),
    ]
