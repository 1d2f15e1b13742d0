"""The loop of a client: it waits to the microsecond, and else as any other."""

from __future__ import annotations

import asyncio
import contextlib
import io
import runpy
import select
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from statistics import median
from types import SimpleNamespace

import msgspec
import pytest
from kernelmark.suite.workloads._serving import client, timing
from kernelmark.suite.workloads._serving.messages import LOOPBACK, Result, Task

pytestmark = pytest.mark.skipif(not hasattr(selectors, "EpollSelector"), reason="epoll is Linux's")

LONG_S = 10.0


@pytest.fixture
def selector() -> Iterator[timing.PreciseSelector]:
    with timing.PreciseSelector() as made:
        yield made


def lateness(loop: asyncio.AbstractEventLoop) -> float:
    """The median of how late sleeps of .3 ms end, in ms."""

    async def all_of_them() -> list[float]:
        late = []
        for _ in range(100):
            wanted = loop.time() + 0.0003
            await asyncio.sleep(0.0003)
            late.append((loop.time() - wanted) * 1e3)
        return late

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return median(runner.run(all_of_them()))


def test_short_sleeps_end_on_time() -> None:
    """A loop on plain epoll ends them .7 ms late and more; busy cores may add to either."""
    late = min(lateness(timing.new_loop()) for _ in range(3))
    assert late < 0.5
    assert late < lateness(asyncio.SelectorEventLoop(selectors.EpollSelector())) - 0.2


def test_no_wait_ends_before_its_time(selector: timing.PreciseSelector) -> None:
    """Else a loop would turn until it has come."""
    for wait in (0.0003, 0.0009, 0.001, 0.0019):
        begin = time.monotonic()
        assert selector.select(wait) == []
        assert time.monotonic() - begin >= wait


def test_an_event_ends_a_long_wait(selector: timing.PreciseSelector) -> None:
    here, there = socket.socketpair()
    with here, there:
        key = selector.register(here, selectors.EVENT_READ, "mine")
        timer = threading.Timer(0.05, there.send, (b"x",))
        begin = time.monotonic()
        timer.start()
        assert selector.select(LONG_S) == [(key, selectors.EVENT_READ)]
        timer.join()
        assert time.monotonic() - begin < LONG_S / 2


@pytest.mark.parametrize("timeout", [0.0005, 0.001, 0.0015])
def test_an_event_that_is_there_is_told(timeout: float, selector: timing.PreciseSelector) -> None:
    here, there = socket.socketpair()
    with here, there:
        key = selector.register(here, selectors.EVENT_READ)
        there.send(b"x")
        assert selector.select(timeout) == [(key, selectors.EVENT_READ)]


def test_the_last_part_of_a_wait_is_short(selector: timing.PreciseSelector) -> None:
    """Plain epoll waits 3 ms for 2.1 ms."""
    late = []
    for _ in range(60):
        begin = time.monotonic()
        assert selector.select(0.0021) == []
        late.append((time.monotonic() - begin - 0.0021) * 1e3)
    assert min(median(late[i : i + 20]) for i in (0, 20, 40)) < 0.6


@pytest.mark.parametrize("timeout", [None, 0, -1.0])
def test_what_is_no_wait_is_asked_of_epoll(
    timeout: float | None, selector: timing.PreciseSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None waits for an event, however long that takes; 0 and less wait for nothing."""
    monkeypatch.setattr(timing, "select", None)
    here, there = socket.socketpair()
    with here, there:
        key = selector.register(here, selectors.EVENT_READ)
        if timeout is not None:
            assert selector.select(timeout) == []
        there.send(b"x")
        assert selector.select(timeout) == [(key, selectors.EVENT_READ)]


def test_a_descriptor_beyond_what_select_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits in epoll, as select(2) would refuse it."""
    with timing.PreciseSelector() as selector:
        here, there = socket.socketpair()
        with here, there:
            monkeypatch.setattr(timing, "SELECTABLE", selector.fileno())
            monkeypatch.setattr(timing, "select", None)
            key = selector.register(here, selectors.EVENT_READ)
            assert selector.select(0.001) == []
            there.send(b"x")
            assert selector.select(LONG_S) == [(key, selectors.EVENT_READ)]


def test_the_bound_is_that_of_select() -> None:
    with pytest.raises(ValueError, match="out of range"):
        select.select([timing.SELECTABLE], [], [], 0)
    with contextlib.suppress(OSError):  # it is not open
        select.select([timing.SELECTABLE - 1], [], [], 0)


def test_where_there_is_no_epoll_the_loop_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(selectors, "EpollSelector")
    with asyncio.Runner(loop_factory=runpy.run_path(timing.__file__)["new_loop"]) as runner:
        loop = runner.get_loop()
        assert not isinstance(loop._selector, timing.PreciseSelector)  # type: ignore[attr-defined]
        assert runner.run(asyncio.sleep(0, "ran")) == "ran"


def test_the_client_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    selector = None

    async def run(self: client.Client) -> Result:
        nonlocal selector
        selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        return Result([], [])

    task = msgspec.json.encode(Task(LOOPBACK, 1, "/v1/completions", "m", (), 0, 0, 1.0, 1.0))
    monkeypatch.setattr(client.Client, "run", run)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(task)))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=io.BytesIO()))
    client.main()
    assert isinstance(selector, timing.PreciseSelector)
