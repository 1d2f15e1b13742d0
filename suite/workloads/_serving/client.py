"""The client, in a process of its own: sends requests by schedule or by users, and stamps what comes.

A task on standard input, its result on standard output, both JSON. Stamps are of `time.monotonic_ns`, which is one
clock for all processes of a machine. Nothing is decoded and no memory collected while requests are under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from .http import Malformed, Response
from .load import Asked
from .messages import Result, Seen, Task
from .timing import new_loop

BEAT_S = 0.005
"""Between two looks at how late the event loop is."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    written_ns: int | None = None


_decode = msgspec.json.Decoder(_Event).decode


class _Exchange(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.open = transport, True

    def ask(self, request: bytes) -> asyncio.Future[None]:
        """Sends a request; done when the response is, or with what became of it."""
        assert self.transport is not None
        self.response = Response()
        self.events: list[tuple[int, bytes]] = []
        self.end = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent = time.monotonic_ns()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        try:
            for payload in self.response.feed(data):
                self.events.append((now, payload))
        except Malformed as error:
            self._finish(error)
            self.stop()
            return
        if self.response.done:
            self.end = now
            if self.response.headers.get("connection", "").lower() == "close":
                self.stop()
            self._finish(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if not hasattr(self, "done") or self.done.done():
            return
        self.end = time.monotonic_ns()
        try:
            self.response.close()
        except Malformed as lost:
            self._finish(ConnectionResetError(str(lost)))
        else:
            self._finish(None)

    def stop(self) -> None:
        """Ends the connection."""
        self.open = False
        if self.transport is not None:
            self.transport.abort()

    def _finish(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class Client:
    """The requests of a task under way."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.idle: list[_Exchange] = []
        self.raw: dict[int, tuple[Seen, _Exchange | None, list[tuple[int, bytes]], Response | None]] = {}
        self.late: list[float] = []
        self.requests = {x.number: self._request(x) for x in task.asked}

    def _request(self, asked: Asked) -> bytes:
        task = self.task
        prompt: object = list(asked.prompt)
        if task.words:
            prompt = " ".join(f"t{x}" for x in asked.prompt)
        body: dict[str, object] = {
            "model": task.model,
            "max_tokens": asked.output,
            "temperature": 0,
            "stream": True,
        }
        body |= {"stream_options": {"include_usage": True}, **task.extra}
        if task.path.endswith("/chat/completions"):
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        raw = msgspec.json.encode(body)
        head = (
            f"POST {task.path} HTTP/1.1\r\nhost: {task.host}:{task.port}\r\ncontent-type: application/json\r\n"
            f"accept: text/event-stream\r\nx-request-id: {asked.number}\r\ncontent-length: {len(raw)}\r\n\r\n"
        )
        return head.encode() + raw

    async def run(self) -> Result:
        """All requests; those that the deadline leaves unsent are told."""
        loop = asyncio.get_running_loop()
        beat = loop.create_task(self._beat())
        work = loop.create_task(self._closed() if self.task.users else self._open())
        gc.collect()
        gc.disable()
        busy = time.process_time()
        try:
            wait = (self.task.begin_ns - time.monotonic_ns()) / 1e9 + self.task.deadline_s
            _, late = await asyncio.wait({work}, timeout=max(0.0, wait))
            for x in late:
                x.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await x
        finally:
            busy = time.process_time() - busy
            gc.enable()
            beat.cancel()
        if not work.cancelled() and work.exception() is not None:
            raise work.exception() or RuntimeError
        seen = [self._read(x) for x in self.task.asked]
        return Result(seen, self.late, busy)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            wanted = loop.time() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.late.append(max(0.0, loop.time() - wanted) * 1e3)

    async def _open(self) -> None:
        """Each request at its time, however many are under way."""
        loop = asyncio.get_running_loop()
        tasks = set()
        try:
            for asked in self.task.asked:
                scheduled = self.task.begin_ns + round(asked.at_s * 1e9)
                if (wait := scheduled / 1e9 - loop.time()) > 0:
                    await asyncio.sleep(wait)
                task = loop.create_task(self._ask(asked, scheduled))
                tasks.add(task)
            await asyncio.gather(*tasks)
        finally:
            for x in tasks:
                x.cancel()

    async def _closed(self) -> None:
        """Each user's requests one after the other; scheduled is when the answer before was there."""

        async def user(mine: Sequence[Asked]) -> None:
            for asked in mine:
                await self._ask(asked, max(time.monotonic_ns(), self.task.begin_ns))

        if (wait := self.task.begin_ns / 1e9 - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(wait)
        users = sorted({x.user for x in self.task.asked})
        await asyncio.gather(*(user([x for x in self.task.asked if x.user == one]) for one in users))

    async def _ask(self, asked: Asked, scheduled: int) -> None:
        seen = Seen(asked.number, scheduled)
        self.raw[asked.number] = (seen, None, [], None)
        exchange: _Exchange | None = None
        try:
            exchange = self._reused() or await self._connected()
            done = exchange.ask(self.requests[asked.number])
            seen.sent = exchange.sent
            self.raw[asked.number] = (seen, exchange, exchange.events, exchange.response)
            seen.outcome = "cut"
            await asyncio.wait_for(done, self.task.timeout_s)
            seen.outcome = "ok"
        except TimeoutError:
            seen.outcome = "timeout"
        except Malformed:
            seen.outcome = "malformed"
        except ConnectionResetError:
            seen.outcome = "cut"
        except OSError:
            seen.outcome = "refused"
        except asyncio.CancelledError:
            if seen.sent is not None:
                seen.outcome = "timeout"
            raise
        finally:
            if exchange is not None:
                seen.end = exchange.end or None
                if seen.outcome == "ok" and exchange.open:
                    self.idle.append(exchange)
                else:
                    exchange.stop()

    def _reused(self) -> _Exchange | None:
        while self.idle:
            exchange = self.idle.pop()
            if exchange.open:
                return exchange
        return None

    async def _connected(self) -> _Exchange:
        loop = asyncio.get_running_loop()
        _, exchange = await loop.create_connection(_Exchange, self.task.host, self.task.port)
        return exchange

    def _read(self, asked: Asked) -> Seen:
        """What a request's events say, once all is over."""
        seen, _, events, response = self.raw.get(
            asked.number, (Seen(asked.number, self.task.begin_ns + round(asked.at_s * 1e9)), None, [], None)
        )
        if seen.outcome == "ok" and response is not None and response.status != 200:
            seen.outcome = f"http {response.status}"
        read(seen, events)
        if seen.outcome == "ok" and seen.first is None:
            seen.outcome = "empty"
        return seen


def read(seen: Seen, events: Sequence[tuple[int, bytes]]) -> None:
    """Fills in what the events of a stream say: stamps of those with text, tokens by the server's own count."""
    counted, pieces, finished = 0, [], False
    for stamp, payload in events:
        if payload == b"[DONE]":
            finished = True
            continue
        try:
            event = _decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            seen.outcome = "malformed"
            break  # what came before it is counted as that of any request that failed
        if event.error is not None and seen.outcome == "ok":
            seen.outcome = "error"
        total = event.usage.completion_tokens if event.usage else None
        text = "".join(_text(x) for x in event.choices)
        finished = finished or any(x.finish_reason is not None for x in event.choices)
        if text:
            seen.chunks.append(stamp)
            pieces.append(text)
            if event.written_ns is not None:
                seen.written.append(event.written_ns)
            if total is not None:
                seen.sizes.append(total - counted)
                counted = total
        if event.usage is not None:
            seen.tokens = total if total is not None else seen.tokens
            seen.prompt_tokens = event.usage.prompt_tokens or seen.prompt_tokens
    if seen.chunks:
        seen.first, seen.last = seen.chunks[0], seen.chunks[-1]
    if len(seen.sizes) != len(seen.chunks):
        seen.sizes = []
    seen.text = "".join(pieces)
    if seen.outcome == "ok" and events and not finished:
        seen.outcome = "cut"


def _text(choice: _Choice) -> str:
    delta = choice.delta
    if delta is None:
        return choice.text or ""
    return (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")


def main() -> None:
    """One task."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        result = runner.run(Client(task).run())
    sys.stdout.buffer.write(msgspec.json.encode(result))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
