"""vLLM's `bench serve --save-result --save-detailed` (JSON). Times are in seconds, and counted from when a request
was sent, after its place among `--max-concurrency` was free: what users waited before that is in none of them.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError
from .results import Benchmark, Field, Results

SECOND = 1e3


def read(raw: bytes, path: Path) -> Results:
    """First tokens, gaps and whole requests of a file, those that failed left out."""
    file = Field.parse(raw, path.name)
    load = _load(file)
    first = [x.time(SECOND) for x in file.need("ttfts").items()]
    failed = [bool(x.value) for x in file.need("errors").items()] or [False] * len(first)
    gaps = [[y.time(SECOND) for y in x.items()] for x in file.need("itls").items()]
    # Of a request that failed the error may be empty, where a server gives no reason; its tokens are then 0.
    tokens = [x.number() for x in lengths.items()] if (lengths := file.get("output_lens")) else [1.0] * len(first)
    sizes = {"errors": len(failed), "ttfts": len(first), "itls": len(gaps), "output_lens": len(tokens)}
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in sizes.items())
        raise InputError(f"{path.name}: lists of the same requests are not equally long: {said}")
    ok = [i for i in range(len(first)) if not failed[i] and tokens[i]]
    reason = f"none of {len(failed)} requests ended well"
    if ok:
        reason = "no answer came in more than one piece"
    several = {
        "ttft from sending": [first[i] for i in ok],
        "itl": [y for i in ok for y in gaps[i]],
        "last token from sending": [first[i] + sum(gaps[i]) for i in ok],
    }
    date = file.get("date")
    return Results(
        tool="vllm-bench",
        version=None,
        device="cuda",
        timer="vllm bench serve",
        cache="hot",
        benchmarks=tuple(
            Benchmark("serve", f"{load} {name}", tuple(values), reason=reason) for name, values in several.items()
        ),
        conditions={"backend": _text(file, "backend"), "model": _text(file, "model_id"), "gpu": None},
        created=_iso(date.text()) if date else None,
    )


def _load(file: Field) -> str:
    """The load in a name: its rate and how many requests it had under way at the most."""
    rate, most = file.get("request_rate"), file.get("max_concurrency")
    shown = "inf" if rate is None or rate.value == "inf" else f"{rate.number():g}"
    return f"rate={shown}/s" + (f" concurrency={most.number():g}" if most else "")


def _text(file: Field, name: str) -> str | None:
    found = file.get(name)
    return found.text() if found else None


def _iso(date: str) -> str:
    """`20261122-101500` as ISO 8601 has it; anything else as it is."""
    if len(date) == 15 and date[8] == "-" and (date[:8] + date[9:]).isdigit():
        return f"{date[:4]}-{date[4:6]}-{date[6:8]}T{date[9:11]}:{date[11:13]}:{date[13:]}"
    return date
