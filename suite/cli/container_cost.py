"""`kernelmark container-cost`: the A/A of an image against bare metal."""

from __future__ import annotations

import secrets
import time
from importlib.util import find_spec
from pathlib import Path

import click

from ...registry.errors import InputError
from ...registry.store.home import Home
from ..choice import Choice
from ..run.fingerprint import device_named
from . import names
from .choosing import WHAT, choosing, shared
from .container_options import build_options, options, tell
from .results import writable
from .values import Duration, Memory


@click.command("container-cost")
@click.argument("image", metavar="IMAGE", shell_complete=names.images)
@click.option("--gpus", metavar="0", help="GPU as nvidia-smi numbers it; default: 0.")
@choosing(*WHAT)
@click.option("--budget", type=Duration(), default="30m", show_default=True, help="Time for measuring.")
@click.option(
    "--memory", type=Memory(), metavar="SIZE", help="Memory of the container, as 16g; default: no limit."
)
@click.option(
    "--shm-size", type=Memory(), default="1g", show_default=True, metavar="SIZE", help="Its shared memory."
)
@shared("seed")
@click.option("--json", "as_json", is_flag=True, help="For machines: one object with a verdict per row.")
@click.option("--all", "everything", is_flag=True, help="Show unchanged rows too.")
@shared("output")
@build_options
def command_container_cost(
    image: str,
    gpus: str | None,
    choice: Choice,
    budget: float,
    memory: str | None,
    shm_size: str,
    seed: int | None,
    as_json: bool,
    everything: bool,
    output: Path | None,
    **building: Path | str | None,
) -> int:
    """What a container costs: each row in turns on bare metal and in IMAGE.

    Fresh processes in pairs of random order, decided as `regression_detector` decides between commits: bare metal
    is the baseline. Exit codes are its own: 0 the container costs nothing that matters, 1 it makes a row slower,
    3 inconclusive within the budget, 4 the two sides differ in more than the image.
    """
    import msgspec

    from ...registry.detection import verdict_output
    from ...registry.detection.comparison import Options
    from ...registry.detection.comparison_report import ComparisonReport
    from ..catalog import Catalog
    from ..container.cost import Cost
    from ..container.launch import Limits
    from ..container.session import prepare

    if find_spec("torch") is None:
        raise InputError("torch is not installed here, so there is no bare metal to compare a container with.")
    home = Home(output)
    writable(home)
    catalog = Catalog.default()
    session = prepare(image, gpus, home, options(**building), tell)  # type: ignore[arg-type]  # click made them
    device = device_named("cuda" if session.gpus else "cpu")
    limits = Limits(memory, shm_size)
    cost = Cost(
        session=session,
        plan=choice.unbudgeted(catalog, device, "this has a --budget of its own, which leaves out no rows."),
        catalog=catalog,
        device=device,
        implementations=choice.implementations,
        home=home,
        options=Options(),
        seed=secrets.randbits(31) if seed is None else seed,
        until=time.monotonic() + budget,
        limits=limits,
        tell=tell,
    )
    report = ComparisonReport("bare metal", f"image {session.image.name}", cost.compare())
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(verdict_output.to_json(report)), indent=2))
        return report.exit_code
    from ...registry.views.table import show
    from ...registry.views.verdict_table import verdict_table

    show(verdict_table(report, everything))
    return report.exit_code
