"""Defaults of commands' options from the user's configuration file, in the form that click takes them."""

from __future__ import annotations

from typing import Any

import click

from ...registry.errors import InputError, unknown
from ...registry.store import settings
from . import COMMANDS


def of(command: click.Command, name: str) -> dict[str, Any]:
    """The values that the file has for a command, by parameter. Raises `InputError` for an option that it lacks,
    and for a command that does not exist, whichever is called.
    """
    tables = settings.load().defaults
    for x in tables:
        if x not in COMMANDS:
            raise InputError(f"{settings.file()}: {unknown('command', x, list(COMMANDS))}")
    table = tables.get(name, {})
    options = {x.removeprefix("--"): y for y in command.params if isinstance(y, click.Option) for x in y.opts}
    found: dict[str, Any] = {}
    for option, value in table.items():
        if option not in options:
            told = unknown(f"option of {name}", option, sorted(options))
            raise InputError(f"{settings.file()}: {told}")
        parameter = options[option]
        if parameter.is_flag and not parameter.is_bool_flag:  # one of several
            if value:
                found[str(parameter.name)] = parameter.flag_value
        else:
            found[str(parameter.name)] = [value] if parameter.multiple and not isinstance(value, list) else value
    return found
