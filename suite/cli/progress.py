"""Progress of a run: a live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Collection, Iterator

from ...registry import escape, figures
from ...registry.store.metric import Metric
from ...registry.store.record import Key, Record
from ..plan import Cell
from ..run.listener import Listener
from ..run.progress import Counted

FEW = 120
"""Of so many measurements each row has a line as soon as it is first measured; a log of more would be long."""
QUIET_S = 10.0
"""Without a terminal, at most one line in so many seconds, beside what went wrong."""


class Lines(Counted):
    """For logs."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -QUIET_S

    def begin(
        self, run: str, todo: Collection[tuple[Key, int]], finished: int, metrics: Collection[Metric]
    ) -> None:
        super().begin(run, todo, finished, metrics)
        before = f", {finished} done already" if finished else ""
        if self.cells:  # where nothing can run here, why not is all that there is to say
            print(f"run {run}: {figures.counted(self.cells, 'measurement')}{before}", flush=True)

    def end(self, record: Record) -> None:
        self.pace.end(record)
        what = f"{record.case.operator} {record.case.name} {record.implementation}"
        if record.status not in ("ok", "unsupported", "unavailable"):
            print(f"  {escape.plain(what)}: {record.status}: {escape.plain(record.reason)}", flush=True)
        elif record.measurement is not None and record.replicate == 0 and self.cells <= FEW:
            self._last = time.monotonic()
            said = "; ".join(x for x in (f"{escape.plain(what)}: {self.seen(record)}", self.left()) if x)
            print(f"[{self.finished}/{self.cells}] {said}", flush=True)
        elif time.monotonic() - self._last >= QUIET_S or self.finished == self.cells:
            self._last = time.monotonic()
            said = f"replicate {record.replicate + 1}, {escape.plain(what)}"
            said = "; ".join(x for x in (said, self.left()) if x)
            print(f"[{self.finished}/{self.cells}] {said}", flush=True)


class Live(Counted):
    """For terminals: a bar, what runs, what is left."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        super().__init__()
        self.progress = Progress(
            BarColumn(24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            TextColumn("{task.description}", markup=False),
            console=escape.console(),
        )
        self._task = self.progress.add_task("starting", total=None, left="")

    def begin(
        self, run: str, todo: Collection[tuple[Key, int]], finished: int, metrics: Collection[Metric]
    ) -> None:
        super().begin(run, todo, finished, metrics)
        self.progress.console.print(f"run {run}")
        self.progress.update(self._task, total=self.cells, completed=finished)

    def stage(self, replicate: int, name: str, cell: Cell | None) -> None:
        super().stage(replicate, name, cell)
        what = "" if cell is None else f"{cell.case.operator} {cell.case.name} {cell.implementation.name}: "
        self.progress.update(self._task, description=f"replicate {replicate + 1}: {what}{name}")

    def end(self, record: Record) -> None:
        self.pace.end(record)
        self.progress.update(self._task, completed=self.finished, left=self.left())
        what = f"{record.case.operator} {record.case.name} {record.implementation}"
        if record.measurement is not None and record.replicate == 0:
            self.progress.console.print(f"{what}: {self.seen(record)}")
        elif record.status not in ("ok", "unsupported", "unavailable"):
            self.progress.console.print(f"{what}: {record.status}: {record.reason}")


@contextlib.contextmanager
def progress() -> Iterator[Listener]:
    """The right way of showing for where the output goes."""
    if not sys.stdout.isatty():
        yield Lines()
        return
    live = Live()
    try:
        live.progress.start()
        yield live
    finally:
        with contextlib.suppress(OSError):  # a terminal that was closed: what was measured is in the journal
            live.progress.stop()
