"""Several GPUs: the last time of each row, and its efficiency beside the one-GPU time that it is taken against."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from .. import figures
from ..analysis.scaling import Scaled, efficiencies
from ..store.metric import EACH
from ..store.record import GPUS, Key
from ..views.canvas import Canvas, linear_axis, log_axis
from ..views.charts import WIDTH
from ..views.lines import Plot
from ..views.looks import Series, palette
from .facts import Fact, Run
from .timeline import Measured


@dataclass(frozen=True)
class Step:
    """A row on several GPUs, the one-GPU row that it is taken against, and what both say together: None where its
    run has no time of the same work on one.
    """

    run: Run
    fact: Fact
    one: Fact | None = None
    scaled: Scaled | None = None

    @property
    def gpus(self) -> int:
        """Their number."""
        return self.fact.axes[GPUS]

    @property
    def work(self) -> str:
        """Its case whatever the number of GPUs, for people."""
        return re.sub(r"-gpus\d+", "", self.fact.case)

    @property
    def bus(self) -> float | None:
        """A collective's bus bandwidth, in GB/s."""
        number = self.fact.metrics.get("busbw")
        return number[0] if number else None


@dataclass(frozen=True)
class Curve:
    """A drawing of efficiency over GPUs: its caption, which work it is of, and the looks of its lines by name."""

    caption: str
    of: str
    drawing: str
    looks: Mapping[str, Series]


def scaling(measured: Sequence[Measured]) -> tuple[Step, ...]:
    """The newest value of each row on more than one GPU, by operator, work and implementation, over GPUs."""
    several = {run.name for run, fact in measured if fact.axes.get(GPUS, 1) > 1}
    by_run: dict[str, list[Measured]] = {}
    for run, fact in measured:
        if run.name in several and fact.number is not None and not fact.scale:
            by_run.setdefault(run.name, []).append((run, fact))
    newest: dict[tuple[str, Key], Step] = {}
    for found in by_run.values():
        newest |= {(x.run.device, x.fact.identity): x for x in _of_run(found)}
    return tuple(sorted(newest.values(), key=_place))


def _of_run(found: Sequence[Measured]) -> Iterator[Step]:
    facts = {fact.identity: fact for _, fact in found}
    scaled = {x.row.identity: x for x in efficiencies(x.row(every=True) for x in facts.values())}
    for run, fact in found:
        if fact.axes.get(GPUS, 1) > 1 and EACH.name not in fact.metrics:
            known = scaled.get(fact.identity)
            yield Step(run, fact, facts[known.one.identity], known) if known else Step(run, fact)


def _place(step: Step) -> tuple[str, str, tuple[int, ...], str, str, int]:
    """By work, the smaller first, then over GPUs."""
    fact = step.fact
    sizes = tuple(size for name, size in sorted(fact.axes.items()) if name != GPUS)
    return fact.operator, fact.pass_, sizes, step.work, fact.implementation, step.gpus


def worlds(steps: Iterable[Step]) -> tuple[tuple[str, str, tuple[Step, ...]], ...]:
    """By operator and device, as `scaling` has ordered them."""
    ordered = sorted(steps, key=lambda x: (x.fact.operator, x.run.device))
    grouped = groupby(ordered, key=lambda x: (x.fact.operator, x.run.device))
    return tuple((operator, device, tuple(found)) for (operator, device), found in grouped)


def curves(steps: Iterable[Step]) -> tuple[Curve, ...]:
    """Efficiency over GPUs, a line an implementation, of all work that has it on two numbers of GPUs or more; ways
    to spread a step are different work.
    """
    by_work: dict[tuple[str, str, str], dict[str, list[Step]]] = {}
    for x in steps:
        if x.scaled is not None:
            by_name = by_work.setdefault((x.fact.operator, x.run.device, x.work), {})
            by_name.setdefault(x.fact.implementation, []).append(x)
    return tuple(
        _curve(f"{operator} on {device}: efficiency over GPUs", of, lines)
        for (operator, device, of), lines in by_work.items()
        if any(len({x.gpus for x in line}) > 1 for line in lines.values())
    )


def _curve(caption: str, of: str, lines: dict[str, list[Step]]) -> Curve:
    every = [x for line in lines.values() for x in line]
    looks = palette(x.fact.row() for x in every)
    top, foot = 12.0, 230.0
    gpus = sorted({x.gpus for x in every})
    across = log_axis(gpus[0], gpus[-1], 62.0, WIDTH - 22.0)
    up = linear_axis(max(1.0, *(_efficiency(x) for x in every)), 0, foot - top, figures.percent)
    plot = Plot(Canvas(WIDTH, foot + 24), replace(across, ticks=[(x, f"{x}") for x in gpus]), up, top, foot)
    plot.grid(lambda _, text: text, lambda _, text: text)
    for name in sorted(lines, key=lambda x: looks[x].ours):  # ours is drawn last, on top
        look = looks[name]
        places = [plot.at(x.gpus, _efficiency(x)) for x in lines[name]]
        plot.canvas.line([x for x, _ in places], [y for _, y in places], look.colour, 1.8, look.dash)
        for step, (x, y) in zip(lines[name], places, strict=True):
            told = f"{name} on {step.gpus} GPUs: {figures.percent(_efficiency(step))}"
            link = step.run.row(step.fact.place)
            plot.canvas.dot(x, y, look.colour, look.shape, 7, told, look.fill, link)
    return Curve(caption, of, plot.canvas.svg(f"{caption}: {of}"), {x: looks[x] for x in looks if x in lines})


def _efficiency(step: Step) -> float:
    return step.scaled.efficiency if step.scaled else 0.0
