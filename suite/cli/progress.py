"""Progress of a run: a live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from ...registry import escape
from ...registry.store.metric import Metric, summarized
from ...registry.store.record import Key, Record
from ...registry.views import units
from ..plan import Cell
from ..run.pace import Pace
from ..run.supervisor import Listener

FEW = 120
"""Of so many measurements each row has a line as soon as it is first measured; a log of more would be long."""
QUIET_S = 10.0
"""Without a terminal, at most one line in so many seconds, beside what went wrong."""


class _Counted:
    """What both ways of showing keep: how many cells are done, and when the rest will be.

    Cells that cannot run here are no measurements to come: they count nowhere.
    """

    def __init__(self) -> None:
        self.run = ""
        self.metrics: Mapping[str, Metric] = {}
        self.pace = Pace.of(())
        self._earlier = 0

    def begin(
        self, run: str, todo: Collection[tuple[Key, int]], finished: int, metrics: Collection[Metric]
    ) -> None:
        """See `Listener`."""
        self.run, self.pace, self._earlier = run, Pace.of(todo), finished
        self.metrics = {x.name: x for x in metrics}

    @property
    def cells(self) -> int:
        """Over all replicates, those of earlier sessions included."""
        return self._earlier + self.pace.total

    @property
    def finished(self) -> int:
        """Of those."""
        return self._earlier + self.pace.ended

    def stage(self, replicate: int, name: str, cell: Cell | None) -> None:
        """A stage begins."""
        self.pace.stage(replicate, cell is not None)

    def left(self) -> str:
        """Time left, as far as it is known."""
        return units.seconds(self.pace.left_s())

    def seen(self, record: Record) -> str:
        """What one process measured, for whoever waits: the row's value needs them all."""
        metric = self.metrics[record.case.primary]
        return units.quantity(summarized(record.primary, metric.summary), metric.unit)


class Lines(_Counted):
    """For logs."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -QUIET_S

    def begin(
        self, run: str, todo: Collection[tuple[Key, int]], finished: int, metrics: Collection[Metric]
    ) -> None:
        super().begin(run, todo, finished, metrics)
        before = f", {finished} done already" if finished else ""
        print(f"run {run}: {units.counted(self.cells, 'measurement')}{before}", flush=True)

    def end(self, record: Record) -> None:
        self.pace.end(record)
        what = f"{record.case.operator} {record.case.name} {record.implementation}"
        if record.status not in ("ok", "unsupported", "unavailable"):
            print(f"  {escape.plain(what)}: {record.status}: {escape.plain(record.reason)}", flush=True)
        elif record.measurement is not None and record.replicate == 0 and self.cells <= FEW:
            self._last = time.monotonic()
            left = f"; {self.left()} left" if self.pace.left_s() is not None else ""
            print(f"[{self.finished}/{self.cells}] {escape.plain(what)}: {self.seen(record)}{left}", flush=True)
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


class Tally:
    """How far something is that knows the fraction done, on the error output: what it yields goes elsewhere.

    A terminal's line counts on; a log has a line now and then, and none of what takes less than two seconds.
    """

    SHORT_S = 2.0

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._begin: float | None = None
        self._shown = 0.0
        self._live = sys.stderr.isatty()

    def show(self, detail: str, fraction: float) -> None:
        """`detail` of what is under way; the first call, before anything is done, starts the clock."""
        now = self._clock()
        if self._begin is None:
            self._begin = self._shown = now
        elapsed = now - self._begin
        if not self._live and (elapsed < self.SHORT_S or now - self._shown < QUIET_S / 2):
            return
        self._shown = now
        left = f"{units.seconds(elapsed / fraction * (1 - fraction))} left" if fraction > 0 else "…"
        line = f"{self._what}: {escape.plain(detail)}, {left}"
        sys.stderr.write(f"\r\x1b[K{line}" if self._live else f"{line}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Takes a terminal's line away: what stood there is over."""
        if self._live and self._begin is not None:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
