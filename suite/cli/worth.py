"""`kernelmark worth`: what each kernel of the catalog is worth in a model's training step."""

from __future__ import annotations

import secrets
from pathlib import Path

import click

from ...registry.errors import InputError
from ...registry.store.home import Home
from ...registry.store.journal import read
from ..catalog import Catalog
from ..run import explaining, supervisor
from ..run.fingerprint import device_named
from . import names
from .choosing import shared, with_resume
from .results import present, writable
from .values import Seed


@click.command("worth")
@click.argument("model", required=False, shell_complete=names.models)
@click.option("--base", default="torch_compile_blocks", show_default=True, help="The system that parts go into.")
@click.option("--batch", default=1, show_default=True, help="Sequences a step.")
@click.option("--sequence", default=1024, show_default=True, help="Tokens a sequence.")
@click.option("--dtype", default="bf16", show_default=True, help="Of weights and products.")
@click.option("--state", default="plain", show_default=True, help="How AdamW's states are stored.")
@click.option(
    "--slice", "part_of", default="whole", show_default=True, help="Only the model's first layers: first4."
)
@click.option("--part", "parts", multiple=True, help="Only this part or operator; repeatable.")
@click.option(
    "--implementation",
    "implementations",
    multiple=True,
    shell_complete=names.implementations,
    help="Only this one put in; repeatable.",
)
@click.option("--null", "nulls", is_flag=True, help="Exchange each part with itself too: is nothing found?")
@click.option("--replicates", type=click.IntRange(1, 1000), help="Fresh processes; default: 5.")
@click.option("--device", help="cuda, rocm, xpu, mps or cpu; default: the best one here.")
@click.option("--seed", type=Seed(), help="Seed of inputs and order; default: random, recorded.")
@click.option(
    "--explain/--no-explain",
    default=True,
    show_default=True,
    help="Profile the steps of which more or less was measured than expected, and say what differs.",
)
@click.option("--resume", metavar="RUN", shell_complete=names.runs, help="Go on with a run that was interrupted.")
@shared("any_board")
@click.option("--output", type=click.Path(path_type=Path), help="Results' folder, in place of $KERNELMARK_HOME.")
@click.option("--journal-only", is_flag=True, help="Write the journal and leave the rest to another machine.")
def command_worth(
    model: str | None,
    base: str,
    batch: int,
    sequence: int,
    dtype: str,
    state: str,
    part_of: str,
    parts: tuple[str, ...],
    implementations: tuple[str, ...],
    nulls: bool,
    replicates: int | None,
    device: str | None,
    seed: int | None,
    explain: bool,
    resume: str | None,
    any_board: bool,
    output: Path | None,
    journal_only: bool,
) -> None:
    """Exchange the parts of a MODEL one at a time, and say what each is worth alone and in the model.

    A kernel of your own takes part from a folder on KERNELMARK_PATH.
    """
    from ...registry.views.table import show
    from ...registry.views.worth_table import worth_table
    from .. import worth
    from ..plan import of_worth
    from .progress import progress

    with_resume(resume)
    home = Home(output)
    writable(home)
    catalog = Catalog.default()
    with progress() as listener:
        if resume is not None:
            run = supervisor.resume(resume, home, catalog, listener, any_board=any_board)
        elif model is None:
            raise InputError("say which model: kernelmark worth MODEL; kernelmark list names them.")
        else:
            here = device_named(device)
            options = {"model": model, "state": state, "slice": part_of}
            step = catalog.definition("train").case({"B": batch, "S": sequence}, dtype, "program", **options)
            base_system = worth.base_named(base, catalog)
            made = of_worth(step, base_system, catalog, here, parts, implementations, nulls)
            made = made.but(replicates, None, None)
            run = supervisor.Run(
                plan=made,
                cells=made.cells(catalog, here),
                catalog=catalog,
                device=here,
                home=home,
                seed=secrets.randbits(32) if seed is None else seed,
                listener=listener,
            )
        path = run.execute()
    if explain:
        explaining.explain(path, catalog, lambda text: click.echo(text, err=True))
    journal = read(path)
    if journal_only:
        show(worth_table(journal))
    else:
        present(journal, home, report=False)
