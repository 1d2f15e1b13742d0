"""`kernelmark export`, `import` and `sync`: journals between machines, and into the registry."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...registry.errors import InputError
from ...registry.figures import counted
from ...registry.importers.formats import FORMATS
from ...registry.store import transfer
from ...registry.store.home import Home
from ...registry.store.shards import few
from .names import run_argument

if TYPE_CHECKING:
    from ...registry.tracking.store import Synced


@click.command("export")
@run_argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("."),
    help="A folder, or for one run a file named .jsonl or .jsonl.gz. Default: here.",
)
@click.option("--force", is_flag=True, help="Replace a file that holds something else.")
def command_export(runs: tuple[str, ...], output: Path, force: bool) -> None:
    """Copy journals out, for another machine.

    RUN is a run's name, the beginning of one, or `latest`.
    """
    for path in transfer.export(Home(), runs, output, force=force):
        click.echo(str(path))


@click.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option(
    "--format",
    "form",
    type=click.Choice(["journal", *FORMATS]),
    default="journal",
    show_default=True,
    help="What wrote the files. Other tools' files become runs, a file a run.",
)
@click.option(
    "--one-run",
    is_flag=True,
    help="Other tools' files: each is a process of one and the same run. Five processes make a run that counts.",
)
@click.option("--commit", metavar="HASH", help="Other tools' files: the commit that was measured, in full.")
@click.option("--json", "as_json", is_flag=True, help="For machines: one object a file, on one line each.")
@click.option("--no-sync", is_flag=True, help="Only take the journal in; `kernelmark sync` records it later.")
def command_import(
    files: tuple[Path, ...], form: str, one_run: bool, commit: str | None, as_json: bool, no_sync: bool
) -> None:
    """Take journals in, plain or compressed, and record them in the registry.

    A file that cannot be taken in is named at the end, and is in no other's way. A registry that cannot be reached
    is no failure here: the journal is in, and `kernelmark sync` follows.
    """
    home = Home()
    runs: list[str] = []
    refused: list[str] = []
    for taken in _taking(form, files, home, one_run, commit):
        try:
            for run in taken():
                runs.append(run)
                _taken_in(run, home, as_json)
        except InputError as error:
            refused.append(str(error))
    if refused and not runs:
        raise InputError("\n".join(dict.fromkeys(refused)))
    links: dict[str, str] = {}
    note = None if runs and not no_sync else "not recorded in the registry yet: kernelmark sync"
    if not no_sync:
        from ...registry.tracking.store import StoreError

        try:
            done = fill(home, runs)
            links = {x.run: x.deep_link for x in done.ingested}
            if done.unreadable:
                note = "\n".join(["not recorded:", *done.unreadable.values()])
        except StoreError as error:
            note = str(error)
    if as_json:
        for run in runs:
            said = {"run": run, "journal": str(home.find(run)), "recorded": run in links}
            click.echo(json.dumps(said | {"link": links.get(run), "note": None if run in links else note}))
    elif links:
        click.echo(f"recorded in the registry: {counted(len(links), 'run')}; look with: kernelmark ui")
    if note and len(links) < len(runs):
        click.echo(note, err=True)
    if refused:
        raise InputError("\n".join(["not imported:", *dict.fromkeys(refused)]))


def _taken_in(run: str, home: Home, quiet: bool) -> None:
    """Says what is in, as soon as it is: table and report read the journal and wait for no registry."""
    if quiet:
        return
    journal = home.load(run)
    count = len({x.identity for x in journal.records})
    click.echo(f"{run}: imported, {counted(count, 'row')}; look with: kernelmark show {run}")
    if missing := journal.header.request.missing:
        click.echo(f"{run}: not here yet: shards {few(missing)}")


def fill(home: Home, runs: Sequence[str]) -> Synced:
    """Fills the registry and shows how far it is."""
    from ...registry.tracking.store import Step, sync
    from ..run.progress import Tally

    tally = Tally("recording in the registry")
    if sys.stderr.isatty():
        click.echo("opening the registry, which takes some seconds …", err=True)

    def show(step: Step) -> None:
        tally.show(f"{step.run}, {step.rows} of {step.of} rows", step.fraction)

    try:
        return sync(home, runs, progress=show)
    finally:
        tally.close()


def _taking(
    form: str, files: tuple[Path, ...], home: Home, one_run: bool, commit: str | None
) -> list[Callable[[], list[str]]]:
    """What takes in each file, or all of `one_run`, and gives the runs. Raises `InputError` for wrong options."""
    if form == "journal":
        if one_run or commit:
            raise InputError("--one-run and --commit are for other tools' files; a journal says both itself.")
        return [lambda file=file: [transfer.import_journal(file, home)] for file in files]  # type: ignore[misc]
    from ...registry.importers.formats import take_in
    from ...registry.importers.results import hexadecimal

    if commit is not None and hexadecimal(commit) is None:
        raise InputError(f"--commit {commit!r} is no whole git hash: 40 or 64 digits, as `git rev-parse` prints.")
    groups = [files] if one_run else [(x,) for x in files]
    return [lambda group=group: take_in(form, group, home, commit) for group in groups]  # type: ignore[misc]


@click.command("sync")
@run_argument("runs", nargs=-1, metavar="[RUN...]")
@click.option("--json", "as_json", is_flag=True, help="For machines: one object.")
def command_sync(runs: tuple[str, ...], as_json: bool) -> None:
    """Record in the registry what is not there yet.

    Without RUN, every run of the home that the registry does not hold whole. A RUN that is named is gone
    through row by row in any case. Nothing is ever recorded twice.
    """
    done = fill(Home(), runs)
    if as_json:
        synced = [
            {"run": x.run, "created": x.created, "updated": x.updated, "skipped": x.skipped, "link": x.deep_link}
            for x in done.ingested
        ]
        click.echo(json.dumps({"synced": synced, "complete": done.complete, "unreadable": dict(done.unreadable)}))
    else:
        for x in done.ingested:
            click.echo(
                f"{x.run}: {counted(x.created, 'row')} recorded, {x.updated} updated, {x.skipped} already there"
            )
        if done.complete:
            click.echo(f"complete already: {counted(len(done.complete), 'run')}")
    if done.unreadable:
        raise InputError("\n".join(["not recorded:", *done.unreadable.values()]))
