"""In which form a command prints what it found: a table, JSON, CSV or Markdown. The same options everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

import click

from ...registry.views.table import Page, comma_separated, markdown, show

Form: TypeAlias = Literal["table", "json", "csv", "markdown"]
Function = TypeVar("Function", bound=Callable[..., Any])


def formats(command: Function) -> Function:
    """Adds `--json`, `--csv` and `--markdown`; the command gets the last of them as `form`."""
    for option in (
        click.option("--markdown", "form", flag_value="markdown", help="For a pull request or a page."),
        click.option("--csv", "form", flag_value="csv", help="For a spreadsheet: a line a row, with every digit."),
        click.option("--json", "form", flag_value="json", help="For machines: one object with everything."),
        click.option("--table", "form", flag_value="table", default=True, hidden=True),
    ):
        command = option(command)
    return command


def emit(
    form: Form,
    page: Callable[[], Page],
    everything: Callable[[], Any],
    rows: Callable[[], Iterable[Mapping[str, Any]]],
) -> None:
    """Prints what was found in one form; the others are not made."""
    if form == "table":
        show(page())
    elif form == "markdown":
        click.echo(markdown(page()), nl=False)
    elif form == "csv":
        click.echo(comma_separated(rows()), nl=False)
    else:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(everything()), indent=2))
