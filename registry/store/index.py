"""What a home's journals hold, kept ready: which runs of which commit, their processes' values, the noise seen.

A search must not read 100,000 journals, so each is read once: its header when it is first seen, its values
when they are first asked for. All of that can be made again from the journals at any time; the noise that
comparisons saw cannot, and is only missed as a prior. What both say is for detection to judge. One SQLite file,
`index.db`, beside the journals.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from ..errors import InputError
from .home import Home
from .journal import Journal, read, read_header
from .processes import Processes, process_values
from .record import Header, Key

LAYOUT = 4
"""Raised when the tables change: an index of another layout is made anew."""
NOISE_SINCE = 1
"""The layout from which on the table of noise is as it is now, and stays when the others are made anew."""

_UNWRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL)

Spreads: TypeAlias = Mapping[Key, Sequence[tuple[float, float]]]
"""Variances by row with their degrees of freedom, as comparisons estimated them, oldest first."""

_TABLES = """
CREATE TABLE runs (
    name TEXT PRIMARY KEY, file TEXT, made_of TEXT, dirty INT, key TEXT, device TEXT, created TEXT, plan TEXT,
    replicates INT, stage INT, cases INT, verifies TEXT);
CREATE INDEX runs_by_commit ON runs (made_of);
CREATE INDEX runs_by_key ON runs (key, created);
CREATE INDEX runs_by_verified ON runs (verifies);
CREATE TABLE files (file TEXT PRIMARY KEY, inode INT);
CREATE TABLE sizes (name TEXT PRIMARY KEY, size INT);
CREATE TABLE processes (
    name TEXT, operator TEXT, shape TEXT, implementation TEXT, cache TEXT, provider TEXT, definition TEXT,
    packed BLOB);
CREATE INDEX processes_by_name ON processes (name);
"""
_NOISE = """
CREATE TABLE noise (
    key TEXT, operator TEXT, shape TEXT, implementation TEXT, cache TEXT, age INT, variance REAL, df REAL);
CREATE INDEX noise_by_key ON noise (key);
"""


@dataclass(frozen=True)
class Entry:
    """A run's header in short. `stage` is 0 for a plain run, else that of the comparison it belongs to."""

    name: str
    path: Path
    commit: str | None
    dirty: bool
    key: str
    device: str
    created: str
    plan: str
    replicates: int
    stage: int
    cases: int
    """How many it was asked for; 0 where it does not say."""


def connected(path: Path | str) -> sqlite3.Connection:
    """A database that any thread may close: one whose owner is in a cycle is closed by whichever collects it."""
    return sqlite3.connect(path, timeout=30, check_same_thread=False)


class Index:
    """An open index, brought up to date with the journals that are there."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._connection = self._open()
        weakref.finalize(self, self._connection.close)
        self._refresh()

    def _open(self) -> sqlite3.Connection:
        """The file, or memory where it cannot be written: a home may be read-only."""
        try:
            connection = connected(self.home.folder / "index.db")
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                layout = connection.execute("PRAGMA user_version").fetchone()[0]
                if layout != LAYOUT:
                    _clear(connection, keep_noise=NOISE_SINCE <= layout < LAYOUT)
            return connection
        except sqlite3.Error:
            connection = connected(":memory:")
            _clear(connection)
            return connection

    def _refresh(self) -> None:
        """Takes in the headers of journals that are new, and forgets what is gone.

        A journal that grows keeps its header. One that is another file now may not: that of shards is made anew
        with each of them, and has more cases then.
        """
        try:
            names = {x.name: x.inode() for x in os.scandir(self.home.journals) if ".jsonl" in x.name}
        except FileNotFoundError:
            names = {}
        known = dict(self._connection.execute("SELECT file, inode FROM runs LEFT JOIN files USING (file)"))
        gone = {x for x, inode in known.items() if inode not in (None, names.get(x)) or x not in names}
        new = []
        for file in names.keys() - (known.keys() - gone):
            header = read_header(self.home.journals / file)
            if header is not None:
                facts = (header.commit, header.dirty, header.key, header.device, header.created, header.plan)
                numbers = (header.replicates, header.request.stage, _cases(header))
                new.append((header.run, file, *facts, *numbers, header.request.verifies))

        def take_in(connection: sqlite3.Connection) -> None:
            for file in gone:
                names_of = "SELECT name FROM runs WHERE file = ?"
                connection.execute(f"DELETE FROM sizes WHERE name IN ({names_of})", (file,))
                for table in ("runs", "files"):
                    connection.execute(f"DELETE FROM {table} WHERE file = ?", (file,))
            connection.executemany("INSERT OR REPLACE INTO runs VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", new)
            connection.executemany("INSERT OR REPLACE INTO files VALUES (?,?)", [(x[1], names[x[1]]) for x in new])

        self._write(take_in)

    def _write(self, change: Callable[[sqlite3.Connection], None]) -> None:
        """Makes a change whole or not at all; to a copy in memory where the file can only be read, which SQLite
        says no earlier, or its disk is full.
        """
        try:
            with self._connection:
                change(self._connection)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in _UNWRITABLE:
                raise
            copy = connected(":memory:")
            self._connection.backup(copy)
            self._connection.close()
            self._connection = copy
            weakref.finalize(self, copy.close)
            with copy:
                change(copy)

    def runs(
        self,
        *,
        commit: str | None = None,
        key: str | None = None,
        device: str | None = None,
        plan: str | None = None,
        limit: int = 1000,
    ) -> list[Entry]:
        """Runs of clean trees that match, newest first."""
        wanted = {"made_of": commit, "key": key, "device": device, "plan": plan}
        given = {name: value for name, value in wanted.items() if value is not None}
        where = " AND ".join(["NOT dirty", "made_of IS NOT NULL", *(f"{name} = ?" for name in given)])
        rows = self._connection.execute(
            f"SELECT name, file, made_of, dirty, key, device, created, plan, replicates, stage, cases FROM runs "
            f"WHERE {where} ORDER BY created DESC, name DESC LIMIT ?",
            (*given.values(), limit),
        )
        return [Entry(name, self.home.journals / file, *rest) for name, file, *rest in rows]

    def commits(self, limit: int = 1000) -> list[str]:
        """Commits with runs of clean trees, the one measured last first."""
        rows = self._connection.execute(
            "SELECT made_of FROM runs WHERE NOT dirty AND made_of IS NOT NULL "
            "GROUP BY made_of ORDER BY max(created) DESC LIMIT ?",
            (limit,),
        )
        return [commit for (commit,) in rows]

    def verifying(self, *runs: str) -> list[Journal]:
        """The journals of the runs that verify any of these, oldest first; unreadable ones are left out."""
        found = []
        for run in runs:
            query = "SELECT file FROM runs WHERE verifies = ? ORDER BY created, name"
            for (file,) in self._connection.execute(query, (run,)).fetchall():
                with contextlib.suppress(InputError):
                    found.append(read(self.home.journals / file))
        return found

    def processes(self, entry: Entry) -> dict[Key, Processes]:
        """What a run's processes say of its rows; its journal is read only if it grew since."""
        try:
            size = entry.path.stat().st_size
            known = self._connection.execute("SELECT size FROM sizes WHERE name = ?", (entry.name,)).fetchone()
            if known != (size,):
                self._take_in(entry, read(entry.path), size)
        except (OSError, InputError):  # gone meanwhile, or no journal any more: it says nothing
            return {}
        rows = self._connection.execute(
            "SELECT operator, shape, implementation, cache, packed, provider, definition "
            "FROM processes WHERE name = ?",
            (entry.name,),
        )
        return {Key(*x[:4]): Processes(unpack(x[4]), *x[5:]) for x in rows}

    def _take_in(self, entry: Entry, journal: Journal, size: int) -> None:
        rows = [
            (entry.name, *msgspec.structs.astuple(key), x.provider, x.definition, pack(x.values))
            for key, x in process_values(journal.header, journal.records).items()
        ]

        def take_in(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM processes WHERE name = ?", (entry.name,))
            connection.executemany("INSERT INTO processes VALUES (?,?,?,?,?,?,?,?)", rows)
            connection.execute("INSERT OR REPLACE INTO sizes VALUES (?,?)", (entry.name, size))

        self._write(take_in)

    def spreads(self, key: str) -> Spreads:
        """What earlier comparisons under a comparability key saw."""
        rows = self._connection.execute(
            "SELECT operator, shape, implementation, cache, variance, df FROM noise WHERE key = ? "
            "ORDER BY operator, shape, implementation, cache, age",
            (key,),
        )
        return {Key(*row): [x[4:] for x in found] for row, found in groupby(rows, _row)}

    def keep_spreads(self, key: str, spreads: Spreads) -> None:
        """Puts these in the place of what was kept under a comparability key."""
        rows = [
            (key, *msgspec.structs.astuple(row), age, *spread)
            for row, mine in spreads.items()
            for age, spread in enumerate(mine)
        ]

        def keep(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM noise WHERE key = ?", (key,))
            connection.executemany("INSERT INTO noise VALUES (?,?,?,?,?,?,?,?)", rows)

        self._write(keep)


def pack(values: Sequence[float]) -> bytes:
    """Numbers as the index keeps them."""
    return array("d", values).tobytes()


def unpack(packed: bytes) -> tuple[float, ...]:
    """The numbers again."""
    return tuple(array("d", packed))


def _row(row: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(row[:4])


def _clear(connection: sqlite3.Connection, keep_noise: bool = False) -> None:
    for table in ("runs", "files", "sizes", "means", "processes", *(() if keep_noise else ("noise",))):
        connection.execute(f"DROP TABLE IF EXISTS {table}")
    for statement in _statements(_TABLES if keep_noise else _TABLES + _NOISE):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {LAYOUT}")


def _statements(script: str) -> Iterator[str]:
    """One by one: `executescript` would end the transaction that keeps a second process out."""
    yield from (x for x in script.split(";") if x.strip())


def _cases(header: Header) -> int:
    return len(header.request.cases)


def clean(entries: Iterable[Entry]) -> list[Entry]:
    """Those that hold all that their plan asks for: reruns of what was under suspicion left out."""
    return [x for x in entries if x.stage <= 1]
