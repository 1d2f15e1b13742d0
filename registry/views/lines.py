"""The report's charts over an axis: values over sizes, attention beside O(S), curves, the copy, the roofline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low

from .. import figures
from ..analysis.ceilings import Ceilings
from ..analysis.rows import THROUGHPUT, Row
from ..store.record import YARDSTICK, Key, products
from .canvas import CHARACTER, DASHES, FONT, Axis, Canvas, linear_axis, log_axis, span_axis
from .charts import WIDTH, fraction_bounds, tip
from .crossing import Contest, Curve, Measure
from .grouping import CaseRows
from .looks import Series
from .sizes import ARRAY, BYTES, OUT_OF_MEMORY, PARAMETERS, Sweep

Link = Callable[[Key], str | None]
"""Where a click on a row's point leads."""
Bounded = tuple[float | None, float | None, float | None]
"""A value with the bounds of its interval."""

Banded = tuple[float, float, float]
"""A lower edge, what is between, and an upper edge."""

OPERATORS: Mapping[str, str] = {
    "attention": "--ink",
    "linear_attention": "--q1",
    "selective_scan": "--q2",
    "ssd": "--q3",
}
"""Colours of operators in a chart whose lines are operators; what a library's colour says is in the shape then."""
BEYOND = 1.25
"""How far the frame of differences reaches, over where half of its lines end: a bad arm hides no other.
"""


@dataclass(frozen=True)
class Plot:
    """A frame with an axis each way; `up` is measured from the foot."""

    canvas: Canvas
    across: Axis
    up: Axis
    top: float
    foot: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.across.place(x), self.y(y)

    def y(self, value: float) -> float:
        return self.foot - self.up.place(value)

    def grid(self, across: Callable[[float, str], str], up: Callable[[float, str], str]) -> None:
        """Lines and labels at the ticks, upright ones as far as their labels keep apart."""
        canvas, left, right = self.canvas, self.across.left, self.across.right
        heights = [self.y(value) for value, _ in self.up.ticks]
        places = [self.across.place(value) for value, _ in self.across.ticks]
        level = [((left, y), (right, y)) for y in heights]
        canvas.lines([*level, *(((x, self.top), (x, self.foot)) for x in places)], "--grid", 0.8)
        for y, (value, text) in zip(heights, self.up.ticks, strict=True):
            canvas.text(left - 8, y, up(value, text), "--soft", "right")
        free = -math.inf
        for x, (value, text) in zip(places, self.across.ticks, strict=True):
            shown = across(value, text)
            half = len(shown) * CHARACTER / 2
            if shown and x - half > free and x + half < canvas.width + 4:
                canvas.text(x, self.foot + 13, shown, "--soft", "center")
                free = x + half + 4

    def intervals(self, found: Iterable[tuple[float, Bounded]], variable: str) -> None:
        """Upright strokes, where an interval is known and its ends lie apart."""
        strokes = []
        for x, (_, low, high) in found:
            if low is not None and high is not None:
                ends = [self.foot - self.up.clipped(y) for y in (low, high)]
                if ends[0] - ends[1] > 2:
                    strokes.append([(self.across.place(x), y) for y in ends])
        self.canvas.lines(strokes, variable, 1.2, opacity=0.8)


def _same(_: float, text: str) -> str:
    return text


def _sized(value: float, _: str) -> str:
    return figures.size(value)


def _thousands(value: float, text: str) -> str:
    return f"{value / 1e3:g}k" if value >= 1e4 else text


def _many(value: float, _: str) -> str:
    """A number of parameters."""
    return f"{value / 1e9:.3g}B" if value >= 1e9 else f"{value / 1e6:.3g}M"


# --- over sizes -----------------------------------------------------------------------------------------


def over_sizes(
    sweep: Sweep,
    looks: Mapping[str, Series],
    limits: bool = False,
    link: Link = lambda _: None,
    width: float = WIDTH,
    metric: str | None = None,
) -> str | None:
    """A metric over a sweep's sizes, the primary one by default, a line an implementation; or the fraction of the
    limit. `link` is where a click on a row's point leads, `width` the drawing's in pixels.

    None where nothing is known at two sizes or more.
    """

    def measured(row: Row) -> Bounded:
        return (row.value(metric), *row.bounds(metric))

    values = fraction_bounds if limits else measured
    lines: dict[str, list[tuple[int, Row, Bounded]]] = {}
    for size, case in sweep.cases:
        for row in case.ok:
            found = values(row)
            if found[0]:
                lines.setdefault(row.implementation, []).append((size, row, found))
    if not any(len(x) > 1 for x in lines.values()):
        return None
    points = [x[0] for line in lines.values() for _, _, x in line if x[0]]
    # Half of `256 MiB` goes beside an axis of arrays.
    left, right, top, foot = 58.0, width - (28.0 if sweep.axis == ARRAY else 14.0), 10.0, 236.0
    across = _sizes_axis(sweep, left, right)
    if limits:
        # Intervals' ends too, but a wide one only says that it is wide.
        ends = [x[2] for line in lines.values() for _, _, x in line if x[2] is not None]
        most = max(1.0, *points)
        up = linear_axis(max([most, *(min(x, 1.5 * most) for x in ends)]), 0, foot - top, figures.percent)
    else:
        known = [] if metric else [case.limit for _, case in sweep.cases if case.limit]
        up = log_axis(min(points + known), max(points + known), 0, foot - top)
    plot = Plot(Canvas(width, foot + 24), across, up, top, foot)
    units = (held.unit for _, case in sweep.cases for row in case.ok if (held := row.get(metric)) is not None)
    unit = next(units, "")
    upright = _sized if unit == "B" and not limits else _thousands
    plot.grid({BYTES: _sized, PARAMETERS: _many}.get(sweep.axis, _same), upright)
    if metric is None:
        _limits(plot, sweep, limits)
    _ended(plot, sweep, looks, link)
    for name in sorted(lines, key=lambda x: looks[x].ours):  # ours is drawn last, on top
        look, line = looks[name], lines[name]
        places = [plot.at(size, value or 0) for size, _, (value, _, _) in line]
        plot.canvas.line(
            [x for x, _ in places], [y for _, y in places], look.colour, 2.4 if look.ours else 1.5, look.dash
        )
        plot.intervals(((size, bounds) for size, _, bounds in line), look.colour)
        for (size, row, _), (x, y) in zip(line, places, strict=True):
            said = f"{row.implementation} {figures.quantity(row.value(metric), unit)}" if metric else tip(row)
            told = f"{_place(sweep, size, row)}: {said}"
            wide = 7.5 if look.ours else 6.5
            plot.canvas.dot(x, y, look.colour, look.shape, wide, told, look.fill, link(row.identity))
    first = next(iter(lines.values()))[0][1]
    what = "Fraction of the limit" if limits else (metric or first.primary).replace("_", " ").capitalize()
    return plot.canvas.svg(f"{what} of {first.operator} {first.pass_} over {sweep.axis}: {sweep.common}")


def _place(sweep: Sweep, size: int, row: Row) -> str:
    """Where along the axis a row lies."""
    if sweep.axis == PARAMETERS:
        return f"{row.options.get('model')}, {_many(size, '')} parameters"
    if sweep.axis == ARRAY:
        return figures.binary(size)
    return figures.size(size) if sweep.axis == BYTES else f"{sweep.axis} = {size:,}"


def _ended(plot: Plot, sweep: Sweep, looks: Mapping[str, Series], link: Link) -> None:
    """A cross at the frame's top for whom the device had no memory."""
    for size, case in sweep.cases:
        lost = [x for x in case.rows if x.status == OUT_OF_MEMORY and x.implementation in looks]
        for lane, row in enumerate(lost):
            told = f"{_place(sweep, size, row)}: {row.implementation} out of memory"
            x, y = plot.across.place(size), plot.top + 5 + 9 * lane
            plot.canvas.dot(x, y, looks[row.implementation].colour, "X", 7, told, 0, link(row.identity))


def _limits(plot: Plot, sweep: Sweep, fraction: bool) -> None:
    known = [(size, 1.0 if fraction else case.limit) for size, case in sweep.cases if case.limit]
    places = [plot.at(size, limit) for size, limit in known if limit]
    if len(places) > 1:
        plot.canvas.line([x for x, _ in places], [y for _, y in places], "--ink", 1.2, DASHES[2])


def _sizes_axis(sweep: Sweep, left: float, right: float) -> Axis:
    """A logarithmic axis with a tick at each size, or at round numbers of bytes."""
    sizes = sweep.sizes
    if sweep.axis == ARRAY:
        return arrays_axis(sizes, left, right)
    if sweep.axis in (BYTES, PARAMETERS):
        return log_axis(sizes[0], sizes[-1], left, right)
    begin, end = math.log2(max(sizes[0], 0.5)) - 0.15, math.log2(sizes[-1]) + 0.15
    scale = (right - left) / (end - begin)
    ticks = [(float(x), _round_name(x)) for x in sizes]
    return Axis(lambda x: left + (math.log2(max(x, 0.5)) - begin) * scale, ticks, left, right)


def arrays_axis(sizes: Sequence[float], left: float, right: float) -> Axis:
    """Over bytes, with a tick at each size. The largest has its label, and what would touch that has none."""
    axis, last = log_axis(sizes[0], sizes[-1], left, right), figures.binary(sizes[-1])
    free = axis.place(sizes[-1]) - len(last) * CHARACTER / 2 - 4
    clear = [x for x in sizes[:-1] if axis.place(x) + len(figures.binary(x)) * CHARACTER / 2 < free]
    return replace(axis, ticks=[(x, figures.binary(x) if x in clear or x == sizes[-1] else "") for x in sizes])


# --- attention beside operators of O(S) -----------------------------------------------------------------


def over_lengths(contest: Contest, measure: Measure) -> str | None:
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
    up = log_axis(min(values), max(values), 0, foot - top)
    plot = Plot(Canvas(WIDTH, foot + 24), octaves(lengths, left, right), up, top, foot)
    plot.grid(_same, _same if measure == "time" else _sized)
    ends: list[tuple[float, float, str, str]] = []
    for series, points in zip(known, middles, strict=True):
        colour = OPERATORS[series.operator]
        places = [plot.at(length, value) for length, value in points.items()]
        plot.canvas.line([a for a, _ in places], [b for _, b in places], colour, 1.8)
        for (length, value), (a, b) in zip(points.items(), places, strict=True):
            shown = f"{figures.number(value)} ms" if measure == "time" else figures.size(value)
            plot.canvas.dot(a, b, colour, "o", 5.5, f"{series.name} at S = {length:,}: {shown}")
        ends.append((places[-1][1], places[-1][0] + 8, series.operator, colour))
    _end_labels(plot.canvas, ends)
    _crossings(plot, contest, measure)
    return plot.canvas.svg(f"{measure.capitalize()} over sequence length, width {contest.width}: {contest.side}")


def _middles(curve: Curve) -> dict[int, float]:
    """Medians over replicates, by increasing length."""
    return {length: median(x.values()) for length, x in sorted(curve.items())}


def octaves(lengths: Sequence[int], left: float, right: float) -> Axis:
    """A logarithmic axis over lengths with ticks at powers of two, every other one where they are many."""
    begin, end = math.log2(lengths[0]) - 0.15, math.log2(lengths[-1]) + 0.15
    powers = range(math.ceil(begin), math.floor(end) + 1)
    step = 1 + len(powers) // 10
    ticks = [(2.0**x, _round_name(2**x)) for x in powers[::step]]
    scale = (right - left) / (end - begin)
    return Axis(lambda x: left + (math.log2(x) - begin) * scale, ticks, left, right)


def _round_name(size: int) -> str:
    """A size by its power of two: `64k`, `2M`."""
    for name, unit in (("M", 2**20), ("k", 2**10)):
        if size and size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size}"


def _end_labels(canvas: Canvas, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names (y, x, text, colour) behind the ends of lines, kept apart."""
    least = -math.inf
    for y, x, text, colour in sorted(ends):
        least = max(y, least + FONT + 2)
        canvas.text(x, least, text, colour)


def _crossings(plot: Plot, contest: Contest, measure: Measure) -> None:
    canvas, across = plot.canvas, plot.across
    points = _middles(contest.quadratic.curve(measure))
    known = [(contest.crossing(x, measure), x) for x in contest.linear]
    found = [(x, other) for x, other in known if x is not None and math.isfinite(x.at)]
    # The rightmost has its words lowest: no line goes through those of another.
    for index, (crossing, other) in enumerate(sorted(found, key=lambda x: -x[0].at)):
        colour = OPERATORS[other.operator]
        x, y = plot.at(crossing.at, _between(points, crossing.at))
        if crossing.low is not None and crossing.high is not None:
            begin, end = across.clipped(max(crossing.low, 1.0)), across.clipped(min(crossing.high, 2.0**62))
            canvas.box(min(begin, x - 1), max(end, x + 1), plot.top, plot.foot, colour, opacity=0.18)
        head = plot.top - 8 - 14 * index
        canvas.line([x, x], [head - 5, plot.foot], colour, 1.0, DASHES[2])
        text = f"{other.operator} {figures.number(crossing.at)}"
        leftward = x + len(text) * CHARACTER > WIDTH
        align = "right" if leftward else "left"
        # Bold is for what an interval stands behind.
        canvas.text(x - 5 if leftward else x + 5, head, text, colour, align, bold=crossing.low is not None)
        canvas.dot(x, y, colour, "o", 7.5, contest.told(other, measure), fill=1)


def _between(points: Mapping[int, float], length: float) -> float:
    """A curve's value at a length within it, straight in the logarithms."""
    below = max(x for x in points if x <= length)
    above = min((x for x in points if x > length), default=below)
    share = 0.0 if above == below else math.log(length / below) / math.log(above / below)
    return float(points[below] * (points[above] / points[below]) ** share)


# --- curves, the copy, the roofline ---------------------------------------------------------------------


def curves(
    points: Mapping[str, Mapping[float, Banded]],
    looks: Mapping[str, Series],
    text: str,
    margin: float | None = None,
    unit: str = "",
) -> str:
    """A metric over its abscissa, a line an implementation in a band: `points` by implementation and place.

    `margin` draws a stripe from -margin to margin. The frame reaches four of them either way, further where half
    of the lines end further out; what lies beyond runs at its edge.
    """
    known = {name: sorted(x.items()) for name, x in points.items() if x}
    across_all = [x for line in known.values() for x, _ in line]
    values = [y for line in known.values() for _, band in line for y in band]
    ends_at = [abs(line[-1][1][1]) for line in known.values()]
    edge = math.inf if margin is None else max(4 * margin, BEYOND * median_low(ends_at))
    left, right, top, foot = 62.0, WIDTH - 22.0, 12.0, 230.0
    across = span_axis(min(across_all), max(across_all), left, right)
    ends = (min(values), max(values)) if margin is None else (-edge, edge)
    up = span_axis(*ends, 0, foot - top)
    plot = Plot(Canvas(WIDTH, foot + 24), across, up, top, foot)
    if margin is not None:
        plot.canvas.box(left, right, plot.y(margin), plot.y(-margin), "--grid", 0.6)
    plot.grid(_same, lambda _, shown: shown + unit)

    def y(value: float) -> float:
        return plot.y(min(max(value, -edge), edge))

    for name, line in known.items():
        look = looks[name]
        places = [across.place(x) for x, _ in line]
        if any(low < high for _, (low, _, high) in line):
            lows, highs = ([y(band[i]) for _, band in line] for i in (0, 2))
            plot.canvas.area(places, lows, highs, look.colour, 0.16)
        plot.canvas.line(places, [y(band[1]) for _, band in line], look.colour, 1.6, look.dash)
        at, (low, value, high) = line[-1]
        between = f" [{figures.number(low)}, {figures.number(high)}]" if low < high else ""
        told = f"{name}: {figures.number(value)}{unit}{between} at {figures.number(at)}"
        plot.canvas.dot(places[-1], y(value), look.colour, look.shape, 6.5, told, look.fill)
    return plot.canvas.svg(text)


def copy_curve(copy_ms: Mapping[int, float]) -> str | None:
    """The device's own copy bandwidth over the bytes moved; None where it was not measured."""
    points = [(size, size / ms / 1e6) for size, ms in copy_ms.items() if size > 0 and ms > 0]
    if len(points) < 2:
        return None
    left, right, top, foot = 58.0, WIDTH - 22.0, 12.0, 188.0
    across = log_axis(points[0][0], points[-1][0], left, right)
    up = linear_axis(max(y for _, y in points), 0, foot - top, lambda y: f"{y:,g}")
    plot = Plot(Canvas(WIDTH, foot + 24), across, up, top, foot)
    plot.grid(_sized, _same)
    places = [plot.at(x, y) for x, y in points]
    plot.canvas.line([x for x, _ in places], [y for _, y in places], "--ink", 1.6)
    for (size, rate), (x, y) in zip(points, places, strict=True):
        plot.canvas.dot(x, y, "--ink", "o", 6, f"copy of {figures.size(size)}: {figures.number(rate)} GB/s")
    return plot.canvas.svg("Bandwidth of a device copy over the bytes moved")


def roofline(dtype: str, found: Iterable[CaseRows], ceilings: Ceilings, looks: Mapping[str, Series]) -> str | None:
    """Operations per second over operations a byte, below the two measured ceilings of a dtype.

    A dot for ours and one for the fastest baseline of each case: all implementations of a case stand above one
    another. None where a ceiling is missing, or no case of the dtype has both bytes and operations.
    """
    summed = ceilings.summary()
    rate, copy = summed["matmul_tflops"].get(dtype), summed["copy_gbps"]
    points: list[tuple[float, float, CaseRows, Row]] = []
    for case in found:
        first = case.first
        of = ceilings.multiplied(first.operator, products(first.dtype, first.options))
        if of != dtype or not first.bytes or not first.flops:
            continue
        rivals = [x for x in case.ok if x.provider != YARDSTICK and not looks[x.implementation].ours]
        for row in (case.ours, next(iter(rivals), None)):
            reached = row.value(THROUGHPUT.name) if row else None
            if row and reached:
                points.append(((row.flops or 0) / (row.bytes or 1), reached, case, row))
    if not rate or not copy or not points:
        return None
    ridge = rate * 1e3 / copy
    left, right, top, foot = 58.0, WIDTH - 22.0, 14.0, 262.0
    least, most = min(ridge / 4, *(x for x, *_ in points)), max(ridge * 4, *(x for x, *_ in points))
    across = log_axis(least, most, left, right)
    up = log_axis(min(x for _, x, *_ in points), max(rate, *(x for _, x, *_ in points)), 0, foot - top)
    plot = Plot(Canvas(WIDTH, foot + 24), across, up, top, foot)
    plot.grid(_same, _same)
    roof = [(x, min(rate, x * copy / 1e3)) for x in (least, ridge, most)]
    lowest = 10 ** (math.log10(min(x for _, x, *_ in points)) - 0.02)
    if roof[0][1] < lowest:  # the slope enters the frame at its foot, not below it
        roof[0] = (lowest * 1e3 / copy, lowest)
    places = [plot.at(*x) for x in roof]
    plot.canvas.line([x for x, _ in places], [y for _, y in places], "--ink", 1.6)
    plot.canvas.text(places[1][0], top - 4, f"{figures.number(rate, 3)} TFLOP/s", "--soft", size=FONT - 1)
    for x, y, case, row in sorted(points, key=lambda x: looks[x[3].implementation].ours):
        look = looks[row.implementation]
        measured = f"{figures.number(y)} TFLOP/s at {figures.number(x)} FLOP/B"
        told = f"{case.operator} {case.name}: {tip(row)}, {measured}"
        plot.canvas.dot(*plot.at(x, y), look.colour, look.shape, 7 if look.ours else 6, told, look.fill)
    return plot.canvas.svg(f"Roofline of {dtype}: throughput over arithmetic intensity")
