"""What the client of `serve` can do here: how far off its stamps are, by chunks a second, and what one costs.

    python tests/serving/capacity.py RECORD [REPEATS] [CLIENTS]

A source in a process of its own writes events at a steady rate, each with the time at which it was written, on the
clock that the client stamps by: the difference is the error of a stamp, the way through the kernel in it. Chunks
over the client's processor time are what one core could take. CLIENTS (default: half of the cores) processes then
share higher rates, each with a source of its own. RECORD (JSON) gets all of it; `docs/serving.py` makes a table of
it. Part of `make serving`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kernelmark.suite.workloads._serving import latencies
from kernelmark.suite.workloads._serving.children import Clients
from kernelmark.suite.workloads._serving.load import Asked
from kernelmark.suite.workloads._serving.messages import LOOPBACK, Seen, Task

STREAMS = 40
RATES = (1000, 2000, 5000, 10000, 20000)
"""Chunks a second of all streams together, at one client."""
SHARED = (10000, 20000, 50000, 100000)
"""And of all clients together, where there are several."""
SECONDS = 3.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(text: str, more: str = "") -> bytes:
    """One event as a server writes it, in an HTTP chunk of its own."""
    data = f'data: {{"choices":[{{"index":0,"text":"{text}"}}]{more}}}\n\n'.encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def source(rate: int) -> None:
    """Writes SECONDS of events to STREAMS requests, one stream after the other, at this rate in sum."""
    with socket.create_server((LOOPBACK, 0), backlog=STREAMS) as listening:
        print(listening.getsockname()[1], flush=True)
        streams = [listening.accept()[0] for _ in range(STREAMS)]
    for one in streams:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw = b""
        while b"\r\n\r\n" not in raw or not raw.endswith(b"}"):
            raw += one.recv(1 << 16)
        one.sendall(HEAD)
    begin, count = time.monotonic(), round(rate * SECONDS)
    for number in range(count):
        if (wait := begin + number / rate - time.monotonic()) > 0:
            time.sleep(wait)
        written = f',"written_ns":{time.monotonic_ns()}'
        streams[number % STREAMS].sendall(event("t1 ", written))
    for one in streams:
        one.sendall(LAST)
    for one in streams:  # the client closes first
        with contextlib.suppress(OSError):
            one.recv(1)


def started(rate: int) -> tuple[subprocess.Popen[str], int]:
    """A source at this rate, and its port."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--source", f"{rate}"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def stamped(rate: int, clients: int) -> tuple[list[list[Seen]], float]:
    """What each client saw of a source of its own, all at `rate` together; and their processor seconds."""
    begin = time.monotonic_ns() + 1_000_000_000 + 200_000_000 * clients
    asked = tuple(Asked(i, (1,), 1) for i in range(STREAMS))
    sources = []
    try:
        for _ in range(clients):
            sources.append(started(rate // clients))
        tasks = [Task(LOOPBACK, port, "/v1/completions", "m", asked, 0, begin, 60.0, 60.0) for _, port in sources]
        results = Clients(tasks).results()
        for process, _ in sources:
            process.wait(30)
    finally:
        for process, _ in sources:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    for result in results:
        if (ended := latencies.outcomes(result.seen)) != {"ok": STREAMS}:
            raise SystemExit(f"streams ended otherwise than well: {ended}")
    return [result.seen for result in results], sum(result.busy_s for result in results)


def rate_of(seen: Sequence[Seen]) -> float:
    """Chunks a second that a source wrote."""
    stamps = [x for one in seen for x in one.written]
    return (len(stamps) - 1) / ((max(stamps) - min(stamps)) / 1e9)


def measured(rate: int, clients: int = 1) -> dict[str, float]:
    """Errors of all clients' stamps in ms, and chunks a second of their processor time."""
    seen, busy = stamped(rate, clients)
    off = [(a - b) * latencies.MS for one in seen for x in one for a, b in zip(x.chunks, x.written, strict=True)]
    return {
        "asked": rate,
        "clients": clients,
        "came": round(sum(rate_of(x) for x in seen), 1),
        "p50_ms": round(latencies.nearest_rank(off, 50), 4),
        "p99_ms": round(latencies.nearest_rank(off, 99), 4),
        "per_core": round(len(off) / busy, 1),
    }


def main(record: Path, repeats: int, clients: int) -> None:
    """All rates at one client, then at `clients`, over and over."""
    loads = [(rate, 1) for rate in RATES] + [(rate, clients) for rate in SHARED if clients > 1]
    found = []
    for number in range(repeats):
        for rate, count in loads:
            found.append({"repeat": number, **measured(rate, count)})
            print(found[-1], flush=True)
    said = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "streams": STREAMS,
        "seconds": SECONDS,
        "runs": found,
    }
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(said, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--source":
        source(int(sys.argv[2]))
    else:
        given = [int(x) for x in sys.argv[2:]]
        main(Path(sys.argv[1]), *(given + [5, max(1, (os.cpu_count() or 2) // 2)][len(given) :]))
