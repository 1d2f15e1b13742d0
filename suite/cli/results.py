"""Where a run's results go: folder, table, report, registry. Shared by all commands that measure."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from importlib.util import find_spec

import click

from ...registry.errors import InputError
from ...registry.figures import counted
from ...registry.store.home import Home
from ...registry.store.journal import Journal
from . import mute


def writable(home: Home) -> None:
    """Raises `InputError` if no results can be written there."""
    try:
        home.journals.mkdir(parents=True, exist_ok=True)
        probe = home.journals / f".probe-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"results cannot be written to {home.folder}: {error.strerror}. "
            f"Choose another folder with --output or KERNELMARK_HOME."
        ) from None


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
    """Shows something; a reader that went away, or a full disk behind the output, is no failure of the run."""
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
    except InputError as error:  # no page is no reason to lose the rest
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
        tell(f"registry  {counted(x.created, 'row')} recorded{look}")
