"""hyperfine's JSON (`--export-json FILE`). Times are in seconds, and each is of a process of its own."""

from __future__ import annotations

from pathlib import Path

from .results import Benchmark, Field, Results

SECOND = 1e3


def read(raw: bytes, path: Path) -> Results:
    """The commands of a file, each with its parameters."""
    file = Field.parse(raw, path.name)
    return Results(
        tool="hyperfine",
        version=None,
        device="cpu",
        timer="hyperfine wall clock",
        cache="hot",
        benchmarks=tuple(_benchmark(x) for x in file.need("results").items()),
        conditions={},
        processes=True,
    )


def _benchmark(item: Field) -> Benchmark:
    given = item.get("parameters")
    chosen = [f"{x}={given.need(x).value}" for x in given.members() if given.get(x)] if given else []
    name = " ".join([item.need("command").text(), *chosen])
    times = item.get("times")
    samples = tuple(x.time(SECOND) for x in times.items()) if times else (item.need("median").time(SECOND),)
    codes = item.get("exit_codes")
    failed = [x.value for x in codes.items() if x.value != 0] if codes else []
    if failed:
        return Benchmark("command", name, (), reason=f"it ended with exit code {failed[0]} {len(failed)} times")
    return Benchmark("command", name, samples)
