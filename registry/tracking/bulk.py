"""Many entries at once into MLflow's SQLite file, past its client, which takes many statements for each.

What is written is what the client would write, to the field; a test holds both to each other. It is only done
where the file has the one schema that is known here, by MLflow's own mark of it. Any other file, any server, and
every entry with a name that MLflow might refuse goes through the client.
"""

from __future__ import annotations

import re
import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from .entries import Entry

REVISION = "dc11669786a5"
"""Alembic's mark of the schema that MLflow 3.17.2 makes."""
PATIENCE_S = 30.0
"""How long another writer may hold the file."""
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]*(/[A-Za-z0-9_][A-Za-z0-9_. -]*)*")
_LONGEST = {"key": 250, "tag": 5000, "param": 6000}
"""Less than MLflow takes; what is longer is the client's business."""


@dataclass(frozen=True)
class Found:
    """An MLflow run that is there: its id, status and those of its tags that were asked for."""

    id: str
    status: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Bulk:
    """The tables of one SQLite file, and the experiment in them. `Bulk.open` is the only way to make one."""

    database: Path
    experiment: int
    artifacts: str

    @classmethod
    def open(cls, database: Path, experiment: str) -> Bulk | None:
        """None where the file has another schema than the known one."""
        with closing(sqlite3.connect(database, timeout=PATIENCE_S)) as connection:
            marks = connection.execute("SELECT version_num FROM alembic_version").fetchall()
            if marks != [(REVISION,)]:
                return None
            found = connection.execute(
                "SELECT artifact_location FROM experiments WHERE experiment_id = ?", (int(experiment),)
            ).fetchone()
        return cls(database, int(experiment), found[0]) if found and found[0] else None

    def takes(self, entry: Entry) -> bool:
        """Whether MLflow would take all its names and values as they stand."""
        names = [*entry.tags, *entry.params, *entry.metrics, *entry.curves]
        return (
            all(_KEY.fullmatch(x) and len(x) <= _LONGEST["key"] and ".." not in x for x in names)
            and 0 < len(entry.name) <= _LONGEST["key"]
            and all(len(x) <= _LONGEST["tag"] for x in entry.tags.values())
            and all(0 < len(x) <= _LONGEST["param"] for x in entry.params.values())
        )

    def create(self, entries: Sequence[tuple[Entry, Mapping[str, str]]]) -> None:
        """Writes entries, each with further tags, finished, in one transaction: all of them or none."""
        runs, tags, params, metrics, latest = [], [], [], [], []
        for entry, own in entries:
            run = uuid.uuid4().hex
            status = "FAILED" if entry.failed else "FINISHED"
            place = f"{self.artifacts}/{run}/artifacts"
            runs.append((run, entry.name, status, entry.start_ms, entry.end_ms, place, self.experiment))
            tags += [(x, y, run) for x, y in {**entry.tags, **own, "mlflow.runName": entry.name}.items()]
            params += [(x, y, run) for x, y in entry.params.items()]
            for name, points in _points(entry):
                metrics += [(name, value, entry.start_ms, run, step) for step, value in points]
                step, value = max(points)
                latest.append((name, value, entry.start_ms, step, run))
        with self._connected() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(
                "INSERT INTO runs (run_uuid, name, source_type, source_name, entry_point_name, user_id, status, "
                "start_time, end_time, source_version, lifecycle_stage, artifact_uri, experiment_id) "
                "VALUES (?, ?, 'UNKNOWN', '', '', 'unknown', ?, ?, ?, '', 'active', ?, ?)",
                runs,
            )
            connection.executemany("INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)", tags)
            connection.executemany("INSERT INTO params (key, value, run_uuid) VALUES (?, ?, ?)", params)
            connection.executemany(
                "INSERT OR IGNORE INTO metrics (key, value, timestamp, run_uuid, step, is_nan) "
                "VALUES (?, ?, ?, ?, ?, 0)",
                metrics,
            )
            connection.executemany(
                "INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) "
                "VALUES (?, ?, ?, ?, 0, ?)",
                latest,
            )

    def of_run(self, run: str, names: Sequence[str]) -> list[Found]:
        """The MLflow runs of one of our runs that are not deleted, with the tags of these names."""
        with self._connected() as connection:
            rows = connection.execute(
                "SELECT r.run_uuid, r.status, t.key, t.value FROM tags i "
                "JOIN runs r ON r.run_uuid = i.run_uuid "
                f"LEFT JOIN tags t ON t.run_uuid = r.run_uuid AND t.key IN ({', '.join('?' * len(names))}) "
                "WHERE i.key = 'invocation' AND i.value = ? AND r.lifecycle_stage = 'active' "
                "AND r.experiment_id = ?",
                (*names, run, self.experiment),
            ).fetchall()
        found: dict[str, tuple[str, dict[str, str]]] = {}
        for run_id, status, name, value in rows:
            tags = found.setdefault(run_id, (status, {}))[1]
            if name is not None:
                tags[name] = value
        return [Found(run_id, status, tags) for run_id, (status, tags) in found.items()]

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.database, timeout=PATIENCE_S, isolation_level=None)) as connection:
            yield connection


def _points(entry: Entry) -> Iterator[tuple[str, Sequence[tuple[int, float]]]]:
    """Metrics and curves alike: name, and value by step."""
    yield from ((name, [(0, value)]) for name, value in entry.metrics.items())
    yield from ((name, points) for name, points in entry.curves.items() if points)
