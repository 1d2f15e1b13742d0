"""Defaults of commands' options from the user's configuration file, in the form that click takes them."""

from __future__ import annotations

from typing import Any

import click

from ...registry.errors import InputError, unknown
from ...registry.store import settings


def of(command: click.Command, name: str) -> dict[str, Any]:
    """The values that the file has for a command, by parameter. Raises `InputError` for one that it lacks."""
    table = settings.load().defaults.get(name, {})
    options = {x.removeprefix("--"): y for y in command.params if isinstance(y, click.Option) for x in y.opts}
    found: dict[str, Any] = {}
    for option, value in table.items():
        if option not in options:
            told = unknown(f"option of {name}", option, sorted(options))
            raise InputError(f"{settings.file()}: {told}")
        parameter = options[option]
        if parameter.is_flag and not isinstance(parameter.flag_value, bool):  # one of several, as --csv is
            if value:
                found[str(parameter.name)] = parameter.flag_value
        else:
            found[str(parameter.name)] = [value] if parameter.multiple and not isinstance(value, list) else value
    return found
