"""`kernelmark ui`: the MLflow UI on the registry."""

from __future__ import annotations

import signal
from types import FrameType

import click

from ...registry.errors import InputError
from ...registry.escape import plain
from ...registry.store.home import Home
from ..catalog import Catalog
from .names import operators, run_argument


@click.command("ui")
@run_argument("run", required=False, metavar="[RUN]")
@click.option("--operator", shell_complete=operators, help="Only this operator, by all implementations.")
@click.option("--case", help="Only this case, by its name as `show` prints it.")
@click.option(
    "--where",
    metavar="TAG=VALUE",
    multiple=True,
    help="Only rows with this tag: gpu, driver, cuda, torch, triton, commit, implementation, …; repeatable.",
)
@click.option("--port", type=click.IntRange(1, 65535), help="Default: any free one.")
def command_ui(
    run: str | None, operator: str | None, case: str | None, where: tuple[str, ...], port: int | None
) -> None:
    """The MLflow UI on the registry, on this machine only, at a ready comparison.

    It opens on one case, or with --operator on all cases of that if a chart can show so many, with a chart for
    each of what matters: the time, the speedup over the fastest baseline, the fraction of the limit. All other
    metrics are folded. The link it prints is kept in the registry and can be passed on.

    RUN is a run's name, the beginning of one, or `latest`; by default the newest in the registry, or all of them
    where a search is given.
    """
    from ...registry.tracking.ui import Ui

    if operator is not None:
        Catalog.default().operator(operator)
    tags = {x: y for x, y in (("operator", operator), ("case", case)) if y is not None}
    for text in where:
        name, sign, value = text.partition("=")
        if not (name and sign and value):
            raise InputError(f"--where {text!r}: it has the form TAG=VALUE, as in --where 'gpu=NVIDIA H200'")
        tags[name] = value
    home = Home()
    run_name = home.load(run).header.run if run else None
    # What supervises us says SIGTERM where a user says Ctrl-C, and a shell that starts us in the background
    # has SIGINT ignored: each must end the server's children.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    click.echo("starting the MLflow UI, this takes some seconds …", err=True)
    try:
        with Ui.start(home, run_name, port, tags=tags) as ui:
            click.echo(ui.link)
            if ui.opened.rows < ui.opened.asked:
                shown = f"{plain(ui.opened.title)}, {ui.opened.rows} of the {ui.opened.asked} rows asked for"
                more = "Another case: --case NAME; all of them: take conditions out of the UI's search."
                click.echo(f"shown: {shown}. {more}", err=True)
            if ui.started:
                click.echo("Ctrl-C ends it.", err=True)
            ui.wait()
    except KeyboardInterrupt:
        click.echo("\nended", err=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
