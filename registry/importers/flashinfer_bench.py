"""FlashInfer-Bench's traces (JSON Lines): a solution of a definition, evaluated on a workload.

The latency in ms is the only sample of a trace. A workload without an evaluation is passed over; an evaluation
that did not pass is a row without a time.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError
from ..store.record import Status
from .results import Benchmark, Field, Results

STATUS: dict[str, Status] = {
    "INCORRECT_SHAPE": "incorrect",
    "INCORRECT_NUMERICAL": "incorrect",
    "INCORRECT_DTYPE": "incorrect",
    "RUNTIME_ERROR": "error",
    "COMPILE_ERROR": "error",
    "TIMEOUT": "timeout",
}


def read(raw: bytes, path: Path) -> list[Results]:
    """The traces of a file, by the hardware that they were evaluated on."""
    found: dict[str, list[Benchmark]] = {}
    libraries: dict[str, dict[str, str]] = {}
    dates: dict[str, list[str]] = {}
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        trace = Field.parse(line, f"{path.name}: line {number}")
        evaluation = trace.get("evaluation")
        if evaluation is None:
            continue
        environment = evaluation.need("environment")
        hardware = environment.need("hardware").text()
        found.setdefault(hardware, []).append(_benchmark(trace, evaluation))
        given = environment.get("libs")
        libraries.setdefault(hardware, {}).update(
            {name: given.need(name).text() for name in given.members()} if given else {}
        )
        dates.setdefault(hardware, []).append(evaluation.need("timestamp").text())
    if not found:
        raise InputError(f"{path.name}: no trace with an evaluation")
    return [
        Results(
            tool="flashinfer-bench",
            version=libraries[hardware].get("flashinfer_bench"),
            device="cuda",
            timer="flashinfer-bench latency",
            cache="cold",
            benchmarks=tuple(benchmarks),
            conditions={
                "gpu": hardware,
                **{x: y for x, y in libraries[hardware].items() if x in ("torch", "cuda")},
            },
            created=min(dates[hardware]),
            part=hardware,
        )
        for hardware, benchmarks in found.items()
    ]


def _benchmark(trace: Field, evaluation: Field) -> Benchmark:
    workload = trace.need("workload")
    axes = workload.get("axes")
    sizes = [f"{name}{axes.need(name).value}" for name in axes.members()] if axes else []
    uuid = workload.get("uuid")
    name = "-".join([*sizes, *([uuid.text()[:8]] if uuid else [])]) or "workload"
    operator, solution = trace.need("definition").text(), trace.need("solution").text()
    status = evaluation.need("status").text()
    if status == "PASSED":
        ms = evaluation.need("performance").need("latency_ms").time(1.0)
        return Benchmark(operator, name, (ms,), implementation=solution)
    if status not in STATUS:
        raise InputError(f"{evaluation.path}: status: unknown {status[:40]!r}; known: PASSED, {', '.join(STATUS)}")
    reason = f"FlashInfer-Bench: {status}"
    return Benchmark(operator, name, (), reason=reason, implementation=solution, status=STATUS[status])
