"""How ours stands where models call it, and at sizes drawn at random: tables in Markdown by model, by operator,
of the worst calls. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..analysis.calls import Call, Spread, by_model, by_operator, calls, untold
from ..analysis.repeated import said
from ..analysis.twins import MOST, Twins, What, twins, verdict
from ..errors import InputError
from ..escape import markdown
from ..figures import DASH, counted, ratio
from ..store.journal import Journal

WORST = 10
"""Calls that are listed one by one."""
BAR = 0.9
"""What each drawn size is held against, times the fastest peer's speed."""
TUNED_LONG = ("torch_compile_max_autotune",)
"""No peers of drawn sizes: minutes of tuning for one size."""
TWINS: Mapping[What, str] = {
    "layout": "tensors stored (B, S, H, D), as themselves or as views of one projection, beside (B, H, S, D)",
    "length": "5,000 tokens beside 5,120",
}
QUANTILES = ("calls", "worst", "25 %", "median", "75 %", "best", "geometric mean")


def table(journal: Journal, verifications: Iterable[Journal] = ()) -> str:
    """The tables of one run. Raises `InputError` for a run whose cases are nobody's calls."""
    found = calls(journal)
    if not any(x.models for x in found):
        raise InputError(
            f"run {journal.header.run} has no call of a model that ours and a peer have a time of: "
            f"kernelmark run --plan shapes measures some."
        )
    parts = (
        f"Run {markdown(journal.header.run)}, plan {markdown(journal.header.plan)}. Each number is the time of "
        "the fastest correct peer over ours: below 1 a peer is faster. A call that ours has no correct answer to "
        f"counts as eager PyTorch's. The run: {markdown(said(journal, verifications))}.",
        _models(found),
        _operators(journal, found),
        _worst(found),
        *_twins(journal),
    )
    return "\n\n".join(parts) + "\n"


def drawn(journal: Journal, verifications: Iterable[Journal] = ()) -> str:
    """One sentence of all cases of a run, whether one is worse than `BAR` of its fastest peer, and its tables.

    Raises `InputError` for a run in which no case has a time of ours, or of eager PyTorch, and one of a peer.
    """
    found = calls(journal, TUNED_LONG)
    if not found:
        raise InputError(
            f"run {journal.header.run} has no case that ours and a peer have a time of: "
            f"kernelmark run --plan widths measures some."
        )
    missing = untold(journal, found)
    parts = (
        f"Run {markdown(journal.header.run)}, plan {markdown(journal.header.plan)}. {_sentence(found, missing)} "
        "Each number is the time of the fastest correct peer over ours, torch.compile's max-autotune left out. "
        "A case that ours has no correct answer to counts as eager PyTorch's. "
        f"The run: {markdown(said(journal, verifications))}.",
        _operators(journal, found),
        _worst(found),
    )
    return "\n\n".join(parts) + "\n"


def _sentence(found: Sequence[Call], missing: Sequence[tuple[str, str]]) -> str:
    """What of `BAR` holds of all cases. Of a case without a time nothing is known, so that not all can hold it."""
    worse = [x for x in found if x.ratio < BAR]
    cases = f"{len(found)} of {len(found) + len(missing)} cases"
    if worse:
        return f"Of {cases}, {len(worse)} are worse than {ratio(BAR)} of the fastest peer."
    if missing:
        operator, case = missing[0]
        return (
            f"Of {cases} none is worse than {ratio(BAR)} of the fastest peer; nothing is known of the others, "
            f"such as {markdown(operator)} {markdown(case)}."
        )
    return f"None of {len(found)} cases is worse than {ratio(BAR)} of the fastest peer."


def _models(found: Iterable[Call]) -> str:
    lines = [_row("model", *QUANTILES), _rule(len(QUANTILES))]
    lines += [_row(markdown(name), *_cells(spread)) for name, spread in by_model(found).items()]
    return "\n".join(lines)


def _operators(journal: Journal, found: Iterable[Call]) -> str:
    lines = [_row("operator", *QUANTILES, "as a goal"), _rule(len(QUANTILES), "---")]
    for x in by_operator(journal, found):
        absent = "; ".join(f"{name} did not run ({reason})" for name, reason in x.absent)
        lines.append(
            _row(markdown(x.operator), *_cells(x.spread), markdown(f"not shown: {absent}") if absent else "shown")
        )
    return "\n".join(lines)


def _worst(found: Iterable[Call]) -> str:
    lines = [_row("worst calls", "against", "ratio", "models"), "|---|---|---:|---|"]
    for x in sorted(found, key=lambda x: (x.ratio, x.operator, x.case))[:WORST]:
        name = f"{x.operator} {x.case}" + (" (eager's time)" if x.by_eager else "")
        lines.append(
            _row(markdown(name), markdown(x.peer), ratio(x.ratio), markdown(", ".join(x.models) or "none"))
        )
    return "\n".join(lines)


def _twins(journal: Journal) -> list[str]:
    """The goals of cases that differ in one thing, and the quotients that each rests on."""
    found = twins(journal)
    parts = []
    for what, about in TWINS.items():
        each = [x for x in found if x.what == what]
        parts.append(
            f"Goal: ours on {about}, at most {MOST:.2f} of the time: {verdict(journal, each)}, by "
            f"{counted(len(each), 'pair')} of cases that differ in nothing else."
        )
        if each:
            lines = [_row("ours", "against", "time ÷ time", "95 %", "as a goal"), "|---|---|---:|---:|---|"]
            parts.append("\n".join([*lines, *map(_pair, each)]))
    return parts


def _pair(x: Twins) -> str:
    told = f"{x.verdict}: {x.missing}" if x.missing else x.verdict
    names = (f"{x.case.operator} {x.case.name}", x.against.name)
    interval = DASH if x.low is None or x.high is None else f"{x.low:.3f}–{x.high:.3f}"
    return _row(*map(markdown, names), DASH if x.ratio is None else f"{x.ratio:.3f}", interval, markdown(told))


def _cells(x: Spread) -> tuple[str, ...]:
    counted = f"{x.calls}" + (f", {x.by_eager} by eager" if x.by_eager else "")
    numbers = (x.lowest, x.quarter, x.median, x.three_quarters, x.highest, x.geometric)
    return (counted, *map(ratio, numbers))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(numbers: int, *more: str) -> str:
    return f"|{'|'.join(('---', *('---:',) * numbers, *more))}|"
