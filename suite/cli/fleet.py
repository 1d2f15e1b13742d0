"""`kernelmark fleet`: one run over many machines, by an engine that is there."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import click
import msgspec
from click.core import ParameterSource

from ...registry.errors import InputError
from ...registry.escape import plain
from ...registry.figures import counted
from ...registry.store.home import Home
from . import names
from .choosing import WHAT, choosing, shared
from .results import present, writable

if TYPE_CHECKING:
    from ..choice import Choice
    from ..fleet.collect import Refused, State
    from ..fleet.order import Order

SHARDS_HELP = "Parts of the plan; default: 16, or its cases, of trainings their seeds."
OWN = frozenset(
    f"--{x}"
    for x in (
        *("plan", "shard", "mode", "device", "seed", "output", "operator", "implementation"),
        *("baseline", "against", "current", "json", "markdown", "junit", "html", "no-registry"),
    )
)
"""Options of `regression_detector` that a fleet gives each shard itself, or whose files each would write anew."""
RUN = names.run_argument("run", default="latest", metavar="[RUN]")


@click.group("fleet", subcommand_metavar="COMMAND")
def command_fleet() -> None:
    """One run over many machines, by an engine that is there: Ray, Slurm, Kubernetes.

    The plan is cut by case into shards, a long training by seed. Each is `kernelmark run --shard` on one host,
    in a pinned image if one is named and else from the checkout; its journal comes back, and what is missing is
    asked for again.
    """


@command_fleet.command("run")
@click.option("--on", "engine", type=click.Choice(["ray", "slurm", "kubernetes"]), help="What starts the shards.")
@click.option("--shards", type=click.IntRange(1, 9999), help=SHARDS_HELP)
@choosing()
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="Of the hosts."
)
@shared("seed")
@click.option(
    "--control",
    metavar="OPERATOR/CASE|none",
    help="The case that every shard measures, to hold hosts against each other; default: a cheap large one.",
)
@click.option("--image", metavar="IMAGE", help="A pinned image, by digest; without it: the hosts' checkouts.")
@click.option(
    "--container",
    type=click.Choice(["docker", "pyxis", "apptainer"]),
    help="How a host comes into the image; default: Docker, by `kernelmark bench`.",
)
@click.option("--gpus-per-shard", type=click.IntRange(1, 64), default=1, show_default=True, help="Of one host.")
@click.option("--shared", is_flag=True, help="A host may have several shards at once; a condition of the rows.")
@click.option("--address", help="Ray's address; default: the cluster that this machine is of.")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="WORD",
    help="For the engine as it is; repeatable. Slurm: an option of sbatch. Ray: RESOURCE=AMOUNT.",
)
@click.option(
    "--claim", default="kernelmark", show_default=True, help="Kubernetes: the volume claim to deliver to."
)
@click.option("--hosts", type=click.IntRange(1), help="Kubernetes: at most so many at once.")
@click.option("--attempts", type=click.IntRange(1, 100), default=3, show_default=True, help="Of each shard.")
@click.option("--no-wait", is_flag=True, help="Slurm: ask for all shards and leave; --resume collects.")
@click.option(
    "--resume",
    metavar="RUN",
    shell_complete=names.runs,
    help="Go on with a run: collect what came, ask for what is missing.",
)
@shared("output", "no_report", "journal_only")
def fleet_run(
    engine: Literal["ray", "slurm", "kubernetes"] | None,
    shards: int | None,
    resume: str | None,
    attempts: int,
    no_wait: bool,
    claim: str,
    hosts: int | None,
    output: Path | None,
    no_report: bool,
    journal_only: bool,
    **asked: Any,
) -> None:
    """Measure a plan on many machines, until it is whole."""
    from ..catalog import Catalog
    from ..fleet import order as orders
    from ..fleet.asked import Asked
    from ..fleet.drive import again, drive
    from ..fleet.engine import engine_of
    from ..fleet.manifest import manifest

    home = Home(output)
    writable(home)
    if resume is not None:
        given = click.get_current_context().get_parameter_source
        if engine or shards or any(given(x) is ParameterSource.COMMANDLINE for x in asked.keys() - {"address"}):
            raise InputError("--resume goes on with what its run was asked; leave the other options out.")
        order = orders.load(home, resume)
        if asked["address"]:  # a cluster that was started anew is somewhere else
            order = msgspec.structs.replace(order, address=asked["address"])
    else:
        if engine is None:
            raise InputError("--on says what starts the shards: ray, slurm or kubernetes.")
        if no_wait and engine != "slurm":
            raise InputError("--no-wait is for Slurm: tasks of Ray end with whoever asked for them.")
        catalog, wanted = Catalog.default(), Asked(**asked)
        plan = wanted.measured(catalog)
        order = wanted.order(engine, shards, catalog, home, plan)
        if large := wanted.too_large(plan):
            each = f"--gpus-per-shard {wanted.gpus_per_shard}"
            told = (
                f"{len(large)} of {counted(len(plan.cases), 'case')} will be `unsupported`: more GPUs than {each}"
            )
            click.echo(told, err=True)
        if engine == "kubernetes":
            text = msgspec.json.format(msgspec.json.encode(manifest(order, claim, hosts)), indent=2)
            orders.save(order, home)
            click.echo(text.decode())
            click.echo(
                f"run {order.run}. Give the above to `kubectl apply -f -`; when its pods have delivered: "
                f"kernelmark fleet collect {order.run} --from FOLDER",
                err=True,
            )
            return
    if order.engine == "local":
        raise InputError(f"run {order.run} is one of this host alone. {again(order)}")
    if order.engine == "kubernetes":
        raise InputError(f"what a Job delivered is collected: kernelmark fleet collect {order.run} --from FOLDER")
    # First, so that no order is kept of what cannot be.
    started = engine_of(order, orders.folder_of(home, order.run))
    if resume is None:
        orders.save(order, home)
    click.echo(f"run {order.run}: {counted(order.shards, 'shard')} on {order.engine}, {_where(order)}")
    if no_wait:
        started.submit(range(1, order.shards + 1))
        click.echo(f"asked for. When they are done, or some died: kernelmark fleet run --resume {order.run}")
        return
    state = drive(order, home, started, _Told(), attempts)
    if order.compare:
        _verdicts(order, home)
    _agree(state, home)
    if not journal_only:
        present(home.load(order.run), home, report=not no_report)


@command_fleet.command("compare")
@click.option("--on", "engine", type=click.Choice(["ray", "slurm"]), required=True, help="What starts the shards.")
@click.option("--baseline", required=True, metavar="REV", help="What to compare with: anything git resolves here.")
@click.option("--current", default="HEAD", show_default=True, metavar="REV", help="What to judge.")
@click.option("--shards", type=click.IntRange(1, 9999), help=SHARDS_HELP)
@choosing(*WHAT)
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="Of the hosts."
)
@click.option("--gpus-per-shard", type=click.IntRange(1, 64), default=1, show_default=True, help="Of one host.")
@click.option("--shared", is_flag=True, help="A host may have several shards at once; a condition of the rows.")
@click.option("--address", help="Ray's address; default: the cluster that this machine is of.")
@click.option("--option", "options", multiple=True, metavar="WORD", help="For the engine as it is; repeatable.")
@click.option("--attempts", type=click.IntRange(1, 100), default=3, show_default=True, help="Of each shard.")
@click.option("--all", "everything", is_flag=True, help="Show unchanged rows too.")
@click.option("--json", "as_json", is_flag=True, help="For machines: one object with a verdict per row.")
@shared("output")
@click.argument("detector", nargs=-1, metavar="[-- OPTION...]")
def fleet_compare(
    engine: Literal["ray", "slurm"],
    baseline: str,
    current: str,
    shards: int | None,
    attempts: int,
    everything: bool,
    as_json: bool,
    output: Path | None,
    detector: tuple[str, ...],
    **asked: Any,
) -> None:
    """Compare two commits on many machines; both sides of a pair are always of one host.

    Each shard is `regression_detector --mode ab` in the checkout at this folder's path on its host, which must
    have both commits. What follows -- are options of it: --budget, --fail-above, --fail-on and others. The
    verdicts and the exit code are those of all rows.
    """
    from ..catalog import Catalog
    from ..compare.revisions import Checkout
    from ..fleet import order as orders
    from ..fleet.asked import NO_CONTROL, Asked
    from ..fleet.comparison import narrowed
    from ..fleet.drive import drive
    from ..fleet.engine import engine_of
    from ..run.repro import to_toml

    home = Home(output)
    writable(home)
    if own := [x for x in detector if x.partition("=")[0] in OWN]:
        raise InputError(
            f"{', '.join(own)}: not behind --, as a fleet gives its shards that itself; its own stand before --."
        )
    checkout = Checkout.here()
    base, head = checkout.resolve(baseline), checkout.resolve(current)
    if head.dirty or base.dirty:
        raise InputError("uncommitted changes are on this machine only: commit them, and push.")
    catalog, wanted = Catalog.default(), Asked(**asked, control=NO_CONTROL)
    sides = {"base": base, "current": head}
    named = wanted.choice.implementations
    plan = narrowed(wanted.loaded(catalog), catalog, checkout, sides, wanted.device, named)
    order = wanted.order(engine, shards, catalog, home, plan, by_seed=False)
    order = msgspec.structs.replace(order, plan=f"{plan.name}.toml", plan_text=to_toml(plan, catalog))
    words = ["--baseline", base.commit, "--current", head.commit, "--no-registry", *order.arguments, *detector]
    order = msgspec.structs.replace(order, compare=True, arguments=tuple(words), checkout=str(Path.cwd()))
    started = engine_of(order, orders.folder_of(home, order.run))
    orders.save(order, home)
    click.echo(f"{order.run}: {base} and {head} in {counted(order.shards, 'shard')} on {engine}", err=True)
    drive(order, home, started, _Told(err=True), attempts)
    _verdicts(order, home, everything, as_json)


def _verdicts(order: Order, home: Home, everything: bool = False, as_json: bool = False) -> NoReturn:
    """Shows the verdicts of all shards, and ends with their exit code."""
    from ..fleet.collect import reports
    from ..fleet.comparison import join
    from .verdicts import Shown, show

    report = join({shard: x for shard, (_, x) in reports(order, home).items()})
    show(report, Shown(everything, as_json, None, None, None, no_registry=True))
    raise click.exceptions.Exit(report.exit_code)


def run_parallel(
    home: Home, gpus: str, device: str | None, choice: Choice, seed: int | None, control: str | None
) -> str:
    """`kernelmark run --parallel`: shards side by side on this host, one a GPU. The name of the whole run."""
    from ..catalog import Catalog
    from ..container.gpus import chosen
    from ..fleet import order as orders
    from ..fleet.asked import Asked
    from ..run.fingerprint import device_named

    places = chosen(gpus)
    if len(places) < 2:
        raise InputError(f"--parallel with --gpus {gpus}: one shard a GPU, so at least two of them.")
    catalog = Catalog.default()
    wanted = Asked(choice, device_named(device), seed, control)
    order = wanted.order("local", len(places), catalog, home, wanted.measured(catalog))
    orders.save(order, home)
    return _side_by_side(order, home, places)


def resume_parallel(home: Home, gpus: str, run: str, *, any_board: bool) -> str:
    """`kernelmark run --resume RUN --parallel`: what is missing of its shards. The run's name."""
    from ..container.gpus import chosen
    from ..fleet import order as orders
    from ..fleet.drive import again

    places = chosen(gpus)
    order = orders.load(home, run)
    if order.engine != "local":
        raise InputError(f"run {order.run} is one of a fleet. {again(order)}")
    if len(places) != order.shards:
        asked = f"{counted(order.shards, 'shard')}, each with a GPU of its own beside the others"
        raise InputError(f"run {order.run} is in {asked}: --gpus {gpus} names {len(places)}.")
    return _side_by_side(order, home, places, any_board)


def _side_by_side(order: Order, home: Home, places: tuple[int, ...], any_board: bool = False) -> str:
    from ...registry.store.shards import shards_of
    from ...registry.store.transfer import join
    from ..fleet.drive import drive
    from ..fleet.on_this_host import ThisHost

    engine = ThisHost(order, home, places, any_board)
    click.echo(f"run {order.run}: {counted(order.shards, 'shard')} side by side")
    try:
        state = drive(order, home, engine, _Told(), attempts=1)
    finally:
        engine.cancel()  # and waits: what they were at is in their journals then
        if shards_of(home, order.run):
            join(home, order.run)
    _agree(state, home)
    return order.run


def _where(order: Order) -> str:
    if order.image is None:
        return "from the hosts' checkouts, in no image"
    return f"in image {order.image}"


class _Told:
    """Says how a run stands whenever that changed."""

    def __init__(self, err: bool = False, known: bool = True) -> None:
        self._last, self._err, self._known = "", err, known

    def __call__(self, state: State, held: dict[int, str], refused: tuple[Refused, ...]) -> None:
        from ..fleet.standing import line

        for x in refused:
            click.echo(
                f"  shard {x.shard or '?'} from {plain(x.host) or '?'} is not taken in: {plain(x.reason)}",
                err=self._err,
            )
        said = line(state, held, datetime.now(UTC), known=self._known)
        if said.partition(", ends")[0] != self._last:
            self._last = said.partition(", ends")[0]
            click.echo(said, err=self._err)


@command_fleet.command("status")
@RUN
@click.option("--offline", is_flag=True, help="Do not ask the engine, only say what is here.")
@shared("output")
def fleet_status(run: str, offline: bool, output: Path | None) -> None:
    """How a run stands: shards by host, what its engine has, whether its hosts agree."""
    from ..fleet.collect import State, waiting, whole_shards
    from ..fleet.engine import engine_of
    from ..fleet.order import folder_of, load
    from ..fleet.standing import line, table

    home = Home(output)
    order = load(home, run)
    state = State(order, tuple(whole_shards(order, home)))
    held = waiting(order, home) if state.missing else {}
    known = order.engine == "slurm" and not offline  # no other tells anybody but who asked for the shards
    if known and state.missing:
        held = engine_of(order, folder_of(home, order.run)).held() | held
    click.echo(f"run {order.run} on {order.engine}, {_where(order)}")
    click.echo(line(state, held, datetime.now(UTC), known=known))
    for text in table(state):
        click.echo(text)
    _agree(state, home)


@command_fleet.command("collect")
@RUN
@click.option(
    "--from", "folder", type=click.Path(path_type=Path, file_okay=False), help="Where tasks delivered to."
)
@shared("output")
def fleet_collect(run: str, folder: Path | None, output: Path | None) -> None:
    """Take in what was delivered; done twice it changes nothing. Exit code 4 while shards are missing."""
    from ..fleet.collect import collect
    from ..fleet.order import load
    from ..run.progress import Tally

    home = Home(output)
    order = load(home, run)
    if folder is not None and not folder.is_dir():
        raise InputError(f"no folder at {folder}.")
    with Tally("taking in what was delivered") as tally:
        state = collect(order, home, folder, tell=tally.show)
    _Told(known=False)(state, {}, state.refused)
    if state.duplicates:
        click.echo(f"{counted(state.duplicates, 'shard')} came again with other samples; the first of each counts")
    _agree(state, home)
    if state.missing:
        click.echo(f"missing: shards {', '.join(map(str, state.missing))}", err=True)
        raise click.exceptions.Exit(4)


@command_fleet.command("drop")
@names.run_argument("run", metavar="RUN")
@click.argument("shards", type=click.IntRange(1), nargs=-1, required=True, metavar="SHARD...")
@shared("output")
def fleet_drop(run: str, shards: tuple[int, ...], output: Path | None) -> None:
    """Take shards out of a run, as of a host that is unlike the others; --resume asks for them again.

    What they measured is kept beside the run's order, and counts no more, wherever it is delivered again.
    """
    from ..fleet.drive import again
    from ..fleet.dropping import drop
    from ..fleet.order import load

    home = Home(output)
    writable(home)
    order = load(home, run)
    for path in drop(order, home, shards):
        click.echo(f"kept: {path}")
    click.echo(f"run {order.run} is without {counted(len(set(shards)), 'shard')} now. {again(order)}")


@command_fleet.command("cancel")
@RUN
@shared("output")
def fleet_cancel(run: str, output: Path | None) -> None:
    """End a run's tasks; what was delivered stays, and --resume goes on."""
    from ..fleet.drive import CANCELLED
    from ..fleet.engine import engine_of
    from ..fleet.order import folder_of, load

    home = Home(output)
    order = load(home, run)
    folder = folder_of(home, order.run)
    (folder / CANCELLED).touch()  # whoever drives the run sees that, and ends its tasks
    if order.engine == "slurm":
        engine_of(order, folder).cancel()
    if order.engine == "kubernetes":
        from ..fleet.manifest import name_of

        click.echo(f"kubectl delete job {name_of(order)}")
        return
    click.echo(f"run {order.run}: cancelled")


def _agree(state: State, home: Home) -> None:
    """Says whether the hosts that are here agree on the control case."""
    from ...registry.analysis.hosts import agreement
    from ...registry.store.journal import read
    from ...registry.store.shards import shards_of

    rows = agreement([read(x) for x in shards_of(home, state.order.run)])
    if not rows:
        return
    click.echo(f"control {plain(rows[0].key.operator)}/{plain(rows[0].key.case)}: each host over the others")
    for x in rows:
        click.echo(
            f"  {plain(x.host, 40)} {plain(x.key.implementation)}: {x.ratio:.3f} "
            f"[{x.low:.3f}, {x.high:.3f}], {x.processes} processes: {x.kind}"
        )
