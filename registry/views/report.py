"""The report: one HTML page that opens offline, with a run's answers first and everything behind them below.

matplotlib and Jinja2 come with the `registry` extra and are imported only here, when a page is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..analysis.ceilings import Ceilings
from ..analysis.rows import Row, category, rows, spent
from ..analysis.selection import EVERYTHING, Selection
from ..analysis.worth import Worth, worths
from ..errors import InputError
from ..store.journal import Journal
from ..store.metric import Metric, Ratio
from ..store.record import YARDSTICK
from . import charts, summary, units
from .charts import Series
from .comparison_table import RunComparison, compare
from .crossing import MEASURES, Contest, contests
from .grouping import CaseRows, Group, cases, columns, groups
from .worth_table import cells

STAGES = ("start", "ceilings", "build", "verify", "warm up", "calibrate", "sample", "summarize")
"""The stages of a run in their order, for the picture of how time was spent."""
MEASURING = ("build", "verify", "warm up", "sample")
"""What a run is for; its share of the time is the harness's efficiency."""
TIMERS = {
    "cupti": "CUPTI's record of the kernels: device time alone",
    "events": "CUDA events around a call queued behind a busy stream, so that launching is not in it",
    "graph": "replays of a CUDA graph that holds many calls, for kernels too short to time alone",
    "monotonic": "the host's monotonic clock around the call",
}


@dataclass(frozen=True)
class Chart:
    """Two drawings of a group: the primary metric, and fraction of the limit where one is known."""

    group: Group
    looks: tuple[Series, ...]
    primary: str
    fraction: str | None
    logarithmic: bool


@dataclass(frozen=True)
class Section:
    """One operator and pass: its charts and its rows."""

    operator: str
    pass_: str
    charts: tuple[Chart, ...]
    cases: tuple[tuple[str, CaseRows], ...]
    """Each with the text that tells it from the others of its group."""
    primary: Metric
    columns: tuple[Metric, ...]
    """The metrics beside the primary one that some row has."""
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Curve:
    """A metric over another, of one case. Drawn, never judged."""

    metric: Metric
    case: str
    drawing: str


@dataclass(frozen=True)
class Race:
    """Attention and operators of O(S) over the length of the sequence: drawings, and where they cross in words."""

    contest: Contest
    time: str | None
    memory: str | None

    @property
    def lines(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """An operator of O(S), and its crossing with attention in each of `MEASURES`."""
        return tuple((x.name, tuple(self.contest.told(x, y) for y in MEASURES)) for x in self.contest.linear)


@dataclass(frozen=True)
class Matrix:
    """One value by case and implementation: lines of (case, values, the best but for yardsticks)."""

    operator: str
    pass_: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, tuple[float | None, ...], float | None], ...]


@dataclass(frozen=True)
class Share:
    """A stage and what it took of the run's time."""

    stage: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Run:
    """Everything the page shows of one run."""

    anchor: str
    journal: Journal
    rows: tuple[Row, ...]
    device: str
    created: str
    commit: str
    warnings: tuple[str, ...]
    overall: summary.Standing
    standings: tuple[summary.Standing, ...]
    overview: str | None
    sections: tuple[Section, ...]
    races: tuple[Race, ...]
    worths: tuple[Worth, ...]
    speedups: tuple[tuple[CaseRows, Row], ...]
    matrices: tuple[tuple[Metric, tuple[Matrix, ...]], ...]
    shares: tuple[Share, ...]
    wall_s: float | None
    ceilings: Ceilings
    copy_chart: str | None
    failures: tuple[summary.Failure, ...]
    noise: float | None
    """Median over rows of the variation between processes."""

    @property
    def measured(self) -> int:
        """Rows with a value of their primary metric."""
        return sum(x.value() is not None for x in self.rows)

    @property
    def case_count(self) -> int:
        """Cases, each counted once per cache state."""
        return len(cases(self.rows))

    @property
    def implementations(self) -> int:
        """Names, yardsticks left out."""
        return len({x.implementation for x in self.rows if x.provider != YARDSTICK})

    @property
    def outside(self) -> float:
        """Share of the time outside building, verifying, warming up and sampling."""
        return 1 - sum(x.share for x in self.shares if x.stage in MEASURING)

    @property
    def timers(self) -> dict[str, str]:
        """Timers met, with what they are."""
        met = sorted({x.timer for x in self.rows if x.timer})
        return {x: TIMERS.get(x, "see the documentation of this timer") for x in met}


def render(journals: Sequence[Journal], selection: Selection = EVERYTHING) -> str:
    """The page for one run, or for several side by side, the first being what the others are compared with.

    Raises `InputError` without journals, or where the libraries of the `registry` extra are missing.
    """
    if not journals:
        raise InputError("a report needs at least one run.")
    try:
        import matplotlib  # noqa: F401  (asked for here, so that its absence is a message and no traceback)
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        message = f"a report needs {error.name}: pip install 'kernelmark[registry]'"
        raise InputError(message) from None

    all_rows = [selection.rows(rows(x)) for x in journals]
    looks = charts.palette(row for x in all_rows for row in x)
    runs = [_run(f"run{n}", x, y, looks) for n, (x, y) in enumerate(zip(journals, all_rows, strict=True), 1)]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
    page = environment.get_template("report.html").render(
        title=_title(runs),
        runs=runs,
        comparisons=[compare(journals[0], x, selection) for x in journals[1:]],
        looks=looks,
        categories=summary.CATEGORIES,
        category=category,
        worth_cells=cells,
        excludes_one=_excludes_one,
        wide=_wide,
        incomparable=_incomparable,
        dash=units.DASH,
    )
    return page.strip() + "\n"


_FILTERS: dict[str, Callable[..., str]] = {
    "number": units.number,
    "ratio": units.ratio,
    "percent": units.percent,
    "change": units.change,
    "size": units.size,
    "measured": units.measured,
    "heading": lambda x: units.heading(x)[:1].upper() + units.heading(x)[1:],
    "seconds": units.seconds,
    "condition": units.value,
    "slug": lambda x: x.replace(" ", "-"),
    "words": lambda x: x.replace("_", " "),
}


def _title(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return f"kernelmark: {runs[0].device}, {runs[0].created}"
    return f"kernelmark: {len(runs)} runs side by side"


def _run(anchor: str, journal: Journal, found: tuple[Row, ...], looks: dict[str, Series]) -> Run:
    header = journal.header
    ceilings = Ceilings.of(journal.ceilings)
    standings = summary.standings(found)
    speedups = tuple(
        (case, case.ours)
        for case in cases(found)
        if case.ours is not None and case.ours.speedup_vs_best_baseline is not None
    )
    overview = charts.overview(
        [(x.operator, x.versus_best, x.compared) for x in standings if x.compared], f"{anchor}-overview"
    )
    variations = [y.cv_between for x in found if (y := x.get()) is not None and y.cv_between is not None]
    seconds = _seconds(journal)
    return Run(
        anchor=anchor,
        journal=journal,
        rows=found,
        device=summary.device_name(header),
        created=units.moment(header.created),
        commit=summary.commit(header),
        warnings=summary.warnings(journal, found),
        overall=summary.overall(found),
        standings=standings,
        overview=overview,
        sections=_sections(journal, found, looks, anchor),
        races=_races(journal, found, looks, anchor),
        worths=worths(journal),
        speedups=speedups,
        matrices=tuple((x, _matrices(found, looks, x)) for x in header.metrics if _compared(x, found)),
        shares=_shares(seconds),
        wall_s=sum(x.wall_s for x in journal.footers) or None,
        ceilings=ceilings,
        copy_chart=charts.copy_curve(ceilings.copy_ms, f"{anchor}-copy"),
        failures=summary.failures(found),
        noise=median(variations) if variations else None,
    )


def _sections(
    journal: Journal, found: Sequence[Row], looks: dict[str, Series], anchor: str
) -> tuple[Section, ...]:
    by_section: dict[tuple[str, str], list[Group]] = {}
    for group in groups(found):
        by_section.setdefault((group.operator, group.pass_), []).append(group)
    out = []
    for (operator, pass_), parts in by_section.items():
        drawn = []
        for number, group in enumerate(parts):
            salt = f"{anchor}-{operator}-{pass_}-{number}"
            primary = charts.primary(group, looks, f"{salt}-primary")
            if primary is not None:
                names = {x.implementation for case in group.cases for x in case.ok}
                shown = tuple(x for x in looks.values() if x.name in names)
                fraction = charts.fraction(group, looks, f"{salt}-fraction")
                drawn.append(Chart(group, shown, primary, fraction, charts.logarithmic(group)))
        labelled = [
            (f"{label} · {x.common}" if x.common else label, case)
            for x in parts
            for label, case in zip(x.labels, x.cases, strict=True)
        ]
        mine = [row for _, case in labelled for row in case.rows]
        metric = journal.metric(mine[0].primary)
        beside = columns(mine, journal.header.metrics)
        lines = _curves(journal, [case for _, case in labelled], looks, f"{anchor}-{operator}")
        out.append(Section(operator, pass_, tuple(drawn), tuple(labelled), metric, beside, lines))
    return tuple(out)


def _curves(journal: Journal, found: Sequence[CaseRows], looks: dict[str, Series], salt: str) -> tuple[Curve, ...]:
    """The curves of these cases: at each place of the abscissa the median over replicates."""
    out = []
    for metric in (x for x in journal.header.metrics if x.abscissa is not None):
        for number, case in enumerate(found):
            points: dict[str, dict[float, list[float]]] = {}
            for record in journal.records:
                row = (record.case.operator, record.case.name, record.cache)
                if record.measurement is None or row != (case.operator, case.name, case.first.cache):
                    continue
                places = record.measurement.samples.get(str(metric.abscissa), ())
                values = record.measurement.samples.get(metric.name, ())
                for place, value in zip(places, values, strict=False):
                    points.setdefault(record.implementation, {}).setdefault(place, []).append(value)
            if points:
                middles = {x: {place: median(y) for place, y in line.items()} for x, line in points.items()}
                text = f"{metric.name} of {case.operator} {case.name} over {metric.abscissa}"
                drawing = charts.curves(middles, looks, f"{salt}-{metric.name}-{number}", text)
                out.append(Curve(metric, case.name, drawing))
    return tuple(out)


def _compared(metric: Metric, found: Sequence[Row]) -> bool:
    """Whether a metric is compared between implementations in tables of its own: one that is judged by its ratio,
    within processes, and is not what the cases are about.
    """
    by = metric.judged
    apart = isinstance(by, Ratio) and by.test != "separation"
    return apart and any(metric.name != x.primary for x in found)


def _races(journal: Journal, found: Sequence[Row], looks: dict[str, Series], anchor: str) -> tuple[Race, ...]:
    return tuple(
        Race(
            contest,
            charts.over_lengths(contest, "time", looks, f"{anchor}-crossing-{number}-time"),
            charts.over_lengths(contest, "memory", looks, f"{anchor}-crossing-{number}-memory"),
        )
        for number, contest in enumerate(contests(journal, found))
    )


def _matrices(found: Iterable[Row], looks: dict[str, Series], metric: Metric) -> tuple[Matrix, ...]:
    sections: dict[tuple[str, str], list[CaseRows]] = {}
    for case in cases(found):
        sections.setdefault((case.operator, case.pass_), []).append(case)
    out = []
    for (operator, pass_), parts in sections.items():
        present = {x.implementation for case in parts for x in case.rows if metric.name in x.metrics}
        columns = tuple(x for x in looks if x in present)
        lines = []
        for case in parts:
            by_name = {x.implementation: x.value(metric.name) for x in case.rows}
            values = tuple(by_name.get(x) for x in columns)
            known = [by_name[x.implementation] for x in case.rows if x.provider != YARDSTICK]
            if any(x is not None for x in values):
                least = max if metric.better == "higher" else min
                best = least((x for x in known if x is not None), default=None)
                lines.append((case.name, values, best))
        if lines:
            out.append(Matrix(operator, pass_, columns, tuple(lines)))
    return tuple(out)


def _seconds(journal: Journal) -> dict[str, float]:
    """Seconds by stage; of a killed run, which has no footer, what its records say."""
    found = spent(journal)
    if not found:
        for record in journal.records:
            for stage, seconds in record.spent_s.items():
                found[stage] = found.get(stage, 0.0) + seconds
    return found


def _shares(seconds: dict[str, float]) -> tuple[Share, ...]:
    total = sum(seconds.values())
    known = [*(x for x in STAGES if x in seconds), *(x for x in seconds if x not in (*STAGES, "overhead"))]
    if "overhead" in seconds:
        known.append("overhead")
    return tuple(Share(x, seconds[x], seconds[x] / total) for x in known) if total > 0 else ()


def _excludes_one(low: float | None, high: float | None) -> bool:
    return low is not None and high is not None and (low > 1 or high < 1)


def _wide(low: float, high: float) -> bool:
    """Whether an interval says nothing: two noisy replicates give bounds of many digits."""
    return low <= 0 or high / low > 100


def _incomparable(comparison: RunComparison) -> dict[str, Any]:
    """Rows without a ratio: why, how many, and which, gathered by reason."""
    out: dict[str, Any] = {}
    for row in comparison.rows:
        if row.outcome != "compared":
            reason = f"{row.outcome}: {row.reason}" if row.reason else row.outcome
            out.setdefault(reason, []).append(f"{row.operator} {row.case} {row.implementation}")
    return out
