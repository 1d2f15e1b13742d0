"""What a supervisor asks of a worker, and what the worker says: one JSON object a line, each named by its type.

A task goes to its standard input; `facts`, `stage`, `ceiling`, `result` and `done` come on a pipe.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ...registry.store.record import Cache, Case, Ceiling, DeviceKind, Measurement, Scalar, Status
from ..measure.stopping import Sampling
from ..system import System


class TaskCell(msgspec.Struct, frozen=True):
    """One cell to measure; `index` is its place in the replicate's order, `pinned` what is not to be tuned."""

    index: int
    case: Case
    implementation: str
    cache: Cache
    pinned: dict[str, str] = {}


class Task(msgspec.Struct, frozen=True):
    """What a worker is asked to do. `roots` are folders of a catalog; empty means the default one.

    `code` maps roots to the copies of another commit that their kernels and baselines come from.
    """

    device: DeviceKind
    seed: int
    replicate: int
    cells: tuple[TaskCell, ...]
    sampling: Sampling
    roots: tuple[str, ...] = ()
    code: dict[str, str] = {}
    systems: tuple[System, ...] = ()
    ceilings: bool = True
    code_told: bool = False
    """Whether it is recorded what machine code each row's call launches."""
    scratch: str = ""
    """The run's folder for what programs need to go on after they were killed; empty: nothing is kept."""
    world: int = 1
    """The largest world among the plan's cases, of which the conditions tell."""
    deadline_s: float = 120.0
    """For a cell; the supervisor's, whose own clock ends what does not end by itself."""
    compiles: bool = False
    """Whether each cell is built and called once, and nothing is checked or timed (`compiling`)."""
    harness: str = ""
    """The code that asks (`own_code`); empty: nobody wants to know."""
    token: str = ""
    """Stands before every message on the pipe; what an implementation prints there has none."""


class Facts(msgspec.Struct, frozen=True, tag_field="message", tag="facts"):
    """What only a process with torch loaded knows of the surroundings, and what it has itself."""

    conditions: dict[str, Scalar]
    python: dict[str, Scalar] = {}


RANKS = "ranks"
"""The stage, outside of cells, in which the ranks of a case are started."""


class Stage(msgspec.Struct, frozen=True, tag_field="message", tag="stage"):
    """A stage begins; `index` is None outside of cells."""

    name: str
    index: int | None = None


class CeilingDone(msgspec.Struct, frozen=True, tag_field="message", tag="ceiling"):
    """A ceiling was measured."""

    ceiling: Ceiling


class Result(msgspec.Struct, frozen=True, tag_field="message", tag="result"):
    """A cell ended."""

    index: int
    status: Status
    reason: str | None
    measurement: Measurement | None
    spent_s: dict[str, float]


class Done(msgspec.Struct, frozen=True, tag_field="message", tag="done"):
    """The process has done what it will: all cells, or those up to the end of a program's case where it holds too
    much for the next. Seconds per stage, those outside of cells included.
    """

    spent_s: dict[str, float]


Message: TypeAlias = Facts | Stage | CeilingDone | Result | Done
