"""All rows beside the site, for other tools: `rows.csv`, and `rows.parquet` where pyarrow is installed."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..escape import CONTROL
from .timeline import Measured

DANGEROUS = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for a formula at the beginning of a text."""

Table = Mapping[str, Sequence[Any]]


def table(measured: Sequence[Measured]) -> Table:
    """Columns by name, a value a row. The primary metric's value stands in `value`, every metric's in a column of
    its own too, named after it and its unit.
    """
    numbers = [x.number or (None, None, None, None) for _, x in measured]
    metrics = {f"{name} {unit}": (name, unit) for _, x in measured for name, (_, _, _, unit) in x.metrics.items()}
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
        "low": [x[1] for x in numbers],
        "high": [x[2] for x in numbers],
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
    for heading, (name, unit) in sorted(metrics.items()):
        found = [x.metrics.get(name, nothing) for _, x in measured]
        out[heading] = [x[0] if x[3] == unit else None for x in found]
    return out


def write_csv(columns: Table, path: Path) -> None:
    """Writes `rows.csv`. A text that a spreadsheet would take for a formula gets an apostrophe before it."""
    with open(path, "w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*(_harmless(x) for x in columns.values()), strict=True))


def _harmless(values: Sequence[Any]) -> Sequence[Any]:
    """A column's texts; few are distinct, so each is looked at once."""
    texts = {x for x in values if isinstance(x, str)}
    changed = {x: f"'{x}" for x in texts if x.startswith(DANGEROUS)}
    return [changed.get(x, x) for x in values] if changed else values


def write_parquet(columns: Table, path: Path) -> bool:
    """Writes `rows.parquet`; False where pyarrow is not installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return False
    arrays = [pyarrow.array(_encodable(x), _type(x, pyarrow)) for x in columns.values()]
    parquet.write_table(pyarrow.table(arrays, names=list(columns)), path, compression="zstd")
    return True


def _type(values: Sequence[Any], pyarrow: Any) -> Any:
    """The type of a column, by its first value; of one without values that of numbers, as most are."""
    first = next((x for x in values if x is not None), 0.0)
    if isinstance(first, bool):
        return pyarrow.bool_()
    if isinstance(first, int):
        return pyarrow.int64()
    return pyarrow.string() if isinstance(first, str) else pyarrow.float64()


def _encodable(values: Sequence[Any]) -> Sequence[Any]:
    """Halves of characters, which no output can encode, are replaced."""
    bad = {x for x in values if isinstance(x, str) and not x.isascii() and CONTROL.search(x)}
    return [CONTROL.sub("�", x) if x in bad else x for x in values] if bad else values
