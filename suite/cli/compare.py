"""`kernelmark compare`: two runs side by side, or several devices, without a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from ...registry.errors import InputError, unknown
from ...registry.store.home import Home

NOTHING_COMPARABLE = 4


@click.command("compare")
@click.argument("runs", nargs=-1, metavar="RUN...")
@click.option(
    "--by",
    type=click.Choice(["run", "device"]),
    default="run",
    show_default=True,
    help="`device`: any number of runs, all in the home by default; of each device its newest.",
)
@click.option("--operator", help="With --by device: this operator's cases, not a line an operator.")
@click.option("--json", "as_json", is_flag=True, help="For machines: one object with `rows`.")
@click.pass_context
def command_compare(
    ctx: click.Context, runs: tuple[str, ...], by: str, operator: str | None, as_json: bool
) -> None:
    """Two runs side by side: how the second differs from the first, with intervals. Or devices: what each says
    of the same cases, `not run` where it has none.

    RUN is a run's name, the beginning of one, `latest`, or a journal file. Rows of two runs whose comparability
    keys differ get no ratio; what differs is named. This is for reading; whether something regressed is
    `regression_detector`'s to say. Exit code 4 if no row can be compared, else 0.
    """
    if by == "device":
        _devices(runs, operator, as_json)
        return
    if operator is not None:
        raise InputError("--operator is for --by device.")
    if len(runs) > 2:
        raise click.UsageError(f"{len(runs)} runs are too many: it takes two; --by device takes any number.")
    if len(runs) < 2:
        raise click.UsageError("Missing argument 'RUN': it takes two; --by device takes any number.")
    if not _runs(runs, as_json):
        if not as_json:
            click.echo("No row of the two runs can be compared.", err=True)
        ctx.exit(NOTHING_COMPARABLE)


def _runs(names: Sequence[str], as_json: bool) -> bool:
    """Two runs; False where no row can be compared."""
    from ...registry.views.comparison_table import compare

    home = Home()
    comparison = compare(home.load(names[0]), home.load(names[1]))
    if as_json:
        _print(comparison.to_builtins())
    else:
        from ...registry.escape import console
        from ...registry.views.tables import compare_table

        console().print(compare_table(comparison))
    return bool(comparison.compared)


def _devices(names: Sequence[str], operator: str | None, as_json: bool) -> None:
    from ...registry.views.device_table import by_device, case_table, device_table

    home = Home()
    found = names or home.runs()
    if not found:
        raise InputError(f"no runs in {home.folder}; make one with `kernelmark run` or import a journal.")
    comparison = by_device(home.load(x) for x in found)
    known = sorted({x.operator for x in comparison.rows})
    if operator is not None and operator not in known:
        raise unknown("operator", operator, known)
    if as_json:
        _print(comparison.to_builtins())
        return
    from ...registry.escape import console

    console().print(device_table(comparison) if operator is None else case_table(comparison, operator))


def _print(value: dict[str, Any]) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))
