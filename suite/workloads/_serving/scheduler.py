"""Continuous batching: which sequences the engine works on, step by step, in a thread of its own.

New sequences are taken in before each decode step, in the order of their arrival, as long as a row and pages for
the whole of prompt and answer are free: nothing that was begun is ever put off. One that is not free waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .engine import Engine, Next
from .protocol import Refused, Wanted

if TYPE_CHECKING:
    import torch

WAITING = 4096
"""Requests that may wait; one more is refused with 429."""
COLDEST = 1e-20
"""The lowest temperature that logits are divided by: by less they overflow, and infinite ones have no shares."""


@dataclass(eq=False)
class Sequence:
    """A request under way. `emit(tokens, finish)` gets its tokens; `finish` is None until the last."""

    wanted: Wanted
    emit: Callable[[list[int], str | None], None]
    row: int = -1
    made: int = 0
    token: int = 0
    given_up: bool = False
    generator: Any = field(default=None, repr=False)


class Scheduler:
    """Runs an engine. `end` is the token that ends an answer."""

    def __init__(self, engine: Engine, end: int) -> None:
        self.engine, self.end = engine, end
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.failed: str | None = None
        self._wake = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its step."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join()

    def add(self, wanted: Wanted, emit: Callable[[list[int], str | None], None]) -> Sequence:
        """Puts a request in the queue. Raises `Refused` where it is full, or the engine has failed."""
        sequence = Sequence(wanted, emit)
        with self._wake:
            if self.failed is not None:
                raise Refused(503, self.failed)
            if len(self.waiting) >= WAITING:
                raise Refused(429, f"{WAITING} requests are waiting already")
            self.waiting.append(sequence)
            self._wake.notify()
        return sequence

    def give_up(self, sequence: Sequence) -> None:
        """Nobody reads a request's answer any more."""
        sequence.given_up = True

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while not self._stopped and not self.waiting and not self.running:
                        self._wake.wait()
                    if self._stopped:
                        return
                self._admit()
                if self.running:
                    self._step()
        except Exception as error:  # whatever a kernel raises ends the engine; those who wait are told
            with self._wake:
                self.failed = f"the engine failed: {type(error).__name__}: {str(error)[:200]}"
                left = [*self.running, *self.waiting]
            for x in left:
                x.emit([], "error")

    def _admit(self) -> None:
        while self.waiting:
            sequence = self.waiting[0]
            if not sequence.given_up:
                size = len(sequence.wanted.prompt) + sequence.wanted.output
                if not self.engine.admits(size):
                    return
                sequence.row = self.engine.hold(size)
                self.running.append(sequence)
            with self._wake:
                self.waiting.popleft()
            if not sequence.given_up:
                prompt = self._tensor([list(sequence.wanted.prompt)])
                self._took([sequence], self.engine.prefill(prompt, [sequence.row]))

    def _step(self) -> None:
        batch = [x for x in self.running if not x.given_up]
        for x in [x for x in self.running if x.given_up]:
            self._over(x)
        if batch:
            tokens = self._tensor([x.token for x in batch])
            self._took(batch, self.engine.decode(tokens, [x.row for x in batch]))

    def _took(self, batch: list[Sequence], found: Next) -> None:
        """Chooses and hands out the next token of each sequence."""
        for sequence, token in zip(batch, self._chosen(batch, found), strict=True):
            sequence.token = token
            sequence.made += 1
            finish = None
            if sequence.made >= sequence.wanted.output:
                finish = "length"
            elif token == self.end and not sequence.wanted.ignore_eos:
                finish = "stop"
            if finish is not None:
                self._over(sequence)
            sequence.emit([token], finish)

    def _chosen(self, batch: list[Sequence], given: Next) -> list[int]:
        """The largest logit, or a draw at a temperature from the request's own seed."""
        import torch

        found: list[int] = given.token.tolist()
        for i, x in enumerate(batch):
            if x.wanted.temperature:
                if x.generator is None:
                    x.generator = torch.Generator().manual_seed(x.wanted.seed % (1 << 63))
                shares = (given.logits[i].float().cpu() / max(x.wanted.temperature, COLDEST)).softmax(-1)
                found[i] = int(torch.multinomial(shares, 1, generator=x.generator))
        return found

    def _over(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.engine.release(sequence.row)

    def _tensor(self, values: object) -> torch.Tensor:
        import torch

        return torch.tensor(values, dtype=torch.int64, device=self.engine.device)


class Batched:
    """The scheduler as a server has it: tokens of a request on the event loop."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    async def open(self, wanted: Wanted, number: str) -> Tokens:
        """Takes a request. Raises `Refused`."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[list[int], str | None]] = asyncio.Queue()

        def emit(tokens: list[int], finish: str | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, (tokens, finish))

        return Tokens(self.scheduler, self.scheduler.add(wanted, emit), queue)

    def stop(self) -> None:
        """Ends the scheduler."""
        self.scheduler.stop()


@dataclass
class Tokens:
    """The tokens of one request, as they come."""

    scheduler: Scheduler
    sequence: Sequence
    queue: asyncio.Queue[tuple[list[int], str | None]]

    async def next(self) -> tuple[list[int], str | None]:
        """More tokens, and why there are no more after them. Raises `Refused` where the engine failed."""
        tokens, finish = await self.queue.get()
        if finish == "error":
            raise Refused(503, self.scheduler.failed or "the engine failed")
        return tokens, finish

    def close(self) -> None:
        """Nobody reads on."""
        self.scheduler.give_up(self.sequence)
