"""`regression_detector`: did this commit make a kernel slower? The exit code is the verdict."""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

import click
import msgspec

from ...registry.errors import InputError, KernelmarkError
from ...registry.figures import counted
from ...registry.store.home import Home
from . import names, run_command
from .results import writable, writable_file
from .values import Duration, Seed, Share
from .verdicts import Shown, show

if TYPE_CHECKING:
    from ...registry.detection.comparison import Options
    from ...registry.detection.comparison_report import ComparisonReport
    from ...registry.store.index import Index
    from ...registry.store.metric import Metric
    from ...registry.store.record import Record
    from ..compare.question import Question
    from ..compare.revisions import Checkout

    Found: TypeAlias = tuple[ComparisonReport, str, tuple[str, ...]]
    """The result, and for the registry the base's commit and the current side's runs."""

RUN = "run:"
"""Before a run's name in the place of a revision."""
EXPLAINING = 0.4
"""Share of the budget that is kept for --attribute and --bisect: to decide noisy rows could use up all of it."""


@dataclass(frozen=True)
class Narrowed:
    """Which rows are asked for."""

    plan: str | None
    operators: tuple[str, ...]
    implementations: tuple[str, ...]
    shard: str | None
    device: str | None


@dataclass(frozen=True)
class Asked:
    """What is compared with what, how it is decided, and what is wanted beside the verdicts."""

    baseline: str | None
    against: str | None
    current: str
    mode: Literal["auto", "stored", "ab"]
    options: Options
    fail_on: tuple[str, ...]
    described: bool
    """With statistics that decide nothing."""
    attribute: bool
    bisect: bool
    environments: tuple[str | None, str | None]
    budget: float
    """Seconds of measuring."""
    measure_same: bool
    seed: int

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that were named in the place of revisions."""
        return tuple(x.removeprefix(RUN) for x in (self.baseline or "", self.current) if x.startswith(RUN))

    @property
    def explains(self) -> bool:
        """Whether what became slower is measured again, for its cause or its commit."""
        return self.attribute or self.bisect

    def refuse(self) -> None:
        """Raises `InputError` for what cannot be asked at once."""
        if (self.baseline is None) == (self.against is None):
            raise InputError("give --baseline REV or --against best:N, and not both.")
        if self.mode == "stored" and self.explains:
            raise InputError("--attribute and --bisect measure, and --mode stored never does: use auto or ab.")
        if self.mode == "stored" and any(self.environments):
            raise InputError("stored runs are not known by their environment: one that is named needs --mode ab.")
        if self.runs and (len(self.runs) == 1 or self.mode == "ab" or self.explains):
            raise InputError(f"{RUN}NAME is for both sides at once, and for nothing that measures.")


def _grouped(name: str, group: type[Any], *options: Callable[..., Any]) -> Callable[..., Any]:
    """The options as one argument of the command."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def call(**given: Any) -> Any:
            mine = {field: given.pop(field) for field in group.__dataclass_fields__}
            return command(**given, **{name: group(**mine)})

        for option in reversed(options):
            option(call)
        return call

    return decorate


_NARROWING = (
    click.option(
        "--plan",
        shell_complete=names.plans,
        help="Cases to measure, as for `kernelmark run`; default: quick. Stored: runs of that plan.",
    ),
    click.option(
        "--operator",
        "operators",
        multiple=True,
        shell_complete=names.operators,
        help="Only this operator; repeatable.",
    ),
    click.option(
        "--implementation",
        "implementations",
        multiple=True,
        shell_complete=names.implementations,
        help="Only this implementation or provider; repeatable. Default: the kernels that the commits hold.",
    ),
    click.option(
        "--shard",
        metavar="I/N",
        help="Only the I-th of N parts of the plan, cut by case: both sides of a pair stay on one machine.",
    ),
    click.option(
        "--device", help="cuda, rocm, xpu, mps or cpu; default: the best one here, or that of the stored runs."
    ),
)
_SHOWING = (
    click.option("--all", "everything", is_flag=True, help="Show unchanged rows too."),
    click.option("--json", "as_json", is_flag=True, help="For machines: one object with a verdict per row."),
    click.option("--markdown", type=click.Path(path_type=Path), help="Write a pull-request comment to this file."),
    click.option("--junit", type=click.Path(path_type=Path), help="Write JUnit XML to this file."),
    click.option("--html", type=click.Path(path_type=Path), help="Write a page that opens offline to this file."),
    click.option(
        "--no-registry",
        is_flag=True,
        help="Do not tag the current side's runs in the registry with their verdicts; without one none are.",
    ),
)


@click.command("regression_detector", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--baseline", metavar="REV", help="What to compare with: anything git resolves, or run:NAME.")
@click.option(
    "--against",
    metavar="best:N|tag[:PATTERN]",
    help="In place of --baseline: the fastest of the last N commits by stored runs, or the last tag before "
    "--current, so that small slowdowns do not add up.",
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
@_grouped("narrowed", Narrowed, *_NARROWING)
@click.option(
    "--budget",
    type=Duration(),
    default="30m",
    show_default=True,
    help="Time for measuring; then it is decided. It says before it starts what that can settle. With "
    "--attribute or --bisect two fifths are kept for them, and left over where nothing became slower.",
)
@click.option(
    "--fail-above", type=Share(), default="5%", show_default=True, help="A regression is more than this."
)
@click.option(
    "--warn-above",
    type=Share(),
    help="A warning is more than this; default: 3%, or --fail-above where that is less.",
)
@click.option(
    "--fail-on",
    multiple=True,
    default=("default",),
    metavar="VERDICT",
    help="Verdicts and metrics that fail, repeatable: regression, warning, improvement, 'below the limit', "
    "incorrect, missing, "
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
@_grouped("shown", Shown, *_SHOWING)
@click.option(
    "--measure-same",
    is_flag=True,
    help="Measure rows whose code is the same in both commits like any other (an A/A), not once.",
)
@click.option("--seed", type=Seed(), help="Seed of inputs and order; default: random, recorded.")
@click.option("--output", type=click.Path(path_type=Path), help="Results' folder, in place of $KERNELMARK_HOME.")
def command(
    baseline: str | None,
    against: str | None,
    current: str,
    mode: Literal["auto", "stored", "ab"],
    narrowed: Narrowed,
    budget: float,
    fail_above: float,
    warn_above: float | None,
    fail_on: tuple[str, ...],
    statistics: str,
    attribute: bool,
    base_environment: str | None,
    current_environment: str | None,
    bisect: bool,
    shown: Shown,
    measure_same: bool,
    seed: int | None,
    output: Path | None,
) -> int:
    """Did CURRENT make a kernel slower than BASELINE?

    Compares two commits of the checkout in the current directory, row by row, with the harness that is
    installed: only kernels/ and baselines/ come from the commits. Exit codes: 0 no regression, 1 regression,
    2 wrong usage, 3 inconclusive within the budget, 4 not comparable or missing, 5 the harness failed.
    """
    asked = Asked(
        baseline=baseline,
        against=against,
        current=current,
        mode="ab" if (base_environment or current_environment) and mode != "stored" else mode,
        options=_limits(fail_above, warn_above, apart=base_environment != current_environment),
        fail_on=fail_on,
        described=statistics == "all",
        attribute=attribute,
        bisect=bisect,
        environments=(base_environment, current_environment),
        budget=budget,
        measure_same=measure_same,
        seed=secrets.randbits(31) if seed is None else seed,
    )
    asked.refuse()
    for option, path in (("--markdown", shown.markdown), ("--junit", shown.junit), ("--html", shown.html)):
        if path is not None:
            writable_file(path, option)
    home = Home(output)
    report, base, runs = (_of_runs if asked.runs else _of_commits)(asked, narrowed, home)
    show(report, shown)
    if not shown.no_registry:
        _write_back(report, base, runs, home)
    return report.exit_code


def _of_commits(asked: Asked, narrowed: Narrowed, home: Home) -> Found:
    """Two commits of the checkout here, from stored runs, an A/B, or both."""
    from ...registry.detection import verdict
    from ...registry.detection.comparison_report import ComparisonReport
    from ...registry.store.index import Index
    from ..compare.revisions import Checkout

    fails = verdict.fail_on(asked.fail_on, _metrics(narrowed.operators))
    checkout = Checkout.here()
    if asked.mode != "stored":
        writable(home)
    index = Index(home)
    question = _question(asked, narrowed, checkout, index, home)
    base, head = question.base, question.current
    if not head.dirty and asked.current == "HEAD" and checkout.dirty:
        _tell("there are uncommitted changes, which HEAD does not have; `--current worktree` compares them")
    answer = question.answer(asked.mode, home, index)
    remarks = tuple(x for x in (question.settling(answer),) if x is not None)
    report = ComparisonReport(str(base), str(head), answer.progress, asked.options, fails, remarks=remarks)
    if asked.described:
        report = _described(report, *answer.records, tuple(_metrics(())))
    if report.slower and asked.explains:
        report = question.explained(report, answer, home, index, asked.attribute, asked.bisect)
    return report, base.commit, answer.runs


def _question(asked: Asked, narrowed: Narrowed, checkout: Checkout, index: Index, home: Home) -> Question:
    """The two commits, with all that narrows what is asked of them. Its time begins now."""
    from ..catalog import Catalog
    from ..compare.against import against
    from ..compare.interleaved import kernel_providers, rooted
    from ..compare.question import Question
    from ..shards import parse
    from .environment_options import environments

    head = checkout.resolve(asked.current)
    sides = environments(*asked.environments, narrowed.device, home)
    if asked.baseline is not None:
        base = checkout.resolve(asked.baseline)
    else:
        base = against(
            checkout,
            index,
            head,
            asked.against or "",
            narrowed.operators,
            _tell,
            providers=kernel_providers(rooted(Catalog.default(), checkout)),
            device=narrowed.device,
        )
    until = time.monotonic() + asked.budget  # which an image that had to be built takes nothing of
    return Question(
        checkout=checkout,
        base=base,
        current=head,
        operators=narrowed.operators,
        implementations=narrowed.implementations,
        device=narrowed.device,
        plan=narrowed.plan,
        shard=None if narrowed.shard is None else parse(narrowed.shard),
        options=asked.options,
        decided_by=until - EXPLAINING * asked.budget * asked.explains,
        until=until,
        environments=sides,
        seed=asked.seed,
        tell=_tell,
        measure_same=asked.measure_same,
    )


def _limits(fail_above: float, warn_above: float | None, apart: bool = False) -> Options:
    """The thresholds. What is tolerated stays below what is warned of, however low that is.

    Where the environments are two, one of them may well move every row: that is what is asked, and no sign of
    another machine.
    """
    from ...registry.detection.comparison import Options

    usual = Options()
    warn = min(usual.warn_above, fail_above) if warn_above is None else warn_above
    return Options(
        fail_above=fail_above,
        warn_above=warn,
        tolerated=min(usual.tolerated, warn / 2),
        shift_above=math.inf if apart else usual.shift_above,
    )


def _tell(text: str) -> None:
    """Progress and remarks; standard output is for the result."""
    click.echo(text, err=True)


def _metrics(operators: Collection[str]) -> Iterator[Metric]:
    """What is measured of these operators and workloads, of all where none is named. One that is not here is of
    stored runs.
    """
    from ..catalog import Catalog

    for name, definition in Catalog.default().definitions.items():
        if not operators or name in operators:
            yield from definition.metrics


def _of_runs(asked: Asked, narrowed: Narrowed, home: Home) -> Found:
    """Two runs that were named."""
    from ...registry.detection import verdict
    from ...registry.detection.comparison_report import ComparisonReport
    from ...registry.store.index import Index
    from ..compare.stored import of_runs

    base, current = (home.load(x) for x in asked.runs)
    fails = verdict.fail_on(asked.fail_on, (*base.header.metrics, *current.header.metrics))
    progress = of_runs(base, current, Index(home), asked.options, narrowed.operators)
    sides = f"run {base.header.run}", f"run {current.header.run}"
    report = ComparisonReport(*sides, progress, asked.options, fails)
    if asked.described:
        report = _described(report, base.records, current.records, current.header.metrics)
    return report, base.header.commit or base.header.run, (current.header.run,)


def _described(
    report: ComparisonReport, base: Sequence[Record], current: Sequence[Record], metrics: Sequence[Metric]
) -> ComparisonReport:
    """The report with the statistics that decide nothing."""
    from ...registry.detection.descriptive import describe_records

    rates = {x.name for x in metrics if x.better == "higher"}
    return msgspec.structs.replace(report, statistics=dict(describe_records(base, current, rates)))


def _write_back(report: ComparisonReport, base: str, runs: tuple[str, ...], home: Home) -> None:
    """The verdicts as tags in the registry, where there is one. It failing is no verdict."""
    from ...registry.tracking import verdict_tags as verdicts

    if runs and verdicts.has_registry(home):
        try:
            tagged = verdicts.write_back(report, base, runs, home)
        except KernelmarkError as error:
            _tell(f"the verdicts are not in the registry: {error}")
        else:
            _tell(f"registry: {counted(tagged, 'row')} tagged with the verdict")


def main() -> NoReturn:
    """Entry point of `regression_detector`."""
    run_command(command)
