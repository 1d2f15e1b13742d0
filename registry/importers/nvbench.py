"""NVBench's JSON (`--json FILE`, `--jsonbin FILE`).

With `--jsonbin` the cold samples lie beside the JSON as 32-bit little-endian floats, in seconds. Without them
the mean GPU time of a state is its only sample. A file of several devices becomes a run for each.
"""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

from ..errors import InputError
from ..store.record import Scalar
from .results import Benchmark, Field, Results

SECOND = 1e3
SAMPLES = "nv/json/bin:nv/cold/sample_times"
MEANS = ("nv/cold/time/gpu/mean", "nv/batch/time/gpu/mean")


def read(raw: bytes, path: Path) -> list[Results]:
    """The states of all benchmarks of a file by device; the samples are looked for beside `path`."""
    file = Field.parse(raw, path.name)
    found: dict[int | None, list[Benchmark]] = {}
    for item in file.need("benchmarks").items():
        name = item.need("name").text()
        states = item.get("states")
        for x in states.items() if states else []:
            device = x.get("device")
            found.setdefault(int(device.number()) if device else None, []).append(_state(name, x, path))
    meta = file.get("meta")
    versions = meta.get("version") if meta else None
    nvbench = versions.get("nvbench") if versions else None
    text = nvbench.get("string") if nvbench else None
    devices = _devices(file)
    if len(found) == 1 and len(devices) <= 1:  # older files do not say which of one it was
        found = {next(iter(devices), None): next(iter(found.values()))}
    return [
        Results(
            tool="nvbench",
            version=text.text() if text else None,
            device="cuda",
            timer="nvbench cold",
            cache="cold",
            benchmarks=tuple(_without_device(x, device) if len(found) > 1 else x for x in benchmarks),
            conditions=_conditions(devices, device, file),
            part=f"device {device}" if len(found) > 1 else "",
        )
        for device, benchmarks in found.items()
    ]


def _devices(file: Field) -> dict[int, Field]:
    devices = file.get("devices")
    items = devices.items() if devices else []
    return {int(id_.number()) if (id_ := x.get("id")) else i: x for i, x in enumerate(items)}


def _conditions(devices: dict[int, Field], device: int | None, file: Field) -> dict[str, Scalar]:
    if not devices:
        return {"gpu": None}
    if device not in devices:
        raise InputError(f"{file.path}: states of device {device}, which is not among its devices")
    item = devices[device]
    out: dict[str, Scalar] = {"gpu": item.need("name").text()}
    for ours, theirs in (("gpu_sm_version", "sm_version"), ("gpu_sm_count", "number_of_sms")):
        value = item.get(theirs)
        out[ours] = int(value.number()) if value else None
    ecc = item.get("ecc_state")
    return out | {"ecc": bool(ecc.value) if ecc else None}


def _without_device(benchmark: Benchmark, device: int | None) -> Benchmark:
    """A state's name begins with its device; the run says that."""
    name = re.sub(rf"^Device={device}\b\s*", "", benchmark.name)
    return replace(benchmark, name=name or "(no axes)")


def _state(benchmark: str, state: Field, path: Path) -> Benchmark:
    name = state.need("name").text() or "(no axes)"
    skipped, why = state.get("is_skipped"), state.get("skip_reason")
    if skipped is not None and skipped.value is True:
        return Benchmark(benchmark, name, (), reason=why.text() if why else "skipped")
    listed = state.get("summaries")
    summaries = {x.need("tag").text(): x for x in (listed.items() if listed else [])}
    if SAMPLES in summaries:
        return Benchmark(benchmark, name, _samples(summaries[SAMPLES], path))
    for tag in MEANS:
        if tag in summaries:
            return Benchmark(benchmark, name, (_datum(summaries[tag], "value").time(SECOND),))
    return Benchmark(benchmark, name, (), reason="the file holds no GPU time of it")


def _datum(summary: Field, name: str) -> Field:
    for x in summary.need("data").items():
        if x.need("name").text() == name:
            return x.need("value")
    raise InputError(f"{summary.path}.data: no {name!r}")


def _samples(summary: Field, path: Path) -> tuple[float, ...]:
    named, count = _datum(summary, "filename"), int(_datum(summary, "size").number())
    # Newer files are relative to the JSON's folder, older ones to where NVBench ran.
    places = [path.parent / named.text(), path.parent.parent / named.text(), path.parent / Path(named.text()).name]
    for place in places:
        if place.is_file():
            raw = place.read_bytes()
            if len(raw) != 4 * count or not count:
                raise InputError(f"{place}: {len(raw)} bytes, {named.path} says {count} samples of 4 bytes")
            times = struct.unpack(f"<{count}f", raw)
            return tuple(Field(x, f"{place.name}: sample {i}").time(SECOND) for i, x in enumerate(times, 1))
    raise InputError(f"{named.path}: {named.text()} is not there; it belongs beside {path.name}")
