"""Rows over the sizes of an operator: batch, length of the sequence, bytes; what the line of a chart may join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import get_args

from ..store.record import YARDSTICK, Key, Pass
from ..views.grouping import CaseRows, cases
from ..views.lines import Link, over_sizes
from ..views.looks import Series, palette
from ..views.sizes import Sweep, sweeps
from .drawing import NARROW
from .facts import file_name
from .standing import standings
from .timeline import Measured

RIVALS = 4
"""Others beside ours in a chart that is to be read at a glance."""
GLANCES = 3
"""Such charts of a device on an operator's page."""
POINTS = 300
"""Of a page's lines: a point takes 300 bytes in each of a line's two drawings."""
PASSES = get_args(Pass)


@dataclass(frozen=True)
class Swept:
    """Cases along a size on one device, each with its newest rows of one comparability key."""

    device: str
    pass_: str
    sweep: Sweep
    found: Mapping[Key, Measured]
    left_out: int = 0
    """Implementations that there is no room for."""

    @property
    def caption(self) -> str:
        """What is drawn, over which size."""
        return f"{self.pass_.replace('_', ' + ')} over {self.sweep.axis}"

    @property
    def metric(self) -> str:
        """The primary metric with its unit."""
        found = next(x for _, case in self.sweep.cases for x in case.ok)
        number = found.get()
        unit = f", {number.unit}" if number and number.unit != "1" else ""
        return f"{found.primary.replace('_', ' ').capitalize()}{unit}"

    @property
    def sizes(self) -> int:
        """How many."""
        return len(self.sweep.cases)

    @property
    def points(self) -> int:
        """Of all implementations together."""
        return sum(len(case.ok) for _, case in self.sweep.cases)

    @property
    def looks(self) -> dict[str, Series]:
        """Of the implementations that have a value in it."""
        return palette(x for _, case in self.sweep.cases for x in case.ok)

    def drawn(self, root: str, limits: bool = False) -> str | None:
        """The primary metric, or the share of the limit; each point leads to its row's lines in the journal."""
        return over_sizes(self.sweep, self.looks, limits, self._link(root), NARROW)

    def glance(self, root: str) -> Glance | None:
        """Ours beside the others that are the best of most of its cases: their share of the limit, or, where no
        limit is known, the metric.
        """
        for limits in (True, False):
            less = self.best(limits)
            if (drawing := less.drawn(root, limits)) is not None:
                return Glance(self, less.looks, drawing, "share of the limit" if limits else self.metric.lower())
        return None

    def best(self, limits: bool, most: int = RIVALS) -> Swept:
        """With the others alone that are before most in most cases, and that make a line."""
        points: dict[str, list[int]] = {}
        cases = [(size, _drawable(x, limits)) for size, x in self.sweep.cases]
        for _, case in cases:
            others = [x for x in case.ok if x is not case.ours and x.provider != YARDSTICK]
            for place, x in enumerate(reversed(others), 1):
                points.setdefault(x.implementation, []).append(place)
        ranked = sorted((x for x in points if len(points[x]) > 1), key=lambda x: -sum(points[x]))
        kept = set(ranked[:most])
        few = [
            (size, replace(x, rows=tuple(y for y in x.rows if y is x.ours or y.implementation in kept)))
            for size, x in cases
        ]
        return replace(self, sweep=replace(self.sweep, cases=tuple(x for x in few if x[1].rows)))

    def within(self, points: int) -> Swept:
        """This, or with so many points at most: ours beside the best others."""
        if self.points <= points:
            return self
        less = self.best(False, max(1, points // self.sizes - 1))
        return replace(less, left_out=len(self.looks) - len(less.looks))

    def _link(self, root: str) -> Link:
        def to(key: Key) -> str | None:
            run, fact = self.found[key]
            return root + run.row(fact.place)

        return to


@dataclass(frozen=True)
class Glance:
    """A line to be read at a glance, with who is in its drawing and what is drawn."""

    line: Swept
    looks: Mapping[str, Series]
    drawing: str
    what: str


def _drawable(case: CaseRows, limits: bool) -> CaseRows:
    """A case with the rows that have a share of the limit alone."""
    return replace(case, rows=tuple(x for x in case.rows if not limits or x.fraction_of_limit is not None))


def swept(operator: str, measured: Sequence[Measured]) -> tuple[Swept, ...]:
    """Of one operator's facts in order, oldest first: by device the lines through its cases, those of the newest
    comparability key first. What an older key has is left out where a newer one has the same line.

    Each case's rows are those of its standing: ours from the newest run that has others beside it.
    """
    by_key: dict[tuple[str, str], list[Measured]] = {}
    for run, fact in measured:
        by_key.setdefault((run.device, run.key), []).append((run, fact))
    out: dict[tuple[str, str, str, str], Swept] = {}
    for (device, _), of_key in sorted(by_key.items(), key=_newest, reverse=True):
        found: dict[Key, Measured] = {}
        for standing in standings(operator, of_key):
            for case in standing.cases:
                found |= {fact.identity: (run, fact) for run, fact in case.latest if fact.number is not None}
                if case.ours is not None and case.ours[1].number is not None:
                    found[case.ours[1].identity] = case.ours
        by_pass: dict[str, list[CaseRows]] = {}
        for x in cases(fact.row() for _, fact in found.values()):
            by_pass.setdefault(x.pass_, []).append(x)
        for pass_, of_pass in by_pass.items():
            for sweep in sweeps(of_pass):
                line = Swept(device, pass_, sweep, found)
                out.setdefault((device, pass_, sweep.axis, sweep.common), line.within(POINTS))
    return tuple(sorted(out.values(), key=lambda x: (x.device, PASSES.index(x.pass_), -x.sizes)))


def _newest(of_key: tuple[tuple[str, str], Sequence[Measured]]) -> str:
    return max(run.created for run, _ in of_key[1])


def glances(found: Sequence[Swept], root: str, most: int = GLANCES) -> list[Glance]:
    """A few of one device's lines to be read at a glance, of each pass the longest first."""
    by_pass: dict[str, list[Swept]] = {}
    for x in found:
        by_pass.setdefault(x.pass_, []).append(x)
    in_turns = [x for row in zip_longest(*by_pass.values()) for x in row if x is not None]
    out: list[Glance] = []
    for x in in_turns:
        if len(out) < most and (drawn := x.glance(root)) is not None:
            out.append(drawn)
    return out


def parts(found: Sequence[Swept]) -> dict[str, list[Swept]]:
    """An operator's lines by page: those of a pass, on several pages where they have many points."""
    out: dict[str, list[Swept]] = {}
    for pass_ in dict.fromkeys(x.pass_ for x in found):
        number, used = 1, 0
        for x in found:
            if x.pass_ == pass_:
                if used and used + x.points > POINTS:
                    number, used = number + 1, 0
                used += x.points
                out.setdefault(pass_ if number == 1 else f"{pass_}-{number}", []).append(x)
    return out


def page_of(operator: str, part: str) -> str:
    """The page of a part of an operator's lines, from the site's root. No operator's own file name has a dot."""
    return f"scaling/{file_name(operator)}.{part}.html"


def part_name(part: str) -> str:
    """A part for people."""
    return part.replace("_", " + ").replace("-", " ")
