"""How ours stands over commits."""

from __future__ import annotations

import dataclasses

from kernelmark.registry.site.course import APART, apart, course, large, merged, small, together
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
    hostile = ((runs[1], 1.0), (runs[2], 3.9))
    every = together((one, other, ()), runs)
    assert [(run.name, round(value, 6)) for run, value in every] == [("run-00", 2), ("run-02", 2), ("run-04", 4)]
    for width in (900, 340):
        drawing = large(every, {"norm": one, "<b>": hostile, "alone": other}, width)
        assert f'viewBox="0 0 {width} ' in drawing
        assert "norm 4.00×" in drawing
        assert "all 4.00×" in drawing
        assert "&lt;b&gt; 3.90×" in drawing
        assert "<b>" not in drawing
        assert "alone" not in drawing  # of one point there is no line, nor a name
        # On a phone level ones would merge.
        assert drawing.count('<a href="run/run-') == (3 if width == 900 else 2)
    assert merged([]) == ()


def test_a_ratio_of_one_process_is_no_spike(make_run: MakeRun) -> None:
    """Unless its case has no other."""
    runs = [make_run(x, sizes=(1024,)) for x in (0, 2, 4)]
    single = [
        dataclasses.replace(x, records=tuple(y for y in x.records if y.replicate == 0), lines=()) for x in runs
    ]
    for given, seen in (([runs[0], single[1], runs[2]], ["run-00", "run-04"]), (single[:2], ["run-00", "run-02"])):
        found = measured(*given)
        (standing,) = standings("rms_norm", found)
        assert [run.name for run, _ in course(standing, found)] == seen


def test_labels_move_as_little_as_they_can() -> None:
    assert apart([20.0, 100.0, 100.0, 200.0], 14, 270) == [20.0, 100 - APART / 2, 100 + APART / 2, 200.0]
    assert apart([270.0, 270.0], 14, 270) == [270 - APART, 270.0]
    assert apart([0.0, 0.0], 14, 270) == [14, 14 + APART]
    assert apart([], 14, 270) == []
