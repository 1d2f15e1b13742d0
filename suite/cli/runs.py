"""`kernelmark runs`: the runs that are here, what they are called, and deleting them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import click
import msgspec

from ...registry.errors import InputError, short
from ...registry.store import labels, remove, runs
from ...registry.store.home import Home
from ...registry.store.labels import Label
from .formats import Form, emit, formats
from .names import run_argument

if TYPE_CHECKING:
    from ...registry.store.runs import Listed
    from ...registry.views.table import Line, Page

SHOWN = 20
"""Runs that are listed, the newest."""


@click.group("runs", invoke_without_command=True)
@click.option("--limit", default=SHOWN, show_default=True, type=click.IntRange(1), help="So many, the newest.")
@click.option("--all", "everything", is_flag=True, help="Sides of comparisons too, and however many.")
@click.option("--tag", "tags", multiple=True, help="Only runs with this tag; repeatable.")
@formats
@click.pass_context
def command_runs(ctx: click.Context, limit: int, everything: bool, tags: tuple[str, ...], form: Form) -> None:
    """The runs that are here, the newest first; giving them names, tags and notes; deleting them.

    `latest` is the first of the list: the latest run that somebody asked for, never a side of a comparison.
    """
    if ctx.invoked_subcommand is None:
        home = Home()
        found = list(islice(runs.listed(home, everything, tags), None if everything else limit))
        emit(
            form,
            lambda: _page(home, found) if found else _none(home, everything, tags),
            lambda: {"home": str(home.folder), "runs": found},
            lambda: [msgspec.structs.asdict(x) | {"tags": " ".join(x.tags)} for x in found],
        )


def _page(home: Home, found: Sequence[Listed]) -> Page:
    from ...registry.figures import DASH, moment
    from ...registry.views.table import Column, Table

    sides = any(x.side_of for x in found)
    # A narrow terminal drops when it was, then the commit, the number of cases and the device.
    table = Table(
        (
            Column("run"),
            Column("name"),
            Column("created", drop=4),
            Column("plan"),
            Column("device", drop=1),
            Column("cases", number=True, drop=2),
            Column("commit", drop=3),
            *((Column("side of"),) if sides else ()),
            Column("tags", folds=10),
            Column("note", folds=20),
        )
    )
    for x in found:
        table.add(
            x.run,
            x.name or "",
            moment(x.created) if x.created else DASH,
            x.plan or "not readable",
            x.device or DASH,
            str(x.cases or DASH),
            (x.commit or DASH)[:10] + ("+" if x.dirty else ""),
            *((x.side_of or "",) if sides else ()),
            " ".join(x.tags),
            x.note or "",
        )
    return [table, _where(home)]


def _none(home: Home, everything: bool, tags: Sequence[str]) -> Page:
    """Why no run is listed: there is none, or none has these tags."""
    from ...registry.views.table import line

    others = list(runs.listed(home, everything))
    if not others:
        return [line("No runs; make one with `kernelmark run` or import a journal."), _where(home)]
    known = sorted({tag for x in others for tag in x.tags})
    there = f"Tags: {', '.join(known)}." if known else "None has any; `kernelmark runs tag RUN TAG` gives one."
    asked = ", ".join(map(short, dict.fromkeys(tags)))
    return [
        line(f"No run has {'tag' if len(set(tags)) == 1 else 'all of the tags'} {asked}. {there}"),
        _where(home),
    ]


def _where(home: Home) -> Line:
    from ...registry.views.table import line

    return line(f"in {home.folder} ({home.why})", style="dim")


@command_runs.command("name")
@run_argument("run")
@click.argument("name", required=False)
def name_run(run: str, name: str | None) -> None:
    """Give RUN a name, by which it is found from then on; without NAME take it away."""
    home = Home()
    found = runs.own(home, run)
    _tell(found, runs.rename(home, found, name))


@command_runs.command("tag")
@run_argument("run")
@click.argument("tags", nargs=-1, required=True, metavar="TAG...")
@click.option("--remove", "removing", is_flag=True, help="Take these away.")
def tag_run(run: str, tags: tuple[str, ...], removing: bool) -> None:
    """Add tags to RUN; `kernelmark runs --tag TAG` lists by them."""
    home = Home()
    found = runs.own(home, run)
    _tell(found, runs.tag(home, found, tags, removing))


@command_runs.command("note")
@run_argument("run")
@click.argument("text", required=False)
def note_run(run: str, text: str | None) -> None:
    """Note TEXT beside RUN; without TEXT take the note away."""
    home = Home()
    found = runs.own(home, run)
    _tell(found, labels.change(home.folder, found, note=text))


@command_runs.command("delete")
@run_argument("named", nargs=-1, required=True, metavar="RUN...")
@click.option("--yes", is_flag=True, help="Do not ask.")
def delete_runs(named: tuple[str, ...], yes: bool) -> None:
    """Delete runs from the home: journal, shards, report, log, scratch folder, what a fleet delivered, and label.

    What the registry has of them stays there.
    """
    home = Home()
    found = list(dict.fromkeys(runs.own(home, x) for x in named))
    files = [path for run in found for path in remove.files_of(home, run)]
    if not yes:
        for path in files:
            click.echo(str(path))
        try:
            sure = click.confirm(f"Delete {', '.join(found)}?", err=True)
        except click.Abort:
            if sys.stdin.isatty():  # Ctrl-C
                raise
            raise InputError(
                "nobody is there to say whether to delete; give --yes. Nothing was deleted."
            ) from None
        if not sure:
            raise click.Abort
    for run in found:
        remove.remove(home, run)
        click.echo(f"{run}: deleted")


def _tell(run: str, label: Label) -> None:
    told = [label.name and f"name {label.name}", label.tags and f"tags {' '.join(label.tags)}"]
    told += [label.note and f"note: {label.note}"]
    click.echo(f"{run}: {', '.join(x for x in told if x) or 'no name, tags or note'}")
