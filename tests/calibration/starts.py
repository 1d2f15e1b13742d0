"""What starting a measuring process costs: from nothing, and forked from one that has loaded torch.

    python tests/calibration/starts.py --device cuda --output FILE [--processes 10]

First processes without rows: from asking for one to its first word of the device (`start_s`), and to its end. Then
processes that measure six rows, as an A/B of six rows does, in turns both ways: their wall time, and how much of
it no row's stages account for. The fork server's own start, once for a comparison, is told apart (`server_s`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import read
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.plan import Plan
from kernelmark.suite.run.forkserver import ForkServer, ForkServers
from kernelmark.suite.run.messages import Facts, Task
from kernelmark.suite.run.process import Worker
from kernelmark.suite.run.supervisor import Run

WAYS = ("started", "forked")
ROWS: dict[str, list[tuple[Any, ...]]] = {
    "cuda": [
        ("rms_norm", {"B": 4, "S": 2048, "D": 4096}, "bf16", "forward"),
        ("rms_norm", {"B": 4, "S": 2048, "D": 4096}, "bf16", "backward"),
        ("softmax", {"M": 8192, "D": 4096}, "bf16", "forward"),
        ("softmax", {"M": 8192, "D": 4096}, "bf16", "backward"),
        ("layer_norm", {"B": 4, "S": 2048, "D": 4096}, "bf16", "forward"),
        ("layer_norm", {"B": 4, "S": 2048, "D": 4096}, "bf16", "backward"),
    ],
    "cpu": [
        ("rms_norm", {"B": 1, "S": 64, "D": 1024}, "fp32", "forward"),
        ("rms_norm", {"B": 1, "S": 64, "D": 1024}, "fp32", "backward"),
        ("softmax", {"M": 64, "D": 1024}, "fp32", "forward"),
        ("softmax", {"M": 64, "D": 1024}, "fp32", "backward"),
        ("layer_norm", {"B": 1, "S": 64, "D": 1024}, "fp32", "forward"),
        ("layer_norm", {"B": 1, "S": 64, "D": 1024}, "fp32", "backward"),
    ],
}
IMPLEMENTATION = {"cuda": "kernelmark", "cpu": "torch"}


def first_word(device: str, server: ForkServer | None, folder: Path) -> tuple[float, float]:
    """Seconds until a process without rows says what its device is, and until it has ended."""
    task = Task(device, 1, 0, (), Sampling(), token="starts", ceilings=False)
    begin = time.monotonic()
    said_s = None
    with Worker(task, Path(sys.executable), folder / "log", server=server) as worker:
        worker.allow(120)
        for message in worker.messages():
            if isinstance(message, Facts):
                said_s = time.monotonic() - begin
    if said_s is None:
        sys.exit(f"a process ended without a word: {worker.last_words()}")
    if worker.forked != (server is not None):
        sys.exit("a process was not forked that should have been")
    return said_s, time.monotonic() - begin


def run_of(device: str, folder: Path, processes: int) -> Run:
    """A run of the six rows, of which this program starts the processes one by one."""
    catalog = Catalog.default()
    cases = tuple(catalog.operator(name).case(*rest) for name, *rest in ROWS[device])
    plan = Plan("starts", cases, processes, ("cold",), Sampling(energy="never"), 120.0)
    cells = plan.cells(catalog, device, [IMPLEMENTATION[device]])
    return Run(plan, cells, catalog, device, Home(folder), seed=1, ceilings=False)


def six_rows(device: str, servers: ForkServers, folder: Path, processes: int) -> dict[str, Any]:
    """Wall seconds of processes that measure the six rows, both ways in turns; a first one warms disk caches."""
    runs = {way: run_of(device, folder / way, processes + 1) for way in WAYS}
    runs["forked"].servers = servers
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with runs["started"].session(), runs["forked"].session():
        for replicate in range(processes + 1):
            for way in WAYS if replicate % 2 else WAYS[::-1]:
                begin = time.monotonic()
                runs[way].replicate(replicate, runs[way].cells)
                found[way].append(time.monotonic() - begin)
    stages = {}
    for way, run in runs.items():
        records = read(run.path).records
        if bad := [f"{x.case.full_name}: {x.status}, {x.reason}" for x in records if x.status != "ok"]:
            sys.exit("\n".join(bad))
        # Their rows' own stages; building torch's and Triton's parts at their first use is among them.
        stages[way] = [
            sum(sum(x.spent_s.values()) for x in records if x.replicate == i) for i in range(1, processes + 1)
        ]
    return {"wall_s": {way: x[1:] for way, x in found.items()}, "stages_s": stages}


def main() -> None:
    """Prints medians and writes all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(ROWS), default="cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--processes", type=int, default=10)
    arguments = parser.parse_args()
    starts: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder, ForkServers() as servers:
        begin = time.monotonic()
        server = servers.of(Path(sys.executable))
        server_s = time.monotonic() - begin
        if server is None:
            sys.exit("no process can be forked here: torch starts threads when it is loaded, or this is not Linux")
        for turn in range(arguments.processes + 1):
            for way in WAYS if turn % 2 else WAYS[::-1]:
                took = first_word(arguments.device, server if way == "forked" else None, Path(folder))
                if turn:  # before it, files were read from disk
                    starts[way].append(took)
        rows = six_rows(arguments.device, servers, Path(folder), arguments.processes)
    found: dict[str, Any] = {"device": arguments.device, "server_s": server_s, "starts": starts, "six_rows": rows}
    for way in WAYS:
        start, wall = median(x[0] for x in starts[way]), median(rows["wall_s"][way])
        rest = median(a - b for a, b in zip(rows["wall_s"][way], rows["stages_s"][way], strict=True))
        found[way] = {"start_s": start, "process_s": wall, "outside_rows_s": rest}
        print(
            f"{way}: {start:.2f} s to its first word; with six rows {wall:.2f} s, "
            f"of which {rest:.2f} s outside them"
        )
    ratios = {x: found["forked"][x] / found["started"][x] for x in found["forked"]}
    found["ratios"] = ratios
    print(
        f"the server itself: {server_s:.2f} s; forked / started: "
        + ", ".join(f"{x} {y:.2f}" for x, y in ratios.items())
    )
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
