"""What a journal becomes in MLflow: names, tags, parameters and metrics. Pure, and imports no MLflow.

One flat entry a row, because nested runs hide their children's metrics in the UI's charts, and one entry
for the run as a whole, which carries the artifacts. Few keys each: what MLflow returns, it pays for by key.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from ..analysis.rows import Row, rows, summarize
from ..errors import InputError
from ..store.journal import Journal, encode
from ..store.record import Line
from ..store.transfer import checked_run, whole_lines

LAYOUT = 1
"""Raised when an entry's content changes for the same journal, so that old entries are replaced."""

SUMMARY = "summary"
"""The identity, and the tag `kind`, of the entry for a run as a whole."""

_METRICS: Mapping[str, str] = {
    "latency/median_ms": "latency_ms",
    "latency/ci_low_ms": "ci_low_ms",
    "latency/ci_high_ms": "ci_high_ms",
    "latency/conversion_ms": "conversion_ms",
    "throughput/gbps": "gbps",
    "throughput/tflops": "tflops",
    "limit/fraction": "fraction_of_limit",
    "speedup/vs_best_baseline": "speedup_vs_best_baseline",
    "speedup/vs_eager": "speedup_vs_eager",
    "usage/peak_bytes": "peak_memory_bytes",
    "usage/energy_j": "energy_j",
    "verify/error": "error",
    "noise/cv_between": "cv_between",
}
"""The row's field behind each metric. The prefix makes a section of charts; the UI sorts them by alphabet."""

_TAG_LENGTH = 2000  # MLflow cuts longer tags with no more than a warning; the whole reason is in the journal
_FAILED = ("incorrect", "out_of_memory", "timeout", "crashed", "error")


@dataclass(frozen=True)
class Entry:
    """One MLflow run to be. `sha256` identifies its content; times are milliseconds since 1970."""

    identity: str
    name: str
    sha256: str
    start_ms: int
    end_ms: int
    failed: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


def content_hash(journal: Journal) -> str:
    """Identifies what a journal says: equal for a plain, a compressed and a mended copy."""
    digest = hashlib.sha256(f"layout {LAYOUT}\n".encode())
    for line in _lines(journal):
        digest.update(encode(line))
    return digest.hexdigest()


def length(journal: Journal) -> int:
    """Lines of a journal. It only grows, so of two states of one run the longer is the newer."""
    return len(_lines(journal))


def _lines(journal: Journal) -> list[Line]:
    return [journal.header, *journal.records, *journal.ceilings, *journal.footers]


def entries(journal: Journal) -> tuple[Entry, ...]:
    """The entries of a journal's rows, in the rows' order."""
    checked_run(journal.header.run)
    found = rows(journal)
    created = _milliseconds(journal)
    # The UI draws the ten newest first: descending times put the rows on screen in their own order,
    # implementations of a case side by side.
    return tuple(_entry(journal, row, created + len(found) - place) for place, row in enumerate(found))


def summary(journal: Journal) -> Entry:
    """The entry of the run as a whole."""
    header = journal.header
    wall_ms = round(sum(x.wall_s for x in journal.footers) * 1000)
    created = _milliseconds(journal)
    complete = any(x.complete for x in journal.footers)
    return Entry(
        identity=SUMMARY,
        name=f"run {checked_run(header.run)}",
        sha256=content_hash(journal),
        start_ms=created,
        end_ms=created + wall_ms,
        tags=_common(journal) | {"kind": SUMMARY, "plan": header.plan, "complete": str(complete).lower()},
        metrics={"run/records": float(len(journal.records)), "run/wall_s": wall_ms / 1000},
    )


def artifacts(journal: Journal) -> dict[str, bytes]:
    """The files of a run's summary by name: the journal itself, and the fingerprint for reading.

    The journal goes as it is, compressed, so that `kernelmark import` takes it back.
    """
    if journal.path is not None:
        text = b"".join(x + b"\n" for x in whole_lines(journal.path))
    else:
        text = b"".join(encode(x) for x in _lines(journal))
    told = summarize(journal)
    fingerprint = {name: value for name, value in told.items() if name not in ("rows", "torn")}
    return {
        f"{journal.header.run}.jsonl.gz": gzip.compress(text, mtime=0),
        "fingerprint.json": json.dumps(fingerprint, indent=2, ensure_ascii=False).encode(),
    }


def _common(journal: Journal) -> dict[str, str]:
    header = journal.header
    tags = {
        "invocation": header.run,
        "device": header.device,
        "commit": f"{header.commit}{'-dirty' if header.dirty else ''}" if header.commit else None,
        "harness": header.harness,
        "comparability_key": header.key,
        "image_digest": str(header.conditions.get("image_digest") or ""),
    }
    return {name: value for name, value in tags.items() if value}


def _entry(journal: Journal, row: Row, start_ms: int) -> Entry:
    hot = " hot" if row.cache == "hot" else ""
    own: dict[str, str | None] = {
        "kind": "row",
        "operator": row.operator,
        "case": row.case,
        "implementation": row.implementation,
        "provider": row.provider,
        "version": row.version,
        "status": row.status,
        "reason": row.reason[:_TAG_LENGTH] if row.reason else None,
        "dtype": row.dtype,
        "pass": row.pass_,
        "cache": row.cache,
        "timer": row.timer,
        "row_key": row.key,
    }
    tags = _common(journal) | {name: value for name, value in own.items() if value}
    said = msgspec.json.encode([LAYOUT, tags, row])
    return Entry(
        identity="/".join(row.identity),
        # The implementation first: lists and legends of the UI cut a name after some twenty characters.
        name=f"{row.implementation}{hot} {row.case} {row.operator}",
        sha256=hashlib.sha256(said).hexdigest(),
        start_ms=start_ms,
        end_ms=start_ms,
        failed=row.status in _FAILED,
        tags=tags,
        params={name: str(value) for name, value in (row.axes | row.options).items()},
        metrics=_metrics(row),
    )


def _metrics(row: Row) -> dict[str, float]:
    values: dict[str, Any] = {name: getattr(row, source) for name, source in _METRICS.items()}
    if row.latency_ms is not None:  # the UI's bars carry two decimals, which in ms is 0.01 for a short kernel
        values["latency/median_us"] = row.latency_ms * 1e3
    # MLflow turns an infinity into 1.8e308: an interval without an end is better left out.
    return {name: float(x) for name, x in values.items() if x is not None and math.isfinite(x)}


def _milliseconds(journal: Journal) -> int:
    text = journal.header.created
    try:
        created = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"run {journal.header.run}: created {text!r} is not an ISO 8601 time") from None
    if created.tzinfo is None:
        created = created.replace(tzinfo=UTC)
    return round(created.timestamp() * 1000)
