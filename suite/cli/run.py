"""`kernelmark run`: measure a plan, show progress, record, print the table, write the report."""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ...registry.errors import InputError
from ...registry.figures import counted, seconds
from ...registry.store.home import Home
from ...registry.store.journal import Journal, read
from ...registry.store.record import PROVIDER, DeviceKind, Request, Status
from ...registry.store.transfer import checked_run, join
from .. import budget as budgets
from .. import shards
from ..catalog import Catalog
from ..choice import Choice
from ..estimate import estimate
from ..estimate import known as known_of
from ..plan import Cell, Plan
from ..run import supervisor
from ..run.fingerprint import device_named
from ..run.forkserver import ForkServers
from . import mute, names
from .choosing import HOW, WHAT, choosing, shared

if TYPE_CHECKING:
    from ...registry.views.table import Table

FEW = 3
"""So many cases of an operator are named in a line; more are counted."""
NOBODY = "-"
"""The partner of a run that is a side of a comparison made by runs, whose other side it does not know."""

AFTER = ("no_report", "journal_only", "fail_on", "validate", "ci", "quick")
"""What `--parallel` does with the whole run, or by itself; beside these it takes what a shard takes."""
WRONG: tuple[Status, ...] = ("incorrect", "crashed", "error", "timeout", "out_of_memory")
"""How a row of ours ends that a continuous integration should stop for."""


@click.command("run")
@choosing()
@click.option("--device", help="cuda or cpu; default: the best one here.")
@click.option(
    "--gpus",
    metavar="0,1",
    help="GPUs that it may use, numbered as by nvidia-smi; default: all visible. With --parallel on CPUs: places.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Say what would be measured and how long it is likely to take; measure nothing.",
)
@shared("budget", "note", "fail_on", "shard", "name", "control")
@click.option(
    "--parallel", is_flag=True, help="Shards side by side, one on each of --gpus; a condition of the rows."
)
@click.option("--resume", metavar="RUN", shell_complete=names.runs, help="Go on with a run that was interrupted.")
@shared("seed", "output", "no_report", "journal_only")
@click.option("--quick", is_flag=True, help="Short for --plan quick.")
@click.option("--validate", is_flag=True, help="Then as `kernelmark validate`, exit code included.")
@click.option(
    "--ci", is_flag=True, help="Only the journal and the table; exit code 1 if a row of ours is not right."
)
@click.option("--side", is_flag=True, hidden=True, help="The run is a side of a comparison, and nobody's own.")
@click.pass_context
def command_run(
    ctx: click.Context,
    choice: Choice,
    device: str | None,
    gpus: str | None,
    dry_run: bool,
    budget: float | None,
    note: str | None,
    fail_on: tuple[Status, ...],
    shard: str | None,
    name: str | None,
    control: str | None,
    parallel: bool,
    resume: str | None,
    seed: int | None,
    output: Path | None,
    no_report: bool,
    journal_only: bool,
    side: bool,
    quick: bool,
    validate: bool,
    ci: bool,
) -> None:
    """Measure a plan and record it."""
    from .progress import progress

    choice = choice.of_plan("quick") if quick else choice
    home = Home(output)
    if not dry_run:
        writable(home)
    if parallel:
        if gpus is None:
            raise InputError("--parallel needs --gpus: one shard of the plan on each of them.")
        known = (*WHAT, *HOW, "seed", "control", "device", "parallel", "gpus", "output", *AFTER)
        if asked := asked_for(ctx, but=known):
            raise InputError(f"--parallel cuts the plan itself, and does not go on: leave {', '.join(asked)} out.")
        if ignored := asked_for(ctx, but=known, source=ParameterSource.DEFAULT_MAP):
            _tell(f"--parallel does without these defaults of your configuration: {', '.join(ignored)}", err=True)
        from .fleet import run_parallel

        made = run_parallel(home, gpus, device, choice, seed=seed, control=control)
        journal = home.load(made)
        _after(journal, home, fail_on, no_report=no_report, journal_only=journal_only, validate=validate, ci=ci)
        return
    servers = ForkServers(compiler=True)
    if short := resume is None and not dry_run and choice.plan == "quick" and device_named(device) == "cpu":
        servers.begin(Path(sys.executable))  # it loads while the catalog is read
    catalog = Catalog.default()
    with progress() as listener, servers:
        if resume is not None:
            if asked := asked_for(ctx, but=("resume", "output", "gpus", "no_report", "journal_only", "fail_on")):
                raise InputError(f"--resume goes on with what its run was asked; leave {', '.join(asked)} out.")
            run = supervisor.resume(resume, home, catalog, listener, servers)
            run.gpus = _gpus(gpus, run.device)
        else:
            chosen = device_named(device)
            loaded = choice.load(catalog, chosen)
            worlds = tuple(sorted({x.world for x in loaded.cases}))
            part = None if shard is None else shards.parse(shard)
            if part is not None:
                if name is None or seed is None:
                    raise InputError("--shard needs --run NAME and --seed N, the same for all shards of the run.")
                cells = choice.cells(loaded, catalog, chosen)
                loaded = shards.cut(shards.measured(loaded, cells), cells, part, control)
            elif control is not None:
                raise InputError("--control is the case that all shards have; it needs --shard.")
            cells = choice.cells(loaded, catalog, chosen)
            limit_s = loaded.budget_s if budget is None else budget
            if limit_s is not None or dry_run:
                cost = estimate(loaded.sampling, known_of(home, chosen), chosen)
                kept = cells
                if limit_s is not None:
                    kept = budgets.fit(cells, loaded.replicates, limit_s, cost, control)
                left_out = budgets.without(cells, kept)
                loaded, cells = budgets.narrowed(loaded, kept), kept
                if dry_run:
                    likely_s = budgets.seconds(cells, loaded.replicates, cost)
                    _dry(loaded, cells, left_out, chosen, likely_s, limit_s)
                    return
                if left_out:
                    _tell(f"no time within {seconds(limit_s)} for {_named(left_out)}", err=True)
            run = supervisor.Run(
                plan=loaded,
                cells=cells,
                name=supervisor.new_run() if name is None else checked_run(name),
                request=Request(shard=part, note=note, partner=NOBODY if side else None, control=control),
                catalog=catalog,
                device=chosen,
                gpus=_gpus(gpus, chosen),
                worlds=worlds,
                home=home,
                seed=secrets.randbits(32) if seed is None else seed,
                until=math.inf if limit_s is None else time.monotonic() + limit_s,
                listener=listener,
                servers=servers if short else None,
            )
        if run.past is None and run.path.exists():
            raise InputError(f"run {run.name} is here already; go on with it by --resume, or take another name.")
        path = run.execute()
    _heard(lambda: None)
    if run.ran_out:
        unseen = f": nothing of {_named(run.unmeasured)}" if run.unmeasured else ""
        _tell(f"the budget ended before all was measured{unseen}; go on with: {run.again}", err=True)
    if run.left_out:
        _tell(
            f"to end in time later replicates were left without {_named(run.left_out)}; go on with: {run.again}",
            err=True,
        )
    if run.request.shard is not None:
        missing = join(home, run.name)
        if missing:
            _tell(f"not here yet: shards {', '.join(missing)}; `kernelmark import` joins them to this run")
        path = home.journal(run.name)
    _after(read(path), home, fail_on, no_report=no_report, journal_only=journal_only, validate=validate, ci=ci)


def _after(
    journal: Journal,
    home: Home,
    fail_on: Sequence[Status],
    *,
    no_report: bool,
    journal_only: bool,
    validate: bool,
    ci: bool,
) -> None:
    """What follows a run: its table and report, and the exit code that was asked for."""
    from ...registry.analysis.rows import rows

    if ci:
        from ...registry.views.table import show
        from ...registry.views.tables import run_table

        _heard(lambda: show(run_table(journal)))
    elif not journal_only:
        present(journal, home, report=not no_report)
    if failed := [x for x in rows(journal) if x.status in fail_on]:
        kinds = ", ".join(dict.fromkeys(x.status.replace("_", " ") for x in failed))
        _tell(f"--fail-on: {counted(len(failed), 'row')} {kinds}", err=True)
        sys.exit(1)
    if validate:
        from .validate import shown

        sys.exit(shown(journal))
    if ci and (wrong := [x for x in rows(journal) if x.provider == PROVIDER and x.status in WRONG]):
        _tell(f"not right: {', '.join(str(x.identity) for x in wrong)}", err=True)
        sys.exit(1)


def asked_for(
    ctx: click.Context, but: Sequence[str], source: ParameterSource = ParameterSource.COMMANDLINE
) -> list[str]:
    """The options that stand on the command line, or come from another source: defaults of the user's are one."""
    given = [x for x in ctx.command.params if x.name not in but]
    return [x.opts[0] for x in given if ctx.get_parameter_source(str(x.name)) is source]


def _dry(
    plan: Plan,
    cells: Sequence[Cell],
    left_out: Sequence[Cell],
    device: DeviceKind,
    likely_s: float,
    limit_s: float | None,
) -> None:
    """What would be measured, what of it cannot run here, and what the budget leaves no time for."""
    from ...registry.views.table import Block, line, show

    absent = sum(x.implementation.unavailable(device) is not None for x in cells)
    cannot = f" ({absent} marked * cannot run here)" if absent else ""
    made = f"{counted(len(cells), 'row')}{cannot}, {counted(plan.replicates, 'replicate')}"
    likely = f"likely {seconds(likely_s)}"
    if limit_s is not None and likely_s > limit_s:
        likely += f", more than the {seconds(limit_s)} after which it ends; what is not reached then is named"
    told = line(f"plan {plan.name}: {made}; {likely}. Nothing was measured.")
    page: list[Block] = [_cells("", cells, device)]
    if left_out:
        page += [line(""), _cells("Left out", left_out, device)]
    show([*page, told])


def _cells(title: str, cells: Sequence[Cell], device: DeviceKind) -> Table:
    """A line a case; implementations with a * cannot run here."""
    from ...registry.views.table import Column, Table

    table = Table((Column("operator"), Column("case", folds=20), Column("implementations", folds=20)), title)
    cases: dict[tuple[str, str], dict[str, None]] = {}
    for cell in cells:
        state = "" if cell.cache == "cold" else f" ({cell.cache})"
        mark = "" if cell.implementation.unavailable(device) is None else "*"
        named = cases.setdefault((cell.case.operator, cell.case.name + state), {})
        named.setdefault(cell.implementation.name + mark)
    for (operator, case), implementations in cases.items():
        table.add(operator, case, ", ".join(implementations))
    return table


def _named(cells: Sequence[Cell]) -> str:
    """Cells by operator: their cases, or how many where those are too many for a line."""
    operators: dict[str, dict[str, None]] = {}
    for cell in cells:
        operators.setdefault(cell.case.operator, {}).setdefault(cell.case.name)
    told = [
        f"{operator} {', '.join(names) if len(names) <= FEW else counted(len(names), 'case')}"
        for operator, names in operators.items()
    ]
    all_ = "" if len(cells) <= FEW else " (--dry-run lists all)"
    return f"{counted(len(cells), 'row')}: {'; '.join(told)}{all_}"


def _gpus(text: str | None, device: str) -> tuple[int, ...]:
    """The numbers of `--gpus`; none where it is not given."""
    if text is None:
        return ()
    if device == "cpu":
        raise InputError("--gpus is for device cuda; on a CPU the ranks of a case are processes.")
    from ..container.gpus import chosen

    return chosen(text)


def writable(home: Home) -> None:
    """Raises `InputError` if no results can be written there."""
    try:
        home.journals.mkdir(parents=True, exist_ok=True)
        probe = home.journals / f".probe-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"results cannot be written to {home.folder}: {error.strerror}. "
            f"Choose another folder with --output or KERNELMARK_HOME."
        ) from None


def present(journal: Journal, home: Home, report: bool) -> None:
    """After a run: the table, how time was spent, the report, the registry.

    Where the output cannot be written all else is done the same.
    """
    from ...registry.views.table import show
    from ...registry.views.tables import run_table

    _heard(lambda: show(run_table(journal)))
    _tell(f"run       {journal.header.run}")
    _tell(f"journal   {journal.path}")
    if report:
        _report(journal, home)
    _record(journal, home)


def _heard(show: Callable[[], object]) -> None:
    """Shows something; a reader that went away, or a full disk behind the output, is no failure of the run."""
    try:
        show()
        sys.stdout.flush()
    except OSError:
        mute()


def _tell(line: str, err: bool = False) -> None:
    _heard(lambda: click.echo(line, err=err))


def _report(journal: Journal, home: Home) -> None:
    from .report import write_report

    try:
        _tell(f"report    {write_report([journal], home)}")
    except InputError as error:  # no page is no reason to lose the rest
        _tell(f"report    not written: {error}")


def _record(journal: Journal, home: Home) -> None:
    """Into the registry, where there is one; the journal is safe either way."""
    if find_spec("mlflow") is None:
        _tell("registry  not filled: MLflow is not installed here; import the journal where it is")
        return
    from ...registry.tracking.store import StoreError
    from .transfer import fill

    try:
        done = fill(home, [journal.header.run])
    except StoreError as error:
        _tell(f"registry  not filled: {error}", err=True)
        return
    for x in done.ingested:
        _tell(f"registry  {counted(x.created, 'row')} recorded; look with: kernelmark ui")
