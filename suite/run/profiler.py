"""Runs one row's work under PyTorch's profiler, in a process of its own: a task on standard input, files left.

Nothing that is measured here is recorded: a profiler takes time of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from ...registry.errors import first_line
from ...registry.store.record import Case, DeviceKind
from ..catalog import Catalog
from ..measure.device import Device, opened
from ..measure.session import Session
from ..measure.stages import Stages
from ..measure.stopping import Sampling
from ..measure.workbench import Workbench, seed_of
from ..system import System
from ..workload import Workload
from .profile import STEP

WARMUP = 3
NO_STEP = 3
"""How the process ends where a row has no step, or not one that can be profiled."""
SNAPSHOT_EVENTS = 100_000


class ProfileTask(msgspec.Struct, frozen=True):
    """What is profiled, and the folder for the files. `traced` is off where another tool looks on."""

    device: DeviceKind
    case: Case
    implementation: str
    systems: tuple[System, ...]
    seed: int
    steps: int
    folder: str
    traced: bool = True


def work(task: ProfileTask) -> None:
    """Builds the row, warms it up, and runs its steps; leaves a trace, on a GPU a snapshot of the allocator."""
    device = opened(task.device)
    catalog = Catalog.default().with_systems(task.systems)
    with device.using():
        step = _step(task, catalog, device)
        for _ in range(WARMUP):
            step()
        device.synchronize()
        if task.traced:
            _traced(task, step, device)
        else:
            with _range(task.device):
                for _ in range(task.steps):
                    step()
                device.synchronize()


def _range(device: DeviceKind) -> AbstractContextManager[None]:
    """What a tool that looks on, and was told to wait for it, sees."""
    import torch

    return torch.cuda.profiler.profile() if device == "cuda" else nullcontext()


def _step(task: ProfileTask, catalog: Catalog, device: Device) -> Callable[[], Any]:
    """What one step of the row is. Raises NotImplementedError for a workload that has none."""
    case = task.case
    found = {x.name: x for x in catalog.of_operator(case.operator)}
    load = found[task.implementation].load()
    definition = catalog.definition(case.operator)
    seed = seed_of(case, task.seed, 0)
    if isinstance(definition, Workload):
        if definition.step is None or case.world > 1:
            raise NotImplementedError(f"{case.operator} has no step that could be profiled alone")
        return definition.step(case, load(case), Session(device, seed, 0, Sampling(), Stages()))
    operator = catalog.operator(case.operator)
    if operator.distributed:
        raise NotImplementedError("an operator over ranks is not profiled: it needs its other ranks")
    return Workbench.build(operator, case, device.torch_device, seed).call(load(case))


def _traced(task: ProfileTask, step: Callable[[], Any], device: Device) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    folder = Path(task.folder)
    cuda = task.device == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as seen:
        for _ in range(task.steps):
            with record_function(STEP):
                step()
        device.synchronize()
    seen.export_chrome_trace(str(folder / "trace.json"))
    if cuda:
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
        step()
        device.synchronize()
        torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)


def main() -> None:
    """The process: says why it could not in one line, and ends with 1, or with `NO_STEP` where there is none."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=ProfileTask)
    try:
        work(task)
    except NotImplementedError as error:
        print(first_line(error), file=sys.stderr)
        sys.exit(NO_STEP)
    except Exception as error:  # whatever an implementation raises: somebody else's code
        first = first_line(error)
        sys.exit(f"{type(error).__name__}: {first}")


if __name__ == "__main__":
    main()
