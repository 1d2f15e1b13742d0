"""What a foreign file holds, and how files become a journal."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from ..errors import InputError
from ..store.journal import Journal
from ..store.metric import LATENCY
from ..store.record import (
    SCHEMA_VERSION,
    Cache,
    Case,
    Footer,
    Header,
    Measurement,
    Record,
    Request,
    Scalar,
    Status,
)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark of a file: its samples in ms, or the reason why there are none."""

    group: str
    name: str
    samples_ms: tuple[float, ...]
    batch: int = 1
    reason: str | None = None
    implementation: str | None = None
    """Who computed it, where a file compares several; else the tool itself."""
    status: Status = "error"
    """How it ended where it has no samples."""


@dataclass(frozen=True)
class Results:
    """One file, which is what one process measured. `conditions` decide comparability; nothing in them names a
    host or a user. `created` is ISO 8601, None where the file does not say."""

    tool: str
    version: str | None
    device: Literal["cuda", "cpu"]
    timer: str
    cache: Cache
    benchmarks: tuple[Benchmark, ...]
    conditions: Mapping[str, Scalar]
    created: str | None = None
    commit: str | None = None
    dirty: bool = False
    notes: tuple[str, ...] = field(default=())
    part: str = ""
    """What tells these results from others of the same file, such as the device: they become their own run."""
    processes: bool = False
    """Whether each sample is of a process of its own, and so a replicate."""


def journal(files: Sequence[tuple[Results, bytes]], created: str, commit: str | None = None) -> Journal:
    """The files as one run, a file a replicate: each must come from a process of its own.

    `created` stands in where no file says when it was made, `commit` takes the place of what the files say.
    The same files always give the same run. Raises `InputError` where they differ in what is measured on.
    """
    first = files[0][0]
    for other, _ in files[1:]:
        names = sorted(first.conditions.keys() | other.conditions.keys())
        apart = [x for x in names if first.conditions.get(x) != other.conditions.get(x)]
        if apart or other.tool != first.tool or (other.commit, other.dirty) != (first.commit, first.dirty):
            raise InputError(f"the files are no one run: they differ in {', '.join(apart) or 'tool or commit'}")
    conditions: dict[str, Scalar] = {"device": first.device, "tool": first.tool, "tool_version": first.version}
    conditions |= first.conditions
    conditions = {name: _encodable(x) if isinstance(x, str) else x for name, x in conditions.items()}
    parts = [first.part.encode()] if first.part else []
    digest = hashlib.sha256(b"\0".join([*(raw for _, raw in files), *parts])).hexdigest()
    widths = [_width(results) for results, _ in files]
    when = _utc(first.created or created, first.tool)
    header = Header(
        schema_version=SCHEMA_VERSION,
        run=f"{when:%Y%m%d-%H%M%S}-{digest[:8]}",
        created=when.isoformat(timespec="seconds"),
        harness=_encodable(f"{first.tool} {first.version or ''}".strip()),
        commit=commit or first.commit,
        dirty=False if commit else first.dirty,
        plan=first.tool,
        seed=0,
        replicates=sum(widths),
        device=first.device,
        key=hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:16],
        conditions=conditions,
        environment={},
        request=Request(imported_from=first.tool),
        metrics=(LATENCY,),
    )
    records = [
        record
        for number, (results, _) in enumerate(files)
        for position, benchmark in enumerate(results.benchmarks)
        for record in _records(results, benchmark, sum(widths[:number]), position)
    ]
    _once(records)
    return Journal(header, tuple(records), footers=(Footer(header.created, 0.0, True, {}),))


def _width(results: Results) -> int:
    """How many replicates a file holds."""
    return max((len(x.samples_ms) for x in results.benchmarks), default=1) or 1 if results.processes else 1


def _records(results: Results, benchmark: Benchmark, first: int, position: int) -> list[Record]:
    """A benchmark's record, or where each sample is of a process of its own, one for each."""
    if not results.processes or not benchmark.samples_ms:
        return [_record(results, benchmark, benchmark.samples_ms, first, position)]
    return [
        _record(results, benchmark, (x,), first + number, position)
        for number, x in enumerate(benchmark.samples_ms)
    ]


def _record(
    results: Results, benchmark: Benchmark, samples_ms: Sequence[float], replicate: int, position: int
) -> Record:
    case = Case(
        operator=named(benchmark.group),
        name=named(benchmark.name),
        axes={},
        options={},
        dtype="unknown",
        pass_="forward",
        spec=results.tool,
        bytes=0,
        flops=0,
    )
    samples = tuple(float(f"{x:.9g}") for x in samples_ms)
    measured = Measurement({LATENCY.name: samples}, results.timer, benchmark.batch) if samples else None
    implementation = named(benchmark.implementation or results.tool)
    return Record(
        case=case,
        implementation=implementation,
        provider=implementation if benchmark.implementation else results.tool,
        version=results.version and _encodable(results.version),
        replicate=replicate,
        position=position,
        cache=results.cache,
        status="ok" if measured else benchmark.status,
        reason=None if measured else _encodable(benchmark.reason or "the file holds no time of it"),
        measurement=measured,
    )


def named(text: str) -> str:
    """A name as a journal may hold it: one line of bounded length. A hash tells cut ones from one another."""
    flat = " ".join(
        re.sub(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", " ", text).split()
    )
    if flat == text and len(text) <= LONGEST:
        return text
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]
    return f"{flat[: LONGEST - 10]} {digest}".strip()


def since_epoch(seconds: float | None) -> str | None:
    """A time of a file as ISO 8601 has it; None where there is none, or one before 2001: a clock was not set."""
    if seconds is None or not 1e9 <= seconds < 1e11:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _encodable(text: str) -> str:
    """A text with `?` for halves of surrogate pairs: JSON may name one, and UTF-8, a journal's, has none."""
    return text.encode(errors="replace").decode()


def _once(records: Sequence[Record]) -> None:
    seen = set()
    for record in records:
        if (record.identity, record.replicate) in seen:
            raise InputError(f"benchmark {record.case.full_name} occurs twice in one file")
        seen.add((record.identity, record.replicate))


def _utc(text: str, tool: str) -> datetime:
    try:
        when = datetime.fromisoformat(text)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):  # the latter beyond the years 1 to 9999 of UTC
        raise InputError(f"{tool}: {text!r} is no ISO 8601 time") from None


def hexadecimal(commit: object) -> str | None:
    """A whole git hash, or None for anything else ("unversioned")."""
    return commit if isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", commit) else None


LONGEST = 200
AGE_MS = 1e15
"""30,000 years. What is longer was not measured, and its sums would be infinite."""


class Field:
    """A place in a JSON document that knows its path, so that errors can name it."""

    def __init__(self, value: Any, path: str) -> None:
        self.value, self.path = value, path

    @classmethod
    def parse(cls, raw: bytes, name: str) -> Field:
        """The document. Raises `InputError` with the line for what is no JSON."""
        try:
            return cls(json.loads(raw), name)
        except UnicodeDecodeError:
            raise InputError(f"{name}: not UTF-8, so no JSON") from None
        except (RecursionError, ValueError) as error:
            if isinstance(error, json.JSONDecodeError):
                raise InputError(f"{name}: line {error.lineno}: no JSON: {error.msg}") from None
            raise InputError(f"{name}: nested too deep, or a number too long, to be results") from None

    def get(self, name: str) -> Field | None:
        """A member; None where it is not there or null."""
        if not isinstance(self.value, dict):
            raise InputError(f"{self.path}: expected an object, found {_kind(self.value)}")
        value = self.value.get(name)
        joint = "." if ": " in self.path else ": "  # "file.json: context.date"
        return None if value is None else Field(value, f"{self.path}{joint}{name}")

    def need(self, name: str) -> Field:
        """A member that must be there."""
        found = self.get(name)
        if found is None:
            raise InputError(f"{self.path}: no field {name!r}")
        return found

    def members(self) -> list[str]:
        """The names of an object's members."""
        if not isinstance(self.value, dict):
            raise InputError(f"{self.path}: expected an object, found {_kind(self.value)}")
        return list(self.value)

    def items(self) -> list[Field]:
        """The elements of an array."""
        if not isinstance(self.value, list):
            raise InputError(f"{self.path}: expected an array, found {_kind(self.value)}")
        return [Field(x, f"{self.path}[{i}]") for i, x in enumerate(self.value)]

    def text(self) -> str:
        """A string."""
        if not isinstance(self.value, str):
            raise InputError(f"{self.path}: expected a string, found {_kind(self.value)}")
        return self.value

    def number(self) -> float:
        """A finite number; also one that is written as a string."""
        try:
            if isinstance(self.value, bool):
                raise TypeError
            number = float(self.value)
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"{self.path}: expected a number, found {_kind(self.value)}") from None
        if not math.isfinite(number):
            raise InputError(f"{self.path}: {number} is no finite number")
        return number

    def time(self, unit_ms: float) -> float:
        """A time in ms, given how many ms its unit is."""
        number = self.number()
        if number < 0:
            raise InputError(f"{self.path}: {number:g} is below 0 and no time")
        if not number * unit_ms <= AGE_MS:
            raise InputError(f"{self.path}: {number:g} is too long for a time")
        return number * unit_ms


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
