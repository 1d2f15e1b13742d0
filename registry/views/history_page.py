"""An operator over commits, for people: lines of blocks in the terminal, drawings on a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from .. import figures
from ..detection.history import OperatorHistory, Series
from ..store.metric import LATENCY
from .canvas import Canvas
from .table import Column, Table

BLOCKS = "▁▂▃▄▅▆▇█"
SHOWN = 40
"""Commits in a terminal line: the newest."""
WIDTH, HEIGHT, LEFT, RIGHT = 900.0, 190.0, 70.0, 20.0


def sparkline(values: Sequence[float], marks: Sequence[int] = ()) -> str:
    """A line of blocks, lowest to highest value, with a bar before each of the places in `marks`."""
    low, high = min(values), max(values)
    # A series that hardly moves must not look like a mountain range.
    reach = max(high - low, 0.05 * high) or 1.0
    out = []
    for place, value in enumerate(values):
        block = BLOCKS[min(len(BLOCKS) - 1, int((value - low) / reach * len(BLOCKS)))]
        out.append(f"│{block}" if place in marks else block)
    return "".join(out)


def overview(histories: Sequence[OperatorHistory]) -> Table:
    """A line an operator: all its rows together, and how many of them changed."""
    # A narrow terminal drops how many commits there are, then the line of blocks.
    table = Table(
        (
            Column("operator"),
            Column("rows", number=True),
            Column("commits", number=True, drop=2),
            Column("changed", number=True),
            Column("last over first", number=True),
            Column("oldest to newest", drop=1),
        )
    )
    for x in histories:
        course = x.course()
        counts = map(str, (len(x.series), len(course.commits), len(x.changed)))
        table.add(x.operator, *counts, figures.change(course.change), sparkline(course.relative[-SHOWN:]))
    return table


def history_table(history: OperatorHistory, series: Sequence[Series]) -> Table:
    """A line for each of these rows."""
    units = {"" if x.unit == "1" else x.unit for x in series}
    only = units.pop() if len(units) == 1 else None
    # A narrow terminal drops how many commits there are, then the line of blocks.
    table = Table(
        (
            Column("case", folds=20),
            Column("implementation"),
            Column("commits", number=True, drop=2),
            Column(f"latest {only}".strip() if only is not None else "latest", number=True),
            Column("oldest to newest", drop=1),
            Column("changes", folds=20),
        ),
        f"{history.operator} over commits",
    )
    for x in series:
        skipped = max(0, len(x.points) - SHOWN)
        marks = [y.index - skipped for y in x.changes]
        blocks = sparkline([y.ms for y in x.points[skipped:]], marks)
        name = x.key.case + ("" if x.key.cache == "cold" else f" ({x.key.cache})")
        latest = figures.number(x.points[-1].ms)
        latest += f" {x.unit}" if only is None and x.unit != "1" else ""
        table.add(name, x.key.implementation, str(len(x.points)), latest, blocks, _changes(x))
    return table


def flat(history: OperatorHistory) -> list[dict[str, Any]]:
    """A row a commit and case, for CSV."""
    return [
        {
            "operator": x.key.operator,
            "case": x.key.case,
            "implementation": x.key.implementation,
            "cache": x.key.cache,
            "commit": point.commit,
            "created": point.created,
            "latency_ms": point.ms if x.unit == LATENCY.unit else None,
            "value": point.ms,
            "unit": x.unit,
            "runs": point.runs,
            "change": next((y.change for y in x.changes if y.index == place), None),
        }
        for x in history.series
        for place, point in enumerate(x.points)
    ]


def _changes(series: Series) -> str:
    return ", ".join(
        f"{figures.change(1 + x.change)} at {series.points[x.index].commit[:10]}"
        + (f" ({x.machine})" if x.machine is not None else "")
        for x in series.changes
    )


def render_history(history: OperatorHistory) -> str:
    """A page that opens offline."""
    parts = [_section(x) for x in history.series]
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    title = escape(f"{history.operator} over commits")
    head = f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
    about = (
        f"Comparability key <code>{escape(history.comparability_key)}</code>. Change points are drawn, no gate."
    )
    return (
        f"{head}<meta name='viewport' content='width=device-width'><style>{style}</style></head>\n"
        f"<body><header><h1>{title}</h1><p class='soft'>{about}</p></header>\n"
        f"<main>{''.join(parts)}</main></body></html>\n"
    )


def _section(series: Series) -> str:
    key = series.key
    told = f"<p>{escape(_changes(series))}</p>" if series.changes else "<p class='soft'>No change point.</p>"
    name = escape(f"{key.case} · {key.implementation} · {key.cache}")
    return f"<h3>{name}</h3>{_drawing(series)}{told}\n"


def _drawing(series: Series) -> str:
    canvas = Canvas(WIDTH, HEIGHT)
    times = [x.ms for x in series.points]
    low, high = min(times), max(times)
    margin = max((high - low) * 0.15, high * 0.02)
    low, high = max(0.0, low - margin), high + margin
    step = (WIDTH - LEFT - RIGHT) / max(1, len(times) - 1)
    xs = [LEFT + i * step for i in range(len(times))]
    ys = [15 + (high - ms) / (high - low) * (HEIGHT - 45) if high > low else HEIGHT / 2 for ms in times]
    for share in (0.0, 0.5, 1.0):
        y = 15 + share * (HEIGHT - 45)
        canvas.line([LEFT, WIDTH - RIGHT], [y, y], "--grid")
        canvas.text(LEFT - 8, y, figures.number(high - share * (high - low), 3), "--soft", "right")
    unit = "" if series.unit == "1" else series.unit
    canvas.text(8, HEIGHT / 2, unit, "--soft")
    for change in series.changes:
        x = xs[change.index] - step / 2
        worse = series.better != "neither" and (change.change > 0) == (series.better == "lower")
        colour = "--bad" if worse else "--soft" if series.better == "neither" else "--good"
        canvas.line([x, x], [15, HEIGHT - 30], colour, 1.5)
        canvas.text(x, 8, figures.change(1 + change.change), colour, "center")
    canvas.line(xs, ys, "--s0", 1.5)
    for x, y, point in zip(xs, ys, series.points, strict=True):
        tip = f"{point.commit[:10]}: {figures.number(point.ms)} {unit}, {figures.counted(point.runs, 'run')}"
        canvas.dot(x, y, "--s0", "o", 5, tip)
    for place, align in ((0, "left"), (len(xs) - 1, "right"))[: len(xs)]:
        canvas.text(xs[place], HEIGHT - 14, series.points[place].commit[:10], "--soft", align)
    return canvas.svg(f"{series.key} over commits")
