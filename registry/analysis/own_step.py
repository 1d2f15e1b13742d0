"""What implementations are worth to a step of a program that was captured: its calls times what one takes alone.

Nothing is put into the program: what its step would take is the step less what the calls gain, as if nothing else
changed. What a kernel is worth in a model, measured there, is `worth`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from ..store.journal import Journal
from ..store.metric import LATENCY
from ..store.record import EAGER, YARDSTICK
from .rows import Row, rows

_PASS = re.compile(r"-(forward|backward|forward_backward)$")


class Offer(msgspec.Struct, frozen=True):
    """One implementation of a call, in all passes that the program makes."""

    implementation: str
    ms: float | None
    """Of all of a step's calls; None where it has not all of their passes."""
    worth: float | None
    """The step over the step with it; None where it is not known."""
    reason: str = ""
    """Why its time is not known."""


class OwnCall(msgspec.Struct, frozen=True):
    """A call of the program: what all of a step take by PyTorch, alone, and by the others, the fastest first."""

    operator: str
    name: str
    calls: float
    ms: float | None
    offers: tuple[Offer, ...]


class OwnStep(msgspec.Struct, frozen=True):
    """The step of a program. `best` is what the fastest of each call are worth together."""

    ms: float
    calls: tuple[OwnCall, ...]
    best: float | None


def own_step(journal: Journal) -> OwnStep | None:
    """What a run of a captured plan says of its program; None for another run."""
    request = journal.header.request
    if request.step_ms is None or not request.calls:
        return None
    asked = [x for x in rows(journal) if f"{x.operator}/{x.case}" in request.calls and x.provider != YARDSTICK]
    # Of a call that was timed with a cold and a hot cache, one counts: a step's calls find others' data in it.
    cold = min((x.cache for x in asked), default="")
    sites: dict[tuple[str, str], list[Row]] = {}
    for x in asked:
        if x.cache == cold:
            sites.setdefault((x.operator, _PASS.sub("", x.case)), []).append(x)
    found = tuple(_call(name, x, request.calls, request.step_ms) for name, x in sites.items())
    known = [x for x in found if x.ms is not None]
    gained = sum(max(0.0, (x.ms or 0.0) - min(y.ms for y in x.offers if y.ms is not None)) for x in known)
    calls = tuple(sorted(found, key=lambda x: -(x.ms or 0.0)))
    return OwnStep(request.step_ms, calls, _ratio(request.step_ms, gained) if known else None)


def _call(name: tuple[str, str], found: Iterable[Row], calls: dict[str, float], step_ms: float) -> OwnCall:
    by_name: dict[str, list[Row]] = {}
    passes = set()
    for x in found:
        by_name.setdefault(x.implementation, []).append(x)
        passes.add(x.case)
    spent = {who: _spent(mine, calls, passes) for who, mine in by_name.items()}
    base, _ = spent.get(EAGER, (None, ""))
    offers = [
        Offer(who, ms, None if base is None or ms is None else _ratio(step_ms, base - ms), reason)
        for who, (ms, reason) in spent.items()
    ]
    offers.sort(key=lambda x: (x.ms is None, x.ms or 0.0, x.implementation))
    return OwnCall(name[0], name[1], max(calls[f"{name[0]}/{x}"] for x in passes), base, tuple(offers))


def _spent(found: Iterable[Row], calls: dict[str, float], passes: set[str]) -> tuple[float | None, str]:
    """Milliseconds of a step's calls by one implementation, or why they are not known."""
    ms, seen = 0.0, set()
    for x in found:
        value = x.value(LATENCY.name)
        if value is None:
            return None, f"{x.status}: {x.reason}"
        ms += calls[f"{x.operator}/{x.case}"] * value
        seen.add(x.case)
    return (ms, "") if seen == passes else (None, "not of all passes")


def _ratio(step_ms: float, gained_ms: float) -> float | None:
    """The step over the step that gained so much; None where no step can hold that much."""
    return step_ms / (step_ms - gained_ms) if gained_ms < step_ms else None
