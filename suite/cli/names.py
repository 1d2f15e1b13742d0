"""Arguments that name what exists, which a shell completes: runs, operators, plans, models and more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from ...registry.errors import KernelmarkError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Complete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def completing(names: Callable[[], Iterable[str]], files: bool = False) -> Complete:
    """What completes an argument from these names, or with `files` where none fits a file's.

    A mistake in what is there completes to nothing.
    """

    def complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        try:
            found = [CompletionItem(x) for x in names() if x.startswith(incomplete)]
        except KernelmarkError:
            found = []
        return found or ([CompletionItem(incomplete, type="file")] if files else [])

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


def _models() -> Iterable[str]:
    from ..catalog import Catalog

    return [x for model in Catalog.default().models.values() for x in model.configurations]


def _images() -> Iterable[str]:
    from ..container.session import known

    return known()


runs, plans = completing(_runs, files=True), completing(_plans, files=True)
operators, implementations, models, images = map(completing, (_operators, _implementations, _models, _images))


def run_argument(name: str, **how: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An argument that names a run; `how` goes to `click.argument`."""
    return click.argument(name, shell_complete=runs, **({"metavar": "RUN"} | how))
