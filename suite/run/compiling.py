"""Rows compiled ahead, many at a time: each is built and called once by processes that time nothing, so that a run
after them finds on disk what compilers keep there.

What compilers choose by timing is not kept, as these processes share a device: the run chooses for itself.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from ...registry.errors import HarnessError
from ...registry.store.record import DeviceKind, Status
from ..catalog import Catalog
from ..environments import interpreter
from ..operator import Operator
from ..plan import Cell, Plan
from .messages import Done, Result, Stage, Task, TaskCell
from .process import Garbled, Worker
from .supervisor import START_DEADLINE_S, TRIES, Lost, one_process
from .worker import ranks_of

SLOWER = 4
"""A row's deadline is so many times that of a run: processes share cores and device."""
FEW = 8
"""Rows that a process is worth starting for: loading torch takes as long as compiling some of them."""
APART = {"HELION_CACHE_DIR": "helion", "QUACK_CACHE_DIR": "quack", "TILELANG_CACHE_DIR": "tilelang"}
"""By the variable that says where, folders of libraries that keep what they compile beside what they chose: these
have one of their own, which the run does not look into. Of Triton and Inductor `Task.compiles` leaves choices out.
"""


@dataclass(frozen=True)
class RowEnded:
    """A row that was compiled, or was not; `reason` says why not."""

    cell: Cell
    status: Status
    reason: str | None


def ahead(cells: Sequence[Cell], catalog: Catalog, device: DeviceKind) -> tuple[Cell, ...]:
    """Of these the cells that can be compiled ahead here, once for all states of the cache: an operator's, by one
    process. Programs are not, of which each system has the memory of a whole model.
    """

    def fit(cell: Cell) -> bool:
        definition = catalog.definition(cell.case.operator)
        alone = isinstance(definition, Operator) and not ranks_of(definition, cell.case)
        return alone and cell.implementation.unavailable(device) is None

    once: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        once.setdefault((cell.case.full_name, cell.implementation.name), cell)
    return tuple(x for x in once.values() if fit(x))


def dealt(cells: Sequence[Cell], processes: int) -> list[list[Cell]]:
    """What each of at most so many processes compiles of an environment: cases whole, dealt out in turn, and apart
    what must not be in one process with others. Other environments come first: one library that compiles C++ for
    minutes would hold up all at the end.
    """
    together: dict[tuple[str, bool], dict[str, list[Cell]]] = {}
    for cell in cells:
        kind = cell.implementation.environment, cell.implementation.apart
        together.setdefault(kind, {}).setdefault(cell.case.full_name, []).append(cell)
    lots: list[list[Cell]] = []
    for cases in together.values():
        count = min(processes, len(cases), -(-sum(map(len, cases.values())) // FEW))
        mine: list[list[Cell]] = [[] for _ in range(count)]
        for i, case in enumerate(cases.values()):
            mine[i % count] += case
        lots += mine
    return sorted(lots, key=lambda x: (x[0].implementation.environment == "core", -len(x)))


@dataclass
class Compiling:
    """Processes that compile a plan's rows, `processes` at a time; what they print is in `log`, and `scratch` is a
    folder for what is not kept.
    """

    plan: Plan
    device: DeviceKind
    processes: int
    seed: int
    log: Path
    scratch: Path
    gpus: tuple[int, ...] = ()
    roots: tuple[str, ...] = ()
    python: Callable[[str], Path | None] = interpreter
    _stopped: bool = field(default=False, init=False)
    _workers: set[Worker] = field(default_factory=set, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def run(self, cells: Sequence[Cell], tell: Callable[[RowEnded], None]) -> float:
        """Compiles these cells, and tells of each how it ended, one at a time. Returns the seconds that it took;
        raises what `tell` does, as soon as it does. Once.
        """
        begin = time.monotonic()

        def one(ended: RowEnded) -> None:
            with self._lock:
                tell(ended)

        with ThreadPoolExecutor(self.processes) as pool:
            try:
                lots = [pool.submit(self._lot, i, x, one) for i, x in enumerate(dealt(cells, self.processes))]
                for lot in wait(lots, return_when=FIRST_EXCEPTION).done:
                    lot.result()
            finally:  # whatever ends this, Ctrl-C too: who is still at work is not waited for
                self._stop()
        return time.monotonic() - begin

    def _stop(self) -> None:
        """Ends all workers, those that are being started too: each looks here once it is among them."""
        self._stopped = True
        for worker in tuple(self._workers):
            with contextlib.suppress(HarnessError):  # one that a driver has is no reason to leave the others
                worker.kill()

    def _lot(self, number: int, cells: Sequence[Cell], tell: Callable[[RowEnded], None]) -> None:
        """One process, or as many as crashes make of it."""
        left = dict(enumerate(cells))
        tries = 1
        while left and not self._stopped:
            before = len(left)
            lost = self._process(number, left, tell)
            if len(left) < before:
                tries = 1
            elif lost.killed and tries < TRIES:  # the system did that, for want of memory, say
                tries += 1
            elif not self._stopped:  # none of them was begun
                for index in tuple(left):
                    tell(RowEnded(left.pop(index), "error", lost.reason))

    def _process(self, number: int, left: dict[int, Cell], tell: Callable[[RowEnded], None]) -> Lost:
        """Runs one worker to its end; takes each cell that ends out of `left`."""
        python = self.python(next(iter(left.values())).implementation.environment)
        assert python is not None
        task = Task(
            device=self.device,
            seed=self.seed,
            replicate=0,
            cells=tuple(TaskCell(i, x.case, x.implementation.name, x.cache) for i, x in one_process(left)),
            sampling=self.plan.sampling,
            roots=self.roots,
            systems=self.plan.systems,
            ceilings=False,
            compiles=True,
            deadline_s=SLOWER * self.plan.deadline_s,
            token=secrets.token_hex(16),
        )
        own = {name: str(self.scratch / folder) for name, folder in APART.items()}
        own["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the processes are as many as there should be
        if self.gpus:
            own["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            own["CUDA_VISIBLE_DEVICES"] = str(self.gpus[number % len(self.gpus)])
        current: int | None = None
        status: Status
        with Worker(task, python, self.log, variables=own) as worker:
            self._workers.add(worker)
            try:
                if self._stopped:
                    return Lost(False, "it was too late")
                worker.allow(START_DEADLINE_S)
                for message in worker.messages():
                    match message:
                        case Stage(index=index) if index is not None and index != current:
                            current = index
                            worker.allow(task.deadline_s)
                        case Result(index=index) if index in left:
                            current = None
                            worker.allow(task.deadline_s)
                            tell(RowEnded(left.pop(index), message.status, message.reason))
                        case Done():
                            return Lost(False, "it said that it was done")
            except Garbled as error:
                worker.kill()
                status, reason = "incorrect", str(error)
            else:
                status, reason = worker.fate()
            finally:
                self._workers.discard(worker)
        if current in left and not self._stopped:
            tell(RowEnded(left.pop(current), status, reason))
        return Lost(worker.killed, reason)
