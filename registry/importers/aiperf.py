"""AIPerf's records (`profile_export.jsonl`): a line a request. Counted from when a request was sent, as its first
chunk with text is; first chunks without text are skipped.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError
from .results import Benchmark, Field, Results, since_epoch

TIMES = {
    "request_latency": "request from sending",
    "time_to_first_token": "ttft from sending",
    "inter_token_latency": "tpot",
}
UNITS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}


def read(raw: bytes, path: Path) -> Results:
    """The requests of a file that ended well, those of its warm-up left out."""
    times: dict[str, list[float]] = {name: [] for name in TIMES}
    failed, began = 0, []
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        record = Field.parse(line, f"{path.name}: line {number}")
        metadata = record.need("metadata")
        if (start := metadata.get("request_start_ns")) is not None:
            began.append(start.number() / 1e9)
        phase = metadata.get("benchmark_phase")
        if phase is not None and phase.value == "warmup":
            continue
        if record.get("error") is not None:
            failed += 1
            continue
        metrics = record.need("metrics")
        for name, values in times.items():
            if (found := metrics.get(name)) is not None:
                unit = found.need("unit").text()
                if unit not in UNITS:
                    raise InputError(f"{path.name}: line {number}: {unit!r} is no unit of time")
                values.append(found.need("value").time(UNITS[unit]))
    if not failed and not any(times.values()):
        raise InputError(f"{path.name}: no request in it")
    return Results(
        tool="aiperf",
        version=None,
        device="cuda",
        timer="aiperf",
        cache="hot",
        benchmarks=tuple(
            Benchmark("serve", TIMES[name], tuple(values), reason=f"no request has a {name}; {failed} failed")
            for name, values in times.items()
        ),
        conditions={"gpu": None},
        created=since_epoch(min(began, default=None)),
    )
