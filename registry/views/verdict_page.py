"""The verdict on two commits as one HTML page that opens offline, in the look of the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from .. import figures
from ..detection.attribution import Attribution, Part
from ..detection.bisection import Finding
from ..detection.comparison_report import ComparisonReport
from ..detection.verdict import Kind, Verdict, tally
from ..detection.verdict_text import FOLDED, describe_suspect
from ..figures import percent, signed
from ..store.record import Key

CHIPS: dict[Kind, str] = {
    "regression": "slower",
    "incorrect": "slower",
    "missing": "slower",
    "not comparable": "flag",
    "warning": "flag",
    "inconclusive": "flag",
    "improvement": "good",
    "no change": "faster",
}
"""The report's colours; kinds that are left out are grey."""
WIDTH, HEIGHT = 190, 18
LEAST_REACH, MOST_REACH = 2.0, 10.0
"""How far drawings reach on either side, in margins of "no change": beyond that an interval is cut off."""


def render_verdict(report: ComparisonReport) -> str:
    """The page. Needs nothing but this package."""
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    title = escape(f"{report.headline}: {report.base} → {report.current}")
    told = [x for x in report.verdicts if x.kind not in FOLDED or x.flags]
    folded = [x for x in report.verdicts if not (x.kind not in FOLDED or x.flags)]
    reach = _reach(report)
    parts = [
        _header(report),
        _tiles(report),
        *(f"<p>{escape(x)}</p>" for x in report.remarks),
        _section("What changed", _table(told, report, reach)) if told else "",
        _section("Where it comes from", _attributions(report.attributions)) if report.attributions else "",
        _section("Which commit did it", _findings(report.findings)) if report.findings else "",
        _folded(folded, report, reach),
        _section("How to read this", _legend(report)),
    ]
    head = f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
    return (
        f"{head}<meta name='viewport' content='width=device-width'><style>{style}</style></head>\n"
        f"<body>{''.join(parts)}<footer>Made by kernelmark's regression_detector. Raw samples are in the "
        f"journals of both sides.</footer></body></html>\n"
    )


def _header(report: ComparisonReport) -> str:
    colour = {0: "good", 1: "bad"}.get(report.exit_code, "")
    return (
        f"<header><p class='brand'>kernelmark</p><h1 class='{colour}'>{escape(report.headline)}</h1>"
        f"<dl class='facts'><div><dt>Baseline</dt><dd><code>{escape(report.base)}</code></dd></div>"
        f"<div><dt>Current</dt><dd><code>{escape(report.current)}</code></dd></div>"
        f"<div><dt>Measured</dt><dd>{_modes(report)}</dd></div>"
        f"<div><dt>Exit code</dt><dd>{report.exit_code}</dd></div></dl></header>"
    )


def _modes(report: ComparisonReport) -> str:
    modes = {x.mode for x in report.verdicts}
    words = {"ab": "both commits in turns", "stored": "stored runs"}
    return " and ".join(words[x] for x in ("ab", "stored") if x in modes) or "nothing"


def _tiles(report: ComparisonReport) -> str:
    counts = tally(report.verdicts)
    tiles = [(str(len(report.verdicts)), "rows compared: a case by one implementation")]
    tiles += [(str(count), kind) for kind, count in counts.items()]
    known = sorted(x.detectable for x in report.verdicts if x.detectable is not None)
    if known:
        tiles.append((signed(known[len(known) // 2]), "smallest detectable slowdown, median of the rows"))
    inner = "".join(f"<div class='tile'><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in tiles)
    return f"<div class='tiles'>{inner}</div>"


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>{body}\n"


def _table(verdicts: Sequence[Verdict], report: ComparisonReport, reach: float) -> str:
    head = "".join(
        f"<th{' class=left' if i in (1, 7) else ''}>{name}</th>"
        for i, name in enumerate(
            ("Verdict", "Row", "Base ms", "Current ms", "Change", "95 % interval", "Detectable", "Why")
        )
    )
    body = "".join(_row(x, report, reach) for x in verdicts)
    return _wide(head, body)


def _row(verdict: Verdict, report: ComparisonReport, reach: float) -> str:
    key = verdict.key
    chip = f"<span class='chip {CHIPS.get(verdict.kind, '')}'>{escape(verdict.kind)}</span>"
    chip += "".join(f" <span class='chip slower'>{escape(x.metric)}</span>" for x in verdict.flags)
    name = _name(key, key.cache)
    colour = "" if verdict.change is None else {"regression": "bad", "improvement": "good"}.get(verdict.kind, "")
    why = "; ".join([verdict.reason, *(x.reason for x in verdict.flags), *verdict.notes])
    change = _bounded(verdict.change, verdict.low, verdict.high)
    cells = (
        f"<td>{chip}</td><td class='left'>{name}</td><td>{figures.number(verdict.base_value)}</td>"
        f"<td>{figures.number(verdict.current_value)}</td><td class='{colour}'>{change}</td>"
        f"<td>{_drawing(verdict, report, reach)}</td><td>{signed(verdict.detectable)}</td>"
        f"<td class='text'>{escape(why)}</td>"
    )
    return f"<tr>{cells}</tr>"


def _drawing(verdict: Verdict, report: ComparisonReport, reach: float) -> str:
    """The interval on an axis that all rows share, with 0 and the margin of "no change"."""
    if verdict.change is None or verdict.low is None or verdict.high is None:
        return ""

    def x(change: float) -> float:
        log = min(max(math.log1p(max(change, -0.999999)), -reach), reach)
        return WIDTH / 2 + log / reach * (WIDTH / 2 - 4)

    fail = report.options.fail_above
    low, high, middle = x(verdict.low), x(verdict.high), HEIGHT / 2
    left = x(1 / (1 + fail) - 1)
    colour = {"regression": "--bad", "warning": "--warn", "improvement": "--good"}.get(verdict.kind, "--soft")
    tip = f"{signed(verdict.change)} [{signed(verdict.low)}, {signed(verdict.high)}]"
    return (
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' style='width:{WIDTH}px' role='img' aria-label='{tip}'>"
        f"<title>{tip}</title>"
        f"<rect x='{left:.1f}' width='{x(fail) - left:.1f}' height='{HEIGHT}' style='fill:var(--band)'/>"
        f"<path d='M{WIDTH / 2} 0V{HEIGHT}' style='stroke:var(--line)'/>"
        f"<path d='M{low:.1f} {middle}H{max(high, low + 1):.1f}' style='stroke:var({colour});stroke-width:2'/>"
        f"<circle cx='{x(verdict.change):.1f}' cy='{middle}' r='3.2' style='fill:var({colour})'/></svg>"
    )


def _reach(report: ComparisonReport) -> float:
    margin = math.log1p(report.options.fail_above)
    ends = [abs(math.log1p(max(x, -0.999999))) for v in report.verdicts for x in (v.low, v.high) if x is not None]
    return min(max([LEAST_REACH * margin, *(1.1 * x for x in ends)]), MOST_REACH * margin)


def _attributions(found: Iterable[Attribution]) -> str:
    rows = []
    for x in found:
        span = max(1, len(x.parts))
        name = f"<td rowspan='{span}' class='left'>{_name(x.key)}</td>"
        told = escape("; ".join([x.reason, *x.notes]))
        verdict = f"<td rowspan='{span}'>{_bounded(x.change, x.low, x.high)}</td>"
        verdict += f"<td rowspan='{span}' class='text'><b>{told}</b></td>"
        first, *others = [_part(part, part.cause in x.causes) for part in x.parts] or [
            "<td></td><td></td><td></td>"
        ]
        rows.append(f"<tr>{name}{verdict}{first}</tr>" + "".join(f"<tr>{y}</tr>" for y in others))
    head = "<th>Row</th><th>Whole change</th><th class='left'>Cause</th><th class='left'>Part</th>"
    head += "<th>Its change</th><th>Its share</th>"
    return _wide(head, "".join(rows))


def _part(part: Part, guilty: bool) -> str:
    share = percent(part.share)
    if part.share_low is not None and part.share_high is not None:
        share += f" <span class='soft'>[{percent(part.share_low)}, {percent(part.share_high)}]</span>"
    filled = min(max(part.share or 0.0, 0.0), 1.0)
    colour = "--bad" if guilty else "--s9"
    bar = f"<span class='bar' style='--c: var({colour}); --v: {filled:.0%}; width: 70px'></span>"
    name = f"<b>{part.cause}</b>" if guilty else part.cause
    return (
        f"<td class='left'>{name}</td><td>{_bounded(part.change, part.low, part.high)}</td><td>{share}{bar}</td>"
    )


def _findings(found: Iterable[Finding]) -> str:
    rows = []
    for x in found:
        suspects = "<br>".join(escape(describe_suspect(y)) for y in x.suspects)
        steps = "1 step" if x.steps == 1 else f"{x.steps} steps"
        rows.append(
            f"<tr><td class='left'>{_name(x.key)}</td>"
            f"<td class='text'>{suspects}</td><td>{_bounded(x.change, x.low, x.high)}</td>"
            f"<td class='text'>{escape(x.reason)}, {steps}</td></tr>"
        )
    head = "<th>Row</th><th class='left'>Commit</th><th>Its change</th><th class='left'>How</th>"
    return _wide(head, "".join(rows))


def _folded(verdicts: Sequence[Verdict], report: ComparisonReport, reach: float) -> str:
    if not verdicts:
        return ""
    counted = ", ".join(f"{count} {kind}" for kind, count in tally(verdicts).items())
    return (
        f"<h2>Unchanged</h2><details><summary>{escape(counted)}: show the rows</summary>"
        f"{_table(verdicts, report, reach)}</details>\n"
    )


def _legend(report: ComparisonReport) -> str:
    o = report.options
    items = (
        (
            "Change",
            "current / base − 1 of the time, from paired medians of fresh processes; above 0 is slower. The band "
            f"in the drawings is ±{percent(o.fail_above, 1)}.",
        ),
        (
            "Regression, warning",
            f"significantly slower than {percent(o.tolerated, 1)} and by more than {percent(o.fail_above, 1)}, or "
            f"more than {percent(o.warn_above, 1)}, on pairs measured after the row was suspected.",
        ),
        ("No change", f"the interval lies within ±{percent(o.fail_above, 1)}."),
        ("Inconclusive", "neither: too noisy within the budget. It is no pass."),
        (
            "Detectable",
            "the smallest slowdown that this row's noise lets through to a warning four times in five.",
        ),
    )
    return "<dl class='read'>" + "".join(f"<dt>{a}</dt><dd>{escape(b)}</dd>" for a, b in items) + "</dl>"


def _wide(head: str, body: str) -> str:
    table = f"<table class='wide'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='scroll'>{table}</div>"


def _name(key: Key, more: str = "") -> str:
    soft = escape(f"{key.implementation} {more}".strip())
    return f"<b>{escape(key.operator)}</b> {escape(key.case)} <span class='soft'>{soft}</span>"


def _bounded(change: float | None, low: float | None, high: float | None) -> str:
    if change is None:
        return "–"
    bounds = "" if low is None or high is None else f" <span class='soft'>[{signed(low)}, {signed(high)}]</span>"
    return f"{signed(change)}{bounds}"
