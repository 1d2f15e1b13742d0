"""The report: one HTML page that opens offline, with a run's answers first and everything behind them below.

Jinja2 comes with the `registry` extra and is imported only here, when a page is made. The page's only script is
report.js, and the page lets no other run: its policy names the script's hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from .. import figures
from ..analysis.ceilings import Ceilings
from ..analysis.peers import peers, standing_alone
from ..analysis.releases import releases
from ..analysis.releases import told as aged
from ..analysis.repeated import said
from ..analysis.rows import Row, Value, category, rows, spent
from ..analysis.selection import EVERYTHING, Selection
from ..analysis.slices import Sliced, sliced
from ..analysis.speedups import excludes_one
from ..analysis.worth import Worth, worths
from ..detection.arms import arms
from ..errors import InputError
from ..store.journal import Journal
from ..store.metric import OPERATOR_METRICS, PEAKS, Metric, Ratio
from ..store.record import PROVIDER, YARDSTICK
from . import charts, convergence_table, lines, over_gpus, serving, slices_table, strips, summary
from .answer import Answer, answer
from .canvas import Axis, marker
from .comparison_table import RunComparison, compare
from .convergence import Convergence, convergences, layer_cells
from .crossing import MEASURES, Contest, contests
from .grouping import CaseRows, Group, cases, columns, goodness, groups
from .looks import Series, apart, palette
from .monitor import Monitored, monitored
from .sizes import Sweep, sweeps
from .worth_table import cells, missing

STAGES = ("start", "ceilings", "build", "verify", "warm up", "calibrate", "sample", "summarize")
"""The stages of a run in their order, for the picture of how time was spent."""
MEASURING = ("build", "verify", "warm up", "sample")
"""What a run is for; its share of the time is the harness's efficiency."""
LEAST_TOLD = 0.0005
"""Half an interval that is printed, as a share of its value."""
MOST_OPEN = 2
"""Lines over sizes of an operator and pass that are not folded."""
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
class Line:
    """Drawings over a size: the primary metric, the fraction of the limit where one is known, and of a whole
    program its tokens a second and its peak memory.
    """

    sweep: Sweep
    looks: tuple[Series, ...]
    primary: str
    fraction: str | None
    beside: tuple[tuple[Metric, str], ...]


@dataclass(frozen=True)
class Section:
    """One operator, pass and metric that cases are judged by: its charts and its rows."""

    operator: str
    pass_: str
    lines: tuple[Line, ...]
    charts: tuple[Chart, ...]
    cases: tuple[tuple[str, CaseRows], ...]
    """Each with the text that tells it from the others of its group."""
    primary: Metric
    columns: tuple[Metric, ...]
    """The metrics beside the primary one that some row has."""
    curves: tuple[Curve, ...]

    @property
    def versions(self) -> tuple[tuple[str, str, bool], ...]:
        """Implementations, their libraries' versions, and whether they are others'; each once."""
        found = (
            (x.implementation, x.version, x.provider != PROVIDER) for _, case in self.cases for x in case.rows
        )
        return tuple(
            dict.fromkeys((name, version, others) for name, version, others in found if version is not None)
        )


@dataclass(frozen=True)
class Curve:
    """A metric over another, of one case. Drawn, never judged."""

    metric: Metric
    case: str
    looks: tuple[Series, ...]
    drawing: str

    @property
    def over(self) -> str:
        """What it is over, in words: `loss_step` of `loss` is the step."""
        own = str(self.metric.abscissa).removeprefix(f"{self.metric.name}_").replace("_", " ")
        return "time" if own == "at" else own


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
    """One value by case and implementation: lines of (case, values, which is best beyond its interval)."""

    operator: str
    pass_: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, tuple[float | None, ...], str | None], ...]
    """The last is the implementation whose interval lies apart from those of all others."""


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
    repeated: str
    """Whether another team measured it again, and how that went."""
    warnings: tuple[str, ...]
    overall: summary.Standing
    standings: tuple[summary.Standing, ...]
    answer: Answer
    sections: tuple[Section, ...]
    races: tuple[Race, ...]
    scalings: tuple[over_gpus.Scaling, ...]
    slices: tuple[Sliced, ...]
    serving: serving.Pictures
    worths: tuple[Worth, ...]
    convergences: tuple[Convergence, ...]
    speedups: tuple[tuple[CaseRows, Row], ...]
    matrices: tuple[tuple[Metric, tuple[Matrix, ...]], ...]
    shares: tuple[Share, ...]
    monitored: Monitored
    wall_s: float | None
    ceilings: Ceilings
    copy_chart: str | None
    rooflines: tuple[tuple[str, str], ...]
    """Drawings by dtype."""
    against: Mapping[str, Any]
    """Ours against each baseline, as `report.js` reads it."""
    failures: tuple[summary.Failure, ...]
    noise: float | None
    """Median over rows of the variation between processes."""

    @property
    def measured(self) -> int:
        """Rows with a value of their primary metric."""
        return sum(x.value() is not None for x in self.rows)

    @cached_property
    def axis(self) -> Axis | None:
        """That of the strips."""
        return strips.axis(x for y in self.standings for x in y.compared)

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


def render(
    journals: Sequence[Journal], selection: Selection = EVERYTHING, verifications: Sequence[Journal] = ()
) -> str:
    """The page for one run, or for several side by side, the first being what the others are compared with.
    `verifications` are the runs that are known to verify any of them.

    Raises `InputError` without journals, or where the libraries of the `registry` extra are missing.
    """
    if not journals:
        raise InputError("a report needs at least one run.")
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        message = f"a report needs {error.name}: pip install 'kernelmark[registry]'"
        raise InputError(message) from None

    all_rows = [selection.rows(rows(x)) for x in journals]
    looks = palette(row for x in all_rows for row in x)
    runs = [
        _run(f"run{n}", x, y, looks, said(x, verifications), journals)
        for n, (x, y) in enumerate(zip(journals, all_rows, strict=True), 1)
    ]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
    script = (Path(__file__).parent / "report.js").read_text(encoding="utf-8")
    page = environment.get_template("report.html").render(
        title=_title(runs),
        runs=runs,
        comparisons=[compare(journals[0], x, selection) for x in journals[1:]],
        looks=looks,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        baselines=sorted({x for run in runs for x in run.against["names"]}),
        most_open=MOST_OPEN,
        operator_colours=lines.OPERATORS,
        numbers={x: i for i, x in enumerate(looks)},
        drawn_mark=lambda look: marker(0, 0, look.colour, look.shape, 10, look.fill),
        strip=strips.strip,
        strip_head=strips.head,
        goodness=goodness,
        category=category,
        worth_cells=cells,
        worth_missing=missing,
        slice_headings=slices_table.HEADINGS,
        slice_cells=slices_table.cells,
        slices_missing=slices_table.missing,
        slices_about=slices_table.ABOUT,
        convergence_headings=convergence_table.HEADINGS,
        convergence_about=convergence_table.ABOUT,
        layer_cells=layer_cells,
        excludes_one=excludes_one,
        wide=figures.wide,
        releases=releases(),
        incomparable=_incomparable,
        dash=figures.DASH,
    )
    return page.strip() + "\n"


def _give_or_take(value: Value | None) -> str:
    """The larger half of a value's interval, relative; nothing where there is none, or none worth a word."""
    low, high = value.interval if value else (None, None)
    if value is None or low is None or high is None or value.value <= 0:
        return ""
    half = max(high - value.value, value.value - low) / value.value
    return f" ± {figures.percent(half, 1)}" if half >= LEAST_TOLD else ""


_FILTERS: dict[str, Callable[..., str]] = {
    "number": figures.number,
    "ratio": figures.ratio,
    "percent": figures.percent,
    "give_or_take": _give_or_take,
    "change": figures.change,
    "size": figures.size,
    "measured": figures.measured,
    "heading": lambda x: x.heading[:1].upper() + x.heading[1:],
    "seconds": figures.seconds,
    "condition": figures.value,
    "slug": lambda x: x.replace(" ", "-"),
    "words": lambda x: x.replace("_", " "),
    "titled": figures.titled,
    "embedded": lambda x: _embedded(x),
    "counted": figures.counted,
    "aged": aged,
}


def _embedded(what: Any) -> str:
    """JSON for inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(what, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _title(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return f"kernelmark: {runs[0].device}, {runs[0].created}"
    return f"kernelmark: {len(runs)} runs side by side"


def _run(
    anchor: str,
    journal: Journal,
    found: tuple[Row, ...],
    looks: dict[str, Series],
    repeated: str,
    journals: Sequence[Journal],
) -> Run:
    header = journal.header
    ceilings = Ceilings.of(journal.ceilings)
    alone = standing_alone(journal, found) or found  # all, where a selection is of nothing else
    standings = summary.standings(alone)
    speedups = tuple(
        (case, case.ours)
        for case in cases(alone)
        if case.ours is not None and case.ours.speedup_vs_best_baseline is not None
    )
    overall, raced, exchanged = summary.overall(alone), contests(journal, found), worths(journal)
    trained = arms(journal)
    variations = [y.cv_between for x in found if (y := x.get()) is not None and y.cv_between is not None]
    seconds = _seconds(journal)
    return Run(
        anchor=anchor,
        journal=journal,
        rows=found,
        device=summary.device_name(header),
        created=figures.moment(header.created),
        commit=summary.commit(header),
        repeated=repeated,
        warnings=summary.warnings(journal, found),
        overall=overall,
        standings=standings,
        answer=answer(found, overall, raced, exchanged, trained),
        sections=_sections(journal, alone, looks),
        races=_races(raced),
        scalings=over_gpus.scalings(journal, found, looks),
        slices=sliced(journal),
        serving=serving.pictures(found, serving.spreads(journal), looks, tried=serving.probes(journal)),
        worths=exchanged,
        convergences=convergences(journal, looks, journals) if found else (),
        speedups=speedups,
        matrices=tuple((x, _matrices(alone, looks, x)) for x in header.metrics if _compared(x, alone)),
        shares=_shares(seconds),
        monitored=monitored(journal),
        wall_s=journal.elapsed_s,
        ceilings=ceilings,
        copy_chart=lines.copy_curve(ceilings.copy_ms),
        rooflines=_rooflines(alone, ceilings, looks),
        against=_against(journal, found, speedups, list(looks)),
        failures=summary.failures(found),
        noise=median(variations) if variations else None,
    )


def _rooflines(found: Sequence[Row], ceilings: Ceilings, looks: dict[str, Series]) -> tuple[tuple[str, str], ...]:
    grouped = cases(found)
    drawn = ((x, lines.roofline(x, grouped, ceilings, looks)) for x in ceilings.matmul_flops_per_ms)
    return tuple((dtype, drawing) for dtype, drawing in drawn if drawing is not None)


def _against(
    journal: Journal,
    found: Sequence[Row],
    speedups: Sequence[tuple[CaseRows, Row]],
    looks: Sequence[str],
) -> Mapping[str, Any]:
    """Names of baselines with their places among the looks, and for each case of ours that has one its operator,
    name, fastest baseline and ours over each.
    """
    known = peers(journal, found)
    names = sorted({x for _, row in speedups for x in known.get(row.identity, {})})
    numbers = {x: i for i, x in enumerate(names)}
    return {
        "names": names,
        "looks": [looks.index(x) for x in names],
        "cases": [
            {
                "operator": case.operator,
                "case": case.name,
                "best": numbers.get(row.best_baseline or "", -1),
                "ratios": {numbers[x]: y for x, y in known.get(row.identity, {}).items()},
            }
            for case, row in speedups
        ],
    }


def _sections(journal: Journal, found: Sequence[Row], looks: dict[str, Series]) -> tuple[Section, ...]:
    by_section: dict[tuple[str, str, str], list[Group]] = {}
    for group in groups(found):
        by_section.setdefault((group.operator, group.pass_, group.cases[0].first.primary), []).append(group)
    out = []
    for (operator, pass_, _), parts in by_section.items():
        mine = [row for x in parts for case in x.cases for row in case.rows]
        metric = journal.metric(mine[0].primary)
        beside = columns(mine, journal.header.metrics)
        drawn = []
        for group in parts:
            primary = charts.primary(group, looks)
            if primary is not None:
                shown = _shown(group.cases, looks)
                drawn.append(
                    Chart(group, shown, primary, charts.fraction(group, looks), charts.logarithmic(group))
                )
        over = []
        for sweep in sweeps((case for x in parts for case in x.cases), journal.header.request.parameters):
            primary = lines.over_sizes(sweep, looks)
            if primary is not None:
                shown = _shown((x for _, x in sweep.cases), looks)
                share = lines.over_sizes(sweep, looks, limits=True)
                over.append(Line(sweep, shown, primary, share, _beside(sweep, looks, pass_, beside)))
        labelled = [
            (f"{label} · {x.common}" if x.common else label, case)
            for x in parts
            for label, case in zip(x.labels, x.cases, strict=True)
        ]
        curves = _curves(journal, [case for _, case in labelled], looks)
        out.append(Section(operator, pass_, tuple(over), tuple(drawn), tuple(labelled), metric, beside, curves))
    return tuple(out)


def _beside(
    sweep: Sweep, looks: dict[str, Series], pass_: str, found: Iterable[Metric]
) -> tuple[tuple[Metric, str], ...]:
    """Of a whole program: tokens a second and peak memory over its sizes, where two of them are known."""
    asked = [
        x for x in found if pass_ == "program" and ((x.unit, x.shown) == ("tokens/s", "table") or x.name in PEAKS)
    ]
    drawings = ((x, lines.over_sizes(sweep, looks, metric=x.name)) for x in asked)
    return tuple((metric, drawing) for metric, drawing in drawings if drawing is not None)


def _shown(found: Iterable[CaseRows], looks: dict[str, Series]) -> tuple[Series, ...]:
    """The looks that a chart of these cases needs a legend for."""
    names = {x.implementation for case in found for x in case.ok}
    return tuple(x for x in looks.values() if x.name in names)


def _curves(journal: Journal, found: Sequence[CaseRows], looks: dict[str, Series]) -> tuple[Curve, ...]:
    """The curves of these cases: at each place the median over replicates, in a band that holds them all."""
    out = []
    for metric in (x for x in journal.header.metrics if x.abscissa is not None):
        for case in found:
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
                bands = {
                    x: {place: (min(y), median(y), max(y)) for place, y in line.items()}
                    for x, line in points.items()
                }
                text = f"{metric.name} of {case.operator} {case.name} over {metric.abscissa}"
                distinct = apart(looks[x] for x in looks if x in bands)
                drawing = lines.curves(bands, distinct, text)
                out.append(Curve(metric, case.name, tuple(distinct.values()), drawing))
    return tuple(out)


def _compared(metric: Metric, found: Sequence[Row]) -> bool:
    """Whether a metric is compared between implementations in tables of its own: one that is judged by its ratio,
    within processes, and is not what the cases are about. One of a workload that no row has is not of its cases.
    """
    by = metric.judged
    apart = isinstance(by, Ratio) and by.test != "separation"
    known = metric in OPERATOR_METRICS or any(metric.name in x.metrics for x in found)
    return apart and known and any(metric.name != x.primary for x in found)


def _races(found: Sequence[Contest]) -> tuple[Race, ...]:
    return tuple(Race(x, lines.over_lengths(x, "time"), lines.over_lengths(x, "memory")) for x in found)


def _matrices(found: Iterable[Row], looks: dict[str, Series], metric: Metric) -> tuple[Matrix, ...]:
    sections: dict[tuple[str, str], list[CaseRows]] = {}
    for case in cases(found):
        sections.setdefault((case.operator, case.pass_), []).append(case)
    out = []
    for (operator, pass_), parts in sections.items():
        present = {x.implementation for case in parts for x in case.rows if metric.name in x.metrics}
        columns = tuple(x for x in looks if x in present)
        told = []
        for case in parts:
            by_name = {x.implementation: x.value(metric.name) for x in case.rows}
            values = tuple(by_name.get(x) for x in columns)
            if any(x is not None for x in values):
                told.append((case.name, values, _clearly_best(case, metric)))
        if told:
            out.append(Matrix(operator, pass_, columns, tuple(told)))
    return tuple(out)


def _clearly_best(case: CaseRows, metric: Metric) -> str | None:
    """The implementation whose interval of a metric lies on the better side of those of all the others."""
    known = [x for x in case.rows if x.provider != YARDSTICK and x.value(metric.name) is not None]
    sign = -1 if metric.better == "higher" else 1
    known.sort(key=lambda x: sign * (x.value(metric.name) or 0))
    if len(known) < 2:
        return None
    first, second = (sorted(sign * y for y in x.bounds(metric.name) if y is not None) for x in known[:2])
    return known[0].implementation if first and second and first[-1] < second[0] else None


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


def _incomparable(comparison: RunComparison) -> dict[str, Any]:
    """Rows without a ratio: why, how many, and which, gathered by reason."""
    out: dict[str, Any] = {}
    for row in comparison.rows:
        if row.outcome != "compared":
            reason = f"{row.outcome}: {row.reason}" if row.reason else row.outcome
            out.setdefault(reason, []).append(f"{row.operator} {row.case} {row.implementation}")
    return out
