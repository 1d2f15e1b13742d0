"""Journals of schema 1, read as what they mean today. They are read forever.

Schema 1 had a field for each quantity of a measurement, all of them an operator's, and a request of JSON in
strings.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from .metric import CONVERSION, ENERGY, ERROR, LATENCY, LAUNCH, MEMORY
from .record import (
    Cache,
    Case,
    Ceiling,
    Footer,
    Header,
    Line,
    Measurement,
    Record,
    Request,
    Scalar,
    Status,
    Telemetry,
)


class _Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    samples_ms: tuple[float, ...]
    timer: str
    batch: int = 1
    converged: bool = True
    launch_ms: tuple[float, ...] = ()
    error: float | None = None
    peak_memory_bytes: int | None = None
    energy_j: float | None = None
    telemetry: Telemetry | None = None
    throttled: tuple[int, ...] = ()
    tuning: dict[str, str] = {}
    conversion_ms: float | None = None

    def upgraded(self) -> Measurement:
        if min(self.samples_ms, default=0.0) < 0:
            raise ValueError("samples_ms holds times, which are not negative")
        single = (
            (ERROR.name, self.error),
            (MEMORY.name, self.peak_memory_bytes),
            (ENERGY.name, self.energy_j),
            (CONVERSION.name, self.conversion_ms),
        )
        samples = {LATENCY.name: self.samples_ms}
        if self.launch_ms:
            samples[LAUNCH.name] = self.launch_ms
        samples |= {name: (float(x),) for name, x in single if x is not None}
        return Measurement(
            samples, self.timer, self.batch, self.converged, self.telemetry, self.throttled, self.tuning
        )


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="record"):
    case: Case
    implementation: str
    provider: str
    version: str | None
    replicate: int
    position: int
    cache: Cache
    status: Status
    reason: str | None = None
    measurement: _Measurement | None = None
    spent_s: dict[str, float] = {}

    def upgraded(self) -> Record:
        measurement = self.measurement.upgraded() if self.measurement is not None else None
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return Record(**fields | {"measurement": measurement})


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="header"):
    schema_version: int
    run: str
    created: str
    harness: str
    commit: str | None
    dirty: bool
    plan: str
    seed: int
    replicates: int
    device: str
    key: str
    conditions: dict[str, Scalar]
    environment: dict[str, Scalar]
    request: dict[str, str] = {}

    def upgraded(self) -> Header:
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__struct_fields__}
        return msgspec.convert(
            msgspec.to_builtins(fields | {"request": _request(self.request)}) | {"kind": "header"}, Header
        )


def _request(given: dict[str, str]) -> Request:
    """The same from strings; what is not understood is left out, as schema 1 left it to its readers."""
    out: dict[str, Any] = {}
    for name in ("cases", "sampling", "only", "pinned"):
        if name in given:
            out[name] = msgspec.json.decode(given[name])
    for name in ("implementations", "caches"):
        if name in given:
            out[name] = [x for x in given[name].split(",") if x]
    if "deadline_s" in given:
        out["deadline_s"] = float(given["deadline_s"])
    if given.get("stage", "").isdecimal():
        out["stage"] = int(given["stage"])
    out |= {name: given[name] for name in ("partner", "arm", "imported_from") if name in given}
    return msgspec.convert(out, Request)


_Line: TypeAlias = _Header | _Record | Ceiling | Footer
_decoder: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)


def decode(line: bytes) -> Line:
    """One line of a journal of schema 1. Raises `msgspec.MsgspecError` as today's decoder does."""
    found = _decoder.decode(line)
    try:
        return found.upgraded() if isinstance(found, _Header | _Record) else found
    except (ValueError, TypeError) as error:
        raise msgspec.ValidationError(str(error)) from None
