"""A server's backend over an engine in a process of its own: on a small program in the place of the engine."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable

import pytest
from kernelmark.suite.workloads._serving import batched
from kernelmark.suite.workloads._serving.batched import Batched, Tokens
from kernelmark.suite.workloads._serving.messages import EngineSpec, Spec
from kernelmark.suite.workloads._serving.protocol import Refused, Wanted
from kernelmark.suite.workloads._serving.server import Server

ENGINE = """
import os, sys, time
from kernelmark.suite.workloads._serving.wire import *
def say(message): os.write(1, framed(message))
inbox = Inbox(0)
left = inbox.take(wait=True)
assert isinstance(to_engine(left.pop(0)), Build)
{begin}
say(Built())
while not inbox.ended:
    for message in map(to_engine, left or inbox.take(wait=True)):
        {each}
    left = []
{end}
"""
GIVES = "say(Gave([Made(message.number, [7], None), Made(message.number, [8, 9], 'length'), Made(99, [1], None)]))"


def over(
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[Batched], Awaitable[None]],
    each: str = "pass",
    begin: str = "",
    end: str = "",
) -> int | None:
    """Runs what asks over an engine that does so much; how the engine ended."""
    monkeypatch.setattr(batched, "ENGINE", ("-c", ENGINE.format(begin=begin, each=each, end=end)))

    async def run() -> int | None:
        backend = await Batched.started(EngineSpec({}, "m", "whole", "fp32", 0, "cpu", 1, 8), 9)
        try:
            await asyncio.wait_for(ask(backend), 30)
        finally:
            await backend.stop()
        return backend._process.returncode

    return asyncio.run(run())


async def opened(backend: Batched) -> Tokens:
    return await backend.open(Wanted((1, 2), 3, 0.0, 0, True, True, False, True, False), "x")


def test_tokens_come_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(backend: Batched) -> None:
        first, second = await opened(backend), await opened(backend)
        for tokens in (second, first):
            assert await tokens.next() == ([7], None)
            assert await tokens.next() == ([8, 9], "length")
        assert not backend._unbegun
        first.close()
        second.close()  # the engine is not told of what is whole
        assert not backend._open
        await (await opened(backend)).next()
        assert backend.failed is None

    assert over(monkeypatch, ask, f"say(Failed('left')) if isinstance(message, Leave) else {GIVES}") == 0


@pytest.mark.parametrize(
    ("each", "said"),
    [
        ("sys.exit(3)", "the engine's process ended"),
        ("say(Failed('no memory'))", "no memory"),
        ("os.write(1, (3).to_bytes(SIZE, 'big') + b'abc')", "the engine said what is no message"),
    ],
)
def test_an_engine_that_ends_tells_all(monkeypatch: pytest.MonkeyPatch, each: str, said: str) -> None:
    async def ask(backend: Batched) -> None:
        tokens = await opened(backend)
        with pytest.raises(Refused, match=said):
            await tokens.next()
        tokens.close()
        with pytest.raises(Refused, match=said) as refused:
            await opened(backend)
        assert refused.value.status == 503

    over(monkeypatch, ask, each)


def test_who_leaves_is_told_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(backend: Batched) -> None:
        await opened(backend)
        tokens = await opened(backend)
        tokens.close()
        while backend.failed is None:
            await asyncio.sleep(0.01)
        assert backend.failed == "1 left"

    over(monkeypatch, ask, "isinstance(message, Leave) and say(Failed(f'{message.number} left'))")


def test_too_many_that_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "WAITING", 1)

    async def ask(backend: Batched) -> None:
        tokens = await opened(backend)
        with pytest.raises(Refused, match="1 requests are waiting already") as refused:
            await opened(backend)
        assert refused.value.status == 429
        tokens.close()
        await opened(backend)

    over(monkeypatch, ask)


def test_an_engine_that_does_not_start_or_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(backend: Batched) -> None:
        pass

    with pytest.raises(RuntimeError, match="the engine ended with 3 before it took requests"):
        over(monkeypatch, ask, begin="sys.exit(3)")
    monkeypatch.setattr(batched, "ENDS_S", 0.2)
    assert over(monkeypatch, ask, end="time.sleep(60)") == -signal.SIGKILL


def test_an_engine_ends_however_much_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is only known to have ended when its pipe is read to the end."""

    async def ask(backend: Batched) -> None:
        await opened(backend)

    begin = time.monotonic()
    much = "[os.write(1, framed(Gave([Made(99, [1] * 1000, None)]))) for _ in range(3000)]"
    assert over(monkeypatch, ask, much) == 0
    assert time.monotonic() - begin < batched.ENDS_S
    assert over(monkeypatch, ask, f"say(Failed('no memory')); {much}") == 0


def test_health_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(backend: Batched) -> None:
        server = Server(Spec("m", 10, 10), backend)
        assert server._health() == {}
        with pytest.raises(Refused):
            await (await opened(backend)).next()
        with pytest.raises(Refused, match="no memory"):
            server._health()

    over(monkeypatch, ask, "say(Failed('no memory'))")
