"""What a supervisor believes of a worker: messages in the order that the harness sends them, times that passed.

An implementation runs in the worker's process and can write to its pipe. What it writes there cannot be told from
the harness's own messages by looks, but it comes out of turn: the harness goes on measuring and says so, of a cell
whose result is there already. So a result counts only when the next message is one that may follow it.

Pure: a task, messages and the seconds at which they came.
"""

from __future__ import annotations

import math

from ...registry.store.metric import LATENCY
from ...registry.store.record import Measurement
from .messages import CeilingDone, Done, Facts, Message, Result, Stage, Task, TaskCell

PROGRAM = "program"
SLACK_S = 1.0
"""Seconds that a worker may say passed beyond those that did here: both clocks are read around other work."""


class OutOfTurn(Exception):
    """A message that the harness does not send there; the text says why."""


class Conversation:
    """Checks one worker's messages as they come. `begin_s` is when it was started."""

    def __init__(self, task: Task, begin_s: float) -> None:
        self._left = list(task.cells)
        self._last: TaskCell | None = None
        self._ceilings = task.ceilings
        self._begin_s = begin_s
        self._facts = False
        self._cells = False
        self._entered: int | None = None
        self._entered_s = begin_s

    def check(self, message: Message, now_s: float) -> None:
        """Raises `OutOfTurn` for what cannot have come from the harness at this point."""
        match message:
            case Facts():
                if self._facts:
                    raise OutOfTurn("facts came twice")
                self._facts = True
            case CeilingDone(ceiling=ceiling):
                if not self._facts or self._cells or not self._ceilings:
                    raise OutOfTurn("a ceiling came that was not being measured")
                if ceiling.time_ms * 1e-3 > now_s - self._begin_s + SLACK_S:
                    raise OutOfTurn("a ceiling took longer than there was time")
            case Stage(index=index):
                if index is not None:
                    self._enter(index, now_s)
            case Result():
                self._end(message, now_s)
            case Done(spent_s=spent):
                if not self._facts or (self._left and not self._may_stop):
                    raise OutOfTurn("the end came before the last result")
                self._passed(spent, now_s - self._begin_s)

    @property
    def _may_stop(self) -> bool:
        """Whether the harness may leave what is left to another process: behind a program's last cell, or with a
        cell that it began and that had no room beside what those before it left.
        """
        last, following = self._last, self._left[0]
        if last is None or last.case.pass_ != PROGRAM:
            return False
        return last.case != following.case or self._entered == following.index

    def _enter(self, index: int, now_s: float) -> None:
        if not self._facts or not self._left or index != self._left[0].index:
            raise OutOfTurn("a stage came of a cell that was not under way")
        if self._entered != index:
            self._entered, self._entered_s, self._cells = index, now_s, True

    def _end(self, result: Result, now_s: float) -> None:
        if not self._facts or not self._left or result.index != self._left[0].index:
            raise OutOfTurn("a result came of a cell that was not under way")
        self._last = self._left.pop(0)
        self._cells = True
        if (result.status == "ok") != (result.measurement is not None) or (
            result.status != "ok" and not result.reason
        ):
            raise OutOfTurn("a result came without what belongs to it")
        if result.measurement is None:
            return
        if self._entered != result.index:
            raise OutOfTurn("a result came of a cell that was not begun")
        elapsed = now_s - self._entered_s
        self._passed(result.spent_s, elapsed)
        # The harness times an operator's calls one after the other; a program's may overlap.
        if self._last.case.pass_ != PROGRAM and sampled_s(result.measurement) > elapsed + SLACK_S:
            raise OutOfTurn("its samples took longer than there was time")

    def _passed(self, spent: dict[str, float], elapsed: float) -> None:
        if not all(0 <= x < math.inf for x in spent.values()) or sum(spent.values()) > elapsed + SLACK_S:
            raise OutOfTurn("its stages took longer than there was time")


def sampled_s(measurement: Measurement) -> float:
    """Seconds that a measurement's timed calls took at least."""
    return measurement.batch * math.fsum(measurement.samples.get(LATENCY.name, ())) * 1e-3
