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
from ..store.index import connected
from .facts import Fact, Run

LAYOUT = 7
"""Raised when the tables or what is in them change."""
DRAWN = 500
"""Newest runs of a row that pages are made of: older ones are in `rows.csv` and on their runs' pages."""
EXPORTED = "exported"
"""What is remembered of the rows that lie beside the pages: it holds as long as no row was replaced."""

_TABLES = (
    "CREATE TABLE seen (digest TEXT PRIMARY KEY)",
    "CREATE TABLE runs (name TEXT PRIMARY KEY, about BLOB)",
    "CREATE TABLE rows (id INTEGER PRIMARY KEY, name TEXT UNIQUE)",
    "CREATE TABLE facts (id INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT, row INTEGER, created TEXT, fact BLOB)",
    "CREATE INDEX facts_by_run ON facts (run)",
    "CREATE INDEX facts_by_row ON facts (row, created)",
    "CREATE TABLE remembered (what TEXT PRIMARY KEY, inputs TEXT, answer BLOB)",
)
_NEWEST = """
SELECT facts.run, facts.fact FROM rows CROSS JOIN facts ON facts.row = rows.id AND facts.created >= coalesce(
    (SELECT created FROM facts WHERE row = rows.id ORDER BY created DESC LIMIT 1 OFFSET ?), '')
"""
_run_decoder = msgspec.msgpack.Decoder(Run)
_fact_decoder = msgspec.msgpack.Decoder(Fact)
_encode = msgspec.msgpack.Encoder().encode


def _size(run: Run) -> tuple[int, bool]:
    return run.records, run.complete


class Ledger:
    """The open file. `fresh` is True where nothing was remembered."""

    def __init__(self, path: Path) -> None:
        try:
            self._connection = connected(path)
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
            # SQLite's own, which counts ids, may not be dropped; what it counts goes with its table.
            own = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
            for (name,) in transaction.execute(own).fetchall():
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
        # By records: where a later process was wrong a journal that went on has fewer values than before.
        return _size(other) <= _size(run)

    def take_in(self, digests: Iterable[str], run: Run, found: Iterable[Fact]) -> None:
        """Counts a journal as read, by its own digest and that of its copy in the site, and keeps its facts if it
        is the one that counts: all of that or nothing.
        """
        with self._connection as transaction:
            transaction.executemany("INSERT OR IGNORE INTO seen VALUES (?)", [(x,) for x in digests])
            if not self.counts(run):
                return
            if transaction.execute("DELETE FROM facts WHERE run = ?", (run.name,)).rowcount:
                transaction.execute("DELETE FROM remembered WHERE what = ?", (EXPORTED,))
            transaction.execute("INSERT OR REPLACE INTO runs VALUES (?,?)", (run.name, _encode(run)))
            named = [("\n".join((run.device, *msgspec.structs.astuple(x.identity))), x) for x in found]
            transaction.executemany("INSERT OR IGNORE INTO rows (name) VALUES (?)", [(name,) for name, _ in named])
            transaction.executemany(
                "INSERT INTO facts (run, row, created, fact) SELECT ?, id, ?, ? FROM rows WHERE name = ?",
                [(run.name, run.created, _encode(x), name) for name, x in named],
            )

    def runs(self) -> list[Run]:
        """All runs."""
        return [_run_decoder.decode(about) for (about,) in self._connection.execute("SELECT about FROM runs")]

    def newest(self) -> Iterator[tuple[str, Fact]]:
        """Facts with their runs' names: of each row on each device those of its newest runs."""
        for run, fact in self._connection.execute(_NEWEST, (DRAWN - 1,)):
            yield run, _fact_decoder.decode(fact)

    def of_run(self, name: str) -> list[Fact]:
        """All facts of a run, in order."""
        found = self._connection.execute("SELECT fact FROM facts WHERE run = ? ORDER BY id", (name,))
        return [_fact_decoder.decode(fact) for (fact,) in found]

    def after(self, place: int) -> Iterator[tuple[int, str, Fact]]:
        """Facts that were taken in after a place, in that order: each with its own place and its run's name."""
        found = self._connection.execute("SELECT id, run, fact FROM facts WHERE id > ? ORDER BY id", (place,))
        for number, run, fact in found:
            yield number, run, _fact_decoder.decode(fact)

    def state(self, names: Iterable[str]) -> str:
        """What tells the facts of these runs, in this order, from any others that were taken in for them."""
        newest = "SELECT max(id) FROM facts WHERE run = ?"
        return "\n".join(f"{x} {self._connection.execute(newest, (x,)).fetchone()[0]}" for x in names)

    def count(self) -> int:
        """How many facts there are."""
        (found,) = self._connection.execute("SELECT count(*) FROM facts").fetchone()
        return int(found)

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
