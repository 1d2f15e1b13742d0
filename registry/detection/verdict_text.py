"""A finished comparison for readers: a pull-request comment and what a terminal says, worst first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .. import escape, figures
from ..figures import percent, signed
from .attribution import Attribution, Part
from .bisection import Finding, Suspect
from .comparison_report import ComparisonReport
from .verdict import Kind, Verdict, tally

COMMENT_LIMIT = 60_000
"""Bytes: a pull-request comment may hold 65,536 characters, and other tools append to it."""
FOLDED: frozenset[Kind] = frozenset({"no change", "skipped"})
_REASON_LIMIT = 160


def to_markdown(report: ComparisonReport, limit: int = COMMENT_LIMIT) -> str:
    """A pull-request comment of less than `limit` bytes: worst first, unchanged rows folded."""
    verdicts = report.verdicts
    told = [v for v in verdicts if not foldable(v)]
    folded = [v for v in verdicts if foldable(v)]
    head = [
        f"### kernelmark: {report.headline}",
        "",
        f"`{_code(report.base)}` → `{_code(report.current)}` · {counts(report)} · exit code {report.exit_code}",
        "",
    ]
    told_why = _explained_markdown(report, limit // 4)
    tail = ["", *told_why, *_folded_markdown(folded, limit // 6), _legend(report)]
    left = limit - _size([*head, *tail]) - 200
    in_unit = unit(verdicts)
    rows = [
        f"| verdict | row | base{in_unit} | current{in_unit} | change (95 %) | detectable | why |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    used = _size(rows)
    shown = 0
    for verdict in told:
        cells = [_cell(x) for x in (kind(verdict), str(verdict.key), *numbers(verdict), why(verdict))]
        row = f"| {' | '.join(cells)} |"
        if (used := used + _size([row])) > left:
            break
        rows.append(row)
        shown += 1
    if shown < len(told):
        more = figures.counted(len(told) - shown, "row")
        rows += ["", f"… and {more} more, less severe than these: see the JSON output."]
    return "\n".join([*head, *(rows if told else []), *tail]) + "\n"


def explanations(report: ComparisonReport) -> list[str]:
    """A line for each cause and each commit that was looked for, in the order of the table."""
    return [
        *map(describe_attribution, report.attributions),
        *map(describe_finding, report.findings),
        *report.remarks,
        *_power(report),
    ]


def _power(report: ComparisonReport) -> list[str]:
    """What this comparison could have found: how low the limits may be set."""
    known = sorted(x.detectable for x in report.progress.verdicts if x.detectable is not None)
    if not known:
        return []
    found = sum(x <= report.options.fail_above for x in known)
    # As in the table: beyond a factor of 11 per cent is a row of digits.
    least, middle, most = (signed(x).removeprefix("+") for x in (known[0], known[len(known) // 2], known[-1]))
    return [
        f"Found four times in five: a slowdown of {percent(report.options.fail_above, 1)} in {found} of "
        f"{figures.counted(len(known), 'row')}, of {least} in the quietest, {middle} in the median, {most} in the "
        f"noisiest."
    ]


def describe_attribution(found: Attribution) -> str:
    """What a row's change comes from, each part with its share."""
    parts = ", ".join(describe_part(x) for x in found.parts)
    notes = "".join(f" ({x})" for x in found.notes)
    return f"{found.key}: {found.reason}{f' ({parts})' if parts else ''}{notes}"


def describe_part(part: Part) -> str:
    """One cause's part in words."""
    effect = f"{part.cause} {signed(part.change)} [{signed(part.low)}, {signed(part.high)}]"
    if part.share is None or part.share_low is None or part.share_high is None:
        return effect
    return f"{effect}, {percent(part.share)} of it [{percent(part.share_low)}, {percent(part.share_high)}]"


def describe_finding(found: Finding) -> str:
    """Which commit a row's change came with."""
    effect = "" if found.change is None else f" {signed(found.change)}"
    if found.low is not None and found.high is not None:
        effect += f" [{signed(found.low)}, {signed(found.high)}]"
    if len(found.suspects) == 1 and found.reason == "found":
        return f"{found.key}:{effect} came with {describe_suspect(found.suspects[0])}"
    ends = found.suspects if len(found.suspects) < 3 else (found.suspects[0], found.suspects[-1])
    listed = " to ".join(map(describe_suspect, ends))
    return f"{found.key}:{effect} {found.reason}{': ' if listed else ''}{listed}"


def describe_suspect(suspect: Suspect) -> str:
    """A commit in a line."""
    return " ".join(x for x in (suspect.commit[:10], suspect.date[:10], suspect.author, suspect.subject) if x)


def _explained_markdown(report: ComparisonReport, limit: int) -> list[str]:
    lines: list[str] = []
    for line in explanations(report):
        item = f"- {_cell(line, 600)}"
        if _size([*lines, item]) > limit:
            lines.append("- …: see the JSON output.")
            break
        lines.append(item)
    return [*lines, ""] if lines else []


def describe_change(verdict: Verdict) -> str:
    """One line: what the row ended in and by how much."""
    numbers = "" if verdict.change is None else f" {signed(verdict.change)} {_interval(verdict)}".rstrip()
    return f"{kind(verdict)}{numbers}: {why(verdict)}"


def unit(verdicts: Iterable[Verdict]) -> str:
    """What all values are in; nothing where they are of several units."""
    units = {x.unit for x in verdicts}
    return f" {units.pop()}" if len(units) == 1 else ""


def foldable(verdict: Verdict) -> bool:
    """Whether nobody need read the row by itself: unchanged or skipped, and no other metric worse."""
    return verdict.kind in FOLDED and not verdict.flags


def _folded_markdown(folded: Sequence[Verdict], limit: int) -> list[str]:
    """Unchanged rows by operator: a line for each would not fit a comment."""
    if not folded:
        return []
    operators: dict[str, list[Verdict]] = {}
    for verdict in folded:
        operators.setdefault(verdict.key.operator, []).append(verdict)
    lines = ["| operator | rows | change | detectable up to |", "|---|--:|--:|--:|"]
    for operator, rows in sorted(operators.items()):
        changes = [v.change for v in rows if v.change is not None]
        span = f"{signed(min(changes))} to {signed(max(changes))}" if changes else "–"
        line = f"| {_cell(operator)} | {len(rows)} | {span} | {worst_detectable(rows)} |"
        if _size([*lines, line]) > limit:
            lines.append("| … | | | |")
            break
        lines.append(line)
    summary = f"<summary>{counted(tally(folded).items())}</summary>"
    return ["<details>", summary, "", *lines, "", "</details>", ""]


def _legend(report: ComparisonReport) -> str:
    o = report.options
    return (
        "Change is current / base − 1 of the primary metric, above 0 worse. "
        f"Failure above {percent(o.fail_above, 1)}, warning above "
        f"{percent(o.warn_above, 1)}, no change if the interval lies within ±{percent(o.fail_above, 1)}. "
        "*Detectable* is the smallest slowdown this row's noise lets through four times in five."
    )


def counts(report: ComparisonReport) -> str:
    """How many rows there are of each kind: 2 regressions, say, and those with another metric worse."""
    flagged = sum(bool(verdict.flags) for verdict in report.progress.verdicts)
    told = counted(tally(report.progress.verdicts).items()) or "no rows"
    return f"{told}, {flagged} with another metric worse" if flagged else told


def counted(counts: Iterable[tuple[str, int]]) -> str:
    """Numbers with what they are of."""
    return ", ".join(f"{count} {name}" for name, count in counts)


def kind(verdict: Verdict) -> str:
    """The verdict's kind, with the metrics that are worse beside the primary one."""
    return " + ".join([verdict.kind, *(flag.metric for flag in verdict.flags)])


def why(verdict: Verdict) -> str:
    """Its reasons and notes in one line."""
    return "; ".join([verdict.reason, *(flag.reason for flag in verdict.flags), *verdict.notes])


def numbers(verdict: Verdict) -> tuple[str, str, str, str]:
    """Base, current, change with its interval, and the smallest slowdown that would have shown."""
    change = f"{signed(verdict.change)} {_interval(verdict)}".rstrip()
    return _value(verdict.base_value), _value(verdict.current_value), change, signed(verdict.detectable)


def _interval(verdict: Verdict) -> str:
    if verdict.low is None or verdict.high is None:
        return ""
    return f"[{signed(verdict.low)}, {signed(verdict.high)}]"


def worst_detectable(verdicts: Iterable[Verdict]) -> str:
    """The largest of the smallest slowdowns that these rows would have shown."""
    known = [v.detectable for v in verdicts if v.detectable is not None]
    return signed(max(known, default=None))


def _value(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _cell(text: str, limit: int = _REASON_LIMIT) -> str:
    return escape.markdown(text, limit)


def _code(text: str) -> str:
    return escape.code(text, _REASON_LIMIT)


def _size(lines: Sequence[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)
