"""The site's memory: which journals were read, and their facts. One SQLite file in the site's folder.

It is what makes a site grow by a day's journals in seconds. All of it can be made again from the journals; one of
another layout is made anew.
"""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from ..errors import InputError
from .facts import Fact, Run

LAYOUT = 3
"""Raised when the tables or what is in them change."""

_TABLES = (
    "CREATE TABLE seen (digest TEXT PRIMARY KEY)",
    "CREATE TABLE runs (name TEXT PRIMARY KEY, about BLOB)",
    "CREATE TABLE facts (run TEXT, operator TEXT, fact BLOB)",
    "CREATE INDEX facts_by_run ON facts (run)",
    "CREATE TABLE remembered (what TEXT PRIMARY KEY, inputs TEXT, answer BLOB)",
)
_run_decoder = msgspec.msgpack.Decoder(Run)
_fact_decoder = msgspec.msgpack.Decoder(Fact)
_encode = msgspec.msgpack.Encoder().encode


class Ledger:
    """The open file. `fresh` is True where nothing was remembered."""

    def __init__(self, path: Path) -> None:
        try:
            self._connection = sqlite3.connect(path, timeout=30)
            weakref.finalize(self, self._connection.close)
            self.fresh = self._connection.execute("PRAGMA user_version").fetchone()[0] != LAYOUT
        except sqlite3.Error as error:
            raise InputError(
                f"{path} cannot be used: {error}. Remove it: it is made again from journals."
            ) from None
        if self.fresh:
            self._clear()

    def _clear(self) -> None:
        with self._connection as transaction:
            for (name,) in transaction.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                transaction.execute(f'DROP TABLE "{name}"')
            for statement in _TABLES:
                transaction.execute(statement)
            transaction.execute(f"PRAGMA user_version = {LAYOUT}")

    def seen(self) -> set[str]:
        """Digests of the journals that were read."""
        return {digest for (digest,) in self._connection.execute("SELECT digest FROM seen")}

    def counts(self, run: Run) -> bool:
        """Whether this journal counts: of two of one run it is the one with more."""
        known = self._connection.execute("SELECT about FROM runs WHERE name = ?", (run.name,)).fetchone()
        if known is None:
            return True
        other = _run_decoder.decode(known[0])
        return (other.timed, other.rows) <= (run.timed, run.rows)

    def take_in(self, digests: Iterable[str], run: Run, found: Iterable[Fact]) -> None:
        """Counts a journal as read, by its own digest and that of its copy in the site, and keeps its facts if it
        is the one that counts: all of that or nothing.
        """
        with self._connection as transaction:
            transaction.executemany("INSERT OR IGNORE INTO seen VALUES (?)", [(x,) for x in digests])
            if not self.counts(run):
                return
            transaction.execute("DELETE FROM facts WHERE run = ?", (run.name,))
            transaction.execute("INSERT OR REPLACE INTO runs VALUES (?,?)", (run.name, _encode(run)))
            transaction.executemany(
                "INSERT INTO facts VALUES (?,?,?)", [(run.name, x.operator, _encode(x)) for x in found]
            )

    def runs(self) -> list[Run]:
        """All runs."""
        return [_run_decoder.decode(about) for (about,) in self._connection.execute("SELECT about FROM runs")]

    def facts(self) -> Iterator[tuple[str, Fact]]:
        """All facts with their runs' names."""
        for run, fact in self._connection.execute("SELECT run, fact FROM facts ORDER BY rowid"):
            yield run, _fact_decoder.decode(fact)

    def remembered(self, what: str, inputs: str) -> bytes | None:
        """An answer that was computed from the same inputs."""
        row = self._connection.execute(
            "SELECT answer FROM remembered WHERE what = ? AND inputs = ?", (what, inputs)
        ).fetchone()
        return row[0] if row else None

    def remember(self, answers: Iterable[tuple[str, str, bytes]]) -> None:
        """Keeps answers, each in place of the one to the same question: what, from which inputs, the answer."""
        with self._connection as transaction:
            transaction.executemany("INSERT OR REPLACE INTO remembered VALUES (?,?,?)", list(answers))
