"""`kernelmark verify`: does somebody's run hold here? Some of its rows, drawn and measured again."""

from __future__ import annotations

import secrets
import sys

import click

from ...registry.store.home import Home
from ...registry.store.journal import Journal
from ..catalog import Catalog
from .values import Duration

MARKS = {"agree": ("=", "green"), "disagree": ("≠", "red"), "undecided": ("?", "yellow")}


@click.command("verify")
@click.argument("run", metavar="RUN")
@click.option("--sample", type=click.IntRange(1, 10000), default=30, show_default=True, help="Rows to draw.")
@click.option("--budget", type=Duration(), default="15m", show_default=True, help="Time to measure, as 15m.")
@click.option("--json", "as_json", is_flag=True, help="For machines: one object with `rows`.")
def command_verify(run: str, sample: int, budget: float, as_json: bool) -> None:
    """Measure some of a run's rows again: agree or disagree, row by row.

    RUN is a run's name, the beginning of one, `latest`, or a journal file. Rows are drawn by a random seed, so
    that nobody knows before which ones. What is measured is a run of its own that names the one it verifies. Exit
    codes: 0 all that was decided agrees, 1 a row disagrees, 3 nothing was decided, 4 the conditions differ.
    """
    from ...registry.analysis.repeated import differing, repeated
    from ..run.repeating import draw, measure
    from .progress import progress

    home, catalog = Home(), Catalog.default()
    published = home.load(run)
    seed = secrets.randbits(32)
    drawn = draw(published, catalog, sample, seed)
    if as_json:
        again = measure(published, drawn, catalog, home, seed, budget)
    else:
        click.echo(f"{len(drawn.cells)} of {drawn.of} rows that can run here, drawn with seed {seed}")
        with progress() as listener:
            again = measure(published, drawn, catalog, home, seed, budget, listener)
    apart = differing(published.header.conditions, again.header.conditions)
    found = repeated(published, again)
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
        _tell(published, again)
    kinds = {x.agreement for x in found}
    sys.exit(4 if apart else 1 if "disagree" in kinds else 0 if "agree" in kinds else 3)


def _tell(published: Journal, again: Journal) -> None:
    from ...registry.analysis.repeated import differing, repeated, said
    from ...registry.escape import plain

    for x in repeated(published, again):
        sign, colour = MARKS[x.agreement]
        numbers = (
            "" if x.ratio is None else f" {x.there:.4g} → {x.here:.4g} {x.unit}, {(x.ratio - 1) * 100:+.1f} %"
        )
        click.echo(f"{click.style(sign, fg=colour)} {plain(x.row)}:{numbers} ({plain(x.reason)})")
    for name, (there, here) in differing(published.header.conditions, again.header.conditions).items():
        click.echo(f"not the same: {plain(name)}: {plain(there)} there, {plain(here)} here")
    click.echo(said(published, [again]))
