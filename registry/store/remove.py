"""Deleting a run from a home: its journal and what was made of it there."""

from __future__ import annotations

from pathlib import Path

import filelock

from ..errors import HarnessError, InputError
from . import labels
from .home import Home
from .shards import shards_of


def files_of(home: Home, run: str) -> list[Path]:
    """The files of a run that are there: journal, shards, report, logs."""
    path = home.paths().get(run)
    shards = shards_of(home, run)
    places = [
        *([path] if path else []),
        *shards,
        home.reports / f"{run}.html",
        home.logs / f"{run}.log",
        *(home.logs / f"{x.stem}.log" for x in shards),
    ]
    return [x for x in places if x.is_file()]


def remove(home: Home, run: str) -> None:
    """Deletes them, and the run's label. Raises `InputError` for a run that is being measured."""
    lock = home.journal(run).with_suffix(".lock")
    try:
        if home.journals.is_dir():
            with filelock.FileLock(lock, timeout=0):
                for path in files_of(home, run):
                    path.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
    except filelock.Timeout:
        raise InputError(f"run {run} is being measured; end that first.") from None
    except OSError as error:
        raise HarnessError(f"run {run} cannot be deleted: {error.strerror or error}") from None
    if run in labels.read(home.folder):
        labels.change(home.folder, run, name=None, tags=(), note=None)
