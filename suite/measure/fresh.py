"""Inputs that change while a call is timed, and answers of timed calls that are checked afterwards.

What is timed must be the work. A call that remembers its answer (by pointer, by version, by some of the elements),
that works only where it is checked, or that answers before the work is done, gives a wrong answer as soon as its
inputs are others than before and nobody says so. Therefore:

* Each input is cut into blocks along its longest dimension. Before every timed call one block of one input is
  exchanged, outside of the clock, for what a second draw of the same inputs has there. Which one is random. So no
  content comes twice, whatever part of it is looked at, and the next differs from the last in a small part only.
* Where all inputs are integers, which may belong together, they are exchanged as a whole: contents come again,
  but never one as the call before had it.
* At one step, not known before and no other in kind, the content is one that a case has for all implementations,
  reached by each in an order of its own. The answer there is held against the reference.
* Of the other answers one is kept, chosen only after the call has returned, and held against what the same call
  gives afterwards, outside of timing, for the same content.
* An answer consists of plain tensors, and is copied as soon as the clock has stopped: what is computed at its
  first use, or finished by another thread or stream, is not there yet.

An input that calls update in place changes by itself. It is laid anew for the step that is checked. A weight that
a model keeps stays as it is between timed calls: what a library makes of it once need not be made again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from ..operator import Tolerance
from .verify import Incorrect, deviation
from .workbench import Workbench

if TYPE_CHECKING:
    import torch

Block: TypeAlias = tuple[int, int]
"""An input's place, and a block's place in it."""
BLOCKS = 32
"""An input has so many. Exchanging one costs a sixteenth of the time of a call that reads that input once."""
BUDGET_S = 3.0
BUDGET_SHARE = 0.05
"""What a process may spend on references beside those that it needs anyway: so many seconds, and of longer ones a
share of its time. Which cases they go to is left to the order of cases, which is random."""
TWICE = 2.0
"""Two answers that are each within a tolerance of the truth are within twice the tolerance of one another."""
_began_s = time.monotonic()
_spent_s = 0.0


def _begin() -> None:
    global _began_s
    _began_s = time.monotonic()


os.register_at_fork(after_in_child=_begin)  # a worker may be forked from a process that is older


class _Part(NamedTuple):
    """An input with its two draws, and how it is cut into blocks."""

    target: torch.Tensor
    draws: tuple[torch.Tensor, torch.Tensor]
    dim: int
    length: int
    blocks: int

    @classmethod
    def of(cls, target: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> _Part:
        dim = max(range(target.dim()), key=lambda d: target.shape[d])
        size = target.shape[dim]
        length = max(1, size // BLOCKS)
        return cls(target.detach(), (first.detach(), second.detach()), dim, length, -(-size // length))

    def lay(self, block: int, draw: bool) -> None:
        start = block * self.length
        length = min(self.length, self.target.shape[self.dim] - start)
        source = self.draws[draw].narrow(self.dim, start, length)
        self.target.narrow(self.dim, start, length).copy_(source)


class _Whole(NamedTuple):
    """Inputs that are exchanged all at once: of integers, as places or lengths, only those of one draw belong to
    each other.
    """

    parts: tuple[_Part, ...]
    blocks: int = 1

    def lay(self, block: int, draw: bool) -> None:
        for x in self.parts:
            x.target.copy_(x.draws[draw])


class _Kept(NamedTuple):
    """A copy of an answer, of what the call updated in place (by the inputs' ids), and the blocks exchanged."""

    result: Any
    left: dict[int, torch.Tensor]
    exchanged: frozenset[Block]

    def updated(self, bench: Workbench) -> dict[str, Any]:
        """The inputs updated in place as they were left, by name."""

        def left(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [left(x) for x in value]
            return self.left.get(id(value), value)

        return {name: left(bench.inputs[name]) for name in bench.operator.in_place}


class Fresh:
    """Changes the inputs of a bench before each timed call, and keeps answers for `check`.

    The inputs are those of the bench's first draw when it is made.
    """

    def __init__(self, bench: Workbench) -> None:
        import torch

        self._bench = bench
        self._random = bench.group.random
        updated = {id(x) for x in bench.updated()}
        still = updated | {id(x) for x in bench.kept()}
        drawn = list(zip(bench.varied, bench.values, bench.decoys, strict=True))
        self._own = [(x, value) for x, value, _ in drawn if id(x) in updated]
        given = [x for x in drawn if x[0].numel() and x[0].dim() and id(x[0]) not in still]
        self._parts: list[_Part | _Whole] = [_Part.of(*x) for x in given if x[0].is_floating_point()]
        if given and not self._parts:  # else nothing would change, and an answer kept by version would do
            self._parts = [_Whole(tuple(_Part.of(*x) for x in given))]
        self._no_grad = torch.no_grad
        self._exchanged: set[Block] = set()
        self._way: list[Block] = []
        self._checked_at = 0
        self._step = 0
        self._seen = 0
        self._checked: _Kept | None = None
        self._kept: _Kept | None = None

    def start(self, steps: int) -> None:
        """Answers are kept from here on. There will be `steps` calls at least."""
        bench = self._bench
        if bench.mixture is None:
            blocks = [(place, block) for place, part in enumerate(self._parts) for block in range(part.blocks)]
            self._random.shuffle(blocks)
            bench.mixture = frozenset(blocks[: self._random.randrange(1, steps + 1)])
        # Through every block in which the mixture differs from now, in an order of this implementation's own.
        # Where calibrating led there by chance, away and back: no call may find the inputs of the call before it.
        self._way = list(bench.mixture ^ self._exchanged) or ([self._any()] * 2 if self._parts else [])
        self._random.shuffle(self._way)
        self._checked_at = self._step + max(1, len(self._way))
        self._seen, self._kept = 0, None

    def before(self) -> None:
        """To be called before a timed call, and before the cache is flushed."""
        self._step += 1
        if self._parts:
            self._exchange(self._way.pop() if self._way else self._any())
        if self._step == self._checked_at and self._own:
            self._bench.hold_finite()  # what is laid over it would hide it
            with self._no_grad():
                for x, value in self._own:
                    x.detach().copy_(value)

    def _any(self) -> Block:
        place = self._random.randrange(len(self._parts))
        return place, self._random.randrange(self._parts[place].blocks)

    def _exchange(self, block: Block) -> None:
        self._exchanged ^= {block}
        with self._no_grad():
            self._parts[block[0]].lay(block[1], block in self._exchanged)

    def after(self, result: object, calls: int = 1) -> None:
        """To be called with a timed call's answer when the clock has stopped, `calls` calls after `before`."""
        if self._step == self._checked_at:
            if calls == 1 or not self._own or self._apart(result):
                self._checked = self._keep(result)
        elif not self._own:
            self._seen += 1
            if self._random.randrange(self._seen) == 0:
                self._kept = None  # its memory first
                self._kept = self._keep(result)

    def _keep(self, result: object) -> _Kept:
        left = {id(x): x.detach().clone() for x, _ in self._own}
        return _Kept(copied(result), left, frozenset(self._exchanged))

    def _apart(self, result: object) -> bool:
        """Whether many calls left alone what they may update in place, so that their answer lies apart and can be
        told. Raises `Incorrect` where they gave none: they did nothing. Of updates that many calls made no answer
        can be told.
        """
        import torch

        if not all(torch.equal(x, value) for x, value in self._own):
            return False
        own = {x.data_ptr() for x, _ in self._own}
        answers = result if isinstance(result, tuple | list) else (result,)
        if any(isinstance(x, torch.Tensor) and x.data_ptr() not in own for x in answers):
            return True
        raise Incorrect("while timed: it changed nothing")

    @property
    def due(self) -> bool:
        """Whether the step that is checked is still to come."""
        return self._step < self._checked_at

    def hurry(self) -> None:
        """The next step is the one that is checked."""
        for block in self._way[1:]:
            self._exchange(block)
        self._way = self._way[:1]
        self._checked_at = self._step + 1

    def check(self, call: Callable[[], Any], tolerance: Tolerance) -> None:
        """Holds the answers that were kept against the right ones. Raises `Incorrect`."""
        bench = self._bench
        # Of a sample the answer is known for gradients that no timed call has.
        if self._checked is not None and not bench.in_part and bench.group.agreed(self._affordable()):
            self._lay(self._checked.exchanged)
            right = self._references()
            outputs = bench.comparable(self._checked.result, self._checked.updated(bench))
            with bench.group.together():
                self._compare(outputs, right, tolerance)
        self._checked = None
        if self._kept is not None:
            self._lay(self._kept.exchanged)
            outputs = bench.comparable(self._kept.result)
            again = [x.to(bench.wide) for x in bench.comparable(call())]
            if tolerance.bounded:
                again += [TWICE * x for x in self._references()[len(again) :]]
            wider = {x: TWICE * getattr(tolerance, x) for x in ("norm", "absolute", "relative")}
            twice = msgspec.structs.replace(tolerance, **wider)
            with bench.group.together():
                self._compare(outputs, again, twice)
        self._kept = None
        bench.lay(bench.values)

    def _lay(self, exchanged: frozenset[Block]) -> None:
        self._bench.lay(self._bench.values)
        with self._no_grad():
            for place, block in exchanged:
                self._parts[place].lay(block, True)

    def _affordable(self) -> bool:
        allowed = max(BUDGET_S, BUDGET_SHARE * (time.monotonic() - _began_s))
        return self._bench.mixed_references is not None or _spent_s + self._bench.reference_s <= allowed

    def _references(self) -> list[torch.Tensor]:
        """The right answer for the case's mixture, which must be laid."""
        global _spent_s
        bench = self._bench
        if bench.mixed_references is None:
            bench.mixed_references = bench.reference()
            _spent_s += bench.reference_s
        return bench.mixed_references

    def _compare(self, outputs: list[torch.Tensor], right: list[torch.Tensor], tolerance: Tolerance) -> None:
        try:
            deviation(outputs, right, tolerance)
        except Incorrect as error:
            raise Incorrect(f"while timed: {error}") from None


def copied(result: object) -> Any:
    """A copy of an answer's tensors. Raises `Incorrect` for one that is not plain: it may not be there yet."""
    import torch

    if isinstance(result, tuple | list):
        return tuple(copied(x) for x in result)
    if isinstance(result, torch.Tensor):
        if type(result) is not torch.Tensor and type(result) is not torch.nn.Parameter:
            raise Incorrect(f"its output is a {type(result).__name__} and no plain tensor")
        return result.detach().clone()
    return result
