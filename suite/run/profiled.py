"""A recorded row, run again under profilers in processes of their own."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...registry.errors import InputError, KernelmarkError, last_line, unknown
from ...registry.store.journal import Journal
from ..catalog import Catalog
from ..environments import interpreter
from ..plan import Cell, Plan
from .profile import Light, Profile, names, speed_of_light, summarized
from .profiler import NO_STEP, ProfileTask

DEADLINE_S = 900.0
SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats")
NCU = (
    "ncu", "--clock-control", "none", "--target-processes", "all", "--profile-from-start", "off", "--csv",
    *(x for name in SECTIONS for x in ("--section", name)),
)  # fmt: skip
"""Of the step alone, which the process says by the CUDA profiler's range: a row's inputs and its reference run
kernels, too, and each that is profiled is run several times."""
NCU_STEPS = 1


class NotProfiled(KernelmarkError):
    """The row could not be run here."""

    exit_code = 2


def row_of(journal: Journal, text: str, catalog: Catalog) -> Cell:
    """The cell of a run that `[OPERATOR/]CASE/IMPLEMENTATION` names. Raises `InputError` for none or many."""
    plan = Plan.of(journal.header)
    if plan is None:
        raise InputError(f"run {journal.header.run} does not say what it measured.")
    if not any(x.operator in catalog.definitions for x in plan.cases):
        catalog.definition(plan.cases[0].operator)  # which says what is missing here
    measured = {x.identity for x in journal.records}
    here = plan.cells(catalog.with_systems(plan.systems), journal.header.device)
    cells = {named(x): x for x in here if x.identity in measured or not measured}
    found = [name for name in cells if name == text or name.endswith(f"/{text}")]
    if len(found) != 1:
        if found:
            raise InputError(f"{text!r} names {len(found)} rows: {', '.join(found)}.")
        near = [name for name in cells if text in name]
        raise unknown("row", text, near or list(cells))
    return cells[found[0]]


def named(cell: Cell) -> str:
    """The row's name, as `row_of` takes it."""
    return f"{cell.case.full_name}/{cell.implementation.name}"


def profile(cell: Cell, journal: Journal, catalog: Catalog, folder: Path, steps: int) -> Profile:
    """One row's profile; the trace, and on a GPU a snapshot of the allocator, stay in the folder.

    Raises `NotProfiled` where the row cannot run.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _run([], _task(cell, journal, folder, steps), cell)
    except NotProfiled:
        if made:
            with contextlib.suppress(OSError):  # what is in it stays
                folder.rmdir()
        raise
    path = folder / "trace.json"
    trace = msgspec.json.decode(path.read_bytes())
    with gzip.open(folder / "trace.json.gz", "wb") as out:
        out.write(path.read_bytes())
    path.unlink()
    ours = names(x.home("kernels") / "kernels" for x in catalog.roots)
    return summarized(trace, steps, ours, journal.header.device)


def lights(cell: Cell, journal: Journal, folder: Path) -> tuple[Light, ...]:
    """What Nsight Compute says of the row's kernels. Raises `NotProfiled` where it does not answer."""
    if shutil.which(NCU[0]) is None:
        raise NotProfiled("ncu is not on the PATH: install Nsight Compute.")
    task = msgspec.structs.replace(_task(cell, journal, folder, NCU_STEPS), traced=False)
    said = _run(NCU, task, cell)
    (folder / "ncu.csv").write_text(said)
    found = speed_of_light(said)
    if not found:
        last = last_line(said, "nothing")
        raise NotProfiled(f"ncu gave no measurements; it said: {last}")
    return found


def _task(cell: Cell, journal: Journal, folder: Path, steps: int) -> ProfileTask:
    header = journal.header
    plan = Plan.of(header)
    return ProfileTask(
        header.device,
        cell.case,
        cell.implementation.name,
        plan.systems if plan is not None else (),
        header.seed,
        steps,
        str(folder.resolve()),
    )


def _run(before: Sequence[str], task: ProfileTask, cell: Cell) -> str:
    """A profiled process to its end, in the row's environment; what it printed."""
    python = interpreter(cell.implementation.environment)
    assert python is not None, "the caller asked whether the row can run"
    try:
        done = subprocess.run(
            [*before, str(python), "-m", f"{__package__}.profiler"],
            input=msgspec.json.encode(task),
            capture_output=True,
            timeout=DEADLINE_S,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
    except subprocess.TimeoutExpired:
        raise NotProfiled(f"it was not done after {DEADLINE_S:g} s.") from None
    if done.returncode:
        last = last_line(done.stderr.decode(errors="replace"))
        if done.returncode == NO_STEP:
            raise NotProfiled(f"{named(cell)} cannot be profiled: {last}")
        raise NotProfiled(f"the row cannot be run here: {last}")
    return done.stdout.decode(errors="replace")
