"""`kernelmark runs`: the runs that are here, what they are called, and deleting them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ...registry.errors import InputError
from ...registry.store import labels, remove
from ...registry.store.home import LATEST, Home, asked_for
from ...registry.store.journal import read_header
from ...registry.store.transfer import checked_run
from .formats import Form, emit, formats
from .names import run_argument

if TYPE_CHECKING:
    from ...registry.store.record import Header
    from ...registry.views.table import Page

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
        found = _found(home, limit, everything, tags)
        emit(
            form,
            lambda: _page(home, found),
            lambda: {"home": str(home.folder), "runs": found},
            lambda: _flat(found),
        )


def _found(home: Home, limit: int, everything: bool, tags: Sequence[str]) -> list[dict[str, Any]]:
    known = labels.read(home.folder)
    out: list[dict[str, Any]] = []
    for run, path in reversed(home.paths().items()):
        label = known.get(run, labels.NOTHING)
        header = read_header(path)
        if not set(tags) <= set(label.tags) or (header is not None and not asked_for(header) and not everything):
            continue
        noted = label.note or (header.request.note if header is not None else None)
        out.append({"run": run, "name": label.name, **_facts(header), "tags": list(label.tags), "note": noted})
        if len(out) == limit and not everything:
            break
    return out


def _facts(header: Header | None) -> dict[str, Any]:
    """What a header says of its run; a journal that cannot be read is listed all the same."""
    if header is None:
        return dict.fromkeys(("created", "plan", "device", "commit", "dirty", "replicates", "cases", "side_of"))
    asked = header.request
    return {
        **{x: getattr(header, x) for x in ("created", "plan", "device", "commit", "dirty", "replicates")},
        "cases": len(asked.cases) or None,
        "side_of": asked.partner or asked.arm or (f"stage {asked.stage}" if asked.stage else None),
    }


def _flat(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [x | {"tags": " ".join(x["tags"])} for x in found]


def _page(home: Home, found: Sequence[dict[str, Any]]) -> Page:
    from ...registry.views.table import Column, Table, line
    from ...registry.views.units import DASH, moment

    where = line(f"in {home.folder} ({home.why})", style="dim")
    if not found:
        return [line("No runs; make one with `kernelmark run` or import a journal."), where]
    sides = any(x["side_of"] for x in found)
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
            x["run"],
            x["name"] or "",
            moment(x["created"]) if x["created"] else DASH,
            x["plan"] or "not readable",
            x["device"] or DASH,
            str(x["cases"] or DASH),
            (x["commit"] or DASH)[:10] + ("+" if x["dirty"] else ""),
            *((x["side_of"] or "",) if sides else ()),
            " ".join(x["tags"]),
            x["note"] or "",
        )
    return [table, where]


@command_runs.command("name")
@run_argument("run")
@click.argument("name", required=False)
def name_run(run: str, name: str | None) -> None:
    """Give RUN a name, by which it is found from then on; without NAME take it away."""
    home = Home()
    found = _run(home, run)
    if name is not None:
        checked_run(name)
        taken = home.names().get(name)
        if name == LATEST or taken not in (None, found) or any(x.startswith(name) for x in home.paths()):
            raise InputError(
                f"{name!r} is taken; take a name that is no run's, no beginning of one and not `latest`."
            )
    _change(home, found, name=name)


@command_runs.command("tag")
@run_argument("run")
@click.argument("tags", nargs=-1, required=True, metavar="TAG...")
@click.option("--remove", "removing", is_flag=True, help="Take these away.")
def tag_run(run: str, tags: tuple[str, ...], removing: bool) -> None:
    """Add tags to RUN; `kernelmark runs --tag TAG` lists by them."""
    home = Home()
    for tag in tags:
        checked_run(tag)
    found = _run(home, run)
    before = labels.read(home.folder).get(found, labels.NOTHING).tags
    after = [x for x in before if x not in tags] + ([] if removing else list(tags))
    _change(home, found, tags=tuple(after))


@command_runs.command("note")
@run_argument("run")
@click.argument("text", required=False)
def note_run(run: str, text: str | None) -> None:
    """Note TEXT beside RUN; without TEXT take the note away."""
    home = Home()
    _change(home, _run(home, run), note=text)


@command_runs.command("delete")
@run_argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--yes", is_flag=True, help="Do not ask.")
def delete_runs(runs: tuple[str, ...], yes: bool) -> None:
    """Delete runs from the home: journal, shards, report, log, scratch folder and label.

    What the registry has of them stays there.
    """
    home = Home()
    found = list(dict.fromkeys(_run(home, x) for x in runs))
    files = [path for run in found for path in remove.files_of(home, run)]
    if not yes:
        for path in files:
            click.echo(str(path))
        click.confirm(f"Delete {', '.join(found)}?", abort=True, err=True)
    for run in found:
        remove.remove(home, run)
        click.echo(f"{run}: deleted")


def _run(home: Home, run: str) -> str:
    """The name of a run of this home. Raises `InputError` for a journal elsewhere."""
    path = home.find(run)
    found = next((name for name, x in home.paths().items() if x == path), None)
    if found is None:
        raise InputError(f"{path} is no run of {home.folder}; name a run that `kernelmark runs` lists.")
    return found


def _change(home: Home, run: str, **fields: Any) -> None:
    after = labels.change(home.folder, run, **fields)
    told = [after.name and f"name {after.name}", after.tags and f"tags {' '.join(after.tags)}", after.note]
    click.echo(f"{run}: {', '.join(x for x in told if x) or 'no name, tags or note'}")
