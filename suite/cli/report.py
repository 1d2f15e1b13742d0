"""`kernelmark report`: one self-contained HTML page of one or several runs, or a table known by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...registry.errors import InputError, unwritable
from ...registry.store.home import Home
from ...registry.store.journal import Journal
from .filters import filters
from .names import run_argument
from .results import put

if TYPE_CHECKING:
    from ...registry.analysis.selection import Selection


@click.command("report")
@run_argument("runs", nargs=-1, required=True, metavar="RUN...")
@filters
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Where to write. Default: a page goes to the home's `reports` folder, a table is printed.",
)
@click.option(
    "--style",
    type=click.Choice(("page", "kernels", "configurations", "goals", "models", "drawn", "techniques", "fidelity")),
    default="page",
    show_default=True,
    help="A page; a line a kernel; a block a configuration; which goals are earned; the calls of models; whether "
    "a size drawn at random is much worse than a peer; what techniques of training buy; or whether peers are as "
    "fast as their authors published.",
)
@click.option("--against", metavar="NAME", help="The baseline of the tables. Default: eager PyTorch.")
def command_report(
    runs: tuple[str, ...], selection: Selection, output: Path | None, style: str, against: str | None
) -> None:
    """One self-contained HTML page, which opens offline.

    RUN is a run's name, the beginning of one, `latest`, or a journal file. Of several runs the first is
    what the others are compared with.
    """
    if against is not None and style not in ("kernels", "configurations"):
        raise InputError("--against is for --style kernels or configurations; a page has a choice of its own.")
    if style in ("goals", "models", "drawn", "techniques", "fidelity") and not selection.everything:
        raise InputError(f"--style {style} is of whole runs: leave the filters out.")
    home = Home()
    journals = [home.load(x) for x in runs]
    if style == "page":
        click.echo(str(write_report(journals, home, output, selection)))
        return
    text = _table(journals, style, against, selection, _verifications(journals, home))
    if output is None:
        click.echo(text, nl=False)
    else:
        _write(output, text)
        click.echo(str(output))


def _table(
    journals: Sequence[Journal],
    style: str,
    against: str | None,
    selection: Selection,
    verifications: Sequence[Journal],
) -> str:
    from ...registry.analysis.published import published
    from ...registry.analysis.releases import releases
    from ...registry.views import calls_table, fidelity, goals, named_tables, technique_tables

    if style == "goals":
        return goals.table(journals, verifications)
    if style == "models":
        return "\n".join(calls_table.table(x, verifications) for x in journals)
    if style == "drawn":
        return "\n".join(calls_table.drawn(x, verifications) for x in journals)
    if style == "techniques":
        return technique_tables.tables(journals)
    if style == "fidelity":
        return fidelity.table(journals, published(), releases(), verifications)
    made = named_tables.kernels if style == "kernels" else named_tables.configurations
    return "\n".join(made(x, against, selection, verifications) for x in journals)


def _verifications(journals: Sequence[Journal], home: Home) -> list[Journal]:
    from ...registry.store.index import Index

    return Index(home).verifying(*(x.header.run for x in journals))


def write_report(
    journals: Sequence[Journal], home: Home, output: Path | None = None, selection: Selection | None = None
) -> Path:
    """Renders and writes the page; returns where it lies. Raises `KernelmarkError` if it cannot be written."""
    from ...registry.analysis.selection import EVERYTHING
    from ...registry.views.report import render

    path = output or home.reports / default_name(journals)
    _write(path, render(journals, selection or EVERYTHING, _verifications(journals, home)))
    return path


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, text)
    except OSError as error:
        raise unwritable(f"the report cannot be written to {path}", error, "Name a file with --output.") from None


def default_name(journals: Sequence[Journal]) -> str:
    """A file name of the runs' names. They come from journals that others wrote: nothing but a name gets out."""
    names = [re.sub(r"[^\w+-]", "_", x.header.run) or "run" for x in journals]
    return (names[0] if len(names) == 1 else f"{names[0]}_and_{len(names) - 1}_more") + ".html"
