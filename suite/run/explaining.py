"""What differs in the steps of a run on kernels' worth: its rows profiled once more, after they were measured.

A profiler slows what it sees, and what comes after it in its process: no measured process ever has one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from ...registry.analysis.worth import unexplained
from ...registry.store.journal import Writer, read
from ..catalog import Catalog
from ..plan import Plan
from .profile import launches
from .profiled import NotProfiled, profile

STEPS = 2
"""Counts are the same in each; two show that they are."""


def explain(path: Path, catalog: Catalog, say: Callable[[str], None]) -> None:
    """Appends to a run's journal what the steps launch of which more or less was measured than expected.

    A row that cannot be profiled is named and left out.
    """
    journal = read(path)
    plan = Plan.of(journal.header)
    wanted = unexplained(journal)
    if plan is None or not wanted:
        return
    cells = {
        (x.case.operator, x.case.name, x.implementation.name): x
        for x in plan.cells(catalog, journal.header.device)
    }
    with Writer(path) as writer, tempfile.TemporaryDirectory() as folder:
        for row in wanted:
            cell = cells[row]
            if (missing := cell.implementation.unavailable(journal.header.device)) is not None:
                say(f"{row[2]} is not explained: {missing[1]}")
                continue
            say(f"profiling {row[2]}")
            try:
                found = profile(cell, journal, catalog, Path(folder), STEPS)
            except NotProfiled as error:
                say(f"{row[2]} is not explained: {error}")
                continue
            writer.write(launches(found, cell.case, cell.implementation.name))
