"""`kernelmark doctor`: the machine's state, and whether the harness catches planted faults."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from ...registry.errors import InputError
from ...registry.store.home import Home
from ...registry.views.table import Text, line
from ...registry.views.table import show as show_page
from ..run.fingerprint import device_named, gpus_here

MARKS = {
    "ok": "green",
    "caught": "green",
    "warning": "yellow",
    "unsure": "yellow",
    "failed": "red",
    "missed": "red",
}


@click.command("doctor")
@click.option("--device", help="cuda, rocm, xpu, mps or cpu; default: the best one here.")
@click.option(
    "--gpus",
    "world",
    type=click.IntRange(2, 64),
    metavar="N",
    help="Plant faults among N ranks as well: GPUs, on a CPU processes.",
)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--quick", is_flag=True, help="Half a minute: fewer processes, so a noisy machine stays unsure.")
@click.option("--training", is_flag=True, help="Plant bad arms of training instead: a few minutes.")
def command_doctor(device: str | None, world: int | None, as_json: bool, quick: bool, training: bool) -> None:
    """Is this machine fit to measure, and does the harness catch planted faults?

    Exit codes: 0 all caught, 3 this machine is too noisy to say of one of them, 5 the harness missed one or the
    machine cannot measure.
    """
    from ..doctor import examination as doctor
    from ..doctor import ranks
    from ..doctor.training import planted_arms
    from ..run.progress import Tally

    if training and quick:
        raise InputError("--training has no quick form: leave --quick or --training out.")
    chosen = device_named(device)
    if world is not None and chosen == "cuda" and world > gpus_here():
        raise InputError(f"--gpus {world}: there are {gpus_here()} GPUs here.")
    checks = []

    def show(check: doctor.Check) -> None:
        checks.append(check)
        if not as_json:
            show_page([line(Text(f"  {check.verdict:8} ", MARKS[check.verdict]), f"{check.name}: {check.detail}")])
            sys.stdout.flush()

    if not as_json:
        click.echo("The machine")
    for check in doctor.machine(chosen, Home()):
        show(check)
    if not any(x.verdict == "failed" for x in checks):
        if not as_json:
            takes = "a few minutes" if training else "half a minute" if quick else "a minute or two"
            click.echo(f"Planted {'arms of training' if training else 'faults'} (takes {takes})")
        with tempfile.TemporaryDirectory(prefix="kernelmark-doctor-") as folder:
            home, extent = Home(Path(folder)), doctor.QUICK if quick else doctor.WHOLE
            with Tally("planting bad arms" if training else "planting faults") as tally:
                if training:
                    found = list(planted_arms(chosen, home, tally.show))
                else:
                    found = list(doctor.planted(chosen, home, tally.show, extent))
            for check in found:
                show(check)
            if world is not None:
                with Tally("planting faults among ranks") as tally:
                    found = list(ranks.planted(chosen, home, world, extent, tally.show))
                for check in found:
                    show(check)
    if as_json:
        import msgspec

        data = {"device": chosen, "checks": [asdict(x) for x in checks]}
        click.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())
    bad = [x.name for x in checks if x.verdict in ("failed", "missed")]
    if bad:
        click.echo(f"kernelmark: not fit: {', '.join(bad)}", err=True)
        sys.exit(5)
    unsure = [x.name for x in checks if x.verdict == "unsure"]
    if unsure:
        click.echo(
            f"kernelmark: this machine is too noisy to see: {', '.join(unsure)}. Nothing was missed; end what "
            f"else runs here and try again{', without --quick' if quick else ''}.",
            err=True,
        )
        sys.exit(3)
