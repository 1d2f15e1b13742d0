"""`kernelmark profile`: where the time of a recorded row goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...registry.errors import InputError
from ...registry.store.home import Home
from ..catalog import Catalog

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..run.profile import Light, Profile

SHOWN = 25
"""Kernels in the table; all are in the JSON and in the trace."""


@click.command("profile")
@click.argument("row", metavar="ROW")
@click.option("--run", "run", default="latest", show_default=True, help="The run that the row is of.")
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
        return
    from ...registry.escape import console

    console().print(_table(named(cell), found, light))
    if without is not None:
        click.echo(f"ncu       {without}")
    click.echo(f"files     {folder}")


def _table(title: str, found: Profile, light: tuple[Light, ...]) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    limits = {x.kernel: x for x in light}
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("kernel", overflow="fold")
    table.add_column("kind")
    columns = ("calls", "ms", "of the step", *(("compute", "memory") if light else ()))
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for x in found.kernels[:SHOWN]:
        known = limits.get(x.name)
        more = (f"{known.compute:.0f} %", f"{known.memory:.0f} %") if known else ("", "")
        cells = (x.name, x.kind, f"{x.calls:g}", f"{x.ms:.4f}", f"{x.share:.1%}", *(more if light else ()))
        table.add_row(*map(Text, cells))
    parts = [(kind, found.ms(kind)) for kind in ("ours", "product", "copy", "other")]
    shares = ", ".join(f"{kind} {ms / found.step_ms:.1%}" for kind, ms in (*parts, ("gaps", found.gap_ms)) if ms)
    lines: list[RenderableType] = [table]
    if (left := len(found.kernels) - SHOWN) > 0:
        lines.append(Text(f"and {left} shorter ones", style="dim"))
    lines.append(Text(f"a step of {found.step_ms:.3f} ms, profiled: {shares}"))
    return Group(*lines)
