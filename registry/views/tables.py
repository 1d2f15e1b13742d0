"""A run as a page for a terminal, readable at 80 columns and in a log file."""

from __future__ import annotations

from collections.abc import Sequence

from .. import figures
from ..analysis.peers import standing_alone
from ..analysis.rows import BANDWIDTH, DERIVED, THROUGHPUT, Row, category, rows
from ..analysis.selection import EVERYTHING, Selection
from ..store.journal import Journal
from ..store.metric import LATENCY, LAUNCH, Metric
from ..store.record import PROVIDER, YARDSTICK, Header
from . import rivals, summary
from .convergence_table import convergence_table
from .crossing import MEASURES, Contest, contests
from .grouping import CaseRows, Group, columns, groups
from .own_step_table import own_step_table
from .scaling_table import each_table, scaling_table
from .slices_table import slices_table
from .table import Block, Column, Line, Page, Table, Text, line
from .worth_table import worth_table

MOST_REASONS = 100
"""Nobody reads further, and a journal of somebody else may have one for each of its lines."""
CASE_WIDTH = 20
"""Characters below which a case's name is not folded."""
_STYLES = {"excellent": "bold green", "good": "green", "faster": "green", "slower": "red"}


def run_table(journal: Journal, selection: Selection = EVERYTHING, repeated: str = "") -> Page:
    """A run: where it was made, a table a group of cases, what did not end well, and how ours stands. `repeated`
    says whether another team measured it again.

    Raises `InputError` if the run has no row that `selection` asks for.
    """
    found = rows(journal)
    header = journal.header
    facts = (header.run, summary.device_name(header), f"plan {header.plan}", f"commit {summary.commit(header)}")
    page: list[Block] = [
        line(" · ".join(facts), style="bold"),
        line(" · ".join(x for x in (f"comparability key {header.key}", repeated) if x), style="dim"),
    ]
    page += [line(f"! {x}", style="yellow") for x in summary.warnings(journal, found)]
    if not found:
        return [*page, line("Nothing was measured.")]
    found = selection.rows(found)
    compared = standing_alone(journal, found) or found  # all, where a selection is of nothing else
    for group in groups(compared):
        if any(case.ok for case in group.cases):
            page += [line(""), _group_table(group, header.metrics)]
    for contest in contests(journal, found):
        page += [line(""), *_contest(contest)]
    if selection.everything and (worth := worth_table(journal)):
        page += [line(""), *worth]
    if selection.everything and (own := own_step_table(journal)):
        page += [line(""), *own]
    if selection.everything and (converged := convergence_table(journal)):
        page += [line(""), *converged]
    if scaled := scaling_table(found):
        page += [line(""), scaled]
    if selection.everything and (each := each_table(journal)):
        page += [line(""), each]
    if selection.everything and (slices := slices_table(journal)):
        page += [line(""), *slices]
    if lost := summary.failures(found):
        page += [line(""), line("Skipped or failed", style="bold")]
        page += [_failure(x) for x in lost[:MOST_REASONS]]
        page += _left_out(len(lost) - MOST_REASONS, f"kernelmark show {header.run} --json")
    standings = [x for x in summary.standings(compared) if x.compared]
    if standings:
        total = [summary.overall(compared)] if len(standings) > 1 else []
        page += [line(""), _standings_table([*standings, *total], _over_nccl(standings, header))]
    return page


def _left_out(count: int, command: str) -> list[Block]:
    return [line(f"and {figures.counted(count, 'reason')} more: {command}", style="dim")] if count > 0 else []


def _group_table(group: Group, metrics: Sequence[Metric]) -> Table:
    found = [x for case in group.cases for x in case.ok]
    primary = next((x for x in metrics if x.name == found[0].primary), Metric(found[0].primary, ""))
    beside = columns(found, metrics, terminal=True)
    if THROUGHPUT in beside:  # one rate is enough in a terminal: operations where the case has any, else bytes
        beside = tuple(x for x in beside if x != BANDWIDTH)
    limit = any(x.fraction_of_limit is not None for x in found)
    # A narrow terminal drops what was measured beside the primary metric, the last first, then the rates, "vs
    # eager", "limit" and "±". "vs best" stays.
    table = Table(
        (
            Column("case", folds=CASE_WIDTH),
            Column("implementation"),
            Column(_short(primary), number=True),
            Column("±", number=True, drop=1),
            *(Column(_short(x), number=True, drop=_drop(x, i)) for i, x in enumerate(beside)),
            *((Column("limit", number=True, drop=2),) if limit else ()),
            Column("vs best", number=True),
            Column("vs eager", number=True, drop=3),
        ),
        " · ".join(x for x in (group.operator, group.pass_.replace("_", " "), group.common) if x),
    )
    for label, case in zip(group.labels, group.cases, strict=True):
        _add_case(table, label, case, beside, limit)
    return table


def _short(metric: Metric) -> str:
    """A column's heading in a terminal: a quantity that its unit says is not named."""
    return metric.unit if metric in (LATENCY, *DERIVED) else metric.heading


def _drop(metric: Metric, place: int) -> int:
    """How soon a narrow terminal leaves a metric out. Launches are there for short rows alone and stay longest."""
    return 1 if metric.name == LAUNCH.name else 4 if metric in DERIVED else 5 + place


def _add_case(table: Table, label: str, case: CaseRows, beside: Sequence[Metric], limit: bool) -> None:
    for place, row in enumerate(case.ok):
        ours = row.provider == PROVIDER
        standing = _STYLES.get(category(row) or "", "") if ours else ""
        table.add(
            label if place == 0 else "",
            row.implementation + ("*" if row.throttled or row.converged is False else ""),
            figures.number(row.value()),
            half_width(row),
            *(figures.measured(row.value(x.name), x.unit) for x in beside),
            *([narrow(figures.percent(row.fraction_of_limit)) + "!" * bool(row.above_limit)] if limit else []),
            Text(figures.ratio(row.speedup_vs_best_baseline), standing),
            figures.ratio(row.speedup_vs_eager),
            style="bold" if ours else "dim" if row.provider == YARDSTICK else "",
        )
    for row in case.rows:
        if row.value() is None:
            first = label if not case.ok and row is case.rows[0] else ""
            table.add(first, row.implementation, row.status.replace("_", " "), style="dim")


def half_width(row: Row) -> str:
    """The larger half of the primary metric's interval, relative: `1.3%`."""
    value, (low, high) = row.value(), row.bounds()
    if not value or low is None or high is None:
        return figures.DASH
    half = max(high - value, value - low) / value
    return narrow(figures.percent(half, 1)) if half < 1 else ">100%"


def narrow(percentage: str) -> str:
    """Without the blank before the sign: columns are dear in a terminal."""
    return percentage.replace(" %", "%")


def _contest(contest: Contest) -> list[Line]:
    """Where operators of O(S) overtake attention: a heading, and two lines for each."""
    title = f"O(S) against O(S²) · {contest.side} · width {contest.width} · {contest.common}"
    parts = [line(title, style="bold")]
    for other in contest.linear:
        parts.append(line(f"  {other.name} against {contest.quadratic.name}"))
        for measure in MEASURES:
            if contest.crossing(other, measure) is not None:
                parts.append(line(f"    {measure:7}{contest.told(other, measure)}"))
    for x in contest.series:
        if x.ended is not None:
            parts.append(line(f"  {x.name}: {x.ended[1]} from S = {x.ended[0]:,} on", style="dim"))
    return parts


def _failure(failure: summary.Failure) -> Line:
    status = "lost replicates" if failure.status == "ok" else failure.status.replace("_", " ")
    grave = failure.status in ("incorrect", "crashed", "timeout", "error")
    style = "red" if grave else "yellow" if failure.status == "ok" else "dim"
    names = f"{', '.join(failure.implementations)} in {', '.join(failure.operators)}"
    return line(Text(f"  {status}", style), f" ×{len(failure.rows)}  {names}: {failure.reason}")


def _over_nccl(standings: Sequence[summary.Standing], header: Header) -> str:
    """What NCCL is where it is the fastest of a case; empty where it is of none."""
    best = (row.best_baseline for x in standings for row in x.compared)
    return f"; × {rivals.OFF}" if rivals.warning(best, header.conditions) else ""


def _standings_table(standings: Sequence[summary.Standing], over: str) -> Table:
    names = " and ".join(dict.fromkeys(y for x in standings for y in x.names))
    # What a narrow terminal drops: "vs eager", then "best" and "worst". A ratio of single processes is no verdict.
    single = any(x.single for x in standings)
    table = Table(
        (
            Column("operator"),
            Column("cases", number=True),
            Column("vs best", number=True),
            Column("vs eager", number=True, drop=3),
            *(Column(x, number=True) for x in ("faster", "undecided", "slower")),
            *([Column("one process", number=True)] if single else []),
            Column("best", number=True, drop=1),
            Column("worst", number=True, drop=2),
        ),
        f"{names} against the fastest baseline of each case (geometric means{over})",
    )
    for x in standings:
        table.add(
            x.operator,
            str(len(x.compared)),
            figures.ratio(x.versus_best),
            figures.ratio(x.versus_eager),
            *map(str, (x.faster, x.undecided - x.single, x.slower)),
            *([str(x.single)] if single else []),
            figures.ratio(x.best.speedup_vs_best_baseline if x.best else None),
            figures.ratio(x.worst.speedup_vs_best_baseline if x.worst else None),
            style="bold" if x.operator == "all" else "",
        )
    return table
