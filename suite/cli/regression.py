"""`regression_detector`: did this commit make a kernel slower? The exit code is the verdict."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias

import click
import msgspec

from ...registry.errors import InputError, KernelmarkError
from ...registry.store.home import Home
from ...registry.store.record import Header, Record
from . import run_command
from .run import device_named, writable
from .values import Duration, Share

if TYPE_CHECKING:
    from ...registry.detection.comparison import Options
    from ...registry.detection.comparison_report import ComparisonReport
    from ...registry.detection.decision import Progress
    from ...registry.detection.verdict import Verdict
    from ...registry.store.index import Index
    from ...registry.store.record import Key
    from ..compare.interleaved import Interleaved, Tree
    from ..compare.revisions import Checkout, Revision
    from ..compare.stored import Stored
    from ..environments import Environment
    from ..plan import Plan

Records: TypeAlias = tuple[Sequence[Record], Sequence[Record]]


RUN = "run:"
"""Before a run's name in the place of a revision."""
IMAGE = "image:"
"""Before an image's name in the place of an environment's Python."""
EXPLAINING = 0.4
"""Share of the budget that is kept for --attribute and --bisect: to decide noisy rows could use up all of it."""
LOG_WIDTH = 180
FEW = 10
"""Up to so many rows there is nothing to fold."""


class NothingStored(KernelmarkError):
    """The stored runs do not answer, and nothing may or can be measured."""

    exit_code = 4


@click.command("regression_detector", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--baseline", required=True, metavar="REV", help="What to compare with: anything git resolves, or run:NAME."
)
@click.option(
    "--current",
    default="HEAD",
    show_default=True,
    metavar="REV",
    help="What to judge; `worktree` is the checkout with its uncommitted changes.",
)
@click.option(
    "--mode",
    type=click.Choice(["auto", "stored", "ab"]),
    default="auto",
    show_default=True,
    help="stored: from stored runs alone; ab: measure both commits in turns; auto: what is stored if that "
    "decides, else an A/B.",
)
@click.option(
    "--plan", help="Cases to measure, as for `kernelmark run`; default: quick. Stored: runs of that plan."
)
@click.option("--operator", "operators", multiple=True, help="Only this operator; repeatable.")
@click.option(
    "--implementation",
    "implementations",
    multiple=True,
    help="Only this implementation or provider; repeatable. Default: the kernels that the commits hold.",
)
@click.option("--device", help="cuda or cpu; default: the best one here, or that of the stored runs.")
@click.option(
    "--budget",
    type=Duration(),
    default="30m",
    show_default=True,
    help="Time for measuring; then it is decided. With --attribute or --bisect two fifths are kept for them, and "
    "left over where nothing became slower.",
)
@click.option(
    "--fail-above", type=Share(), default="5%", show_default=True, help="A regression is more than this."
)
@click.option("--warn-above", type=Share(), default="3%", show_default=True, help="A warning is more than this.")
@click.option(
    "--fail-on",
    multiple=True,
    default=("default",),
    metavar="VERDICT",
    help="Verdicts and metrics that fail, repeatable: regression, warning, improvement, incorrect, missing, "
    "'not comparable', inconclusive, memory, error, energy; default; none.",
)
@click.option(
    "--statistics",
    type=click.Choice(["none", "all"]),
    default="none",
    help="all: Welch's t, Cohen's d, Mann-Whitney's p and Tukey's outliers, which decide nothing.",
)
@click.option(
    "--attribute",
    is_flag=True,
    help="Of what became slower, say how much is code, environment, tuning and their interaction: measures old "
    "and new of each in turns.",
)
@click.option(
    "--base-environment",
    metavar="PYTHON|image:NAME",
    help="What to measure the baseline in: a virtual environment's interpreter, or an image by name or digest. "
    "Default: this environment.",
)
@click.option(
    "--current-environment",
    metavar="PYTHON|image:NAME",
    help="The same of the current side. With two environments the sides are measured, whatever is stored.",
)
@click.option("--bisect", is_flag=True, help="Of what became slower, find the commit that did it.")
@click.option("--all", "everything", is_flag=True, help="Show unchanged rows too.")
@click.option("--json", "as_json", is_flag=True, help="For machines: one object with a verdict per row.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Write a pull-request comment to this file.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write JUnit XML to this file.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page that opens offline to this file.")
@click.option(
    "--no-registry",
    is_flag=True,
    help="Do not tag the current side's runs in the registry with their verdicts; without a registry none are.",
)
@click.option("--seed", type=int, help="Seed of inputs and order; default: random, recorded.")
@click.option("--output", type=click.Path(path_type=Path), help="Results' folder, in place of $KERNELMARK_HOME.")
def command(
    baseline: str,
    current: str,
    mode: Literal["auto", "stored", "ab"],
    plan: str | None,
    operators: tuple[str, ...],
    implementations: tuple[str, ...],
    device: str | None,
    budget: float,
    fail_above: float,
    warn_above: float,
    fail_on: tuple[str, ...],
    statistics: str,
    attribute: bool,
    base_environment: str | None,
    current_environment: str | None,
    bisect: bool,
    everything: bool,
    as_json: bool,
    markdown: Path | None,
    junit: Path | None,
    html: Path | None,
    no_registry: bool,
    seed: int | None,
    output: Path | None,
) -> int:
    """Did CURRENT make a kernel slower than BASELINE?

    Compares two commits of the checkout in the current directory, row by row, with the harness that is
    installed: only kernels/ and baselines/ come from the commits. Exit codes: 0 no regression, 1 regression,
    2 wrong usage, 3 inconclusive within the budget, 4 not comparable or missing, 5 the harness failed.
    """
    from ...registry.detection import verdict
    from ...registry.detection.comparison import Options
    from ...registry.detection.comparison_report import ComparisonReport
    from ...registry.store.index import Index
    from ..compare.revisions import Checkout

    options = Options(fail_above=fail_above, warn_above=warn_above, tolerated=min(Options().tolerated, warn_above))
    if mode == "stored" and (attribute or bisect):
        raise InputError("--attribute and --bisect measure, and --mode stored never does: use auto or ab.")
    if base_environment or current_environment:
        if mode == "stored":
            raise InputError("stored runs are not known by their environment: one that is named needs --mode ab.")
        mode = "ab"
    if base_environment != current_environment:
        # Another environment may well move every row: that is what is asked, and no sign of another machine.
        options = msgspec.structs.replace(options, shift_above=math.inf)
    fails = verdict.fail_on(fail_on)
    named = [x.removeprefix(RUN) for x in (baseline, current) if x.startswith(RUN)]
    if named:
        if len(named) == 1 or mode == "ab" or attribute or bisect:
            raise InputError(f"{RUN}NAME is for both sides at once, and for nothing that measures.")
        report, runs = _of_runs(named, options, fails, operators, Home(output))
        _present(report, as_json, everything, markdown, junit, html)
        if not no_registry:
            _write_back(report, *runs, Home(output))
        return report.exit_code
    checkout = Checkout.here()
    sides = environments(base_environment, current_environment, device, Home(output))
    until = time.monotonic() + budget  # which an image that had to be built takes nothing of
    question = Question(
        checkout=checkout,
        base=checkout.resolve(baseline),
        current=checkout.resolve(current),
        operators=operators,
        implementations=implementations,
        device=device,
        plan=plan,
        options=options,
        decided_by=until - EXPLAINING * budget * (attribute or bisect),
        until=until,
        environments=sides,
        seed=secrets.randbits(31) if seed is None else seed,
    )
    if not question.current.dirty and current == "HEAD" and checkout.dirty:
        _tell("there are uncommitted changes, which HEAD does not have; `--current worktree` compares them")
    home = Home(output)
    if mode != "stored":
        writable(home)
    index = Index(home)
    answer = question.answer(mode, home, index)
    report = ComparisonReport(str(question.base), str(question.current), answer.progress, options, fails)
    if statistics == "all":
        from ...registry.detection.descriptive import describe_records

        report = msgspec.structs.replace(report, statistics=dict(describe_records(*answer.records)))
    if report.slower and (attribute or bisect):
        report = question.explained(report, answer, home, index, attribute, bisect)
    _present(report, as_json, everything, markdown, junit, html)
    if not no_registry:
        _write_back(report, question.base.commit, answer.runs, home)
    return report.exit_code


@dataclass(frozen=True)
class Answer:
    """The verdicts, with the records that they rest on, what was measured, and the current side's runs."""

    progress: Progress
    records: Records = ((), ())
    plan: Plan | None = None
    runs: tuple[str, ...] = ()


def environments(
    base: str | None, current: str | None, device: str | None, home: Home
) -> tuple[Environment, Environment]:
    """Both sides' environments, each fit to measure. Raises `KernelmarkError`."""
    found = {x: _environment(x, device, home) for x in dict.fromkeys((base, current))}
    return found[base], found[current]


def _environment(named: str | None, device: str | None, home: Home) -> Environment:
    from ..environments import installed, ours

    if named is None:
        return ours
    if not named.startswith(IMAGE):
        return installed(Path(named))
    from ..container.interpreter import opened
    from ..container.session import prepare
    from .container_options import from_environment

    wanted = None
    if device_named(device) == "cuda":
        # Here and there are then counted alike, and one GPU is measured on.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        if not wanted.isdigit():
            raise InputError(f"CUDA_VISIBLE_DEVICES={wanted}: with an image, name the GPU by its number.")
    return partial(opened, prepare(named.removeprefix(IMAGE), wanted, home, from_environment(), _tell))


@dataclass(frozen=True)
class Question:
    """What is asked, with everything that narrows it."""

    checkout: Checkout
    base: Revision
    current: Revision
    operators: tuple[str, ...]
    implementations: tuple[str, ...]
    device: str | None
    plan: str | None
    options: Options
    decided_by: float
    """When measuring for the verdicts ends, by `time.monotonic`."""
    until: float
    """When all measuring ends."""
    seed: int
    environments: tuple[Environment, Environment]

    def answer(self, mode: str, home: Home, index: Index) -> Answer:
        """The verdicts, from stored runs or an A/B."""
        if mode == "ab":
            return self._measured(home, index)
        found = self._stored(index)
        if isinstance(found, str):
            if mode == "stored":
                raise NothingStored(f"{found}. --mode ab measures both.")
            if why := self._cannot_measure(None):
                raise NothingStored(f"{found}, and {why}.")
            _tell(f"{found}: measuring both")
            return self._measured(home, index)
        _tell(
            f"stored: run {found.base.header.run} of the baseline, {found.current.header.run} of the current side"
        )
        records = found.base.records, found.current.records
        cannot = self._cannot_measure(found.current.header.device)
        if mode == "auto" and cannot is None:
            if found.differing:
                _tell(f"the stored runs differ in {'; '.join(found.differing)}: measuring both")
                return self._measured(home, index)
            if len(found.past) < self.options.minimum_runs:
                _tell(
                    f"{len(found.past)} stored runs of unchanged code, {self.options.minimum_runs} are needed: "
                    f"measuring both"
                )
                return self._measured(home, index)
        progress = self._decided(found, index)
        if mode == "auto" and cannot is None and not progress.verdicts:
            _tell("the stored runs have no row in common that was asked for: measuring both")
            return self._measured(home, index)
        if mode == "auto" and cannot is None and progress.requests:
            return self._settled(progress, records, found.current.header, home, index)
        return self._of_stored(progress, records, found.current.header)

    def _of_stored(self, progress: Progress, records: Records, header: Header) -> Answer:
        from ..plan import Plan

        return Answer(progress, records, Plan.of(header), (header.run,))

    def _settled(self, progress: Progress, records: Records, header: Header, home: Home, index: Index) -> Answer:
        """What the stored runs left open, decided by an A/B, provided that it is made under their conditions."""
        from ...registry.detection import decision
        from ..compare.interleaved import NotMeasurable

        _tell(f"the stored runs leave {len(progress.requests)} rows to an A/B")
        stored = self._of_stored(progress, records, header)
        try:
            ab = self._interleaved(home, index, stored.plan, progress.requests)
        except NotMeasurable as error:
            _tell(f"the stored runs' verdicts stand: {error}")
            return stored
        if ab.header is None or ab.header.key != header.key:
            _tell("the stored runs' verdicts stand: the A/B was made under other conditions than theirs")
            return stored
        merged = decision.replace(progress, ab.progress.verdicts)
        return Answer(merged, ab.records, stored.plan, (*stored.runs, *ab.runs))

    def _stored(self, index: Index) -> Stored | str:
        from ..compare.stored import find

        plan = None if self.plan is None else Path(self.plan).stem  # runs of a file's plan bear its name
        return find(index, self.checkout, self.base, self.current, self._rooms, self.options, self.device, plan)

    def _decided(self, found: Stored, index: Index) -> Progress:
        from ..compare.interleaved import kernel_providers
        from ..compare.stored import decided

        ours = kernel_providers(self._rooted)
        shown = self.implementations or sorted(ours)
        return decided(found, index, self.options, self.operators, shown, ours if self._shared_baselines else None)

    @property
    def _rooms(self) -> list[str]:
        from ..compare.interleaved import rooms

        return rooms(self._rooted.values())

    @property
    def _rooted(self) -> Mapping[str, str]:
        from ..catalog import Catalog
        from ..compare.interleaved import rooted

        return rooted(Catalog.default(), self.checkout)

    @property
    def _shared_baselines(self) -> bool:
        """Whether the code of other libraries' rows is the same in both commits, which makes them witnesses."""
        return self._same_code([x for x in self._rooms if x.rpartition("/")[2] == "baselines"])

    def _same_code(self, folders: Sequence[str]) -> bool:
        """Whether both revisions hold the same in these folders."""
        code = self.checkout.code([self.base.commit, self.current.commit], folders)
        return not self.current.dirty and not self.base.dirty and len(set(code.values())) == 1

    def _cannot_measure(self, device: str | None) -> str | None:
        """Why there can be no A/B here of runs made on a device."""
        if find_spec("torch") is None:
            return "this machine cannot measure: torch is not installed"
        here = device_named(self.device)
        if device is not None and device != here:
            return f"this machine measures on {here} and the stored runs are of {device}"
        return None

    def _measured(self, home: Home, index: Index) -> Answer:
        ab = self._interleaved(home, index, None, None)
        return Answer(ab.progress, ab.records, None, tuple(ab.runs))

    def _interleaved(
        self, home: Home, index: Index, plan: Plan | None, only: Collection[Key] | None
    ) -> Interleaved:
        """A finished A/B: of the plan asked for, or of these rows of a given plan."""
        from ..compare.interleaved import Interleaved

        with self._trees(plan, self.base, self.current) as (plan, base, current):
            ab = Interleaved(
                base=base,
                current=current,
                plan=plan,
                device=device_named(self.device),
                home=home,
                index=index,
                options=self.options,
                seed=self.seed,
                until=self.decided_by,
                tell=_tell,
                # Another library in another environment is no witness of the machine.
                shared_baselines=self._shared_baselines and base.python == current.python,
            )
            ab.compare(only)
        return ab

    @contextlib.contextmanager
    def _trees(self, plan: Plan | None, first: Revision, second: Revision) -> Iterator[tuple[Plan, Tree, Tree]]:
        """Copies of two revisions, ready to be measured in the environments of the two sides."""
        from .. import plan as plans
        from ..catalog import Catalog
        from ..compare.interleaved import trees

        device = device_named(self.device)
        catalog = Catalog.default()
        places = self._rooted
        plan = plan or plans.load(self.plan or "quick", catalog, device, self.operators)
        with self.checkout.copies({"base": first, "current": second}) as folders:
            sides = [(first, folders["base"]), (second, folders["current"])]
            base, current = trees(sides, places, catalog, plan, device, self.implementations)
            self._refuse_apart(base, current)
            read = {x.folder for x in catalog.roots[1:]} | {x.parent for x in folders.values()}
            with contextlib.ExitStack() as held:
                pythons = {x: held.enter_context(x(sorted(read))) for x in dict.fromkeys(self.environments)}
                mine, theirs = (pythons[x] for x in self.environments)
                yield plan, replace(base, python=mine), replace(current, python=theirs)

    def _refuse_apart(self, *sides: Tree) -> None:
        """Raises `InputError` for what does not run in the environments asked for."""
        from ..environments import ours

        apart = {x.implementation.name for y in sides for x in y.cells if x.implementation.environment != "core"}
        if apart and self.environments != (ours, ours):
            raise InputError(
                f"{', '.join(sorted(apart))}: run in environments of their own, which --base-environment and "
                f"--current-environment do not exchange."
            )

    def explained(
        self, report: ComparisonReport, answer: Answer, home: Home, index: Index, attribute: bool, bisect: bool
    ) -> ComparisonReport:
        """The report with what became slower attributed to its causes and to its commit, as far as is asked."""
        if (why := self._cannot_measure(None)) is not None:
            raise NothingStored(f"to attribute or bisect is to measure, and {why}.")
        if attribute:
            report = self._attributed(report, answer, home)
        if bisect:
            report = self._bisected(report, answer, home, index)
        return report

    def _attributed(self, report: ComparisonReport, answer: Answer, home: Home) -> ComparisonReport:
        from ..compare.attribute import Factorial

        with self._trees(answer.plan, self.base, self.current) as (plan, base, current):
            factorial = Factorial(
                base=base,
                current=current,
                plan=plan,
                device=device_named(self.device),
                home=home,
                options=self.options,
                seed=self.seed,
                until=self.until,
                tell=_tell,
                same_code=self._same_code(self._rooms),
            )
            found = tuple(factorial.attribute(report.slower, answer.records))
        remarks = report.remarks
        if base.python == current.python:
            remarks += ("Both sides ran in one environment, so only code and tuning were told apart.",)
        return msgspec.structs.replace(report, attributions=found, remarks=remarks)

    def _bisected(self, report: ComparisonReport, answer: Answer, home: Home, index: Index) -> ComparisonReport:
        from ..compare.bisect import Bisection

        def compare(
            base: Revision, current: Revision, rows: Sequence[Key], options: Options
        ) -> Mapping[Key, Verdict]:
            # One environment for all: what is asked is which commit did it.
            mine = (self.environments[1], self.environments[1])
            step = replace(
                self, base=base, current=current, options=options, environments=mine, decided_by=self.until
            )
            ab = step._interleaved(home, index, answer.plan, rows)
            return {x.key: x for x in ab.progress.verdicts}

        bisection = Bisection(
            checkout=self.checkout,
            base=self.base,
            current=self.current,
            rooms=self._rooms,
            compare=compare,
            options=self.options,
            until=self.until,
            tell=_tell,
        )
        return msgspec.structs.replace(report, findings=tuple(bisection.find(report.slower)))


def _tell(text: str) -> None:
    """Progress and remarks; standard output is for the result."""
    click.echo(text, err=True)


def _present(
    report: ComparisonReport,
    as_json: bool,
    everything: bool,
    markdown: Path | None,
    junit: Path | None,
    html: Path | None,
) -> None:
    from ...registry.detection import verdict_output, verdict_text
    from ...registry.views.verdict_page import render_verdict

    files = ((markdown, verdict_text.to_markdown), (junit, verdict_output.to_junit), (html, render_verdict))
    for path, render in files:
        if path is not None:
            try:
                path.write_text(render(report), encoding="utf-8")
            except OSError as error:
                raise InputError(f"{path} cannot be written: {error.strerror}.") from None
    if as_json:
        text = msgspec.json.encode(verdict_output.to_json(report))
        click.echo(msgspec.json.format(text, indent=2))
        return
    from ...registry.views.escape import console

    shown = everything or len(report.progress.verdicts) <= FEW
    # A log has no width of its own, and 80 columns would break every row over many lines.
    terminal = console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    terminal.print(verdict_text.to_table(report, shown))
    for line in verdict_text.explanations(report):
        terminal.print(line, markup=False, highlight=False)


def _of_runs(
    names: Sequence[str], options: Options, fails: frozenset[str], operators: Collection[str], home: Home
) -> tuple[ComparisonReport, tuple[str, tuple[str, ...]]]:
    """Two runs that were named, and for the registry the base's commit and the current run."""
    from ...registry.detection.comparison_report import ComparisonReport
    from ...registry.store.index import Index
    from ..compare.stored import of_runs

    base, current = (home.load(x) for x in names)
    progress = of_runs(base, current, Index(home), options, operators)
    shown = f"run {base.header.run}", f"run {current.header.run}"
    report = ComparisonReport(*shown, progress, options, fails)
    return report, (base.header.commit or base.header.run, (current.header.run,))


def _write_back(report: ComparisonReport, base: str, runs: tuple[str, ...], home: Home) -> None:
    """The verdicts as tags in the registry, where there is one. It failing is no verdict."""
    from ...registry.tracking import verdict_tags as verdicts

    if runs and verdicts.has_registry(home):
        try:
            tagged = verdicts.write_back(report, base, runs, home)
        except KernelmarkError as error:
            _tell(f"the verdicts are not in the registry: {error}")
        else:
            _tell(f"registry: {tagged} rows have their verdict as a tag")


def main() -> NoReturn:
    """Entry point of `regression_detector`."""
    run_command(command)
