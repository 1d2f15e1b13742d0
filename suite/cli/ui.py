"""`kernelmark ui`: the MLflow UI on the registry."""

from __future__ import annotations

import signal
from types import FrameType

import click

from ...registry.store.home import Home
from ..catalog import Catalog


@click.command("ui")
@click.argument("run", required=False)
@click.option("--operator", help="Only this operator: its implementations side by side.")
@click.option("--port", type=click.IntRange(1, 65535), help="Default: any free one.")
def command_ui(run: str | None, operator: str | None, port: int | None) -> None:
    """The MLflow UI on the registry, on this machine only, at a ready comparison.

    RUN is a run's name, the beginning of one, or `latest`; by default the newest in the registry.
    """
    from ...registry.tracking.ui import Ui

    if operator is not None:
        Catalog.default().operator(operator)
    home = Home()
    name = home.load(run).header.run if run else None
    # What supervises us says SIGTERM where a user says Ctrl-C, and a shell that starts us in the background
    # has SIGINT ignored: each must end the server's children.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    click.echo("starting the MLflow UI, this takes some seconds …", err=True)
    try:
        with Ui.start(home, name, port, operator=operator) as ui:
            click.echo(ui.link)
            if ui.started:
                click.echo("Ctrl-C ends it.", err=True)
            ui.wait()
    except KeyboardInterrupt:
        click.echo("\nended", err=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
