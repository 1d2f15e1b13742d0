"""All rows beside the site, for other tools: `rows.csv`, and `rows.parquet` where pyarrow is installed.

Rows stand in the order in which they were taken in: a day's are put behind those that are there.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..escape import CONTROL
from .timeline import Measured

DANGEROUS = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for a formula at the beginning of a text."""

FLAGS, COUNTS = ("dirty", "throttled"), ("processes",)
NUMBERS = frozenset(
    [
        "value",
        "low",
        "high",
        "limit",
        "fraction_of_limit",
        "speedup_vs_best_baseline",
        "speedup_low",
        "speedup_high",
    ]
)
"""Columns of `rows.parquet` by their type. A metric's column, whose heading has a space, is of numbers; others are
of texts. Values do not say it: a column may be empty for days before its first one.
"""

CHUNK = 1 << 24
"""Bytes of `rows.csv` that are rewritten at a time."""

Table = Mapping[str, Sequence[Any]]
Metrics = dict[str, tuple[str, str]]
"""Metrics that have a column: name and unit by heading."""
Numbered = tuple[int, Measured]
"""A row and its place in the order in which rows were taken in."""


class Exported(msgspec.Struct, frozen=True):
    """What lies beside the pages: rows up to which place, the bytes of `rows.csv`, and the metrics' columns."""

    rows: int
    last: int
    size: int
    metrics: Metrics


def export(
    folder: Path, known: Exported | None, after: Callable[[int], Iterable[Numbered]]
) -> tuple[Exported, bool]:
    """Puts rows behind those that are there, or writes all where there are none. A new metric takes a column
    behind the others, which is empty in the rows before.

    `after` gives the rows after a place. Returns what is there now, and whether `rows.parquet` is.
    """
    csv_path, parquet_path = folder / "rows.csv", folder / "rows.parquet"
    begun = known if known is not None and _there(csv_path, parquet_path, known) else Exported(0, 0, 0, {})
    new = list(after(begun.last))
    if not new:
        return begun, parquet_path.exists()
    metrics = begun.metrics | _metrics(new)
    columns = table([x for _, x in new], metrics)
    size = begun.size
    if size and len(metrics) > len(begun.metrics):
        size = widen(csv_path, size, columns, len(metrics) - len(begun.metrics))
    size = write_csv(columns, csv_path, size)
    exported = Exported(begun.rows + len(new), new[-1][0], size, metrics)
    return exported, write_parquet(columns, parquet_path, append=begun.rows > 0)


def _there(csv_path: Path, parquet_path: Path, known: Exported) -> bool:
    """Whether both files hold what they are said to. More, of a build that was killed, is written over."""
    if not csv_path.exists() or csv_path.stat().st_size < known.size:
        return False
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        return not parquet_path.exists()
    try:
        return bool(parquet.read_metadata(parquet_path).num_rows == known.rows)
    except (OSError, ArrowException):
        return False


def _metrics(found: Iterable[Numbered]) -> Metrics:
    return {f"{name} {unit}": (name, unit) for _, (_, x) in found for name, (_, _, _, unit) in x.metrics.items()}


def table(measured: Sequence[Measured], metrics: Metrics) -> Table:
    """Columns by name, a value a row. The primary metric's value stands in `value`, every metric's in a column of
    its own too, named after it and its unit.
    """
    numbers = [x.number or (None, None, None, None) for _, x in measured]
    out: dict[str, Sequence[Any]] = {
        "device": [x.device for x, _ in measured],
        "run": [x.name for x, _ in measured],
        "created": [x.created for x, _ in measured],
        "commit": [x.commit for x, _ in measured],
        "dirty": [x.dirty for x, _ in measured],
        "plan": [x.plan for x, _ in measured],
        "comparability_key": [x.key for x, _ in measured],
        "row_key": [x.key for _, x in measured],
        "operator": [x.operator for _, x in measured],
        "case": [x.case for _, x in measured],
        "pass": [x.pass_ for _, x in measured],
        "dtype": [x.dtype for _, x in measured],
        "cache": [x.cache for _, x in measured],
        "implementation": [x.implementation for _, x in measured],
        "provider": [x.provider for _, x in measured],
        "version": [x.version for _, x in measured],
        "status": [x.status for _, x in measured],
        "reason": [x.reason for _, x in measured],
        "metric": [x.primary for _, x in measured],
        "unit": [x[3] for x in numbers],
        "better": [x.better for _, x in measured],
        "value": [x[0] for x in numbers],
        "low": [x.interval[0] for _, x in measured],
        "high": [x.interval[1] for _, x in measured],
        "processes": [x.processes for _, x in measured],
        "limit": [x.limit for _, x in measured],
        "fraction_of_limit": [x.fraction for _, x in measured],
        "speedup_vs_best_baseline": [x.speedup for _, x in measured],
        "speedup_low": [x.speedup_low for _, x in measured],
        "speedup_high": [x.speedup_high for _, x in measured],
        "best_baseline": [x.best for _, x in measured],
        "throttled": [x.throttled for _, x in measured],
        "journal": [f"journals/{x.file}.jsonl.gz" for x, _ in measured],
        "lines": [" ".join(map(str, x.lines)) for _, x in measured],
    }
    nothing = (None, None, None, None)
    for heading, (name, unit) in metrics.items():
        found = [x.metrics.get(name, nothing) for _, x in measured]
        out[heading] = [x[0] if x[3] == unit else None for x in found]
    return out


def write_csv(columns: Table, path: Path, size: int = 0) -> int:
    """Writes `rows.csv`, or behind its first `size` bytes. A text that a spreadsheet would take for a formula gets
    an apostrophe before it. Returns how many bytes the file has.
    """
    with open(path, "r+b" if size else "wb") as raw:
        raw.truncate(size)
        raw.seek(size)
        with io.TextIOWrapper(raw, encoding="utf-8", errors="replace", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if not size:
                writer.writerow(columns)
            writer.writerows(zip(*(_harmless(x) for x in columns.values()), strict=True))
    return path.stat().st_size


def widen(path: Path, size: int, columns: Table, count: int) -> int:
    """Gives the rows in the first `size` bytes of `rows.csv` so many empty columns more, under the headings of
    `columns`. Returns how many bytes the file has.
    """
    whole, headings = path.with_suffix(".new"), list(columns)
    before = len(_line(headings[:-count]))
    with open(path, "rb") as old, open(whole, "wb") as new:
        new.write(_line(headings))
        old.seek(before)
        left, quoted = size - before, False
        while left and (chunk := old.read(min(left, CHUNK))):
            left -= len(chunk)
            # Between an odd quote and the next one a line's end is part of a text.
            parts = chunk.split(b'"')
            for i, part in enumerate(parts):
                quoted ^= i > 0
                parts[i] = part if quoted else part.replace(b"\n", b"," * count + b"\n")
            new.write(b'"'.join(parts))
    os.replace(whole, path)
    return path.stat().st_size


def _line(texts: Sequence[str]) -> bytes:
    line = io.StringIO(newline="")
    csv.writer(line, lineterminator="\n").writerow(texts)
    return line.getvalue().encode(errors="replace")


def _harmless(values: Sequence[Any]) -> Sequence[Any]:
    """A column's texts; few are distinct, so each is looked at once."""
    texts = {x for x in values if isinstance(x, str)}
    changed = {x: f"'{x}" for x in texts if x.startswith(DANGEROUS)}
    return [changed.get(x, x) for x in values] if changed else values


def write_parquet(columns: Table, path: Path, append: bool = False) -> bool:
    """Writes `rows.parquet`, with what it holds already before the columns or without; False where pyarrow is not
    installed. Texts are dictionaries, as few are distinct. A column that it lacks is empty in what it holds.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return False
    before = parquet.ParquetFile(path).read() if append else None  # read_table imports pandas
    arrays = []
    for name, found in columns.items():
        if before is not None and name not in before.column_names:
            before = before.append_column(name, pyarrow.nulls(len(before), _type(name, pyarrow)))
        arrays.append(_array(found, _type(name, pyarrow), pyarrow))
    every = pyarrow.table(arrays, names=list(columns))
    if before is not None:
        every = pyarrow.concat_tables([before, every]).unify_dictionaries().combine_chunks()
    whole = path.with_suffix(".new")
    parquet.write_table(every, whole, compression="zstd")
    os.replace(whole, path)
    return True


def _array(values: Sequence[Any], kind: Any, pyarrow: Any) -> Any:
    if not pyarrow.types.is_dictionary(kind):
        return pyarrow.array(values, kind)
    return pyarrow.array(_encodable(values), pyarrow.string()).dictionary_encode()


def _type(name: str, pyarrow: Any) -> Any:
    """The type of a column."""
    if name in FLAGS:
        return pyarrow.bool_()
    if name in COUNTS:
        return pyarrow.int64()
    number = name in NUMBERS or " " in name
    return pyarrow.float64() if number else pyarrow.dictionary(pyarrow.int32(), pyarrow.string())


def _encodable(values: Sequence[Any]) -> Sequence[Any]:
    """Halves of characters, which no output can encode, are replaced."""
    bad = {x for x in values if isinstance(x, str) and not x.isascii() and CONTROL.search(x)}
    return [CONTROL.sub("�", x) if x in bad else x for x in values] if bad else values
