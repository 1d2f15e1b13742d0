"""Does the harness catch what goes wrong among ranks? Planted faults of the last of several, run like any case."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ...registry.analysis.rows import Row, rows
from ...registry.progress import Tell, untold
from ...registry.store.home import Home
from ...registry.store.journal import Journal, read
from ...registry.store.record import DeviceKind
from ..catalog import Catalog, Root
from ..measure.stopping import Sampling
from ..plan import Cell, Plan
from ..run.listener import Listener
from ..run.progress import Shared
from ..run.supervisor import Run, new_run
from .examination import FAULTS_COST, Check, Extent, share_slower
from .planted_ranks.operators.shared_chain import SIZES

PLANTED = Path(__file__).resolve().parent / "planted_ranks"
DEADLINE_S = 60.0
FAULTY_S = 20.0
"""The deadline of the faults, one of which never comes back; starting ranks is not in it."""
STRAGGLER = "a rank 5 % slower"
ENDS: Mapping[str, tuple[str, str]] = {
    "skipped_chunk": ("a rank skips its last chunk", "incorrect"),
    "stale_flag": ("a rank reads before its peers wrote", "incorrect"),
    "hang": ("a rank never comes", "timeout"),
    "kill": ("a rank is killed", "crashed"),
}


def planted(device: DeviceKind, home: Home, world: int, extent: Extent, tell: Tell = untold) -> Iterator[Check]:
    """Runs the faults over so many ranks and says of each whether the harness caught it; tells as theirs."""
    begin = time.monotonic()
    tell("starting ranks", 0.0)
    catalog = Catalog((Root(PLANTED, f"{__package__}.planted_ranks"),))
    operator = catalog.operator("shared_chain")
    N = SIZES[device] // world * world
    case = operator.case({"N": N, "gpus": world}, "fp32", "forward")
    sampling = Sampling(
        min_samples=10, max_samples=200, min_seconds=0.1, max_seconds=0.4, warmup_s=0.1, energy="never"
    )
    plan = Plan("doctor", (case,), extent.most, ("cold",), sampling, DEADLINE_S)
    cells = plan.cells(catalog, device)
    timed = tuple(x for x in cells if x.implementation.name not in ENDS)
    faults = tuple(x for x in cells if x.implementation.name in ENDS)

    def run_of(plan: Plan, cells: tuple[Cell, ...], listener: Listener) -> Run:
        return Run(
            plan,
            cells,
            catalog,
            device,
            home,
            seed=0,
            name=new_run(),
            roots=(str(PLANTED),),
            ceilings=False,
            listener=listener,
        )

    first = FAULTS_COST / (FAULTS_COST + extent.least)
    once_plan = replace(plan, replicates=1, deadline_s=FAULTY_S)
    once = read(run_of(once_plan, faults, Shared(tell, len(faults), first / 2, first)).execute())
    run = run_of(plan, timed, Shared(tell, extent.least * len(timed), first))
    with run.session():
        for replicate in range(extent.most):
            if replicate >= min(2, extent.least) and time.monotonic() - begin > extent.seconds:
                break
            if replicate >= extent.least and straggler(read(run.path)).verdict != "unsure":
                break
            run.replicate(replicate, timed)
    journal = read(run.path)
    yield from judge(replace(journal, records=(*journal.records, *once.records)), world)


def straggler(journal: Journal) -> Check:
    """Whether a sample is the slowest rank's."""
    return share_slower(journal, STRAGGLER, "straggler")


def judge(journal: Journal, world: int) -> Iterator[Check]:
    """What a journal of planted faults shows. A rank that ended must be named."""
    yield straggler(journal)
    by_name: Mapping[str, Row] = {x.implementation: x for x in rows(journal)}
    for name, (what, status) in ENDS.items():
        row = by_name.get(name)
        seen = "no row" if row is None else f"{row.status}: {row.reason}"
        named = f"rank {world - 1} of {world}" in seen
        yield Check(what, "caught" if row is not None and row.status == status and named else "missed", seen)
