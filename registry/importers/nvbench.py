"""NVBench's JSON (`--json FILE`, `--jsonbin FILE`).

With `--jsonbin` the cold samples lie beside the JSON as 32-bit little-endian floats, in seconds. Without them
the mean GPU time of a state is its only sample. Every measured device must be the same.
"""

from __future__ import annotations

import struct
from pathlib import Path

from ..errors import InputError
from ..store.record import Scalar
from .results import Benchmark, Field, Results

SECOND = 1e3
SAMPLES = "nv/json/bin:nv/cold/sample_times"
MEANS = ("nv/cold/time/gpu/mean", "nv/batch/time/gpu/mean")


def read(raw: bytes, path: Path) -> Results:
    """The states of all benchmarks of a file; the samples are looked for beside `path`."""
    file = Field.parse(raw, path.name)
    found = []
    for item in file.need("benchmarks").items():
        name = item.need("name").text()
        states = item.get("states")
        found += [_state(name, x, path) for x in (states.items() if states else [])]
    meta = file.get("meta")
    versions = meta.get("version") if meta else None
    nvbench = versions.get("nvbench") if versions else None
    text = nvbench.get("string") if nvbench else None
    return Results(
        tool="nvbench",
        version=text.text() if text else None,
        device="cuda",
        timer="nvbench cold",
        cache="cold",
        benchmarks=tuple(found),
        conditions=_device(file),
    )


def _device(file: Field) -> dict[str, Scalar]:
    devices = file.get("devices")
    items = devices.items() if devices else []
    names = {x.need("name").text() for x in items}
    if len(names) > 1:
        raise InputError(f"{file.path}: devices: {', '.join(sorted(names))} in one file; measure them apart")
    if not items:
        return {"gpu": None}
    out: dict[str, Scalar] = {"gpu": names.pop()}
    for ours, theirs in (("gpu_sm_version", "sm_version"), ("gpu_sm_count", "number_of_sms")):
        value = items[0].get(theirs)
        out[ours] = int(value.number()) if value else None
    ecc = items[0].get("ecc_state")
    return out | {"ecc": bool(ecc.value) if ecc else None}


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
            return tuple(SECOND * x for x in struct.unpack(f"<{count}f", raw))
    raise InputError(f"{named.path}: {named.text()} is not there; it belongs beside {path.name}")
