"""Arms of a run on convergence as a table for a terminal: loss at declared steps, difference, verdict."""

from __future__ import annotations

from itertools import groupby

from .. import figures
from ..detection.arms import Arm, Beside, Point, arms, rates_tried
from ..detection.convergence import SHARE
from ..store.journal import Journal
from .table import Block, Column, Page, Table, Text, line

ABOUT = (
    "Arms of a case have the same initial weights, order of data and schedule; a replicate is a seed. Loss is "
    "bits a byte of the validation text. Equivalent at a step: the 95 % interval of the paired relative "
    "difference lies within the margin, over five seeds at least. Steps ×: how many times as many steps the "
    "arm takes to the loss that the base reaches at 95 % of its steps, at most 1.05. Speed ×: the ratio of "
    "tokens/s over that of steps; in a row of all steps the interval is that of the speed. 8 bits: the share of "
    "product operations in them. Each step has a verdict of its own; an arm's, in its row of all steps, is the "
    "worst of these and of the steps that it takes."
)
"""What a reader of the table must know."""
ALL = "all"
"""In place of a step: what is said of the whole curve."""
HEADINGS = (
    "arm",
    "step",
    "base bits",
    "arm bits",
    "difference",
    "95 %",
    "steps ×",
    "speed ×",
    "8 bits",
    "verdict",
)
_STYLES = {"equivalent": "green", "better": "green", "worse": "red", "failed": "red"}


_DROPS = {"base bits": 2, "arm bits": 1}
"""What a narrow terminal does without, the highest first."""


def convergence_table(journal: Journal) -> Page:
    """All arms beside their base, a table a case; empty for a run in which nothing converges."""
    found = arms(journal)
    tried = rates_tried(journal)
    page: list[Block] = []
    for case, group in groupby(found, key=lambda x: x.case):
        own = list(group)
        last = len(HEADINGS) - 1
        columns = [Column(x, number=0 < i < last, drop=_DROPS.get(x, 0)) for i, x in enumerate(HEADINGS)]
        table = Table(columns, f"convergence · {case} · base {own[0].base}")
        for x in own:
            for row in rows_of(x):
                table.add(*row[:-1], Text(row[-1], _STYLES.get(row[-1], "yellow")))
        page.append(table)
        page += [line(f"{x.name}: {said}", style="dim") for x in own for said in remarks(x)]
        if (wrong := tried.get(case)) is not None:
            page.append(line(f"learning rate of {own[0].base}: {wrong}", style="yellow"))
    return page


def rows_of(x: Arm) -> list[tuple[str, ...]]:
    """An arm's texts: a row for each declared step with that step's verdict, and one with what is said of the
    whole curve and the arm's verdict.
    """
    if x.overall == "failed":
        return [(x.name, *["–"] * (len(HEADINGS) - 2), x.status if x.status != "ok" else x.overall)]
    found: list[tuple[str, ...]] = []
    for point in x.points:
        e = point.found
        interval = "–" if e.low is None or e.high is None else f"{e.low:+.2%} {e.high:+.2%}"
        numbers = (f"{point.base:.4f}", f"{point.arm:.4f}", difference(point), interval)
        found.append(("" if found else x.name, f"{point.step:,}", *numbers, "", "", "", e.kind))
    ratio = f"{x.steps.ratio:.3f}" if x.steps and x.steps.ratio is not None else ""
    speed = f"{x.matched.speedup:.3f}" if x.matched else ""
    within = f"{x.matched.low:.3f} {x.matched.high:.3f}" if x.matched else ""
    share = figures.percent(x.share, 1) if x.share is not None else ""
    return [*found, ("" if found else x.name, ALL, "", "", "", within, ratio, speed, share, x.overall)]


def by_step(x: Arm) -> str:
    """An arm's verdict, and behind it that of each step and of the 105 % rule, in words."""
    parts = [f"{point.step:,} steps {point.found.kind}" for point in x.points]
    parts += [f"105 % rule {x.steps.kind}"] if x.steps is not None else []
    return f"{x.overall}: {', '.join(parts)}" if parts else x.overall


def _at(steps: list[int]) -> str:
    """The steps of one remark, in words."""
    *others, last = steps
    return ", ".join([*(f"{x:,}" for x in others), figures.counted(last, "step")])


def difference(x: Point) -> str:
    """How far an arm is from its base, in words."""
    return figures.DASH if x.difference is None else f"{x.difference:+.2%}"


def told(x: Beside) -> str:
    """A metric beside the loss, in words."""
    return f"{x.metric.replace('_', ' ')} {x.arm:.4f} (base {x.base:.4f}, {x.found.kind})"


def remarks(x: Arm) -> list[str]:
    """What a reader must know besides: why it failed, what is missing, whose name it does not bear."""
    if x.overall == "failed":
        return [x.reason or "no reason given"]
    open_: dict[str, list[int]] = {}
    for y in x.points:
        if y.found.kind == "inconclusive":
            open_.setdefault(y.found.reason, []).append(y.step)
    found = [f"{_at(steps)}: {reason}" for reason, steps in open_.items()]
    if x.steps is not None and x.steps.kind != "within":
        found.append(f"steps: {x.steps.reason}")
    if x.beside:
        found.append("; ".join(map(told, x.beside)))
    if not x.named:
        share = f"{figures.percent(x.share, 1)} of product operations in 8 bits"
        found.append(f"{share}, below {figures.percent(SHARE)}: no name for it")
    return [*found, *x.remarks]
