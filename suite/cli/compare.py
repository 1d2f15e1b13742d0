"""`kernelmark compare`: two runs side by side, or devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import click
import msgspec
from click.core import ParameterSource

from ...registry.errors import InputError
from ...registry.store import collecting
from ...registry.store.home import Home
from .filters import filters
from .formats import Form, emit, formats
from .names import run_argument

if TYPE_CHECKING:
    from ...registry.analysis.selection import Selection
    from ...registry.views.table import Table

NOTHING_COMPARABLE = 4
COMMANDLINE = ParameterSource.COMMANDLINE


@click.command("compare")
@run_argument("runs", nargs=-1, metavar="RUN...")
@click.option(
    "--by",
    type=click.Choice(["run", "device"]),
    default="run",
    show_default=True,
    help="`device`: any number of runs, all in the home by default; of each device its newest.",
)
@click.option(
    "--style",
    type=click.Choice(["cases", "hardware"]),
    default="cases",
    show_default=True,
    help="With --by device: devices as columns, or as rows of a table of hardware.",
)
@filters
@click.option("--only-changed", is_flag=True, help="Leave out the rows whose interval holds no change.")
@click.option(
    "--sort",
    type=click.Choice(["change", "case"]),
    default="change",
    show_default=True,
    help="The largest changes first, or by operator and case.",
)
@click.option(
    "--across",
    multiple=True,
    metavar="CONDITION",
    help="A condition in which the runs may differ, as it is what is compared: parallel, driver, torch.",
)
@formats
@click.pass_context
@collecting.paused()
def command_compare(
    ctx: click.Context,
    runs: tuple[str, ...],
    by: str,
    style: str,
    selection: Selection,
    only_changed: bool,
    sort: Literal["change", "case"],
    across: tuple[str, ...],
    form: Form,
) -> None:
    """Two runs side by side: how the second differs from the first, with intervals. Or devices: what each says
    of the same cases, `not run` where it has none.

    RUN is a run's name, the beginning of one, `latest`, or a journal file. First how many rows of each operator
    are faster, undecided and slower, and the geometric mean of their changes; then the rows; then which of them
    got worse by another judged metric (memory, energy, error). Rows whose comparability keys differ get no ratio,
    unless by conditions alone that --across names; what differs is named. This is for reading; whether something
    regressed is `regression_detector`'s to say. Exit code 4 if no row can be compared, else 0.
    """
    if by == "device":
        if ignored := [
            x for x in ("only_changed", "sort", "across") if ctx.get_parameter_source(x) is COMMANDLINE
        ]:
            named = " and ".join(f"--{x.replace('_', '-')}" for x in ignored)
            raise click.UsageError(f"--by device does not take {named}: leave it out, or compare two runs.")
        _devices(runs, selection, form, style)
        return
    if ctx.get_parameter_source("style") is COMMANDLINE:
        raise click.UsageError("--style is for --by device.")
    if len(runs) > 2:
        raise click.UsageError(f"{len(runs)} runs are too many: it takes two; --by device takes any number.")
    if len(runs) < 2:
        raise click.UsageError("Missing argument 'RUN': it takes two; --by device takes any number.")
    home = Home()
    from ...registry.views.comparison_page import comparison_page, shown
    from ...registry.views.comparison_table import Run, compared

    first, second = (Run(home.load(x, lean=True)) for x in runs)
    comparison = compared(first, second, selection, across)
    emit(
        form,
        lambda: comparison_page(comparison, sort, only_changed),
        comparison.to_builtins,
        lambda: [
            {
                **msgspec.to_builtins(x),
                "notes": "; ".join(x.notes),
                "standing": x.standing,
                "beside": ", ".join(x.beside),
                "flags": "; ".join(flag.reason for flag in x.flags),
            }
            for x in shown(comparison, sort, only_changed)
        ],
    )
    if not comparison.compared:
        if form == "table":
            click.echo("No row of the two runs can be compared.", err=True)
        ctx.exit(NOTHING_COMPARABLE)


def _devices(names: Sequence[str], selection: Selection, form: Form, style: str) -> None:
    from ...registry.views.device_table import by_device, case_table, device_table
    from ...registry.views.hardware_table import hardware_table

    home = Home()
    found = names or home.runs()
    if not found:
        raise InputError(f"no runs in {home.folder}; make one with `kernelmark run` or import a journal.")
    comparison = by_device((home.load(x) for x in found), selection)
    operators = sorted({x.operator for x in comparison.rows})
    one = operators[0] if selection.operators and len(operators) == 1 else None

    def page() -> Table:
        if style == "hardware":
            return hardware_table(comparison)
        return device_table(comparison) if one is None else case_table(comparison, one)

    emit(
        form,
        lambda: [page()],
        comparison.to_builtins,
        comparison.flat,
    )
