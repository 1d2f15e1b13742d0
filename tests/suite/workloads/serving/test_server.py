"""Our server and client as the processes that they are: queueing that is known, faults, requests that are none."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import cast

import msgspec
import pytest
from kernelmark.baselines import openai_compatible
from kernelmark.registry.errors import InputError
from kernelmark.suite.workloads import serve
from kernelmark.suite.workloads._serving import children, latencies
from kernelmark.suite.workloads._serving.children import Clients, Running, ours
from kernelmark.suite.workloads._serving.load import Asked
from kernelmark.suite.workloads._serving.messages import Planted, Seen, Spec, Task

from ....serving.malformed import malformed

MALFORMED = int(os.environ.get("KERNELMARK_MALFORMED", "150"))


def planted(**plan: object) -> Running:
    spec = Spec("m", 1000, 4096, planted=msgspec.convert(plan, Planted), stamps=True)
    return ours(spec, 60)


def load(server: Running, at_s: list[float], output: int = 4, timeout_s: float = 20, **more: int) -> list[Seen]:
    asked = tuple(Asked(i, (i % 1000, 5, 6), output, at, **more) for i, at in enumerate(at_s))
    begin = time.monotonic_ns() + 400_000_000
    users = 1 if more else 0
    task = Task(
        server.host, server.port, server.path, "m", asked, users, begin, timeout_s, timeout_s + max(at_s) + 1
    )
    (result,) = Clients([task]).results()
    return result.seen


@pytest.fixture(scope="module")
def quick() -> Iterator[Running]:
    server = planted()
    yield server
    server.stop()


def test_planted_queueing() -> None:
    """Arrivals at five times what one place serves: users wait ever longer, and only the schedule shows it.

    The truth is the server's own: when each request was over, and when it was scheduled to come.
    """
    server = planted(first_ms=30, concurrency=1)
    try:
        seen = load(server, [i * 0.006 for i in range(30)], output=1)
        services = {int(number): (began, ended) for number, _, began, ended in server.get("/services")}
    finally:
        server.stop()
    assert latencies.outcomes(seen) == {"ok": 30}
    truth = fmean((services[x.number][1] - x.scheduled) / 1e6 for x in seen)
    alone = fmean((ended - began) / 1e6 for began, ended in services.values())
    found = fmean(latencies.whole(x) or 0 for x in seen)
    assert found == pytest.approx(truth, rel=0.02)
    assert found > 5 * alone  # what a client with one request at a time would have reported
    window = latencies.window(seen, None)
    assert window is not None
    assert latencies.saturated(seen, window)


def test_stamps_are_those_of_the_server(quick: Running) -> None:
    seen = load(quick, [0.002 * i for i in range(50)], output=8)
    off = [(a - b) / 1e6 for x in seen for a, b in zip(x.chunks, x.written, strict=True)]
    assert len(off) == 400
    assert min(off) >= 0
    assert latencies.nearest_rank(off, 50) < 20  # a bound against blunders: other tests share these cores


def test_every_request_is_accounted_for() -> None:
    faults = ("", "429", "500", "stall", "merged", "cut", "no usage", "hang")
    server = planted(token_ms=1, stall_ms=80, faults=faults)
    try:
        seen = load(server, [0.03 * i for i in range(8)], output=12, timeout_s=1.2)
    finally:
        server.stop()
    by_fault = dict(zip(faults, seen, strict=True))
    assert [x.outcome for x in seen] == ["ok", "http 429", "http 500", "ok", "ok", "cut", "ok", "timeout"]
    assert by_fault[""].tokens == 12
    assert len(by_fault[""].chunks) == 12
    assert len(by_fault["merged"].chunks) == 3
    assert by_fault["no usage"].tokens is None
    assert latencies.token_time(by_fault["no usage"]) is None
    assert max(latencies.gaps([by_fault["stall"]])) > 40  # of 80: the chunk before may be read late
    assert by_fault["cut"].first is not None


def test_a_server_that_is_killed() -> None:
    server = planted(first_ms=10, token_ms=20)
    assert server.process is not None
    clients_begin = time.monotonic()
    pid = server.process.pid
    import threading

    threading.Timer(1.1, os.kill, (pid, signal.SIGKILL)).start()
    seen = load(server, [0.05 * i for i in range(20)], output=10, timeout_s=5)
    server.stop()
    assert time.monotonic() - clients_begin < 20
    assert len(seen) == 20
    assert not server.alive()
    assert {x.outcome for x in seen} <= {"ok", "cut", "refused"}
    assert any(x.outcome != "ok" for x in seen)


def test_malformed_requests_end_in_errors_of_the_protocol(quick: Running) -> None:
    """KERNELMARK_MALFORMED=10000 tries as many."""
    generator = random.Random(7)
    answered = 0
    for _ in range(MALFORMED):
        with socket.create_connection((quick.host, quick.port), 10) as connection:
            connection.sendall(malformed(generator))
            connection.shutdown(socket.SHUT_WR)
            raw = b""
            while data := connection.recv(1 << 16):
                raw += data
        if raw:
            answered += 1
            status = int(raw[9:12])
            assert raw.startswith(b"HTTP/1.1 ")
            assert status in (200, 400, 404, 405, 413, 431, 501), raw
            if status != 200:
                assert b'"type":"invalid_request_error"' in raw or status == 501, raw
    assert answered > MALFORMED / 2
    assert latencies.outcomes(load(quick, [0.0, 0.0])) == {"ok": 2}
    assert quick.said() == "", "something was printed to standard error"


def test_who_still_writes_sees_why_a_request_is_refused(quick: Running) -> None:
    """A connection that is closed with bytes unread is reset, and the answer with it."""
    import http.client

    for body, headers, status in ((b"x" * (20 << 20), {}, 413), (b"", {"x": "y" * (1 << 20)}, 431)):
        connection = http.client.HTTPConnection(quick.host, quick.port, timeout=10)
        connection.request("POST", "/v1/completions", body, headers)
        assert connection.getresponse().status == status
        connection.close()


def test_the_answer_to_a_head_has_no_body(quick: Running) -> None:
    with socket.create_connection((quick.host, quick.port), 10) as connection:
        connection.sendall(b"HEAD /health HTTP/1.1\r\n\r\nGET /health HTTP/1.1\r\nconnection: close\r\n\r\n")
        raw = b""
        while data := connection.recv(1 << 16):
            raw += data
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 405 ")
    assert rest.startswith(b"HTTP/1.1 200 ")


def test_a_head_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection is kept; one that has begun a request and does not go on is closed."""
    from kernelmark.suite.workloads._serving import planted as backend
    from kernelmark.suite.workloads._serving import server

    monkeypatch.setattr(server, "SLOW_S", 0.1)

    async def ended(sent: bytes) -> bool:
        plan = backend.PlantedBackend(Planted())
        listening, port = await server.Server(Spec("m", 10, 10), plan).listen()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        try:
            await asyncio.wait_for(reader.read(), 0.3)
        except TimeoutError:
            return False
        finally:
            writer.close()
            listening.close()
        return True

    assert asyncio.run(ended(b"GET /hea"))
    assert not asyncio.run(ended(b""))


def test_who_leaves_holds_no_place_of_the_engine() -> None:
    """Of a whole answer nothing is written before its end, which would never come here."""
    from kernelmark.suite.workloads._serving.server import Server

    class Endless:
        closed = asyncio.Event()

        async def open(self, wanted: object, number: str) -> Endless:
            return self

        async def next(self) -> tuple[list[int], str | None]:
            await asyncio.sleep(0.01)
            return [1], None

        def close(self) -> None:
            self.closed.set()

    async def leaves() -> None:
        listening, port = await Server(Spec("m", 10, 10), Endless()).listen()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"model": "m", "prompt": [1], "max_tokens": 5}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await asyncio.sleep(0.1)
        assert not Endless.closed.is_set()
        writer.close()
        await asyncio.wait_for(Endless.closed.wait(), 5)
        listening.close()

    asyncio.run(leaves())


def test_nothing_listens_but_on_the_loopback(quick: Running) -> None:
    port = f"{quick.port:04X}"
    with open("/proc/net/tcp") as table:
        mine = [x.split()[1] for x in table if x.split()[1].endswith(":" + port)]
    assert [x for x in mine if x.startswith("0100007F:")]
    assert not [x for x in mine if x.startswith("00000000:")]


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(children.ServerFailed, match=r"a server has an engine or a planted backend"):
        ours(Spec("m", 10, 10), 30)


def test_a_server_that_is_killed_says_by_what() -> None:
    """As by a machine that is out of memory: it prints nothing."""
    server = planted()
    try:
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        assert server.said() == "its process was ended by SIGKILL"
    finally:
        server.stop(0)


def test_another_server_that_does_not_start_says_its_first_error(tmp_path: Path) -> None:
    code = "print('[x.py:3] ValueError: no memory', flush=True); raise RuntimeError('see above')"
    with pytest.raises(children.ServerFailed, match=r"ended before it answered: ValueError: no memory$"):
        children.started(
            [sys.executable, "-c", code], children.free_port(), "/", "m", tmp_path, 30.0, False, {}, {}
        )


@pytest.mark.parametrize(
    "url", ["http://example.com:80", "https://127.0.0.1:1", "http://127.0.0.1", "x", "http://[::1"]
)
def test_only_servers_of_this_machine(url: str) -> None:
    with pytest.raises(InputError, match="this machine"):
        children.loopback(url)


@pytest.mark.parametrize("said", [b"{}", b"[]", b'{"data": []}', b'{"data": [{"id": null}]}', b"<html>", b""])
def test_a_server_without_a_list_of_models(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(running: Running, path: str) -> object:
        return msgspec.json.decode(said)

    monkeypatch.setattr(Running, "get", get)
    system = openai_compatible.Server("http://127.0.0.1:1")
    with pytest.raises(children.ServerFailed, match=r"^http://127.0.0.1:1/v1/models has no list of models"):
        serve.start(system, cast("serve.Order", None))


def test_a_server_that_is_there_already_is_asked_by_its_url(
    quick: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotImplementedError, match="KERNELMARK_SERVER_URL names no server"):
        openai_compatible.server(None)
    monkeypatch.setenv("KERNELMARK_SERVER_URL", f"http://{quick.host}:{quick.port}")
    system = openai_compatible.server(None)
    found = serve.start(system, cast("serve.Order", None))  # it was given no model and no weights
    assert (found.port, found.model, found.path) == (quick.port, "m", "/v1/completions")
    assert latencies.outcomes(load(found, [0.0, 0.01])) == {"ok": 2}
    found.stop()
    assert latencies.outcomes(load(quick, [0.0])) == {"ok": 1}, "a server of somebody else's was ended"
