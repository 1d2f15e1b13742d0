"""Efficiency over GPUs, drawn: what a run measured, and beside it, dashed and called so, what is predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .. import figures
from ..analysis.rows import Row
from ..analysis.scaling import WAY, Prediction, Scaled, efficiencies, predictions, work
from ..store.journal import Journal
from ..store.record import GPUS
from .canvas import DASHES, FONT, Canvas, linear_axis
from .charts import WIDTH
from .lines import Plot, octaves
from .looks import Series

AHEAD = 8
"""GPUs of one host that are predicted at most."""
OPEN, SMALL = 1, 5.0
"""How marks of predictions are filled, and how large they are."""

Points = dict[int, float]
"""Efficiencies by number of GPUs."""


@dataclass
class Line:
    """An implementation's efficiencies: measured, and predicted, each from the next smaller measured number."""

    seen: dict[int, Scaled] = field(default_factory=dict)
    made: dict[int, Prediction] = field(default_factory=dict)


@dataclass(frozen=True)
class Scaling:
    """One computation over GPUs, spread in one way: its drawing, and what it shows in words."""

    title: str
    kind: str
    implementations: tuple[str, ...]
    drawing: str
    lines: tuple[str, ...]
    predicted: bool


def scalings(journal: Journal, found: Sequence[Row], looks: Mapping[str, Series]) -> tuple[Scaling, ...]:
    """Of every computation that the rows have on one GPU and on several."""
    groups: dict[object, dict[str, Line]] = {}
    for x in efficiencies(found):
        group = groups.setdefault(_of(x.row), {})
        group.setdefault(x.row.implementation, Line()).seen[x.world] = x
    worlds = [x for x in (2, 4, AHEAD) if any(x > y for y in _worlds(groups))]
    for y in predictions(journal, worlds) if worlds else ():
        line = groups.get(_of(y.row), {}).get(y.row.implementation)
        if line is not None:
            line.made[y.world] = y
    return tuple(_drawn(x, looks) for x in groups.values())


def _of(row: Row) -> object:
    return row.operator, work(row), row.options.get(WAY)


def _worlds(groups: Mapping[object, Mapping[str, Line]]) -> set[int]:
    return {world for lines in groups.values() for line in lines.values() for world in line.seen}


def _drawn(group: Mapping[str, Line], looks: Mapping[str, Series]) -> Scaling:
    first = next(x for line in group.values() for x in line.seen.values())
    measured = {name: {n: x.efficiency for n, x in sorted(line.seen.items())} for name, line in group.items()}
    made = {name: {n: x.efficiency for n, x in sorted(line.made.items())} for name, line in group.items()}
    values = [y for lines in (measured, made) for points in lines.values() for y in points.values()]
    worlds = sorted({1, *(x for lines in (measured, made) for points in lines.values() for x in points)})
    left, right, top, foot = 58.0, WIDTH - 22.0, 12.0, 216.0
    up = linear_axis(max(1.0, *values), 0, foot - top, figures.percent)
    plot = Plot(Canvas(WIDTH, foot + 24), octaves(worlds, left, right), up, top, foot)
    plot.grid(lambda _, text: text, lambda _, text: text)
    plot.canvas.line([left, right], [plot.y(1.0)] * 2, "--ink", 1.2, DASHES[2])
    said = []
    for name in group:
        look = looks[name]
        seen, predicted = measured[name], made[name]
        _line(plot, look.colour, seen, "")
        for n, y in seen.items():
            told = f"{name} on {n} GPUs: {figures.percent(y, 1)}"
            plot.canvas.dot(*plot.at(n, y), look.colour, look.shape, 7, told, look.fill)
        bases = {n: seen[n] for x in group[name].made.values() if (n := x.row.axes[GPUS]) in seen}
        _line(plot, look.colour, {**bases, **predicted}, DASHES[1])
        for x in group[name].made.values():
            plot.canvas.dot(*plot.at(x.world, x.efficiency), look.colour, look.shape, SMALL, _told(name, x), OPEN)
        if predicted:
            at, y = plot.at(*list(predicted.items())[-1])
            plot.canvas.text(at, y + 12, "prediction", look.colour, "right", FONT - 1)
        said += [f"{name} on {n} GPUs: {figures.percent(y, 1)}" for n, y in seen.items()]
        said += [_told(name, x) for x in group[name].made.values()]
    kind = first.kind
    way = f", {first.row.options[WAY]}" if WAY in first.row.options else ""
    title = f"{first.row.operator} {first.one.case}{way}"
    drawing = plot.canvas.svg(f"Efficiency over GPUs of {title}: {kind} scaling")
    return Scaling(title, kind, tuple(group), drawing, tuple(said), any(made.values()))


def _line(plot: Plot, colour: str, points: Points, dash: str) -> None:
    places = [plot.at(n, y) for n, y in sorted(points.items())]
    if len(places) > 1:
        plot.canvas.line([x for x, _ in places], [y for _, y in places], colour, 1.8, dash)


def _told(name: str, x: Prediction) -> str:
    """A prediction, and how far it is from what was measured."""
    made_from = " and ".join(map(str, x.made_from))
    text = f"PREDICTION for {x.world} GPUs from {made_from}, {name}: {figures.percent(x.efficiency, 1)}"
    return text if x.off is None else f"{text}, {figures.signed(x.off)} of the step that was measured"
