"""Which runs another team has measured again, by what the site keeps of both. Pure.

A run's page is written when its journal is read, and a verification may come long after: what the page says of it
stands between two marks, where it is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from ..analysis.repeated import NOT_YET, differing, joined, line, repeated
from ..escape import CONTROL
from .facts import Fact, Run

BEGIN, END = "<!-- repeated -->", "<!-- end of repeated -->"


def repetitions(runs: Iterable[Run], of_run: Callable[[str], Sequence[Fact]]) -> dict[str, str]:
    """By each run's name whether it was repeated, and how that went; `of_run` gives a run's facts."""
    found = {x.name: x for x in runs}
    verifying = [x for x in found.values() if x.verifies in found and x.rows]
    told: dict[str, list[str]] = {}
    for x in verifying:
        there = found[str(x.verifies)]
        rows = repeated(*([y.row() for y in of_run(z)] for z in (there.name, x.name)))
        told.setdefault(there.name, []).append(line(x.name, rows, differing(there.conditions, x.conditions)))
    return {name: joined(told.get(name, ())) for name in found}


def summed(found: Sequence[str]) -> str:
    """Of several runs, how many were repeated."""
    missing = sum(x == NOT_YET for x in found)
    if missing == len(found):
        return NOT_YET if found else ""
    return f"{len(found) - missing} of {len(found)} runs repeated by another team" + (
        f", {missing} {NOT_YET}" if missing else ""
    )


def replaced(page: str, text: str) -> str:
    """A run's page with `text` between the marks."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    return f"{head}{begin}{escape(CONTROL.sub('�', text))}{end}{tail}"
