"""asv's result files (`results/MACHINE/COMMIT-ENVIRONMENT.json`, version 2), as airspeed velocity documents them.

Times are in seconds. A benchmark with parameters is one for each combination of their values. Where the file holds
no samples, its result, which is their median, is the only one. Benchmarks that track something else have no time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from ..errors import InputError
from .results import Benchmark, Field, Results, hexadecimal

SECOND = 1e3
COLUMNS = ("result", "params")
_TIMED = re.compile(r"(^|\.)(Time(raw)?[A-Z_]|time(raw)?_)[^.]*$")
"""asv tells the kind of a benchmark by its function's name alone: `TimeSuite.track_size` is no time."""


def read(raw: bytes, path: Path) -> Results:
    """The benchmarks of a file."""
    file = Field.parse(raw, path.name)
    version = file.get("version")
    if version is None or version.number() != 2:
        raise InputError(f"{file.path}: asv's results of version 2 are read; `asv update` brings others there")
    columns = [x.text() for x in file.need("result_columns").items()]
    if missing := [x for x in COLUMNS if x not in columns]:
        raise InputError(f"{file.path}: result_columns: no {', '.join(missing)}")
    results = file.need("results")
    names = [x for x in results.members() if _TIMED.search(x)]
    params, date, python = file.get("params"), file.get("date"), file.get("python")
    machine = {x: params.get(x) if params else None for x in ("arch", "cpu", "num_cpu", "os")}
    return Results(
        tool="asv",
        version=None,
        device="cpu",
        timer="asv",
        cache="hot",
        benchmarks=tuple(x for name in names for x in _benchmarks(name, results.need(name), columns)),
        conditions={
            **{name: str(x.value) if x else None for name, x in machine.items()},
            "python": python.text() if python else None,
        },
        created=_date(date) if date else None,
        commit=hexadecimal(hash_.text()) if (hash_ := file.get("commit_hash")) else None,
    )


def _date(field: Field) -> str:
    try:
        return datetime.fromtimestamp(field.number() / 1e3, UTC).isoformat(timespec="seconds")
    except (OverflowError, OSError, ValueError):
        raise InputError(f"{field.path}: no date") from None


def _benchmarks(name: str, item: Field, columns: list[str]) -> Iterator[Benchmark]:
    cells = dict(zip(columns, item.items(), strict=False))
    group = name.rpartition(".")[0] or name
    given = cells["params"].items() if "params" in cells else []
    combinations = list(itertools.islice(itertools.product(*(x.items() for x in given)), 100_000))
    result = cells.get("result")
    if result is None or result.value is None:
        yield Benchmark(group, name, (), reason="asv could not run it")
        return
    values = result.items()
    samples = cells["samples"].items() if "samples" in cells and cells["samples"].value is not None else []
    for place, combination in enumerate(combinations):
        shown = ", ".join(str(x.value) for x in combination)
        label = f"{name}({shown})" if combination else name
        value = values[place] if place < len(values) else None
        own = samples[place] if place < len(samples) and samples[place].value is not None else None
        if own is not None and own.items():
            yield Benchmark(group, label, tuple(x.time(SECOND) for x in own.items()))
        elif value is None or value.value is None or value.value != value.value:
            yield Benchmark(group, label, (), reason="asv gives no result for it")
        else:
            yield Benchmark(group, label, (value.time(SECOND),))
