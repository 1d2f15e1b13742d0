"""The site's pages as text. What they show is made here and in the modules beside; every value is escaped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .. import figures
from ..analysis.rows import rows
from ..analysis.speedups import excludes_one
from ..analysis.worth import worths
from ..errors import InputError
from ..escape import CONTROL
from ..store.journal import Journal
from ..views import serving
from ..views.canvas import marker
from ..views.grouping import groups
from ..views.looks import Series, palette
from ..views.monitor import monitored
from ..views.worth_table import HEADINGS, cells
from . import data, drawing
from .coverage import Coverage, Expected
from .facts import Fact, Run, file_name
from .feeds import Event
from .repetition import summed
from .scaling import Step, curves, worlds
from .servers import Served
from .sizes import Swept, glances, page_of, part_name
from .standing import OUTCOMES, CaseStanding, Standing
from .timeline import Line

RECENT = 12
"""Runs and changes on the first page."""
WORKLOADS = "workloads"
"""The family of what is no operator."""


@dataclass(frozen=True)
class CaseView:
    """A case of an operator's page: its label, where it stands, its rows in order of value, and their lines."""

    label: str
    standing: CaseStanding
    rows: tuple[RowView, ...]
    failed: Mapping[tuple[str, str, str], Sequence[RowView]]
    """Rows without a value, by their status, its reason and their run."""
    chart: int | None

    @property
    def history(self) -> Line | None:
        """Ours over its runs."""
        ours = self.standing.ours
        return next((x.line for x in self.rows if ours and x.fact.implementation == ours[1].implementation), None)


@dataclass(frozen=True)
class RowView:
    """An implementation's newest fact with its run and its line over time."""

    run: Run
    fact: Fact
    line: Line | None


class Pages:
    """Renders pages of one site. `built` is the time of the newest run; `journals` where journals lie: empty for
    beside the pages, None for nowhere. `repeated` says of each run whether another team measured it again.
    """

    def __init__(
        self,
        title: str,
        built: str,
        journals: str | None = None,
        repeated: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.title = title
        self.built = built
        self.journals = journals
        self.repeated = repeated
        self._environment = _environment()

    def _render(self, template: str, root: str, **values: Any) -> str:
        shared: dict[str, Any] = {
            "title": self.title,
            "built": self.built,
            "root": root,
            "journals": self.journals,
        }
        shared |= {"repeated": self.repeated, "repetition": summed([*self.repeated.values()])}
        text: str = self._environment.get_template(template).render(shared | values)
        return text

    def overview(
        self,
        runs: Sequence[Run],
        rows: int,
        standings: Mapping[str, Sequence[Standing]],
        expected: Mapping[str, Expected],
        lines: Mapping[str, Sequence[Line]],
        events: Sequence[Event],
    ) -> str:
        """The first page: devices by operators, changes, the newest runs."""
        newest = sorted(runs, key=lambda x: x.created, reverse=True)
        of_device = {device: {x.operator: x for x in found} for device, found in standings.items()}
        operators = sorted({*expected, *(x for found in of_device.values() for x in found)})
        ours = [x for found in lines.values() for x in found if x.ours]
        return self._render(
            "overview.html",
            "",
            page="overview",
            runs=newest[:RECENT],
            all_runs=newest,
            rows=rows,
            devices=of_device,
            about={x: _about(x, runs) for x in of_device},
            totals={x: sum((y.outcomes for y in found.values()), Counter()) for x, found in of_device.items()},
            operators=operators,
            families=_families(operators, expected),
            lines=lines,
            events=events[:RECENT],
            series=len(ours),
            long_enough=sum(x.watched for x in ours),
        )

    def operator(
        self,
        operator: str,
        standings: Sequence[Standing],
        lines: Sequence[Line],
        runs: Sequence[Run],
        swept: Sequence[Swept],
        over: Mapping[str, Sequence[Swept]],
    ) -> str:
        """The page of an operator or workload, its data within. `over` are the pages of its lines over sizes."""
        known = {(x.device, x.key): x for x in lines}
        drawn: list[list[Line]] = []
        sections = [(x, self._cases(x, known, drawn)) for x in standings]
        return self._render(
            "operator.html",
            "../",
            page="operator",
            operator=operator,
            sections=sections,
            about={x.device: _about(x.device, runs) for x in standings},
            again={x.device: summed([self.repeated[y] for y in x.runs]) for x in standings},
            glances={x.device: glances([y for y in swept if y.device == x.device], "../") for x in standings},
            over=over,
            data=data.inlined(data.charts(drawn, runs)),
        )

    def _cases(
        self, standing: Standing, known: Mapping[tuple[str, Any], Line], drawn: list[list[Line]]
    ) -> dict[str, list[CaseView]]:
        """By group of cases that are read together."""
        by_case = {(x.case, x.cache): x for x in standing.cases}
        newest = [fact.row() for x in standing.cases for _, fact in x.latest]
        out: dict[str, list[CaseView]] = {}
        for group in groups(newest):
            title = " · ".join(x for x in (group.pass_.replace("_", " + "), group.common) if x)
            for label, case in zip(group.labels, group.cases, strict=True):
                found = by_case[case.name, case.first.cache]
                rows = sorted(
                    (
                        RowView(run, fact, known.get((standing.device, fact.identity)))
                        for run, fact in found.latest
                    ),
                    key=_place,
                )
                failed: dict[tuple[str, str, str], list[RowView]] = {}
                for x in rows:
                    if x.fact.number is None:
                        failed.setdefault((x.fact.status, x.fact.reason or "", x.run.name), []).append(x)
                shown = [x.line for x in rows if x.line is not None]
                chart = None
                if any(len(x.points) > 1 for x in shown):
                    chart = len(drawn)
                    drawn.append(shown)
                out.setdefault(title, []).append(CaseView(label, found, tuple(rows), failed, chart))
        return out

    def run(self, journal: Journal, run: Run, found: Sequence[Fact]) -> str:
        """The page of a run: what it was made on, how it went, and its rows with their lines in the journal."""
        # Made of rows once more, for a facts' row has its primary metric alone: of runs with servers only.
        shown = rows(journal) if any(x.operator == serving.OPERATOR for x in found) else ()
        looks = palette(shown)
        return self._render(
            "run.html",
            "../",
            page="run",
            run=run,
            groups=groups([x.row() for x in found]),
            facts={x.identity: x for x in found},
            monitored=monitored(journal),
            header=journal.header,
            worths={
                key: tuple(found)
                for key, found in groupby(worths(journal), key=lambda x: (x.exchange.step, x.exchange.base))
            },
            worth_headings=HEADINGS,
            worth_cells=cells,
            serving=serving.pictures(shown, serving.spreads(journal), looks),
            looks=looks,
        )

    def runs(self, runs: Sequence[Run]) -> str:
        """All runs, the newest first."""
        return self._render("runs.html", "", page="runs", runs=sorted(runs, key=lambda x: x.created, reverse=True))

    def compare(self, runs: Sequence[Run], table: Sequence[tuple[Run, Run, Sequence[Any]]]) -> str:
        """Any two states of the code, devices, libraries; `table` is what stands there without a script."""
        sources: dict[tuple[str, str], Run] = {}
        for run in runs:
            if run.arm is None:
                sources[data.source(run)] = run
        offered = [
            {"file": data.source_file(*key), "device": key[0], "commit": run.short}
            | {"created": run.created[:16].replace("T", " ")}
            for key, run in sources.items()
        ]
        first = [data.source_file(*data.source(x)) for x in table[0][:2]] if table else [None, None]
        within = data.inlined({"sources": offered, "first": first})
        return self._render("compare.html", "", page="compare", data=within, table=table)

    def coverage(self, devices: Mapping[str, Sequence[Coverage]], known: bool) -> str:
        """What was measured and what never was. `known` says whether what exists is known."""
        return self._render("coverage.html", "", page="coverage", devices=devices, known=known)

    def files(self, rows: int, parquet: bool) -> str:
        """What lies beside the pages."""
        return self._render("rows.html", "", page="files", rows=rows, parquet=parquet)

    def scaling(self, steps: Sequence[Step], sizes: Mapping[str, Mapping[str, Sequence[Swept]]]) -> str:
        """Several GPUs, and which operators have pages of charts over sizes, by their parts."""
        return self._render(
            "scaling.html", "", page="scaling", worlds=worlds(steps), curves=curves(steps), sizes=sizes
        )

    def sizes(self, operator: str, part: str, found: Mapping[str, Sequence[Swept]]) -> str:
        """A part of an operator's lines over its sizes; `found` has them all."""
        return self._render("sizes.html", "../", page="sizes", operator=operator, part=part, parts=found)

    def serving(self, found: Sequence[Served]) -> str:
        """Servers."""
        return self._render("serving.html", "", page="serving", served=found)


def _place(row: RowView) -> tuple[int, float]:
    number = row.fact.number
    if number is None:
        return 2, 0.0
    return (1 if row.fact.scale else 0), -number[0] if row.fact.better == "higher" else number[0]


def _families(operators: Sequence[str], expected: Mapping[str, Expected]) -> dict[str, list[str]]:
    """Operators by family, workloads behind them, at the end those that nobody knows here."""
    out: dict[str, list[str]] = {}
    for x in operators:
        out.setdefault(expected[x].family if x in expected else "", []).append(x)
    return dict(sorted(out.items(), key=lambda x: (x[0] == "", x[0] == WORKLOADS, x[0])))


def _about(device: str, runs: Sequence[Run]) -> str:
    """A device's newest conditions in a line."""
    mine = [x for x in runs if x.device == device]
    newest = max(mine, key=lambda x: x.created)
    names = ("torch", "triton", "cuda", "driver")
    told = [f"{x} {newest.conditions[x]}" for x in names if newest.conditions.get(x)]
    if newest.conditions.get("power_limit_w"):
        told.append(f"{newest.conditions['power_limit_w']:g} W")
    return " · ".join(told)


def spread(low: float | None, high: float | None, value: float) -> str:
    """An interval as its larger half, relative to the value."""
    if low is None or high is None or value <= 0:
        return ""
    half = max(high - value, value - low) / value
    return f"±{figures.percent(half, 1)}" if half < 0.995 else "wide"


def between(low: float | None, high: float | None, unit: str) -> str:
    """An interval with both ends, for a tooltip."""
    if low is None or high is None:
        return "no interval: one process"
    return f"95 % interval {figures.measured(low, unit)} to {figures.measured(high, unit)} {unit}"


def mark(look: Series) -> str:
    """An implementation's shape in its colour, for a legend."""
    shape = marker(6, 6, look.colour, look.shape, 9, look.fill)
    return f'<svg viewBox="0 0 12 12" width="12" height="12" aria-hidden="true">{shape}</svg>'


def breakable(name: str) -> Any:
    """A name that may go on in the next line after each underscore, escaped."""
    from markupsafe import Markup, escape

    return Markup("_<wbr>").join(escape(CONTROL.sub("�", x)) for x in name.split("_"))


def anchor(name: str) -> str:
    """A case's name as a place on its page."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name[:120])


@cache
def _environment() -> Any:
    """Jinja's, with the templates compiled once."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise InputError(f"a site needs {error.name}: pip install 'kernelmark[registry]'") from None
    folder = Path(__file__).with_name("templates")
    found = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda x: CONTROL.sub("�", x) if type(x) is str else x,
    )
    found.filters.update(
        number=figures.number,
        measured=figures.measured,
        ratio=figures.ratio,
        percent=figures.percent,
        seconds=figures.seconds,
        moment=figures.moment,
        change=figures.change,
        condition=figures.value,
        size=figures.size,
        file=file_name,
        anchor=anchor,
        breakable=breakable,
        over_sizes=page_of,
        part=part_name,
    )
    found.globals.update(
        dash=figures.DASH,
        spread=spread,
        between=between,
        sparkline=drawing.sparkline,
        ratio_drawing=drawing.ratio,
        strip=drawing.strip,
        mark=mark,
        excludes_one=excludes_one,
        OUTCOMES=OUTCOMES,
        zip=zip,
    )
    return found
