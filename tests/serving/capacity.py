"""What the client of `serve` can do here: how far off its stamps are, by chunks a second, and what one costs.

    python tests/serving/capacity.py RECORD [REPEATS]

A source in a process of its own writes events at a steady rate, each with the time at which it was written, on the
clock that the client stamps by: the difference is the error of a stamp, the way through the kernel in it. Chunks
over the client's processor time are what one core could take. RECORD (JSON) gets all of it; `docs/serving.py`
makes a table of it. Part of `make serving`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from kernelmark.suite.workloads._serving import latencies
from kernelmark.suite.workloads._serving.children import Clients
from kernelmark.suite.workloads._serving.load import Asked
from kernelmark.suite.workloads._serving.messages import LOOPBACK, Seen, Task

STREAMS = 40
RATES = (1000, 2000, 5000, 10000, 20000)
"""Chunks a second of all streams together."""
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


def stamped(rate: int) -> tuple[list[Seen], float, float]:
    """What a client saw of a source at this rate, its processor seconds, and the rate that came about."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--source", f"{rate}"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        asked = tuple(Asked(i, (1,), 1) for i in range(STREAMS))
        begin = time.monotonic_ns() + 1_000_000_000
        task = Task(LOOPBACK, port, "/v1/completions", "m", asked, 0, begin, 60.0, 60.0)
        (result,) = Clients([task]).results()
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if (ended := latencies.outcomes(result.seen)) != {"ok": STREAMS}:
        raise SystemExit(f"streams ended otherwise than well: {ended}")
    stamps = [x for one in result.seen for x in one.written]
    return result.seen, result.busy_s, (len(stamps) - 1) / ((max(stamps) - min(stamps)) / 1e9)


def measured(rate: int) -> dict[str, float]:
    """Errors of stamps in ms, and chunks a second of the client's processor time."""
    seen, busy, came = stamped(rate)
    off = [(a - b) * latencies.MS for x in seen for a, b in zip(x.chunks, x.written, strict=True)]
    return {
        "asked": rate,
        "came": round(came, 1),
        "p50_ms": round(latencies.nearest_rank(off, 50), 4),
        "p99_ms": round(latencies.nearest_rank(off, 99), 4),
        "per_core": round(len(off) / busy, 1),
    }


def main(record: Path, repeats: int) -> None:
    """All rates, over and over."""
    found = []
    for number in range(repeats):
        for rate in RATES:
            found.append({"repeat": number, **measured(rate)})
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
        main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5)
