"""The report's charts: latency and fraction of the limit by case, every speedup, the copy's bandwidth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ..analysis.rows import Row, category
from ..store.record import EAGER, PROVIDER, YARDSTICK
from . import units
from .canvas import CHARACTER, FONT, Axis, Canvas, linear_axis, log_axis, span_axis, speedup_axis
from .crossing import Contest, Curve, Measure
from .grouping import Group

WIDTH = 480
"""Of a chart, in its own pixels: two stand side by side on a desk, one fills a phone."""
COLOURS = 8
"""Baseline colours that the style sheet has, as `--s1` to `--s8`; `--s0` is ours and `--s9` a yardstick's."""
MARKERS = ("s", "D", "^", "v", "P", "X", "p", "h")
"""Shapes of the baselines, so that colour is never the only difference. Ours is the circle, or the star."""


@dataclass(frozen=True)
class Series:
    """How an implementation looks, everywhere in a report."""

    name: str
    colour: str
    """A CSS variable."""
    marker: str
    """As matplotlib names it."""
    ours: bool = False


def palette(rows: Iterable[Row]) -> dict[str, Series]:
    """A look for every implementation: ours first, PyTorch's own next, the others by name; yardsticks are grey."""
    providers: dict[str, str] = {}
    timed = set()
    for row in rows:
        providers.setdefault(row.implementation, row.provider)
        if row.value() is not None:
            timed.add(row.implementation)
    ours = sorted(
        (x for x, provider in providers.items() if provider == PROVIDER), key=lambda x: (x not in timed, x)
    )
    scales = sorted(x for x, provider in providers.items() if provider == YARDSTICK)
    others = sorted(
        (x for x in providers if x not in ours and x not in scales), key=lambda x: (not x.startswith(EAGER), x)
    )
    looks = [Series(x, "--s0", "*" if index % 2 else "o", ours=True) for index, x in enumerate(ours)]
    for index, name in enumerate(others):
        # After a round of colours the shapes move on by one: no two looks are the same for 64 of them.
        marker = MARKERS[(index + index // COLOURS) % len(MARKERS)]
        looks.append(Series(name, f"--s{index % COLOURS + 1}", marker))
    looks += [Series(x, "--s9", "|") for x in scales]
    return {x.name: x for x in looks}


@dataclass(frozen=True)
class _Lanes:
    """A case's line has a lane for each implementation that has a time somewhere in the group."""

    group: Group
    series: Sequence[Series]
    left: float

    TOP = 22.0
    PAD = 6.0

    @classmethod
    def of(cls, group: Group, looks: Mapping[str, Series]) -> _Lanes:
        """From a group and the report's palette."""
        present = {x.implementation for case in group.cases for x in case.ok}
        longest = max(len(x) for x in group.labels)
        left = min(max(longest * CHARACTER + 14, 50), 190)
        return cls(group, [x for x in looks.values() if x.name in present], left)

    @property
    def lane(self) -> float:
        return 11.0 if len(self.series) <= 4 else 9.0

    @property
    def line(self) -> float:
        return max(len(self.series) * self.lane + 2 * self.PAD, 2 * FONT)

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
            shown = label if len(label) * CHARACTER <= self.left else label[: int(self.left / CHARACTER) - 1] + "…"
            canvas.text(self.left - 8, self.top(index) + self.line / 2, shown, align="right")
        for value, text in axis.ticks:
            x = axis.place(value)
            canvas.line([x, x], [self.TOP - 3, foot], "--grid", 0.8, zorder=1)
            canvas.text(x, self.TOP - 11, text, "--soft", "center", fontsize=FONT - 1)
            if self.tall:
                canvas.text(x, foot + 11, text, "--soft", "center", fontsize=FONT - 1)

    def absent(self, canvas: Canvas) -> None:
        """Says in its lane how an implementation without a time ended: no gap without a word."""
        for index, case in enumerate(self.group.cases):
            by_name = {x.implementation: x for x in case.rows}
            for lane, look in enumerate(self.series):
                row = by_name.get(look.name)
                if row is not None and row.value() is None:
                    status = row.status.replace("_", " ")
                    canvas.text(self.left + 4, self.y(index, lane), status, look.colour, fontsize=7.5)


def _values(group: Group) -> list[float]:
    """Every value that a chart of the primary metric has to hold. An interval far wider than its value may leave
    the frame.
    """
    found = [x for case in group.cases for x in case.ok]
    points = [y for x in found for y in (x.value(), x.limit) if y]
    bounds = [y for x in found for y in x.bounds() if y and x.value()]
    return [*points, *(y for y in bounds if min(points) / 2 <= y <= max(points) * 2)] if points else []


def logarithmic(group: Group) -> bool:
    """Whether the chart of the primary metric has a logarithmic axis: values span more than a factor of 4."""
    values = _values(group)
    return bool(values) and max(values) > 4 * min(values)


def primary(group: Group, looks: Mapping[str, Series], salt: str) -> str | None:
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
    canvas = Canvas(WIDTH, lanes.height, salt)
    lanes.frame(canvas, axis)
    lanes.absent(canvas)
    for index, case in enumerate(group.cases):
        if case.first.limit:
            x, top = axis.place(case.first.limit), lanes.top(index)
            canvas.line([x, x], [top + 2, top + lanes.line - 2], "--ink", 1.2, linestyle=(0, (2, 2)), zorder=2)
        ours = case.ours
        if ours is not None and ours.speedup_vs_best_baseline is not None:
            text = units.ratio(ours.speedup_vs_best_baseline)
            canvas.text(WIDTH - 4, lanes.top(index) + lanes.line / 2, text, _verdict_colour(ours), "right")
    canvas.text(WIDTH - 4, lanes.TOP - 11, "vs best", "--soft", "right", fontsize=FONT - 1)
    _dots(canvas, lanes, axis, lambda row: (row.value(), *row.bounds()))
    name = group.cases[0].first.primary.replace("_", " ").capitalize()
    return canvas.svg(f"{name} of {group.operator} {group.pass_} {group.common}".strip())


def fraction(group: Group, looks: Mapping[str, Series], salt: str) -> str | None:
    """Fraction of the limit with its interval, a bar an implementation; None where no limit is known."""
    lanes = _Lanes.of(group, looks)
    found = [_fraction(x) for case in group.cases for x in case.ok if x.fraction_of_limit is not None]
    if not found:
        return None
    high = max(1.0, *(y for x in found for y in x if y is not None and y < 1.5 * max(x[0] or 0, 1)))
    axis = linear_axis(high, lanes.left, WIDTH - 18, lambda x: f"{x * 100:.0f} %")
    canvas = Canvas(WIDTH, lanes.height, salt)
    lanes.frame(canvas, axis)
    lanes.absent(canvas)
    x = axis.place(1.0)
    canvas.line([x, x], [lanes.TOP, lanes.top(len(group.cases))], "--ink", 1.2, linestyle=(0, (2, 2)), zorder=2)
    _dots(canvas, lanes, axis, _fraction, bars=True)
    return canvas.svg(f"Fraction of the limit reached by {group.operator} {group.pass_} {group.common}".strip())


def _fraction(row: Row) -> tuple[float | None, float | None, float | None]:
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
                canvas.line([axis.place(0), axis.place(value)], [y, y], look.colour, weight, alpha=0.45, zorder=2)
            if low is not None and high is not None:
                canvas.line([axis.clipped(low), axis.clipped(high)], [y, y], look.colour, 1.6, zorder=3)
            size = (10.0 if look.marker == "*" else 7.5) if look.ours else 6.0
            canvas.dot(
                axis.place(value), y, look.colour, look.marker, size, f"{lanes.group.labels[index]}: {tip(row)}"
            )


def tip(row: Row) -> str:
    """A row in one line, for tooltips."""
    (low, high), found = row.bounds(), row.get()
    bounds = f" [{units.number(low)}, {units.number(high)}]" if low else ""
    unit = f" {found.unit}" if found and found.unit != "1" else ""
    limit = f", {units.percent(row.fraction_of_limit)} of the limit" if row.fraction_of_limit else ""
    return f"{row.implementation} {units.number(row.value())}{unit}{bounds}{limit}"


def _verdict_colour(row: Row) -> str:
    found = category(row)
    return {None: "--soft", "undecided": "--soft", "slower": "--bad"}.get(found, "--good")


def overview(lines: Sequence[tuple[str, float | None, Sequence[Row]]], salt: str) -> str | None:
    """Every case's speedup over its fastest baseline: a line an operator (name, geometric mean, our rows)."""
    values = [x.speedup_vs_best_baseline for _, _, rows in lines for x in rows if x.speedup_vs_best_baseline]
    if not values:
        return None
    left = min(max(max(len(x) for x, _, _ in lines) * CHARACTER + 12, 60), 190)
    line, top = 26.0, 24.0
    foot = top + line * len(lines)
    axis = speedup_axis(min(values), max(values), left, WIDTH - 56)
    canvas = Canvas(WIDTH, foot + 6, salt)
    for index, (name, mean, rows) in enumerate(lines):
        y = top + (index + 0.5) * line
        if index % 2 == 0:
            canvas.band(top + index * line, top + (index + 1) * line, "--band")
        canvas.text(left - 8, y, name, align="right")
        canvas.text(WIDTH - 4, y, units.ratio(mean), "--ink", "right", fontweight="bold")
        for place, row in enumerate(rows):
            if row.speedup_vs_best_baseline:
                x = axis.place(row.speedup_vs_best_baseline)
                told = f"{row.case}: {units.ratio(row.speedup_vs_best_baseline)} vs {row.best_baseline}"
                shift = (place % 3 - 1) * 4.0  # equal speedups would hide one another on one line
                canvas.dot(x, y + shift, _verdict_colour(row), "o", 5.0, told)
        if mean:
            x = axis.place(mean)
            canvas.line([x, x], [y - 10, y + 10], "--ink", 2.2, zorder=4)
    for value, text in axis.ticks:
        x = axis.place(value)
        canvas.line(
            [x, x], [top - 3, foot], "--ink" if value == 1 else "--grid", 1.2 if value == 1 else 0.8, zorder=1
        )
        canvas.text(x, top - 12, text, "--soft", "center", fontsize=FONT - 1)
    canvas.text(WIDTH - 4, top - 12, "geomean", "--soft", "right", fontsize=FONT - 1)
    return canvas.svg("Speedup over the fastest baseline, a dot a case")


DASHES: Mapping[str, object] = {
    "attention": "-",
    "linear_attention": (0, (5, 2, 1.5, 2)),
    "selective_scan": (0, (1.5, 1.5)),
    "ssd": (0, (5, 2)),
}
"""How an operator's line is drawn, where a colour says whose implementation it is."""


def over_lengths(contest: Contest, measure: Measure, looks: Mapping[str, Series], salt: str) -> str | None:
    """Attention and the operators beside it over the length of the sequence, both axes logarithmic.

    Where one comes to lie below attention for good it is marked, with its interval as a stripe. None unless
    attention and another have this measure.
    """
    known = [x for x in contest.series if x.curve(measure)]
    if len(known) < 2 or known[0] is not contest.quadratic:
        return None
    middles = [_middles(x.curve(measure)) for x in known]
    values = [y for points in middles for y in points.values()]
    lengths = sorted({x for points in middles for x in points})
    longest = max(len(x.operator) for x in known)
    left, right, top, foot = 62.0, WIDTH - longest * CHARACTER - 12, 14.0 + 14.0 * (len(known) - 1), 250.0
    across = _octaves(lengths, left, right)
    up = log_axis(min(values), max(values), 0, foot - top)
    canvas = Canvas(WIDTH, foot + 24, salt)
    for value, text in across.ticks:
        x = across.place(value)
        canvas.line([x, x], [top, foot], "--grid", 0.8, zorder=1)
        canvas.text(x, foot + 13, text, "--soft", "center", fontsize=FONT - 1)
    for value, text in up.ticks:
        y = foot - up.place(value)
        shown = text if measure == "time" else units.size(value)
        canvas.line([left, right], [y, y], "--grid", 0.8, zorder=1)
        canvas.text(left - 8, y, shown, "--soft", "right", fontsize=FONT - 1)
    ends: list[tuple[float, float, str, str]] = []
    for series, points in zip(known, middles, strict=True):
        look = looks[series.implementation]
        places = [(across.place(length), foot - up.place(value)) for length, value in points.items()]
        style = DASHES[series.operator]
        canvas.line([a for a, _ in places], [b for _, b in places], look.colour, 1.8, linestyle=style, zorder=3)
        for (length, value), (a, b) in zip(points.items(), places, strict=True):
            shown = f"{units.number(value)} ms" if measure == "time" else units.size(value)
            canvas.dot(a, b, look.colour, look.marker, 5.5, f"{series.name} at S = {length:,}: {shown}")
        ends.append((places[-1][1], places[-1][0] + 8, series.operator, look.colour))
    _end_labels(canvas, ends)
    _crossings(canvas, contest, measure, (across, up), (top, foot))
    return canvas.svg(f"{measure.capitalize()} over sequence length, width {contest.width}: {contest.side}")


def _middles(curve: Curve) -> dict[int, float]:
    """Medians over replicates, by increasing length."""
    return {length: median(x.values()) for length, x in sorted(curve.items())}


def _octaves(lengths: Sequence[int], left: float, right: float) -> Axis:
    """A logarithmic axis over lengths with ticks at powers of two, every other one where they are many."""
    begin, end = math.log2(lengths[0]) - 0.15, math.log2(lengths[-1]) + 0.15
    powers = range(math.ceil(begin), math.floor(end) + 1)
    step = 1 + len(powers) // 10
    ticks = [(2.0**x, f"{2 ** (x - 10)}k" if x >= 10 else f"{2**x}") for x in powers[::step]]
    scale = (right - left) / (end - begin)
    return Axis(lambda x: left + (math.log2(x) - begin) * scale, ticks, left, right)


def _end_labels(canvas: Canvas, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names (y, x, text, colour) behind the ends of lines, kept apart."""
    least = -math.inf
    for y, x, text, colour in sorted(ends):
        least = max(y, least + FONT + 2)
        canvas.text(x, least, text, colour)


def _crossings(
    canvas: Canvas, contest: Contest, measure: Measure, axes: tuple[Axis, Axis], frame: tuple[float, float]
) -> None:
    (across, up), (top, foot) = axes, frame
    points = _middles(contest.quadratic.curve(measure))
    known = [(contest.crossing(x, measure), x) for x in contest.linear]
    found = [(x, other) for x, other in known if x is not None and math.isfinite(x.at)]
    # The rightmost has its words lowest: no line goes through those of another.
    for index, (crossing, other) in enumerate(sorted(found, key=lambda x: -x[0].at)):
        x, y = across.place(crossing.at), foot - up.place(_between(points, crossing.at))
        if crossing.low is not None and crossing.high is not None:
            begin, end = across.clipped(max(crossing.low, 1.0)), across.clipped(min(crossing.high, 2.0**62))
            canvas.box(min(begin, x - 1), max(end, x + 1), top, foot, "--ink", alpha=0.14)
        head = top - 8 - 14 * index
        canvas.line([x, x], [head - 5, foot], "--ink", 1.0, linestyle=(0, (2, 2)), zorder=2)
        text = f"{other.operator} {units.number(crossing.at)}"
        leftward = x + len(text) * CHARACTER > WIDTH
        align = "right" if leftward else "left"
        canvas.text(x - 5 if leftward else x + 5, head, text, "--ink", align, fontweight="bold")
        canvas.dot(x, y, "--ink", "o", 6.5, contest.told(other, measure))


def _between(points: Mapping[int, float], length: float) -> float:
    """A curve's value at a length within it, straight in the logarithms."""
    below = max(x for x in points if x <= length)
    above = min((x for x in points if x > length), default=below)
    share = 0.0 if above == below else math.log(length / below) / math.log(above / below)
    return float(points[below] * (points[above] / points[below]) ** share)


def curves(points: Mapping[str, Mapping[float, float]], looks: Mapping[str, Series], salt: str, text: str) -> str:
    """A metric over its abscissa, a line an implementation: `points` by implementation and place."""
    known = {name: sorted(x.items()) for name, x in points.items() if x}
    across_all = [x for line in known.values() for x, _ in line]
    values = [y for line in known.values() for _, y in line]
    left, right, top, foot = 62.0, WIDTH - 22.0, 12.0, 230.0
    across = span_axis(min(across_all), max(across_all), left, right)
    up = span_axis(min(values), max(values), 0, foot - top)
    canvas = Canvas(WIDTH, foot + 24, salt)
    for value, told in up.ticks:
        y = foot - up.place(value)
        canvas.line([left, right], [y, y], "--grid", 0.8)
        canvas.text(left - 8, y, told, "--soft", "right", fontsize=FONT - 1)
    for value, told in across.ticks:
        canvas.text(across.place(value), foot + 13, told, "--soft", "center", fontsize=FONT - 1)
    for name, line in known.items():
        look = looks[name]
        places = [(across.place(x), foot - up.place(y)) for x, y in line]
        canvas.line([x for x, _ in places], [y for _, y in places], look.colour, 1.6, zorder=3)
        (x, y), (at, value) = places[-1], line[-1]
        canvas.dot(x, y, look.colour, look.marker, 6, f"{name}: {units.number(value)} at {units.number(at)}")
    return canvas.svg(text)


def copy_curve(copy_ms: Mapping[int, float], salt: str) -> str | None:
    """The device's own copy bandwidth over the bytes moved; None where it was not measured."""
    points = [(size, size / ms / 1e6) for size, ms in copy_ms.items() if size > 0 and ms > 0]
    if len(points) < 2:
        return None
    left, right, top, foot = 58.0, WIDTH - 22.0, 12.0, 188.0
    across = log_axis(points[0][0], points[-1][0], left, right)
    up = linear_axis(max(y for _, y in points), 0, foot - top, lambda y: f"{y:,g}")
    canvas = Canvas(WIDTH, foot + 24, salt)
    for value, text in up.ticks:
        y = foot - up.place(value)
        canvas.line([left, right], [y, y], "--grid", 0.8)
        canvas.text(left - 8, y, text, "--soft", "right", fontsize=FONT - 1)
    for value, _ in across.ticks:
        canvas.text(across.place(value), foot + 13, units.size(value), "--soft", "center", fontsize=FONT - 1)
    places = [(across.place(x), foot - up.place(y)) for x, y in points]
    canvas.line([x for x, _ in places], [y for _, y in places], "--s1", 1.6)
    for (size, rate), (x, y) in zip(points, places, strict=True):
        canvas.dot(x, y, "--s1", "o", 6, f"copy of {units.size(size)}: {units.number(rate)} GB/s")
    return canvas.svg("Bandwidth of a device copy over the bytes moved")
