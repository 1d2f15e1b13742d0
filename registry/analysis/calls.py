"""How ours stands where models call it: of each call the fastest correct peer's time over ours. Pure.

A call that ours has no correct answer to counts as eager PyTorch's time, which is what its user gets: leaving it
out would earn a better mean. Of an operator as a whole nothing is said unless every peer named for it ran.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import quantiles

from ..store.journal import Journal
from ..store.record import EAGER, PROVIDER, baseline
from .rows import Row, rows
from .statistics import geometric_mean

RAN = ("ok", "incorrect")
"""How a row ends whose implementation ran."""


@dataclass(frozen=True)
class Call:
    """One case: the fastest correct peer's time over ours, or over eager PyTorch's in the place of ours."""

    operator: str
    case: str
    models: tuple[str, ...]
    ratio: float
    peer: str
    by_eager: bool


@dataclass(frozen=True)
class Spread:
    """Ratios of several calls; quartiles of one are that one."""

    calls: int
    by_eager: int
    lowest: float
    quarter: float
    median: float
    three_quarters: float
    highest: float
    geometric: float


@dataclass(frozen=True)
class Standing:
    """An operator: its calls, and the peers named for it that ran in none of its cases, each with the reason."""

    operator: str
    spread: Spread
    absent: tuple[tuple[str, str], ...]

    @property
    def shown(self) -> bool:
        """Whether its mean may be held against a goal."""
        return not self.absent


def calls(journal: Journal, without: Collection[str] = ()) -> tuple[Call, ...]:
    """Every case that a peer and ours, or eager PyTorch, have a time of; those of `without` are no peers."""
    cases: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows(journal):
        if row.primary == "latency" and row.implementation not in without:
            cases.setdefault((row.operator, row.case, row.cache), []).append(row)
    found = (_call(journal, operator, case, members) for (operator, case, _), members in cases.items())
    return tuple(x for x in found if x is not None)


def _call(journal: Journal, operator: str, case: str, members: Sequence[Row]) -> Call | None:
    timed = [(time, x) for x in members if (time := x.value())]
    peers = [(time, x.implementation) for time, x in timed if baseline(x.provider, x.implementation)]
    ours = min((time for time, x in timed if x.provider == PROVIDER), default=None)
    eager = next((time for time, x in timed if x.implementation == EAGER), None)
    mine = ours if ours is not None else eager
    if not peers or mine is None:
        return None
    best, name = min(peers)
    models = journal.header.request.models.get(f"{operator}/{case}", ())
    return Call(operator, case, models, best / mine, name, ours is None)


def untold(journal: Journal, found: Iterable[Call]) -> tuple[tuple[str, str], ...]:
    """(operator, case) of those cases of a run of which no such time is known."""
    known = {(x.operator, x.case) for x in found}
    measured = dict.fromkeys((x.case.operator, x.case.name) for x in journal.records)
    return tuple(x for x in measured if x not in known)


def by_model(found: Iterable[Call]) -> dict[str, Spread]:
    """The calls of each model, those with the lowest median first; a call of several counts in each."""
    models: dict[str, list[Call]] = {}
    for call in found:
        for model in call.models:
            models.setdefault(model, []).append(call)
    spreads = {model: spread(members) for model, members in models.items()}
    return dict(sorted(spreads.items(), key=lambda x: (x[1].median, x[0])))


def by_operator(journal: Journal, found: Iterable[Call]) -> tuple[Standing, ...]:
    """Each operator's calls, and which of its peers are absent."""
    operators: dict[str, list[Call]] = {}
    for call in found:
        operators.setdefault(call.operator, []).append(call)
    return tuple(
        Standing(name, spread(members), _absent(journal, name)) for name, members in sorted(operators.items())
    )


def _absent(journal: Journal, operator: str) -> tuple[tuple[str, str], ...]:
    said: dict[str, str] = {}
    ran = set()
    for record in journal.records:
        if record.case.operator == operator:
            said.setdefault(record.implementation, f"{record.status}: {record.reason}")
            if record.status in RAN:
                ran.add(record.implementation)
    named = journal.header.request.peers.get(operator, ())
    return tuple((x, said.get(x, "it was not asked for")) for x in named if x not in ran)


def spread(found: Sequence[Call]) -> Spread:
    """Of one call or more."""
    ratios = sorted(x.ratio for x in found)
    low, middle, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    mean = geometric_mean(ratios)
    assert mean is not None
    by_eager = sum(x.by_eager for x in found)
    return Spread(len(ratios), by_eager, ratios[0], low, middle, high, ratios[-1], mean)
