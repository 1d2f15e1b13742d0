"""A small OpenAI-compatible server: completions and chats, streamed or whole, over our engine or a planted
backend.

It batches continuously, refuses what it cannot do with the protocol's errors, and listens on the loopback only
unless told. It exists so that `serve` has a real system wherever kernelmark runs; it is no server for the world:
no keys, no TLS, no limits by user.

A process of its own: a `Spec` as one line of JSON on standard input, which stays open as long as the server is to
run; one line on standard output when it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from .batched import Batched
from .http import HEAD, Malformed, head_of, length_of
from .messages import LOOPBACK, Planted, Spec
from .planted import Cut, PlantedBackend
from .protocol import DONE, LARGEST, Answer, Refused, Wanted, parse

SLOW_S = 30.0
"""How long a head or a body may take to come."""
LINGER_S = 5.0
"""How long what is left of a refused request is read, and thrown away."""
REASONS = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 413: "Content Too Large",
    429: "Too Many Requests", 431: "Request Header Fields Too Large", 500: "Internal Server Error",
    501: "Not Implemented", 503: "Service Unavailable",
}  # fmt: skip


class Tokens(Protocol):
    """The tokens of one request."""

    async def next(self) -> tuple[list[int], str | None]:
        """More tokens, and why there are no more after them."""
        ...

    def close(self) -> None:
        """Nobody reads on, or all is read."""
        ...


class Backend(Protocol):
    """What makes the tokens."""

    async def open(self, wanted: Wanted, number: str) -> Tokens:
        """Takes a request. Raises `Refused`."""
        ...


class Server:
    """The protocol over a backend."""

    def __init__(self, spec: Spec, backend: Backend) -> None:
        self.spec, self.backend = spec, backend
        self.count = 0
        self.created = int(time.time())
        self.tasks: set[asyncio.Task[None]] = set()
        self.written: list[tuple[int, int, int]] = []
        """Of a server that stamps: when each streamed request was read, its first and its last text written."""

    async def listen(self) -> tuple[asyncio.Server, int]:
        """Starts to listen; gives the port."""
        host = "0.0.0.0" if self.spec.anywhere else LOOPBACK
        server = await asyncio.start_server(self._connected, host, self.spec.port, limit=HEAD)
        port: int = server.sockets[0].getsockname()[1]
        return server, port

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the other side went away, or was too slow
        except asyncio.CancelledError:
            pass  # the server ends
        except Cut:
            writer.transport.abort()
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether the connection can take another."""
        try:
            method, path, headers, body = await self._request(reader, writer)
        except Refused as refused:  # where this request ends is not known
            self._send(writer, refused.status, refused.body(), keep=False)
            await writer.drain()
            await self._rest(reader, writer)
            return False
        keep = headers.get("connection", "").lower() != "close"
        try:
            await self._routed(method, path, headers, body, reader, writer, keep)
        except Refused as refused:
            # The answer to a HEAD has no body: one would be taken for the next answer.
            self._send(writer, refused.status, b"" if method == "HEAD" else refused.body(), keep)
        await writer.drain()
        return keep

    async def _rest(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads what still comes of a refused request. A connection that is closed before is reset, and the other
        side, which is still writing, never sees why.
        """
        with contextlib.suppress(OSError):  # the other side is gone already
            writer.write_eof()
        async with asyncio.timeout(LINGER_S):
            while await reader.read(HEAD):
                pass

    async def _request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[str, str, dict[str, str], bytes]:
        """Reads one request. Raises `Refused` for what is none."""
        begun = await reader.readexactly(1)  # a connection may be idle for as long as it likes
        try:
            async with asyncio.timeout(SLOW_S):
                raw = begun + await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise Refused(431, f"the head is longer than {HEAD} bytes") from None
        except asyncio.IncompleteReadError:
            raise Refused(400, "the connection ended within a head") from None
        try:
            first, headers = head_of(raw[:-4])
            parts = first.split(" ")
            if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0") or not parts[0].isalpha():
                raise Malformed("the first line is not METHOD PATH HTTP/1.1")
            if "transfer-encoding" in headers:
                raise Refused(501, "bodies are taken with content-length only")
            length = length_of(headers, 1 << 40)
        except Malformed as error:
            raise Refused(400, f"not HTTP: {error}") from None
        if length > LARGEST:
            raise Refused(413, f"the body is {length} bytes; at most {LARGEST}")
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await asyncio.wait_for(reader.readexactly(length), SLOW_S) if length else b""
        if parts[2] == "HTTP/1.0":
            headers["connection"] = "close"
        return parts[0], parts[1].partition("?")[0], headers, body

    async def _routed(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        keep: bool,
    ) -> None:
        gets: dict[str, Callable[[], object]] = {"/health": self._health, "/v1/models": self._models}
        if isinstance(self.backend, PlantedBackend):
            services = self.backend.services
            gets["/services"] = lambda: [[x.number, x.came, x.began, x.ended] for x in services]
        if self.spec.stamps:
            gets["/written"] = lambda: self.written
        posts: dict[str, Callable[..., Awaitable[None]]] = {
            "/v1/completions": self._answer, "/v1/chat/completions": self._answer,
        }  # fmt: skip
        if path not in gets and path not in posts:
            raise Refused(404, f"no {path[:80]!r}; there is {', '.join([*gets, *posts])}")
        if (method == "GET") != (path in gets) or method not in ("GET", "POST"):
            raise Refused(405, f"{path} is not for {method[:20]}")
        if path in gets:
            self._send(writer, 200, msgspec.json.encode(gets[path]()), keep)
            return
        spec = self.spec
        wanted = parse(body, "chat" in path, spec.model, spec.vocabulary, spec.longest)
        await posts[path](wanted, headers.get("x-request-id", "")[:64], reader, writer, keep)

    def _health(self) -> object:
        """Nothing, of a server that serves. Raises `Refused` where its engine has ended."""
        if isinstance(self.backend, Batched) and self.backend.failed is not None:
            raise Refused(503, self.backend.failed)
        return {}

    def _models(self) -> object:
        one = {"id": self.spec.model, "object": "model", "created": self.created, "owned_by": "kernelmark"}
        return {"object": "list", "data": [one]}

    async def _answer(
        self, wanted: Wanted, number: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: bool
    ) -> None:
        came = time.monotonic_ns()
        self.count += 1
        answer = Answer(wanted, f"cmpl-{self.count}", self.spec.model, int(time.time()))
        tokens = await self.backend.open(wanted, number)
        try:
            if wanted.stream:
                await self._stream(answer, tokens, writer, keep, came)
            else:
                all_, finish = [], None
                while finish is None:
                    more, finish = await tokens.next()
                    all_ += more
                    # Nothing is written before the end, by which one who left would be known. Who closes its side
                    # alone is taken for one who left, as by other servers: others wait for the engine.
                    if reader.at_eof():
                        raise ConnectionAbortedError("the client left")
                self._send(writer, 200, answer.whole(all_, finish), keep)
        finally:
            tokens.close()

    async def _stream(
        self, answer: Answer, tokens: Tokens, writer: asyncio.StreamWriter, keep: bool, came: int
    ) -> None:
        """Server-sent events, each in a chunk of its own as soon as it is there."""
        begun, total, finish = False, 0, None
        stamps: list[int] = []
        while finish is None:
            try:
                more, finish = await tokens.next()
            except Refused as refused:
                if not begun:
                    raise
                writer.write(_chunk(b"data: " + refused.body() + b"\n\n") + _chunk(b""))
                return
            if not begun:
                connection = "keep-alive" if keep else "close"
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
                    b"transfer-encoding: chunked\r\nconnection: " + connection.encode() + b"\r\n\r\n"
                )
                begun = True
            total += len(more)
            stamps.append(time.monotonic_ns())
            stamp = {"written_ns": stamps[-1]} if self.spec.stamps else {}
            writer.write(_chunk(answer.piece(more, total, finish, **stamp)))
            await writer.drain()
        last = b""
        if answer.wanted.usage and getattr(tokens, "counted", True):
            last += _chunk(answer.usage(total))
        writer.write(last + _chunk(DONE) + _chunk(b""))
        if self.spec.stamps:
            self.written.append((came, stamps[0], stamps[-1]))

    def _send(self, writer: asyncio.StreamWriter, status: int, body: bytes, keep: bool) -> None:
        connection = "keep-alive" if keep else "close"
        head = (
            f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: {connection}\r\n\r\n"
        )
        writer.write(head.encode() + body)


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def serve(spec: Spec, until: Callable[[], Awaitable[object]]) -> None:
    """Listens and serves until that is done."""
    if (spec.engine is None) == (spec.planted is None):
        raise ValueError("a server has an engine or a planted backend")
    backend: Batched | PlantedBackend
    if spec.engine is not None:
        backend = await Batched.started(spec.engine, end=spec.vocabulary - 1)
    else:
        backend = PlantedBackend(spec.planted or Planted())
    try:
        server, port = await Server(spec, backend).listen()
        print(f'{{"port": {port}}}', flush=True)
        await until()
        server.close()
    finally:
        await backend.stop()


async def _closed() -> None:
    """Returns when standard input ends: whoever started us is gone, or wants us to be."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1 << 16):
        pass


def main() -> None:
    """One server."""
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as unbuffered:
        line = unbuffered.readline()  # the rest is the event loop's to wait for
    spec = msgspec.json.decode(line, type=Spec)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(spec, _closed))


if __name__ == "__main__":
    main()
