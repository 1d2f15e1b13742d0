"""`kernelmark capture`: which of our operators a program calls, as a plan."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("capture", context_settings={"ignore_unknown_options": True})
@click.option(
    "--plan",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("captured.toml"),
    show_default=True,
    help="The plan file to write.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def command_capture(target: Path, command: tuple[str, ...]) -> None:
    """Run a Python program, and write a plan of the operators that it calls.

    \b
    kernelmark capture --plan mine.toml -- python train.py --steps 2
    kernelmark run --plan mine.toml

    The program runs in this process and eagerly: what it compiles, and kernels of libraries, are not seen.
    """
    from ..capture import Capture, run
    from ..catalog import Catalog

    seen = Capture()
    status = run(command, seen)
    text = seen.plan(Catalog.default())
    target.write_text(text)
    total = seen.total_ms or 1.0
    attributed = sum(x.ms for x in seen.calls())
    for x in seen.calls():
        axes = " ".join(f"{name}{size}" for name, size in x.call.axes)
        click.echo(f"{x.count:6} × {x.call.operator:24} {axes:36} {x.call.dtype:5} {100 * x.ms / total:5.1f} %")
    click.echo(
        f"{100 * attributed / total:.1f} % of the time of all calls that were seen is operators of ours, forward"
    )
    click.echo(f"plan      {target}")
    if status:
        click.echo(f"the program ended with status {status}", err=True)
        sys.exit(status)
