"""What a workload is: a program with a clock of its own, which trains, converges, generates or serves.

A workload's file in `workloads/` builds one `Workload`. What it compares are systems; a system is an
`Implementation` whose factory gives, for a case, what the workload knows how to run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..registry.store.metric import Metric
from ..registry.store.record import Case, Measurement, Pass
from .definition import Definition

if TYPE_CHECKING:
    from .measure.session import Session
    from .system import Assembly


@dataclass(frozen=True, kw_only=True)
class Workload(Definition):
    """A program with a clock of its own.

    * `measured` are its metrics, first the one that cases are judged by.
    * `prepare(case, session)` computes, once for all systems of a case in a process, what their answers are held
      against (None where there is nothing).
    * `measure(case, system, session, prepared)` runs one system. `system` is what its factory gave for the case.
      Raises `measure.verify.Incorrect` for a wrong answer, NotImplementedError for what the system cannot do.
    * `assemble(case, assembly)` makes a program of a system of parts (`suite/system.py`); without it only whole
      programs of baselines are compared.
    * `step(case, system, session)` gives one step of a system alone, for `kernelmark profile`.
    * `several` says that its cases may take several GPUs: it is then run in every rank, with the session's group.
    * `definition` names what decides the answer besides `prepare` and `measure`: functions and values.
    """

    measured: tuple[Metric, ...]
    measure: Callable[[Case, Any, Session, Any], Measurement]
    prepare: Callable[[Case, Session], Any] = lambda case, session: None
    assemble: Callable[[Case, Assembly], Any] | None = None
    step: Callable[[Case, Any, Session], Callable[[], Any]] | None = None
    definition: tuple[object, ...] = ()
    several: bool = False

    @property
    def passes(self) -> tuple[Pass, ...]:
        """A program is not passed in parts."""
        return ("program",)

    @property
    def distributed(self) -> bool:
        """As its file says."""
        return self.several

    def whole(self, case: Case) -> Case:
        """The case that one process would be given for what all ranks do: what answers are held against."""
        return case

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What it measures."""
        return self.measured

    def computes(self, case: Case) -> tuple[object, ...]:
        """How its answers are made and checked, and the case's precision."""
        return (self.prepare, self.measure, *self.definition, case.dtype)
