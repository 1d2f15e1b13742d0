"""Go's benchmark text (`go test -bench`), as "Proposal: Go Benchmark Data Format" describes it.

A line is a name, the number of iterations, and pairs of value and unit. With `-count` a name occurs several
times: each is a sample, the mean of its iterations.
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
    samples: dict[tuple[str, str], list[float]] = {}
    iterations: dict[tuple[str, str], int] = {}
    for number, line in enumerate(lines, 1):
        if setting := _KEY.fullmatch(line.rstrip()):
            settings[setting[1]] = setting[2]
        elif line.startswith("Benchmark") and (found := _LINE.fullmatch(line.rstrip())):
            name = f"Benchmark{found[1] or ''}"
            key = (settings.get("pkg", _TOOL), name)
            samples.setdefault(key, []).append(_time(found[3].split(), f"{path.name}: line {number}"))
            iterations[key] = max(1, int(found[2]))
    if not samples:
        raise InputError(f"{path.name}: no line begins with Benchmark, so no output of go test -bench")
    conditions: dict[str, Scalar] = {name: settings.get(name) for name in ("goos", "goarch", "cpu")}
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
