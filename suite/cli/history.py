"""`kernelmark history`: an operator's times over commits, with change points."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from ...registry.errors import InputError, KernelmarkError
from ...registry.store.home import Home


class NoHistory(KernelmarkError):
    """Nothing is stored of what was asked for."""

    exit_code = 4


@click.command("history")
@click.argument("operator")
@click.option("--case", help="Only this case.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Default: that of the newest run.")
@click.option("--json", "as_json", is_flag=True, help="For machines: one object with `series`.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with drawings to this file.")
def command_history(operator: str, case: str | None, device: str | None, as_json: bool, html: Path | None) -> None:
    """OPERATOR's times over commits, with the change points in them.

    From stored runs of clean commits that compare with the newest one. Change points are for reading; whether
    a commit regressed is `regression_detector`'s to say. Exit code 4 if nothing is stored.
    """
    from ...registry.analysis.history import over_commits, runs_of
    from ...registry.store.index import Index
    from ..catalog import Catalog
    from ..compare.revisions import Checkout

    home = Home()
    runs, others = runs_of(Index(home), operator, case, device)
    if not runs:
        Catalog.default().operator(operator)  # a name that does not exist is another mistake
        raise NoHistory(
            f"no run of a clean commit in {home.folder} has a time of {operator} {case or ''}".rstrip()
        )
    try:
        times = Checkout.here().times({str(entry.commit) for entry, _ in runs})
    except InputError:  # outside a checkout the order of measuring has to do
        times = {}
    history = over_commits(runs, operator, others, times)
    if html is not None:
        from ...registry.views.history_page import render_history

        try:
            html.write_text(render_history(history), encoding="utf-8")
        except OSError as error:
            raise InputError(f"{html} cannot be written: {error.strerror}.") from None
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(history.to_builtins()), indent=2))
        return
    from ...registry.escape import console
    from ...registry.views.history_page import history_table

    console().print(history_table(history))
    if others:
        click.echo(f"Left out as not comparable with the newest: {others} of {others + len(runs)} runs.")
    if html is not None:
        click.echo(f"page      {html}")
