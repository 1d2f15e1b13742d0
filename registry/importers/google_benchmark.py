"""Google Benchmark's JSON (`--benchmark_out=FILE --benchmark_out_format=json`), as its user guide describes it.

A repetition is a sample: the mean real time of its iterations. Aggregates are left out, unless the file holds
nothing else (`--benchmark_report_aggregates_only`): then the median is the only sample.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError
from .results import Benchmark, Field, Results

UNITS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}
FITTED = ("BigO", "RMS")
"""Of `Complexity()`: a curve through the times of all sizes, and how far they are off it, which nobody timed."""


def read(raw: bytes, path: Path) -> Results:
    """The benchmarks of a file."""
    file = Field.parse(raw, path.name)
    context = file.need("context")
    repetitions: dict[str, list[Field]] = {}
    for item in file.need("benchmarks").items():
        aggregate = item.get("aggregate_name")
        if aggregate is not None and aggregate.value in FITTED:
            continue
        run_name = item.get("run_name") or item.need("name")
        repetitions.setdefault(run_name.text(), []).append(item)
    build, mhz, count, date, version = (
        context.get(x) for x in ("library_build_type", "mhz_per_cpu", "num_cpus", "date", "library_version")
    )
    return Results(
        tool="google-benchmark",
        version=version.text() if version else None,
        device="cpu",
        timer="google-benchmark real_time",
        cache="hot",
        benchmarks=tuple(_benchmark(name, items) for name, items in repetitions.items()),
        conditions={
            "cpu_count": int(count.number()) if count else None,
            "mhz_per_cpu": int(mhz.number()) if mhz else None,
            "library_build_type": build.text() if build else None,
        },
        created=date.text() if date else None,
    )


def _benchmark(name: str, items: list[Field]) -> Benchmark:
    group = name.split("/")[0]
    single = [x for x in items if _type(x) == "iteration"]
    failed = [x for x in single if (error := x.get("error_occurred")) is not None and error.value is True]
    if failed:
        message = failed[0].get("error_message")
        return Benchmark(group, name, (), reason=message.text() if message else "it reported an error")
    # What was skipped stands in the file with times of 0, which nobody measured.
    skipped = [x for x in single if (skip := x.get("skipped")) is not None and skip.value is True]
    if skipped:
        message = skipped[0].get("skip_message")
        return Benchmark(group, name, (), reason=message.text() if message else "it was skipped")
    chosen = single or [
        x for x in items if (kind := x.get("aggregate_name")) is not None and kind.text() == "median"
    ]
    iterations = chosen[0].get("iterations") if chosen else None
    batch = max(1, int(iterations.number())) if iterations else 1
    return Benchmark(group, name, tuple(_time(x) for x in chosen), batch)


def _type(item: Field) -> str:
    found = item.get("run_type")
    return found.text() if found else "iteration"  # versions before 1.5 did not say


def _time(item: Field) -> float:
    unit = item.get("time_unit")
    name = unit.text() if unit else "ns"
    if unit is not None and name not in UNITS:
        raise InputError(f"{unit.path}: unknown unit {name!r}; known: {', '.join(UNITS)}")
    return item.need("real_time").time(UNITS[name])
