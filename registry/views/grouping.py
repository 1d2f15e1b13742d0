"""Rows laid out for reading: the implementations of a case together, and cases in groups that fit an eye.

A group's title says what its cases have in common, a case's label only what tells it from its neighbours: parts of
its name, in the name's form.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..analysis.rows import DERIVED, Row
from ..store.metric import LATENCY, LAUNCH, Metric
from ..store.record import PROVIDER

CASES_IN_A_GROUP = 12
"""More are split: a chart with more lines than this is not read, only looked at."""


@dataclass(frozen=True)
class CaseRows:
    """All implementations of one case in one cache state. `parts` are its axes, options, dtype and cache as
    text, by name; an option that the case's name leaves out, as it has the usual value, is none of them."""

    operator: str
    name: str
    pass_: str
    parts: Mapping[str, str]
    rows: tuple[Row, ...]

    @property
    def first(self) -> Row:
        """Any of the rows, for what they have in common."""
        return self.rows[0]

    @property
    def limit(self) -> float | None:
        """The case's limit, which rows without a value may lack."""
        return next((x.limit for x in self.rows if x.limit is not None), None)

    @property
    def ok(self) -> tuple[Row, ...]:
        """The rows with a value of the primary metric, the best first."""
        return tuple(sorted((x for x in self.rows if x.value() is not None), key=goodness))

    @property
    def ours(self) -> Row | None:
        """Our implementation; the fastest that is correct if there are several, else the first that is not."""
        ours = [x for x in self.rows if x.provider == PROVIDER]
        return next((x for x in self.ok if x.provider == PROVIDER), ours[0] if ours else None)


@dataclass(frozen=True)
class Group:
    """Cases of one operator and pass that are read side by side, each with its label."""

    operator: str
    pass_: str
    common: str
    cases: tuple[CaseRows, ...]
    labels: tuple[str, ...]


def goodness(row: Row) -> float:
    """What sorts the better row first, by the primary metric."""
    found = row.get()
    if found is None:
        return math.inf
    return -found.value if found.better == "higher" else found.value


SHORT_MS = 0.02
"""Device time below which a call's launch is most of what its user waits for."""


def short(row: Row) -> bool:
    """Whether a row's device time is so short that its time with the launch belongs beside it."""
    value = row.value(LATENCY.name)
    return value is not None and value < SHORT_MS


def columns(rows: Iterable[Row], metrics: Iterable[Metric], terminal: bool = False) -> tuple[Metric, ...]:
    """The metrics beside the primary one that have a column for these rows: what none of them has is left out. A
    terminal has that of launches where a row is short.
    """
    found = list(rows)
    primary = {x.primary for x in found}
    brief = any(map(short, found))
    return tuple(
        x
        for x in (*metrics, *DERIVED)
        if x.name not in primary and x.abscissa is None
        if x.shown == "table" or (x.shown == "report" and (not terminal or (x.name == LAUNCH.name and brief)))
        if any(x.name in row.metrics for row in found)
    )


def cases(rows: Iterable[Row]) -> tuple[CaseRows, ...]:
    """The rows by case and cache state, in the order met."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.operator, row.case, row.cache), []).append(row)
    return tuple(CaseRows(x[0].operator, x[0].case, x[0].pass_, _parts(x[0]), tuple(x)) for x in found.values())


def options(row: Row) -> dict[str, str]:
    """A row's options as text, but for those that its case's name leaves out, as they have the usual value. A name
    that says none of them (of another tool's result) leaves none out.
    """
    found = {name: _text(name, value) for name, value in row.options.items()}
    named = {name for name, text in found.items() if f"-{text}-" in f"-{row.case}-"}
    off = {name for name, value in row.options.items() if value is False}
    return {name: text for name, text in found.items() if name in named | off} if named else found


def _text(name: str, value: bool | float | str) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    return value if isinstance(value, str) else f"{name}{value}"


def _parts(row: Row) -> dict[str, str]:
    parts = {"cache": f"{row.cache} cache"}
    parts |= {f"option {name}": text for name, text in options(row).items()}
    parts["dtype"] = row.dtype
    return parts | {f"axis {name}": f"{name}{value}" for name, value in row.axes.items()}


def groups(rows: Iterable[Row], limit: int = CASES_IN_A_GROUP) -> tuple[Group, ...]:
    """All cases, by operator, pass and the metric that they are judged by, in groups of at most `limit`."""
    sections: dict[tuple[str, str, str], list[CaseRows]] = {}
    for case in cases(rows):
        sections.setdefault((case.operator, case.pass_, case.first.primary), []).append(case)
    return tuple(
        _group(part, operator, pass_, said)
        for (operator, pass_, _), found in sections.items()
        for said in (_on(found),)
        for part in _split(found, limit)
    )


def _split(found: Sequence[CaseRows], limit: int) -> list[Sequence[CaseRows]]:
    """Splits by what differs: cache, options and dtype before sizes, and sizes by the axis with fewest values."""
    if len(found) <= limit:
        return [found]
    values = {name: dict.fromkeys(x.parts.get(name) for x in found) for name in found[0].parts}
    differing = [name for name in values if len(values[name]) > 1]
    kinds = [[x for x in differing if not x.startswith("axis ")], [x for x in differing if x.startswith("axis ")]]
    chosen = next((min(x, key=lambda name: len(values[name])) for x in kinds if x), None)
    if chosen is None or len(values[chosen]) > len(found) // 2:
        return [found[x : x + limit] for x in range(0, len(found), limit)]
    return [
        part
        for value in values[chosen]
        for part in _split([x for x in found if x.parts.get(chosen) == value], limit)
    ]


def _in_name(case: CaseRows, part: str) -> bool:
    """Whether a part stands in a case's name: an option that is off does not."""
    return part in case.parts and case.first.options.get(part.removeprefix("option ")) is not False


def _on(found: Iterable[CaseRows]) -> set[str]:
    """Parts that say that something is there in any of the cases: what none of them has goes without saying."""
    out = {"dtype", "cache"}
    for case in found:
        out |= {f"option {name}" for name, value in case.first.options.items() if value}
        out |= {f"axis {name}" for name, value in case.first.axes.items() if value}
    return out


def _group(found: Sequence[CaseRows], operator: str, pass_: str, said: Container[str]) -> Group:
    names = list(dict.fromkeys(name for x in found for name in x.parts))
    common = [x for x in names if len({y.parts.get(x) for y in found}) == 1]
    # The sizes of a group's only case are its label; what it has "in common" with itself would say nothing.
    if len(found) == 1:
        common = [x for x in common if not x.startswith("axis ")]
    # The usual state goes without saying.
    shown = [x for x in common if found[0].parts[x] != "cold cache" and x in said]
    labels = ["-".join(x.parts[y] for y in names if y not in common and _in_name(x, y)) for x in found]
    return Group(
        operator,
        pass_,
        " · ".join(found[0].parts[x] for x in shown),
        tuple(found),
        tuple(label or case.name for label, case in zip(labels, found, strict=True)),
    )
