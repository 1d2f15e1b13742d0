"""Every case's speedup on one line an operator, inside a table; `report.js` draws them anew against another."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .. import figures
from ..analysis.rows import Row, category
from .canvas import FONT, Axis, Canvas, speedup_axis

WIDTH, HEIGHT, PAD = 330.0, 24.0, 12.0
"""As in `report.js`."""


def axis(rows: Iterable[Row]) -> Axis | None:
    """The one of all strips of a run; None where no row is compared."""
    values = [x.speedup_vs_best_baseline for x in rows if x.speedup_vs_best_baseline]
    return speedup_axis(min(values), max(values), PAD, WIDTH - PAD) if values else None


def head(shared: Axis) -> str:
    """The ticks."""
    canvas = Canvas(WIDTH, 16)
    for value, text in shared.ticks:
        canvas.text(shared.place(value), 8, text, "--soft", "center", size=FONT - 1)
    return canvas.svg("Speedup")


def strip(rows: Iterable[Row], mean: float | None, shared: Axis) -> str:
    """A dot a case in the colour of its verdict, and the geometric mean as a stroke."""
    canvas = Canvas(WIDTH, HEIGHT)
    for value, _ in shared.ticks:
        x = shared.place(value)
        canvas.line([x, x], [0, HEIGHT], "--ink" if value == 1 else "--grid", 1)
    if mean and math.isfinite(mean):
        x = shared.place(mean)
        canvas.line([x, x], [3, HEIGHT - 3], "--ink", 2.5)
    for place, row in enumerate(rows):
        speedup = row.speedup_vs_best_baseline
        if speedup:
            told = f"{row.case}: {figures.ratio(speedup)} vs {row.best_baseline}"
            y = HEIGHT / 2 + (place % 3 - 1) * 4.0  # equal speedups would hide one another on one line
            canvas.dot(shared.place(speedup), y, verdict_colour(row), "o", 6, told)
    return canvas.svg("Speedup of each case")


def verdict_colour(row: Row) -> str:
    """Faster, slower or neither, by the interval."""
    found = category(row)
    return {None: "--soft", "undecided": "--soft", "slower": "--bad"}.get(found, "--good")
