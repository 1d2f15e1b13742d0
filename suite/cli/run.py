"""`kernelmark run`: measure a plan, show progress, record, print the table, write the report."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import click

from ...registry.errors import InputError
from ...registry.store.home import Home
from ...registry.store.journal import Journal, read
from ...registry.store.record import Request
from ...registry.store.transfer import checked_run, join
from .. import plan as plans
from .. import shards
from ..catalog import Catalog
from ..measure.stopping import TimerName
from ..run import supervisor
from ..run.fingerprint import device_named
from . import mute
from .plan_option import plan_option


@click.command("run")
@plan_option
@click.option("--operator", "operators", multiple=True, help="Only this operator; repeatable.")
@click.option("--implementation", "implementations", multiple=True, help="Only this implementation or provider.")
@click.option("--device", help="cuda or cpu; default: the best one here.")
@click.option("--replicates", type=click.IntRange(1, 1000), help="Fresh processes; default: the plan's.")
@click.option("--cache", type=click.Choice(["cold", "hot", "both"]), help="Cache state; default: the plan's.")
@click.option(
    "--timer", type=click.Choice(["auto", "events", "graph", "cupti"]), help="GPU timer; default: the case's own."
)
@click.option("--shard", metavar="I/N", help="Only the I-th of N parts of the plan, cut by case; needs --run.")
@click.option("--run", "name", help="The run's name: one for all shards, on whichever machine.")
@click.option(
    "--control",
    metavar="OPERATOR/CASE",
    help="With --shard: a case that every shard measures, to hold machines against each other.",
)
@click.option(
    "--parallel", is_flag=True, help="Shards side by side, one on each of --gpus; a condition of the rows."
)
@click.option("--gpus", metavar="0,1", help="With --parallel: GPUs as nvidia-smi numbers them; on a CPU, places.")
@click.option("--seed", type=int, help="Seed of inputs and order; default: random, recorded.")
@click.option("--resume", metavar="RUN", help="Go on with a run that was interrupted.")
@click.option("--output", type=click.Path(path_type=Path), help="Results' folder, in place of $KERNELMARK_HOME.")
@click.option("--no-report", is_flag=True, help="Leave out the HTML report.")
@click.option("--journal-only", is_flag=True, help="Write the journal and leave the rest to another machine.")
def command_run(
    plan: str,
    operators: tuple[str, ...],
    implementations: tuple[str, ...],
    device: str | None,
    replicates: int | None,
    cache: str | None,
    timer: TimerName | None,
    shard: str | None,
    name: str | None,
    control: str | None,
    parallel: bool,
    gpus: str | None,
    seed: int | None,
    resume: str | None,
    output: Path | None,
    no_report: bool,
    journal_only: bool,
) -> None:
    """Measure a plan and record it."""
    from .progress import progress

    home = Home(output)
    writable(home)
    if parallel or gpus is not None:
        if not parallel or gpus is None:
            raise InputError("--parallel and --gpus go together: one shard of the plan on each GPU.")
        if resume is not None or shard is not None or name is not None:
            raise InputError(
                "--parallel cuts the plan itself, and such a run does not go on: leave the others out."
            )
        from .fleet import run_parallel

        side_by_side = run_parallel(
            home,
            gpus,
            device,
            plan=plan,
            operators=operators,
            implementations=implementations,
            replicates=replicates,
            cache=cache,
            timer=timer,
            seed=seed,
            control=control,
        )
        if not journal_only:
            present(home.load(side_by_side), home, report=not no_report)
        return
    catalog = Catalog.default()
    with progress() as listener:
        if resume is not None:
            given = (device, cache, timer, shard, name, control, seed is not None)
            if operators or implementations or replicates or any(given):
                raise InputError("--resume goes on with what its run was asked; leave the other options out.")
            run = supervisor.resume(resume, home, catalog, listener)
        else:
            chosen = device_named(device)
            loaded = plans.load(plan, catalog, chosen, operators).but(replicates, cache, timer)
            part = None if shard is None else shards.parse(shard)
            if part is not None:
                if name is None or seed is None:
                    raise InputError("--shard needs --run NAME and --seed N, the same for all shards of the run.")
                loaded = shards.cut(loaded, loaded.cells(catalog, chosen, implementations), part, control)
            elif control is not None:
                raise InputError("--control is the case that all shards have; it needs --shard.")
            run = supervisor.Run(
                plan=loaded,
                cells=loaded.cells(catalog, chosen, implementations),
                name=supervisor.new_run() if name is None else checked_run(name),
                request=Request(shard=part, control=control),
                catalog=catalog,
                device=chosen,
                home=home,
                seed=secrets.randbits(32) if seed is None else seed,
                listener=listener,
            )
        if run.past is None and run.path.exists():
            raise InputError(f"run {run.name} is here already; go on with it by --resume, or take another name.")
        path = run.execute()
    _heard(lambda: None)
    if run.request.shard is not None:
        missing = join(home, run.name)
        if missing:
            _tell(f"not here yet: shards {', '.join(missing)}; `kernelmark import` joins them to this run")
        path = home.journal(run.name)
    if not journal_only:
        present(read(path), home, report=not no_report)


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
    from ...registry.escape import console
    from ...registry.views.tables import run_table

    _heard(lambda: console().print(run_table(journal)))
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
    from ...registry.tracking.store import StoreError, sync

    try:
        done = sync(home, [journal.header.run])
    except StoreError as error:
        _tell(f"registry  not filled: {error}", err=True)
        return
    for x in done.ingested:
        _tell(f"registry  {x.created} rows recorded; look with: kernelmark ui")
