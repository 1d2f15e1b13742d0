"""When a run will be over: from what its cells cost so far. Pure, but for the clock that it is given."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from statistics import fmean, median

from ...registry.store.record import Key, Record, Status

LASTING: frozenset[Status] = frozenset(
    {"unsupported", "unavailable", "out_of_memory", "timeout", "crashed", "error"}
)
"""What is not tried again in later replicates: it would end the same way, and a hang costs its deadline."""
ENOUGH, SHARE = 4, 0.05
"""Cells, and of all of them, that must have ended before a time is promised: the first ones compile, and vary."""
AGAIN = 0.5
"""Of what a row cost first, what it costs again, until that is known."""


@dataclass
class Pace:
    """Seconds left of a session. `todo` are the rows and replicates to be measured in it.

    A row that was measured before costs less again, as what was compiled is kept: how much less is learned as
    soon as rows are repeated. One that was not will cost what its implementation's rows cost, nearer to what all
    rows do where only one was seen: the first one loads what the others find loaded. What cannot run here was
    never to be measured, and costs nothing.
    """

    todo: set[tuple[Key, int]]
    clock: Callable[[], float] = time.monotonic
    total: int = field(init=False)
    _last: float = field(init=False)
    _starting: bool = False
    _starts_s: list[float] = field(default_factory=list)
    _begun: set[int] = field(default_factory=set)
    _row_s: dict[Key, float] = field(default_factory=dict)
    _repeated_s: tuple[float, float] = (0.0, 0.0)
    """Of rows that were measured again: what they cost first, and again."""
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
            if not self._starting and not self._starts_s:
                self._last = now  # whatever went before the first worker is not to come again
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
        if (first := self._row_s.get(record.identity)) is None:
            self._row_s[record.identity] = seconds
        else:
            self._repeated_s = self._repeated_s[0] + first, self._repeated_s[1] + seconds
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
        everything = median(x for costs in self._implementation_s.values() for x in costs)
        likely = {
            name: fmean(costs) if len(costs) > 1 else (costs[0] + everything) / 2
            for name, costs in self._implementation_s.items()
        }
        first_s, again_s = self._repeated_s
        again = again_s / first_s if first_s else AGAIN
        new: set[Key] = set()
        cells = 0.0
        for key, _ in self.todo:
            unseen = key not in self._row_s and key not in new
            new.add(key)
            cells += self._row_s.get(key, likely.get(key.implementation, everything)) * (1.0 if unseen else again)
        starts = len({replicate for _, replicate in self.todo} - self._begun)
        return cells + starts * (fmean(self._starts_s) if self._starts_s else 0.0)
