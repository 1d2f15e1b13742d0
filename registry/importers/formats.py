"""All formats of others that can be read, and how their files come into a home."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import InputError, unknown
from ..store.home import Home
from ..store.journal import Journal, encode
from ..store.record import Line
from ..store.transfer import import_journal
from .results import Results, journal

FORMATS: Mapping[str, str] = {
    "pytest-benchmark": "pytest_benchmark",
    "google-benchmark": "google_benchmark",
    "nvbench": "nvbench",
    "go": "go_benchmark",
}
"""Name for users → module here."""


def read(name: str, path: Path) -> tuple[Results, bytes]:
    """A file of a format, and its bytes. Raises `InputError` that names line or field."""
    if name not in FORMATS:
        raise unknown("format", name, list(FORMATS))
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    module: Any = importlib.import_module(f".{FORMATS[name]}", __package__)
    results: Results = module.read(raw, path)
    if not results.benchmarks:
        raise InputError(f"{path.name}: no benchmark in it")
    return results, raw


def made(name: str, paths: Sequence[Path], commit: str | None = None) -> Journal:
    """The journal of these files, each from a process of its own."""
    files = [read(name, path) for path in paths]
    # Go's text has no date; the file's is the next best, and the same whenever it is asked for.
    oldest = min(os.stat(path).st_mtime for path in paths)
    return journal(files, datetime.fromtimestamp(oldest, UTC).isoformat(timespec="seconds"), commit)


def take_in(name: str, paths: Sequence[Path], home: Home, commit: str | None = None) -> str:
    """Imports files as one run and returns its name; twice the same files are one run."""
    run = made(name, paths, commit)
    lines: list[Line] = [run.header, *run.records, *run.footers]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{run.header.run}.jsonl"
        path.write_bytes(b"".join(encode(x) for x in lines))
        return import_journal(path, home)
