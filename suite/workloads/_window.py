"""The timed window of training: steps one after the other on fresh tokens, events at their edges."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..measure.group import ALONE, Group, largest
from ..measure.stopping import Sampling, finished
from ..measure.telemetry import Watch

if TYPE_CHECKING:
    import torch

    from ._trainer import Trainer

AHEAD = 5
"""Steps in a block: after each block the host waits, looks at the clock and reads the device's telemetry."""
SLOPE = 0.005
"""By how much the later half of ten steps may differ from the earlier, relative, for a warm-up to be over."""
WINDOW = 10


@dataclass
class Clock:
    """Edges of steps: CUDA events, or the host's clock on a CPU."""

    cuda: bool
    _edges: list[Any] = field(default_factory=list)

    def edge(self) -> None:
        """Marks an edge, in stream order."""
        if not self.cuda:
            self._edges.append(time.perf_counter_ns())
            return
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._edges.append(event)

    def take(self) -> list[float]:
        """Milliseconds between the edges so far, which are then forgotten; waits for the last."""
        edges, self._edges = self._edges, []
        if not edges:
            return []
        if not self.cuda:
            return [(b - a) / 1e6 for a, b in pairwise(edges)]
        edges[-1].synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(edges)]


@dataclass
class Window:
    """Runs a trainer, in each rank of `group`, of which the slowest counts. `draw(step)` gives fresh tokens; they
    are copied to where the last ones lay, so that a program that goes by an address and not by what lies there is
    wrong.
    """

    trainer: Trainer
    draw: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    cuda: bool
    group: Group = ALONE
    losses: list[Any] = field(default_factory=list)
    _at: int = 0
    _buffers: tuple[Any, Any] | None = None

    def step(self, number: int | None = None) -> Any:
        """One step on the next batch, or on the batch of a number; its loss, still on the device."""
        if number is None:
            number, self._at = self._at, self._at + 1
        batch = self.draw(number)
        if self._buffers is None:
            self._buffers = (batch[0].clone(), batch[1].clone())
        for own, fresh in zip(self._buffers, batch, strict=True):
            own.copy_(fresh)
        return self.trainer.step(*self._buffers)

    def block(self, steps: int) -> list[float]:
        """Milliseconds of so many steps in a row. Drawing tokens is inside, as loading them is in training."""
        clock = Clock(self.cuda)
        clock.edge()
        for _ in range(steps):
            self.losses.append(self.step())
            clock.edge()
        return clock.take()

    def warm_up(self, limit_s: float) -> None:
        """Steps until the halves of the last ten differ by little, or the time is up; three at the least."""
        times: list[float] = []
        begin = time.monotonic()
        while self.group.agreed(len(times) < 3 or (not level(times) and time.monotonic() - begin < limit_s)):
            times += self.block(1)

    def sample(
        self,
        sampling: Sampling,
        watch: Watch,
        checked: int,
        check: Callable[[Callable[[], Any]], float],
    ) -> list[float]:
        """Milliseconds of each step. Step number `checked` is one of them: `check` is given that step to run, on
        what it has prepared, and gives its time.
        """
        samples: list[float] = []
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # a collection in a step is a step that is longer for no reason of the system's
        watch.read()
        begin = time.monotonic()
        try:
            while not self.group.agreed(finished(samples, time.monotonic() - begin, sampling)):
                first = len(samples)
                if first == checked:
                    taken = [check(self._one)]
                else:
                    most = min(x for x in (AHEAD, sampling.max_samples - first, checked - first) if x > 0)
                    with watch.during():
                        taken = self.block(most)
                samples += largest(self.group, taken)[0]
                watch.read(first, len(samples))
        finally:
            if collecting:
                gc.enable()
        return samples

    def alone(self) -> list[float] | None:
        """Milliseconds of steps in which nothing is sent; None where that cannot be. Weights differ after."""
        spread = getattr(self.trainer, "parallel", None)
        if spread is None or self.group.size == 1:
            return None
        try:
            without = spread.local()
        except NotImplementedError:
            return None
        return self._within(without)

    def unmoved(self) -> list[float] | None:
        """Milliseconds of steps in which no optimizer state is moved; None where none lies on the host. Weights
        differ after.
        """
        host = getattr(self.trainer, "host", None)
        return None if host is None else self._within(host.still())

    def _within(self, state: contextlib.AbstractContextManager[None]) -> list[float]:
        with state:
            return largest(self.group, self.block(AHEAD))[0]

    def _one(self) -> tuple[float, Any]:
        """The checked step: its milliseconds and its loss."""
        clock = Clock(self.cuda)
        clock.edge()
        loss = self.step(-1)
        clock.edge()
        return clock.take()[0], loss


def level(times: Sequence[float]) -> bool:
    """Whether the last ten steps have no slope left."""
    if len(times) < WINDOW:
        return False
    half = WINDOW // 2
    early, late = (sorted(x)[half // 2] for x in (times[-WINDOW:-half], times[-half:]))
    return abs(late - early) <= SLOPE * early
