"""guidellm's report in JSON. Counted from when a request was sent; the delay from its schedule to that
stands beside it. What guidellm calls inter-token latency is what is called time a token here: a request's mean
without its first token.
"""

from __future__ import annotations

from pathlib import Path

from .results import Benchmark, Field, Results, since_epoch

MS = 1.0
SECOND = 1e3
TIMES = {
    "request_latency": ("request from sending", SECOND),
    "time_to_first_token_ms": ("ttft from sending", MS),
    "inter_token_latency_ms": ("tpot", MS),
    "request_dispatch_delay": ("dispatch", SECOND),
}


def read(raw: bytes, path: Path) -> Results:
    """The loads of a report, each with the requests that ended well."""
    file = Field.parse(raw, path.name)
    metadata = file.need("metadata")
    version = metadata.get("guidellm_version")
    found, began = [], []
    for number, item in enumerate(file.need("benchmarks").items()):
        load = _load(item, number)
        if (start := item.get("start_time")) is not None:
            began.append(start.number())
        requests = item.need("requests").need("successful").items()
        for name, (shown, unit) in TIMES.items():
            values = tuple(y.time(unit) for x in requests if (y := x.get(name)) is not None)
            found.append(
                Benchmark("serve", f"{load} {shown}", values, reason=f"no request of this load has a {name}")
            )
    return Results(
        tool="guidellm",
        version=version.text() if version else None,
        device="cuda",
        timer="guidellm",
        cache="hot",
        benchmarks=tuple(found),
        conditions={"gpu": None},
        created=since_epoch(min(began, default=None)),
    )


def _load(item: Field, number: int) -> str:
    """The load in a name: the kind of its strategy, with its rate or users, and its place in the report."""
    config = item.get("config")
    strategy = config.get("strategy") if config else None
    said = []
    if strategy is not None:
        for name in ("kind", "type_", "rate", "streams", "max_concurrency"):
            value = strategy.get(name)
            if value is not None and isinstance(value.value, str | int | float):
                said.append(f"{name.rstrip('_')}={value.value}")
    return " ".join([f"load {number + 1}", *said])
