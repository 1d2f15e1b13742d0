"""Who competes in a case: a run that left out a rival which is known to be better says little of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..store.record import baseline
from .facts import Fact, Run
from .timeline import Measured

MISSED = 1.02
"""By how much a rival that was left out must be better: two runs of one implementation lie about so far apart."""
ABSENT = ("unavailable", "error", "crashed", "timeout")
"""What a rival ended in that could have had a time: its library was not there, or it came to nothing."""


@dataclass
class Field:
    """The baselines of one case, by one definition on one device: what each had last, and which each run had."""

    newest: dict[str, Measured] = field(default_factory=dict)
    there: dict[str, set[str]] = field(default_factory=dict)

    def left_out(self, ours: Measured) -> Measured | None:
        """The best of those that ours' run lacks, where it is better than the best that the run has; else None."""
        run, fact = ours
        value = None if fact.number is None or not fact.speedup else _beaten(fact)
        absent = [x for name, x in self.newest.items() if name not in self.there.get(run.name, ())]
        if value is None or not absent:
            return None
        found = min(absent, key=lambda x: cost(x[1]))
        return found if value > MISSED * cost(found[1]) else None


def cost(fact: Fact) -> float:
    """Its value, the lower the better: the reciprocal where the higher is. Infinite without one."""
    value = fact.number[0] if fact.number else float("inf")
    if fact.better == "higher":
        return 1 / value if fact.number and value else float("inf")
    return value


def _beaten(fact: Fact) -> float:
    """That of the best other of ours' run, which its speedup is over."""
    assert fact.speedup is not None
    return cost(fact) * fact.speedup


Place = tuple[str, str, str, str]
"""Device, case, cache and the hash of what the case computes."""


def place(run: Run, fact: Fact) -> Place:
    """The field that a fact belongs to."""
    return run.device, fact.case, fact.cache, fact.spec


Fields = Mapping[Place, Field]


def fields(measured: Iterable[Measured]) -> Fields:
    """The fields of an operator, from its facts in order, oldest first."""
    found: dict[Place, Field] = {}
    for run, fact in measured:
        if run.arm is None and baseline(fact.provider, fact.implementation):
            here = found.setdefault(place(run, fact), Field())
            if fact.status not in ABSENT:
                here.there.setdefault(run.name, set()).add(fact.implementation)
            if fact.number is not None and fact.speedup is not None:  # else it competes with nothing
                here.newest[fact.implementation] = run, fact
    return found


def left_out(ours: Measured, known: Fields) -> Measured | None:
    """The better rival that ours' run lacks; None without one."""
    here = known.get(place(*ours))
    return None if here is None else here.left_out(ours)
