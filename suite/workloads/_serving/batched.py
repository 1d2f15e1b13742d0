"""A server's backend over an engine in a process of its own: the tokens of each request, as they come."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from dataclasses import dataclass, field

from .messages import EngineSpec
from .protocol import Refused, Wanted
from .wire import SIZE, Ask, Build, Built, Failed, FromEngine, Gave, Leave, ToEngine, framed, from_engine

WAITING = 4096
"""Requests that may be without their first token; one more is refused with 429."""
ENDS_S = 3.0
"""What an engine may take to end by itself."""
ENGINE = ("-m", f"{__package__}.engine_process")
"""What Python is to run as the engine."""


class Batched:
    """Requests that one engine works on together."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._to, self._from = process, process.stdin, process.stdout
        self._numbers = itertools.count()
        self._open: dict[int, Tokens] = {}
        self._unbegun: set[int] = set()
        self.failed: str | None = None
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def started(cls, spec: EngineSpec, end: int) -> Batched:
        """An engine that takes requests. Raises `RuntimeError` where it ended before; it has said why."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, *ENGINE, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        found = cls(process)
        found._to.write(framed(Build(spec, end)))
        try:
            assert isinstance(await found._message(), Built)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise RuntimeError(f"the engine ended with {await process.wait()} before it took requests") from None
        except BaseException:  # nobody waits for it any more
            process.kill()
            raise
        found._reading = asyncio.create_task(found._read())
        return found

    async def _message(self) -> FromEngine:
        size = int.from_bytes(await self._from.readexactly(SIZE), "big")
        return from_engine(await self._from.readexactly(size))

    async def _read(self) -> None:
        """Gives each request what is made for it, until the engine ends; then all are told."""
        try:
            while not isinstance(message := await self._message(), Failed):
                for made in message.made if isinstance(message, Gave) else ():
                    self._unbegun.discard(made.number)
                    tokens = self._open.get(made.number)
                    if tokens is not None:
                        tokens.came.put_nowait((made.tokens, made.finish))
            self.failed = message.reason
        except (asyncio.IncompleteReadError, ConnectionError):
            self.failed = "the engine's process ended"
        except Exception as error:  # what it said is no message: nothing more is understood
            self.failed = f"the engine said what is no message: {error}"
        for tokens in self._open.values():
            tokens.came.put_nowait(([], "error"))
        while await self._from.read(1 << 16):  # a pipe that is full keeps its process from ending
            pass

    async def open(self, wanted: Wanted, number: str) -> Tokens:
        """Takes a request. Raises `Refused` where too many wait, or the engine has failed."""
        if self.failed is not None:
            raise Refused(503, self.failed)
        if len(self._unbegun) >= WAITING:
            raise Refused(429, f"{WAITING} requests are waiting already")
        own = next(self._numbers)
        self._unbegun.add(own)
        tokens = self._open[own] = Tokens(self, own)
        self._say(Ask(own, wanted))
        return tokens

    def close(self, number: int, whole: bool) -> None:
        """Nobody reads on; of an answer that is not whole the engine is told."""
        del self._open[number]
        self._unbegun.discard(number)
        if not whole:
            self._say(Leave(number))

    def _say(self, message: ToEngine) -> None:
        if self.failed is None and not self._to.is_closing():
            self._to.write(framed(message))

    async def stop(self) -> None:
        """Ends the engine, whose device is free when this returns."""
        self._to.close()
        try:
            await asyncio.wait_for(self._process.wait(), ENDS_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            self._reading.cancel()


@dataclass
class Tokens:
    """The tokens of one request, as they come."""

    backend: Batched
    number: int
    came: asyncio.Queue[tuple[list[int], str | None]] = field(default_factory=asyncio.Queue)
    whole: bool = False

    async def next(self) -> tuple[list[int], str | None]:
        """More tokens, and why there are no more after them. Raises `Refused` where the engine failed."""
        tokens, finish = await self.came.get()
        if finish == "error":
            raise Refused(503, self.backend.failed or "the engine failed")
        self.whole = finish is not None
        return tokens, finish

    def close(self) -> None:
        """Nobody reads on."""
        self.backend.close(self.number, self.whole)
