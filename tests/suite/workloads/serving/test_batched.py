"""A server's backend over an engine in a process of its own: on a small program in the place of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from kernelmark.suite.workloads._serving import batched
from kernelmark.suite.workloads._serving.batched import Batched, Tokens
from kernelmark.suite.workloads._serving.messages import EngineSpec
from kernelmark.suite.workloads._serving.protocol import Refused, Wanted

ENGINE = """
import os, sys, time
from kernelmark.suite.workloads._serving.engine_process import Inbox
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
) -> None:
    """Runs what asks over an engine that does so much."""
    monkeypatch.setattr(batched, "ENGINE", ("-c", ENGINE.format(begin=begin, each=each, end=end)))

    async def run() -> None:
        backend = await Batched.started(EngineSpec({}, "m", "whole", "fp32", 0, "cpu", 1, 8), 9)
        try:
            await asyncio.wait_for(ask(backend), 30)
        finally:
            await backend.stop()
            assert backend._process.returncode is not None

    asyncio.run(run())


async def opened(backend: Batched) -> Tokens:
    return await backend.open(Wanted((1, 2), 3, 0.0, 0, True, True, False, True, False), "x")


def test_tokens_come_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(backend: Batched) -> None:
        first, second = await opened(backend), await opened(backend)
        for tokens in (second, first):
            assert await tokens.next() == ([7], None)
            assert await tokens.next() == ([8, 9], "length")
            tokens.close()
        assert not backend._open
        assert not backend._unbegun

    over(monkeypatch, ask, GIVES)


@pytest.mark.parametrize(
    ("each", "said"), [("sys.exit(3)", "the engine's process ended"), ("say(Failed('no memory'))", "no memory")]
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
    over(monkeypatch, ask, end="time.sleep(60)")
