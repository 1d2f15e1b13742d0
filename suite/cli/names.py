"""Arguments that name what exists, which a shell completes: runs, operators, implementations, plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from ...registry.errors import KernelmarkError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Complete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def completing(names: Callable[[], Iterable[str]]) -> Complete:
    """What completes an argument from these names. A mistake in what is there completes to nothing."""

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        try:
            return [CompletionItem(x) for x in names() if x.startswith(incomplete)]
        except KernelmarkError:
            return []

    return complete


def _runs() -> list[str]:
    from ...registry.store.home import Home

    home = Home()
    return ["latest", *home.names(), *reversed(home.runs())]


def _operators() -> Iterable[str]:
    from ..catalog import Catalog

    return Catalog.default().operators


def _implementations() -> Iterable[str]:
    from ..catalog import Catalog

    found = Catalog.default().implementations
    return sorted({name for x in found for name in (x.name, x.provider)})


def _plans() -> Iterable[str]:
    from ..plan import BUILTIN

    return BUILTIN


runs, operators, implementations, plans = map(completing, (_runs, _operators, _implementations, _plans))


def run_argument(name: str, **how: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An argument that names a run; `how` goes to `click.argument`."""
    return click.argument(name, shell_complete=runs, **({"metavar": "RUN"} | how))
