"""The site's pages as text. What they show is made here and in the modules beside; every value is escaped."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, groupby, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .. import figures
from ..analysis.releases import releases
from ..analysis.releases import told as aged
from ..analysis.rows import Row, rows
from ..analysis.speedups import excludes_one
from ..analysis.worth import worths
from ..errors import InputError
from ..escape import CONTROL, plain
from ..escape import lines as harmless
from ..store.journal import Journal
from ..views import convergence, convergence_table, rivals, serving
from ..views.canvas import marker
from ..views.grouping import CaseRows, Group, groups
from ..views.looks import Series, palette
from ..views.monitor import monitored, power_limit
from ..views.worth_table import HEADINGS, cells, missing
from . import data, drawing
from .comparisons import WITHIN, Pair
from .course import WIDE, Course, large, small, together
from .coverage import Coverage, Expected
from .drawing import NARROW
from .facts import ONE_PROCESS, Fact, Run, file_name
from .feeds import Event, Place
from .paging import ROOM, Block, Frame, Sheet, numbered, sheets
from .repetition import summed
from .scaling import Ahead, Step, bandwidths, curves, over_lengths, worlds
from .servers import Served, served_as
from .sizes import Swept, glances, page_of, part_name
from .standing import OUTCOMES, CaseStanding, Standing
from .timeline import Line

RECENT = 8
"""Runs and changes on the first page."""
LISTED = 60
"""Lines of a case's table with a value, and as many without."""
RUNS = 300
"""Runs of a full page of their list."""
ABREAST = 6
"""Devices side by side in one table."""
OPENING = 60_000
"""Bytes of the first page above its tables: devices, changes and runs."""
NEIGHBOURS = 8
"""Pages that are linked on either side of one of many."""
MORE = 1.005
"""An efficiency that reads as more than 100 %."""
NOWHERE = "not in the catalog: counted nowhere"
"""The family of operators that nobody here knows, as runs that calibrate have."""
SINGLE = " · single cases"
"""What the heading ends with of cases that share too little to have one each."""
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
    hidden: int
    """Lines of its table that are left out: a case has one for each implementation that anybody measured."""
    chart: int | None

    @property
    def timed(self) -> tuple[RowView, ...]:
        """The best rows with a value, as many as are listed."""
        return tuple(x for x in self.rows if x.fact.number is not None)[:LISTED]

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
        self.places: dict[Place, str] = {}
        """Where each case is, from the site's root, of the operators whose pages were made."""
        self._repetition = summed([*repeated.values()])
        self._environment = _environment()

    def _render(self, template: str, root: str, **values: Any) -> str:
        text: str = self._environment.get_template(template).render(self._shared(root) | values)
        return text

    def _module(self, template: str, root: str, **values: Any) -> Any:
        """A template's macros, which see what all pages do."""
        return self._environment.get_template(template).make_module(self._shared(root) | values)

    def _shared(self, root: str) -> dict[str, Any]:
        shared: dict[str, Any] = {
            "title": self.title,
            "built": self.built,
            "root": root,
            "journals": self.journals,
        }
        return shared | {"repeated": self.repeated, "repetition": self._repetition}

    def _divided(
        self,
        template: str,
        root: str,
        divided: Sequence[Sheet],
        file: str,
        of_page: Callable[[Sheet], Mapping[str, Any]] = lambda _: {},
        **values: Any,
    ) -> tuple[str, ...]:
        """A page for each sheet, with links to the others; `file` is the first one's name without ending, and
        `of_page` gives what a page alone has.
        """
        return tuple(
            self._render(
                template,
                root,
                sheet=sheet.html,
                number=number,
                pager=_pager(divided, number, file),
                **values,
                **of_page(sheet),
            )
            for number, sheet in enumerate(divided, 1)
        )

    def overview(
        self,
        runs: Sequence[Run],
        rows: int,
        standings: Mapping[str, Sequence[Standing]],
        expected: Mapping[str, Expected],
        lines: Mapping[str, Sequence[Line]],
        events: Sequence[Event],
        courses: Mapping[tuple[str, str], Course],
    ) -> tuple[str, ...]:
        """The first page: how each device stands, over time too, changes, the newest runs; each operator on each
        device. What it has no room for is on further ones.
        """
        newest = sorted(runs, key=lambda x: x.created, reverse=True)
        of_device = {device: {x.operator: x for x in found} for device, found in standings.items()}
        operators = sorted({*expected, *(x for found in of_device.values() for x in found)})
        families = _families(operators, expected)
        # Runs that calibrate have operators of their own: what the catalog does not know counts nowhere.
        strange = {x for x in operators if expected and x not in expected}
        ours = [x for found in lines.values() for x in found if x.ours]
        own: dict[tuple[str, str], list[Line]] = {}
        for x in ours:
            own.setdefault((x.device, x.key.operator), []).append(x)
        blocks = self._module("overview_blocks.html", "")
        found: list[Block] = []
        first: dict[str, int] = {}
        about = {x: _about(x, runs) for x in of_device}
        for number, (device, by_operator) in enumerate(of_device.items(), 1):
            first[device] = len(found)
            section = Frame(blocks.section(device, number, about[device]), "</table></div>\n</section>\n")
            for family, members in families.items():
                frames = (section, Frame(blocks.family(family, 14), "</tbody>\n"))
                for name in members:
                    if name in by_operator:
                        line = small(courses.get((device, name), ()))
                        text = blocks.operator(by_operator[name], own.get((device, name), ()), line)
                        found.append(Block(text, frames, device))
            if absent := [name for members in families.values() for name in members if name not in by_operator]:
                frames = (section, Frame(blocks.family("not run", 14), "</tbody>\n"))
                found.append(Block(blocks.absent(absent), frames, device))
        if len(of_device) > 1:
            found += self._side_by_side(blocks, of_device, families)
        divided = sheets(found, ROOM - OPENING)
        return self._divided(
            "overview.html",
            "",
            divided,
            "index",
            page="overview",
            runs=newest[:RECENT],
            all_runs=len(newest),
            rows=rows,
            devices={
                x: {
                    "link": f"{numbered('index', _sheet_of(divided, place))}.html#device-{number}",
                    "about": about[x],
                    "total": sum(
                        (y.outcomes for y in of_device[x].values() if y.operator not in strange), Counter()
                    ),
                    "operators": sum(y not in strange for y in of_device[x]),
                    "strange": sorted(y for y in of_device[x] if y in strange),
                }
                for number, (x, place) in enumerate(first.items(), 1)
            },
            hero=_hero(runs, [*of_device], families, strange, courses),
            events=events[:RECENT],
            changed=Counter(x.line.key.operator for x in events).most_common(LISTED),
            all_changes=len(events),
            series=len(ours),
            long_enough=sum(x.watched for x in ours),
        )

    def _side_by_side(
        self, blocks: Any, of_device: Mapping[str, Mapping[str, Standing]], families: Mapping[str, Sequence[str]]
    ) -> list[Block]:
        """Each operator on the first devices, in a line."""
        shown = [*of_device][:ABREAST]
        table = Frame(blocks.matrix(shown, len(of_device) - len(shown)), "</table></div>\n</section>\n")
        out = []
        for family, members in families.items():
            frames = (table, Frame(blocks.family(family, 1 + 2 * len(shown)), "</tbody>\n"))
            for x in members:
                here = [of_device[device].get(x) for device in shown]
                if any(here):
                    out.append(Block(blocks.across(x, here), frames, "side by side"))
        return out

    def operator(
        self,
        operator: str,
        standings: Sequence[Standing],
        lines: Sequence[Line],
        runs: Sequence[Run],
        swept: Sequence[Swept],
        over: Mapping[str, Sequence[Swept]],
    ) -> tuple[str, ...]:
        """The pages of an operator or workload, their data within. `over` are those of its lines over sizes."""
        known = {(x.device, x.key): x for x in lines}
        drawn: list[list[Line]] = []
        blocks = self._module("operator_blocks.html", "../")
        found: list[Block] = []
        first: dict[str, int] = {}
        placed: dict[Place, tuple[int, str]] = {}
        for number, x in enumerate(standings, 1):
            first[x.device] = len(found)
            section = Frame(blocks.section(x, number, _about(x.device, runs)), "</section>\n")
            again = summed([self.repeated[y] for y in x.runs])
            seen = glances([y for y in swept if y.device == x.device], "../")
            mine = [name for name, of_part in over.items() if any(y.device == x.device for y in of_part)]
            device = f"{x.device} " if len(standings) > 1 else ""
            judged = [y for y in runs if y.name in x.runs] if operator == convergence.OPERATOR else []
            found.append(Block(blocks.summary(x, again, seen, mine, judged), (section,)))
            for (title, pass_), cases in self._cases(x, known, drawn).items():
                best = cases[0].rows[0].fact.number
                group = Frame(blocks.group(title, best[3] if best else ""), "</div>\n")
                label = device + pass_.replace("_", " + ")
                for y in cases:
                    case = x.device, operator, y.standing.case, y.standing.cache
                    placed[case] = len(found), f"{number}-{anchor(y.standing.case)}-{y.standing.cache}"
                    found.append(Block(blocks.case(y, placed[case][1]), (section, group), label, y.chart))
        divided = sheets(found)
        file = file_name(operator)
        self.places |= {
            case: f"operator/{numbered(file, _sheet_of(divided, place))}.html#{name}"
            for case, (place, name) in placed.items()
        }
        devices = {
            x: f"{numbered(file, _sheet_of(divided, place))}.html#device-{number}"
            for number, (x, place) in enumerate(first.items(), 1)
        }

        def of_page(sheet: Sheet) -> dict[str, Any]:
            start = next(iter(sheet.charts), 0)
            charts = data.charts(drawn[start : start + len(sheet.charts)], runs, start)
            return {"data": data.inlined(charts)}

        return self._divided(
            "operator.html",
            "../",
            divided,
            file,
            of_page,
            page="operator",
            operator=operator,
            devices=devices,
        )

    def _cases(
        self, standing: Standing, known: Mapping[tuple[str, Any], Line], drawn: list[list[Line]]
    ) -> dict[tuple[str, str], list[CaseView]]:
        """By group of cases that are read together: its title, and its pass."""
        by_case = {(x.case, x.cache): x for x in standing.cases}
        newest = [fact.row() for x in standing.cases for _, fact in x.latest]
        out: dict[tuple[str, str], list[CaseView]] = {}
        for title, pass_, cases in _titled(groups(newest)):
            for label, case in cases:
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
                shown_failed = dict(islice(failed.items(), LISTED))
                timed = sum(x.fact.number is not None for x in rows)
                hidden = max(0, timed - LISTED) + len(failed) - len(shown_failed)
                view = CaseView(label, found, tuple(rows), shown_failed, hidden, chart)
                out.setdefault((title, pass_), []).append(view)
        return out

    def run(self, journal: Journal, run: Run, found: Sequence[Fact]) -> tuple[str, ...]:
        """The pages of a run: what it was made on, how it went, and its rows with their lines in the journal. Many
        rows stand on pages of their own, each where `Run.page` says.
        """
        # Made of rows once more, for a facts' row has its primary metric alone: of runs with servers or arms only.
        beside = {serving.OPERATOR, convergence.OPERATOR}
        shown = rows(journal) if any(x.operator in beside for x in found) else ()
        looks = palette(shown)
        each = run.rows_a_page
        parts = [found[i : i + each] for i in range(0, len(found), each)] if each else []
        shared: dict[str, Any] = {"page": "run", "run": run}
        shared["parts"] = [(_first_to_last([x.operator for x in part]), run.page(part[0].place)) for part in parts]
        first = self._render(
            "run.html",
            "../",
            **shared,
            **_rows(() if parts else found),
            places={x.identity: run.page(x.place) + f"#row-{x.place}" for x in found},
            line=min((y for x in found[:1] for y in x.lines), default=0),
            monitored=monitored(journal),
            header=journal.header,
            worths={
                key: tuple(found)
                for key, found in groupby(worths(journal), key=lambda x: (x.exchange.step, x.exchange.base))
            },
            worth_headings=HEADINGS,
            worth_cells=cells,
            worth_missing=missing,
            convergences=convergence.convergences(journal, looks) if shown else (),
            convergence_headings=convergence_table.HEADINGS,
            convergence_about=convergence_table.ABOUT,
            serving=_told(
                serving.pictures(
                    shown, serving.spreads(journal), looks, width=NARROW, tried=serving.probes(journal)
                ),
                shown,
            ),
            looks=looks,
        )
        return (first, *(self._render("run_part.html", "../", **shared, **_rows(x), part=x) for x in parts))

    def runs(self, runs: Sequence[Run]) -> tuple[str, ...]:
        """All runs, the newest first."""
        newest = sorted(runs, key=lambda x: x.created, reverse=True)
        line = self._module("runs_blocks.html", "").line
        found = [Block(line(x), label=x.created[:10]) for x in newest]
        divided = [Sheet(tuple(found[i : i + RUNS])) for i in range(0, len(found), RUNS)]
        return self._divided("runs.html", "", divided, "runs", page="runs")

    def compare(self, runs: Sequence[Run], pairs: Sequence[Pair], beside: Run | None) -> str:
        """Any two states of the code, devices, libraries; `pairs` stand there without a script, the first of
        them is what the script begins with. `beside` has most rows of ours beside others.
        """
        sources: dict[tuple[str, str], list[Run]] = {}
        for run in runs:
            if run.arm is None:
                sources.setdefault(data.source(run), []).append(run)
        offered = [
            {"file": data.source_file(*key), "device": key[0], "commit": found[-1].short}
            | {"created": found[-1].created[:16].replace("T", " "), "rows": sum(x.timed for x in found)}
            | {"plan": _several([x.plan for x in found])}
            for key, found in sources.items()
        ]
        opened = [data.source_file(*data.source(run)) for x in pairs[:1] for run in (x.before, x.after)]
        both = None if beside is None else data.source_file(*data.source(beside))
        within = data.inlined({"sources": offered, "first": opened or [None, None], "beside": both})
        return self._render("compare.html", "", page="compare", data=within, pairs=pairs)

    def coverage(self, devices: Mapping[str, Sequence[Coverage]], known: bool) -> tuple[str, ...]:
        """What was measured and what never was. `known` says whether what exists is known."""
        blocks = self._module("coverage_blocks.html", "", LISTED=LISTED)
        found = []
        for device, covered in devices.items():
            section = Frame(blocks.section(device, covered), "</tbody></table></div>\n</section>\n")
            found += [Block(blocks.operator(x), (section,), f"{device}: {x.operator}") for x in covered]
        return self._divided("coverage.html", "", sheets(found), "coverage", page="coverage", known=known)

    def files(self, rows: int, parquet: bool) -> str:
        """What lies beside the pages."""
        return self._render("rows.html", "", page="files", rows=rows, parquet=parquet)

    def scaling(
        self,
        steps: Sequence[Step],
        sizes: Mapping[str, Mapping[str, Sequence[Swept]]],
        predicted: Mapping[str, Sequence[Ahead]] = MappingProxyType({}),
    ) -> tuple[str, ...]:
        """Several GPUs, what is predicted of more by run, and which operators have pages of charts over sizes, by
        their parts.
        """
        blocks = self._module("scaling_blocks.html", "")
        columns = Frame('<div class="three">\n', "</div>\n")
        drawn = (*bandwidths(steps), *over_lengths(steps), *curves(steps, predicted))
        found = [Block(blocks.drawing(x), (columns,)) for x in drawn]
        ahead = [block for block, x in zip(found, drawn, strict=True) if x.predicted]
        for operator, device, of_world in worlds(steps):
            alone, wire = any(x.one for x in of_world), any(x.bus for x in of_world)
            table = Frame(blocks.world(operator, device, alone, wire), "</tbody></table></div>\n")
            for name, of_work in groupby(of_world, key=lambda x: x.work):
                text = blocks.work(name, list(of_work), alone, wire)
                found.append(Block(text, (table,), operator))
        return self._divided(
            "scaling.html",
            "",
            sheets(found),
            "scaling",
            lambda sheet: {"predicted": any(x in ahead for x in sheet.blocks)},
            page="scaling",
            steps=steps,
            sizes=sizes,
            above=any(x.scaled and x.scaled.efficiency >= MORE for x in steps),
            nccl=any(rivals.without_multicast(x.fact.implementation, x.run.conditions) for x in steps),
        )

    def sizes(self, operator: str, part: str, found: Mapping[str, Sequence[Swept]]) -> str:
        """A part of an operator's lines over its sizes; `found` has them all."""
        return self._render("sizes.html", "../", page="sizes", operator=operator, part=part, parts=found)

    def serving(self, found: Sequence[Served]) -> tuple[str, ...]:
        """Servers."""
        blocks = self._module("serving_blocks.html", "", places=self.places)
        out = []
        for x in found:
            section = Frame(blocks.section(x), "</section>\n")
            failed = any(y.value("failed") for y in x.loads)
            table = Frame(blocks.table(failed), "</tbody></table></div>\n")
            spreads = Frame(blocks.spread_head(), "")
            out.append(Block(blocks.drawings(x), (section,), x.what))
            out += [Block(blocks.load(x, y, failed), (section, table), x.what) for y in x.loads]
            out += [
                Block(blocks.distributions(told, drawn), (section, spreads), x.what)
                for told, drawn in x.spreads.items()
            ]
        return self._divided("serving.html", "", sheets(out), "serving", page="serving", served=found)


def _told(found: serving.Pictures, rows: Iterable[Row]) -> serving.Pictures:
    """Drawings of how latencies are spread, each with what its load is in words."""
    words = {x.case: served_as(x.axes, x.options) for x in rows if x.operator == serving.OPERATOR}
    return replace(found, spreads=tuple(replace(x, of=words.get(x.of, x.of)) for x in found.spreads))


def _place(row: RowView) -> tuple[int, float]:
    number = row.fact.number
    if number is None:
        return 2, 0.0
    return (1 if row.fact.scale else 0), -number[0] if row.fact.better == "higher" else number[0]


def _rows(found: Sequence[Fact]) -> dict[str, Any]:
    return {"groups": groups([x.row() for x in found]), "facts": {x.identity: x for x in found}}


def _titled(found: Sequence[Group]) -> Iterator[tuple[str, str, list[tuple[str, CaseRows]]]]:
    """Groups of cases as an operator's page has them: title, pass, and the cases with labels, both by their sizes.

    Titles say what is there, not what is off. Groups of a single case would be headings of one line each: such
    cases stand together, each under all that it is of.
    """
    parts: dict[tuple[str, str], list[tuple[str, CaseRows]]] = {}
    sizes: dict[tuple[str, str], tuple[str, tuple[tuple[int, int], ...]]] = {}
    for group in found:
        alone = len(group.cases) == 1 and sum(x.pass_ == group.pass_ and len(x.cases) == 1 for x in found) > 1
        common = " · ".join(
            x for x in group.common.split(" · ") if not x.startswith("not ") and not _OFF.fullmatch(x)
        )
        way = group.pass_.replace("_", " + ")
        title = way + SINGLE if alone else " · ".join(x for x in (way, common) if x)
        sizes.setdefault((title, group.pass_), ("", ()) if alone else _sizes(group))
        for label, case in zip(group.labels, group.cases, strict=True):
            told = _NONE.sub("", label) or label
            if case.operator == serving.OPERATOR:
                told = served_as(case.first.axes, case.first.options)
            whole = f"{told} · {common}" if alone and common and common != told else told
            parts.setdefault((title, group.pass_), []).append((whole, case))
    passes = list(dict.fromkeys(pass_ for _, pass_ in parts))
    kinds = list(dict.fromkeys(kind for kind, _ in sizes.values()))

    def place(of: tuple[str, str]) -> tuple[Any, ...]:
        kind, at = sizes[of]
        return passes.index(of[1]), of[0].endswith(SINGLE), kinds.index(kind), at

    for (title, pass_), cases in sorted(parts.items(), key=lambda x: place(x[0])):
        cases.sort(key=lambda x: tuple(x[1].first.axes.values()))
        times = Counter(label for label, _ in cases)
        # What words do not tell apart has its name in the journal beside it.
        yield title, pass_, [(x if times[x] == 1 else f"{x} ({case.name})", case) for x, case in cases]


def _sizes(group: Group) -> tuple[str, tuple[tuple[int, int], ...]]:
    """What a group's cases have in common beside sizes, and which sizes, each with its axis's place."""
    common = dict.fromkeys(group.common.split(" · "))
    at = []
    for i, (name, size) in enumerate(group.cases[0].first.axes.items()):
        if f"{name}{size}" in common:
            del common[f"{name}{size}"]
            at.append((i, size))
    return " · ".join(common), tuple(at)


# Between dashes: `lr0.001` is a number.
_OFF, _NONE = re.compile(r"[A-Za-z]+0"), re.compile(r"(?<![^-])[A-Za-z]+0-|-[A-Za-z]+0(?![^-])")
"""An axis of size 0, which is none."""


def _several(names: Sequence[str]) -> str:
    """The first two of several names, each once, and how many more there are."""
    found = list(dict.fromkeys(names))
    return ", ".join(found[:2]) + (f" and {len(found) - 2} more" if len(found) > 2 else "")


def _first_to_last(names: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys((names[0], names[-1])))


def _sheet_of(divided: Sequence[Sheet], place: int) -> int:
    """The number of the page that has the block of this place among all."""
    return bisect_right(list(accumulate(len(x.blocks) for x in divided)), place) + 1


def _pager(divided: Sequence[Sheet], number: int, file: str) -> list[tuple[int, str, str]]:
    """The pages that one of many links to, by number, label and file: its neighbours, the first and the last. None
    where there is one.
    """
    near = {1, len(divided), *range(number - NEIGHBOURS, number + NEIGHBOURS + 1)}
    known = [(i, x.label, f"{numbered(file, i)}.html") for i, x in enumerate(divided, 1) if i in near]
    return known if len(divided) > 1 else []


def _families(operators: Sequence[str], expected: Mapping[str, Expected]) -> dict[str, list[str]]:
    """Operators by family, workloads behind them, at the end those that nobody knows here."""
    out: dict[str, list[str]] = {}
    for x in operators:
        strange = NOWHERE if expected else ""
        out.setdefault(expected[x].family if x in expected else strange, []).append(x)
    return dict(sorted(out.items(), key=lambda x: (x[0] == NOWHERE, x[0] == "", x[0] == WORKLOADS, x[0])))


def _hero(
    runs: Sequence[Run],
    devices: Sequence[str],
    families: Mapping[str, Sequence[str]],
    strange: Collection[str],
    courses: Mapping[tuple[str, str], Course],
) -> dict[str, Any] | None:
    """The first page's picture over time: of the device with most commits all operators and their families."""
    best: tuple[str, Course, dict[str, Course]] | None = None
    for device in devices:
        known = {
            family: {x: courses.get((device, x), ()) for x in members if x not in strange}
            for family, members in families.items()
        }
        every = together((y for x in known.values() for y in x.values()), runs)
        if len(every) > 1 and (best is None or len(every) > len(best[1])):
            of_family = {name or "other": together(x.values(), runs) for name, x in known.items()}
            best = device, every, of_family if sum(map(bool, of_family.values())) > 1 else {}
    if best is None:
        return None
    device, every, of_family = best
    operators = sum(
        bool(courses.get((device, x))) for found in families.values() for x in found if x not in strange
    )
    return {
        "device": device,
        "operators": operators,
        "families": bool(of_family),
        "commits": len(every),
        "drawings": {"wide": large(every, of_family, WIDE), "narrow": large(every, of_family, NARROW)},
    }


def _about(device: str, runs: Sequence[Run]) -> str:
    """A device's newest conditions in a line."""
    mine = [x for x in runs if x.device == device]
    newest = max(mine, key=lambda x: x.created)
    names = ("torch", "triton", "cuda", "driver")
    told = [f"{x} {newest.conditions[x]}" for x in names if newest.conditions.get(x)]
    if (limit := power_limit(newest.conditions)) is not None:
        told.append(f"{limit:g} W")
    return " · ".join(told)


def spread(fact: Fact) -> str:
    """A value's interval as its larger half, relative to the value; of one process that it is one."""
    value = fact.number[0] if fact.number else 0.0
    low, high = fact.interval
    if fact.processes == 1:
        return "1 process"
    if low is None or high is None or value <= 0:
        return ""
    half = max(high - value, value - low) / value
    return f"±{figures.percent(half, 1)}" if half < 0.995 else "wide"


def between(fact: Fact) -> str:
    """The interval with both ends, for a tooltip; of one process how its samples lie, which is none."""
    _, low, high, unit = fact.number or (0.0, None, None, "")
    if low is None or high is None:
        return "one process: no interval" if fact.processes == 1 else "no interval"
    ends = f"{figures.measured(low, unit)} to {figures.measured(high, unit)} {unit}".strip()
    if fact.processes == 1:
        return f"one process, no interval: by its own samples {ends}, which say nothing of another process"
    return f"95 % interval {ends}"


def mark(look: Series) -> str:
    """An implementation's shape in its colour on a piece of its line, for a legend."""
    shape = marker(13, 6, look.colour, look.shape, 9, look.fill)
    dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
    line = f'<path d="M0 6h26" style="fill:none;stroke:var({look.colour});stroke-width:1.5"{dash}/>'
    return f'<svg viewBox="0 0 26 12" width="26" height="12" aria-hidden="true">{line}{shape}</svg>'


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
        finalize=lambda x: harmless(x) if type(x) is str else x,
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
        plain=plain,
        aged=aged,
    )
    found.globals.update(
        releases=releases(),
        dash=figures.DASH,
        spread=spread,
        between=between,
        sparkline=drawing.sparkline,
        ratio_drawing=drawing.ratio,
        strip=drawing.strip,
        mark=mark,
        excludes_one=excludes_one,
        rival=rivals.told,
        OUTCOMES=OUTCOMES,
        WITHIN=WITHIN,
        ONE_PROCESS=ONE_PROCESS,
        zip=zip,
    )
    return found
