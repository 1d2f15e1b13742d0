"""How far something is: what every way of showing it keeps, and the ways that are no command's own.

Commands show a run in their own way (`cli/progress.py`). From Python it is a line in a notebook's output, a line
on a terminal's error output, and nothing anywhere else.
"""

from __future__ import annotations

import contextlib
import html
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ...registry import escape, figures
from ...registry.progress import Tell
from ...registry.store.metric import Metric, summarized
from ...registry.store.record import Key, Record
from ..plan import Cell
from .listener import Listener, Silent
from .pace import Pace

SHORT_S = 2.0
"""What takes less is not shown in a log."""
NOW_AND_THEN_S = 5.0
"""A log has at most one line in so many seconds."""
BLINK_S = 0.1
"""A line that is rewritten is not rewritten more often: a notebook's goes through its server."""


class Shared(Silent):
    """Tells after each of so many cells; they make the part of all between the fractions `begin` and `end`."""

    def __init__(self, tell: Tell, cells: int, begin: float = 0.0, end: float = 1.0) -> None:
        self._tell = tell
        self._cells = cells
        self._bounds = begin, end
        self._ended = 0

    def end(self, record: Record) -> None:
        """A cell ended. What cannot run here was none of them."""
        if record.status in ("unsupported", "unavailable"):
            return
        self._ended += 1
        begin, end = self._bounds
        share = begin + (end - begin) * min(1.0, self._ended / self._cells)
        self._tell(_named(record.case.operator, record.case.name, record.implementation), share)


class Counted:
    """How many cells are done, and when the rest will be.

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
        self.pace.stage(replicate, name, cell is not None)

    def left(self) -> str:
        """Time left, and that it is; empty as long as it is not known, and where none is."""
        left_s = self.pace.left_s()
        return f"{figures.seconds(left_s)} left" if left_s else ""

    def seen(self, record: Record) -> str:
        """What one process measured, for whoever waits: the row's value needs them all."""
        metric = self.metrics[record.case.primary]
        return figures.quantity(summarized(record.primary, metric.summary), metric.unit)


class Line:
    """One line on the error output of a terminal, rewritten; what a command prints goes elsewhere."""

    def __init__(self) -> None:
        self._drawn = False

    def show(self, text: str) -> None:
        """Puts this in its place."""
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
        self._drawn = True

    def close(self) -> None:
        """Takes it away: what stood there is over."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._drawn = False


class Output:
    """One line in the output of a notebook's cell, rewritten; the last one stays."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Puts this in its place."""
        from IPython.display import display

        data = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def close(self) -> None:
        """It stays."""


class Cells(Counted):
    """For those who script: one line says what is measured, how far it is, and how long the rest takes."""

    def __init__(self, line: Line | Output, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._line = line
        self._clock = clock
        self._began = clock()
        self._shown = -BLINK_S

    def stage(self, replicate: int, name: str, cell: Cell | None) -> None:
        super().stage(replicate, name, cell)
        what = "" if cell is None else f"{_named(cell.case.operator, cell.case.name, cell.implementation.name)}: "
        self._show(f"{what}{name}")

    def end(self, record: Record) -> None:
        """A cell ended."""
        self.pace.end(record)
        said = record.status if record.measurement is None else self.seen(record)
        self._show(f"{_named(record.case.operator, record.case.name, record.implementation)}: {said}")

    def close(self) -> None:
        """Leaves the result where it stays."""
        took = figures.seconds(self._clock() - self._began)
        self._line.show(f"{self.finished} of {self.cells} measured in {took}")
        self._line.close()

    def _show(self, what: str) -> None:
        if self._clock() - self._shown < BLINK_S:
            return
        self._shown = self._clock()
        counted = ", ".join(x for x in (f"{self.finished} of {self.cells}", self.left()) if x)
        done = f"{counted}: " if self.cells else ""
        self._line.show(escape.plain(f"{done}{what}"))


def _named(operator: str, case: str, implementation: str) -> str:
    return f"{operator} {case} {implementation}"


@contextlib.contextmanager
def watched(wanted: bool | None = None) -> Iterator[Listener]:
    """Shows progress in a notebook and on a terminal; with True anywhere, with False nowhere."""
    line: Line | Output = Output() if in_notebook() else Line()
    if wanted is False or (wanted is None and isinstance(line, Line) and not sys.stderr.isatty()):
        yield Silent()
        return
    cells = Cells(line)
    try:
        yield cells
    finally:
        cells.close()


def in_notebook() -> bool:
    """Whether a notebook's kernel runs us: one that has outputs to write to, and not IPython on a terminal."""
    shell = sys.modules.get("IPython")
    running: Any = shell.get_ipython() if shell is not None else None
    return getattr(running, "kernel", None) is not None


class Tally:
    """How far something is that knows the fraction done, on the error output: what it yields goes elsewhere.

    A terminal's line counts on; a log has a line now and then, and none of what takes less than two seconds.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._begin: float | None = None
        self._shown = 0.0
        self._line = Line() if sys.stderr.isatty() else None

    def show(self, detail: str, fraction: float) -> None:
        """`detail` of what is under way; the first call, before anything is done, starts the clock."""
        now = self._clock()
        if self._begin is None:
            self._begin = self._shown = now
        elapsed = now - self._begin
        if self._line is None and (elapsed < SHORT_S or now - self._shown < NOW_AND_THEN_S):
            return
        self._shown = now
        left = f"{figures.seconds(elapsed / fraction * (1 - fraction))} left" if fraction > 0 else "…"
        text = f"{self._what}: {escape.plain(detail)}, {left}"
        if self._line is not None:
            self._line.show(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Takes a terminal's line away: what stood there is over."""
        if self._line is not None:
            self._line.close()

    def __enter__(self) -> Tally:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
