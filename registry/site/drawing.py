"""Small drawings as inline SVG in the colours of the page: readable without a script, quick by the thousand."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .. import figures
from .facts import ONE_PROCESS, Fact
from .timeline import Line

NARROW = 340
"""Pixels of a drawing's width, as a phone has them: its texts must stay as large."""
POINTS = 40
"""Newest points of a sparkline."""
LEAST_REACH = 0.05
"""Of a sparkline's range to its highest value: a series that hardly moves must not look like a mountain range."""
_KINDS = {"faster": "good", "slower": "bad", ONE_PROCESS: "single"}
"""The class of a drawing by its fact's outcome."""


def sparkline(line: Line, width: int = 120, height: int = 22) -> str:
    """A row's newest values, a gap where its key changes, and its change points as coloured dots."""
    shown = [x for x in line.points if x[1].number is not None][-POINTS:]
    values = [x[1].number[0] for x in shown if x[1].number]
    if not values:
        return ""
    low, high = min(values), max(values)
    reach = max(high - low, LEAST_REACH * abs(high)) or 1.0
    middle = (low + high) / 2
    step = (width - 8) / max(1, len(values) - 1)
    # Whole half pixels, each relative to the one before: a page has hundreds of these.
    places = [
        (
            round(8 + 2 * i * step if len(values) > 1 else width),
            round(height - (v - middle) / reach * 2 * (height - 8)),
        )
        for i, v in enumerate(values)
    ]
    path = "M{} {}l0 0".format(*places[0])  # a line of no length is a dot: a point may stand alone
    for (x, y), (a, b), (_, now), (_, before) in zip(places[1:], places, shown[1:], shown, strict=False):
        path += f"l{x - a} {y - b}" if now.key == before.key else f"m{x - a} {y - b}l0 0"
    changes = {x.run: x for x in line.changes if x.machine is None}
    marks = "".join(
        f"<circle cx='{x}' cy='{y}' r='6' class='{'bad' if changes[run.name].worse else 'good'}'/>"
        for (x, y), (run, _) in zip(places, shown, strict=True)
        if run.name in changes
    )
    x, y = places[-1]
    kind = "spark ours" if line.ours else "spark"
    title = f"{figures.counted(len(line.points), 'run')}, {figures.number(low)} to {figures.number(high)}"
    return (
        f"<svg class='{kind}' viewBox='0 0 {2 * width} {2 * height}' width='{width}' role='img'>"
        f"<title>{title}</title><path d='{path}'/>{marks}<circle cx='{x}' cy='{y}' r='4' class='end'/></svg>"
    )


def ratio(fact: Fact) -> str:
    """A speedup with its interval on a logarithmic axis from a quarter to four times; the page draws the one."""
    if fact.speedup is None:
        return ""
    low, high = fact.speedup_low or fact.speedup, fact.speedup_high or fact.speedup
    width, height = 130, 18
    left, right, x = (_ratio_place(v, width) for v in (low, high, fact.speedup))
    kind, middle = _KINDS.get(fact.outcome, ""), height // 2
    return (
        f"<svg class='ratio {kind}' viewBox='0 0 {width} {height}'><title>{_told(fact)}</title>"
        f"<path d='M{left:.1f} {middle}H{max(right, left + 1):.1f}'/>"
        f"<circle cx='{x:.1f}' cy='{middle}' r='3'/></svg>"
    )


def strip(facts: Sequence[Fact], mean: float | None, width: int = 220, height: int = 22) -> str:
    """All cases' speedups as dots on the axis of `ratio`, and their geometric mean as a bar."""
    # Each place once: where thousands are, they hide one another.
    dots: dict[str, dict[str, None]] = {"single": {}, "": {}, "good": {}, "bad": {}}
    for fact in facts:
        kind = _KINDS.get(fact.outcome, "")
        # Dots of one place are spread downwards, by the row's place in the run: the same at each build.
        y = height / 2 + (fact.place % 5 - 2) * 2.2
        dots[kind][f"M{_ratio_place(fact.speedup or 1, width):.0f} {y:.1f}h0"] = None
    paths = "".join(f"<path class='{kind}' d='{''.join(found)}'/>" for kind, found in dots.items() if found)
    bar = f"<path class='mean' d='M{_ratio_place(mean, width):.1f} 1V{height - 1}'/>" if mean else ""
    told = f"{figures.counted(len(facts), 'case')}, geometric mean {figures.ratio(mean)}; from ¼× to 4×"
    return (
        f"<svg class='strip' viewBox='0 0 {width} {height}' width='{width}' height='{height}' role='img'>"
        f"<title>{told}</title><path class='one' d='M{width / 2} 0V{height}'/>{paths}{bar}</svg>"
    )


def _ratio_place(value: float, width: int) -> float:
    share = math.log2(min(max(value, 0.25), 4.0)) / 4 + 0.5
    return 4 + share * (width - 8)


def _told(fact: Fact) -> str:
    if fact.speedup_low is None or fact.speedup_high is None:
        return f"{figures.ratio(fact.speedup)} in one process: no interval"
    return f"{figures.ratio(fact.speedup)} [{figures.ratio(fact.speedup_low)}, {figures.ratio(fact.speedup_high)}]"
