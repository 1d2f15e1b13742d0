"""When a run will be over: from what its cells cost so far. Pure, but for the clock that it is given."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from statistics import fmean

from ...registry.store.record import Key, Record, Status

LASTING: frozenset[Status] = frozenset(
    {"unsupported", "unavailable", "out_of_memory", "timeout", "crashed", "error"}
)
"""What is not tried again in later replicates: it would end the same way, and a hang costs its deadline."""
ENOUGH, SHARE = 3, 0.05
"""Cells, and of all of them, that must have ended before a time is promised: the first ones compile, and vary."""


@dataclass
class Pace:
    """Seconds left of a session. `todo` are the rows and replicates to be measured in it.

    A row that was measured before will cost as much again; one that was not, what its implementation's rows cost
    on average. What cannot run here was never to be measured, and costs nothing.
    """

    todo: set[tuple[Key, int]]
    clock: Callable[[], float] = time.monotonic
    total: int = field(init=False)
    _last: float = field(init=False)
    _starting: bool = True
    _starts_s: list[float] = field(default_factory=list)
    _begun: set[int] = field(default_factory=set)
    _row_s: dict[Key, float] = field(default_factory=dict)
    _implementation_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, todo: Collection[tuple[Key, int]], clock: Callable[[], float] = time.monotonic) -> Pace:
        """From rows and replicates."""
        return cls(set(todo), clock)

    def __post_init__(self) -> None:
        self.total = len(self.todo)
        self._last = self.clock()

    @property
    def ended(self) -> int:
        """Cells that ended in this session, or that need not be measured any more."""
        return self.total - len(self.todo)

    def stage(self, replicate: int, in_cell: bool) -> None:
        """A stage begins; outside of cells, a worker starts or measures the device."""
        now = self.clock()
        if not in_cell:
            self._starting = True
        elif self._starting:
            self._starts_s.append(now - self._last)
            self._begun.add(replicate)
            self._starting, self._last = False, now

    def end(self, record: Record) -> None:
        """A cell ended."""
        place = (record.identity, record.replicate)
        if place not in self.todo:
            return
        now = self.clock()
        seconds, self._last = now - self._last, now
        self.todo.discard(place)
        self._row_s[record.identity] = seconds
        self._implementation_s[record.implementation].append(seconds)
        if record.status in LASTING:
            self.todo = {x for x in self.todo if x[0] != record.identity}

    def left_s(self) -> float | None:
        """Seconds left; None before enough is known."""
        seen = sum(map(len, self._implementation_s.values()))
        if not self.todo:
            return 0.0
        if seen < min(self.total, max(ENOUGH, SHARE * self.total)):
            return None
        everything = fmean(x for costs in self._implementation_s.values() for x in costs)
        means = {name: fmean(costs) for name, costs in self._implementation_s.items()}
        cells = sum(self._row_s.get(key, means.get(key.implementation, everything)) for key, _ in self.todo)
        starts = len({replicate for _, replicate in self.todo} - self._begun)
        return cells + starts * (fmean(self._starts_s) if self._starts_s else 0.0)
