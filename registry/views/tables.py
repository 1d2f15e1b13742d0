"""Runs and comparisons as tables for a terminal, readable at 80 columns and in a log file.

rich is imported only here, and only when a table is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..analysis.rows import BANDWIDTH, DERIVED, THROUGHPUT, Row, category, rows
from ..store.journal import Journal
from ..store.metric import LATENCY, Metric
from ..store.record import PROVIDER, YARDSTICK
from . import summary, units
from .comparison_table import RowComparison, RunComparison
from .crossing import MEASURES, Contest, contests
from .grouping import CaseRows, Group, columns, groups
from .scaling_table import scaling_table
from .worth_table import worth_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

MOST_ROWS, MOST_REASONS = 1000, 100
"""A terminal shows no more: nobody reads further, and laying out a table takes longer than all else."""
_STYLES = {"excellent": "bold green", "good": "green", "measured": "green", "investigate": "red"}


def run_table(journal: Journal) -> RenderableType:
    """A run: where it was made, a table a group of cases, what did not end well, and how ours stands."""
    from rich.console import Group as Lines
    from rich.text import Text

    found = rows(journal)
    header = journal.header
    facts = (header.run, summary.device_name(header), f"plan {header.plan}", f"commit {summary.commit(header)}")
    parts: list[RenderableType] = [
        Text(" · ".join(facts), style="bold"),
        Text(f"comparability key {header.key}", style="dim"),
    ]
    parts += [Text(f"! {x}", style="yellow") for x in summary.warnings(journal, found)]
    if not found:
        parts.append(Text("Nothing was measured."))
    shown = 0
    for group in groups(found):
        if any(case.ok for case in group.cases):
            if shown >= MOST_ROWS:
                break
            parts += [Text(), _group_table(group, header.metrics)]
        shown += sum(len(case.rows) for case in group.cases)
    parts += _left_out(len(found) - shown, f"kernelmark show {header.run} --json")
    for contest in contests(journal, found):
        parts += [Text(), *_contest(contest)]
    parts += [
        x for table in (worth_table(journal), scaling_table(found)) if table is not None for x in (Text(), table)
    ]
    lost = summary.failures(found)
    if lost:
        parts += [Text(), Text("Skipped or failed", style="bold")]
        parts += [_failure(x) for x in lost[:MOST_REASONS]]
        parts += _left_out(len(lost) - MOST_REASONS, f"kernelmark show {header.run} --json", "reasons")
    standings = [x for x in summary.standings(found) if x.compared]
    if standings:
        total = [summary.overall(found)] if len(standings) > 1 else []
        parts += [Text(), _standings_table([*standings, *total])]
    return Lines(*parts)


def _left_out(count: int, command: str, what: str = "rows") -> list[RenderableType]:
    from rich.text import Text

    return [Text(f"… and {count:,} {what} more: {command}", style="dim")] if count > 0 else []


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=0,  # at 80 columns the blank that divides columns is all there is room for
        show_edge=False,
        header_style="dim",
    )


def _group_table(group: Group, metrics: Sequence[Metric]) -> Table:
    title = " · ".join(x for x in (group.operator, group.pass_.replace("_", " "), group.common) if x)
    table = _table(title)
    found = [x for case in group.cases for x in case.ok]
    primary = next((x for x in metrics if x.name == found[0].primary), Metric(found[0].primary, ""))
    beside = columns(found, metrics, terminal=True)
    if THROUGHPUT in beside:  # one rate is enough in a terminal: operations where the case has any, else bytes
        beside = tuple(x for x in beside if x != BANDWIDTH)
    table.add_column("case", no_wrap=True)
    table.add_column("implementation", no_wrap=True, min_width=14)
    limit = any(x.fraction_of_limit is not None for x in found)
    names = (_short(primary), "±", *map(_short, beside), *(("limit",) if limit else ()), "vs best", "vs eager")
    least = {"±": 5, **{_short(x): 7 for x in (primary, *beside) if x.unit == "ms"}}
    for name in names:
        # Where it is too narrow, labels are cut and not numbers.
        table.add_column(name, justify="right", no_wrap=True, min_width=least.get(name, len(name)))
    for label, case in zip(group.labels, group.cases, strict=True):
        _add_case(table, label, case, beside, limit)
    return table


def _short(metric: Metric) -> str:
    """A column's heading in a terminal: a quantity that its unit says is not named."""
    return metric.unit if metric in (LATENCY, *DERIVED) else units.heading(metric)


def _add_case(table: Table, label: str, case: CaseRows, beside: Sequence[Metric], limit: bool) -> None:
    from rich.text import Text

    for place, row in enumerate(case.ok):
        ours = row.provider == PROVIDER
        speedup = Text(units.ratio(row.speedup_vs_best_baseline))
        if ours:
            speedup.stylize(_STYLES.get(category(row) or "", ""))
        table.add_row(
            label if place == 0 else "",
            row.implementation + ("*" if row.throttled or row.converged is False else ""),
            units.number(row.value()),
            half_width(row),
            *(units.measured(row.value(x.name), x.unit) for x in beside),
            *((_narrow(units.percent(row.fraction_of_limit)),) if limit else ()),
            speedup,
            units.ratio(row.speedup_vs_eager),
            style="bold" if ours else "dim" if row.provider == YARDSTICK else None,
        )
    for row in case.rows:
        if row.value() is None:
            first = label if not case.ok and row is case.rows[0] else ""
            table.add_row(first, row.implementation, Text(row.status.replace("_", " "), style="dim"), style="dim")


def half_width(row: Row) -> str:
    """The larger half of the primary metric's interval, relative: `1.3%`."""
    value, (low, high) = row.value(), row.bounds()
    if not value or low is None or high is None:
        return units.DASH
    half = max(high - value, value - low) / value
    return _narrow(units.percent(half, 1)) if half < 1 else ">100%"


def _narrow(percentage: str) -> str:
    """Without the blank before the sign: columns are dear in a terminal."""
    return percentage.replace(" %", "%")


def _contest(contest: Contest) -> list[Text]:
    """Where operators of O(S) overtake attention: a heading, and two lines for each."""
    from rich.text import Text

    title = f"O(S) against O(S²) · {contest.side} · width {contest.width} · {contest.common}"
    parts = [Text(title, style="bold")]
    for other in contest.linear:
        parts.append(Text(f"  {other.name} against {contest.quadratic.name}"))
        for measure in MEASURES:
            if contest.crossing(other, measure) is not None:
                parts.append(Text(f"    {measure:7}{contest.told(other, measure)}"))
    for x in contest.series:
        if x.ended is not None:
            parts.append(Text(f"  {x.name}: {x.ended[1]} from S = {x.ended[0]:,} on", style="dim"))
    return parts


def _failure(failure: summary.Failure) -> Text:
    from rich.text import Text

    status = "lost replicates" if failure.status == "ok" else failure.status.replace("_", " ")
    grave = failure.status in ("incorrect", "crashed", "timeout", "error")
    text = Text(f"  {status}", style="red" if grave else "yellow" if failure.status == "ok" else "dim")
    names = f"{', '.join(failure.implementations)} in {', '.join(failure.operators)}"
    text.append(f" ×{len(failure.rows)}  {names}: ", style="default")
    text.append(failure.reason)
    return text


def _standings_table(standings: Iterable[summary.Standing]) -> Table:
    table = _table(f"{PROVIDER} against the fastest baseline of each case (geometric means)")
    table.add_column("operator", no_wrap=True)
    for name in ("cases", "vs best", "vs eager", "won", "undecided", "lost", "best", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    for x in standings:
        table.add_row(
            x.operator,
            str(len(x.compared)),
            units.ratio(x.versus_best),
            units.ratio(x.versus_eager),
            str(x.won),
            str(x.undecided),
            str(x.lost),
            units.ratio(x.best.speedup_vs_best_baseline if x.best else None),
            units.ratio(x.worst.speedup_vs_best_baseline if x.worst else None),
            style="bold" if x.operator == "all" else None,
        )
    return table


def compare_table(comparison: RunComparison) -> RenderableType:
    """Two runs: the conditions that differ, the rows that can be compared, and why the others cannot."""
    from rich.console import Group as Lines
    from rich.text import Text

    parts: list[RenderableType] = []
    for name, side in (("first ", comparison.first), ("second", comparison.second)):
        commit = (side.commit or "no commit")[:12] + (" + uncommitted changes" if side.dirty else "")
        parts.append(Text(f"{name} {side.run} · commit {commit} · key {side.key}", style="bold"))
    for x in comparison.differences:
        text = f"  {x.condition}: {units.value(x.first)} → {units.value(x.second)}"
        parts.append(Text(f"{text}", style="yellow"))
    sections: dict[tuple[str, str], list[RowComparison]] = {}
    compared = comparison.compared
    for row in compared[:MOST_ROWS]:
        sections.setdefault((row.operator, row.pass_), []).append(row)
    for (operator, pass_), found in sections.items():
        parts += [Text(), _comparison_table(f"{operator} · {pass_.replace('_', ' ')}", found)]
    parts += _left_out(len(compared) - MOST_ROWS, "kernelmark compare --json")
    parts += _not_compared(comparison)
    if compared:
        about = "Change: second over first, with its 95 % interval; of 100 unchanged rows about five leave out 0."
        parts += [Text(), Text(f"{len(compared)} rows compared. {about}", style="dim")]
    return Lines(*parts)


def _comparison_table(title: str, found: Iterable[RowComparison]) -> Table:
    from rich.text import Text

    table = _table(title)
    table.add_column("case", overflow="fold")
    table.add_column("implementation", no_wrap=True, min_width=14)
    for name, width in (("first ms", 8), ("second ms", 9), ("change", 7), ("95 % interval", 15)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    last = ""
    for row in found:
        bounds = units.DASH
        if row.ratio_low is not None and row.ratio_high is not None:
            low, high = (units.change(x).removesuffix(" %") for x in (row.ratio_low, row.ratio_high))
            bounds = f"[{low}, {high}]"
        clear = row.ratio_low is not None and row.ratio_high is not None
        clear = clear and not (row.ratio_low or 0) <= 1 <= (row.ratio_high or 0)
        name = row.case.removesuffix(f"-{row.pass_}") + ("" if row.cache == "cold" else f" ({row.cache})")
        table.add_row(
            name if name != last else "",
            row.implementation + ("*" if row.notes else ""),
            units.number(row.first_value),
            units.number(row.second_value),
            Text(_narrow(units.change(row.ratio)), style="bold" if clear else ""),
            bounds,
        )
        last = name
    return table


def _not_compared(comparison: RunComparison) -> list[RenderableType]:
    from rich.text import Text

    reasons: dict[str, int] = {}
    for row in comparison.rows:
        if row.outcome != "compared":
            reason = f"{row.outcome}: {row.reason}" if row.reason else row.outcome
            reasons[reason] = reasons.get(reason, 0) + 1
    notes = dict.fromkeys(f"{x.implementation}: {y}" for x in comparison.compared for y in x.notes)
    parts: list[RenderableType] = [Text(f"* {x}", style="dim") for x in list(notes)[:MOST_REASONS]]
    if reasons:
        parts += [Text(), Text("Not compared", style="bold")]
        parts += [Text(f"  ×{count}  {reason}") for reason, count in list(reasons.items())[:MOST_REASONS]]
    return parts
