"""`kernelmark show`: a run's results."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ...registry.store import collecting
from ...registry.store.home import Home
from .filters import filters
from .formats import Form, emit, formats
from .names import run_argument

if TYPE_CHECKING:
    from ...registry.analysis.selection import Selection
    from ...registry.store.journal import Journal


@click.command("show")
@run_argument("run")
@filters
@click.option("--above-limit", is_flag=True, help="Only rows that pass what the run measured as their limit.")
@formats
@collecting.paused()
def command_show(run: str, selection: Selection, above_limit: bool, form: Form) -> None:
    """A run's results.

    RUN is a run's name, the beginning of one, `latest`, or a journal file. In a narrow terminal tables leave out
    whole columns and say which: first what was measured beside the time, then rates, "vs eager", "limit" and "±".
    """
    home = Home()
    journal = home.load(run, lean=True)
    selection = replace(selection, above_limit=above_limit)
    from ...registry.analysis.repeated import said
    from ...registry.analysis.rows import rows
    from ...registry.store.index import Index
    from ...registry.views.flat import flat
    from ...registry.views.tables import run_table

    repeated = said(journal, Index(home).verifying(journal.header.run))
    emit(
        form,
        lambda: run_table(journal, selection, repeated),
        lambda: {**_everything(journal, selection), "repeated": repeated},
        lambda: map(flat, selection.rows(rows(journal))),
    )


def _everything(journal: Journal, selection: Selection) -> dict[str, Any]:
    import msgspec

    from ...registry.analysis.rows import rows, summarize
    from ...registry.analysis.slices import sliced
    from ...registry.views import crossing

    return {
        **summarize(journal, selection.rows(rows(journal))),
        "crossings": crossing.summarize(journal),
        "extrapolated": msgspec.to_builtins(sliced(journal)),
    }
