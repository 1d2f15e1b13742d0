"""Shards of a run joined into one journal. Each shard's own journal stays as it is, in the home's `shards/`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

import msgspec

from ..errors import InputError, short
from .home import Home
from .journal import Journal, encode, read, read_header
from .metric import Metric
from .record import BOARDS, HOST, UNKNOWN, Case, Ceiling, Footer, Header, Line, Record, Request

_SAME = ("schema_version", "commit", "dirty", "plan", "seed", "replicates", "device", "key", "harness")
"""Of the header: what all shards of a run have in common."""
_ASKED = ("caches", "sampling", "deadline_s", "systems", "exchanges")
"""Of the request: the same. What else it says is of a shard's own cases."""
FEW = 8
"""So many shards are named in a sentence; more are counted."""


def path_of(home: Home, run: str, shard: tuple[int, int] | None) -> Path:
    """Where the journal of a run, or of one shard of it, is or will be."""
    if shard is None:
        return home.journal(run)
    return home.shards / f"{run}.{shard[0]}-of-{shard[1]}.jsonl"


def shards_of(home: Home, run: str) -> list[Path]:
    """The journals of a run's shards that are here, in their order."""
    # One that is just being made may have no header yet.
    begun = (x for x in home.shards.glob(f"{run}.*-of-*.jsonl") if x.stat().st_size)
    return sorted(begun, key=lambda x: int(x.name.split(".")[-2].split("-")[0]))


def checked_beside(
    home: Home, run: str, shard: tuple[int, int], request: Request | None = None, **asked: object
) -> None:
    """Raises `InputError` where a shard that is to be measured cannot be joined with those that are here: `asked`
    are fields of its header, `control` of its request. After it was measured that is too late.

    With the `request` of its plan, it must be cut from the same one, too.
    """
    for path in shards_of(home, run):
        header = read_header(path)
        if header is None or header.request.shard in (None, shard):
            continue
        there = {x: header.request.control if x == "control" else getattr(header, x) for x in asked}
        apart = [f"{x} ({there[x]} / {asked[x]})" for x in asked if there[x] != asked[x]]
        if request is not None and not apart:
            apart += _other_plan(header.request, request) + _uncut(header.request, request, header.replicates)
        if header.request.shard is not None and header.request.shard[1] != shard[1]:
            apart.append(f"shards ({header.request.shard[1]} / {shard[1]})")
        if apart:
            raise InputError(
                f"run {run} has shard {path.name} here, which differs from this one in {', '.join(apart)}: "
                "measure this one as that one was, or under another name."
            )


def checked_header(home: Home, header: Header) -> None:
    """The same of a shard whose surroundings are known by now, with which its journal would begin."""
    for path in shards_of(home, header.run):
        there = read_header(path)
        if there is None or there.request.shard in (None, header.request.shard):
            continue
        if apart := _apart(there, header) + _uncut(there.request, header.request, header.replicates):
            raise InputError(
                f"run {header.run} has shard {path.name} here, which differs from this one in {', '.join(apart)}. "
                "Nothing was measured: measure this one as that one was, or under another name."
            )


def join(journals: Sequence[Journal]) -> Journal:
    """The journals of shards as one of the whole run. It is complete only with all of them.

    The control case, which is in every shard, is taken from the first of them. Raises `InputError` for journals
    that are not of one run: it names what differs.
    """
    first = journals[0].header
    seen: dict[int, Journal] = {}
    for journal in journals:
        header = journal.header
        shard = header.request.shard
        if shard is None or first.request.shard is None or header.run != first.run:
            raise InputError(f"{header.run} and {first.run} are not shards of one run.")
        if apart := _apart(first, header):
            raise InputError(f"shards of run {first.run} differ in {', '.join(apart)}: they are no one run.")
        seen.setdefault(shard[0], journal)
    had: set[tuple[str, int]] = set()
    for journal in seen.values():
        own = _parts(journal.header.request, first.replicates)
        if both := had & own:
            raise InputError(f"shards of run {first.run} differ in {_twice(both)}: they are no one run.")
        had |= own
    if len({x.header.request.cut for x in seen.values()} - {""}) > 1:
        raise InputError(f"shards of run {first.run} differ in {_TWO_PLANS}: they are no one run.")
    ordered = _boards_told([seen[x] for x in sorted(seen)])
    missing = missing_of([x.header for x in ordered])
    measured = [(x, _own(x, first=not i)) for i, x in enumerate(ordered)]
    request = msgspec.structs.replace(
        first.request,
        cases=tuple({case.full_name: case for _, (cases, _) in measured for case in cases}.values()),
        hosts=_hosts([(x.header, cases) for x, (cases, _) in measured]),
        implementations=tuple(sorted({name for x in ordered for name in x.header.request.implementations})),
        only={key: names for x in ordered for key, names in x.header.request.only.items()},
        parameters={key: count for x in ordered for key, count in x.header.request.parameters.items()},
        layers={key: count for x in ordered for key, count in x.header.request.layers.items()},
        calls={key: count for x in ordered for key, count in x.header.request.calls.items()},
        seeds={},
        cut="",
        shard=None,
        missing=tuple(missing),
    )
    metrics = _metrics([x.header for x in ordered])
    environment = {name: value for name, value in first.environment.items() if name != HOST}
    created = min(x.header.created for x in ordered)
    return Journal(
        header=msgspec.structs.replace(
            first, request=request, created=created, environment=environment, metrics=metrics
        ),
        records=tuple(chain.from_iterable(records for _, (_, records) in measured)),
        ceilings=tuple(ceiling for x in ordered for ceiling in x.ceilings),
        footers=_footers(ordered, bool(missing)),
        launches=tuple(y for x in ordered for y in x.launches),
    )


def grew(there: Journal, given: Journal) -> bool | None:
    """Of two journals that were joined of shards of one run, whether `given` has all that is there and more; None
    where neither has all of the other, or where they are of two runs.
    """
    if _apart(there.header, given.header):
        return None
    old, new = _held(there), _held(given)
    if old == new:
        return len(given.header.request.missing) < len(there.header.request.missing)
    return True if old < new else False if new < old else None


def _held(joined: Journal) -> frozenset[bytes]:
    """What shards brought, as lines that are alike however many others were joined with them: without boards,
    which are told where shards' differ; without the control case, which is the first shard's; no footer the last.
    """
    control = joined.header.request.control
    lines: list[Line] = [msgspec.structs.replace(x, complete=False) for x in joined.footers]
    lines += [
        msgspec.structs.replace(x, board=msgspec.UNSET) for x in joined.records if x.case.full_name != control
    ]
    lines += [msgspec.structs.replace(x, board=msgspec.UNSET) for x in joined.ceilings]
    return frozenset(map(encode, [*lines, *joined.launches]))


def _apart(first: Header, other: Header) -> list[str]:
    """What two journals differ in that are to be shards of one run."""
    apart = [x for x in _SAME if getattr(other, x) != getattr(first, x)]
    apart += _conditions(first, other) if "key" in apart else []
    shards = [x.request.shard[1] for x in (first, other) if x.request.shard is not None]
    if len(set(shards)) > 1:
        apart.append(f"shards: {shards[0]} / {shards[1]}")
    if other.request.control != first.request.control:
        apart.append(f"control: {first.request.control} / {other.request.control}")
    return apart + _other_plan(first.request, other.request)


def _other_plan(first: Request, other: Request) -> list[str]:
    """What two shards were asked for differently, beside their cases."""
    return [x for x in _ASKED if getattr(first, x) != getattr(other, x)]


def _parts(request: Request, replicates: int) -> set[tuple[str, int]]:
    """A shard's cases and replicates that no other has: without the control case."""
    every = tuple(range(replicates))
    names = (x.full_name for x in request.cases if x.full_name != request.control)
    return {(name, x) for name in names for x in request.seeds.get(name, every)}


def _uncut(first: Request, other: Request, replicates: int) -> list[str]:
    """That two shards are not cut from the same plan, if they are not: then they may both lack a case, and would
    pass for a whole run.
    """
    if both := _parts(first, replicates) & _parts(other, replicates):
        return [_twice(both)]
    return [_TWO_PLANS] if first.cut and other.cut and first.cut != other.cut else []


def _twice(both: Collection[tuple[str, int]]) -> str:
    return f"cases: both have {short(min(both)[0])}, so they are not cut from the same plan"


_TWO_PLANS = "what all shards together have, so they are not cut from the same plan"


def _hosts(measured: Sequence[tuple[Header, Sequence[Case]]]) -> dict[str, str]:
    """By operator/case its host; where several had some of its seeds each, a hash of all."""
    found: dict[str, set[str]] = {}
    for header, cases in measured:
        for case in cases if HOST in header.environment else ():
            found.setdefault(case.full_name, set()).add(str(header.environment[HOST]))
    return {name: _together(hosts) for name, hosts in found.items()}


def _together(hosts: set[str]) -> str:
    if len(hosts) == 1:
        return next(iter(hosts))
    return f"hosts_{hashlib.sha256(' '.join(sorted(hosts)).encode()).hexdigest()[:12]}"


def _boards_told(journals: list[Journal]) -> list[Journal]:
    """The same; where one went over to another board, or some have seeds of a case that others have more of, every
    line says its own, as they get one header.
    """
    apart = any(x.header.request.seeds for x in journals)
    if not apart and all(y.board is msgspec.UNSET for x in journals for y in x.records):
        return journals
    return [
        dataclasses.replace(
            x,
            records=tuple(_told(y, x.header) for y in x.records),
            ceilings=tuple(_told(y, x.header) for y in x.ceilings),
        )
        for x in journals
    ]


_Placed = TypeVar("_Placed", Record, Ceiling)


def _told(line: _Placed, header: Header) -> _Placed:
    if line.board is not msgspec.UNSET:
        return line
    return msgspec.structs.replace(line, board=str(header.environment.get(BOARDS) or UNKNOWN))


def _own(journal: Journal, first: bool) -> tuple[list[Case], list[Record]]:
    """A shard's cases and records, without the control case unless it is the first shard's."""
    control = None if first else journal.header.request.control
    return (
        [x for x in journal.header.request.cases if x.full_name != control],
        [x for x in journal.records if x.case.full_name != control],
    )


def _metrics(headers: Sequence[Header]) -> tuple[Metric, ...]:
    """What the cases of all shards hold; each header has only the metrics of its own."""
    found: dict[str, Metric] = {}
    for header in headers:
        for metric in header.metrics:
            if found.setdefault(metric.name, metric) != metric:
                raise InputError(
                    f"shards of run {header.run} differ in metric {short(metric.name)!r}: they are no one run. "
                    f"Measure all of them with one version of kernelmark."
                )
    return tuple(found.values())


def _conditions(first: Header, other: Header) -> list[str]:
    names = sorted(first.conditions.keys() | other.conditions.keys())
    return [
        f"{x} ({first.conditions.get(x)} / {other.conditions.get(x)})"
        for x in names
        if first.conditions.get(x) != other.conditions.get(x)
    ]


def _footers(journals: Sequence[Journal], missing: bool) -> tuple[Footer, ...]:
    """Whole only if every shard is there and ended whole."""
    whole = not missing and all(any(y.complete for y in x.footers) for x in journals)
    footers = [y for x in journals for y in x.footers]
    out = [msgspec.structs.replace(x, complete=False) for x in footers]
    if whole:
        out[-1] = msgspec.structs.replace(out[-1], complete=True)
    return tuple(out)


def missing_of(headers: Sequence[Header]) -> list[tuple[int, int]]:
    """The shards of a run that these headers are not of."""
    shards = [x.request.shard for x in headers if x.request.shard is not None]
    if not shards:
        return []
    count = shards[0][1]
    there = {x[0] for x in shards}
    return [(i, count) for i in range(1, count + 1) if i not in there]


def names_of(shards: Sequence[tuple[int, int]]) -> list[str]:
    """Shards as they are asked for: `i/n`."""
    return [f"{number}/{count}" for number, count in shards]


def few(shards: Sequence[tuple[int, int]]) -> str:
    """Their names for a sentence, which has only the first of many."""
    more = f" and {len(shards) - FEW} more" if len(shards) > FEW else ""
    return ", ".join(names_of(shards[:FEW])) + more


def lines_of(home: Home, run: str) -> tuple[list[bytes], list[str]]:
    """The lines of the joined journal of what is here of a run, and the shards that are missing."""
    joined = join([read(x) for x in shards_of(home, run)])
    return [encode(x).strip() for x in _written(joined)], names_of(joined.header.request.missing)


def whole(journals: Sequence[Journal]) -> bytes:
    """The journal of a run whose shards lie anywhere, as `import` of all of them would write it."""
    return b"".join(map(encode, _written(join(journals))))


def _written(joined: Journal) -> list[Line]:
    return [joined.header, *joined.records, *joined.ceilings, *joined.footers, *joined.launches]
