"""All formats of others that can be read, and how their files come into a home."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import InputError, short, unknown
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
    "asv": "asv",
    "hyperfine": "hyperfine",
    "tritonbench": "tritonbench",
    "flashinfer-bench": "flashinfer_bench",
    "vllm-bench": "vllm_bench",
    "guidellm": "guidellm",
    "aiperf": "aiperf",
}
"""Name for users → module here."""


LARGEST = 256 << 20


def read(name: str, path: Path) -> tuple[list[Results], bytes]:
    """A file of a format, by device where it has several, and its bytes. Raises `InputError` with the place."""
    if name not in FORMATS:
        raise unknown("format", name, list(FORMATS))
    try:
        with open(path, "rb") as file:
            raw = file.read(LARGEST + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if len(raw) > LARGEST:
        raise InputError(f"{path}: more than {LARGEST >> 20} MiB are no file of results")
    module: Any = importlib.import_module(f".{FORMATS[name]}", __package__)
    found: Results | list[Results] = module.read(raw, path)
    results = found if isinstance(found, list) else [found]
    if not any(x.benchmarks for x in results):
        raise InputError(f"{path.name}: no benchmark in it")
    return results, raw


def made(name: str, paths: Sequence[Path], commit: str | None = None) -> list[Journal]:
    """The journals of these files, each from a process of its own: one, or one a device."""
    files = [read(name, path) for path in paths]
    # Go's text has no date; the file's is the next best, and the same whenever it is asked for.
    oldest = min(os.stat(path).st_mtime for path in paths)
    created = datetime.fromtimestamp(oldest, UTC).isoformat(timespec="seconds")
    parts: dict[str, list[tuple[Results, bytes]]] = {}
    for found, raw in files:
        for results in found:
            parts.setdefault(results.part, []).append((results, raw))
    return [journal(part, created, commit) for part in parts.values()]


def take_in(name: str, paths: Sequence[Path], home: Home, commit: str | None = None) -> list[str]:
    """Imports files as one run, or one a device, and returns their names; twice the same files are one run."""
    out = []
    with tempfile.TemporaryDirectory() as folder:
        for run in made(name, paths, commit):
            lines: list[Line] = [run.header, *run.records, *run.footers]
            path = Path(folder) / f"{run.header.run}.jsonl"
            path.write_bytes(b"".join(encode(x) for x in lines))
            try:
                out.append(import_journal(path, home))
            except InputError as error:
                raise InputError(_of_the_files(str(error), path, paths, run)) from None
    return out


def _of_the_files(said: str, path: Path, paths: Sequence[Path], run: Journal) -> str:
    """What is said of the journal that was made of files, as of these: nobody has seen that one, nor its lines."""
    files = ", ".join(x.name for x in paths)
    if (found := re.match(rf"{re.escape(str(path))}: line (\d+): ", said)) is None:
        return said.replace(str(path), files)
    number = int(found[1]) - 2  # a header comes before the records
    of = f"benchmark {short(run.records[number].case.full_name)}: " if 0 <= number < len(run.records) else ""
    return f"{files}: {of}{said[found.end() :]}"
