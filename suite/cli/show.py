"""`kernelmark show`: a run's results as a table, or as JSON."""

from __future__ import annotations

import click
import msgspec

from ...registry.store.home import Home


@click.command("show")
@click.argument("run", metavar="RUN")
@click.option(
    "--json", "as_json", is_flag=True, help="For machines: one object with the header, `rows` and `crossings`."
)
def command_show(run: str, as_json: bool) -> None:
    """A run's results.

    RUN is a run's name, the beginning of one, `latest`, or a journal file.
    """
    journal = Home().load(run)
    if as_json:
        from ...registry.analysis.rows import summarize
        from ...registry.views import crossing

        found = {**summarize(journal), "crossings": crossing.summarize(journal)}
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
        return
    from ...registry.escape import console
    from ...registry.views.tables import run_table

    console().print(run_table(journal))
