"""The goals that this project was asked for, and which of them a run's measurements have earned. Pure.

A tick needs a number whose 95 % interval lies wholly beyond the goal; what was not measured has none, whatever a
document says of it. Bounds of ratios between rows that no process has in common are those of both rows put
together, which is wide enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .. import figures
from ..analysis.peers import peers
from ..analysis.repeated import said
from ..analysis.rows import Row, rows
from ..analysis.scaling import by_each, efficiencies
from ..analysis.statistics import geometric_mean, t_quantile
from ..detection.arms import arms
from ..detection.convergence import SEEDS
from ..detection.equivalence import Equivalent
from ..detection.techniques import settings
from ..escape import markdown
from ..store.journal import Journal
from ..store.record import EAGER, GPUS, PROVIDER
from .technique_tables import EIGHT_BIT_LAYERS, EIGHT_BITS

Verdict: TypeAlias = Literal["earned", "missed", "undecided", "not measured"]
MARKS: dict[Verdict, str] = {"earned": "✓", "missed": "✗", "undecided": "?", "not measured": "–"}


@dataclass(frozen=True)
class Found:
    """What a run has on a goal: a number to hold against it, its bounds, and what it is of."""

    value: float
    low: float | None
    high: float | None
    of: str


@dataclass(frozen=True)
class Goal:
    """`asked` is what was asked for, `least` the number that earns it, `measure` where a run has it."""

    name: str
    asked: str
    least: float
    measure: Callable[[Journal, Sequence[Row]], Found | None]
    shown: Callable[[float], str] = figures.ratio
    missing: str = "no run here has rows of it"


@dataclass(frozen=True)
class Standing:
    """A goal and the newest of the runs that has something on it."""

    goal: Goal
    found: Found | None
    run: str | None

    @property
    def verdict(self) -> Verdict:
        """By the interval; a number without one decides nothing."""
        if self.found is None:
            return "not measured"
        if self.found.low is not None and self.found.low >= self.goal.least:
            return "earned"
        if self.found.high is not None and self.found.high < self.goal.least:
            return "missed"
        return "undecided"


def scoreboard(journals: Iterable[Journal]) -> tuple[Standing, ...]:
    """Every goal, with what these runs have on it."""
    read = [(x, rows(x)) for x in sorted(journals, key=lambda x: x.header.created, reverse=True)]
    out = []
    for goal in GOALS:
        known = ((goal.measure(journal, found), journal.header.run) for journal, found in read)
        found, run = next(((x, run) for x, run in known if x is not None), (None, None))
        out.append(Standing(goal, found, run))
    return tuple(out)


def table(journals: Iterable[Journal], verifications: Sequence[Journal] = ()) -> str:
    """The scoreboard in Markdown, and whether anybody measured the runs again that it rests on."""
    known = {x.header.run: x for x in journals}
    board = scoreboard(known.values())
    lines = ["| | goal | asked for | measured | of |", "|---|---|---|---|---|"]
    for x in board:
        measured, of = figures.DASH, x.goal.missing
        if x.found is not None:
            shown = x.goal.shown
            measured = shown(x.found.value)
            if x.found.low is not None and x.found.high is not None and x.found.low != x.found.high:
                measured += f" [{shown(x.found.low)}, {shown(x.found.high)}]"
            of = f"{x.found.of}, run {x.run}"
        cells = (f"{MARKS[x.verdict]} {x.verdict}", x.goal.name, x.goal.asked, measured, markdown(of))
        lines.append(f"| {' | '.join(cells)} |")
    rests_on = dict.fromkeys(x.run for x in board if x.run is not None)
    told = [f"Run {markdown(x)}: {markdown(said(known[x], verifications))}." for x in rests_on]
    return "\n".join([*lines, *([""] if told else []), *told]) + "\n"


# --- where a run has it ---------------------------------------------------------------------------------


def _against(operator: str, base: str = EAGER) -> Callable[[Journal, Sequence[Row]], Found | None]:
    """Ours over an implementation, the geometric mean over an operator's cases."""

    def measure(journal: Journal, found: Sequence[Row]) -> Found | None:
        mine = [x for x in found if x.operator == operator]
        known = [x[base] for x in peers(journal, mine).values() if base in x]
        value = geometric_mean(x.value for x in known)
        if value is None:
            return None
        whole = all(x.low is not None and x.high is not None for x in known)
        low = geometric_mean(x.low for x in known) if whole else None
        high = geometric_mean(x.high for x in known) if whole else None
        return Found(
            value, low, high, f"{operator} over {base}, geometric mean of {figures.counted(len(known), 'case')}"
        )

    return measure


def _fp8_training(journal: Journal, found: Sequence[Row]) -> Found | None:
    """The best system in FP8 over the best in more bits, of the case where that is largest."""
    systems = journal.header.request.systems
    narrow = EIGHT_BIT_LAYERS | {str(x["name"]) for x in systems if x.get("precision") in EIGHT_BITS}
    cases: dict[str, list[Row]] = {}
    for row in found:
        if row.operator == "train" and row.value() is not None:
            cases.setdefault(row.case, []).append(row)
    best: Found | None = None
    for case, members in cases.items():
        fp8 = [x for x in members if x.implementation in narrow]
        wide = [x for x in members if x.implementation not in narrow]
        if fp8 and wide:
            ratio = _over(min(wide, key=_time), min(fp8, key=_time), 1.0, f"train {case}")
            best = ratio if best is None or ratio.value > best.value else best
    return best


def _longest(journal: Journal, found: Sequence[Row]) -> Found | None:
    """The longest sequence whose attention ours has computed, correctly, over several GPUs."""
    known = [
        x
        for x in found
        if "attention" in x.operator and x.provider == PROVIDER and x.value() is not None and GPUS in x.axes
        if not by_each(x)
    ]
    row = max(known, key=lambda x: x.axes.get("S", 0), default=None)
    if row is None:
        return None
    length = float(row.axes.get("S", 0))
    return Found(length, length, length, f"{row.operator} {row.case}")


def _efficiency(belongs: Callable[[Row], bool]) -> Callable[[Journal, Sequence[Row]], Found | None]:
    """The efficiency of ours on the most GPUs for which a run has the same work on one."""

    def measure(journal: Journal, found: Sequence[Row]) -> Found | None:
        ours = [x for x in efficiencies(found) if belongs(x.row) and x.row.provider == PROVIDER]
        x = max(ours, key=lambda x: x.world, default=None)
        if x is None:
            return None
        one = f"{figures.number(x.alone)} ms by {x.one.implementation} on one"
        return _over(x.one, x.row, x.ideal, f"{x.row.operator} {x.row.case} on {x.world} GPUs ({x.kind}, {one})")

    return measure


def _over(base: Row, other: Row, times: float, of: str) -> Found:
    """The ratio of two rows' times, divided by `times`, with bounds from those of both."""
    (low, high), (least, most) = base.bounds(), other.bounds()
    return Found(
        _time(base) / _time(other) / times,
        low / most / times if low and most else None,
        high / least / times if high and least else None,
        of,
    )


def _time(row: Row) -> float:
    return row.value() or 0.0


def _sparse(journal: Journal, found: Sequence[Row]) -> Found | None:
    """What the best arm of training whose attention leaves out 90 % of its blocks keeps of the quality of dense
    attention: 1 − the paired relative difference of bits a byte after the last step. By our own attention where a
    run has such an arm. An arm that left out another share counts for nothing, and fewer seeds than decide give no
    bounds.
    """
    named = settings(journal.header)
    share = {(x.case, x.implementation): x.value("left_out") for x in found}
    known: list[tuple[bool, float, Equivalent, str]] = []
    for arm in arms(journal):
        own = named.get(arm.name)
        if own is None or not own.change("attention").endswith("-90") or not arm.points:
            continue
        left_out, last = share.get((arm.case, arm.name)), arm.points[-1]
        if left_out is None or abs(left_out - 0.9) > _NEARLY or last.difference is None:
            continue
        of = (
            f"{arm.name}, {figures.percent(left_out)} left out, bits a byte beside {arm.base}'s after "
            f"{last.step:,} steps, {arm.case}"
        )
        known.append((own.base == PROVIDER, 1 - last.difference, last.found, of))
    best = max(known, key=lambda x: x[:2], default=None)
    if best is None:
        return None
    ours, value, found_of, of = best
    half = _half(found_of, sum(x[0] == ours for x in known))
    return Found(value, None, None, of) if half is None else Found(value, value - half, value + half, of)


def _half(found: Equivalent, among: int) -> float | None:
    """Half of the 95 % interval of the best among so many: each has one of 1 - 5 % / `among` (Bonferroni), as the
    best was chosen when all were known. None with fewer seeds than decide.
    """
    if found.pairs < SEEDS or found.low is None or found.high is None:
        return None
    alone, all_ = (t_quantile(found.pairs - 1, 1 - 0.025 / x) for x in (1, among))
    return (found.high - found.low) / 2 * all_ / alone


_NEARLY = 0.02
"""By how much the share of tiles that was left out may differ from the 90 % that are asked for."""
_LINEAR = 0.89
"""What the document that asks for linear scaling calls that, at eight GPUs."""

GOALS: Sequence[Goal] = (
    Goal("FP8 training", "2× of 16 bit per step", 2.0, _fp8_training),
    Goal(
        "Ring attention",
        "1,000,000 tokens",
        1e6,
        _longest,
        lambda x: f"{x:,.0f}",
    ),
    Goal(
        "Sparse attention",
        "90 % sparse at less than 1 % loss of accuracy",
        0.99,
        _sparse,
        lambda x: figures.percent(x, 2),
        missing="no run here trains with 90 % left out; plans converge_long and converge_continued do",
    ),
    Goal(
        "Context parallel attention",
        "linear: 89 % of it",
        _LINEAR,
        _efficiency(lambda x: "attention" in x.operator),
        figures.percent,
    ),
    Goal(
        "Training on several GPUs",
        "linear: 89 % of it",
        _LINEAR,
        _efficiency(lambda x: x.operator == "train"),
        figures.percent,
    ),
    Goal("RMSNorm", "3.6× PyTorch", 3.6, _against("rms_norm")),
    Goal("Cross-entropy", "3.2× PyTorch", 3.2, _against("cross_entropy")),
    Goal("SwiGLU", "1.6× PyTorch", 1.6, _against("swiglu")),
    Goal("Attention", "2.5× PyTorch's flash attention", 2.5, _against("attention", "sdpa_flash")),
)
