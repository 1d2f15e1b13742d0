"""Stored runs of two commits: which of them answer the question, without measuring anything."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from ...registry.detection.comparison import Comparison, Options
from ...registry.detection.decision import Progress, stored
from ...registry.detection.earlier import joined, noise_seen, run_means, unchanged
from ...registry.detection.pairing import differing, pair
from ...registry.store.index import Entry, Index, clean
from ...registry.store.journal import Journal, read
from ...registry.store.processes import process_values
from ...registry.store.record import Header, Record
from .revisions import Checkout, Revision

LOOKED_AT = 20
"""Newest runs of a commit among which a comparable pair is looked for."""


@dataclass(frozen=True)
class Stored:
    """Stored runs of two commits, and the runs of the base's code under the same conditions, oldest first.

    `current` holds the processes of all the current commit's comparable runs: a run of the quick plan has three,
    and two such runs decide what one cannot. `entry` is the index's of the newest, `runs` names them all.
    """

    base: Journal
    current: Journal
    entry: Entry
    past: tuple[Entry, ...]
    runs: tuple[str, ...] = ()

    @property
    def differing(self) -> tuple[str, ...]:
        """The conditions in which the two runs differ."""
        return differing(self.base.header, self.current.header)


def find(
    index: Index,
    checkout: Checkout,
    base: Revision,
    current: Revision,
    rooms: Sequence[str],
    options: Options,
    device: str | None,
    plan: str | None,
) -> Stored | str:
    """Of the pairs of runs that compare the one with the most cases, and of those the newest.

    Else a pair that does not compare, or the reason why there is none. A run of another commit whose kernels
    and baselines are the base's stands for the base. Runs of trees with uncommitted changes stand for
    nothing: no two such trees can be told apart.
    """
    if base.dirty or current.dirty:
        return "runs of a tree with uncommitted changes cannot be told apart, so none is taken from the store"
    now = _runs(index, current.commit, options, device, plan)
    if not now:
        return f"no run of {current} with {options.run_processes} or more processes is stored"
    same = _same_code(index, checkout, base.commit, rooms)
    before = [x for commit in same for x in _runs(index, commit, options, device, plan)]
    before.sort(key=lambda x: (x.created, x.name), reverse=True)
    past = list(before)
    before.sort(key=lambda x: -x.cases)
    # With equal code on both sides one run must not be held against itself.
    chosen = next(((b, c) for c in now for b in before if b.key == c.key and b.name != c.name), None)
    if chosen is None:
        others = [(b, c) for c in now for b in before if b.name != c.name]
        if not others:
            return f"no run of {base} is stored"
        chosen = others[0]
    mine = [chosen[1], *(x for x in now if _beside(x, chosen[1]) and x.name != chosen[0].name)]
    names = tuple(x.name for x in mine)
    past = [x for x in past if x.key == chosen[1].key and x.name not in names]
    joint = merged([read(x.path) for x in mine])
    return Stored(read(chosen[0].path), joint, chosen[1], tuple(past[: options.maximum_runs][::-1]), names)


def merged(journals: Sequence[Journal]) -> Journal:
    """Runs of one commit as one: the first's header, and everybody's processes, numbered anew."""
    first, *others = journals
    records, count = list(first.records), first.header.replicates
    for other in others:
        records += [msgspec.structs.replace(x, replicate=count + x.replicate) for x in other.records]
        count += other.header.replicates
    header = msgspec.structs.replace(first.header, replicates=count)
    return replace(first, header=header, records=tuple(records))


def _beside(entry: Entry, chosen: Entry) -> bool:
    """Whether another run of the same commit measured the same under the same conditions."""
    same = entry.key == chosen.key and entry.plan == chosen.plan and entry.cases == chosen.cases
    return same and entry.name != chosen.name


def decided(
    found: Stored,
    index: Index,
    options: Options,
    operators: Collection[str],
    implementations: Collection[str],
    ours: Collection[str] | None,
) -> Progress:
    """The verdicts of the rows that both runs were asked for.

    Rows of providers other than `ours`, whose code the commits share, are witnesses of the machine and get
    no verdict of their own unless they were asked for; None means that the commits do not share it.
    """
    header = found.current.header
    like = run_means(index.processes(found.entry))
    past = [run_means(index.processes(x)) for x in found.past]
    histories = joined(noise_seen(index.spreads(header.key)), unchanged(past, like, options.run_processes))
    both = _asked(found.base.header), _asked(found.current.header)
    sides = [
        (journal.header, [x for x in journal.records if _wanted(x, operators, both)])
        for journal in (found.base, found.current)
    ]
    others = {x.implementation for _, records in sides for x in records if ours and x.provider not in ours}
    rows: list[Comparison] = pair(sides[0], sides[1], histories, controls=others)
    shown = {
        x.identity
        for _, records in sides
        for x in records
        if {x.implementation, x.provider} & set(implementations)
    }
    kept = [x for x in rows if x.control or x.key in shown]
    progress = stored(kept, options)
    return msgspec.structs.replace(
        progress,
        verdicts=tuple(x for x in progress.verdicts if x.key in shown),
        requests={key: pairs for key, pairs in progress.requests.items() if key in shown},
    )


def of_runs(
    base: Journal, current: Journal, index: Index, options: Options, operators: Collection[str]
) -> Progress:
    """The verdicts on two runs that were named, whoever made them. Measures nothing.

    The runs of the base's commit under its conditions, the base among them, are what is known of unchanged
    code; where the base names no commit it stands alone, which is too little for any verdict.
    """
    header = base.header
    known = index.runs(commit=header.commit, key=header.key) if header.commit and not header.dirty else []
    past = [run_means(index.processes(x)) for x in reversed(clean(known)) if x.name != current.header.run]
    definitions = {key: x for rows in past for key, x in rows.items()}
    like = process_values(current.header, current.records)
    mine = {key: definitions[key] for key in like if key in definitions}
    histories = unchanged(past[-options.maximum_runs :], mine, options.run_processes)
    sides = [
        (journal.header, [x for x in journal.records if not operators or x.case.operator in operators])
        for journal in (base, current)
    ]
    rows = pair(sides[0], sides[1], histories, controls=())
    source = current.header.request.imported_from
    if source is not None and min(base.header.replicates, current.header.replicates) < options.minimum_processes:
        note = f"{source}: one process's iterations are not independent, so they say nothing of the noise between"
        rows = [msgspec.structs.replace(x, notes=(*x.notes, note)) for x in rows]
    return stored(rows, options)


def _runs(index: Index, commit: str, options: Options, device: str | None, plan: str | None) -> list[Entry]:
    """A commit's runs, those of more cases first: one that was narrowed must not hide the others' rows."""
    runs = clean(index.runs(commit=commit, device=device, plan=plan, limit=LOOKED_AT))
    found = [x for x in runs if x.replicates >= options.run_processes]
    return sorted(found, key=lambda x: -x.cases)  # stable: among equals the newest first


def _same_code(index: Index, checkout: Checkout, base: str, rooms: Sequence[str]) -> list[str]:
    code = checkout.code([base, *index.commits()], rooms)
    return [commit for commit, found in code.items() if found == code[base]]


def _asked(header: Header) -> set[tuple[str, str]] | None:
    """The cases that a run was to measure; None where it does not say."""
    return {(x.operator, x.name) for x in header.request.cases} or None


def _wanted(
    record: Record, operators: Collection[str], asked: Iterable[Collection[tuple[str, str]] | None]
) -> bool:
    """Whether a row was asked for by the user and by both runs: what a run left out is not missing from it."""
    case = (record.case.operator, record.case.name)
    return (not operators or case[0] in operators) and all(x is None or case in x for x in asked)
