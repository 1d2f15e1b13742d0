"""Operators' times over commits, from the runs that a home keeps and the checkout here."""

from __future__ import annotations

from dataclasses import replace

from ...registry.analysis.selection import Selection
from ...registry.detection.history import RUNS, OperatorHistory, measured_in, over_commits, runs_by_operator
from ...registry.errors import KernelmarkError
from ...registry.store.home import Home
from ...registry.store.index import Index
from ..catalog import Catalog
from .revisions import commit_times


class NoHistory(KernelmarkError):
    """Nothing is stored of what was asked for."""

    exit_code = 4


def stored_histories(home: Home, selection: Selection, device: str | None) -> list[OperatorHistory]:
    """Of the operators that are asked for, each with the rows that are. Raises `NoHistory` where there is none."""
    index = Index(home)
    found = runs_by_operator((x, index.processes(x)) for x in index.runs(device=device, limit=RUNS))
    asked = [x for x in found if x in (selection.operators or found)]
    if not asked:
        for name in selection.operators:
            Catalog.default().definition(name)  # a name that does not exist is another mistake
        of = f" of {', '.join(selection.operators)}" if selection.operators else ""
        raise NoHistory(
            f"no run of a clean commit in {home.folder} has a time{of}: commit the checkout, then "
            "`kernelmark run`. `kernelmark runs` lists what is there."
        )
    commits = {str(entry.commit) for name in asked for entry, _ in found[name][0]}
    times = commit_times(commits)
    histories = [
        measured_in(over_commits(found[name][0], name, times, found[name][1]), found[name][0][-1][0].path)
        for name in asked
    ]
    kept = set(selection.keys({x.key: x.provider for history in histories for x in history.series}))
    narrowed = [replace(x, series=tuple(y for y in x.series if y.key in kept)) for x in histories]
    return [x for x in narrowed if x.series]
