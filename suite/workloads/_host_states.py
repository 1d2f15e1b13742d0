"""Optimizer states that lie in the host's memory between updates.

They are kept in buckets, in the order in which gradients come: the last parameter's first. A bucket is copied
into a slot on the device, updates its piece of the weights there, and is copied back, while the next one comes in
and the backward pass goes on. Which work waits for which is said by events; nothing waits on the host.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from ..measure.host_copies import room

if TYPE_CHECKING:
    import torch

Direction: TypeAlias = Literal["in", "out"]
Update: TypeAlias = Callable[..., Any]
"""An implementation of the operator `adamw` with its step and hyperparameters given: params, grads, and the states
by their names.
"""

BUCKET = 1 << 27
"""Elements of a bucket: 256 MiB of a 16-bit state, above which a copy gets no faster. A power of two, to which
pinned memory is rounded up.
"""
SLOTS = 3
"""Buckets on the device at a time: one comes in, one is used, one goes out."""


class Lanes(Protocol):
    """Queues of copies. What is queued in one direction is done in that order; the two do not wait for each other,
    nor for what the device computes, but for the events given.
    """

    overlaps: bool
    """Whether copies are done while the device computes, so that they are worth beginning early."""

    def queue(self, direction: Direction, work: Callable[[], None], after: Iterable[Any]) -> Any:
        """Queues copies; gives the event of their end."""
        ...

    def mark(self) -> Any:
        """The event of all that has been computed so far."""
        ...

    def wait(self, event: Any) -> None:
        """What is computed from now on comes after the event."""
        ...

    def settle(self) -> None:
        """Returns when all is done."""
        ...


class InTurn:
    """Everything one after the other, on the stream that computes: what a program does that overlaps nothing."""

    overlaps = False

    def queue(self, direction: Direction, work: Callable[[], None], after: Iterable[Any]) -> Any:
        work()

    def mark(self) -> Any:
        return None

    def wait(self, event: Any) -> None:
        """It is done, or queued on the same stream."""

    def settle(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Streams:
    """A CUDA stream a direction."""

    overlaps = True

    def __init__(self) -> None:
        import torch

        self._streams = {"in": torch.cuda.Stream(), "out": torch.cuda.Stream()}

    def queue(self, direction: Direction, work: Callable[[], None], after: Iterable[Any]) -> Any:
        import torch

        stream = self._streams[direction]
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            work()
        return stream.record_event()

    def mark(self) -> Any:
        import torch

        return torch.cuda.current_stream().record_event()

    def wait(self, event: Any) -> None:
        import torch

        torch.cuda.current_stream().wait_event(event)

    def settle(self) -> None:
        import torch

        torch.cuda.synchronize()


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a parameter, by its number, and where they begin in their bucket."""

    parameter: int
    start: int
    stop: int
    at: int


def buckets(sizes: Sequence[int], largest: int) -> tuple[tuple[Piece, ...], ...]:
    """Parameters of these sizes in buckets of at most so many elements, the last parameter first."""
    found: list[list[Piece]] = [[]]
    used = 0
    for parameter in reversed(range(len(sizes))):
        start = 0
        while start < sizes[parameter]:
            if used == largest:
                found.append([])
                used = 0
            stop = min(sizes[parameter], start + largest - used)
            found[-1].append(Piece(parameter, start, stop, used))
            used += stop - start
            start = stop
    return tuple(map(tuple, found))


@dataclass
class _Bucket:
    pieces: tuple[Piece, ...]
    host: dict[str, Any]
    """Its states, each flat in pinned memory."""

    @property
    def size(self) -> int:
        return self.pieces[-1].at + self.pieces[-1].stop - self.pieces[-1].start


@dataclass
class _Slot:
    states: dict[str, Any]
    loaded: Any = None
    free: list[Any] = field(default_factory=list)
    """The event after which it may be written to, and the host has what was in it and all that went out before;
    none before the first use."""


class HostStates:
    """The states of these parameters, in the host's memory. Every step: `begin`, `listen`, `finish`."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
        lanes: Lanes,
        largest: int = BUCKET,
    ) -> None:
        import torch

        self._params = params
        self._lanes = lanes
        self._moving = True
        self._listening = False
        self._ready: set[int] = set()
        self._next = 0
        self._update: Update | None = None
        device = params[0].device
        pinned = device.type == "cuda"
        self._buckets = []
        for pieces in buckets([x.numel() for x in params], largest):
            bucket = _Bucket(pieces, {})
            for name, dtype in dtypes.items():
                bucket.host[name] = torch.empty(bucket.size, dtype=dtype, pin_memory=pinned)
            self._buckets.append(bucket)
        widest = max(x.size for x in self._buckets)
        self._slots = [
            _Slot({name: torch.empty(widest, dtype=x, device=device) for name, x in dtypes.items()})
            for _ in range(min(SLOTS, len(self._buckets)))
        ]
        for number, x in enumerate(params):
            x.register_post_accumulate_grad_hook(_arrival(weakref.ref(self), number))

    def reset(self) -> None:
        """Moments are 0, and masters are the weights as they are."""
        import torch

        self._lanes.settle()
        with torch.no_grad():
            for bucket in self._buckets:
                for name, x in bucket.host.items():
                    x.zero_()
                    if name == "masters":
                        for piece in bucket.pieces:
                            self._part(x, piece).copy_(self._flat(self._params[piece.parameter], piece))

    def begin(self, update: Update) -> None:
        """A step begins, with its update; the first buckets come in while its forward pass runs."""
        self._ready.clear()
        self._next = 0
        self._update = update
        if self._lanes.overlaps:
            self._fill()

    def listen(self, listening: bool) -> None:
        """Whether gradients that come from now on are whole, so that what they belong to can be updated."""
        self._listening = listening and self._lanes.overlaps

    def finish(self) -> None:
        """All gradients are there: updates what has not been."""
        self._listening = False
        if not self._lanes.overlaps:
            self._fill()
        self._ready.update(range(len(self._params)))
        self._advance()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Within it nothing is moved, and updates are of whatever lies in the slots: for what moving costs."""
        self._moving = False
        try:
            yield
        finally:
            self._moving = True

    def arrived(self, number: int) -> None:
        """A parameter has a gradient of a micro-batch."""
        if self._listening:
            self._ready.add(number)
            self._advance()

    def _advance(self) -> None:
        """Updates the buckets that are next, as far as all their gradients are there."""
        while self._next < len(self._buckets) and self._ready.issuperset(
            x.parameter for x in self._buckets[self._next].pieces
        ):
            self._use(self._next)
            self._next += 1

    def _fill(self) -> None:
        """Queues the first buckets' copies."""
        for place in range(len(self._slots)):
            self._fetch(place)

    def _fetch(self, place: int) -> None:
        """Queues a bucket's copy into its slot, which is the same in every step, once that is free."""
        bucket, slot = self._buckets[place], self._slots[place % len(self._slots)]

        def copy() -> None:
            for name, x in bucket.host.items():
                slot.states[name][: bucket.size].copy_(x, non_blocking=True)

        if self._moving:
            slot.loaded = self._lanes.queue("in", copy, slot.free)

    def _use(self, place: int) -> None:
        """Updates a bucket's weights, sends its states back, and has the next bucket of the slot come in."""
        import torch

        bucket, slot = self._buckets[place], self._slots[place % len(self._slots)]
        if self._moving:
            self._lanes.wait(slot.loaded)
        states = {name: [self._part(x, y) for y in bucket.pieces] for name, x in slot.states.items()}
        params = [self._params[x.parameter] for x in bucket.pieces]
        assert self._update is not None, "a step begins before it updates"
        with torch.no_grad():
            self._update(
                params=[self._flat(x, y) for x, y in zip(params, bucket.pieces, strict=True)],
                grads=[self._flat(x.grad, y) for x, y in zip(params, bucket.pieces, strict=True)],
                exp_avgs=states["exp_avgs"],
                exp_avg_sqs=states["exp_avg_sqs"],
                masters=states.get("masters"),
            )

        def copy() -> None:
            for name, x in bucket.host.items():
                x.copy_(slot.states[name][: bucket.size], non_blocking=True)

        if self._moving:
            slot.free = [self._lanes.queue("out", copy, (self._lanes.mark(),))]
        if place + len(self._slots) < len(self._buckets):
            self._fetch(place + len(self._slots))

    @staticmethod
    def _part(x: torch.Tensor, piece: Piece) -> torch.Tensor:
        """A piece of a bucket's flat memory."""
        return x[piece.at : piece.at + piece.stop - piece.start]

    @staticmethod
    def _flat(x: Any, piece: Piece) -> torch.Tensor:
        """A piece of a parameter or its gradient, of which the memory has no gaps."""
        found: torch.Tensor = x.detach().view(-1)[piece.start : piece.stop]
        return found


def _arrival(states: weakref.ref[HostStates], number: int) -> Callable[[Any], None]:
    """A parameter's hook. Python's collector does not see that a tensor has it: a reference from it would keep
    states and weights for as long as the process lives.
    """

    def arrived(parameter: Any) -> None:
        if (own := states()) is not None:
            own.arrived(number)

    return arrived


class HostUpdate:
    """States, and a copy of what is updated, in the host's memory; the host updates, and weights come back."""

    def __init__(self, params: Sequence[torch.Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
        self._params = params
        self._states = {name: room(params, dtype) for name, dtype in dtypes.items()}
        self._own, self._grads = (room(params) for _ in range(2))
        self._moving = True
        self._update: Update | None = None

    def reset(self) -> None:
        """As of `HostStates`."""
        import torch

        with torch.no_grad():
            for name, tensors in self._states.items():
                for x, weight in zip(tensors, self._params, strict=True):
                    if name == "masters":
                        x.copy_(weight)
                    else:
                        x.zero_()
            for own, weight in zip(self._own, self._params, strict=True):
                own.copy_(weight)

    def begin(self, update: Update) -> None:
        """A step begins, with its update."""
        self._update = update

    def listen(self, listening: bool) -> None:
        """Gradients are fetched when all are there."""

    def finish(self) -> None:
        """Gradients to the host, the update, and weights back."""
        import torch

        assert self._update is not None, "a step begins before it updates"
        if not self._moving:
            return
        with torch.no_grad():
            for grad, weight in zip(self._grads, self._params, strict=True):
                assert weight.grad is not None, "all gradients are there"
                grad.copy_(weight.grad)
            self._update(
                params=self._own,
                grads=self._grads,
                exp_avgs=self._states["exp_avgs"],
                exp_avg_sqs=self._states["exp_avg_sqs"],
                masters=self._states.get("masters"),
            )
            for own, weight in zip(self._own, self._params, strict=True):
                weight.copy_(own, non_blocking=True)

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Within it nothing is moved or updated."""
        self._moving = False
        try:
            yield
        finally:
            self._moving = True
