"""A run: replicate after replicate, each a fresh worker; every line in the journal as soon as it is made.

The supervisor never loads torch. It owns the worker's life: a deadline for each cell, a restart after a
crash or a broken CUDA context, an end with it. What went wrong costs that cell and nothing else.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import filelock
import msgspec

from ...registry.errors import Ended, HarnessError, InputError, KernelmarkError
from ...registry.store.home import Home
from ...registry.store.journal import Journal, Writer, read
from ...registry.store.metric import LATENCY
from ...registry.store.record import (
    BOARDS,
    SCHEMA_VERSION,
    YARDSTICK,
    DeviceKind,
    Footer,
    Header,
    Key,
    Measurement,
    Record,
    Request,
    Scalar,
    Status,
)
from ...registry.store.shards import checked_header, path_of, shards_of
from .. import __version__, budget
from ..catalog import Catalog
from ..environments import interpreter
from ..estimate import estimate
from ..measure.ranks import LOOPBACK, NO_MULTICAST, START_S
from ..plan import NOTHING, Cell, Plan, layers, order, parameters
from . import fingerprint, own_code
from .conversation import PROGRAM, Conversation, OutOfTurn
from .forkserver import ForkServers
from .listener import Listener, Silent, Unbroken
from .messages import RANKS, CeilingDone, Done, Facts, Result, Stage, Task, TaskCell
from .pace import LASTING
from .peaks import least_ms
from .process import Garbled, OutOfTime, Worker
from .worker import ranks_of

WORKERS = "workers"
"""In a header's environment: how its workers began, where that is not from nothing."""
TRIES = 3
"""How often a worker is started that is killed before its first cell."""
START_DEADLINE_S = 300.0
"""For a worker to start, load torch, open its device and measure the ceilings."""
RANKS_DEADLINE_S = START_S + 30.0
"""For ranks to start or to end: the worker's own deadline for that, which says which of them is late, and more."""


ELSEWHERE = "other rows of its case were measured on another board in the same replicate"
"""A remark on a row: what it is put beside there saw another device."""


class NotResumable(KernelmarkError):
    """The surroundings changed since the run began: what is measured now is not comparable with it."""

    exit_code = 4


class Interrupted(KernelmarkError):
    """Ended by Ctrl-C or another signal; the message says how to go on.

    The exit code is what shells expect of a program so ended: 130 after Ctrl-C.
    """

    def __init__(self, message: str, exit_code: int = 130) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class OutOfBudget(KernelmarkError):
    """The time for a run ended before anything was measured."""

    exit_code = 3


@dataclass(frozen=True)
class Lost:
    """How a worker ended. `killed`: by a signal from outside of it, as far as can be told."""

    killed: bool
    reason: str


def one_process(cells: Mapping[int, Cell]) -> Iterator[tuple[int, Cell]]:
    """The cells that the next process measures, with their places: in their order, up to the second one of an
    implementation that a process can have once only, and without those that are not measured in the same one.
    """
    had = set()
    apart = next((x.implementation.apart for x in cells.values()), False)
    for index, cell in cells.items():
        if cell.implementation.apart != apart:
            continue
        if cell.implementation.once:
            if cell.implementation.name in had:
                return
            had.add(cell.implementation.name)
        yield index, cell


def nothing_runs(ended: Sequence[Record]) -> InputError:
    """The message where not one cell can run here: each reason once, in the words that `kernelmark list` has."""
    reasons = Counter((x.status, x.reason) for x in ended)
    # What an installation would mend comes before what only another device would.
    told = sorted(reasons.items(), key=lambda x: (x[0][0] != "unavailable", -x[1]))
    said = "\n".join(f"  {reason} ({count} row{'s' * (count > 1)})" for (_, reason), count in told)
    return InputError(f"nothing of this plan can run here:\n{said}")


def new_run() -> str:
    """A fresh run name: UTC time, so that names sort, and four random digits."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


@dataclass
class Run:
    """One run of a plan, new or resumed.

    For runs of another commit, `code` maps roots of the catalog to folders with that commit's kernels and
    baselines, and `commit` says which it is, and whether it has uncommitted changes; else both are those of
    the checkout of `source`. `until` is a time of `time.monotonic` at which measuring stops at once.
    """

    plan: Plan
    cells: tuple[Cell, ...]
    catalog: Catalog
    device: DeviceKind
    home: Home
    seed: int
    name: str = field(default_factory=new_run)
    roots: tuple[str, ...] = ()
    code: Mapping[str, str] = field(default_factory=dict)
    ceilings: bool = True
    code_told: bool = False
    """Whether the first replicate records what machine code each row's call launches."""
    source: Path = Path(__file__).resolve().parent
    commit: tuple[str | None, bool] | None = None
    request: Request = NOTHING
    """What it is besides its plan: a side of a comparison, a shard."""
    gpus: tuple[int, ...] = ()
    """The GPUs that it may use, as nvidia-smi numbers them; empty: all that are visible."""
    worlds: tuple[int, ...] = ()
    """The worlds of the plan that it is a part of, where its own cases have not all of them."""
    until: float = math.inf
    keeps_cells: bool = False
    """Whether a time that ends leaves fewer replicates of all cells; else later replicates leave cells out."""
    listener: Listener = field(default_factory=Silent)
    python: Callable[[str], Path | None] = interpreter
    servers: ForkServers | None = None
    """Where workers are forked from; None: each is started from nothing."""
    past: Journal | None = None
    any_board: bool = False
    """Whether it may go on on another board than it began on."""
    pinned: Mapping[Key, Mapping[str, str]] = field(default_factory=dict)
    left_out: tuple[Cell, ...] = field(default=(), init=False)
    """What later replicates were left without, to end in time."""
    ran_out: bool = field(default=False, init=False)
    """Whether the time ended before that was all measured."""
    _writer: Writer | None = field(default=None, init=False)
    _spent: dict[str, float] = field(default_factory=dict, init=False)
    _settled: dict[Key, Status] = field(default_factory=dict, init=False)
    _done: set[tuple[Key, int]] = field(default_factory=set, init=False)
    _board: str | msgspec.UnsetType = field(default=msgspec.UNSET, init=False)
    """Where this session measures, if that is another board than the header's."""
    _boards: dict[tuple[str, int], set[str | msgspec.UnsetType]] = field(default_factory=dict, init=False)
    """By case and replicate, where rows of it were measured."""

    def __post_init__(self) -> None:
        self.listener = Unbroken(self.listener)

    @property
    def path(self) -> Path:
        """The run's journal, or that of its shard."""
        return path_of(self.home, self.name, self.request.shard)

    def execute(self) -> Path:
        """Measures what is still missing. Returns the journal's path; raises `KernelmarkError`."""
        try:
            with self.session():
                todo = [
                    (cell.identity, replicate)
                    for cell in self.cells
                    if cell.implementation.unavailable(self.device) is None
                    for replicate in range(self.plan.replicates)
                    if self._wanted(cell, replicate)
                ]
                metrics = self.catalog.metrics(x.case for x in self.cells)
                self.listener.begin(self.name, todo, len(self._done), metrics)
                for replicate in range(self.plan.replicates):
                    self.replicate(replicate, self._affordable(replicate))
        except OutOfTime:
            if not self._measured:
                more = f"go on with: {self.again}" if self._header_known else "give it more."
                raise OutOfBudget(f"the budget ended before anything was measured; {more}") from None
            self.ran_out = True
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"interrupted; what was finished is in {self.path}. Go on with: {self.again}"
                if self._header_known
                else "interrupted before anything was measured.",
                error.exit_code if isinstance(error, Ended) else 130,
            ) from None
        return self.path

    @property
    def _measured(self) -> bool:
        """Whether anything ended of what can run here."""
        seen = {identity for identity, _ in self._done}
        return any(x.identity in seen and x.implementation.unavailable(self.device) is None for x in self.cells)

    @property
    def unmeasured(self) -> tuple[Cell, ...]:
        """The cells of which no replicate ended."""
        seen = {identity for identity, _ in self._done}
        return tuple(x for x in self.cells if x.identity not in seen)

    def _affordable(self, replicate: int) -> Sequence[Cell]:
        """The cells that the time left suffices for, by what they took so far: all, without a limit."""
        if replicate == 0 or self.until == math.inf or self.keeps_cells or self._writer is None:
            return self.cells
        to_come = {x for case in self.plan.cases for x in self.plan.numbers(case) if x >= replicate}
        if not to_come:
            return self.cells
        left_s = (self.until - time.monotonic()) / len(to_come)
        cost = estimate(self.plan.sampling, read(self.path).records, self.device)
        kept = budget.fit(self.cells, 1, left_s, cost, self.request.control)
        dropped = [x for x in budget.without(self.cells, kept) if self._wanted(x, replicate)]
        self.left_out += budget.without(dropped, self.left_out)
        return kept

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Holds the journal open for `replicate`, and closes it with a footer however it ends, but where it ended
        before it added anything: such a journal stays as it was.
        """
        begin = time.monotonic()
        try:
            with self._locked(), self._journal():
                complete = False
                try:
                    yield
                    complete = not self.left_out
                finally:
                    if self._header_known and (complete or (self._writer and self._writer.lines)):
                        self._finish(time.monotonic() - begin, complete)
        except OSError as error:
            kept = f" What was finished is in it; when the disk is right again: {self.again}"
            raise HarnessError(
                f"the journal {self.path} cannot be written: {error.strerror or error}."
                + (kept if self._header_known else "")
            ) from None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(self.path.with_suffix(".lock"), timeout=0):
                try:
                    yield
                finally:
                    self.path.with_suffix(".lock").unlink(missing_ok=True)
        except filelock.Timeout:
            raise InputError(f"run {self.name} is being measured by another process.") from None

    @contextlib.contextmanager
    def _journal(self) -> Iterator[None]:
        """Opens the journal of a run that goes on; a new run's is made with its header, so that none is empty."""
        try:
            if self.past is not None:
                self.past = read(self.path)  # again: another process may have gone on before we had the lock
                self._writer = Writer(self.path)
                for record in self.past.records:
                    self._note(record)
            yield
        finally:
            if self._writer is not None:
                self._writer.close()
                if not self._header_known:
                    self.path.unlink()

    @property
    def again(self) -> str:
        """The command that goes on with this run."""
        if self.request.partner is not None:
            return "the comparison of commits, from its beginning"
        elsewhere = "" if self.home.folder == Home().folder else f" --output {shlex.quote(str(self.home.folder))}"
        name = self.name if self.request.shard is None else shlex.quote(str(self.path))
        over = "" if self._board is msgspec.UNSET else " --any-board"
        return f"kernelmark {self._launcher} --resume {name}{elsewhere}{over}"

    @property
    def _launcher(self) -> str:
        """What made this run, for the whole of it: here, or in a container of one image."""
        image = os.environ.get(fingerprint.IMAGE_DIGEST)
        one = fingerprint.IMAGE_NAME in os.environ and fingerprint.IMAGES not in os.environ
        return f"bench {image}" if image and one and self.request.shard is None else "run"

    @property
    def _header_known(self) -> bool:
        return self.past is not None

    def _note(self, record: Record) -> None:
        self._done.add((record.identity, record.replicate))
        if record.status in LASTING:
            self._settled[record.identity] = record.status
        if record.measurement is not None:
            self._boards.setdefault((record.case.full_name, record.replicate), set()).add(record.board)

    def _placed(self, record: Record) -> Record:
        """The same with its board, if not the header's, and a remark if others of its case had another."""
        measurement, had = record.measurement, self._boards.get((record.case.full_name, record.replicate), set())
        if measurement is not None and had - {self._board}:
            measurement = msgspec.structs.replace(measurement, remarks=(*measurement.remarks, ELSEWHERE))
        return msgspec.structs.replace(record, board=self._board, measurement=measurement)

    def _write_record(self, record: Record) -> None:
        assert self._writer is not None
        record = self._placed(record)
        self._writer.write(record)
        self._note(record)
        self.listener.end(record)

    def _finish(self, wall_s: float, complete: bool) -> None:
        assert self._writer is not None
        known = sum(self._spent.values())
        spent = {**self._spent, "overhead": max(0.0, wall_s - known)}
        with contextlib.suppress(OSError):  # the error under way says more than this one would
            self._writer.write(Footer(_now(), wall_s, complete, spent))

    def replicate(self, replicate: int, cells: Sequence[Cell]) -> None:
        """Measures one replicate of these cells, as far as they are not done; within a `session`."""
        walk = order(cells, self.seed, replicate)
        if replicate == 0 and self.until < math.inf and not self.keeps_cells:
            walk = budget.first(walk, cells)  # nobody knows yet what its cells take
        # A process has ranks once: cases of as many come one after the other.
        walk = tuple(sorted(walk, key=lambda x: ranks_of(self.catalog.definition(x.case.operator), x.case)))
        runnable: dict[str, dict[int, Cell]] = {}
        ended: list[Record] = []
        for index, cell in enumerate(walk):
            if not self._wanted(cell, replicate):
                continue
            reason = self._too_few(cell.case.world) or cell.implementation.unavailable(self.device)
            if reason is None:
                runnable.setdefault(cell.implementation.environment, {})[index] = cell
            else:
                ended.append(cell.record(replicate, index, *reason))
        if ended and not runnable and not self._header_known:
            # Without a worker nobody knows the conditions, and a journal of absences says nothing anyway,
            # unless it is a part of one: another shard may hold what runs here, and the run needs all of them.
            if self.request.shard is None:
                raise nothing_runs(ended)
            self._replicate(replicate, "core", {})
        for environment, mine in runnable.items():
            self._replicate(replicate, environment, mine)
        for record in ended:
            self._write_record(record)

    def _too_few(self, world: int) -> tuple[Status, str] | None:
        """Why a case of that world cannot be measured here; on a CPU its ranks are processes."""
        if world == 1 or self.device == "cpu":
            return None
        here = len(self.gpus) or fingerprint.gpus_here()
        return None if world <= here else ("unsupported", f"needs {world} GPUs; this run may use {here}")

    @property
    def _variables(self) -> dict[str, str]:
        """What workers' environment has beside ours. What is set already stays; ranks refuse what is wrong."""
        between = {**NO_MULTICAST, **LOOPBACK} if self._world > 1 else {}
        own = {name: value for name, value in between.items() if name not in os.environ}
        if self.gpus:
            own["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # else CUDA counts the fastest first
            own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        return own

    @property
    def _world(self) -> int:
        """The largest world that can run here: what workers' conditions tell of."""
        worlds = {1, *self.worlds, *(x.world for x in self.plan.cases)}
        return max(x for x in worlds if self._too_few(x) is None)

    def _wanted(self, cell: Cell, replicate: int) -> bool:
        seeds = self.plan.seeds.get(cell.case.full_name)  # a comparison has as many replicates as it takes
        mine = seeds is None or replicate in seeds
        return mine and (cell.identity, replicate) not in self._done and cell.identity not in self._settled

    def _replicate(self, replicate: int, environment: str, cells: dict[int, Cell]) -> None:
        """One process, or as many as crashes make of it. Without cells it says its conditions, and no more."""
        left = dict(cells)
        first = (
            environment == "core"
            and bool(cells)
            and not any(
                # Matmuls come last: without one the ceilings of this replicate were cut short.
                x.replicate == replicate and x.what == "matmul"
                for x in (self.past.ceilings if self.past else ())
            )
        )
        python = self.python(environment)
        assert python is not None, environment
        tries = 1
        while left or not self._header_known:
            task = Task(
                device=self.device,
                seed=self.seed,
                replicate=replicate,
                cells=tuple(
                    TaskCell(i, x.case, x.implementation.name, x.cache, dict(self.pinned.get(x.identity, {})))
                    for i, x in one_process(left)
                ),
                sampling=self.plan.sampling,
                roots=self.roots,
                code=dict(self.code),
                systems=self.plan.systems,
                ceilings=self.ceilings and first,
                code_told=self.code_told and replicate == 0,
                scratch=str((self.home.scratch / self.path.stem).resolve()),
                world=self._world,
                deadline_s=self.plan.deadline_s,
                harness=own_code.digest(),
                token=secrets.token_hex(16),
            )
            before = len(left)
            lost = self._process(task, python, left)
            if len(left) < before:
                first, tries = False, 1
            elif lost.killed and tries < TRIES:  # nothing of ours did that: the system, for want of memory, say
                tries += 1
            elif self._header_known and left:
                raise HarnessError(
                    f"the worker made no progress: {lost.reason.rstrip('.')}. Its output is in {self._log}. "
                    f"Finished results are safe; go on with: {self.again}"
                )
            elif not self._header_known:
                raise HarnessError(f"the worker could not start: {lost.reason}")

    @property
    def _log(self) -> Path:
        return self.home.logs / f"{self.path.stem}.log"

    def _process(self, task: Task, python: Path, left: dict[int, Cell]) -> Lost:
        """Runs one worker to its end; takes each cell that ends out of `left`."""
        variables = self._variables  # which a server's processes, started before, do not have
        server = self.servers.of(python) if self.servers is not None and not variables else None
        with Worker(task, python, self._log, self.until, server, variables) as worker:
            begin = time.monotonic()
            worker.allow(START_DEADLINE_S)
            conversation = Conversation(task, begin)
            current: int | None = None
            stage = "start"
            held: Result | None = None  # until the next message shows that the harness sent it
            try:
                for message in worker.messages():
                    conversation.check(message, time.monotonic())
                    if held is not None:
                        self._result(task.replicate, held, left)
                        held = None
                    match message:
                        case Facts(conditions=facts, python=own):
                            exchanged = self.python("core") != Path(sys.executable)
                            self._header(facts, own if exchanged else None, worker.forked)
                            self._spend({"start": time.monotonic() - begin})
                        case CeilingDone(ceiling=ceiling):
                            assert self._writer is not None
                            self._writer.write(msgspec.structs.replace(ceiling, board=self._board))
                        case Stage(name=stage, index=index):
                            if index is not None and index != current:
                                current = index
                                worker.allow(self.plan.deadline_s)
                            elif stage == RANKS:
                                worker.allow(RANKS_DEADLINE_S)
                            cell = left.get(index) if index is not None else None
                            self.listener.stage(task.replicate, stage, cell)
                        case Result():
                            held = message
                            current = None
                            worker.allow(self.plan.deadline_s)
                        case Done(spent_s=spent):
                            self._spend(spent)
                            return Lost(False, "it said that it was done")
            except (OutOfTurn, Garbled) as error:
                worker.kill()
                guilty = held.index if held is not None else current
                reason = f"{stage}: {error}: something other than the harness wrote to its pipe"
                self._give_up(task.replicate, guilty, "incorrect", reason, left)
                return Lost(False, reason)
            status, reason = worker.fate()
            cell = left.get(held.index if held is not None else -1 if current is None else current)
            if status == "crashed" and cell is not None and cell.case.world > 1:
                reason = f"rank 0 of {cell.case.world}: {reason}"  # which the worker is
            if held is not None and held.status != "ok":
                self._result(task.replicate, held, left)
            elif held is not None:
                self._give_up(task.replicate, held.index, status, f"after its last stage: {reason}", left)
            else:
                self._give_up(task.replicate, current, status, f"{stage}: {reason}", left)
            return Lost(worker.killed, f"{reason}. {worker.last_words()}")

    def _result(self, replicate: int, result: Result, left: dict[int, Cell]) -> None:
        cell = left.pop(result.index)
        self._spend(result.spent_s)
        status, reason, measurement = result.status, result.reason, result.measurement
        if measurement is not None and (primary := cell.case.primary) not in measurement.samples:
            # No record can be made of it. Whatever a workload left out costs its row, and not the run.
            status, reason, measurement = "error", f"no samples of {primary!r}, which the case is judged by", None
        elif measurement is not None and (less := _below_zero(measurement)):
            status, reason, measurement = "error", less, None
        elif measurement is not None and (impossible := self._impossible(cell, measurement)):
            status, reason, measurement = "incorrect", impossible, None
        self._write_record(cell.record(replicate, result.index, status, reason, measurement, result.spent_s))

    def _impossible(self, cell: Cell, measurement: Measurement) -> str | None:
        """Why a time is refused that no device of this kind can reach."""
        assert self.past is not None
        header = self.past.header
        times = measurement.samples.get(LATENCY.name, ())
        if not times or cell.implementation.provider == YARDSTICK or cell.case.pass_ == PROGRAM:
            return None
        least, ms = least_ms(cell.case, header.device, header.conditions, header.environment), median(times)
        if ms >= least:
            return None
        before = "; what it computes in its forward pass counts with --pass forward_backward"
        return (
            f"faster than the device: {ms:.3g} ms, and this case takes at least {least:.3g} ms at its peak rates"
            + before * (cell.case.pass_ == "backward")
        )

    def _give_up(
        self, replicate: int, index: int | None, status: Status, reason: str, left: dict[int, Cell]
    ) -> None:
        """The worker ended, or was ended, before its time: the cell under way pays for it."""
        if index is not None and index in left:
            self._write_record(left.pop(index).record(replicate, index, status, reason))

    def _spend(self, spent: dict[str, float]) -> None:
        for name, seconds in spent.items():
            self._spent[name] = self._spent.get(name, 0.0) + seconds

    def _header(self, facts: dict[str, Scalar], own: dict[str, Scalar] | None, forked: bool = False) -> None:
        """Writes the header of a new run; for a resumed one checks that the surroundings are the same.

        `own` is what the worker said of its Python, where that is not the one that we run in; `forked` is how it
        began.
        """
        conditions = fingerprint.conditions(self.device, facts)
        commit, dirty = self.commit or fingerprint.commit(self.source)
        if self.past is not None:
            old = self.past.header
            changed = [
                f"{name}: {old.conditions.get(name)} then, {conditions.get(name)} now"
                for name in sorted(old.conditions.keys() | conditions.keys())
                if old.conditions.get(name) != conditions.get(name)
            ]
            noted = old.environment.get(BOARDS)  # which older journals do not say
            here = fingerprint.boards(facts).get(BOARDS)
            if here != noted and here is not None and self.any_board:
                self._board = str(here)
            elif here != noted and noted is not None:
                changed.append(
                    "GPU: another board than then, which --gpus may name; --any-board goes on with this one"
                    if here is not None
                    else "GPU: it does not say which board it is"
                )
            if old.commit != commit:
                changed.append(f"commit: {old.commit} then, {commit} now")
            elif dirty and not old.dirty:  # its header says of all rows that the commit is what was measured
                changed.append("commit: uncommitted changes now, and none then")
            if changed:
                raise NotResumable(
                    f"run {self.name} cannot go on here, its conditions changed: {'; '.join(changed)}. "
                    f"Start a new run."
                )
            return
        header = Header(
            schema_version=SCHEMA_VERSION,
            run=self.name,
            created=_now(),
            harness=__version__,
            commit=commit,
            dirty=dirty,
            plan=self.plan.name,
            seed=self.seed,
            replicates=self.plan.replicates,
            device=self.device,
            key=fingerprint.key(conditions),
            conditions=conditions,
            environment={
                **fingerprint.environment(self.device, own, facts),
                **({WORKERS: "forked from a loaded torch"} if forked else {}),
            },
            metrics=self.catalog.metrics(self.plan.cases),
            request=msgspec.structs.replace(
                self.plan.request(self.cells, self.request),
                parameters=parameters(self.plan.cases, self.catalog),
                layers=layers(self.plan.cases, self.catalog),
            ),
        )
        if self.request.shard is not None:
            checked_header(self.home, header)
        # Only now, so that nobody who looks at a run's shards finds a journal without its header.
        self._writer = Writer(self.path)
        self._writer.write(header)
        self.past = Journal(header)


def resume(
    name: str,
    home: Home,
    catalog: Catalog,
    listener: Listener,
    servers: ForkServers | None = None,
    *,
    any_board: bool = False,
) -> Run:
    """The run of that name, ready to go on, with `any_board` on another board too. Raises `InputError` if there is
    none.

    `servers` fork its workers if they did before: processes of one row that began otherwise would differ more.
    """
    path = home.find(name)
    if path.suffix == ".gz":
        raise InputError(f"{path} is compressed; unpack it first to go on with its run.")
    past = read(path)
    header = past.header
    if header.request.partner is not None:
        raise InputError(f"run {name} is one side of a comparison of commits; start the comparison anew.")
    if shards_of(home, header.run) and header.request.shard is None:
        if str(header.conditions.get("parallel", "")).isdigit():
            raise InputError(f"run {header.run} was measured side by side; go on with --parallel --gpus, too.")
        raise InputError(f"run {header.run} was joined from shards; go on with a shard of {home.shards}.")
    if path.resolve() != path_of(home, header.run, header.request.shard).resolve():
        raise InputError(f"{path} is not in {home.journals} under its run's name; import it, or name its home.")
    if header.schema_version != SCHEMA_VERSION:
        raise InputError(f"run {header.run} was begun by an older kernelmark, whose journals are only read.")
    plan = Plan.of(header)
    if plan is None:
        raise InputError(f"run {header.run} does not say what it measured; it cannot go on.")
    if header.device not in (here := fingerprint.devices_here()):
        raise InputError(
            f"run {header.run} was measured on device {header.device!r}, which is not here. Here: "
            f"{', '.join(here)}. Go on with it on a machine that has one, or start a new run here."
        )
    for case in plan.cases:
        if catalog.definition(case.operator).spec(case) != case.spec:
            raise NotResumable(f"operator {case.operator} was changed since run {name} began. Start a new run.")
    cells = plan.cells(catalog, header.device, header.request.implementations)
    return Run(
        plan,
        cells,
        catalog,
        header.device,
        home,
        header.seed,
        header.run,
        request=header.request,
        listener=listener,
        servers=servers if WORKERS in header.environment else None,
        past=past,
        any_board=any_board,
        worlds=(int(header.conditions.get("world") or 1),),
    )


def _below_zero(measurement: Measurement) -> str | None:
    """Why a time is refused that is none: what is taken off it, as of flushes in a graph, was longer."""
    times = measurement.samples.get(LATENCY.name, ())
    if not times or median(times) > 0:
        return None
    return (
        f"not measurable by timer {measurement.timer}: flushes alone took {-median(times):.3g} ms a call longer "
        "than calls with flushes; take --timer cupti or events"
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
