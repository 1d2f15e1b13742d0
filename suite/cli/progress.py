"""Progress of a run: a live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from ...registry import escape
from ...registry.store.record import Record
from ..plan import Cell
from ..run.supervisor import Listener

QUIET_S = 10.0
"""Without a terminal, at most one line in so many seconds, beside what went wrong."""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


class _Counted:
    """What both ways of showing keep: how many cells are done, and when the rest will be."""

    def __init__(self) -> None:
        self.run = ""
        self.cells = 0
        self.finished = 0
        self._earlier = 0
        self._begin = time.monotonic()

    def begin(self, run: str, cells: int, finished: int) -> None:
        """Cells over all replicates, those of earlier sessions included."""
        self.run, self.cells, self.finished, self._earlier = run, cells, finished, finished

    def left(self) -> str:
        """Time left, at this session's pace so far."""
        done = self.finished - self._earlier
        if done == 0:
            return "–"
        pace = (time.monotonic() - self._begin) / done
        return _clock(pace * max(0, self.cells - self.finished))


class Lines(_Counted):
    """For logs."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -QUIET_S

    def begin(self, run: str, cells: int, finished: int) -> None:
        super().begin(run, cells, finished)
        print(f"run {run}: {cells} measurements" + (f", {finished} done already" if finished else ""), flush=True)

    def stage(self, replicate: int, name: str, cell: Cell | None) -> None:
        """Too much for a log."""

    def end(self, record: Record) -> None:
        self.finished += 1
        what = f"{record.case.operator} {record.case.name} {record.implementation}"
        if record.status not in ("ok", "unsupported", "unavailable"):
            print(f"  {escape.plain(what)}: {record.status}: {escape.plain(record.reason)}", flush=True)
        elif time.monotonic() - self._last >= QUIET_S or self.finished == self.cells:
            self._last = time.monotonic()
            print(
                f"[{self.finished}/{self.cells}] replicate {record.replicate + 1}, {escape.plain(what)}; "
                f"{self.left()} left",
                flush=True,
            )


class Live(_Counted):
    """For terminals: a bar, what runs, what is left."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        super().__init__()
        self.progress = Progress(
            BarColumn(24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]} left", markup=False),
            TextColumn("{task.description}", markup=False),
            console=escape.console(),
        )
        self._task = self.progress.add_task("starting", total=None, left="–")

    def begin(self, run: str, cells: int, finished: int) -> None:
        super().begin(run, cells, finished)
        self.progress.console.print(f"run {run}")
        self.progress.update(self._task, total=cells, completed=finished)

    def stage(self, replicate: int, name: str, cell: Cell | None) -> None:
        what = "" if cell is None else f"{cell.case.operator} {cell.case.name} {cell.implementation.name}: "
        self.progress.update(self._task, description=f"replicate {replicate + 1}: {what}{name}")

    def end(self, record: Record) -> None:
        self.finished += 1
        self.progress.update(self._task, completed=self.finished, left=self.left())
        if record.status not in ("ok", "unsupported", "unavailable"):
            what = f"{record.case.operator} {record.case.name} {record.implementation}"
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
