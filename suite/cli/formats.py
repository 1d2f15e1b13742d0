"""In which form a command prints what it found: a table, JSON, CSV or Markdown. The same options everywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import click
from click.core import ParameterSource

from ...registry.errors import InputError
from ...registry.views.table import Page, comma_separated, markdown, show

Form: TypeAlias = Literal["table", "json", "csv", "markdown"]
Function = TypeVar("Function", bound=Callable[..., Any])


def formats(command: Function) -> Function:
    """Adds `--json`, `--csv` and `--markdown`, of which one may be given; the command gets it as `form`."""

    @functools.wraps(command)
    def call(**given: Any) -> Any:
        chosen: list[Form] = [x for x in get_args(Form) if given.pop(x)]
        source = click.get_current_context().get_parameter_source
        # What is said on the command line comes before the configuration file.
        chosen = [x for x in chosen if source(x) is ParameterSource.COMMANDLINE] or chosen
        if len(chosen) > 1:
            raise InputError(f"{' and '.join(f'--{x}' for x in chosen)} exclude each other; give one of them.")
        return command(**given, form=chosen[0] if chosen else "table")

    for option in (
        click.option("--markdown", is_flag=True, help="For a pull request or a page."),
        click.option("--csv", is_flag=True, help="For a spreadsheet: a line a row, with every digit."),
        click.option("--json", is_flag=True, help="For machines: one object with everything."),
        click.option("--table", is_flag=True, hidden=True),
    ):
        option(call)
    return call  # type: ignore[return-value]  # what click calls, in its place


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
