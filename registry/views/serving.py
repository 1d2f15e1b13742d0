"""Serving: latency over load, throughput against speed, and how latencies are spread, from the rows of a run.

Pure. Open loads come by a schedule, closed ones by users: the two are never in one drawing. What a distribution is
drawn from is small, so that a site can keep it without the journal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from .. import figures
from ..analysis.rows import Row
from ..store.journal import Journal
from ..store.processes import HIGHEST, SERVE
from ..store.record import GPUS, Key
from .canvas import CHARACTER, DASHES, FONT, Axis, Canvas, linear_axis, log_axis
from .charts import WIDTH
from .grouping import options
from .lines import Link, Plot
from .looks import Series

OPERATOR = SERVE
"""The workload whose rows these are."""
TAILS = (("ttft_p99", "first token"), ("tpot_p99", "time a token"), ("request_p99", "end to end"))
SPREADS = (
    ("ttft", "First token"),
    ("tpot", "Time a token"),
    ("request", "End to end"),
    ("dispatch", "Dispatch delay"),
)
MARKS = ((50, 1), (90, 50), (99, 500))
"""Percentiles that are marked, with the requests that each takes at the least."""
LEAST_MS = 1e-3
"""What is shorter is drawn as this: an axis of logarithms has no 0."""
FAR = 100
"""What a median is more than so many times of is drawn at the edge: one answer in one piece, say."""
POINTS = 200
"""Of a distribution's line."""
MET, RATE = "probe_met", "probe_rate"
"""The share of requests within the objective, by rate that a search tried."""
ASIDE = (0, -13, 13, -26, 26, -39, 39, -52, 52)
"""Pixels that a load's name is moved up or down where another, or a point, has its place."""

Point: TypeAlias = tuple[float, float, Row]
Place: TypeAlias = Callable[[Row], float | None]
Lines: TypeAlias = Mapping[tuple[str, str], Sequence[Point]]
"""By implementation and run."""
Of: TypeAlias = Callable[[Key], str]
"""The run of a row: what different runs measured is not joined."""


class Spread(msgspec.Struct, frozen=True, array_like=True):
    """How one latency of a row is spread over the requests of all its processes: at 1/POINTS, 2/POINTS, … of
    them the least value, in ms, that so many are not above.
    """

    key: Key
    metric: str
    count: int
    ranks: tuple[float, ...]
    tail: tuple[float, float] | None = None
    """The 95 % interval of the 99th percentile by order statistics; None of fewer than 500 requests."""

    def at(self, percent: int) -> float:
        """A percentile, nearest rank."""
        return self.ranks[math.ceil(percent * POINTS / 100) - 1]


class Probes(msgspec.Struct, frozen=True, array_like=True):
    """What a search tried, in one process: of each rate the share of requests that met the objective."""

    key: Key
    rates: tuple[float, ...]
    met: tuple[float, ...]


def probes(journal: Journal) -> tuple[Probes, ...]:
    """Of every search of a run, by process, the rates in order."""
    out = []
    for record in journal.records:
        if record.case.operator == OPERATOR and record.measurement is not None:
            samples = record.measurement.samples
            tried = sorted(zip(samples.get(RATE, ()), samples.get(MET, ()), strict=False))
            tried = [
                (x, y) for x, y in tried if x > 0 and 0 <= y <= 1
            ]  # as a journal of somebody else's may not be
            if tried:
                out.append(Probes(record.identity, tuple(x for x, _ in tried), tuple(y for _, y in tried)))
    return tuple(out)


def spreads(journal: Journal) -> tuple[Spread, ...]:
    """Of every row of servers of a run, those of `SPREADS` that it has samples of."""
    values: dict[tuple[Key, str], list[float]] = {}
    for record in journal.records:
        if record.case.operator == OPERATOR and record.measurement is not None:
            for metric, _ in SPREADS:
                samples = record.measurement.samples.get(metric, ())
                values.setdefault((record.identity, metric), []).extend(max(LEAST_MS, x) for x in samples)
    return tuple(_spread(key, metric, sorted(found)) for (key, metric), found in values.items() if found)


def _spread(key: Key, metric: str, ordered: Sequence[float]) -> Spread:
    ranks = tuple(nearest_rank(ordered, 100 * i / POINTS) for i in range(1, POINTS + 1))
    count = len(ordered)
    about = order_interval(count, 99) if count >= dict(MARKS)[99] else None
    return Spread(key, metric, count, ranks, about and (ordered[about[0] - 1], ordered[about[1] - 1]))


@dataclass(frozen=True)
class Picture:
    """A drawing with its caption, and what tells it from others with the same."""

    caption: str
    of: str
    drawing: str
    implementations: tuple[str, ...]


@dataclass(frozen=True)
class Pictures:
    """The drawings of a run: over load, and how the latencies of each case are spread."""

    loads: tuple[Picture, ...] = ()
    spreads: tuple[Picture, ...] = ()

    @property
    def implementations(self) -> tuple[str, ...]:
        """Those in any of them, each once."""
        both = (*self.loads, *self.spreads)
        return tuple(dict.fromkeys(name for x in both for name in x.implementations))


def pictures(
    found: Iterable[Row],
    spread: Iterable[Spread],
    looks: Mapping[str, Series],
    link: Link = lambda _: None,
    width: float = WIDTH,
    of: Of = lambda _: "",
    tried: Iterable[Probes] = (),
    each: float | None = None,
) -> Pictures:
    """All drawings that rows give, of a `width` in pixels, what searches `tried`, and how latencies are spread,
    these of `each` where it is given. `of` says which run a row is of.
    """
    spread = tuple(spread)
    bounds = {(x.key, f"{x.metric}_p99"): x.tail for x in spread if x.tail is not None}
    served = [x for x in found if x.operator == OPERATOR]
    mine = [x for x in served if x.value() is not None]
    loads: list[Picture] = []
    for what, group in _together([x for x in served if x in mine or _saturated(x)], "rate", "requests"):
        if group[0].axes.get("rate", 0) and group[0].options.get("load") != "search":
            loads.extend(_tails(what, group, looks, link, of, width, bounds))
    for what, group in _together(mine, "rate", "users", "requests"):
        loads.extend(_front(what, group, looks, link, of, width))
    searches: dict[str, list[Probes]] = {}
    rows = {x.identity: x for x in mine}
    for y in tried:
        if y.key in rows:
            searches.setdefault(y.key.case, []).append(y)
    loads.extend(_met(rows, x, looks, link, width) for x in searches.values())
    by_case: dict[tuple[str, str], list[Spread]] = {}
    shown = {x.identity for x in mine}
    for x in spread:
        if x.key not in shown:  # of a row that a report leaves out
            continue
        by_case.setdefault((x.key.case, x.metric), []).append(x)
    drawn = [
        _distribution(
            by_case[case, metric], f"{caption}, ms: share of requests that took no longer", looks, each or width
        )
        for case in dict.fromkeys(x.case for x in mine)
        for metric, caption in SPREADS
        if (case, metric) in by_case
    ]
    return Pictures(tuple(loads), tuple(drawn))


def _together(rows: Sequence[Row], *but: str) -> list[tuple[str, list[Row]]]:
    """Rows that differ in these axes and in who they are of alone, with what they have in common."""
    out: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        same = {name: size for name, size in row.axes.items() if name not in but and size}
        out.setdefault((*row.options.values(), *same.items(), row.dtype), []).append(row)
    return [(_common(x[0], but), x) for x in out.values()]


def _common(row: Row, but: Container[str]) -> str:
    axes = [f"{name}{size}" for name, size in row.axes.items() if name not in but and size]
    return " · ".join([*(x for x in options(row).values() if x != "none"), *axes, row.dtype])


def _lines(rows: Sequence[Row], across: Place, up: Place, of: Of) -> Lines:
    """Points by implementation and run, in the order of their loads."""
    out: dict[tuple[str, str], list[Point]] = {}
    for row in rows:
        x, y = across(row) or 0.0, up(row) or 0.0
        if x > 0 and y > 0:  # what logarithms take
            out.setdefault((row.implementation, of(row.identity)), []).append((x, y, row))
    return {line: sorted(x, key=lambda point: _size(point[2])) for line, x in out.items()}


def _size(row: Row) -> tuple[int, int]:
    """How large its load is."""
    return row.axes.get("rate", 0), row.axes.get("users", 0)


def _names(lines: Lines) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name, _ in lines))


def _tails(
    what: str,
    rows: Sequence[Row],
    looks: Mapping[str, Series],
    link: Link,
    of: Of,
    width: float,
    bounds: Mapping[tuple[Key, str], tuple[float, float]],
) -> Iterator[Picture]:
    """The 99th percentiles of a load over its rates, where it was run at several, with their intervals by order
    statistics; who could not follow a rate has a mark at the upper edge.
    """
    beyond = [x for x in rows if _saturated(x)]
    for metric, name in TAILS:
        lines = _lines(rows, lambda x: x.axes.get("rate", 0) / 1000, methodcaller("value", metric), of)
        if any(len(x) > 1 for x in lines.values()):
            text = f"p99 of {name} over the rate: {what}"
            own = {x: bound for (x, of_metric), bound in bounds.items() if of_metric == metric}
            drawing = _drawn(lines, looks, link, text, "requests/s", "ms", width, beyond=beyond, bounds=own)
            caption = f"p99 of {name}, ms, over requests/s: lower is better"
            if any(row.identity in own for line in lines.values() for _, _, row in line):
                caption += "; bars are 95 % by order statistics of requests"
            yield Picture(caption, what, drawing, _names(lines))


def _front(
    what: str, rows: Sequence[Row], looks: Mapping[str, Series], link: Link, of: Of, width: float
) -> Iterator[Picture]:
    """Tokens/s a GPU over tokens/s of one user, at every load, where there are several."""

    def speed(row: Row) -> float | None:
        each = row.value("tpot")
        return 1000 / each if each else None

    lines = _lines(rows, speed, lambda x: (x.value("output_per_s") or 0.0) / max(1, x.axes.get(GPUS, 1)), of)
    if sum(map(len, lines.values())) > 1:
        front = best([(x, y) for line in lines.values() for x, y, _ in line])
        text = f"Output tokens/s a GPU over tokens/s of a user: {what}"
        drawing = _drawn(lines, looks, link, text, "tokens/s of a user", "tokens/s a GPU", width, front)
        caption = "Output tokens/s a GPU, or CPU, over 1/TPOT, tokens/s of a user: better is up and to the right"
        yield Picture(caption, what, drawing, _names(lines))


def best(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front, from left to right: points than which no other is at least as good in both."""
    out: list[tuple[float, float]] = []
    for x, y in sorted(set(points), reverse=True):
        if not out or y > out[-1][1]:
            out.append((x, y))
    return out[::-1]


def _drawn(
    lines: Lines,
    looks: Mapping[str, Series],
    link: Link,
    text: str,
    across_unit: str,
    up_unit: str,
    width: float,
    front: Sequence[tuple[float, float]] = (),
    beyond: Sequence[Row] = (),
    bounds: Mapping[Key, tuple[float, float]] = MappingProxyType({}),
) -> str:
    """Points by implementation on two logarithmic axes, those of a run joined; with a front of several, that below
    them, and each point's load beside it, of several alike with its number of requests. Rows `beyond` have no
    latency: they saturated. `bounds` are intervals of points.
    """
    points = [(x, y) for line in lines.values() for x, y, _ in line]
    left, right, top, foot = 52.0, width - (72.0 if front else 22.0), 26.0, 240.0  # with room for a label
    rates = [*(x for x, _ in points), *(x.axes["rate"] / 1000 for x in beyond)]
    across = log_axis(min(rates), max(rates), left, right)
    ends = [y for line in lines.values() for _, _, row in line for y in bounds.get(row.identity, ())]
    heights = [*(y for _, y in points), *ends]
    up = log_axis(min(heights), max(heights), 0, foot - top)
    if not front:  # each rate that was tried
        across = replace(across, ticks=[(x, f"{x:g}") for x in sorted(set(rates))])
    plot = Plot(Canvas(width, foot + 40), across, up, top, foot)
    plot.grid(_same, _same)
    _titles(plot, across_unit, up_unit)
    if len(front) > 2:  # two points joined would look like a curve
        places = [plot.at(x, y) for x, y in front]
        plot.canvas.line([x for x, _ in places], [y for _, y in places], "--ink", 1.2, DASHES[2])
    taken = [(a - 5, a + 5, b) for a, b in (plot.at(x, y) for x, y in points)]
    requests: dict[tuple[str, str], set[int]] = {}
    for (name, _), line in lines.items():
        for _, _, row in line:
            requests.setdefault((name, _load(row)), set()).add(row.axes.get("requests", 0))
    for name, run in sorted(lines, key=lambda x: looks[x[0]].ours):  # ours is drawn last, on top
        look, line = looks[name], lines[name, run]
        places = [plot.at(x, y) for x, y, _ in line]
        plot.canvas.line(
            [x for x, _ in places], [y for _, y in places], look.colour, 2.4 if look.ours else 1.5, look.dash
        )
        for (x, y, row), place in zip(line, places, strict=True):
            told = f"{name}, {_load(row)}: {figures.number(y)} {up_unit} at {figures.number(x)} {across_unit}"
            if (bound := bounds.get(row.identity)) is not None:
                told += f", {_between(bound)}"
                (x_at, lower), (_, upper) = plot.at(x, bound[0]), plot.at(x, bound[1])
                plot.canvas.line([x_at, x_at], [lower, upper], look.colour, 1.2)
            plot.canvas.dot(
                *place, look.colour, look.shape, 7.5 if look.ours else 6.5, told, look.fill, link(row.identity)
            )
            if front:
                label = _load(row)
                if len(requests[name, label]) > 1:
                    label += f" ({row.axes.get('requests', 0):,})"
                _beside(plot, place, label, look.colour, taken)
    for count, row in enumerate(beyond):
        name, look = row.implementation, looks[row.implementation]
        # Two that saturate at one rate stand beside each other.
        rate = row.axes["rate"]
        x_at = across.place(rate / 1000) - 9 * sum(x.axes["rate"] == rate for x in beyond[:count])
        told = f"{name}, {_load(row)}: saturated"
        plot.canvas.dot(x_at, top, look.colour, look.shape, 6.5, told, 1, link(row.identity))
        plot.canvas.text(x_at, top + 13, "saturated", "--soft", "right")
    return plot.canvas.svg(text)


def _between(bound: tuple[float, float]) -> str:
    return f"95 % by order statistics {figures.number(bound[0])} to {figures.number(bound[1])} ms"


def _titles(plot: Plot, across: str, up: str) -> None:
    """What the axes are of."""
    plot.canvas.text(0, 7, up, "--soft")
    plot.canvas.text((plot.across.left + plot.across.right) / 2, plot.foot + 31, across, "--soft", "center")


def _beside(
    plot: Plot, place: tuple[float, float], text: str, colour: str, taken: list[tuple[float, float, float]]
) -> None:
    """A point's name beside it, where nothing is; farther away a thin line leads to it. `taken` are the left and
    right ends and the heights of what is there.
    """
    x, y = place
    long = len(text) * CHARACTER * 0.85

    def free(left: float, height: float) -> bool:
        inside = left >= 0 and left + long <= plot.canvas.width and plot.top - 6 <= height <= plot.foot - 5
        return inside and all(left > b or left + long < a or abs(height - c) >= FONT + 1 for a, b, c in taken)

    tried = [(left, y + aside) for aside in ASIDE for left in (x + 9, x - 9 - long)]
    left, height = next((z for z in tried if free(*z)), tried[0])
    if abs(height - y) > 13:
        plot.canvas.line([x, left if left > x else left + long], [y, height], colour, 0.6)
    taken.append((left, left + long, height))
    plot.canvas.text(left, height, text, "--soft")


def _met(
    rows: Mapping[Key, Row], found: Sequence[Probes], looks: Mapping[str, Series], link: Link, width: float
) -> Picture:
    """The share of requests within the objective over the rates that a search tried, a line a process, with
    the rate that each found below. It may be lower than the last whole share: more may have come than left.
    """
    left, right, top, foot = 52.0, width - 22.0, 26.0, 240.0
    rates = [x for probe in found for x in probe.rates]
    across = log_axis(min(rates), max(rates), left, right)
    across = replace(across, ticks=[(x, f"{x:.3g}") for x in sorted(set(rates))])
    up = linear_axis(1.0, 0, foot - top, figures.percent)
    plot = Plot(Canvas(width, foot + 40), across, up, top, foot)
    plot.grid(_same, _same)
    _titles(plot, "requests/s", "of the requests within the objective")
    names = tuple(dict.fromkeys(x.key.implementation for x in found))
    for probe in sorted(found, key=lambda x: looks[x.key.implementation].ours):
        name, look = probe.key.implementation, looks[probe.key.implementation]
        places = [plot.at(x, y) for x, y in zip(probe.rates, probe.met, strict=True)]
        plot.canvas.line([x for x, _ in places], [y for _, y in places], look.colour, 1.8, look.dash)
        for rate, met, place in zip(probe.rates, probe.met, places, strict=True):
            told = f"{name} at {rate:.4g} requests/s: {figures.percent(met)} within the objective"
            plot.canvas.dot(*place, look.colour, look.shape, 7, told, look.fill, link(probe.key))
    for lane, name in enumerate(names):
        highest = next(rows[x.key] for x in found if x.key.implementation == name).value(HIGHEST)
        if highest and min(rates) <= highest <= max(rates):
            at, height, middle = across.place(highest), foot - 14 - 15 * lane, (left + right) / 2
            plot.canvas.line([at, at], [foot, height], looks[name].colour, 1.4)
            text = f"{name}: {highest:.4g}"
            # Towards the middle, unless it would leave the frame there and not on the other side.
            inside = {"right": at - 5 - left, "left": width - at - 5}
            align = "right" if at > middle else "left"
            if inside[align] < len(text) * CHARACTER:
                align = max(inside, key=lambda x: inside[x])
            plot.canvas.text(at + (5 if align == "left" else -5), height, text, looks[name].colour, align)
    what = _common(rows[found[0].key], ("users",))
    caption = "Share of requests within the objective, over requests/s; below, the highest rate that it found"
    return Picture(caption, what, plot.canvas.svg(f"Share within the objective over the rate: {what}"), names)


def _saturated(row: Row) -> bool:
    """Whether its server could not follow its rate."""
    return row.status == "unsupported" and "saturated: " in (row.reason or "")


def _load(row: Row) -> str:
    """A load in a word or two: of a search the rate that it found."""
    if users := row.axes.get("users"):
        return figures.counted(users, "user")
    rate = row.value(HIGHEST) if row.options.get("load") == "search" else row.axes.get("rate", 0) / 1000
    return f"{rate or 0:.4g} requests/s"


def _same(_: float, text: str) -> str:
    return text


# --- how latencies are spread ---------------------------------------------------------------------------


def order_interval(count: int, percent: float) -> tuple[int, int] | None:
    """The ranks, from 1, of two ordered values that hold a percentile between them with 95 % at the least,
    whatever the distribution: how many of `count` are not above it is binomial. None where so few say no upper
    one. Requests count as independent, which those of one queue are not quite.
    """
    share, beyond, at = percent / 100, 0.0, count
    upper: int | None = None
    while at > 0:
        odds = math.lgamma(count + 1) - math.lgamma(at + 1) - math.lgamma(count - at + 1)
        beyond += math.exp(odds + at * math.log(share) + (count - at) * math.log1p(-share))  # P(at least `at`)
        if beyond <= 0.025:
            upper = at
        if beyond >= 0.975:
            break
        at -= 1
    return None if upper is None or at == 0 else (at, upper)


def nearest_rank(ordered: Sequence[float], percent: float) -> float:
    """The least of ordered values that so many of all are not above."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _distribution(found: Sequence[Spread], caption: str, looks: Mapping[str, Series], width: float) -> Picture:
    """The share of requests that took no longer, of all processes together; marked are its percentiles."""
    left, right, top, foot = 48.0, width - 60.0, 12.0, 230.0
    edge = min(max(x.ranks[0], x.at(50) / FAR) for x in found)
    across = log_axis(edge, max(x.ranks[-1] for x in found), left, right)
    up: Axis = linear_axis(1.0, 0, foot - top, figures.percent)
    plot = Plot(Canvas(width, foot + 24), across, up, top, foot)
    plot.grid(_same, _same)
    marks: list[tuple[float, float, str, str]] = []
    for spread in sorted(found, key=lambda x: looks[x.key.implementation].ours):
        name = spread.key.implementation
        look = looks[name]
        # Two pixels apart.
        places = [plot.at(max(x, edge), i / POINTS) for i, x in enumerate(spread.ranks, 1) if i % 2 == 0]
        plot.canvas.line([x for x, _ in places], [y for _, y in places], look.colour, 1.6, look.dash)
        for percent, least in MARKS:
            if spread.count >= least:
                value = spread.at(percent)
                between = "" if percent != 99 or spread.tail is None else f" ({_between(spread.tail)})"
                told = f"{name}: p{percent} {figures.number(value)} ms{between} of {spread.count:,} requests"
                x, y = plot.at(value, percent / 100)
                plot.canvas.dot(x, y, look.colour, look.shape, 6.5, told, look.fill)
                marks.append((x, y, f"p{percent} {figures.number(value, 3)}", look.colour))
    taken = [(x - 5, x + 5, y) for x, y, _, _ in marks]
    for x, y, text, colour in marks:
        _beside(plot, (x, y), text, colour, taken)
    case = found[0].key.case
    drawing = plot.canvas.svg(f"Distribution of {found[0].metric} of {case}")
    return Picture(f"{caption}, with percentiles", case, drawing, tuple(x.key.implementation for x in found))
