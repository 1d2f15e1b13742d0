"""The ranks of a case, as one of them sees the others. What measures runs alike in all of them, in step.

A rank's own clock and its own answer decide nothing by themselves: whoever asks `agreed` gets rank 0's value,
`largest` the largest of all ranks', and what a rank raises within `together` all of them raise.

A value is gathered with the place that it belongs to. Ranks whose places differ are out of step, as where one
raised between two collectives: nothing that they say to each other means anything from there on, so they end.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from ...registry.errors import first_line
from .verify import Incorrect, Unavailable

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """An exception of some rank in a form that can be sent: its kind as the harness tells them apart."""

    kind: str
    text: str
    rank: int

    @classmethod
    def of(cls, error: Exception, rank: int) -> Failure:
        """What an exception of that rank says."""
        import torch

        text = first_line(error)[:300]
        if isinstance(error, torch.OutOfMemoryError):
            return cls("MemoryError", text, rank)
        kind = next((name for name, known in _KINDS.items() if isinstance(error, known)), "")
        return cls(kind, text if kind else f"{type(error).__name__}: {text}", rank)

    def error(self, size: int) -> Exception:
        """The exception as the other ranks raise it."""
        return _KINDS.get(self.kind, RuntimeError)(f"rank {self.rank} of {size}: {self.text}")


_KINDS: dict[str, type[Exception]] = {
    "Incorrect": Incorrect,
    "Unavailable": Unavailable,
    "NotImplementedError": NotImplementedError,
    "MemoryError": MemoryError,
    "ImportError": ImportError,
}


class Group(Protocol):
    """What the stages need of the other ranks."""

    @property
    def rank(self) -> int:
        """Which rank this process is, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def random(self) -> random.Random:
        """Random numbers that nobody can foresee, the same in all ranks."""
        ...

    @property
    def barrier(self) -> Callable[[], None] | None:
        """Lets no rank go on before all are there, in the order of the device's work; None for one process."""
        ...

    def every(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        ...

    def agreed(self, value: T) -> T:
        """Rank 0's value."""
        ...

    def gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, all of one shape and dtype, by rank."""
        ...

    def together(self) -> contextlib.AbstractContextManager[None]:
        """What any rank raises inside, all raise at its end: none goes on, or waits, without the others."""
        ...


class Alone:
    """A process without others."""

    rank = 0
    size = 1
    barrier = None
    random: random.Random = random.SystemRandom()

    def every(self, value: T) -> list[T]:
        return [value]

    def agreed(self, value: T) -> T:
        return value

    def gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


ALONE = Alone()


class Watcher(Protocol):
    """Whoever must know that a rank failed before the others do: they may be waiting for it inside a call."""

    def failed(self, count: int, failure: Failure) -> None:
        """A rank failed before the end of a `together`, the one of that number in the order of their ends."""
        ...

    def settled(self, count: int) -> None:
        """All ranks came to the end of the `together` of that number."""
        ...


@dataclass
class Ranked:
    """One rank of several, or of one, within torch's process groups.

    `control` is a gloo group for decisions, `data` one of the device's kind for tensors. Both are the harness's
    own: implementations have the default group.
    """

    rank: int
    size: int
    control: Any
    data: Any
    watcher: Watcher
    device: torch.device
    random: random.Random = field(init=False)
    _ended: int = 0
    _depth: int = 0
    _one: Any = None

    def __post_init__(self) -> None:
        import torch

        self.random = random.Random(self.agreed(secrets.randbits(64)))
        self._one = torch.ones(1, device=self.device)

    def barrier(self) -> None:
        import torch.distributed as dist

        if self.device.type == "cuda":
            dist.all_reduce(self._one, dist.ReduceOp.MAX, group=self.data)  # queued, as a call is
        else:
            dist.barrier(group=self.control)

    def every(self, value: T) -> list[T]:
        return self._every(value, ends=False)

    def _every(self, value: T, ends: bool) -> list[T]:
        """Every rank's value of one place: before or at the end of which `together`, how deep within others."""
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, ((self._ended, self._depth, ends), value), group=self.control)
        if len({place for place, _ in found}) > 1:
            failures = (x for _, x in found if isinstance(x, Failure))
            self._stuck(next(failures, Failure("", "the ranks are out of step", self.rank)))
        return [x for _, x in found]

    def agreed(self, value: T) -> T:
        return self.every(value)[0]

    def gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        import torch
        import torch.distributed as dist

        own = tensor.detach().contiguous()
        # Of any dtype; in a row first: a dimension of size 1 may have any stride, and torch views only 1 as bytes.
        raw = own.reshape(-1).view(torch.uint8)
        found = [torch.empty_like(raw) for _ in range(self.size)]
        dist.all_gather(found, raw, group=self.data)
        return [x.view(own.dtype).view(own.shape) for x in found]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        self._depth += 1
        own: Exception | None = None
        try:
            try:
                yield
            except Exception as error:  # of any kind: the others must not wait for what does not come
                own = error
            failure = None if own is None else Failure.of(own, self.rank)
            if failure is not None:
                self.watcher.failed(self._ended + 1, failure)
            try:
                said = self._every(failure, ends=True)
            except Exception as error:  # of a group that has lost a rank: which one is seen from outside
                self._stuck(Failure.of(error, self.rank))
        finally:
            self._depth -= 1
        self._ended += 1
        self.watcher.settled(self._ended)
        first = next((x for x in said if x is not None), None)
        if first is None:
            return
        if own is not None and (first.rank == self.rank or all(x is not None for x in said)):
            raise own
        raise first.error(self.size)

    def _stuck(self, failure: Failure) -> NoReturn:
        """Waits for its end, which comes with the reason."""
        self.watcher.failed(self._ended + 1, failure)
        while True:
            time.sleep(1.0)


def largest(group: Group, samples: Sequence[float]) -> tuple[list[float], list[tuple[float, ...]]]:
    """The largest over ranks of each sample, and each sample of all ranks. All must have taken as many.

    Raises `Incorrect` where they did not: the ranks are out of step.
    """
    all_ = group.every(tuple(samples))
    if len({len(x) for x in all_}) > 1:
        raise Incorrect(f"ranks took {sorted({len(x) for x in all_})} samples: they are out of step")
    by_sample = list(zip(*all_, strict=True))
    return [max(x) for x in by_sample], by_sample
