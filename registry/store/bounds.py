"""What a line of a journal may hold beyond its types: forms of names, bounds of numbers and of sizes.

A journal may come from anywhere. A name becomes a file's name, a tag, a word in a table; a number is divided by,
raised and looped over. What lies outside these bounds was not written by a measurement, and is refused when it is
read, with its line. Free text (why a row failed, what a condition is) is kept, without what a terminal obeys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from .record import HOST, Case, Ceiling, Footer, Header, Launches, Line, Measurement, Record, Request, Telemetry

INFLATED = 512 << 20
"""Bytes of a journal, compressed or not. A run of 2,000 rows and a million samples has 40 MB."""
LINE = 16 << 20
LINES = 1_000_000
SAMPLES = 20_000_000
"""Numbers of all measurements of a journal."""
REPLICATES = 100_000
SHARDS = 9_999
"""As `run --shard` takes them; what is missing of a run is listed."""
SEEDS = -(1 << 63), 1 << 64
"""The least and the greatest."""
DEADLINE_S = 1e7
"""The longest that a cell may be given."""
NAME, TEXT = 250, 4000
"""Characters of a name and of free text."""
ENTRIES = 2000
"""Names in a table: conditions, options, metrics."""
LEAST, MOST = 1e-15, 1e18
"""A sample is 0 or of such a size."""
LARGEST = 1 << 100
"""Of bytes and operations."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_SUSPECT = re.compile(rb"\\u|\\[bfnrt]|[\x00-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2[\x80\x81]")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,199}")
_COMMIT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._+-]{0,99}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_CODE = re.compile(r"[0-9]{1,9} launches [0-9a-f]{64}")
_METRIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ ./@-]{0,99}")


class OutOfBounds(ValueError):
    """A line that no measurement wrote; the text says which field."""


def checked_identifier(name: str, what: str) -> None:
    """Raises `OutOfBounds` for a name of an axis or an option that no journal may hold."""
    if not _IDENTIFIER.fullmatch(name):
        raise OutOfBounds(f"{what}: {name[:60]!r} has not the form of one: letters, digits and _, 64 at most")


class Bounds:
    """Checks the lines of one journal, and lets equal cases and names be one object each.

    A journal repeats its cases in every record: of 200,000 records that is most of the memory.
    """

    def __init__(self) -> None:
        self._cases: dict[tuple[object, ...], Case] = {}
        self._names: dict[str, str] = {}
        self._metrics: set[str] = set()
        self._samples = 0

    def checked(self, line: Line, raw: bytes) -> Line:
        """The line. Raises `OutOfBounds`."""
        if isinstance(line, Record):
            return self._record(line, raw)
        match line:
            case Header():
                return _header(line)
            case Ceiling():
                _whole(line.size, 1, LARGEST, "size")
                _whole(line.replicate, 0, REPLICATES, "replicate")
                _measured((line.time_ms,), "time_ms")
                checked_name(line.dtype, "dtype")
                _board(line.board)
            case Launches():
                _launches(line)
            case Footer():
                _seconds({"wall_s": line.wall_s, **line.spent_s}, "spent_s")
                checked_name(line.ended, "ended")
        return line

    def _record(self, record: Record, raw: bytes) -> Record:
        set_ = msgspec.structs.force_setattr
        case = record.case
        key = (case.operator, case.name, case.spec)
        known = self._cases.get(key)
        if known is not None and known == case:
            set_(record, "case", known)
        else:
            checked_case(case)
            self._cases[key] = case
        names = self._names
        for field, name in (
            ("implementation", record.implementation),
            ("provider", record.provider),
            ("version", record.version),
        ):
            if name is not None:
                set_(record, field, names.get(name) or self._shared(name, field))
        if not 0 <= record.replicate < REPLICATES:
            _whole(record.replicate, 0, REPLICATES, "replicate")
        if not 0 <= record.position < LINES:
            _whole(record.position, 0, LINES, "position")
        if record.reason is not None and (len(record.reason) > TEXT or _SUSPECT.search(raw)):
            set_(record, "reason", _text(record.reason) or "-")
        _board(record.board)
        if record.spent_s:
            _seconds(record.spent_s, "spent_s")
        if record.measurement is not None:
            self._measurement(record.measurement, raw)
        return record

    def _measurement(self, measurement: Measurement, raw: bytes) -> None:
        set_ = msgspec.structs.force_setattr
        timer, samples = measurement.timer, measurement.samples
        set_(measurement, "timer", self._names.get(timer) or self._shared(timer, "timer"))
        if measurement.batch != 1:
            _whole(measurement.batch, 1, 1 << 40, "batch")
        if len(samples) > ENTRIES:
            raise OutOfBounds(f"samples: more than {ENTRIES} metrics")
        for name, values in samples.items():
            if name not in self._metrics:
                _form(name, _METRIC, "a metric's name")
                self._metrics.add(name)
            if not LEAST <= min(values) <= max(values) <= MOST:  # a measurement holds no metric without any
                _measured(values, f"samples of {name}")
            self._samples += len(values)
        if self._samples > SAMPLES:
            raise OutOfBounds(f"the journal holds more than {SAMPLES} samples")
        if measurement.throttled:
            count = max(map(len, samples.values()))
            if not 0 <= min(measurement.throttled) <= max(measurement.throttled) < count:
                raise OutOfBounds("throttled: an index of no sample")
        if measurement.tuning or measurement.remarks:
            set_(measurement, "tuning", _table(measurement.tuning, "tuning"))
            set_(measurement, "remarks", tuple(_text(x) for x in measurement.remarks[:ENTRIES]))
        if measurement.code is not None:
            _form(measurement.code, _CODE, "code")
        if measurement.telemetry is not None:
            _telemetry(measurement.telemetry, raw)

    def _shared(self, name: str, field: str) -> str:
        known = self._names.get(name)
        if known is None:
            checked_name(name, field)
            known = self._names[name] = name
        return known


def _board(board: str | msgspec.UnsetType) -> None:
    if board is not msgspec.UNSET:
        checked_name(board, "board")


def _launches(line: Launches) -> None:
    for field in ("operator", "case", "implementation"):
        checked_name(getattr(line, field), field)
    _whole(line.steps, 1, REPLICATES, "steps")
    if len(line.kernels) > ENTRIES:
        raise OutOfBounds(f"kernels: more than {ENTRIES}")
    for x in line.kernels:
        checked_name(x.name, "a kernel's name")
        _measured((x.calls, x.ms), "kernels")
    _measured((line.gap_ms,), "gap_ms")


def _telemetry(seen: Telemetry, raw: bytes) -> None:
    for span in (seen.sm_mhz, seen.memory_mhz):
        for mhz in span or ():
            _whole(mhz, 0, 1_000_000, "clocks")
    if seen.power_w is not None:
        _measured((seen.power_w,), "power_w")
    _whole(seen.temperature_c or 0, -300, 1000, "temperature_c")
    if seen.reasons and _SUSPECT.search(raw):
        msgspec.structs.force_setattr(seen, "reasons", tuple(_text(x) for x in seen.reasons[:ENTRIES]))


def _header(header: Header) -> Header:
    _form(header.run, _RUN, "run")
    if header.schema_version < 1:
        raise OutOfBounds(f"schema_version: {header.schema_version} is none, the first is 1")
    if header.commit is not None:
        _form(header.commit, _COMMIT, "commit")
    for field in ("created", "harness", "plan", "key"):
        checked_name(getattr(header, field), field)
    moment(header.created)
    _whole(header.replicates, 1, REPLICATES, "replicates")
    _whole(header.seed, *SEEDS, "seed")
    request = header.request
    for names, what in ((request.implementations, "implementations"), (request.only, "only")):
        for name in names:
            checked_name(name, what)
    for case in request.cases:
        checked_case(case)
    checked_name(request.control, "control")
    checked_name(request.cut, "cut")
    for name, seeds in request.seeds.items():
        checked_name(name, "seeds")
        for seed in seeds:
            _whole(seed, 0, header.replicates - 1, "seeds")
    for name in request.hosts:
        checked_name(name, "hosts")
    for host in (*request.hosts.values(), header.environment.get(HOST)):
        if host is not None:
            _form(str(host), _IDENTIFIER, "host")
    if request.deadline_s is not None and not 0 < request.deadline_s <= DEADLINE_S:
        raise OutOfBounds("deadline_s: no length of time")
    _whole(request.stage, 0, REPLICATES, "stage")
    for shard in (request.shard, *request.missing):
        if shard is not None:
            _shard(*shard)
    for counts, what in ((request.parameters, "parameters"), (request.layers, "layers")):
        for name, count in counts.items():
            checked_name(name, what)
            _whole(count, 1, LARGEST, what)
    for name, calls in request.calls.items():
        checked_name(name, "calls")
        _measured((calls,), "calls")
    if request.step_ms is not None:
        _measured((request.step_ms,), "step_ms")
    for metric in header.metrics:
        _form(metric.name, _METRIC, "a metric's name")
        for text in (metric.unit, metric.label, metric.about):
            if len(text) > TEXT or _CONTROL.search(text):
                raise OutOfBounds(f"metric {metric.name}: its texts are no line")
    if len(header.metrics) > ENTRIES:
        raise OutOfBounds(f"metrics: more than {ENTRIES}")
    return msgspec.structs.replace(
        header,
        conditions=_table(header.conditions, "conditions"),
        environment=_table(header.environment, "environment"),
        request=_noted(header.request),
    )


def _shard(number: int, count: int) -> None:
    _whole(count, 1, SHARDS, "shards")
    _whole(number, 1, count, "shard")


def _noted(request: Request) -> Request:
    return request if request.note is None else msgspec.structs.replace(request, note=_text(request.note))


def checked_case(case: Case) -> None:
    """Raises `OutOfBounds` for a case that no journal may hold."""
    for field in ("operator", "name", "dtype", "spec", "primary"):
        checked_name(getattr(case, field), field)
    for names, what in ((case.axes, "an axis"), (case.options, "an option")):
        if len(names) > 64:
            raise OutOfBounds(f"{what}: more than 64 of them")
        for name, value in names.items():
            checked_identifier(name, what)
            if isinstance(value, str):
                checked_name(value, f"{what} {name}")
            elif isinstance(value, int):
                _whole(value, -LARGEST, LARGEST, f"{what} {name}")
            elif not abs(value) <= MOST:
                raise OutOfBounds(f"{what} {name}: {value!r} is out of bounds")
    _whole(case.bytes, 0, LARGEST, "bytes")
    _whole(case.flops, 0, LARGEST, "flops")
    _whole(case.exponentials, 0, LARGEST, "exponentials")
    _whole(case.tokens or 0, 0, LARGEST, "tokens")


def _form(value: str, form: re.Pattern[str], what: str) -> None:
    if not form.fullmatch(value):
        raise OutOfBounds(f"{what}: {value[:60]!r} has not the form of one")


def moment(created: str) -> datetime:
    """When a header says that its run was made; without a time zone it is UTC. Raises `OutOfBounds` for what is no
    time: runs are ordered by it.
    """
    try:
        when = datetime.fromisoformat(created)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise OutOfBounds(f"created: {created[:60]!r} is no time, as 2026-11-20T12:00:00+00:00 is") from None


def checked_name(value: str | None, what: str) -> None:
    """Raises `OutOfBounds` for a name that no journal may hold; `what` it is of. None is none."""
    if value is not None and (len(value) > NAME or _CONTROL.search(value)):
        raise OutOfBounds(f"{what}: {value[:60]!r} is no name of at most {NAME} characters on one line")


def _whole(value: int, least: int, most: int, what: str) -> None:
    if not least <= value <= most:
        raise OutOfBounds(f"{what}: {str(value)[:40]} is not within {least} and {most:g}")


def _measured(values: Sequence[float], what: str) -> None:
    for x in values:
        if x != 0 and not LEAST <= abs(x) <= MOST:
            raise OutOfBounds(f"{what}: {x!r} is no measured number")


def _seconds(spent: Mapping[str, float], what: str) -> None:
    if len(spent) > ENTRIES:
        raise OutOfBounds(f"{what}: more than {ENTRIES} stages")
    for name, seconds in spent.items():
        if len(name) > NAME or not 0 <= seconds <= 1e9:
            raise OutOfBounds(f"{what}: {name[:60]!r} took no length of time")


def _table(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    if len(values) > ENTRIES:
        raise OutOfBounds(f"{what}: more than {ENTRIES} names")
    for name, value in values.items():
        checked_name(name, what)
        if isinstance(value, int) and not isinstance(value, bool):
            _whole(value, -LARGEST, LARGEST, f"{what} {name}")
        elif isinstance(value, float) and not abs(value) <= 1e300:
            raise OutOfBounds(f"{what} {name}: {value!r} is out of bounds")
    return {name: _text(x) if isinstance(x, str) else x for name, x in values.items()}


def _text(value: str) -> str:
    cut = value if len(value) <= TEXT else value[: TEXT - 1] + "…"
    return _CONTROL.sub("�", cut)
