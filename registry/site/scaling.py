"""Several GPUs: the last time of each row, and its efficiency beside the one-GPU time that it is taken against."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import msgspec

from .. import figures
from ..analysis.rows import BUS, LINK
from ..analysis.scaling import Scaled, efficiencies, predictions
from ..store.journal import Journal
from ..store.metric import EACH
from ..store.record import GPUS, Key
from ..views import rivals
from ..views.canvas import DASHES, MARKERS, Axis, Canvas, linear_axis, log_axis
from ..views.lines import Plot, arrays_axis, octaves
from ..views.looks import Series, palette
from ..views.sizes import LENGTH, array_bytes
from .drawing import NARROW
from .facts import Fact, Run
from .timeline import Measured

LEFT, RIGHT, TOP, FOOT = 52.0, 312.0, 26.0, 230.0
"""Of a drawing's frame in pixels: half of `256 MiB` goes beside it."""
WORLDS = (2, 4, 8)
"""GPUs of one host for which steps are predicted."""
_SIZE = re.compile(r"\bN\d+-")
_WORDS = {"in": "in place", "out": "out of place", "forward": ""}
"""Parts of a collective's name as its title has them."""


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
        return _work(self.fact.case)

    @property
    def bus(self) -> float | None:
        """A collective's bus bandwidth, in GB/s."""
        number = self.fact.metrics.get(BUS)
        return number[0] if number else None

    @property
    def size(self) -> int | None:
        """Bytes of a collective's array."""
        return array_bytes(self.fact.axes, self.fact.dtype)


class Ahead(msgspec.Struct, frozen=True, array_like=True):
    """A prediction of a step, small enough to be kept without its journal."""

    operator: str
    work: str
    implementation: str
    made_on: int
    """The GPUs of the step that it is made of."""
    world: int
    efficiency: float
    off: float | None
    """How far it is above what was measured."""


@dataclass(frozen=True)
class Curve:
    """A drawing over GPUs or sizes: its caption, which work it is of, and the looks of its lines by name."""

    caption: str
    of: str
    drawing: str
    looks: Mapping[str, Series]
    predicted: bool = False
    """Whether anything in it is a prediction."""


def _work(case: str) -> str:
    return re.sub(r"-gpus\d+", "", case)


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


def ahead(journal: Journal) -> tuple[Ahead, ...]:
    """What a run's steps are predicted to be on more GPUs of a host than each was measured on."""
    seen = {x.case.world for x in journal.records if x.case.pass_ == "program" and x.measurement is not None}
    worlds = [x for x in WORLDS if any(x > y > 1 for y in seen)]
    return tuple(
        Ahead(
            x.row.operator, _work(x.row.case), x.row.implementation, x.row.axes[GPUS], x.world, x.efficiency, x.off
        )
        for x in (predictions(journal, worlds) if worlds else ())
    )


def curves(steps: Iterable[Step], predicted: Mapping[str, Sequence[Ahead]]) -> tuple[Curve, ...]:
    """Efficiency over GPUs, a line an implementation, of all work that has it on two numbers of GPUs or more, what
    is `predicted` by run among them; ways to spread a step are different work.
    """
    by_work: dict[tuple[str, str, str], dict[str, list[Step]]] = {}
    for x in steps:
        if x.scaled is not None:
            by_name = by_work.setdefault((x.fact.operator, x.run.device, x.work), {})
            by_name.setdefault(x.fact.implementation, []).append(x)
    out = []
    for (operator, device, of), lines in by_work.items():
        made = {
            name: {
                y.world: y
                for y in predicted.get(line[-1].run.name, ())
                if (y.operator, y.work, y.implementation) == (operator, of, name)
            }
            for name, line in lines.items()
        }
        if any(len({x.gpus for x in line} | made[name].keys()) > 1 for name, line in lines.items()):
            out.append(_curve(f"{operator} on {device}: efficiency over GPUs", of, lines, made))
    return tuple(out)


def _curve(caption: str, of: str, lines: dict[str, list[Step]], made: Mapping[str, Mapping[int, Ahead]]) -> Curve:
    every = [x for line in lines.values() for x in line]
    looks = _solid(x.fact for x in every)
    gpus = sorted({x.gpus for x in every} | {x for found in made.values() for x in found})
    most = max(1.0, *(_efficiency(x) for x in every), *(x.efficiency for y in made.values() for x in y.values()))
    across = replace(log_axis(gpus[0], gpus[-1], LEFT, RIGHT), ticks=[(x, f"{x}") for x in gpus])
    plot = _plot(across, linear_axis(most, 0, FOOT - TOP, figures.percent), "GPUs", "efficiency")
    for name in _last_ours(lines, looks):
        look, known = looks[name], {x.gpus: _efficiency(x) for x in lines[name]}
        places = [plot.at(x, y) for x, y in known.items()]
        plot.canvas.line([x for x, _ in places], [y for _, y in places], look.colour, 1.8)
        for step, (x, y) in zip(lines[name], places, strict=True):
            told = f"{name} on {step.gpus} GPUs: {figures.percent(_efficiency(step))}"
            link = step.run.row(step.fact.place)
            plot.canvas.dot(x, y, look.colour, look.shape, 7, told, look.fill, link)
        if made[name]:
            _predicted(plot, look.colour, look.shape, name, known, made[name])
    shown = {x: looks[x] for x in looks if x in lines}
    return Curve(caption, of, plot.canvas.svg(f"{caption}: {of}"), shown, any(made.values()))


def _predicted(
    plot: Plot, colour: str, shape: str, name: str, known: Mapping[int, float], made: Mapping[int, Ahead]
) -> None:
    """Predictions, from the step that they are made of: dashed, open and smaller, for nobody measured them."""
    bases = {x.made_on: known[x.made_on] for x in made.values() if x.made_on in known}
    ways = sorted({**bases, **{x: y.efficiency for x, y in made.items()}}.items())
    places = [plot.at(x, y) for x, y in ways]
    plot.canvas.line([x for x, _ in places], [y for _, y in places], colour, 1.4, DASHES[1])
    for world, found in made.items():
        off = "" if found.off is None else f", {figures.signed(found.off)} of the step that was measured"
        told = f"PREDICTION of {name} on {world} GPUs: {figures.percent(found.efficiency, 1)}{off}"
        plot.canvas.dot(*plot.at(world, found.efficiency), colour, shape, 5, told, 1)
    x, y = places[-1]
    plot.canvas.text(x, y + 13, "prediction", colour, "right")


def bandwidths(steps: Sequence[Step]) -> tuple[Curve, ...]:
    """Bus bandwidth of collectives over the bytes of their array, with what copy engines reach between as many
    GPUs in one of the same runs.
    """
    engines: dict[tuple[str, int], float] = {}
    groups: dict[tuple[str, str, int, str], list[Step]] = {}
    for x in steps:
        if (rate := x.fact.metrics.get(LINK)) is not None:
            known = x.run.name, x.gpus
            engines[known] = max(rate[0], engines.get(known, 0.0))
        # Above 0, or an axis of logarithms ends the build; its axes are its length, and on how many GPUs.
        if (x.bus or 0) > 0 and (x.size or 0) > 0 and len(x.fact.axes) == 2:
            groups.setdefault((x.fact.operator, x.run.device, x.gpus, _SIZE.sub("", x.work)), []).append(x)
    out = []
    for (operator, device, gpus, of), found in groups.items():
        lines = _lines(found, lambda x: x.size or 0.0)
        if all(len(x) < 2 for x in lines.values()):
            continue
        found = [x for line in lines.values() for x in line]
        engine = max(engines.get((x.run.name, gpus), 0.0) for x in found)
        looks = _solid(x.fact for x in found)
        sizes = sorted({x.size or 0.0 for x in found})
        rates = [*(x.bus or 0.0 for x in found), *([engine] if engine > 0 else [])]
        across = arrays_axis(sizes, LEFT, RIGHT)
        plot = _plot(
            across, log_axis(min(rates), max(rates), 0, FOOT - TOP), "bytes of the array", "GB/s on the bus"
        )
        if engine > 0:
            y = plot.y(engine)
            plot.canvas.line([LEFT, RIGHT], [y, y], "--ink", 1.2, DASHES[2])
            plot.canvas.text(LEFT + 4, y + 11, f"copy engines {engine:.0f}", "--soft")
        for name in _last_ours(lines, looks):
            _draw(plot, looks[name], lines[name], lambda x: x.size or 0.0, lambda x: x.bus or 0.0, "GB/s")
        caption, of = f"{operator} on {gpus} GPUs: bus bandwidth over bytes", _words(of)
        out.append(Curve(caption, f"{of} · {device}", plot.canvas.svg(f"{caption}, {of}"), _shown(looks, found)))
    return tuple(out)


def over_lengths(steps: Sequence[Step]) -> tuple[Curve, ...]:
    """Strong efficiency over the sequence's length, a drawing a number of GPUs, of what shares a sequence."""
    groups: dict[tuple[str, str, int, str], list[Step]] = {}
    for x in steps:
        if x.scaled is not None and x.fact.axes.get(LENGTH, 0) > 0 and x.scaled.kind == "strong":
            of = re.sub(rf"\b{LENGTH}\d+-?", "", x.work)
            groups.setdefault((x.fact.operator, x.run.device, x.gpus, of), []).append(x)
    out = []
    for (operator, device, gpus, of), found in groups.items():
        lines = _lines(found, lambda x: x.fact.axes[LENGTH])
        if all(len(x) < 2 for x in lines.values()):
            continue
        found = [x for line in lines.values() for x in line]
        looks = _solid(x.fact for x in found)
        across = octaves(sorted({x.fact.axes[LENGTH] for x in found}), LEFT, RIGHT)
        up = linear_axis(max(1.0, *(_efficiency(x) for x in found)), 0, FOOT - TOP, figures.percent)
        plot = _plot(across, up, "tokens of the sequence", "efficiency")
        for name in _last_ours(lines, looks):
            _draw(
                plot,
                looks[name],
                lines[name],
                lambda x: x.fact.axes[LENGTH],
                lambda x: 100 * _efficiency(x),
                "%",
            )
        caption = f"{operator} on {gpus} GPUs: efficiency over the length"
        out.append(Curve(caption, f"{of} · {device}", plot.canvas.svg(f"{caption}, {of}"), _shown(looks, found)))
    return tuple(out)


def _lines(found: Iterable[Step], across: Callable[[Step], float]) -> dict[str, list[Step]]:
    """By implementation, in order of size, of the runs of one key, that with the most rows and of such the newest:
    what does not compare is not joined, nor drawn beside as if it did.
    """
    steps = list(found)
    rows, newest = Counter(x.run.key for x in steps), dict[str, str]()
    for x in steps:  # in order of work, not of time
        newest[x.run.key] = max(x.run.created, newest.get(x.run.key, ""))
    best = max(rows, key=lambda x: (rows[x], newest[x]))
    out: dict[str, list[Step]] = {}
    for x in sorted((x for x in steps if x.run.key == best), key=across):
        out.setdefault(x.fact.implementation, []).append(x)
    return out


def _solid(found: Iterable[Fact]) -> dict[str, Series]:
    """Looks of what was measured: whole lines and filled shapes, for dashes and open ones are predictions. So a
    library's implementations differ in their shapes, and from all others of its colour.
    """
    looks = palette(x.row() for x in found)
    out: dict[str, Series] = {}
    for name, x in sorted(looks.items(), key=lambda x: x[1].fill):
        taken = {y.shape for y in out.values() if y.colour == x.colour}
        # Every third shape: those that follow each other are alike.
        turns = [MARKERS[(MARKERS.index(x.shape) + 3 * i) % len(MARKERS)] for i in range(len(MARKERS))]
        shape = next((y for y in turns[x.fill :] + turns[: x.fill] if y not in taken), x.shape)
        out[name] = replace(x, shape=shape, fill=0)
    return {name: out[name] for name in looks}


def _words(of: str) -> str:
    """What a collective's name has beside its sizes, for a title: `in place, bf16`."""
    return ", ".join(filter(None, (_WORDS.get(x, x) for x in of.split("-"))))


def _last_ours(lines: Iterable[str], looks: Mapping[str, Series]) -> list[str]:
    """Lines' names, ours last: it is drawn on top."""
    return sorted(lines, key=lambda x: looks[x].ours)


def _shown(looks: Mapping[str, Series], found: Iterable[Step]) -> Mapping[str, Series]:
    names = {x.fact.implementation for x in found}
    return {x: y for x, y in looks.items() if x in names}


def _plot(across: Axis, up: Axis, across_title: str, up_title: str) -> Plot:
    """A frame with its grid and what its axes are of."""
    plot = Plot(Canvas(NARROW, FOOT + 40), across, up, TOP, FOOT)
    plot.grid(lambda _, text: text, lambda _, text: text)
    plot.canvas.text(0, 7, up_title, "--soft")
    plot.canvas.text((LEFT + RIGHT) / 2, FOOT + 31, across_title, "--soft", "center")
    return plot


def _draw(
    plot: Plot,
    look: Series,
    line: Sequence[Step],
    across: Callable[[Step], float],
    up: Callable[[Step], float],
    unit: str,
) -> None:
    """A line with its points, which lead to their rows."""
    scale = 100 if unit == "%" else 1
    places = [plot.at(across(x), up(x) / scale) for x in line]
    plot.canvas.line([x for x, _ in places], [y for _, y in places], look.colour, 2.2 if look.ours else 1.5)
    for step, place in zip(line, places, strict=True):
        told = f"{told_name(step)}, {step.fact.case}: {figures.number(up(step))} {unit}"
        link = step.run.row(step.fact.place)
        plot.canvas.dot(*place, look.colour, look.shape, 7 if look.ours else 6, told, look.fill, link)


def told_name(step: Step) -> str:
    """An implementation, with what must be known where it is NCCL."""
    return rivals.told(step.fact.implementation, step.run.conditions)


def _efficiency(step: Step) -> float:
    return step.scaled.efficiency if step.scaled else 0.0
