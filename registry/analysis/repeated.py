"""Does a run hold when somebody else measures it? Rows of two runs, within joint uncertainty or apart. Pure.

The spread between processes says how far a row's value may be off; that of both runs together says how far the
two may lie apart. Of many rows one in twenty would disagree by chance, so that the level is shared among all
(Bonferroni): of twenty verifications of true runs, one has a disagreement.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from ..figures import percent
from ..store.journal import Journal
from ..store.record import Key, Scalar
from .rows import Row, rows
from .statistics import CONFIDENCE, NO_RATIO, welch

Agreement: TypeAlias = Literal["agree", "disagree", "undecided"]

SESSIONS = 0.01
"""By how much two sessions on one device may differ and mean nothing, as when two commits are compared."""
RESOLVED = 0.25
"""A joint uncertainty above this would agree with almost anything: the row is undecided."""
NOT_YET = "not yet repeated"
"""What a published table without a verification says."""


class Repeated(msgspec.Struct, frozen=True):
    """One row, measured there and here: `ratio` is here over there, `within` the joint uncertainty, a fraction."""

    row: Key
    agreement: Agreement
    reason: str
    there: float | None = None
    here: float | None = None
    unit: str = ""
    ratio: float | None = None
    within: float | None = None


def differing(there: Mapping[str, Scalar], here: Mapping[str, Scalar]) -> dict[str, tuple[Scalar, Scalar]]:
    """Conditions that are not the same on both sides."""
    names = sorted(there.keys() | here.keys())
    return {x: (there.get(x), here.get(x)) for x in names if there.get(x) != here.get(x)}


def repeated(published: Iterable[Row], again: Iterable[Row]) -> tuple[Repeated, ...]:
    """Every row of the second run, against the same row of the first."""
    before = {x.identity: x for x in published}
    pairs = [(before.get(x.identity), x) for x in again]
    level = (1 - CONFIDENCE) / max(1, sum(x is not None and x.status == y.status == "ok" for x, y in pairs))
    return tuple(_judged(x, y, level) for x, y in pairs)


def _judged(there: Row | None, here: Row, level: float) -> Repeated:
    if there is None:
        return Repeated(here.identity, "undecided", "not in the run that is verified")
    if here.status in ("unavailable", "unsupported", "out_of_memory", "timeout"):
        return Repeated(here.identity, "undecided", f"{here.status} here: {here.reason}")
    if here.status != "ok":
        return Repeated(here.identity, "disagree", f"{here.status} here: {here.reason}")
    mine, theirs = here.get(), there.get()
    if mine is None or theirs is None:
        return Repeated(here.identity, "undecided", f"{there.status} there")
    if min(mine.value, theirs.value) <= 0:
        return Repeated(here.identity, "undecided", NO_RATIO, theirs.value, mine.value, mine.unit)
    ratio = mine.value / theirs.value
    errors = [(x.cv_between, x.processes) for x in (theirs, mine)]
    if any(cv is None for cv, _ in errors):
        known = "one process says nothing of the spread between processes"
        return Repeated(here.identity, "undecided", known, theirs.value, mine.value, mine.unit, ratio)
    half = welch([((cv or 0.0) ** 2 / n, n) for cv, n in errors], 1 - level / 2)
    within = math.expm1(min(half, 700.0)) + SESSIONS
    off = abs(math.log(ratio))
    agrees = off <= math.log1p(within)
    agreement: Agreement = "disagree" if not agrees else "undecided" if within > RESOLVED else "agree"
    reason = (
        "too noisy to say" if agreement == "undecided" else f"within {percent(within, 1)}" if agrees else "apart"
    )
    return Repeated(here.identity, agreement, reason, theirs.value, mine.value, mine.unit, ratio, within)


def said(published: Journal, others: Iterable[Journal]) -> str:
    """What stands beside a published table: how its verifications went, or that there is none."""
    mine = [x for x in others if x.header.request.verifies == published.header.run and x.records]
    there = rows(published) if mine else ()
    return joined(
        line(x.header.run, repeated(there, rows(x)), differing(published.header.conditions, x.header.conditions))
        for x in mine
    )


def line(run: str, found: Sequence[Repeated], apart: Collection[str]) -> str:
    """One verification: how many of its rows agree, and under which other conditions it was made."""
    agree = sum(x.agreement == "agree" for x in found)
    disagree = sum(x.agreement == "disagree" for x in found)
    told = (
        f"repeated by run {run}: {agree} of {len(found)} rows agree, {disagree} disagree, "
        f"{len(found) - agree - disagree} undecided"
    )
    return f"{told}, under other conditions ({', '.join(sorted(apart))})" if apart else told


def joined(lines: Iterable[str]) -> str:
    """All verifications of a run, or that there is none."""
    return "; ".join(lines) or NOT_YET
