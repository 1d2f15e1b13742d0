"""`kernelmark judge`: one kernel in a file, for people and for programs that search kernels."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import click

from ..run.fingerprint import device_named
from .names import operators
from .values import Seed

LONGEST = 3600
"""Seconds of a budget."""


@click.command("judge")
@click.argument("operator", metavar="OPERATOR", shell_complete=operators)
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--device", help="cuda, rocm, xpu, mps or cpu; default: the best one here.")
@click.option("--budget", type=click.IntRange(10, LONGEST), default=60, show_default=True, help="Seconds.")
@click.option("--seed", type=Seed(), help="Of the shapes that are drawn; default: random, and said.")
@click.option("--json", "as_json", is_flag=True, help="For machines: one object.")
def command_judge(
    operator: str, file: Path, device: str | None, budget: int, seed: int | None, as_json: bool
) -> None:
    """Judge one kernel: does it compile, is it right, how fast is it, is it honest.

    FILE defines a function of OPERATOR's name, as a file of kernels/ does, and imports nothing relative. It is
    checked on the shapes of plan quick and on others that are drawn now, then timed beside the operator's peers,
    in processes of its own without a network. Exit codes: 0 right on all shapes that it says it supports, 1 wrong
    on one, 3 not known: not all were reached in time, or none can be judged here, as a Triton kernel needs a GPU,
    or TRITON_INTERPRET=1 and --device cpu.
    """
    from ..run.judging import Judge
    from ..run.progress import Tally

    drawn = secrets.randbits(32) if seed is None else seed
    with Tally("judging") as tally:
        found = Judge(operator, file, device_named(device), drawn, float(budget), tally.show).judge()
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        _tell(found, budget)
    sys.exit({True: 0, False: 1, None: 3}[found.right])


def _tell(found: object, budget: int) -> None:
    from ...registry.escape import plain
    from ..run.judging import Judgement

    assert isinstance(found, Judgement)
    words = {True: "yes", False: "no", None: "not known"}
    click.echo(f"compiles  {words[found.compiles]}")
    if found.reason is not None:
        click.echo(f"right     not judged: {found.reason}")
    else:
        right = sum(x.ok is True for x in found.shapes)
        unreached = len(found.shapes) < found.asked
        more = f"; out of time, try --budget {min(4 * budget, LONGEST)}" if unreached and found.out_of_time else ""
        click.echo(f"right     {words[found.right]}: {right} of {found.asked} shapes, seed {found.seed}{more}")
    for shape in found.shapes:
        if not shape.ok:
            said = "wrong" if shape.ok is False else "not judged"
            click.echo(f"    {plain(shape.case)}: {said}: {plain(shape.reason)}")
    if found.out_of_time and found.right is not False and not found.speed:
        click.echo("speed     not measured in this time")
    of = " (Triton's interpreter: no speed of the kernel)" if found.interpreted else ""
    for x in found.speed:
        if x.speedup is None:
            late = "no peer measured in this time" if found.out_of_time else "no peer has a time beside it"
            none = late if found.peers else "no peer beside it"
            click.echo(f"speed     {plain(x.case)}: {x.ms:.4g} ms{of}; {none}")
        else:
            low = f"at least {x.low:.2f}×" if x.low is not None else "no interval in this time"
            click.echo(f"speed     {plain(x.case)}: {x.ms:.4g} ms{of}, {x.speedup:.2f}× {x.best_peer}, {low}")
    for said in found.found or ("nothing",):
        click.echo(f"found     {plain(said)}")
    click.echo(f"network   {plain(found.network)}")
