"""How ours stands over commits, and which two commits a comparison begins with."""

from __future__ import annotations

from typing import Any

from kernelmark.registry.site.build import beside_others, newest_two
from kernelmark.registry.site.course import course, large, merged, small, together
from kernelmark.registry.site.data import source
from kernelmark.registry.site.facts import facts, run_of
from kernelmark.registry.site.standing import standings
from kernelmark.registry.site.timeline import Measured
from kernelmark.registry.store.journal import Journal

from .conftest import MakeRun


def measured(*journals: Journal) -> list[Measured]:
    return [(run_of(x, facts(x)), y) for x in journals for y in facts(x)]


def test_a_new_case_moves_no_line_and_a_commit_is_a_point(make_run: MakeRun) -> None:
    """Runs 0 and 1 are of one commit, 8 is slower; a second case comes at run 8."""
    journals = [make_run(x, sizes=(1024, 2048) if x == 8 else (1024,)) for x in (0, 1, 8)]
    given = measured(*journals)
    (standing,) = standings("rms_norm", given)
    points = course(standing, given)
    assert [run.name for run, _ in points] == ["run-01", "run-08"]
    assert [round(value, 2) for _, value in points] == [
        1.9,
        1.81,
    ]  # 2.00 and then 1.81 of the one, 1.81 of the other
    assert points[-1][1] == standing.speedup
    assert small(points).startswith("<svg class='spark ours'")
    assert small(points[:1]) == ""


def test_operators_count_alike_and_the_picture_names_them(make_run: MakeRun) -> None:
    runs = [run_of(x, facts(x)) for x in (make_run(0), make_run(2), make_run(4))]
    one, other = ((runs[0], 1.0), (runs[2], 4.0)), ((runs[1], 4.0),)
    every = together((one, other, ()), runs)
    assert [(run.name, round(value, 6)) for run, value in every] == [("run-00", 2), ("run-02", 2), ("run-04", 4)]
    for width in (900, 340):
        drawing = large(every, {"norm": one, "<b>": other}, width)
        assert f'viewBox="0 0 {width} ' in drawing
        assert "norm 4.00×" in drawing
        assert "all 4.00×" in drawing
        assert "<b>" not in drawing  # of one point there is no line, nor a name
        assert drawing.count('<a href="run/run-') == 3
    assert merged([]) == ()


def test_comparing_begins_with_the_newest_two_that_share_most_rows(make_run: MakeRun, literal: Any) -> None:
    """Not with a run of one row that no other has."""
    odd = make_run(12, operator="converge", sizes=(1,))
    found: dict[tuple[str, str], list[Measured]] = {}
    for run, fact in measured(make_run(0), make_run(2), make_run(4), odd):
        found.setdefault(source(run), []).append((run, fact))
    ((before, after, ((operator, count, *_),)),) = newest_two(found)
    assert (before.name, after.name, operator, count) == ("run-02", "run-04", "rms_norm", 2)
    beside = beside_others(found)
    assert beside is not None
    assert beside.name == "run-12"  # the newest with half as many rows beside others
    alone = measured(literal.journal(literal.record("torch", 1.0)))
    lone = {source(run): [(run, x)] for run, x in alone}
    assert newest_two(lone) == []
    assert beside_others(lone) is None
