"""Deleting a run from a home: its journal and what was made of it there."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import filelock

from ..errors import InputError, unwritable
from . import labels
from .home import Home
from .shards import shards_of


def files_of(home: Home, run: str) -> list[Path]:
    """What is there of a run: journal, shards, report, logs, and the folders that it would go on from.

    What was delivered of its shards is among them: it would be taken in again.
    """
    path = home.paths().get(run)
    shards = shards_of(home, run)
    places = [
        *([path] if path else []),
        *shards,
        home.reports / f"{run}.html",
        home.logs / f"{run}.log",
        *(home.logs / f"{x.stem}.log" for x in shards),
    ]
    scratch = [home.scratch / x for x in (run, *(y.stem for y in shards))] + [home.fleet / run]
    return [*(x for x in places if x.is_file()), *(x for x in scratch if x.is_dir())]


def remove(home: Home, run: str) -> None:
    """Deletes them, and the run's label. Raises `InputError` for a run of which anything is being measured."""
    # A shard that has only just begun has its lock, and no journal yet.
    locks = {x.with_suffix(".lock") for x in (home.journal(run), *shards_of(home, run))}
    locks |= set(home.shards.glob(f"{run}.*-of-*.lock"))
    if (driven := home.fleet / run).is_dir():
        locks.add(driven / "driver.lock")  # who drives it holds this
    try:
        if home.journals.is_dir():
            with contextlib.ExitStack() as held:
                for lock in sorted(locks):
                    held.enter_context(filelock.FileLock(lock, timeout=0))
                for path in files_of(home, run):
                    if path.is_dir():
                        shutil.rmtree(path)
                    else:
                        path.unlink(missing_ok=True)
                for lock in locks:
                    lock.unlink(missing_ok=True)
    except filelock.Timeout:
        raise InputError(f"run {run} is being measured; end that first.") from None
    except OSError as error:
        what = f"run {run} cannot be deleted from {home.folder}"
        raise unwritable(what, error, "Delete it as a user who may write there.") from None
    if run in labels.read(home.folder):
        labels.change(home.folder, run, name=None, tags=(), note=None)
