"""Which rows a command is asked for. The same options everywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import click

from ...registry.store.record import Pass, Status
from . import names
from .values import AxisSizes, together

if TYPE_CHECKING:
    from ...registry.analysis.selection import Selection

_OPTIONS = {
    "operators": click.option(
        "--operator", "operators", multiple=True, shell_complete=names.operators, help="Only this operator."
    ),
    "cases": click.option(
        "--case", "cases", multiple=True, help="Only this case, by its name or parts of it: S4096-causal."
    ),
    "implementations": click.option(
        "--implementation",
        "implementations",
        multiple=True,
        shell_complete=names.implementations,
        help="Only this implementation.",
    ),
    "providers": click.option("--provider", "providers", multiple=True, help="Only this library's."),
    "dtypes": click.option("--dtype", "dtypes", multiple=True, help="Only cases in this dtype."),
    "passes": click.option(
        "--pass", "passes", multiple=True, type=click.Choice(get_args(Pass)), help="Only cases of this pass."
    ),
    "axes": click.option(
        "--axis", "axes", multiple=True, type=AxisSizes(), help="Only cases of these sizes: S=1024,4096."
    ),
    "statuses": click.option(
        "--status", "statuses", multiple=True, type=click.Choice(get_args(Status)), help="Only rows that ended so."
    ),
}
"""By the field of `Selection` that it fills. All are repeatable: of several values one is enough."""


def filters(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; the command gets them together as `selection`."""

    @functools.wraps(command)
    def call(**given: Any) -> Any:
        mine = {name: given.pop(name) for name in _OPTIONS}
        return command(**given, selection=_selection(**mine))

    for option in reversed(_OPTIONS.values()):
        option(call)
    return call


def _selection(axes: tuple[tuple[str, tuple[int, ...]], ...], **fields: Any) -> Selection:
    from ...registry.analysis.selection import Selection

    return Selection(axes=together(axes), **fields)
