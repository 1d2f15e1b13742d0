"""`kernelmark profile`: where the time of a recorded row goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...registry import figures
from ...registry.errors import InputError
from ...registry.store.home import Home
from ...registry.views.table import Block, Column, Page, Table, line, show
from ..catalog import Catalog
from .names import runs

if TYPE_CHECKING:
    from ..run.profile import Light, Profile

SHOWN = 25
"""Kernels in the table; all are in the JSON and in the trace."""
LIGHT = {"compute": " %", "memory": " %", "l2": " %", "occupancy": " %", "registers": "", "waves": "waves"}
"""What Nsight Compute said of a kernel, and the unit."""
LONGEST = 100
"""Characters of a kernel's name in the table: templates of C++ have hundreds."""


@click.command("profile")
@click.argument("row", metavar="ROW")
@click.option(
    "--run", "run", default="latest", show_default=True, shell_complete=runs, help="The run that the row is of."
)
@click.option("--steps", type=click.IntRange(1, 1000), default=5, show_default=True, help="Steps to profile.")
@click.option("--ncu", is_flag=True, help="Ask Nsight Compute how far each kernel is from the device's limits.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for the files; default: in the home.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command_profile(row: str, run: str, steps: int, ncu: bool, output: Path | None, as_json: bool) -> None:
    """Run a row of a run again under PyTorch's profiler.

    ROW is OPERATOR/CASE/IMPLEMENTATION, or its end where only one row has it. Leaves a Chrome trace (for
    chrome://tracing or Perfetto), on a GPU a snapshot of the allocator too (for pytorch.org/memory_viz).
    """
    import msgspec

    from ..run.profiled import NotProfiled, lights, named, profile, row_of

    home, catalog = Home(), Catalog.default()
    journal = home.load(run)
    cell = row_of(journal, row, catalog)
    if (reason := cell.implementation.unavailable(journal.header.device)) is not None:
        raise InputError(f"{named(cell)} cannot run here: {reason[1]}.")
    folder = output or home.folder / "profiles" / named(cell).replace("/", "-")
    found = profile(cell, journal, catalog, folder, steps)
    light: tuple[Light, ...] = ()
    without = None
    if ncu:
        try:
            light = lights(cell, journal, folder)
        except NotProfiled as error:
            without = str(error)
    if as_json:
        data = {**msgspec.to_builtins(found), "speed_of_light": msgspec.to_builtins(light), "folder": str(folder)}
        click.echo(msgspec.json.format(msgspec.json.encode(data), indent=2))
        if without is not None:
            click.echo(f"ncu: {without}", err=True)
        return
    show(_page(named(cell), found, light))
    if without is not None:
        click.echo(f"ncu       {without}")
    click.echo(f"files     {folder}")


def _page(title: str, found: Profile, light: tuple[Light, ...]) -> Page:
    from ..run.profile import over_launches

    limits = over_launches(light)
    # A narrow terminal drops what Nsight Compute said, the last first, then the number of calls.
    table = Table(
        (
            Column("kernel", folds=20),
            Column("kind"),
            Column("calls", number=True, drop=1),
            Column("ms", number=True),
            Column("of the step", number=True),
            *(Column(x, number=True, drop=2 + i) for i, x in enumerate(LIGHT) if light),
        ),
        title,
    )
    for x in found.kernels[:SHOWN]:
        known = limits.get(x.name)
        more = [_said(getattr(known, name), unit) for name, unit in LIGHT.items()] if known else []
        table.add(_shortened(x.name), x.kind, f"{x.calls:g}", f"{x.ms:.4f}", figures.percent(x.share, 1), *more)
    parts = [(kind, found.ms(kind)) for kind in ("ours", "product", "copy", "other")]
    parts.append(("gaps", found.gap_ms))
    shares = ", ".join(f"{kind} {figures.percent(ms / found.step_ms, 1)}" for kind, ms in parts if ms)
    page: list[Block] = [table]
    if (left := len(found.kernels) - SHOWN) > 0:
        page.append(line(f"and {left} shorter ones", style="dim"))
    return [*page, line(f"a step of {found.step_ms:.3f} ms, profiled: {shares}")]


def _said(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.1f}" if unit == "waves" else f"{value:.0f}{unit}"


def _shortened(name: str) -> str:
    """A name with its middle left out where it is long."""
    half = (LONGEST - 3) // 2
    return name if len(name) <= LONGEST else f"{name[:half]} … {name[-half:]}"
