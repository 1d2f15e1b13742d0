"""pytest-benchmark's JSON (`--benchmark-json`, or `--benchmark-autosave` with `--benchmark-save-data`).

Times are in seconds. A saved file without raw data gives the median of each benchmark as its only sample.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .results import Benchmark, Field, Results, hexadecimal

SECOND = 1e3


def read(raw: bytes, path: Path) -> Results:
    """The benchmarks of a file."""
    file = Field.parse(raw, path.name)
    items = file.need("benchmarks").items()
    # Tests of two classes, or of two files in one group, may share a name: then they go by their whole one.
    names = Counter(_named(x) for x in items)
    found = tuple(_benchmark(x, names[_named(x)] > 1) for x in items)
    machine, commit = file.get("machine_info"), file.get("commit_info")
    cpu = machine.get("cpu") if machine else None
    conditions = {
        "cpu": _text(cpu, "brand_raw"),
        "cpu_count": int(count.number()) if cpu and (count := cpu.get("count")) else None,
        "machine": _text(machine, "machine"),
        "python": _text(machine, "python_version"),
        "python_implementation": _text(machine, "python_implementation"),
    }
    dirty = commit.get("dirty") if commit else None
    date = file.get("datetime")
    return Results(
        tool="pytest-benchmark",
        version=_text(file, "version"),
        device="cpu",
        timer="pytest-benchmark",
        cache="hot",
        benchmarks=found,
        conditions=conditions,
        created=date.text() if date else None,
        commit=hexadecimal(_text(commit, "id")),
        dirty=bool(dirty and dirty.value is True),
    )


def _named(item: Field) -> tuple[str, str]:
    full, name = _text(item, "fullname"), item.need("name").text()
    return _text(item, "group") or (full or name).split("::")[0], name


def _benchmark(item: Field, shared: bool) -> Benchmark:
    (group, name), full = _named(item), _text(item, "fullname") or ""
    stats = item.need("stats")
    data, iterations = stats.get("data"), stats.get("iterations")
    times = data.items() if data else []
    samples = tuple(x.time(SECOND) for x in times) or (stats.need("median").time(SECOND),)
    return Benchmark(
        group=group,
        name=full.removeprefix(f"{group}::") if shared and full.endswith(f"::{name}") else name,
        samples_ms=samples,
        batch=max(1, int(iterations.number())) if iterations else 1,
    )


def _text(item: Field | None, name: str) -> str | None:
    found = item.get(name) if item else None
    return found.text() if found else None
