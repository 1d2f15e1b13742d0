"""`kernelmark compare`: two runs side by side, without a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click
import msgspec

from ...registry.store.home import Home
from .filters import filters
from .formats import Form, emit, formats
from .names import run_argument

if TYPE_CHECKING:
    from ...registry.analysis.selection import Selection

NOTHING_COMPARABLE = 4


@click.command("compare")
@run_argument("first")
@run_argument("second")
@filters
@click.option("--only-changed", is_flag=True, help="Leave out the rows whose interval holds no change.")
@click.option(
    "--sort",
    type=click.Choice(["change", "case"]),
    default="change",
    show_default=True,
    help="The largest changes first, or by operator and case.",
)
@formats
@click.pass_context
def command_compare(
    ctx: click.Context,
    first: str,
    second: str,
    selection: Selection,
    only_changed: bool,
    sort: Literal["change", "case"],
    form: Form,
) -> None:
    """Two runs side by side: how the second differs from the first, with intervals.

    RUN is a run's name, the beginning of one, `latest`, or a journal file. First how many rows of each operator
    are faster, undecided and slower, and the geometric mean of their changes; then the rows. Rows whose
    comparability keys differ get no ratio; what differs is named. This is for reading; whether something regressed
    is `regression_detector`'s to say. Exit code 4 if no row can be compared, else 0.
    """
    home = Home()
    journals = home.load(first), home.load(second)
    from ...registry.views.comparison_page import comparison_page, shown
    from ...registry.views.comparison_table import compare

    comparison = compare(*journals, selection)
    emit(
        form,
        lambda: comparison_page(comparison, sort, only_changed),
        comparison.to_builtins,
        lambda: [
            {**msgspec.to_builtins(x), "notes": "; ".join(x.notes), "standing": x.standing}
            for x in shown(comparison, sort, only_changed)
        ],
    )
    if not comparison.compared:
        if form == "table":
            click.echo("No row of the two runs can be compared.", err=True)
        ctx.exit(NOTHING_COMPARABLE)
