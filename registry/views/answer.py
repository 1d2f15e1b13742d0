"""The run's own question and its answer: what a reader of its report sees first. Pure.

A run over lengths of sequences asks from which on O(S) is faster than attention; one that exchanges the parts of a
model asks what each is worth there; one that trains to a loss asks if it is as good; any other asks whether ours
is faster than the fastest baseline. What the intervals do not support is not said: then the answer is that it is
too noisy to say, and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from .. import figures
from ..analysis.rows import Row
from ..analysis.worth import Worth
from ..detection.arms import PRIMARY, Arm
from ..store.metric import LATENCY
from .crossing import Contest, bounds
from .summary import Standing

NARROW = 0.05
"""Intervals that would have shown a difference of so much are not called noisy."""
MOST = 100
"""A speedup above that is said as being above it."""
SHOWN = 4
"""Findings beside the headline: what does not fit there stands in the sections."""

Verdict: TypeAlias = Literal["good", "bad", "undecided"]


@dataclass(frozen=True)
class Finding:
    """One number of the answer. It is emphasised only if `supported`: an interval stands behind it."""

    value: str
    interval: str
    about: str
    supported: bool
    verdict: Verdict = "undecided"


@dataclass(frozen=True)
class Share:
    """How many of what the headline counts ended one way."""

    mark: Literal["faster", "open", "slower"]
    name: str
    count: int


@dataclass(frozen=True)
class Answer:
    """What the run was for, and what it found."""

    question: str
    headline: str
    verdict: Verdict
    reason: str
    """Why the headline says no more than it does; what is behind it."""
    findings: tuple[Finding, ...] = ()
    shares: tuple[Share, ...] = ()
    """Drawn below the headline; none where nothing is counted, or nothing is decided."""


def answer(
    rows: Sequence[Row],
    standing: Standing,
    contests: Sequence[Contest],
    worths: Sequence[Worth],
    trained: Sequence[Arm] = (),
) -> Answer:
    """That of a run, from what was made of its rows. A loss is no time: of arms that were trained it is not asked
    which is faster.
    """
    if trained and all(x.primary == PRIMARY for x in rows):
        return _as_good(trained)
    if contests:
        return _crossing(contests)
    if worths:
        return _worth(worths)
    if standing.compared:
        return _speedup(rows, standing)
    measured = sum(x.value() is not None for x in rows)
    return Answer(
        "How fast is each implementation?",
        f"{measured} of {figures.counted(len(rows), 'row')} measured",
        "undecided",
        "There is no speedup to sum up: no case has both an implementation of ours and a baseline with a value.",
    )


# --- is it faster? --------------------------------------------------------------------------------------


def _speedup(rows: Sequence[Row], standing: Standing) -> Answer:
    names = " and ".join(standing.names)
    time = all(x.primary == LATENCY.name for x in standing.compared)
    faster, slower = ("faster", "slower") if time else ("better", "worse")
    verb = "Is" if len(standing.names) == 1 else "Are"
    question = f"{verb} {names} {faster} than the fastest baseline?"
    total = len(standing.compared)
    cases = figures.counted(total, "case")
    if not standing.faster and not standing.slower:
        return Answer(question, *_undecided(rows, standing))
    won, lost, undecided = standing.faster, standing.slower, standing.undecided
    if total in (won, lost):
        way = faster if won else slower
        headline = f"{way.capitalize()} in {'the one case' if total == 1 else f'all {cases}'}"
    elif not won or not lost:
        headline = f"{(faster if won else slower).capitalize()} in {won or lost} of {cases}"
        headline += f", {undecided} undecided"
    else:
        headline = f"{faster.capitalize()} in {won} of {cases}, {slower} in {lost}"
        headline += f", {undecided} undecided" if undecided else ""
    verdict: Verdict = "good" if not lost else "bad" if not won else "undecided"
    reason = f"{faster.capitalize()} or {slower} is what the whole 95 % interval of a case says."
    return Answer(
        question, headline, verdict, reason, (_mean(names, standing),), _shares(faster, won, slower, lost, total)
    )


def _shares(good: str, won: int, bad: str, lost: int, total: int) -> tuple[Share, ...]:
    every = (
        Share("faster", good, won),
        Share("open", "undecided", total - won - lost),
        Share("slower", bad, lost),
    )
    return tuple(x for x in every if x.count) if won or lost else ()


def _mean(names: str, standing: Standing) -> Finding:
    low_high = standing.bounds
    return Finding(
        figures.ratio(standing.versus_best),
        f"[{low_high[0]:.2f}, {low_high[1]:.2f}]" if low_high else "no interval",
        f"{names} over the fastest baseline of each case, geometric mean of {len(standing.compared)}",
        standing.decided,
        "undecided" if not low_high or not standing.decided else "good" if low_high[0] > 1 else "bad",
    )


def _undecided(rows: Sequence[Row], standing: Standing) -> tuple[str, Verdict, str]:
    """The headline without a verdict, and the reason."""
    halves = [
        math.sqrt(x.speedup_ci_high / x.speedup_ci_low) - 1
        for x in standing.compared
        if x.speedup_ci_low and x.speedup_ci_high
    ]
    cases = figures.counted(len(standing.compared), "case")
    if not halves:
        why = f"No interval: of {cases} none was measured by two processes or more beside its baseline."
        return "Too few processes to say", "undecided", f"{why} More replicates give one (--replicates)."
    half = median(halves)
    holding = f"The 95 % interval of {'the case' if len(halves) == 1 else f'each of {cases}'} holds 1"
    half_of = "" if len(halves) == 1 else " in half of them"
    if half <= NARROW:
        why = f"{holding}; a difference of more than {figures.percent(half, 1)} would have shown{half_of}."
        return "No difference shown", "undecided", why
    variations = [y.cv_between for x in rows if (y := x.get()) is not None and y.cv_between is not None]
    times = f"{1 + half:.1f}" if 1 + half < MOST else f"more than {MOST}"
    seen = f"one kernel would have to be {times} times as fast as the other for it to show{half_of}"
    varied = f" Between processes times vary by {figures.percent(median(variations))}." if variations else ""
    few = max(x.replicates for x in standing.compared)
    mend = (
        f" More than {figures.counted(few, 'replicate')}, on a machine that does nothing else, show smaller ones."
    )
    return "Too noisy to say", "undecided", f"{holding}: {seen}.{varied}{mend}"


# --- is it as good? -------------------------------------------------------------------------------------


def _as_good(trained: Sequence[Arm]) -> Answer:
    """How many arms are as good as their base, and the speed of those that are."""
    good = [x for x in trained if x.overall in ("equivalent", "better")]
    bad = [x for x in trained if x.overall in ("worse", "failed")]
    parts = [(len(bad), "not as good"), (len(trained) - len(good) - len(bad), "undecided")]
    headline = f"{len(good)} of {figures.counted(len(trained), 'arm')} as good"
    headline += "".join(f", {count} {what}" for count, what in parts if count)
    findings = [
        Finding(
            figures.ratio(x.matched.speedup),
            f"[{x.matched.low:.2f}, {x.matched.high:.2f}]",
            f"speed of {x.name} at the quality of {x.base}, {x.case}",
            not x.matched.low <= 1 <= x.matched.high,
            "good" if x.matched.low > 1 else "bad" if x.matched.high < 1 else "undecided",
        )
        for x in good
        if x.matched is not None
    ]
    findings.sort(key=lambda x: not x.supported)
    verdict: Verdict = "good" if len(good) == len(trained) else "bad" if len(bad) == len(trained) else "undecided"
    reason = (
        "As good: equivalent at every declared step over five seeds at least, in at most 1.05 times the steps."
    )
    late = dict.fromkeys(
        x.name
        for x in trained
        if x.overall == "inconclusive" and x.points and x.points[-1].found.kind in ("equivalent", "better")
    )
    if late:
        reason += f" Undecided, yet as good after the last step: {', '.join(late)}."
    shares = _shares("as good", len(good), "not as good", len(bad), len(trained))
    return Answer("Is training another way as good?", headline, verdict, reason, tuple(findings[:SHOWN]), shares)


# --- from which length on? ------------------------------------------------------------------------------


def _crossing(contests: Sequence[Contest]) -> Answer:
    """The first contest in full: it is ours where ours was measured. The others stand in their section."""
    contest = contests[0]
    findings = []
    for other in contest.linear:
        found = contest.crossing(other, "time")
        if found is None:
            continue
        if found.at == math.inf:
            value, about = f"> {found.last:,}", f"{other.operator} is not faster at the longest length measured"
        elif found.at == -math.inf:
            value, about = f"< {found.first:,}", f"{other.operator} is faster at every length measured"
        else:
            value, about = (
                f"S = {figures.number(found.at)}",
                f"{other.operator} is faster than attention from here on",
            )
        findings.append((found.at, Finding(value, bounds(found), about, found.low is not None)))
    findings.sort(key=lambda x: x[0])
    crossed = [(at, x) for at, x in findings if at < math.inf]
    if crossed:
        at, first = crossed[0]
        name = first.about.split()[0]
        headline = f"{name} from {first.value} on" if at > 0 else f"{name} at every length measured"
    elif findings:
        headline = "At none that was measured"
    else:
        headline = "No two curves have lengths in common"
    return Answer(
        "From which sequence length on is an operator of O(S) faster than attention?",
        headline,
        "undecided",
        f"Both by {contest.side}, width {contest.width}, {contest.common}.",
        tuple(x for _, x in findings),
    )


# --- what is it worth? ----------------------------------------------------------------------------------


def _worth(worths: Iterable[Worth]) -> Answer:
    found = [x for x in worths if x.measured is not None]
    shown = sorted((x for x in found if not x.null), key=lambda x: -abs(math.log(x.measured or 1)))
    gains = sum((x.measured or 0) > 1 for x in shown)
    return Answer(
        "What is a kernel worth in a model's step?",
        f"{len(shown)} of {figures.counted(len(found), 'exchange')} change the step"
        if shown
        else "No exchange changes the step measurably",
        "undecided",
        "Each exchanges one part of a base system; its interval is over processes that ran both.",
        tuple(
            Finding(
                f"{x.measured:.4f}×",
                f"[{x.low:.4f}, {x.high:.4f}]",
                f"{x.exchange.part} by {x.exchange.implementation} in {x.exchange.step}",
                True,
                "good" if (x.measured or 0) > 1 else "bad",
            )
            for x in shown[:SHOWN]
        ),
        _shares("gain", gains, "lose", len(shown) - gains, len(found)),
    )
