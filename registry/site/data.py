"""What the site's script reads: a page's series as JSON within the page, and a commit's values as a script.

A script is the one kind of file that a page opened from a disk may load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ..store.record import Key, baseline
from .facts import Fact, Run, file_name
from .timeline import Line, Measured


class Strings:
    """Texts that are said once, and named by their place."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        """The place of a text."""
        return self._places.setdefault(text, len(self._places))

    def all(self) -> list[str]:
        """The texts by place."""
        return list(self._places)


def inlined(value: Any) -> str:
    """JSON that can stand in a `<script>` of a page: it neither ends the script nor opens a comment in it."""
    text = msgspec.json.encode(value).decode()
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def charts(lines: Sequence[Sequence[Line]], runs: Sequence[Run], first: int = 0) -> dict[str, Any]:
    """The series of a page: `lines` holds those of each of its charts, the first of which has the number `first`;
    `runs` are in order.
    """
    used = {run.name for chart in lines for line in chart for run, _ in line.points}
    shown = [x for x in runs if x.name in used]
    places = {x.name: i for i, x in enumerate(shown)}
    strings = Strings()
    return {
        "runs": [
            {"file": x.file, "name": x.name, "created": x.created[:16].replace("T", " "), "commit": x.short}
            | {"plan": x.plan, "dirty": x.dirty, "each": x.rows_a_page}
            for x in shown
        ],
        "first": first,
        "charts": [[_line(line, places, strings) for line in chart] for chart in lines],
        "strings": strings.all(),
    }


def _line(line: Line, places: Mapping[str, int], strings: Strings) -> dict[str, Any]:
    last = line.points[-1][1]
    number = last.number
    return {
        "name": line.key.implementation,
        "kind": 0 if last.ours else 2 if last.scale else 1,
        "unit": number[3] if number else "",
        "better": last.better,
        "runs": [places[run.name] for run, _ in line.points],
        "values": [_short(fact.number[0]) for _, fact in line.points if fact.number],
        "low": [_short(fact.interval[0]) for _, fact in line.points if fact.number],
        "high": [_short(fact.interval[1]) for _, fact in line.points if fact.number],
        "keys": [strings.place(fact.key) for _, fact in line.points],
        "places": [fact.place for _, fact in line.points],
        "lines": [fact.lines for _, fact in line.points],
        "breaks": [[places[x.run], [strings.place(y) for y in x.what]] for x in line.breaks],
        "changes": [[places[x.run], _short(x.change), x.worse, x.machine] for x in line.changes],
        "bands": [[places[x.first], places[x.last], _short(x.low), _short(x.high)] for x in line.bands],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def source(run: Run) -> tuple[str, str]:
    """What the page of comparisons offers: a state of the code on a device."""
    return run.device, run.code


def source_file(device: str, code: str) -> str:
    """The name of its file, without ending."""
    return file_name(f"{device} {code}")


def values(measured: Iterable[Measured]) -> str:
    """A script that hands over the newest value of each row of one state of the code on one device; `beside` them
    what else the newest run had that has ours and its best other, as these two are compared within a run.
    """
    known = {(run.name, fact.identity): (run, fact) for run, fact in measured if fact.number is not None}
    newest = {fact.identity: (run, fact) for run, fact in known.values()}
    runs = {run.name: run for run, _ in known.values()}
    pairs: dict[Key, tuple[tuple[str, Key], ...]] = {}
    for (name, row), (_, fact) in known.items():
        if fact.ours and fact.speedup is not None and fact.best is not None:
            best = Key(row.operator, row.case, fact.best, row.cache)
            pairs[row] = (name, row), (name, best)
    older = {x: known[x] for pair in pairs.values() for x in pair if x in known and newest[x[1]] is not known[x]}
    strings, order = Strings(), {name: place for place, name in enumerate(runs)}
    rows, beside = (
        [_value(fact, strings, order[run.name]) for run, fact in found]
        for found in (newest.values(), older.values())
    )
    about = [
        {"file": x.file, "name": x.name, "each": x.rows_a_page, "key": x.key, "conditions": x.conditions}
        for x in runs.values()
    ]
    return (
        f"kernelmark.take({inlined({'strings': strings.all(), 'runs': about, 'rows': rows, 'beside': beside})});\n"
    )


def _value(fact: Fact, strings: Strings, place: int) -> list[Any]:
    value, _, _, unit = fact.number or (0.0, None, None, "")
    low, high = fact.interval
    texts = [fact.operator, fact.case, fact.cache, fact.implementation, unit, fact.better, fact.key, fact.spec]
    texts += [fact.version or "unknown", fact.timer or "unknown"]
    kind = 0 if fact.ours else 1 if baseline(fact.provider, fact.implementation) else 2
    return [*map(strings.place, texts), kind, _short(value), _short(low), _short(high), place, fact.place]
