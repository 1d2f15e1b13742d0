"""The runs of a home as people know them: listed with what they are called, named, tagged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ..errors import InputError
from . import labels
from .home import LATEST, Home, asked_for
from .journal import read_header
from .labels import Label
from .record import Header
from .transfer import checked_run, checked_tag


class Listed(msgspec.Struct, frozen=True):
    """A run in a list. Of one whose journal cannot be read only its names are known."""

    run: str
    name: str | None
    created: str | None
    plan: str | None
    device: str | None
    commit: str | None
    dirty: bool | None
    replicates: int | None
    cases: int | None
    side_of: str | None
    """The run, arm or stage of a comparison that it is a side of."""
    tags: tuple[str, ...]
    note: str | None


def listed(home: Home, sides: bool = False, tags: Sequence[str] = ()) -> Iterator[Listed]:
    """The runs with all of these tags, newest first; with `sides`, those too that only a comparison asked for."""
    known = labels.read(home.folder)
    for run, path in reversed(home.paths().items()):
        label = known.get(run, labels.NOTHING)
        header = read_header(path)
        if set(tags) <= set(label.tags) and (sides or header is None or asked_for(header)):
            yield _listed(run, label, header)


def own(home: Home, run: str) -> str:
    """The name of a run of this home. Raises `InputError` for a journal elsewhere."""
    path = home.find(run)
    found = next((name for name, x in home.paths().items() if x == path), None)
    if found is None:
        raise InputError(f"{path} is no run of {home.folder}; name a run that `kernelmark runs` lists.")
    return found


def rename(home: Home, run: str, name: str | None) -> Label:
    """Gives a run a name by which it is found from then on, or takes it away. Raises `InputError` for one that
    could mean another run.
    """
    if name is not None:
        checked_run(name)
        taken = home.names().get(name)
        if name == LATEST or taken not in (None, run) or any(x.startswith(name) for x in home.paths()):
            raise InputError(
                f"{name!r} is taken; take a name that is no run's, no beginning of one and not `latest`."
            )
    return labels.change(home.folder, run, name=name)


def tag(home: Home, run: str, tags: Sequence[str], remove: bool = False) -> Label:
    """Adds tags to a run, or takes them away."""
    for x in tags:
        checked_tag(x)
    before = labels.read(home.folder).get(run, labels.NOTHING).tags
    after = [x for x in before if x not in tags] + ([] if remove else list(tags))
    return labels.change(home.folder, run, tags=tuple(after))


def _listed(run: str, label: Label, header: Header | None) -> Listed:
    if header is None:
        return Listed(run, label.name, *(None,) * 8, label.tags, label.note)
    asked = header.request
    return Listed(
        run=run,
        name=label.name,
        created=header.created,
        plan=header.plan,
        device=header.device,
        commit=header.commit,
        dirty=header.dirty,
        replicates=header.replicates,
        cases=len(asked.cases) or None,
        side_of=asked.partner or asked.arm or (f"stage {asked.stage}" if asked.stage else None),
        tags=label.tags,
        note=label.note or asked.note,
    )
