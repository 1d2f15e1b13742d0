"""The report's charts by case: the primary metric and the fraction of the limit, a dot an implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from .. import figures
from ..analysis.rows import Row
from .canvas import CHARACTER, DASHES, FONT, Axis, Canvas, linear_axis, log_axis
from .grouping import Group
from .looks import Series
from .strips import verdict_colour

WIDTH = 480
"""Of a chart, in its own pixels: two stand side by side on a desk, one fills a phone."""


@dataclass(frozen=True)
class _Lanes:
    """A case's line has a lane for each implementation that has a time somewhere in the group."""

    group: Group
    series: Sequence[Series]
    left: float

    TOP = 22.0
    PAD = 6.0
    WIDEST = 190.0
    """Of labels; longer ones have several lines."""

    @classmethod
    def of(cls, group: Group, looks: Mapping[str, Series]) -> _Lanes:
        """From a group and the report's palette."""
        present = {x.implementation for case in group.cases for x in case.ok}
        longest = max(len(x) for x in group.labels)
        left = min(max(longest * CHARACTER + 14, 50), cls.WIDEST)
        return cls(group, [x for x in looks.values() if x.name in present], left)

    @property
    def lane(self) -> float:
        return 11.0 if len(self.series) <= 4 else 9.0

    @property
    def line(self) -> float:
        most = max(len(self.told(x)) for x in self.group.labels)
        return max(len(self.series) * self.lane + 2 * self.PAD, 2 * FONT, most * (FONT + 2) + 4)

    def told(self, label: str) -> list[str]:
        """A label's lines, as wide as there is room."""
        return wrap(label, int((self.left - 12) / CHARACTER)) or [""]

    @property
    def height(self) -> float:
        return self.TOP + self.line * len(self.group.cases) + (self.TOP if self.tall else 4)

    @property
    def tall(self) -> bool:
        """Whether the axis is repeated at the foot."""
        return len(self.group.cases) * self.line > 280

    def top(self, case: int) -> float:
        return self.TOP + case * self.line

    def y(self, case: int, lane: int) -> float:
        slack = (self.line - len(self.series) * self.lane) / 2
        return self.top(case) + slack + (lane + 0.5) * self.lane

    def frame(self, canvas: Canvas, axis: Axis) -> None:
        """Stripes, case labels, grid and tick labels."""
        foot = self.top(len(self.group.cases))
        for index, label in enumerate(self.group.labels):
            if index % 2 == 0:
                canvas.band(self.top(index), self.top(index + 1), "--band")
            told = self.told(label)
            for number, text in enumerate(told):
                y = self.top(index) + self.line / 2 + (number - (len(told) - 1) / 2) * (FONT + 2)
                canvas.text(self.left - 8, y, text, align="right")
        for value, text in axis.ticks:
            x = axis.place(value)
            canvas.line([x, x], [self.TOP - 3, foot], "--grid", 0.8)
            canvas.text(x, self.TOP - 11, text, "--soft", "center", size=FONT - 1)
            if self.tall:
                canvas.text(x, foot + 11, text, "--soft", "center", size=FONT - 1)

    def absent(self, canvas: Canvas) -> None:
        """Says in its lane how an implementation without a time ended: no gap without a word."""
        for index, case in enumerate(self.group.cases):
            by_name = {x.implementation: x for x in case.rows}
            for lane, look in enumerate(self.series):
                row = by_name.get(look.name)
                if row is not None and row.value() is None:
                    status = row.status.replace("_", " ")
                    canvas.text(self.left + 4, self.y(index, lane), status, look.colour, size=7.5)


def _values(group: Group) -> list[float]:
    """Every value that a chart of the primary metric has to hold. An interval far wider than its value may leave
    the frame.
    """
    found = [x for case in group.cases for x in case.ok]
    # A metric of somebody else's may be 0 or below, which has no place here: a drawing must not cost its report.
    points = [y for x in found for y in (x.value(), x.limit) if y and y > 0]
    bounds = [y for x in found for y in x.bounds() if y and x.value()]
    return [*points, *(y for y in bounds if min(points) / 2 <= y <= max(points) * 2)] if points else []


def logarithmic(group: Group) -> bool:
    """Whether the chart of the primary metric has a logarithmic axis: values span more than a factor of 4."""
    values = _values(group)
    return bool(values) and max(values) > 4 * min(values)


def primary(group: Group, looks: Mapping[str, Series]) -> str | None:
    """The primary metric with its interval, a dot an implementation; the limit as a dashed line, our speedup at
    the right.

    None where no case of the group has a value.
    """
    if not _values(group):
        return None
    lanes = _Lanes.of(group, looks)
    values, right = _values(group), WIDTH - 52
    if logarithmic(group):
        axis = log_axis(min(values), max(values), lanes.left, right)
    else:
        axis = linear_axis(max(values), lanes.left, right, lambda x: f"{x:g}")
    canvas = Canvas(WIDTH, lanes.height)
    lanes.frame(canvas, axis)
    lanes.absent(canvas)
    for index, case in enumerate(group.cases):
        if case.limit and case.limit > 0:
            x, top = axis.place(case.limit), lanes.top(index)
            canvas.line([x, x], [top + 2, top + lanes.line - 2], "--ink", 1.2, dash=DASHES[2])
        ours = case.ours
        if ours is not None and ours.speedup_vs_best_baseline is not None:
            text = figures.ratio(ours.speedup_vs_best_baseline)
            canvas.text(WIDTH - 4, lanes.top(index) + lanes.line / 2, text, verdict_colour(ours), "right")
    canvas.text(WIDTH - 4, lanes.TOP - 11, "vs best", "--soft", "right", size=FONT - 1)
    _dots(canvas, lanes, axis, lambda row: (row.value(), *row.bounds()))
    name = group.cases[0].first.primary.replace("_", " ").capitalize()
    return canvas.svg(f"{name} of {group.operator} {group.pass_} {group.common}".strip())


def fraction(group: Group, looks: Mapping[str, Series]) -> str | None:
    """Fraction of the limit with its interval, a bar an implementation; None where no limit is known."""
    lanes = _Lanes.of(group, looks)
    found = [fraction_bounds(x) for case in group.cases for x in case.ok if x.fraction_of_limit is not None]
    if not found:
        return None
    high = max(1.0, *(y for x in found for y in x if y is not None and y < 1.5 * max(x[0] or 0, 1)))
    axis = linear_axis(high, lanes.left, WIDTH - 18, figures.percent)
    canvas = Canvas(WIDTH, lanes.height)
    lanes.frame(canvas, axis)
    lanes.absent(canvas)
    x = axis.place(1.0)
    canvas.line([x, x], [lanes.TOP, lanes.top(len(group.cases))], "--ink", 1.2, dash=DASHES[2])
    _dots(canvas, lanes, axis, fraction_bounds, bars=True)
    return canvas.svg(f"Fraction of the limit reached by {group.operator} {group.pass_} {group.common}".strip())


def fraction_bounds(row: Row) -> tuple[float | None, float | None, float | None]:
    """The fraction of the limit with the bounds that the primary metric's interval gives it."""
    if row.limit is None or row.fraction_of_limit is None:
        return None, None, None
    high, low = (row.limit / x if x else None for x in row.bounds())
    return row.fraction_of_limit, low, high


def _dots(
    canvas: Canvas,
    lanes: _Lanes,
    axis: Axis,
    values: Callable[[Row], tuple[float | None, float | None, float | None]],
    bars: bool = False,
) -> None:
    for index, case in enumerate(lanes.group.cases):
        by_name = {x.implementation: x for x in case.ok}
        for lane, look in enumerate(lanes.series):
            row = by_name.get(look.name)
            value, low, high = values(row) if row is not None else (None, None, None)
            if row is None or value is None or value <= 0:  # 0 has no place on a logarithmic axis
                continue
            y = lanes.y(index, lane)
            if bars:
                weight = 5.0 if look.ours else 3.0
                canvas.line([axis.place(0), axis.place(value)], [y, y], look.colour, weight, opacity=0.45)
            if low is not None and high is not None:
                canvas.line([axis.clipped(low), axis.clipped(high)], [y, y], look.colour, 1.6)
            told = f"{lanes.group.labels[index]}: {tip(row)}"
            canvas.dot(axis.place(value), y, look.colour, look.shape, 7.5 if look.ours else 6.5, told, look.fill)


def tip(row: Row) -> str:
    """A row in one line, for tooltips."""
    (low, high), found = row.bounds(), row.get()
    bounds = f" [{figures.number(low)}, {figures.number(high)}]" if low else ""
    unit = f" {found.unit}" if found and found.unit != "1" else ""
    limit = f", {figures.percent(row.fraction_of_limit)} of the limit" if row.fraction_of_limit else ""
    return f"{row.implementation} {figures.number(row.value())}{unit}{bounds}{limit}"
