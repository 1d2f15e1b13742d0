"""`kernelmark history`: operators' times over commits, with change points."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...registry.errors import InputError, unwritable
from ...registry.store.home import Home
from ...registry.store.record import DEVICES
from .filters import filters
from .formats import Form, emit, formats
from .names import operators

if TYPE_CHECKING:
    from ...registry.analysis.selection import Selection
    from ...registry.detection.history import OperatorHistory
    from ...registry.views.table import Page


@click.command("history")
@click.argument("operator", required=False, shell_complete=operators)
@filters
@click.option("--all", "everything", is_flag=True, help="Rows without a change point too.")
@click.option("--device", type=click.Choice(DEVICES), help="Default: that of the newest run.")
@click.option("--html", type=click.Path(path_type=Path), help="Write OPERATOR's drawings as a page to this file.")
@formats
def command_history(
    operator: str | None,
    selection: Selection,
    everything: bool,
    device: str | None,
    html: Path | None,
    form: Form,
) -> None:
    """Times over commits, with the change points in them: a line an operator, then the rows of OPERATOR.

    Shown are the rows that changed; with --all, or where rows are asked for by a filter, all of those. From stored
    runs of clean commits that compare with the newest one. Change points are for reading; whether a commit
    regressed is `regression_detector`'s to say. Exit code 4 if nothing is stored.
    """
    from ..compare.histories import stored_histories

    if operator is not None:
        selection = replace(selection, operators=(operator, *selection.operators))
    if html is not None and len(selection.operators) != 1:
        raise InputError("--html draws one operator: kernelmark history OPERATOR --html FILE.")
    histories = stored_histories(Home(), selection, device)
    if html is not None:
        from ...registry.views.history_page import render_history

        try:
            html.write_text(render_history(histories[0]), encoding="utf-8")
        except OSError as error:
            raise unwritable(f"{html} cannot be written", error, "Name another file with --html.") from None
    rows = everything or not replace(selection, operators=()).everything
    emit(
        form,
        lambda: _page(histories, bool(selection.operators) or rows, rows),
        lambda: _everything(histories, operator),
        lambda: _flat(histories),
    )
    if html is not None and form == "table":
        click.echo(f"page      {html}")


def _page(histories: list[OperatorHistory], details: bool, everything: bool) -> Page:
    from ...registry.figures import counted
    from ...registry.views.history_page import history_table, overview
    from ...registry.views.table import Block, line

    page: list[Block] = [overview(histories)]
    for history in histories if details else ():
        shown = history.series if everything else history.changed
        if shown:
            page += [line(""), history_table(history, shown)]
        if calm := len(history.series) - len(shown):
            page.append(line(f"{counted(calm, 'row')} of {history.operator} without a change: --all", style="dim"))
    if not details:
        page.append(line("The rows of one: kernelmark history OPERATOR", style="dim"))
    widest = max(histories, key=lambda x: x.others)
    if widest.others:
        told = f"Left out as not comparable with the newest: {counted(widest.others, 'run')}."
        page.append(line(told, style="dim"))
    for x in widest.left_out:
        page.append(line(f"  {counted(x.runs, 'run')}: {'; '.join(x.differing) or 'another key'}", style="dim"))
    return page


def _everything(histories: list[OperatorHistory], operator: str | None) -> dict[str, Any]:
    """One operator that is asked for by its name as one object, else all of them in a list."""
    if operator is not None and len(histories) == 1:
        return histories[0].to_builtins()
    return {"schema_version": 1, "operators": [x.to_builtins() for x in histories]}


def _flat(histories: list[OperatorHistory]) -> list[dict[str, Any]]:
    from ...registry.views.history_page import flat

    return [row for history in histories for row in flat(history)]
