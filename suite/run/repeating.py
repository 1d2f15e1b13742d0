"""A published run measured again: some of its rows, drawn by a seed that its publisher did not choose."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

from ...registry.errors import InputError
from ...registry.store.home import Home
from ...registry.store.journal import Journal, read
from ...registry.store.record import Key, Request
from ..catalog import Catalog
from ..plan import Cell, Plan
from .listener import Listener, Silent
from .supervisor import NotResumable, OutOfBudget, Run


@dataclass(frozen=True)
class Draw:
    """What is measured again: cells that can run here, of the rows that the publisher says are right."""

    plan: Plan
    cells: tuple[Cell, ...]
    of: int
    """How many rows there were to draw from."""


def draw(published: Journal, catalog: Catalog, sample: int, seed: int) -> Draw:
    """Rows at random, of those that ended well there and can run here.

    Raises `InputError` where the run does not say what it measured, or nothing of it can run here, `NotResumable`
    where an operator computes something else by now.
    """
    header = published.header
    plan = Plan.of(header)
    if plan is None:
        raise InputError(f"run {header.run} does not say what it measured; it cannot be measured again.")
    ended: dict[Key, set[str]] = {}
    for record in published.records:
        ended.setdefault(record.identity, set()).add(record.status)
    cells = [
        x
        for x in plan.cells(catalog, header.device, header.request.implementations)
        if ended.get(x.identity) == {"ok"} and x.implementation.unavailable(header.device) is None
    ]
    if not cells:
        raise InputError(
            f"no row of run {header.run} can be measured here: what it measured is on {header.device}, and its "
            "implementations are not installed, or not for this device."
        )
    chosen = random.Random(seed).sample(cells, min(sample, len(cells)))
    for x in chosen:
        if catalog.definition(x.case.operator).spec(x.case) != x.case.spec:
            raise NotResumable(
                f"operator {x.case.operator} was changed since run {header.run}; verify it at its commit, "
                f"{header.commit}."
            )
    return Draw(replace(plan, name=f"verify {header.run}"), tuple(chosen), len(cells))


def measure(
    published: Journal,
    drawn: Draw,
    catalog: Catalog,
    home: Home,
    seed: int,
    budget_s: float,
    listener: Listener | None = None,
) -> Journal:
    """Measures what was drawn while time lasts; its journal names the run that it verifies.

    Cells are taken replicate by replicate, so that a budget that ends leaves fewer processes and not fewer rows.
    Raises `OutOfBudget` where it ends before anything was measured.
    """
    run = Run(
        drawn.plan,
        drawn.cells,
        catalog,
        published.header.device,
        home,
        seed,
        request=Request(verifies=published.header.run),
        ceilings=False,
        until=time.monotonic() + budget_s,
        keeps_cells=True,
        listener=listener or Silent(),
    )
    try:
        return read(run.execute())
    except OutOfBudget:
        said = f"nothing could be measured within {budget_s:g} s; give it more with --budget."
        raise OutOfBudget(said) from None
