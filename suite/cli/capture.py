"""`kernelmark capture`: which of our operators a program calls, as a plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...registry.errors import InputError, unwritable
from .results import put, writable_file

if TYPE_CHECKING:
    from ..capture import Call


@click.command("capture", context_settings={"allow_interspersed_args": False})
@click.option(
    "--plan",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("captured.toml"),
    show_default=True,
    help="The plan file to write.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Read a trace of PyTorch's profiler (record_shapes=True) in place of running a program.",
)
@click.option("--steps", type=click.IntRange(1), help="Steps that the program takes; default: its optimizer's.")
@click.option(
    "--step-ms",
    type=click.FloatRange(min=0, min_open=True),
    help="Milliseconds of a step, measured without a capture, which slows; default: as captured.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def command_capture(
    target: Path, trace: Path | None, steps: int | None, step_ms: float | None, command: tuple[str, ...]
) -> None:
    """Run a Python program, and write a plan of the operators that it calls.

    \b
    kernelmark capture --plan mine.toml -- python train.py --steps 2
    kernelmark capture --plan mine.toml --trace FILE
    kernelmark run --plan mine.toml

    The program runs in this process and eagerly: what it compiles, and kernels of libraries, are not seen. A trace
    has both, by name; of what a program writes by hand of several functions it has the functions.

    A run of the plan says what each implementation is worth to a step of the program.
    """
    from ..capture import Capture, run, traced
    from ..catalog import Catalog

    if (trace is None) == (not command):
        raise click.UsageError("give a program, as `-- python FILE …`, or a trace, as `--trace FILE`.")
    path = writable_file(target, "--plan")
    status = 0
    if trace is None:
        seen = Capture()
        status = run(command, seen)
    else:
        seen = traced(trace)
    seen.steps, seen.step_ms = steps or seen.steps, step_ms
    try:
        text = seen.plan(Catalog.default())
    except InputError as error:
        if not status:
            raise
        click.echo(f"the program failed with status {status}, and there is no plan: {error}", err=True)
        sys.exit(status)
    try:
        kept = _written(path, text)
    except OSError as error:
        raise unwritable(f"{target} cannot be written", error, "Name another file with --plan.") from None
    total = seen.total_ms or 1.0
    attributed = sum(x.ms for x in seen.calls())
    for x in seen.calls():
        axes = " ".join([*(f"{name}{size}" for name, size in x.call.axes), *_said(x.call)])
        spent = f"{100 * x.ms / total:5.1f} %" if x.ms else "in the backward pass"
        click.echo(f"{x.count:6} × {x.call.operator:24} {axes:40} {x.call.dtype:5} {spent}")
    click.echo(
        f"{100 * attributed / total:.1f} % of the time of all calls that were seen is operators of ours, forward"
    )
    click.echo(f"plan      {target}")
    if kept is not None:
        click.echo(f"kept      {target.with_name(kept.name)}: what the plan held before")
    if status:
        click.echo(f"the program failed with status {status}; the plan has what it called before", err=True)
        sys.exit(status)


def _written(path: Path, text: str) -> Path | None:
    """Writes the plan. What it held before is kept beside it, under the name that is given back: it may have been
    edited by hand, and the program may have failed this time.
    """
    kept = None
    if path.is_file() and path.read_bytes() not in (b"", text.encode()):
        kept = path.replace(path.with_suffix(f".old{path.suffix}"))
    put(path, text)
    return kept


def _said(call: Call) -> list[str]:
    """A call's options as case names have them."""
    return [value if isinstance(value, str) else f"{name}{value}" for name, value in call.options]
