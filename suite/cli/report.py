"""`kernelmark report`: one self-contained HTML page of one or several runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...registry.errors import InputError
from ...registry.store.home import Home
from ...registry.store.journal import Journal
from .filters import filters
from .names import run_argument

if TYPE_CHECKING:
    from ...registry.analysis.selection import Selection


@click.command("report")
@run_argument("runs", nargs=-1, required=True, metavar="RUN...")
@filters
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="The page's file. Default: named by the run, in the home's `reports` folder.",
)
def command_report(runs: tuple[str, ...], selection: Selection, output: Path | None) -> None:
    """One self-contained HTML page, which opens offline.

    RUN is a run's name, the beginning of one, `latest`, or a journal file. Of several runs the first is
    what the others are compared with.
    """
    home = Home()
    click.echo(str(write_report([home.load(x) for x in runs], home, output, selection)))


def write_report(
    journals: Sequence[Journal], home: Home, output: Path | None = None, selection: Selection | None = None
) -> Path:
    """Renders and writes the page; returns where it lies. Raises `InputError` if it cannot be written."""
    from ...registry.analysis.selection import EVERYTHING
    from ...registry.views.report import render

    path = output or home.reports / default_name(journals)
    page = render(journals, selection or EVERYTHING)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"the report cannot be written to {path}: {reason}; name a file with --output.") from None
    return path


def default_name(journals: Sequence[Journal]) -> str:
    """A file name of the runs' names. They come from journals that others wrote: nothing but a name gets out."""
    names = [re.sub(r"[^\w+-]", "_", x.header.run) or "run" for x in journals]
    return (names[0] if len(names) == 1 else f"{names[0]}_and_{len(names) - 1}_more") + ".html"
