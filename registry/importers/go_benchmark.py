"""Go's benchmark text (`go test -bench`), as "Proposal: Go Benchmark Data Format" describes it.

A line is a name, the number of iterations, and pairs of value and unit. With `-count` a name occurs several
times: each is a sample, the mean of its iterations. Configuration lines (`note: before`) hold for what follows
them: where they change within a file, results under different ones are different benchmarks.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from ..errors import InputError
from ..store.record import Scalar
from .results import Benchmark, Results

UNITS = {"ns/op": 1e-6, "sec/op": 1e3}
_KEY = re.compile(r"([a-z][^\sA-Z]*):[ \t]*(.*)")
_LINE = re.compile(r"Benchmark([^a-z\s]\S*)?\s+(\d+)\s+(.+)")
_TOOL = "go"


def read(raw: bytes, path: Path) -> Results:
    """The benchmarks of a file. Lines that are neither a result nor a setting are passed over, as Go says."""
    try:
        lines = raw.decode().splitlines()
    except UnicodeDecodeError:
        raise InputError(f"{path.name}: not UTF-8, so no output of go test") from None
    settings: dict[str, str] = {}
    found: list[tuple[dict[str, str], str, float, int]] = []
    for number, line in enumerate(lines, 1):
        if setting := _KEY.fullmatch(line.rstrip()):
            settings[setting[1]] = setting[2]
        elif line.startswith("Benchmark") and (match := _LINE.fullmatch(line.rstrip())):
            ms = _time(match[3].split(), f"{path.name}: line {number}")
            found.append((dict(settings), f"Benchmark{match[1] or ''}", ms, max(1, int(match[2][:18]))))
    if not found:
        raise InputError(f"{path.name}: no line begins with Benchmark, so no output of go test -bench")
    # What holds for all results is a condition of the run; what changes between them tells two samples apart.
    names = {x for given, *_ in found for x in given if x != "pkg"}
    varying = sorted(x for x in names if len({given.get(x) for given, *_ in found}) > 1)
    samples: dict[tuple[str, str], list[float]] = {}
    iterations: dict[tuple[str, str], int] = {}
    for given, name, ms, count in found:
        label = " ".join([name, *(f"{x}:{given[x]}" for x in varying if given.get(x))])
        key = (given.get("pkg", _TOOL), label)
        samples.setdefault(key, []).append(ms)
        iterations[key] = count
    settled = {x: found[0][0].get(x) for x in sorted(names - set(varying))}
    conditions: dict[str, Scalar] = {x: settled.get(x) for x in ("goos", "goarch", "cpu")}
    conditions |= {x: value for x, value in settled.items() if x not in conditions}
    return Results(
        tool=_TOOL,
        version=None,
        device="cpu",
        timer="go test -bench",
        cache="hot",
        benchmarks=tuple(Benchmark(*key, tuple(x), iterations[key]) for key, x in samples.items()),
        conditions=conditions,
    )


def _time(words: list[str], place: str) -> float:
    if len(words) % 2:
        raise InputError(f"{place}: values and units do not pair up")
    for value, unit in zip(words[::2], words[1::2], strict=True):
        if unit in UNITS:
            try:
                number = float(value)
            except ValueError:
                raise InputError(f"{place}: {value!r} is no number of {unit}") from None
            if not 0 <= number < math.inf:
                raise InputError(f"{place}: {value} {unit} is no time")
            return number * UNITS[unit]
    raise InputError(f"{place}: no time, which would be in {' or '.join(UNITS)}")
