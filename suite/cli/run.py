"""`kernelmark run`: measure a plan, show progress, record, print the table, write the report."""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ...registry.errors import InputError
from ...registry.figures import counted, seconds
from ...registry.store.home import Home
from ...registry.store.journal import Journal, read
from ...registry.store.record import PROVIDER, DeviceKind, Request, Status
from ...registry.store.shards import checked_beside
from ...registry.store.transfer import checked_run, join
from .. import budget as budgets
from .. import shards
from ..catalog import Catalog
from ..choice import Choice
from ..estimate import estimate
from ..estimate import known as known_of
from ..plan import Cell, Plan
from ..run import supervisor
from ..run.fingerprint import device_named, devices_here
from ..run.forkserver import ForkServers
from . import names
from .choosing import HOW, WHAT, asked_for, choosing, shared, with_resume
from .results import heard, present, tell, writable

if TYPE_CHECKING:
    from ...registry.views.table import Table

FEW = 3
"""So many cases of an operator are named in a line; more are counted."""
NOBODY = "-"
"""The partner of a run that is a side of a comparison made by runs, whose other side it does not know."""

AFTER = ("no_report", "journal_only", "fail_on", "validate", "ci", "quick")
"""What `--parallel` does with the whole run, or by itself; beside these it takes what a shard takes."""
RESUMED = ("resume", "any_board", "parallel", "output", "gpus", "no_report", "journal_only", "fail_on")
"""What a run that goes on takes: what is of this machine and this launch."""
WRONG: tuple[Status, ...] = ("incorrect", "crashed", "error", "timeout", "out_of_memory")
"""How a row of ours ends that a continuous integration should stop for."""


@click.command("run")
@choosing()
@click.option("--device", help="cuda, rocm, xpu, mps or cpu; default: the best one here.")
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
@shared("any_board", "seed", "output", "no_report", "journal_only")
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
    any_board: bool,
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

    with_resume(resume)
    if resume is not None and (asked := asked_for(ctx, but=RESUMED)):
        raise InputError(f"--resume goes on with what its run was asked; leave {', '.join(asked)} out.")
    if quick and ctx.get_parameter_source("plan") is ParameterSource.COMMANDLINE:
        if ctx.get_parameter_source("quick") is ParameterSource.COMMANDLINE:
            raise InputError("--quick is short for --plan quick; give one of --quick and --plan.")
        quick = False  # of the configuration file, before which the command line comes
    choice = choice.of_plan("quick") if quick else choice
    home = Home(output)
    if not dry_run:
        writable(home)
    if parallel:
        beside = _side_by_side(ctx, home, gpus, device, choice, seed, control, resume, any_board)
        journal = home.load(beside)
        _after(journal, home, fail_on, no_report=no_report, journal_only=journal_only, validate=validate, ci=ci)
        return
    servers = ForkServers(compiler=True)
    if short := resume is None and not dry_run and choice.plan == "quick" and device_named(device) == "cpu":
        servers.begin(Path(sys.executable))  # it loads while the catalog is read
    catalog = Catalog.default()
    with progress() as listener, servers:
        if resume is not None:
            run = supervisor.resume(resume, home, catalog, listener, servers, any_board=any_board)
            run.gpus = gpus_named(gpus, run.device)
        else:
            chosen = device_named(device, elsewhere=dry_run)
            here = chosen in devices_here()
            numbers = gpus_named(gpus, chosen)
            named = supervisor.new_run() if name is None else checked_run(name)
            part = None if shard is None else shards.parse(shard)
            if part is None or budget is not None:
                loaded = choice.load(catalog, chosen)
            else:
                loaded = choice.unbudgeted(catalog, chosen, shards.EACH_ITS_OWN)
            worlds = tuple(sorted({x.world for x in loaded.cases}))
            loaded = _cut(loaded, choice, catalog, chosen, part, control, complete=None not in (name, seed))
            limit_s = loaded.budget_s if budget is None else budget
            fitted = _within(limit_s, loaded, choice, catalog, home, chosen, control, likely=dry_run, here=here)
            for reason, systems in loaded.left_out(catalog, chosen, choice.implementations).items():
                tell(f"not measured: {', '.join(systems)}: {reason}", err=True)
            if dry_run:
                _dry(fitted, chosen, limit_s, here)
                return
            if fitted.left_out and limit_s is not None:
                tell(f"no time within {seconds(limit_s)} for {_named(fitted.left_out)}", err=True)
            if part is not None:
                plan = fitted.plan
                how = {"plan": plan.name, "seed": seed, "replicates": plan.replicates, "device": chosen}
                wanted = plan.request(fitted.cells, Request(shard=part, control=control))
                checked_beside(home, named, part, wanted, control=control, **how)
            run = supervisor.Run(
                plan=fitted.plan,
                cells=fitted.cells,
                name=named,
                request=Request(shard=part, note=note, partner=NOBODY if side else None, control=control),
                catalog=catalog,
                device=chosen,
                gpus=numbers,
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
    _tell_unmeasured(run)
    if run.request.shard is not None:
        if missing := join(home, run.name):
            tell(f"not here yet: shards {', '.join(missing)}; `kernelmark import` joins them to this run")
        path = home.journal(run.name)
    _after(read(path), home, fail_on, no_report=no_report, journal_only=journal_only, validate=validate, ci=ci)


def _side_by_side(
    ctx: click.Context,
    home: Home,
    gpus: str | None,
    device: str | None,
    choice: Choice,
    seed: int | None,
    control: str | None,
    resume: str | None,
    any_board: bool,
) -> str:
    """--parallel: the whole run's name, whose shards were measured on one GPU each."""
    if gpus is None:
        raise InputError("--parallel needs --gpus: one shard of the plan on each of them.")
    from .fleet import resume_parallel, run_parallel

    if resume is not None:
        return resume_parallel(home, gpus, resume, any_board=any_board)
    known = (*WHAT, *HOW, "seed", "control", "device", "parallel", "gpus", "output", *AFTER)
    if asked := asked_for(ctx, but=known):
        raise InputError(f"--parallel cuts the plan itself: leave {', '.join(asked)} out.")
    if ignored := asked_for(ctx, but=known, source=ParameterSource.DEFAULT_MAP):
        tell(f"--parallel does without these defaults of your configuration: {', '.join(ignored)}", err=True)
    return run_parallel(home, gpus, device, choice, seed=seed, control=control)


def _cut(
    plan: Plan,
    choice: Choice,
    catalog: Catalog,
    device: DeviceKind,
    shard: tuple[int, int] | None,
    control: str | None,
    complete: bool,
) -> Plan:
    """The plan, or that of one shard, for which name and seed must be given too (`complete`)."""
    if shard is None:
        if control is not None:
            raise InputError("--control is the case that all shards have; it needs --shard.")
        return plan
    if not complete:
        raise InputError("--shard needs --run NAME and --seed N, the same for all shards of the run.")
    cells = choice.cells(plan, catalog, device)
    return shards.cut(shards.measured(plan, cells), cells, shard, control)


@dataclass(frozen=True)
class Fitted:
    """What a budget is likely to suffice for; `likely_s` seconds, where that was asked."""

    plan: Plan
    cells: tuple[Cell, ...]
    left_out: tuple[Cell, ...] = ()
    likely_s: float = math.nan


def _within(
    limit_s: float | None,
    plan: Plan,
    choice: Choice,
    catalog: Catalog,
    home: Home,
    device: DeviceKind,
    control: str | None,
    likely: bool,
    here: bool,
) -> Fitted:
    """The plan's cells, of which a limit leaves out what says least."""
    cells = choice.cells(plan, catalog, device)
    if limit_s is None and not likely:
        return Fitted(plan, cells)
    past = known_of(home, device, {x.case.operator for x in cells})
    cost = estimate(plan.sampling, past, device, here)
    kept = cells if limit_s is None else budgets.fit(cells, plan.most, limit_s, cost, control)
    likely_s = budgets.seconds(kept, plan.most, cost)
    return Fitted(budgets.narrowed(plan, kept), kept, budgets.without(cells, kept), likely_s)


def _tell_unmeasured(run: supervisor.Run) -> None:
    """What a run had no time for, and how to go on with it."""
    heard(lambda: None)
    if run.ran_out:
        unseen = f": nothing of {_named(run.unmeasured)}" if run.unmeasured else ""
        tell(f"the budget ended before all was measured{unseen}; go on with: {run.again}", err=True)
    if run.left_out:
        tell(
            f"to end in time later replicates were left without {_named(run.left_out)}; go on with: {run.again}",
            err=True,
        )


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

        heard(lambda: show(run_table(journal)))
    elif not journal_only:
        present(journal, home, report=not no_report)
    if failed := [x for x in rows(journal) if x.status in fail_on]:
        kinds = ", ".join(dict.fromkeys(x.status.replace("_", " ") for x in failed))
        tell(f"--fail-on: {counted(len(failed), 'row')} {kinds}", err=True)
        sys.exit(1)
    if validate:
        from .validate import shown

        sys.exit(shown(journal))
    # A kernel that stands beside one of ours has its root's name for a provider, and is the user's own.
    ours = {PROVIDER, *(x.folder.name for x in Catalog.default().roots)}
    if ci and (wrong := [x for x in rows(journal) if x.provider in ours and x.status in WRONG]):
        tell(f"not right: {', '.join(str(x.identity) for x in wrong)}", err=True)
        sys.exit(1)


def _dry(fitted: Fitted, device: DeviceKind, limit_s: float | None, here: bool) -> None:
    """What would be measured, what of it cannot run here, and what the budget leaves no time for; of a device of
    another machine, what cannot run on such.
    """
    from ...registry.views.table import Block, line, show

    absent = sum(x.implementation.unavailable(device, here) is not None for x in fitted.cells)
    cannot = f" ({absent} marked * cannot run {'here' if here else f'on {device}'})" if absent else ""
    made = f"{counted(len(fitted.cells), 'row')}{cannot}, {counted(fitted.plan.most, 'replicate')}"
    likely = f"likely {seconds(fitted.likely_s)}"
    if limit_s is not None and fitted.likely_s > limit_s:
        likely += f", more than the {seconds(limit_s)} after which it ends; what is not reached then is named"
    elsewhere = (
        "" if here else f" There is no device {device!r} here: what its machine has installed is not known."
    )
    told = line(f"plan {fitted.plan.name}: {made}; {likely}. Nothing was measured.{elsewhere}")
    page: list[Block] = [_cells("", fitted.cells, device, here)]
    if fitted.left_out:
        page += [line(""), _cells("Left out", fitted.left_out, device, here)]
    show([*page, told])


def _cells(title: str, cells: Sequence[Cell], device: DeviceKind, here: bool) -> Table:
    """A line a case; implementations with a * cannot run."""
    from ...registry.views.table import Column, Table

    table = Table((Column("operator"), Column("case", folds=20), Column("implementations", folds=20)), title)
    cases: dict[tuple[str, str], dict[str, None]] = {}
    for cell in cells:
        state = "" if cell.cache == "cold" else f" ({cell.cache})"
        mark = "" if cell.implementation.unavailable(device, here) is None else "*"
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


def gpus_named(text: str | None, device: str) -> tuple[int, ...]:
    """The numbers of `--gpus`; none where it is not given."""
    if text is None:
        return ()
    if device == "cpu":
        raise InputError("--gpus is for device cuda; on a CPU the ranks of a case are processes.")
    from ..container.gpus import chosen

    return chosen(text)
