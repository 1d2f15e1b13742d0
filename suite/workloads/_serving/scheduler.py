"""Continuous batching: which sequences the engine works on, pass by pass, launched ahead of what is read.

New sequences are taken in before each decode step, in the order of their arrival, as long as a row and pages
for the whole of prompt and answer are free: nothing that was begun is ever put off. One that is not free waits.
Prompts of one length that follow one another in the queue are read in one pass, or in a few of powers of two.
All others wait for prompts, so no more than `TAKEN` tokens of them are read between two decode steps (Agrawal
et al., arXiv 2403.02310, who cut prompts too).

On a GPU scheduling is asynchronous, as vLLM calls it. What a pass chooses stays on the device, where the next one
takes it from. So a step is launched before the tokens of the pass before it are read, and the device does not wait
for the host. A sequence that ends by a token is then some steps too long, which nobody sees. Where the host draws
tokens at a temperature, passes are launched one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .engine import Engine, Next, moved
from .protocol import Wanted
from .wire import Made

if TYPE_CHECKING:
    import torch

TAKEN = 8192
"""Tokens of prompts between two decode steps (vLLM's `max_num_batched_tokens`), but for a prompt that has more."""
COLDEST = 1e-20
"""The lowest temperature that logits are divided by: by less they overflow, and infinite ones have no shares."""


@dataclass(eq=False)
class Sequence:
    """A request under way: how many of its tokens are `launched`, how many of these are `made` known."""

    number: int
    wanted: Wanted
    row: int = -1
    launched: int = 0
    made: int = 0
    over: bool = False
    generator: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class _Flight:
    """A pass that was launched: its tokens on their way to the host, there when `landed` is. `logits` only where
    the host draws.
    """

    batch: list[Sequence]
    tokens: torch.Tensor
    logits: torch.Tensor | None
    landed: Any


class Scheduler:
    """Runs an engine, turn by turn, in the caller's thread. `end` is the token that ends an answer; `emit` gets
    what each pass made as soon as it is known.
    """

    def __init__(self, engine: Engine, end: int, emit: Callable[[list[Made]], None]) -> None:
        import torch

        self.engine, self.end, self.emit = engine, end, emit
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._by_number: dict[int, Sequence] = {}
        self._flights: deque[_Flight] = deque()
        self._last = torch.zeros(engine.sequences, dtype=torch.int64, device=engine.device)
        """The last token of each row."""
        self._rows: tuple[list[int], torch.Tensor] | None = None
        self.ahead = 1 if engine.device.type == "cuda" else 0
        """Passes that are not read before a turn ends: a CPU has ended them by then."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to do in a turn."""
        return bool(self.waiting or self.running or self._flights)

    def add(self, number: int, wanted: Wanted) -> None:
        """Puts a request in the queue."""
        size = len(wanted.prompt) + wanted.output
        assert self.engine.fits(size), f"a sequence of {size} tokens never finds a place"
        sequence = self._by_number[number] = Sequence(number, wanted)
        self.waiting.append(sequence)

    def give_up(self, number: int) -> None:
        """Nobody reads a request's answer any more; one that is over already is no error."""
        sequence = self._by_number.get(number)
        if sequence is None:
            return
        if sequence in self.running:
            self._over(sequence)
        else:
            self.waiting.remove(sequence)
            del self._by_number[number]

    def turn(self) -> None:
        """Launches the passes of new prompts and a step of all sequences, then reads all passes but the last."""
        launched = 0
        for group in self._taken():
            self._launch(group, self.engine.prefill(self._prompts(group), [x.row for x in group]))
            launched += 1
        batch = [x for x in self.running if x.launched < x.wanted.output]
        if batch:
            rows = [x.row for x in batch]
            self._launch(batch, self.engine.decode(self._last[self._placed(rows)], rows))
            launched += 1
        self._read(min(launched, self.ahead))

    def _taken(self) -> Iterator[list[Sequence]]:
        """Waiting sequences that find a place, by what is read in one pass; each has its row."""
        left = TAKEN
        while self.waiting:
            size = len(self.waiting[0].wanted.prompt)
            if left < min(size, TAKEN):  # one that is longer has a turn's prompts to itself
                return
            found: list[Sequence] = []
            while self.waiting and len(found) < max(1, left // size):
                sequence = self.waiting[0]
                whole = size + sequence.wanted.output
                if len(sequence.wanted.prompt) != size or not self.engine.admits(whole):
                    break
                sequence.row = self.engine.hold(whole)
                found.append(self.waiting.popleft())
            if not found:
                return
            self.running += found
            left -= size * len(found)
            # A pass of each size is prepared once: powers of two are few sizes.
            while found:
                count = 1 << (len(found).bit_length() - 1)
                yield found[:count]
                found = found[count:]

    def _prompts(self, group: list[Sequence]) -> torch.Tensor:
        return self._moved([list(x.wanted.prompt) for x in group])

    def _launch(self, batch: list[Sequence], found: Next) -> None:
        """Sends a pass's tokens to the next pass and to the host."""
        import torch

        self._last.index_copy_(0, self._placed([x.row for x in batch]), found.token)
        drawn = any(x.wanted.temperature for x in batch)
        cuda = found.token.device.type == "cuda"
        tokens = torch.empty(len(batch), dtype=torch.int64, pin_memory=cuda)
        tokens.copy_(found.token, non_blocking=True)
        landed = None
        if cuda:
            landed = torch.cuda.Event()
            landed.record()
        self._flights.append(_Flight(batch, tokens, found.logits if drawn else None, landed))
        for x in batch:
            x.launched += 1
        if drawn:
            self._read(0)

    def _read(self, left: int) -> None:
        """Reads passes in the order of their launch until so many are left."""
        while len(self._flights) > left:
            flight = self._flights.popleft()
            if flight.landed is not None:
                flight.landed.synchronize()
            made = []
            for i, (sequence, token) in enumerate(zip(flight.batch, flight.tokens.tolist(), strict=True)):
                if not sequence.over:
                    made.append(self._took(sequence, token, flight.logits, i))
            if made:
                self.emit(made)

    def _took(self, sequence: Sequence, token: int, logits: torch.Tensor | None, place: int) -> Made:
        """Hands out the next token of a sequence."""
        if sequence.wanted.temperature:
            assert logits is not None
            token = self._drawn(sequence, logits[place])
            self._last[sequence.row] = token
        sequence.made += 1
        finish = None
        if sequence.made >= sequence.wanted.output:
            finish = "length"
        elif token == self.end and not sequence.wanted.ignore_eos:
            finish = "stop"
        if finish is not None:
            self._over(sequence)
        return Made(sequence.number, [token], finish)

    def _drawn(self, sequence: Sequence, logits: torch.Tensor) -> int:
        """A draw at a temperature from the request's own seed."""
        import torch

        if sequence.generator is None:
            sequence.generator = torch.Generator().manual_seed(sequence.wanted.seed % (1 << 63))
        shares = (logits.float().cpu() / max(sequence.wanted.temperature, COLDEST)).softmax(-1)
        return int(torch.multinomial(shares, 1, generator=sequence.generator))

    def _over(self, sequence: Sequence) -> None:
        """Gives the row back. A pass under way may still write there, before whatever takes it on the device."""
        sequence.over = True
        self.running.remove(sequence)
        del self._by_number[sequence.number]
        self.engine.release(sequence.row)

    def _placed(self, rows: list[int]) -> torch.Tensor:
        """Rows on the device; those of a batch that does not change are there already."""
        if self._rows is None or rows != self._rows[0]:
            self._rows = rows, self._moved(rows)
        return self._rows[1]

    def _moved(self, values: object) -> torch.Tensor:
        import torch

        return moved(values, torch.int64, self.engine.device)
