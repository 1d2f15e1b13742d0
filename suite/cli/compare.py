"""`kernelmark compare`: two runs side by side, without a verdict."""

from __future__ import annotations

import click
import msgspec

from ...registry.store.home import Home

NOTHING_COMPARABLE = 4


@click.command("compare")
@click.argument("first", metavar="RUN")
@click.argument("second", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="For machines: one object with both runs and `rows`.")
@click.pass_context
def command_compare(ctx: click.Context, first: str, second: str, as_json: bool) -> None:
    """Two runs side by side: how the second differs from the first, with intervals.

    RUN is a run's name, the beginning of one, `latest`, or a journal file. Rows whose comparability keys
    differ get no ratio; what differs is named. This is for reading; whether something regressed is
    `regression_detector`'s to say. Exit code 4 if no row can be compared, else 0.
    """
    home = Home()
    journals = home.load(first), home.load(second)
    from ...registry.views.comparison_table import compare

    comparison = compare(*journals)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(comparison.to_builtins()), indent=2))
    else:
        from ...registry.escape import console
        from ...registry.views.tables import compare_table

        console().print(compare_table(comparison))
    if not comparison.compared:
        if not as_json:
            click.echo("No row of the two runs can be compared.", err=True)
        ctx.exit(NOTHING_COMPARABLE)
