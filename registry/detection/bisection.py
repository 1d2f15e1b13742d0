"""Which of many commits a change came with: bisection with a comparator that may not know. Pure.

Commits are numbered from 1 to `count` in their order, 0 is the baseline; `count` is known to be slower. A
step asks of one commit whether it is on the slow side of *half* the whole change, so that of several causes
the one that crosses the half is found. Where a step cannot tell, the search stops: what is known then is a
range, and guessing on would name an innocent.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import msgspec

from ..store.record import Key
from .verdict import COMPARED, Verdict

Answer: TypeAlias = Literal["slower", "same", "unknown", "broken"]
"""`broken`: the commit cannot be measured (it does not build, or has no such kernel), and is passed over."""


class Suspect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A commit that a change may have come with; `date` is the author's, ISO 8601."""

    commit: str
    date: str
    author: str
    subject: str


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a bisection found for one row: one suspect, or several where a step could not tell them apart.

    `change`, `low` and `high` are of the suspects together: the last one against the commit before the first.
    """

    key: Key
    suspects: tuple[Suspect, ...]
    reason: str
    change: float | None = None
    low: float | None = None
    high: float | None = None
    steps: int = 0


@dataclass(frozen=True)
class Search:
    """Where a bisection stands: the first slow commit is among `suspects`."""

    high: int
    low: int = 0
    broken: frozenset[int] = field(default=frozenset())
    stopped_at: int | None = None
    """The commit that could not be told, where the search ended on one."""

    @property
    def suspects(self) -> tuple[int, ...]:
        """The commits, one of which the change came with; one if it was found."""
        return tuple(range(self.low + 1, self.high + 1))

    def next(self, known: Collection[int] = ()) -> int | None:
        """The commit to ask about, nearest to the middle; among `known` ones if there is any between, since they
        cost nothing. None where the search has ended."""
        if self.stopped_at is not None:
            return None
        left = [i for i in range(self.low + 1, self.high) if i not in self.broken]
        middle = (self.low + self.high) / 2
        free = [i for i in left if i in known]
        return min(free or left, key=lambda i: (abs(i - middle), i), default=None)

    def told(self, index: int, answer: Answer) -> Search:
        """The search with what is known of one commit added; what contradicts nothing known and adds nothing is
        passed over."""
        if not self.low < index < self.high or self.stopped_at is not None:
            return self
        if answer == "slower":
            return replace(self, high=index)
        if answer == "same":
            return replace(self, low=index)
        if answer == "broken":
            return replace(self, broken=self.broken | {index})
        return replace(self, stopped_at=index)


def judge(verdict: Verdict, whole: float) -> Answer:
    """What a comparison of the baseline with one commit says about it.

    `whole` is the whole change (current / base - 1, above 0), which the verdict's interval is held against:
    it must lie wholly on one side of half of it.
    """
    if verdict.kind not in COMPARED and verdict.kind != "not comparable":
        return "broken"
    if verdict.kind == "no change" and verdict.change is None:
        return "same"  # by its code: nothing had to be measured
    if verdict.low is None or verdict.high is None or verdict.kind == "not comparable":
        return "unknown"
    half = math.expm1(math.log1p(whole) / 2)
    if verdict.low > half:
        return "slower"
    return "same" if verdict.high < half else "unknown"
