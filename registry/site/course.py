"""How ours stands to the best other over commits: of an operator, of a family, of all. For the first page.

A mean over cases moves when a case is added, although no code changed. So a case counts from the first commit on,
at its first ratio until it is measured: the line moves only where something was measured anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .. import figures
from ..analysis.statistics import geometric_mean
from ..views.canvas import CHARACTER, DASHES, FONT, Axis, Canvas, speedup_axis
from .facts import Fact, Run
from .field import left_out
from .standing import Standing, better
from .timeline import Measured

Course = tuple[tuple[Run, float], ...]
"""At each commit that measured something, by its last run, the geometric mean."""
POINTS = 40
"""Newest commits of a small drawing."""
WIDE = 900
"""Width of the large drawing in pixels on a desk."""
FAMILIES = 12
"""Lines of families that are drawn beside that of all."""
APART = FONT + 2
"""Pixels between two labels at least."""
MOVED = 2
"""Pixels by which a phone's dot lies higher or lower than the one before: 40 level ones would merge."""


def course(standing: Standing, measured: Iterable[Measured]) -> Course:
    """Of an operator on a device, over the cases that its mean is of, from its facts in order. Ratios of one
    process count in cases that have no other: one such may be luck, and would be a spike. So would be one of a run
    that left out the best of the others.
    """
    counted = {(x.case, x.cache) for x in standing.counted}
    found = [
        x
        for x in measured
        if _counts(standing.device, *x) and (x[1].case, x[1].cache) in counted
        if left_out(x, standing.known) is None
    ]
    certain = {(fact.case, fact.cache) for _, fact in found if fact.speedup_low is not None}
    by_run: dict[str, tuple[Run, dict[tuple[str, str], Measured]]] = {}
    for run, fact in found:
        case = fact.case, fact.cache
        if fact.speedup_low is not None or case not in certain:
            _, here = by_run.setdefault(run.name, (run, {}))
            here[case] = better(here[case], (run, fact)) if case in here else (run, fact)
    return merged(
        (run, {case: fact.speedup or 1.0 for case, (_, fact) in here.items()}) for run, here in by_run.values()
    )


def _counts(device: str, run: Run, fact: Fact) -> bool:
    """Whether a fact is of ours on the device, with a ratio."""
    here = run.device == device and run.arm is None
    return here and fact.ours and fact.number is not None and bool(fact.speedup)


def together(courses: Iterable[Course], runs: Sequence[Run]) -> Course:
    """The geometric mean of several, each of which counts as much; `runs` are in order."""
    found = {x: {run.name: value for run, value in points} for x, points in enumerate(courses) if points}
    return merged(
        (run, here) for run in runs if (here := {x: y[run.name] for x, y in found.items() if run.name in y})
    )


def merged(steps: Iterable[tuple[Run, Mapping[Any, float]]]) -> Course:
    """Ratios by run, of what each measured, as one line over commits."""
    known = list(steps)
    newest: dict[Any, float] = {}
    for _, here in reversed(known):  # before its first a case stands at that
        newest |= here
    out: dict[str, tuple[Run, float]] = {}
    for run, here in known:
        newest |= here
        out.pop(run.code, None)
        out[run.code] = run, geometric_mean(newest.values()) or 1.0
    return tuple(out.values())


def small(points: Course, width: int = 64, height: int = 22) -> str:
    """A course for a table's cell; nothing where there is only one commit."""
    shown = points[-POINTS:]
    if len(shown) < 2:
        return ""
    logs = [math.log(x) for _, x in shown]
    low, high = min(logs), max(logs)
    reach, middle = max(high - low, 0.1), (low + high) / 2
    places = [
        (8 + (2 * width - 16) * i / (len(logs) - 1), height - (x - middle) / reach * 2 * (height - 8))
        for i, x in enumerate(logs)
    ]
    path = "M" + "L".join(f"{x:.0f} {y:.0f}" for x, y in places)
    x, y = places[-1]
    ends = f"{figures.ratio(math.exp(low))} to {figures.ratio(math.exp(high))}"
    return (
        f"<svg class='spark ours' viewBox='0 0 {2 * width} {2 * height}' width='{width}' role='img'>"
        f"<title>{figures.counted(len(points), 'commit')}, {ends}</title><path d='{path}'/>"
        f"<circle cx='{x:.0f}' cy='{y:.0f}' r='4' class='end'/></svg>"
    )


def large(every: Course, families: Mapping[str, Course], width: int) -> str:
    """The course of all, thick, above those of families, with the days of runs below and names at the end."""
    narrow = width < WIDE
    shown = {x: y for x, y in families.items() if len(y) > 1}
    most = sorted(shown, key=lambda x: -len(shown[x]))[:FAMILIES]
    # Room for the longest name with its ratio; a phone's drawing keeps more than half of its width.
    longest = (max(map(len, (*most, "all"))) + len(" 1.00×")) * CHARACTER * 0.87 + 12
    top, foot, left, right = 14.0, 270.0, 46.0, width - (min(longest, 0.4 * width) if narrow else 150.0)
    values = [y for x in (every, *(shown[x] for x in most)) for _, y in x]
    up = speedup_axis(min(values), max(values), 0, foot - top)
    places = {run.code: left + (right - left) * i / max(1, len(every) - 1) for i, (run, _) in enumerate(every)}
    canvas = Canvas(width, foot + 40)
    _grid(canvas, up, every, places, (left, right, top, foot))
    ends = []
    for name in most:
        ways = _steps(shown[name], places, up, foot, right)
        canvas.lines([ways], "--faint", 1.2)
        ends.append((ways[-1][1], name, shown[name][-1][1], "--soft"))
    way = _steps(every, places, up, foot, right)
    canvas.lines([way], "--accent", 2.6)
    drawn = math.inf
    for run, value in every:
        y = foot - up.place(value)
        if narrow and abs(y - drawn) < MOVED and run is not every[-1][0]:
            continue
        drawn = y
        told = f"{figures.ratio(value)} at commit {run.short}, {figures.moment(run.created)}"
        canvas.dot(places[run.code], y, "--accent", "o", 6, told, 0, f"run/{run.file}.html")
    ends.append((way[-1][1], "all", every[-1][1], "--accent"))
    ends.sort(key=lambda x: x[0])
    for y, (end, name, value, colour) in zip(apart([x[0] for x in ends], top, foot), ends, strict=True):
        text = f"{name} {figures.ratio(value)}"
        canvas.line([right + 1, right + 8], [end, y], colour, 0.6)
        canvas.text(right + 10, y, text, colour, size=FONT, bold=colour == "--accent")
    return canvas.svg("Ours over the best other, geometric mean over operators, at each commit")


def apart(heights: Sequence[float], top: float, foot: float) -> list[float]:
    """Places of labels of lines that end at these heights, in order: `APART` from each other, by the least squares
    of how far they are moved.
    """
    # Labels that would touch share a block about their middle: the height of its first, and how many they are.
    blocks: list[tuple[float, int]] = []
    for i, height in enumerate(heights):
        first, count = height - i * APART, 1
        while blocks and blocks[-1][0] > first:
            before, known = blocks.pop()
            first, count = (first * count + before * known) / (count + known), count + known
        blocks.append((first, count))
    last = max(top, foot - (len(heights) - 1) * APART)
    placed = [min(max(first, top), last) for first, count in blocks for _ in range(count)]
    return [x + i * APART for i, x in enumerate(placed)]


def _steps(
    points: Course, places: Mapping[str, float], up: Axis, foot: float, right: float
) -> list[tuple[float, float]]:
    """Level until the next commit that measured some, and from the last to the frame's end."""
    out: list[tuple[float, float]] = []
    for run, value in points:
        x, y = places[run.code], foot - up.place(value)
        out += [(x, out[-1][1])] if out else []
        out.append((x, y))
    return [*out, (right, out[-1][1])]


def _grid(
    canvas: Canvas,
    up: Axis,
    every: Course,
    places: Mapping[str, float],
    frame: tuple[float, float, float, float],
) -> None:
    left, right, top, foot = frame
    for value, text in up.ticks:
        y = foot - up.place(value)
        canvas.line(
            [left, right], [y, y], "--ink" if value == 1 else "--grid", 0.9, DASHES[2] if value == 1 else ""
        )
        canvas.text(left - 8, y, text, "--soft", "right")
    canvas.text(0, top - 8, "× the best other", "--soft")
    free, day = -math.inf, ""
    for run, _ in every:
        if run.created[:10] != day:
            day, x = run.created[:10], places[run.code]
            canvas.line([x, x], [foot, foot + 4], "--line", 1)
            if x > free and x < right + 20:
                canvas.text(x, foot + 14, day[5:], "--soft")
                free = x + 44
    canvas.text(left, foot + 31, "commits in order, by the day of their newest run", "--soft")
