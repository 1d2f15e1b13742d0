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
"""Of what rows cost first, what they cost again, until that is known."""
SUPPOSED = 2
"""That supposition counts for as much as so many rows that were seen again."""
START = "start"
"""The stage in which a worker begins."""


@dataclass
class Pace:
    """Seconds left of a session. `todo` are the rows and replicates to be measured in it.

    A row costs what it cost last, which follows the machine's other load. Where it was measured once it costs less
    again, as what was compiled is kept: how much less is learned as soon as rows are repeated. One that was not
    measured will cost what its implementation's rows cost, nearer to what all rows do where only one was seen: the
    first one loads what the others find loaded. A replicate begins with workers that start and measure the
    device's limits. What cannot run here was never to be measured, and costs nothing.
    """

    todo: set[tuple[Key, int]]
    clock: Callable[[], float] = time.monotonic
    total: int = field(init=False)
    _last: float = field(init=False)
    _starting: bool = False
    _starts_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """By replicate."""
    _row_s: dict[Key, float] = field(default_factory=dict)
    """What each row cost last."""
    _repeated: set[Key] = field(default_factory=set)
    _repeated_s: tuple[float, float] = (0.0, 0.0)
    """Of rows that were measured again: what they cost first, and the second time."""
    _new_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By implementation, what its rows cost first."""

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

    def stage(self, replicate: int, name: str, in_cell: bool) -> None:
        """A stage begins. What is not a worker's start belongs to the cell after it: the inputs of a case, say."""
        if name == START and not in_cell:
            if not self._starts_s:
                self._last = self.clock()  # whatever went before the first worker is not to come again
            self._starting = True
        elif in_cell and self._starting:
            now = self.clock()
            self._starts_s[replicate] += now - self._last
            self._starting, self._last = False, now

    def end(self, record: Record) -> None:
        """A cell ended."""
        place = (record.identity, record.replicate)
        if place not in self.todo:
            return
        now = self.clock()
        seconds, self._last = now - self._last, now
        self.todo.discard(place)
        if (before := self._row_s.get(record.identity)) is None:
            self._new_s[record.implementation].append(seconds)
        elif record.identity not in self._repeated:
            self._repeated.add(record.identity)
            self._repeated_s = self._repeated_s[0] + before, self._repeated_s[1] + seconds
        self._row_s[record.identity] = seconds
        if record.status in LASTING:
            self.todo = {x for x in self.todo if x[0] != record.identity}

    def left_s(self) -> float | None:
        """Seconds left; None before enough is known."""
        if not self.todo:
            return 0.0
        new_s = [x for costs in self._new_s.values() for x in costs]
        if not new_s or self.ended < min(self.total, max(ENOUGH, SHARE * self.total)):
            return None
        everything = median(new_s)
        likely = {
            name: fmean(costs) if len(costs) > 1 else (costs[0] + everything) / 2
            for name, costs in self._new_s.items()
        }
        supposed_s = SUPPOSED * fmean(new_s)
        first_s, again_s = self._repeated_s
        known = first_s + supposed_s
        again = (again_s + AGAIN * supposed_s) / known if known else AGAIN
        met: set[Key] = set()
        cells = 0.0
        for key, _ in self.todo:
            seconds = self._row_s.get(key, likely.get(key.implementation, everything))
            first = key not in self._row_s and key not in met
            met.add(key)
            cells += seconds if first or key in self._repeated else seconds * again
        starts = {replicate for _, replicate in self.todo} - self._starts_s.keys()
        return cells + len(starts) * (fmean(self._starts_s.values()) if self._starts_s else 0.0)
