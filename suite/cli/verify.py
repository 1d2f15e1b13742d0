"""`kernelmark verify`: does somebody's run hold here? Some of its rows, drawn and measured again."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from ...registry.store.home import Home
from ..catalog import Catalog
from .names import run_argument
from .values import Duration

if TYPE_CHECKING:
    from ...registry.analysis.repeated import Repeated
    from ...registry.store.record import Scalar

MARKS = {"agree": ("=", "green"), "disagree": ("≠", "red"), "undecided": ("?", "yellow")}


@click.command("verify")
@run_argument("run")
@click.option("--sample", type=click.IntRange(1, 10000), default=30, show_default=True, help="Rows to draw.")
@click.option("--budget", type=Duration(), default="15m", show_default=True, help="Time to measure, as 15m.")
@click.option("--json", "as_json", is_flag=True, help="For machines: one object with `rows`.")
def command_verify(run: str, sample: int, budget: float, as_json: bool) -> None:
    """Measure some of a run's rows again: agree or disagree, row by row.

    RUN is a run's name, the beginning of one, `latest`, or a journal file. Rows are drawn by a random seed, so
    that nobody knows before which ones. What is measured is a run of its own that names the one it verifies. Exit
    codes: 0 all that was decided agrees, 1 a row disagrees, 3 nothing was decided, 4 the conditions differ.
    """
    from ...registry.analysis.repeated import differing, repeated, said
    from ...registry.analysis.rows import rows
    from ...registry.escape import plain
    from ..run.progress import Shared, Tally
    from ..run.repeating import draw, measure
    from .progress import progress

    home, catalog = Home(), Catalog.default()
    published = home.load(run)
    seed = secrets.randbits(32)
    drawn = draw(published, catalog, sample, seed)
    if as_json:
        with Tally("measuring again") as tally:
            tally.show("loading torch", 0.0)
            told = Shared(tally.show, len(drawn.cells) * drawn.plan.replicates)
            again = measure(published, drawn, catalog, home, seed, budget, told)
    else:
        click.echo(f"{len(drawn.cells)} of {drawn.of} rows that can run here, drawn with seed {seed}")
        with progress() as listener:
            again = measure(published, drawn, catalog, home, seed, budget, listener)
    apart = differing(published.header.conditions, again.header.conditions)
    found = repeated(rows(published), rows(again))
    if as_json:
        import msgspec

        data = {
            "run": published.header.run,
            "verification": again.header.run,
            "seed": seed,
            "rows": msgspec.to_builtins(found),
            "conditions": {x: {"there": y, "here": z} for x, (y, z) in apart.items()},
        }
        click.echo(msgspec.json.format(msgspec.json.encode(data), indent=2).decode())
    else:
        _tell(found, apart)
        click.echo(plain(said(published, [again])))
    kinds = {x.agreement for x in found}
    sys.exit(4 if apart else 1 if "disagree" in kinds else 0 if "agree" in kinds else 3)


def _tell(found: Sequence[Repeated], apart: Mapping[str, tuple[Scalar, Scalar]]) -> None:
    from ...registry.escape import plain
    from ...registry.figures import change, quantity

    for x in found:
        sign, colour = MARKS[x.agreement]
        numbers = (
            ""
            if x.ratio is None
            else f" {quantity(x.there, x.unit)} → {quantity(x.here, x.unit)}, {change(x.ratio)}"
        )
        click.echo(f"{click.style(sign, fg=colour)} {plain(x.row)}:{numbers} ({plain(x.reason)})")
    for name, (there, here) in apart.items():
        click.echo(f"not the same: {plain(name)}: {plain(there)} there, {plain(here)} here")
