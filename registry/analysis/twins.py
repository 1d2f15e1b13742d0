"""Whether a layout or a length costs time: ours in cases that differ in nothing else. Pure.

Two goals are of the attention that models call: tensors stored (B, S, H, D), as a projection leaves them, beside
(B, H, S, D); and 5,000 tokens beside 5,120, the next multiple of every tile. Each quotient is paired over
processes, each of which timed both cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ..store.journal import Journal
from ..store.processes import by_process
from ..store.record import PROVIDER, Cache, Case, Record, ended
from .rows import speedup

Verdict: TypeAlias = Literal["earned", "missed", "undecided", "not shown"]
What: TypeAlias = Literal["layout", "length"]
MOST = 1.02
"""The goal of both quotients."""
STORAGE, LENGTH = "storage", "S"
"""The option of a case that says how its tensors lie, and its axis of tokens."""
HEADS_FIRST = "bhsd"
TOKENS_FIRST = ("bshd", "packed")
"""(B, S, H, D) as tensors of their own, or as views of one projection."""
RAGGED, WHOLE = 5000, 5120


@dataclass(frozen=True)
class Twins:
    """The time of one case over that of another, by one implementation of ours."""

    what: What
    case: Case
    against: Case
    implementation: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    """The 95 % interval; None where fewer than two processes have both."""
    missing: str = ""
    """Why there is no quotient."""

    @property
    def verdict(self) -> Verdict:
        """By the interval: a quotient without one decides nothing."""
        if self.ratio is None:
            return "not shown"
        if self.high is not None and self.high <= MOST:
            return "earned"
        return "missed" if self.low is not None and self.low > MOST else "undecided"


def twins(journal: Journal) -> tuple[Twins, ...]:
    """Every two cases of a run that differ in layout alone, or in these two lengths alone, timed or not: what was
    asked for and is missing must not pass for shown.
    """
    found: dict[tuple[str, str], dict[tuple[str, Cache], list[Record]]] = {}
    for x in journal.records:
        if x.provider == PROVIDER:
            rows = found.setdefault((x.case.operator, x.case.name), {})
            rows.setdefault((x.implementation, x.cache), []).append(x)
    out = []
    for what, case, against in _pairs(journal):
        own, other = (found.get((x.operator, x.name), {}) for x in (case, against))
        for row in {**own, **other} or {(PROVIDER, "cold"): []}:
            made = Twins(what, case, against, row[0])
            out.append(_timed(journal, made, own.get(row, []), other.get(row, [])))
    return tuple(out)


def verdict(journal: Journal, found: Iterable[Twins]) -> Verdict:
    """Of a goal as a whole: one pair that misses it is enough. What is missing leaves it unshown, and so do shards
    that are missing.
    """
    each = [x.verdict for x in found]
    if journal.header.request.shard is not None or journal.header.request.missing:
        each.append("not shown")
    for worst in ("missed", "not shown", "undecided"):
        if worst in each:
            return worst
    return "earned" if each else "not shown"


def _pairs(journal: Journal) -> Iterator[tuple[What, Case, Case]]:
    """(what differs, case, the one that it is held against), layouts first."""
    asked = (*journal.header.request.cases, *(x.case for x in journal.records))
    cases = [x for x in {(y.operator, y.name): y for y in asked}.values() if x.primary == "latency"]
    known = {_alike(x): x for x in cases}
    for case in cases:
        if case.options.get(STORAGE) in TOKENS_FIRST:
            against = known.get(_alike(case, storage=HEADS_FIRST))
            if against is not None:
                yield "layout", case, against
    for case in cases:
        if case.axes.get(LENGTH) == RAGGED:
            against = known.get(_alike(case, length=WHOLE))
            if against is not None:
                yield "length", case, against


def _alike(case: Case, storage: str | None = None, length: int | None = None) -> object:
    """What tells a case from all others, or the twin that has this storage or length."""
    options = case.options | ({STORAGE: storage} if storage else {})
    axes = case.axes | ({LENGTH: length} if length else {})
    return case.operator, case.dtype, case.pass_, frozenset(axes.items()), frozenset(options.items())


def _timed(journal: Journal, x: Twins, records: Sequence[Record], against: Sequence[Record]) -> Twins:
    for case, lines in ((x.case, records), (x.against, against)):
        status, reason = ended(lines) if lines else ("unavailable", "not measured")
        if status != "ok":
            return replace(x, missing=f"{case.name}: {reason}")
    metric = journal.metric(x.case.primary)
    own, other = by_process(records, metric), by_process(against, metric)
    both = own.keys() & other.keys()
    # A process that has only one of them may have met another state of the machine.
    ratio, low, high = speedup({y: own[y] for y in both}, {y: other[y] for y in both})
    if ratio is None:
        return replace(x, missing="no process timed both")
    return replace(x, ratio=ratio, low=low, high=high)
