"""What a journal becomes in MLflow: names, tags, parameters and metrics. Pure, and imports no MLflow.

One flat entry a row, because nested runs hide their children's metrics in the UI's charts, and one entry
for the run as a whole, which carries the artifacts. Few keys each: what MLflow returns, it pays for by key.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from ..analysis.rows import Row, described, rows
from ..analysis.worth import Worth, worths
from ..errors import InputError
from ..store.journal import Journal, encode
from ..store.record import Line
from ..store.transfer import checked_run, whole_lines
from ..views.looks import look

LAYOUT = 4
"""Raised when an entry's content changes for the same journal, so that old entries are replaced."""

CONDITIONS = ("gpu", "cpu", "driver", "cuda", "torch", "triton")
"""Conditions that are tags: people search by them. All others stand in the fingerprint."""

SUMMARY = "summary"
"""The identity, and the tag `kind`, of the entry for a run as a whole."""

_FIELDS: Mapping[str, str] = {
    "limit/fraction": "fraction_of_limit",
    "speedup/vs_best_baseline": "speedup_vs_best_baseline",
    "speedup/vs_eager": "speedup_vs_eager",
}
"""What a row says of its primary metric beside the metric itself. The prefix makes a section of charts; the UI
sorts them by alphabet.
"""

_WORTH: Mapping[str, str] = {
    "alone": "alone",
    "expected": "expected",
    "measured": "measured",
    "measured_ci_low": "low",
    "measured_ci_high": "high",
}
"""What the row of a system whose part was exchanged says of that part, all ratios to the base's time."""

_NAME_LENGTH = 250  # of a run in a server's database; the whole names are tags
_TAG_LENGTH = 2000  # MLflow cuts longer tags with no more than a warning; the whole reason is in the journal
_PARAM_LENGTH = 500
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
    curves: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """Metrics over their abscissa: (step, value)."""


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
    return [journal.header, *journal.records, *journal.ceilings, *journal.footers, *journal.launches]


def entries(journal: Journal) -> tuple[Entry, ...]:
    """The entries of a journal's rows, in the rows' order."""
    checked_run(journal.header.run)
    found = rows(journal)
    created = _milliseconds(journal)
    worth = {(x.exchange.program, x.exchange.step, x.exchange.system): x for x in worths(journal)}
    # The UI draws the ten newest first: descending times put the rows on screen in their own order,
    # implementations of a case side by side.
    return tuple(
        _entry(journal, row, worth.get((row.operator, row.case, row.implementation)), created + len(found) - place)
        for place, row in enumerate(found)
    )


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
    """The files of a run's summary by name: the journal itself, and the fingerprint for reading."""
    fingerprint = {name: value for name, value in described(journal).items() if name != "torn"}
    told = json.dumps(fingerprint, indent=2, ensure_ascii=False).encode()
    return dict([journal_file(journal), ("fingerprint.json", told)])


def journal_file(journal: Journal) -> tuple[str, bytes]:
    """A journal as a file: its name, and it as it is, compressed, so that `kernelmark import` takes it back."""
    if journal.path is not None:
        text = b"".join(x + b"\n" for x in whole_lines(journal.path))
    else:
        text = b"".join(encode(x) for x in _lines(journal))
    return f"{journal.header.run}.jsonl.gz", gzip.compress(text, mtime=0)


def _common(journal: Journal) -> dict[str, str]:
    header = journal.header
    tags = {
        "invocation": header.run,
        "device": header.device,
        "commit": f"{header.commit}{'-dirty' if header.dirty else ''}" if header.commit else None,
        "harness": header.harness,
        "comparability_key": header.key,
        "image_digest": str(header.conditions.get("image_digest") or ""),
        "verifies": header.request.verifies,
    }
    tags |= {name: str(header.conditions.get(name) or "") for name in CONDITIONS}
    return {name: value for name, value in tags.items() if value}


def _entry(journal: Journal, row: Row, worth: Worth | None, start_ms: int) -> Entry:
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
        "primary": row.primary,
        "better": value.better if (value := row.get()) is not None else None,
        "mlflow.runColor": look(row.implementation, row.provider).hexadecimal,
    }
    tags = _common(journal) | {name: value for name, value in own.items() if value}
    # What a part is worth hangs on other rows too.
    said = msgspec.json.encode([LAYOUT, tags, row] if worth is None else [LAYOUT, tags, row, worth])
    return Entry(
        identity="/".join(msgspec.structs.astuple(row.identity)),
        # The implementation first: lists and legends of the UI cut a name after some twenty characters.
        name=f"{row.implementation}{hot} {row.case} {row.operator}"[:_NAME_LENGTH],
        sha256=hashlib.sha256(said).hexdigest(),
        start_ms=start_ms,
        end_ms=start_ms,
        failed=row.status in _FAILED,
        tags=tags,
        params={name: str(value)[:_PARAM_LENGTH] for name, value in (row.axes | row.options).items()},
        metrics=_metrics(journal, row, worth),
        curves=_curves(journal, row),
    )


def _metrics(journal: Journal, row: Row, worth: Worth | None) -> dict[str, float]:
    values: dict[str, Any] = {name: getattr(row, source) for name, source in _FIELDS.items()}
    if worth is not None:
        values |= {f"worth/{name}": getattr(worth, source) for name, source in _WORTH.items()}
    for name, found in row.metrics.items():
        # Curves, and lists of what their places are: a median of these is a number of nothing.
        if journal.metric(name).shown == "never":
            continue
        unit = (
            ""
            if found.unit in ("", "1")
            else "_" + re.sub(r"[^A-Za-z0-9]+", "_", found.unit.replace("/", " per "))
        )
        key = _key(name)
        values[f"{key}/median{unit}"] = found.value
        values |= {f"{key}/ci_low{unit}": found.low, f"{key}/ci_high{unit}": found.high}
        if found.unit == "ms":  # the UI's bars carry two decimals, which in ms is 0.01 for a short kernel
            values[f"{key}/median_us"] = found.value * 1e3
        if name == row.primary:
            values["noise/cv_between"] = found.cv_between
    # MLflow turns an infinity into 1.8e308: an interval without an end is better left out.
    return {name: float(x) for name, x in values.items() if x is not None and math.isfinite(x)}


def _key(metric: str) -> str:
    """A metric's name as MLflow takes it, which has no `@`: `bits_per_byte_at_5000`."""
    return metric.replace("@", "_at_")


def _curves(journal: Journal, row: Row) -> dict[str, tuple[tuple[int, float], ...]]:
    """The first measured replicate's curves: MLflow has one value at a step."""
    drawn = [x for x in journal.header.metrics if x.abscissa is not None and x.name in row.metrics]
    if not drawn:
        return {}
    seen = (x.measurement for x in journal.records if x.identity == row.identity and x.measurement is not None)
    samples = next(seen).samples
    return {
        f"{_key(x.name)}/curve": tuple(
            (round(place), value) for place, value in zip(samples[str(x.abscissa)], samples[x.name], strict=False)
        )
        for x in drawn
    }


def _milliseconds(journal: Journal) -> int:
    text = journal.header.created
    try:
        created = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"run {journal.header.run}: created {text!r} is not an ISO 8601 time") from None
    if created.tzinfo is None:
        created = created.replace(tzinfo=UTC)
    return round(created.timestamp() * 1000)
