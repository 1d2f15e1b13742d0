"""`kernelmark compile`: compile a plan's rows ahead, many at a time."""

from __future__ import annotations

import os
import secrets
import shutil
from collections import Counter
from pathlib import Path

import click

from ...registry.errors import InputError
from ...registry.figures import counted, seconds
from ...registry.store.home import Home
from .. import shards
from ..catalog import Catalog
from ..choice import Choice
from ..run.compiling import Compiling, RowEnded, ahead
from ..run.fingerprint import device_named
from ..run.progress import Tally
from ..run.supervisor import new_run
from .choosing import WHAT, choosing, shared
from .results import tell, writable
from .run import gpus_named

MOST = 16
"""Processes that share a device without being asked for more: each holds half a gigabyte of a GPU."""
TOLD = 5
"""Reasons that are told of rows which were not compiled."""


@click.command("compile")
@choosing(*WHAT)
@click.option("--device", help="cuda, rocm, xpu, mps or cpu; default: the best one here.")
@click.option("--gpus", metavar="0,1", help="GPUs to compile on, as of kernelmark run; the processes share them.")
@click.option("--shard", metavar="I/N", help="Only the I-th of N parts of the plan, as kernelmark run cuts it.")
@click.option(
    "--processes",
    type=click.IntRange(1, 256),
    help=f"How many compile at a time; default: one a core, up to {MOST}.",
)
@shared("output")
def command_compile(
    choice: Choice,
    device: str | None,
    gpus: str | None,
    shard: str | None,
    processes: int | None,
    output: Path | None,
) -> None:
    """Compile a plan's rows ahead, many at a time, for a run after it.

    Each row is built and called once, and nothing is timed; a run that follows on this machine finds on disk what
    compilers keep there, and spends its time measuring. What they choose by timing is left to the run. Rows of
    models and of several GPUs are not compiled ahead.
    """
    home = Home(output)
    writable(home)
    catalog, chosen = Catalog.default(), device_named(device)
    plan = choice.load(catalog, chosen)
    cells = choice.cells(plan, catalog, chosen)
    if shard is not None:
        plan = shards.cut(shards.measured(plan, cells), cells, shards.parse(shard))
        cells = choice.cells(plan, catalog, chosen)
    todo = ahead(cells, catalog, chosen)
    if not todo:
        raise InputError(
            f"plan {plan.name} has no row that can be compiled ahead here: rows of operators can, by one device, "
            "whose library is there. kernelmark run --dry-run lists what can run."
        )
    name = f"compile-{new_run()}"
    made = Compiling(
        plan,
        chosen,
        processes or min(len(os.sched_getaffinity(0)), MOST),
        secrets.randbits(32),
        home.logs / f"{name}.log",
        (home.scratch / name).resolve(),
        gpus_named(gpus, chosen),
    )
    failed: list[RowEnded] = []
    absent: list[RowEnded] = []
    with Tally("compiling") as tally:
        done = 0

        def ended(row: RowEnded) -> None:
            nonlocal done
            done += 1
            if row.status != "ok":
                (absent if row.status in ("unsupported", "unavailable") else failed).append(row)
            tally.show(counted(done, "row"), done / len(todo))

        tally.show("loading torch", 0.0)
        try:
            took_s = made.run(todo, ended)
        finally:
            shutil.rmtree(made.scratch, ignore_errors=True)
    click.echo(
        f"{counted(len(todo) - len(absent) - len(failed), 'row')} of {len(todo)} compiled in {seconds(took_s)}"
    )
    if absent:
        tell(f"{counted(len(absent), 'row')} cannot run here", err=True)
    reasons = Counter((x.status, x.reason or "") for x in failed)
    for (status, reason), count in reasons.most_common(TOLD):
        tell(f"  {counted(count, 'row')} {status.replace('_', ' ')}: {reason}", err=True)
    if len(reasons) > TOLD:
        tell(f"  and {counted(len(reasons) - TOLD, 'other reason')}", err=True)
    if failed:
        tell(f"the run says of each what it is; what their processes printed is in {made.log}", err=True)
