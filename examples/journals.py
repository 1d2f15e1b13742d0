"""Reads journals without kernelmark: one JSON object a line, with every sample.

    python examples/journals.py .kernelmark/journals/*.jsonl

Prints the median of each implementation of each case over all its samples, and with pandas installed a table of
them. The format is `registry/store/journal.schema.json`.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal, packed or not; a last line that was cut off is left out."""
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    for line in text.split(b"\n")[:-1]:
        yield json.loads(line)


def samples(path: Path) -> list[dict[str, Any]]:
    """One row a sample of the latency, in ms, of everything that ended well and has one: programs have metrics of
    their own. Schema 1 knew no other metric.
    """
    out = []
    for line in lines(path):
        if line["kind"] == "record" and line["status"] == "ok":
            case = line["case"]
            name = {"operator": case["operator"], "case": case["name"], "implementation": line["implementation"]}
            seen = line["measurement"]
            for ms in seen["samples"].get("latency", ()) if "samples" in seen else seen["samples_ms"]:
                out.append({**name, "replicate": line["replicate"], "ms": ms})
    return out


def main(paths: list[Path]) -> None:
    """Prints one line an implementation of a case."""
    found = [x for path in paths for x in samples(path)]
    if not found:
        print("nothing in them has a latency")
        return
    try:
        import pandas
    except ImportError:
        times: dict[tuple[str, str, str], list[float]] = {}
        for x in found:
            times.setdefault((x["operator"], x["case"], x["implementation"]), []).append(x["ms"])
        for name, ms in sorted(times.items()):
            print(*name, f"{median(ms):.4f} ms", f"{len(ms)} samples")
        return
    frame = pandas.DataFrame(found)
    print(frame.groupby(["operator", "case", "implementation"])["ms"].agg(["median", "count"]).to_string())


if __name__ == "__main__":
    main([Path(x) for x in sys.argv[1:]])
