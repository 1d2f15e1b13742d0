"""Which two states of the code comparing begins with, and what it says of their rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from kernelmark.registry.site.comparisons import Change, Ratio, beside_others, newest_two
from kernelmark.registry.site.data import source
from kernelmark.registry.site.facts import facts, run_of
from kernelmark.registry.site.timeline import Measured
from kernelmark.registry.store.journal import Journal

from .conftest import MakeRun


def by_source(*journals: Journal) -> dict[tuple[str, str], list[Measured]]:
    out: dict[tuple[str, str], list[Measured]] = {}
    for journal in journals:
        found = facts(journal)
        run = run_of(journal, found)
        out.setdefault(source(run), []).extend((run, x) for x in found)
    return out


def single(journal: Journal) -> Journal:
    return dataclasses.replace(journal, records=tuple(x for x in journal.records if x.replicate == 0), lines=())


def test_more_of_what_is_better_the_higher_is_better(literal: Any) -> None:
    """In one mean with times."""
    found: dict[tuple[str, str], list[Measured]] = {}
    for commit, time, rate in (("a" * 40, 1.0, 100.0), ("b" * 40, 0.5, 200.0)):
        lines = [
            literal.record("kernelmark", value, case=literal.case(name=name), provider="kernelmark")
            for name, value in (("time", time), ("rate", rate))
        ]
        journal = literal.journal(*lines, run=f"run-{commit[0]}", commit=commit)
        for key, measured in by_source(journal).items():
            found[key] = [
                (run, msgspec.structs.replace(x, better="higher" if x.case == "rate" else "lower"))
                for run, x in measured
            ]
    (pair,) = newest_two(found)
    (change,) = pair.changes
    assert [len(change.ratios), change.mean, *change.extremes] == [2, 2.0, 2.0, 2.0]


def test_comparing_begins_with_the_newest_two_that_share_most_rows(make_run: MakeRun, literal: Any) -> None:
    """Not with a run of one row that no other has."""
    odd = make_run(12, operator="converge", sizes=(1,))
    found = by_source(make_run(0), make_run(2), make_run(4), odd)
    (pair,) = newest_two(found)
    ((operator, count),) = ((x.operator, len(x.ratios)) for x in pair.changes)
    assert (pair.before.name, pair.after.name, operator, count) == ("run-02", "run-04", "rms_norm", 2)
    beside = beside_others(found)
    assert beside is not None
    assert beside.name == "run-12"  # the newest with half as many rows beside others
    lone = by_source(literal.journal(literal.record("torch", 1.0)))
    assert newest_two(lone) == []
    assert beside_others(lone) is None


def test_comparing_begins_with_rows_that_have_intervals(make_run: MakeRun) -> None:
    """However many newer ones are of one process; the same of devices."""
    newer = [single(make_run(x, sizes=(1024, 2048, 4096))) for x in (4, 6)]
    (pair,) = newest_two(by_source(make_run(0), make_run(2), *newer))
    assert (pair.before.name, pair.after.name, pair.overall.certain) == ("run-00", "run-02", 2)
    (without,) = newest_two(by_source(*newer))
    assert (without.before.name, without.after.name, without.overall.certain) == ("run-04", "run-06", 0)
    other = [make_run(x, "NVIDIA L4", sizes=(1024,), run=f"l4-{x}") for x in (0, 2)]
    assert [x.before.device for x in newest_two(by_source(*newer, *other))] == ["NVIDIA L4", "NVIDIA H200"]


def test_what_is_of_one_process_counts_apart_and_decides_nothing(make_run: MakeRun) -> None:
    """Ours is slower by a tenth from run 8 on."""
    (pair,) = newest_two(by_source(make_run(6), make_run(8)))
    assert dict(pair.overall.outcomes) == {"worse": 2}
    assert pair.overall.decided
    (alone,) = newest_two(by_source(single(make_run(6)), make_run(8)))
    assert dict(alone.overall.outcomes) == {"one process": 2}
    assert not alone.overall.decided


def test_means_are_of_the_rows_that_have_intervals() -> None:
    mixed = Change("x", (Ratio(2.0, (1.5, 2.5)), Ratio(0.5, (0.4, 1.1)), Ratio(9.0, None)))
    assert dict(mixed.outcomes) == {"better": 1, "within their intervals": 1, "one process": 1}
    assert (mixed.certain, mixed.mean, mixed.extremes, mixed.decided) == (2, 1.0, (0.5, 2.0), False)
    assert Change("x", (Ratio(2.0, (1.5, 2.5)), Ratio(9.0, None))).decided
    assert len(Change("x", (Ratio(9.0, None),)).counted) == 1
