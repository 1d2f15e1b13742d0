"""Where a run's results go: folder, table, report, registry. Shared by all commands that measure."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import click

from ...registry.errors import KernelmarkError, unwritable
from ...registry.figures import counted
from ...registry.store.home import Home
from ...registry.store.journal import Journal
from . import mute


def writable(home: Home) -> None:
    """Raises `KernelmarkError` if no results can be written there."""
    try:
        home.journals.mkdir(parents=True, exist_ok=True)
        probe = home.journals / f".probe-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        instead = "Choose another folder with --output or KERNELMARK_HOME."
        raise unwritable(f"results cannot be written to {home.folder}", error, instead) from None


def writable_file(target: Path, option: str) -> Path:
    """The whole path of a file that is written at the end of what may run for hours, wherever a program changed
    directory to by then. Raises `KernelmarkError` where no file can be written there.
    """
    path = Path(os.path.realpath(target))  # of a link its target, so that no link is deleted below
    there = path.exists()
    if path.is_file() or not there:
        try:
            path.open("a").close()
            if not there:
                path.unlink()
        except OSError as error:
            raise unwritable(f"{target} cannot be written", error, f"Name another file with {option}.") from None
    return path


def put(path: Path, text: str) -> None:
    """Writes a file whole or not at all: a full disk leaves the old one. Into what is no file, as a pipe, it is
    written as it comes. Raises `OSError`.
    """
    from ...registry.store.transfer import write_whole

    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
    else:
        write_whole(path.resolve(), text.encode())


def present(journal: Journal, home: Home, report: bool) -> None:
    """After a run: the table, how time was spent, the report, the registry.

    Where the output cannot be written all else is done the same.
    """
    from ...registry.views.table import show
    from ...registry.views.tables import run_table

    heard(lambda: show(run_table(journal)))
    tell(f"run       {journal.header.run}")
    tell(f"journal   {journal.path}")
    if report:
        _report(journal, home)
    _record(journal, home)


def heard(show: Callable[[], object]) -> None:
    """Shows something; a full disk behind the output is no failure of the run."""
    try:
        show()
        sys.stdout.flush()
    except OSError:
        mute()


def tell(line: str, err: bool = False) -> None:
    """A line, heard or not."""
    heard(lambda: click.echo(line, err=err))


def _report(journal: Journal, home: Home) -> None:
    from .report import write_report

    try:
        tell(f"report    {write_report([journal], home)}")
    except KernelmarkError as error:  # no page is no reason to lose the rest
        tell(f"report    not written: {error}")


def _record(journal: Journal, home: Home) -> None:
    """Into the registry, where there is one; the journal is safe either way."""
    if find_spec("mlflow") is None:
        tell("registry  not filled: MLflow is not installed here; import the journal where it is")
        return
    from ...registry.tracking.store import StoreError
    from .transfer import fill

    try:
        done = fill(home, [journal.header.run])
    except StoreError as error:
        tell(f"registry  not filled: {error}", err=True)
        return
    look = "; look with: kernelmark ui" if any(x.status == "ok" for x in journal.records) else ""
    for x in done.ingested:
        # Of a run that was gone on with, or whose shards come one by one, rows are there already.
        updated = f", {x.updated} updated" if x.updated else ""
        tell(f"registry  {counted(x.created, 'row')} recorded{updated}{look}")
    for said in done.unreadable.values():
        tell(f"registry  not filled: {said}", err=True)
