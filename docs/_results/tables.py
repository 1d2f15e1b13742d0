"""Rows of a run as tables in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from kernelmark.registry import figures
from kernelmark.registry.analysis.rows import Row
from kernelmark.registry.analysis.statistics import geometric_mean
from kernelmark.registry.views import summary

from .runs import journal, origin, rows_of


def by_operator(title: str, run: str) -> list[str]:
    """A heading, where the run was made, and one line an operator."""
    made = journal(run)
    found = summary.standings(rows_of(run))
    lines = [
        "| operator | cases | geometric mean (worst – best) | faster / undecided / slower |",
        "|---|---|---|---|",
    ]
    for x in sorted(found, key=lambda x: x.operator):
        if x.compared:
            span = f"{ratio_of(x.versus_best)} ({ratio_of(_speedup(x.worst))} – {ratio_of(_speedup(x.best))})"
            counts = f"{x.faster} / {x.undecided} / {x.slower}"
            lines.append(f"| `{x.operator}` | {len(x.compared)} | {span} | {counts} |")
    return [f"## {title}", origin(made), "\n".join(lines)]


def by_row(title: str, run: str) -> list[str]:
    """Some cases of a plan, each row of them by itself."""
    made = journal(run)
    lines = ["| operator | case | implementation | ms | against the fastest baseline |", "|---|---|---|---|---|"]
    for x in sorted(rows_of(run), key=lambda x: (x.operator, x.case, x.value() or float("inf"))):
        if (ms := x.value()) is None:
            continue
        ratio = ratio_of(x.speedup_vs_best_baseline)
        lines.append(f"| `{x.operator}` | {x.case} | `{x.implementation}` | {figures.number(ms)} | {ratio} |")
    return [f"## {title}", f"Some cases of the plan. {origin(made)}", "\n".join(lines)]


def by_case(run: str) -> dict[tuple[str, str], dict[str, Row]]:
    """The timed rows of a run by operator and case, then by implementation."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for x in rows_of(run):
        if x.value() is not None:
            found.setdefault((x.operator, x.case), {})[x.implementation] = x
    return found


def mean_of(ratios: Iterable[float]) -> str:
    return ratio_of(geometric_mean(list(ratios)))


Column: TypeAlias = tuple[str, Callable[[Row], str]]
"""A heading, and what it says of a row."""


def number_column(heading: str, metric: str | None = None, digits: int = 4) -> Column:
    """A metric in its unit; the primary one by default."""
    return heading, lambda row: figures.number(row.value(metric), digits)


def share_column(heading: str, metric: str) -> Column:
    return heading, lambda row: figures.percent(row.value(metric), 1)


def size_column(heading: str, metric: str) -> Column:
    return heading, lambda row: figures.size(row.value(metric))


BEST: Column = ("against the fastest baseline", lambda row: ratio_of(row.speedup_vs_best_baseline))


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(x)} |" for x in (head, ["---"] * len(head), *lines))


def programs(run: str, columns: Sequence[Column], workload: str = "", failed: bool = False) -> str:
    """Every row of a run (of one workload, if it is named) that has a value, its metrics side by side; with
    `failed` also what has none for want of memory, but for a model whose answer had none.
    """
    found = [
        x
        for x in rows_of(run)
        if workload in ("", x.operator)
        and (x.value() is not None or (failed and x.status in ("out_of_memory", "crashed") and not _unanswered(x)))
    ]
    lines = []
    for x in sorted(found, key=lambda x: (list(x.axes.values()), x.case, x.value() or float("inf"))):
        told = [said(x) for _, said in columns]
        if x.value() is None:
            told[0] = x.status.replace("_", " ")
        lines.append([x.case, f"`{x.implementation}`", *told])
    return markdown(["case", "implementation", *(heading for heading, _ in columns)], lines)


def _unanswered(row: Row) -> bool:
    return (row.reason or "").startswith("preparing the check")


def refused_of(run: str) -> str:
    """How many rows of a run were refused, by case."""
    found = Counter(x.case for x in rows_of(run) if x.status == "incorrect")
    return ", ".join(f"{count} rows of {case}" for case, count in found.items())


def unmeasured_of(run: str) -> str:
    """Every row of a run without a value, and why."""
    lost = (x for x in rows_of(run) if x.value() is None and x.status not in ("unavailable", "unsupported"))
    return " ".join(f"`{x.implementation}` of {x.case}: {x.status}, {x.reason}." for x in lost)


def row_of(run: str, implementation: str, **axes: int) -> Row:
    """The one row with a value by an implementation at such axes."""
    (found,) = (
        x
        for x in rows_of(run)
        if x.implementation == implementation and x.value() is not None and axes.items() <= x.axes.items()
    )
    return found


def value_of(row: Row, metric: str | None = None) -> float:
    value = row.value(metric)
    assert value is not None, (row.case, row.implementation, metric)
    return value


def _speedup(row: Row | None) -> float | None:
    return row.speedup_vs_best_baseline if row else None


def ratio_of(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else figures.DASH
