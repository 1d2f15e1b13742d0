"""Faults planted in a server, queueing that is known, and malformed requests to ours: what became of each.

    python tests/serving/faults.py RECORD

RECORD (JSON) says of each plan how many requests were asked for and how each ended; `docs/serving.py` makes tables
of it. Exit code 1 where a request is not accounted for, or the queueing is off by more than two hundredths. Part
of `make serving`; about two minutes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parent))

import servers
from kernelmark.suite.workloads._serving import latencies
from kernelmark.suite.workloads._serving.children import Clients, Running
from kernelmark.suite.workloads._serving.load import Asked
from kernelmark.suite.workloads._serving.messages import Planted, Seen, Task
from malformed import malformed

REQUESTS = 200
EACH_S = 0.02
"""Between two requests of an open load."""
OUTPUT = 8
TIMEOUT_S = 3.0
LEAD_S = 3.0
"""From starting a client to its load."""
MALFORMED = 10_000
QUEUED, QUEUED_EACH_S, SERVICE_MS = 60, 0.1, 500.0
"""Ten requests a second to a server that takes half a second for each, one at a time."""

FAULTS = {
    "none": "",
    "answers 429 to every second": "429",
    "answers 500 to every second": "500",
    "cuts every second stream at half": "cut",
    "hangs after the first token of every second": "hang",
    "stalls in the middle of every second": "stall",
    "writes four tokens a chunk in every second": "merged",
    "does not count the tokens of every second": "no usage",
}


def asked(
    count: int, each_s: float, output: int, server: Running, timeout_s: float, kill_s: float | None = None
) -> tuple[list[Seen], float]:
    """An open load at a constant rate, and the seconds that it took beyond its last arrival. The server is killed
    so many seconds after the load began.
    """
    requests = tuple(Asked(i, (i % 1000, 5, 6), output, i * each_s) for i in range(count))
    begin = time.monotonic_ns() + round(LEAD_S * 1e9)
    task = Task(
        server.host, server.port, server.path, server.model, requests, 0, begin, timeout_s,
        count * each_s + timeout_s + 1,
    )  # fmt: skip
    if kill_s is not None:
        assert server.process is not None
        threading.Timer(LEAD_S + kill_s, os.kill, (server.process.pid, signal.SIGKILL)).start()
    (result,) = Clients([task]).results()
    return result.seen, (time.monotonic_ns() - begin) / 1e9 - count * each_s


def planted(said: str, plan: Planted, kill_s: float | None = None) -> dict[str, object]:
    """One plan of faults."""
    server = servers.planted(plan)
    try:
        seen, beyond_s = asked(REQUESTS, EACH_S, OUTPUT, server, TIMEOUT_S, kill_s)
        return {
            "server": said,
            "asked": REQUESTS,
            "ended": latencies.outcomes(seen),
            "whole": sum(x.outcome == "ok" and x.tokens == OUTPUT for x in seen),
            "beyond_s": round(beyond_s, 2),
            "alive": server.alive(),
            "printed": server.said(),
        }
    finally:
        server.stop()


def queueing() -> dict[str, float]:
    """Users wait ever longer; the truth is the server's account of when each was over, and arithmetic's."""
    server = servers.planted(Planted(first_ms=SERVICE_MS, concurrency=1))
    try:
        seen, _ = asked(QUEUED, QUEUED_EACH_S, 1, server, QUEUED * SERVICE_MS / 1e3 + 10)
        services = {int(number): ended for number, _, _, ended in server.get("/services")}
    finally:
        server.stop()
    waits = [(i + 1) * SERVICE_MS - i * QUEUED_EACH_S * 1e3 for i in range(QUEUED)]
    return {
        "requests": QUEUED,
        "found_ms": fmean(latencies.whole(x) or 0.0 for x in seen),
        "server_ms": fmean((services[x.number] - x.scheduled) * latencies.MS for x in seen),
        "exact_ms": fmean(waits),
        "one_at_a_time_ms": SERVICE_MS,
    }


def requests_that_are_none() -> dict[str, object]:
    """MALFORMED requests to our server; each ends in an answer, an error, or a closed connection."""
    server = servers.planted(Planted())
    generator, ended = random.Random(7), Counter[str]()
    try:
        for _ in range(MALFORMED):
            with socket.create_connection((server.host, server.port), 10) as connection:
                connection.sendall(malformed(generator))
                connection.shutdown(socket.SHUT_WR)
                raw = b""
                while data := connection.recv(1 << 16):
                    raw += data
            ended[raw[9:12].decode() if raw.startswith(b"HTTP/1.1 ") else "closed" if not raw else "other"] += 1
        after, _ = asked(2, 0.0, OUTPUT, server, TIMEOUT_S)
        return {
            "asked": MALFORMED,
            "ended": dict(sorted(ended.items())),
            "after": latencies.outcomes(after),
            "alive": server.alive(),
            "printed": server.said(),
            "elsewhere": elsewhere(server.port),
        }
    finally:
        server.stop()


def elsewhere(port: int) -> int:
    """Sockets that listen on a port but on the loopback, IPv6's too."""
    found = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            for line in list(lines)[1:]:
                where, state = line.split()[1], line.split()[3]
                found += state == "0A" and where.endswith(f":{port:04X}") and not where.startswith("0100007F:")
    return found


def main(record: Path) -> int:
    """All of it."""
    found = []
    for said, fault in FAULTS.items():
        plan = Planted(first_ms=5, token_ms=2, stall_ms=200, faults=("", fault) if fault else ())
        found.append(planted(said, plan))
        print(found[-1], flush=True)
    half_s = REQUESTS * EACH_S / 2
    found.append(planted("is killed half-way", Planted(first_ms=10, token_ms=20), half_s))
    print(found[-1], flush=True)
    queue, none = queueing(), requests_that_are_none()
    print(queue, none, flush=True)
    said = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "faults": found,
        "queueing": {name: round(x, 3) for name, x in queue.items()},
        "malformed": none,
    }
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(said, separators=(",", ":")) + "\n")
    lost = [x["server"] for x in found if sum(x["ended"].values()) != x["asked"]]  # type: ignore[attr-defined]
    off = abs(queue["found_ms"] / queue["server_ms"] - 1)
    broken = sum(none["ended"].values()) != MALFORMED or none["ended"].get("other")  # type: ignore[attr-defined]
    for what in lost:
        print(f"requests to the server that {what} are not accounted for", file=sys.stderr)
    if off > 0.02:
        print(f"queueing is off by {off:.1%}", file=sys.stderr)
    if broken or none["printed"] or not none["alive"]:
        print(f"malformed requests: {none}", file=sys.stderr)
    return int(bool(lost or off > 0.02 or broken or none["printed"] or not none["alive"]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
