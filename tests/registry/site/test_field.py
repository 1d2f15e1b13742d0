"""Runs that left out a rival: which of a case's runs it stands by, and what is said where all of them did."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from kernelmark.registry.analysis.repeated import NOT_YET
from kernelmark.registry.site.course import course
from kernelmark.registry.site.facts import facts, run_of
from kernelmark.registry.site.field import fields, left_out
from kernelmark.registry.site.pages import Pages
from kernelmark.registry.site.standing import Standing, standings
from kernelmark.registry.site.timeline import Measured


def run(literal: Any, day: int, rows: dict[str, Any], spec: str = "a", **conditions: Any) -> list[Measured]:
    """A run of one case: ms by implementation, or the status that it ended in; ours is `kernelmark`."""
    case = literal.case(operator="rms_norm", name="S8", axes={"S": 8}, spec=spec)
    lines = [
        literal.record(name, [ms] * 3, provider=name, case=case)
        if isinstance(ms, float)
        else literal.record(name, provider=name, case=case, status=ms, reason="it did")
        for name, ms in rows.items()
    ]
    journal = literal.journal(
        *lines,
        literal.footer(),
        run=f"run-{day}",
        created=f"2026-11-{day:02d}T00:00:00+00:00",
        commit=f"{day:040x}",
        conditions={"gpu": "NVIDIA H200", **conditions},
    )
    found = facts(journal)
    return [(run_of(journal, found), x) for x in found]


def standing(*runs: list[Measured]) -> Standing:
    (found,) = standings("rms_norm", [y for x in runs for y in x])
    return found


WHOLE = {"kernelmark": 1.0, "torch": 3.0, "quick": 1.1}


@pytest.mark.parametrize(
    ("later", "shown"),
    [
        ({"kernelmark": 1.0, "torch": 3.0}, "run-1"),
        ({"kernelmark": 1.0, "torch": 3.0, "quick": "unavailable"}, "run-1"),
        ({"kernelmark": 1.0, "torch": 3.0, "quick": "error"}, "run-1"),
        ({"kernelmark": 1.0, "torch": 3.0, "quick": "incorrect"}, "run-2"),  # it was there
        ({"kernelmark": 1.0, "torch": 1.11}, "run-2"),  # within what two runs lie apart
        ({"kernelmark": 1.0, "torch": 3.0, "quick": 1.2}, "run-2"),
        ({"kernelmark": 1.0}, "run-1"),  # beside nothing
    ],
)
def test_a_case_stands_by_the_newest_run_that_left_out_no_better_rival(
    literal: Any, later: dict[str, Any], shown: str
) -> None:
    (case,) = standing(run(literal, 1, WHOLE), run(literal, 2, later)).cases
    assert case.ours is not None
    assert case.ours[0].name == shown
    assert case.absent is None
    assert case.outcome != "undecided"


def test_by_another_definition_nobody_is_left_out(literal: Any) -> None:
    (case,) = standing(run(literal, 1, WHOLE), run(literal, 2, {"kernelmark": 1.0, "torch": 3.0}, spec="b")).cases
    assert case.ours is not None
    assert (case.ours[0].name, case.absent) == ("run-2", None)


def test_rows_beside_busy_neighbours_give_way_to_those_alone(literal: Any) -> None:
    alone, beside = run(literal, 1, WHOLE), run(literal, 2, WHOLE, parallel=4)
    for runs, shown in (((alone, beside), "run-1"), ((beside,), "run-2")):
        (case,) = standing(*runs).cases
        assert case.ours is not None
        assert case.ours[0].name == shown


def test_where_every_run_left_one_out_it_is_named_and_nothing_decided(literal: Any) -> None:
    found = standing(
        run(literal, 1, {"torch": 3.0, "quick": 1.1}), run(literal, 2, {"kernelmark": 1.0, "torch": 3.0})
    )
    (case,) = found.cases
    assert case.absent is not None
    assert case.absent[1].implementation == "quick"
    assert case.outcome == "undecided"
    assert found.compared == ()
    assert found.speedup is None
    runs = list({x[0].name: x[0] for x in case.latest}.values())
    (page,) = Pages("Kernels", "today", None, {x.name: NOT_YET for x in runs}).operator(
        "rms_norm", (found,), (), runs, (), {}
    )
    text = re.sub(r"<[^>]*>", "", page)
    assert "without quick, 1.100" in text


def test_a_run_that_left_one_out_is_no_spike_over_commits(literal: Any) -> None:
    known = [*run(literal, 1, WHOLE), *run(literal, 2, {"kernelmark": 1.0, "torch": 3.0}), *run(literal, 3, WHOLE)]
    (found,) = standings("rms_norm", known)
    assert [(x.name, round(value, 3)) for x, value in course(found, known)] == [("run-1", 1.1), ("run-3", 1.1)]


def test_of_a_rate_the_higher_is_the_better_one(literal: Any) -> None:
    """Literal facts: a rival with the higher rate is left out, not the one with the lower."""
    (_, ours), (where, torch), (_, quick) = run(literal, 1, WHOLE)

    def rate(fact: Any, value: float, speedup: float) -> Any:
        numbers = {fact.primary: (value, None, None, "tokens/s")}
        return msgspec.structs.replace(fact, better="higher", metrics=numbers, speedup=speedup)

    narrow = next(iter(run(literal, 2, {"kernelmark": 1.0})))[0]
    for value, left in ((300.0, True), (90.0, False)):
        known = [(where, rate(quick, value, 1.0)), (narrow, rate(torch, 100.0, 1.0))]
        here = (narrow, rate(ours, 200.0, 2.0))
        assert (left_out(here, fields([*known, here])) is not None) is left
