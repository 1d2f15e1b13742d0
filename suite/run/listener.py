"""Whoever hears how a run goes: what is told, and to whom where nobody listens."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from ...registry.store.metric import Metric
from ...registry.store.record import Key, Record
from ..plan import Cell


class Listener(Protocol):
    """Whoever shows progress."""

    def begin(
        self, run: str, todo: Collection[tuple[Key, int]], finished: int, metrics: Collection[Metric]
    ) -> None:
        """A session begins: the rows and replicates to be measured in it, how many were measured before, and the
        metrics that its measurements hold.
        """

    def stage(self, replicate: int, name: str, cell: Cell | None) -> None:
        """A stage begins."""

    def end(self, record: Record) -> None:
        """A cell ended."""


class Unbroken:
    """Shows as another does until that cannot: an output that went away or is full is no reason to stop."""

    def __init__(self, listener: Listener) -> None:
        self._listener: Listener = listener

    def begin(
        self, run: str, todo: Collection[tuple[Key, int]], finished: int, metrics: Collection[Metric]
    ) -> None:
        self._heard(lambda x: x.begin(run, todo, finished, metrics))

    def stage(self, replicate: int, name: str, cell: Cell | None) -> None:
        self._heard(lambda x: x.stage(replicate, name, cell))

    def end(self, record: Record) -> None:
        self._heard(lambda x: x.end(record))

    def _heard(self, show: Callable[[Listener], None]) -> None:
        try:
            show(self._listener)
        except OSError:
            self._listener = Silent()


class Silent:
    """Shows nothing."""

    def begin(
        self, run: str, todo: Collection[tuple[Key, int]], finished: int, metrics: Collection[Metric]
    ) -> None: ...

    def stage(self, replicate: int, name: str, cell: Cell | None) -> None: ...

    def end(self, record: Record) -> None: ...
