"""TritonBench's results: CSV (`--output`, divided by semicolons) and JSON (`--output-json`, or a run in CI).

Latency in ms, a number for each input and implementation: one process's median.
"""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path

from ..errors import InputError
from .results import Benchmark, Field, Results

LATENCY = ("latency", "latency-p50", "latency-median")
_KEY = re.compile(r"tritonbench_(?P<op>[^\[]+)\[x_(?P<x>.*)-(?P<of>[^-\]]+)\][-_](?P<metric>.+)")
_NUMBER = re.compile(r"\s*([-+0-9.eE]+|nan|inf)\s*(?:\(.*\))?\s*")


def read(raw: bytes, path: Path) -> Results:
    """The latencies of a file."""
    found = _json(raw, path) if raw.lstrip()[:1] == b"{" else _csv(raw, path)
    return Results(
        tool="tritonbench",
        version=None,
        device="cuda",
        timer="tritonbench latency",
        cache="cold",
        benchmarks=tuple(found),
        conditions={"gpu": None},
    )


def _json(raw: bytes, path: Path) -> list[Benchmark]:
    file = Field.parse(raw, path.name)
    metrics = file.get("metrics") or file
    out = []
    for key in metrics.members():
        found = _KEY.fullmatch(key)
        if found and found["metric"] in LATENCY:
            value = metrics.get(key)
            text = "" if value is None else str(value.value)
            out.append(_benchmark(found["op"], found["x"], found["of"], text, f"{path.name}: {key}"))
    return out


def _csv(raw: bytes, path: Path) -> list[Benchmark]:
    try:
        rows = list(csv.reader(io.StringIO(raw.decode()), delimiter=";"))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path.name}: no CSV: {error}") from None
    if not rows or len(rows[0]) < 2:
        raise InputError(f"{path.name}: line 1: no columns divided by semicolons")
    operator = re.sub(r"^op_|_[^_]*$", "", path.stem) if path.stem.startswith("op_") else path.stem
    out = []
    for number, row in enumerate(rows[1:], 2):
        for name, text in zip(rows[0][1:], row[1:], strict=False):
            implementation, _, metric = name.partition("-")
            if metric in LATENCY:
                out.append(_benchmark(operator, row[0], implementation, text, f"{path.name}: line {number}"))
    return out


def _benchmark(operator: str, x: str, implementation: str, text: str, place: str) -> Benchmark:
    if text in ("", "None"):
        return Benchmark(
            operator, x, (), reason="TritonBench gives no latency of it", implementation=implementation
        )
    found = _NUMBER.fullmatch(text)
    try:
        ms = float(found[1]) if found else math.nan
    except ValueError:
        ms = math.nan
    if not 0 <= ms < math.inf:
        raise InputError(f"{place}: {text[:40]!r} is no latency in ms")
    return Benchmark(operator, x, (ms,), implementation=implementation)
