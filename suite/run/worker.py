"""One replicate, in a process of its own: takes a task on standard input, gives messages on a pipe.

The worker may be killed at any moment; whoever reads the pipe has all that was finished. It ends by itself
when its parent goes away, and after an error that leaves the CUDA context unusable.

What is asked and said is in `messages`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

import msgspec

from ...registry.errors import first_line, text_of
from ...registry.store.record import (
    PROVIDER,
    YARDSTICK,
    Case,
    Measurement,
    Scalar,
    Status,
)
from ..catalog import Catalog
from ..definition import Definition
from ..implementation import Implementation
from ..measure.device import Device, opened
from ..measure.group import ALONE
from ..measure.pristine import Pristine
from ..measure.ranks import Follower, Lost, Place, Ranks, join
from ..measure.session import Session
from ..measure.stacks import tell_when_ended
from ..measure.stages import Stages, Trial
from ..measure.verify import Incorrect, Unavailable
from ..measure.workbench import Workbench, seed_of
from ..operator import Operator
from ..workload import Workload
from . import own_code
from .messages import RANKS, CeilingDone, Done, Facts, Message, Result, Stage, Task, TaskCell

STARTER = "KERNELMARK_STARTER"
"""The environment variable with the process id of who started a worker."""
BROKEN_CONTEXT = 70
"""Exit code after an error that no further work in the process survives (EX_SOFTWARE of sysexits)."""
OTHER_RANKS = 75
"""Exit code where the next case takes other ranks than this process has: another goes on (EX_TEMPFAIL)."""
HELD = 1 << 30
"""Bytes of a device that may stay taken after a program: not every compiled one can be forgotten. With more, the
next case is left to another process, which has all of the memory, and so is a program that had no room beside it.
"""


class Crowded(Exception):
    """A program had no memory beside what one before it left: it is tried in the next process, beside nothing."""


def catalog_of(roots: Iterable[str], code: Mapping[str, str] | None = None) -> Catalog:
    """The catalog that a task names."""
    folders = tuple(roots)
    catalog = Catalog.of(*(Path(x) for x in folders)) if folders else Catalog.default()
    return catalog.with_code(code) if code else catalog


def work(
    task: Task,
    send: Callable[[Message], None],
    device: Device,
    facts: dict[str, Scalar],
    catalog: Catalog | None = None,
) -> None:
    """Walks the cells of a task in their order, as far as one process should: it says when it is done, and who
    asked sees what is left. Raises only what makes the process unusable.

    `catalog` takes the place of the one that the task's roots name.
    """
    from .fingerprint import python_facts

    catalog = catalog or catalog_of(task.roots, task.code)
    if task.systems:
        catalog = catalog.with_systems(task.systems)
    worlds = _Worlds(task, device, send)
    send = worlds.send
    stages = Stages(listen=lambda name: send(Stage(name)))
    send(Facts(facts, python_facts()))
    with device.using(), worlds:
        pristine = Pristine()  # in here: the stream that all work runs on is part of what is put back
        if task.ceilings:
            from ..measure import limits

            with stages.stage("ceilings"):
                for ceiling in limits.measure(device, task.replicate):
                    send(CeilingDone(ceiling))
        for (name, _), group in groupby(task.cells, key=lambda x: (x.case.operator, x.case.name)):
            cells = list(group)
            programs, crowded = isinstance(catalog.definition(name), Workload), False
            while cells:  # again for those behind one that ended its ranks
                try:
                    own = worlds.enter(cells, ranks_of(catalog.definition(name), cells[0].case), pristine)
                except Exception as error:  # ranks that cannot be started are the end of their case
                    status, reason = _judged(error)
                    for cell in cells:
                        send(Result(cell.index, status, f"starting its ranks: {reason}", None, {}))
                    break
                try:
                    for result in _measured(task, cells, catalog, device, stages, send, own):
                        send(result)
                        cells = cells[1:]
                except Crowded:
                    crowded = True
                    break
            if crowded or (programs and device.held() > HELD):
                break
    send(Done(stages.spent_s))


def ranks_of(definition: Definition, case: Case) -> int:
    """How many ranks a case is measured over; 0: none, by the worker without a group.

    An operator over ranks calls its group also where that is one rank; a program does as told.
    """
    over_ranks = definition.distributed and isinstance(definition, Operator)
    return case.world if case.world > 1 or over_ranks else 0


def _measured(
    task: Task,
    cells: list[TaskCell],
    catalog: Catalog,
    device: Device,
    stages: Stages,
    send: Callable[[Message], None],
    pristine: Pristine,
) -> Iterator[Result]:
    """The cells of one case in their order, as every rank of it walks through them; of several ranks up to the
    first that fails.
    """
    program = isinstance(catalog.definition(cells[0].case.operator), Workload)
    yield from (_program if program else _case)(task, cells, catalog, device, stages, send, pristine)


class _Worlds:
    """The ranks of the case under way: started for a case and kept for the next of the same world.

    A process has ranks once (`Ranks`). What takes others, or none, is left to the next process, and so is what
    comes behind a cell whose ranks ended: what one rank left undone would go on into it.

    Everything that is sent goes through `send`, so that what ends the process has the last word.
    """

    def __init__(self, task: Task, device: Device, send: Callable[[Message], None]) -> None:
        self._task = task
        self._device = device
        self._send = send
        self._lock = threading.Lock()
        self._stage: Stage | None = None
        self._next: int | None = None
        self._ranks: Ranks | None = None
        self._begun = False
        self._kept = True
        self._pristine: Pristine | None = None

    def send(self, message: Message) -> None:
        """Sends, and remembers which cell is in which stage."""
        with self._lock:
            if isinstance(message, Stage):
                if self._ranks is not None and (self._stage is None or self._stage.index != message.index):
                    self._ranks.allow(own_deadline_s(self._task.deadline_s))
                self._stage = message
            elif isinstance(message, Result):
                self._stage = None
                self._kept = self._kept and not _ends_ranks(message, self._device)
            self._send(message)

    def enter(self, cells: list[TaskCell], ranks: int, alone: Pristine) -> Pristine:
        """Gathers the ranks that a case needs (`ranks_of`) and tells them of its cells. Gives what the process
        then was: `alone` for a case without ranks. Ends the process where it had others, or could not start them.
        """
        if self._begun and (self._ranks is None or self._ranks.world != ranks or not self._kept):
            self.close()
            os._exit(OTHER_RANKS)
        if not ranks:
            return alone
        if self._ranks is None:
            self.send(Stage(RANKS))
            self._next = cells[0].index
            self._begun = True
            command = [sys.executable, "-m", f"{__package__}.worker", "rank"]
            task = msgspec.structs.replace(self._task, token="", ceilings=False)
            device = self._device.torch_device
            self._ranks = Ranks(ranks, device, command, msgspec.json.encode(task), self._lost)
            self._device.group = self._ranks.group
            self._pristine = Pristine()
            self._next = None
        assert self._pristine is not None
        self._ranks.allow(own_deadline_s(self._task.deadline_s))
        self._ranks.tell([x.index for x in cells])
        return self._pristine

    def _lost(self, error: Exception) -> None:
        """A rank is lost, and whoever waits for it in a call: the process ends, with what is known."""
        self._lock.acquire()  # for good: nobody else says anything any more
        stage = self._stage
        index = self._next if self._next is not None else stage.index if stage is not None else None
        if stage is not None and index is not None:
            status, reason = _judged(error)
            self._send(Result(index, status, f"{stage.name}: {reason}", None, {}))
        os._exit(BROKEN_CONTEXT)

    def close(self) -> None:
        """Ends the ranks. What was found before is known by then: they may not end in order."""
        if self._ranks is not None:
            self.send(Stage(RANKS))
            self._ranks.close()

    def __enter__(self) -> _Worlds:
        return self

    def __exit__(self, *exception: object) -> None:
        self._device.group = ALONE
        self.close()


def _ends_ranks(result: Result, device: Device) -> bool:
    """Whether the ranks that a cell was measured over end with it: unless it was never called, as all of them know
    when they have built it together.
    """
    never_called = result.status in ("unsupported", "unavailable") and result.spent_s.keys() <= {
        "prepare",
        "build",
    }
    return device.group.size > 1 and result.status != "ok" and not never_called


def own_deadline_s(seconds: float) -> float:
    """What ranks have of a cell's deadline: less than all, so that it is said which one is late."""
    return max(0.8 * seconds, seconds - 10.0)


def _case(
    task: Task,
    cells: list[TaskCell],
    catalog: Catalog,
    device: Device,
    shared: Stages,
    send: Callable[[Message], None],
    pristine: Pristine,
) -> Iterator[Result]:
    """All cells of one case, on one workbench."""
    case = cells[0].case
    operator = catalog.definition(case.operator)
    assert isinstance(operator, Operator)
    send(Stage("build", cells[0].index))
    try:
        with shared.stage("build"), device.group.together():
            seed = seed_of(case, task.seed, task.replicate)
            bench = Workbench.build(
                operator, case, device.torch_device, seed, device.group, device.fp64, answered=not task.compiles
            )
    except Exception as error:  # whatever an operator raises is the end of its case, not of the run
        status, reason = _judged(error)
        for cell in cells:
            yield Result(cell.index, status, f"building the inputs: {reason}", None, {})
        _leave_if_broken(device, error)
        return
    for cell in cells:
        implementation = next(x for x in catalog.of_operator(case.operator) if x.name == cell.implementation)
        if task.compiles:
            result = _compiled(cell, implementation, bench, device, send, pristine)
        else:
            result = _cell(task, cell, implementation, bench, device, send, pristine)
        yield result
        if _ends_ranks(result, device):
            break
    del bench
    device.release()
    _forget_compiled()


def _program(
    task: Task,
    cells: list[TaskCell],
    catalog: Catalog,
    device: Device,
    shared: Stages,
    send: Callable[[Message], None],
    pristine: Pristine,
) -> Iterator[Result]:
    """All systems of one case of a workload, held against one preparation."""
    case = cells[0].case
    workload = catalog.workloads[case.operator]
    seed = seed_of(case, task.seed, task.replicate)

    def session(cell: TaskCell) -> Session:
        listen = Stages(listen=lambda name: send(Stage(name, cell.index)))
        kept = Path(task.scratch) if task.scratch else None
        until = time.monotonic() + task.deadline_s
        return Session(device, seed, task.replicate, task.sampling, listen, kept, until)

    first = session(cells[0])
    try:
        with first.stage("prepare"):
            prepared = workload.prepare(workload.whole(case), first)
    except Exception as error:  # as for an operator's inputs
        status, reason = _judged(error)
        for cell in cells:  # it was tried once, for all
            spent = first.stages.spent_s if cell is cells[0] else {}
            yield Result(cell.index, status, f"preparing the check: {reason}", None, spent)
        _leave_if_broken(device, error)
        return
    prepared_bytes = device.held()
    for cell in cells:
        implementation = next(x for x in catalog.of_operator(case.operator) if x.name == cell.implementation)
        given = first if cell is cells[0] else session(cell)
        crowded = cell is not cells[0] and device.held() - prepared_bytes > HELD
        try:
            with given.stage("build"):
                systems = [implementation.load()(case)]
            measurement = workload.measure(case, systems.pop(), given, prepared)
        except Exception as error:  # a system's failure is a status with a reason
            status, reason = _judged(error)
            result = Result(cell.index, status, f"{given.stages.current}: {reason}", None, given.stages.spent_s)
            del error
        else:
            result = Result(cell.index, "ok", None, measurement, given.stages.spent_s)
        _forget_compiled()
        pristine.settle()  # a program seeds and switches as it needs; the next one finds nothing of it
        gc.collect()  # a program refers to itself; its weights would lie beside the next one's
        try:
            device.release()
            device.synchronize()
        except Exception as error:
            send(result)
            _leave_if_broken(device, error)
            raise
        if crowded and result.status == "out_of_memory" and device.group.size == 1:
            raise Crowded
        yield result
        if _ends_ranks(result, device):
            break


def _compiled(
    cell: TaskCell,
    implementation: Implementation,
    bench: Workbench,
    device: Device,
    send: Callable[[Message], None],
    pristine: Pristine,
) -> Result:
    """A cell that is called once for what compilers leave on disk: nobody looks at its answer."""
    stages = Stages(listen=lambda name: send(Stage(name, cell.index)))

    def called() -> None:
        try:
            with stages.stage("build"):
                call = bench.call(implementation.load()(cell.case))
            with stages.stage("compile"):
                call()
                device.synchronize()
        finally:
            pristine.settle()

    pristine.begin()
    return _tried(cell, called, stages, bench, device, send)


def _cell(
    task: Task,
    cell: TaskCell,
    implementation: Implementation,
    bench: Workbench,
    device: Device,
    send: Callable[[Message], None],
    pristine: Pristine,
) -> Result:
    stages = Stages(listen=lambda name: send(Stage(name, cell.index)))
    trial = Trial(
        device,
        bench,
        cell.cache,
        task.sampling,
        stages,
        gated=implementation.provider != YARDSTICK,
        tuned=implementation.provider == PROVIDER,
        pinned=cell.pinned,
        with_energy=task.sampling.energy == "every" or (task.sampling.energy == "first" and task.replicate == 0),
        with_code=task.code_told,
        pristine=pristine,
    )
    return _tried(cell, lambda: trial.run(lambda: implementation.load()(cell.case)), stages, bench, device, send)


def _tried(
    cell: TaskCell,
    attempt: Callable[[], Measurement | None],
    stages: Stages,
    bench: Workbench,
    device: Device,
    send: Callable[[Message], None],
) -> Result:
    """How a cell ends; after a failure the inputs are as they were."""
    try:
        return Result(cell.index, "ok", None, attempt(), stages.spent_s)
    except Exception as error:  # an implementation's failure is a status with a reason
        status, reason = _judged(error)
        result = Result(cell.index, status, f"{stages.current}: {reason}", None, stages.spent_s)
        del error
    _restore(bench, device, result, send)
    return result


def _judged(error: BaseException) -> tuple[Status, str]:
    """The status that an exception means, and the first line of what it says."""
    import torch

    text = first_line(error)[:300]
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, Lost):
        return ("timeout" if error.late else "crashed"), text
    if isinstance(error, Incorrect):
        return "incorrect", text
    if isinstance(error, Unavailable):
        return "unavailable", text
    if isinstance(error, NotImplementedError):
        return "unsupported", text or "not implemented"
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text_of(error):
        return "out_of_memory", text or "out of memory"
    if isinstance(error, ImportError):
        return "unavailable", named
    return "error", named


def _restore(bench: Workbench, device: Device, result: Result, send: Callable[[Message], None]) -> None:
    """Puts the inputs back after a failure; where even that fails the context is broken."""
    try:
        device.synchronize()
        bench.restore()
        device.release()
        device.synchronize()
    except Exception as error:
        send(result)
        _leave_if_broken(device, error)
        raise


def _leave_if_broken(device: Device, error: BaseException) -> None:
    """Ends the process if the device no longer answers: a CUDA error sticks to its context."""
    try:
        device.synchronize()
    except Exception:
        os._exit(BROKEN_CONTEXT)


def _forget_compiled() -> None:
    """Compiled graphs hold on to memory and count against the recompilation limit.

    From Python 3.12 on `inspect` remembers classes that torch.compile asked it of. A model's class is made for its
    system and holds its parts, which in an engine hold the weights.
    """
    if (classes := getattr(inspect, "_shadowed_dict_from_mro_tuple", None)) is not None:
        classes.cache_clear()
    torch = sys.modules.get("torch")
    if torch is not None and "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _without_choices() -> None:
    """Has the compilers here leave on disk what they compile, and nothing that they choose by timing."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.codecache import CacheBase

    torch._inductor.config.fx_graph_cache = False  # a graph has the choices that were made for it in it
    torch._functorch.config.enable_autograd_cache = False  # the same
    torch._inductor.config.autotune_local_cache = False
    # With that it reads no choice of tiles, and writes it all the same.
    setattr(CacheBase, "update_local_cache", lambda self, choices: None)  # noqa: B010  # of other parameters
    with contextlib.suppress(ImportError):
        from triton.runtime.autotuner import Autotuner

        # Kernels may ask for it whatever Triton's switch says, as flash-linear-attention's do.
        Autotuner.cache_results = property(lambda self: False, lambda self, asked: None)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a worker, or of what forks workers, that this process starts."""
    own = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", STARTER: str(os.getpid())}
    return {**os.environ, **(more or {}), **own}


def die_with_parent() -> None:
    """From now on Linux ends us when whoever started us is gone, however it went.

    A child of process 1 has lost its parent, unless that is who started it: the program may be all of a container.
    """
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1 and os.environ.get(STARTER) != "1":
        sys.exit("the parent is gone")


def main(pipe: int) -> None:
    """Reads a task from standard input and works on it; messages go to the file descriptor `pipe`."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the supervisor, which ends us in order
    tell_when_ended()  # asked to end before we are done, which is when we are late
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    if reason := own_code.other(task.harness):
        sys.exit(reason)
    send = _sender(os.fdopen(pipe, "wb"), task.token.encode())
    task = msgspec.structs.replace(task, token="")
    send(Stage("start"))
    import torch
    import torch._functorch.config

    from .fingerprint import torch_facts

    # The backward pass is timed by repeating it on one graph, which compiled code only allows without this.
    torch._functorch.config.donated_buffer = False
    if task.compiles:
        _without_choices()
    device = opened(task.device)
    facts = torch_facts(task.device, task.world)
    work(task, send, device, facts)


def follow(arguments: Sequence[str]) -> None:
    """A rank that is not the first: does in step what rank 0 does, cell by cell, and says nothing."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place = Place.of(arguments)
    watcher = Follower(place)
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    catalog = catalog_of(task.roots, task.code).with_systems(task.systems)
    import torch
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False
    if task.device == "cuda":
        torch.cuda.set_device(place.rank)
    device = opened(task.device)
    cells = {x.index: x for x in task.cells}
    with device.using():
        device.group = join(place.rank, place.world, place.port, device.torch_device, watcher)
        pristine = Pristine()
        for indices in watcher.orders():
            mine = [cells[x] for x in indices]
            for _ in _measured(task, mine, catalog, device, Stages(), lambda message: None, pristine):
                """What it found is in what rank 0 says."""


def _sender(out: BinaryIO, token: bytes) -> Callable[[Message], None]:
    encode = msgspec.json.Encoder().encode

    def send(message: Message) -> None:
        out.write(token + encode(message) + b"\n")
        out.flush()

    return send


def end() -> None:
    """Ends the process without taking apart what is loaded: with torch that is a third of a second."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        follow(sys.argv[2:])
    else:
        main(int(sys.argv[1]))
    end()
