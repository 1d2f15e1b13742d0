"""Lines over runs, where things stand, scaling, the strip of a run: on literal journals, numbers by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from kernelmark.registry.site.coverage import Expected, coverage
from kernelmark.registry.site.drawing import ratio, sparkline, strip
from kernelmark.registry.site.facts import facts, run_of
from kernelmark.registry.site.feeds import events, regressions
from kernelmark.registry.site.scaling import scaling
from kernelmark.registry.site.standing import standings
from kernelmark.registry.site.timeline import Line, Measured, ordered, timelines
from kernelmark.registry.store.journal import Journal


class Memory:
    """Remembers in a dict, and counts what was computed."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], bytes] = {}
        self.computed = 0

    def remembered(self, what: str, inputs: str) -> bytes | None:
        return self.known.get((what, inputs))

    def remember(self, answers: Iterable[tuple[str, str, bytes]]) -> None:
        for what, inputs, answer in answers:
            self.known[what, inputs] = answer
            self.computed += 1


def measured(*journals: Journal) -> list[Measured]:
    pairs = [(run_of(x, found), found) for x in journals for found in (facts(x),)]
    order = [x.name for x in ordered([run for run, _ in pairs], {})]
    return [(run, x) for run, found in sorted(pairs, key=lambda y: order.index(y[0].name)) for x in found]


def run(literal: Any, number: int, ours: float, torch: float = 2.0, case: Any = None, **header: Any) -> Journal:
    lines = [
        literal.record(name, time, provider=name, case=case or literal.case())
        for name, time in (("kernelmark", ours), ("torch", torch))
    ]
    fields = {
        "run": f"run-{number:02d}",
        "created": f"2026-11-{number + 1:02d}T00:00:00Z",
        "commit": f"{number:040x}",
    }
    return literal.journal(*lines, **(fields | header))


def line(found: Iterable[Line], name: str = "kernelmark") -> Line:
    (out,) = (x for x in found if x.key.implementation == name)
    return out


def test_what_all_libraries_share_on_a_day_is_the_machines(literal: Any) -> None:
    runs = []
    for number in range(12):
        slow = 1.1 if number >= 6 else 1.0
        cases = [literal.case(name=f"S{i}") for i in range(3)]
        lines = [literal.record(x, slow, provider=x, case=y) for x in ("kernelmark", "torch") for y in cases]
        day = f"2026-11-{number + 1:02d}T00:00:00Z"
        runs.append(literal.journal(*lines, run=f"r{number:02d}", created=day, commit=f"{number:040x}"))
    found = timelines("rms_norm", measured(*runs), {}, Memory())
    ours = [x for x in found if x.ours]
    assert [x.changes[0].run for x in ours] == ["r06"] * 3
    assert all("the machine's: 3 of 3" in str(x.changes[0].machine) for x in ours)
    assert not events(found)


def test_a_change_of_throughput_is_worse_downwards(literal: Any) -> None:
    from kernelmark.registry.store.metric import Metric

    rate = Metric("rate", "tokens/s", "higher")
    case = literal.case(primary="rate")
    runs = []
    for number in range(12):
        record = literal.record(
            "kernelmark", 1.0, provider="kernelmark", case=case, beside={"rate": 90 if number >= 6 else 100}
        )
        day = f"2026-11-{number + 1:02d}T00:00:00Z"
        runs.append(
            literal.journal(record, run=f"r{number:02d}", created=day, commit=f"{number:040x}", metrics=(rate,))
        )
    ((event,),) = [events(timelines("rms_norm", measured(*runs), {}, Memory()))]
    assert event.change.change == pytest.approx(-0.1)
    assert event.change.worse
    assert regressions([event]) == [event]


def test_a_change_is_told_by_the_first_run_that_has_the_row(literal: Any) -> None:
    runs = [run(literal, x, 1.1 if x >= 6 else 1.0) for x in range(12)]
    others = literal.journal(
        literal.record("torch", 2.0, provider="torch"), run="run-06-a", created="2026-11-06T12:00:00Z",
        commit=f"{6:040x}",
    )  # fmt: skip
    found = line(timelines("rms_norm", measured(*runs[:6], others, *runs[6:]), {}, Memory()))
    assert [x.run for x in found.changes] == ["run-06"]


def test_what_a_feed_says_was_before_is_of_the_same_key(literal: Any) -> None:
    other = {"key": "other", "conditions": {"driver": "580"}}
    runs = []
    for x in range(12):
        runs.append(run(literal, x, 1.1 if x >= 6 else 1.0))
        runs.append(run(literal, x, 9.0, run=f"run-{x:02d}-b", created=f"2026-11-{x + 1:02d}T01:00:00Z", **other))
    ((event,),) = [events(timelines("rms_norm", measured(*runs), {}, Memory()))]
    assert "1.000 ms before, 1.100 ms in run run-06 " in event.text


def test_breaks_name_conditions_definition_and_timer(literal: Any) -> None:
    again = literal.case(spec="ffffffffffff")
    runs = [
        run(literal, 0, 1.0),
        run(literal, 1, 1.0, key="key1", conditions={"gpu": "NVIDIA H200", "driver": "590", "ecc": True}),
        run(literal, 2, 1.0),
        run(literal, 3, 1.0, case=again),
    ]
    found = line(timelines("rms_norm", measured(*runs), {}, Memory()))
    assert [(x.run, x.what) for x in found.breaks] == [
        ("run-01", ("driver: 580.1 → 590", "ecc: not recorded → True")),
        ("run-03", ("case definition: 0123456789ab → ffffffffffff",)),
    ]
    path = sparkline(found).split("<path d='")[1].split("'")[0]
    assert [x for x in path if x.isalpha()] == ["M", "l", "m", "l", "m", "l", "m", "l"]


def test_a_new_version_of_a_library_is_a_break(literal: Any) -> None:
    known = {"gpu": "NVIDIA H200", "python": "3.11.7"}
    runs = [
        literal.journal(literal.record(version=x), run=f"run-{i}", commit=f"{i:040x}", conditions=known)
        for i, x in enumerate(("0.5", "0.6"))
    ]
    (broken,) = line(timelines("rms_norm", measured(*runs), {}, Memory()), "torch").breaks
    assert broken.what == ("library version: 0.5 → 0.6",)


def test_changed_trees_are_drawn_and_not_searched(literal: Any) -> None:
    runs = [run(literal, x, 1.1 if x >= 6 else 1.0, dirty=x >= 6) for x in range(12)]
    found = line(timelines("rms_norm", measured(*runs), {}, Memory()))
    assert len(found.points) == 12
    assert not found.changes
    assert runs[0].header.commit == found.points[0][0].code
    assert found.points[7][0].code not in (runs[7].header.commit, found.points[8][0].code)


def test_arms_of_an_attribution_are_in_no_history(literal: Any) -> None:
    from kernelmark.registry.store.record import Request

    runs = [run(literal, 0, 1.0), run(literal, 1, 3.0, request=Request(arm="old code, new environment"))]
    (standing,) = standings("rms_norm", measured(*runs))
    assert len(line(timelines("rms_norm", measured(*runs), {}, Memory())).points) == 1
    assert standing.cases[0].ours is not None
    assert standing.cases[0].ours[0].name == "run-00"


def test_commits_stand_by_when_they_were_made(literal: Any) -> None:
    pairs = [run_of(x, facts(x)) for x in (run(literal, 0, 1.0), run(literal, 1, 1.0), run(literal, 2, 1.0))]
    times = {f"{1:040x}": 0}  # the second was made long before, and measured late
    assert [x.name for x in ordered(pairs, times)] == ["run-01", "run-00", "run-02"]


def test_the_same_search_is_made_once(literal: Any) -> None:
    memory = Memory()
    runs = [run(literal, x, 1.1 if x >= 6 else 1.0) for x in range(12)]
    first = timelines("rms_norm", measured(*runs), {}, memory)
    assert timelines("rms_norm", measured(*runs), {}, memory) == first
    assert memory.computed == 1
    timelines("rms_norm", measured(*runs, run(literal, 12, 1.1)), {}, memory)
    assert memory.computed == 2


def test_bands_come_from_reruns_of_the_same_code(literal: Any) -> None:
    values = (1.0, 1.01, 1.0, 0.99)
    same = [run(literal, i, v, commit="a" * 40) for i, v in enumerate(values)]
    (band,) = line(timelines("rms_norm", measured(*same), {}, Memory())).bands
    # t of 3 degrees of freedom, 3.182, times the standard deviation 0.00816: two rows lend each other nothing.
    assert (band.low, band.high) == (pytest.approx(0.974, abs=0.002), pytest.approx(1.026, abs=0.002))
    other = [run(literal, i, v) for i, v in enumerate(values)]
    assert not line(timelines("rms_norm", measured(*other), {}, Memory())).bands
    assert line(timelines("rms_norm", measured(*other), {}, Memory()), "torch").bands


def test_where_ours_stands(literal: Any) -> None:
    case = {x: literal.case(name=x) for x in ("faster", "slower", "level", "failed", "alone", "theirs")}
    lines = []
    for r in range(3):
        jitter = 1 + 0.001 * r
        for name, ours, torch in (("faster", 1.0, 2.0), ("slower", 2.0, 1.0)):
            lines.append(
                literal.record("kernelmark", ours * jitter, provider="kernelmark", case=case[name], replicate=r)
            )
            lines.append(literal.record("torch", torch * jitter, case=case[name], replicate=r))
        # An interval that begins at 1: `faster`, as `show` and the report say.
        lines += [literal.record(x, 1.0, case=case["level"], replicate=r) for x in ("kernelmark", "torch")]
    lines.append(
        literal.record("kernelmark", provider="kernelmark", case=case["failed"], status="error", reason="no")
    )
    lines.append(literal.record("kernelmark", 1.0, provider="kernelmark", case=case["alone"]))
    lines.append(literal.record("torch", 1.0, case=case["theirs"]))
    (standing,) = standings("rms_norm", measured(literal.journal(*lines, replicates=3)))
    assert {x.case: x.outcome for x in standing.cases} == {
        "faster": "faster",
        "slower": "slower",
        "level": "faster",
        "failed": "failed",
        "alone": "alone",
        "theirs": "none of ours",
    }
    assert standing.speedup == pytest.approx(1.0)
    assert standing.rival == ("torch", 3)
    for x in standing.compared:
        kind = {"faster": "good", "level": "good", "slower": "bad"}[x.case]
        assert f"<svg class='ratio {kind}'" in ratio(x)
        assert f"<path class='{kind}'" in strip([x], None)


def test_a_speedup_of_one_process_earns_no_colour(literal: Any) -> None:
    (fact,) = (x for _, x in measured(run(literal, 0, 1.0)) if x.ours)
    assert (fact.speedup, fact.outcome) == (2.0, "one process")
    assert "<svg class='ratio single'" in ratio(fact)
    assert "<path class='single'" in strip([fact], None)
    assert fact.interval == (None, None)


def test_a_newest_failure_hides_no_older_success(literal: Any) -> None:
    bad = literal.record("kernelmark", provider="kernelmark", status="incorrect", reason="off")
    later = literal.journal(bad, run="run-01", created="2026-11-30T00:00:00Z")
    (standing,) = standings("rms_norm", measured(run(literal, 0, 1.0), later))
    assert standing.cases[0].outcome == "failed"
    alone = literal.journal(
        literal.record("kernelmark", 1.5, provider="kernelmark"), run="run-02", created="2026-12-01"
    )
    (standing,) = standings("rms_norm", measured(run(literal, 0, 1.0), alone))
    assert standing.cases[0].ours is not None
    assert standing.cases[0].ours[1].speedup == pytest.approx(2.0)


def test_efficiency_is_against_the_best_one_gpu_time_of_the_run(literal: Any) -> None:
    one, four = literal.case(name="S1", axes={"S": 1}), literal.case(name="S1-g4", axes={"S": 1, "gpus": 4})
    other = literal.case(name="S2-g4", axes={"S": 2, "gpus": 4})
    lines = [
        literal.record("torch", 8.0, case=one),
        literal.record("kernelmark", 10.0, provider="kernelmark", case=one),
    ]
    lines += [literal.record("kernelmark", 2.5, provider="kernelmark", case=x) for x in (four, other)]
    first, second = scaling(measured(literal.journal(*lines)))
    assert first.one is not None
    assert first.scaled is not None
    assert (first.gpus, first.one.implementation, first.scaled.efficiency) == (4, "torch", 0.8)
    assert second.one is None
    assert second.scaled is None
    assert not scaling(measured(run(literal, 0, 1.0)))


def test_scaling_pairs_as_show_does_and_keeps_the_newest(literal: Any) -> None:
    """Training is weak and in another way on one GPU; attention of one GPU is an operator of its own."""

    def at(operator: str, gpus: int, ms: float, **fields: Any) -> Any:
        axes = {"S": 1} | ({"gpus": gpus} if gpus > 1 else {})
        return literal.record(
            "torch", ms, case=literal.case(operator=operator, name=f"{gpus}", axes=axes, **fields)
        )

    single, ddp = ({"pass_": "program", "options": {"parallel": x}} for x in ("single", "ddp"))
    runs = [
        literal.journal(
            at("attention", 1, 8.0),
            at("attention_context_parallel", 4, four),
            at("train", 1, 90.0, **single),
            at("train", 4, 100.0, **ddp),
            run=name,
            created=f"2026-11-{day}T00:00:00Z",
        )
        for name, day, four in (("old", 20, 4.0), ("new", 21, 2.5))
    ]
    attention, train = scaling(measured(*runs))
    assert attention.scaled is not None
    assert attention.one is not None
    assert (attention.run.name, attention.one.operator) == ("new", "attention")
    assert (attention.scaled.kind, attention.scaled.efficiency) == ("strong", 0.8)
    assert train.scaled is not None
    assert (train.scaled.kind, train.scaled.efficiency) == ("weak", 0.9)


def test_coverage_tells_never_run_from_not_ok(literal: Any) -> None:
    lines = [
        literal.record("kernelmark", 1.0, provider="kernelmark"),
        literal.record("liger", status="unavailable", reason="not installed"),
    ]
    expected = {
        "rms_norm": Expected(
            {"kernelmark": ("cuda",), "kernelmark_cpu": ("cpu",), "liger": ("cuda",), "torch": ("cuda", "cpu")},
            ("S9",),
        ),
        "rope": Expected({"torch": ("cuda",)}),
    }
    norm, rope = coverage("NVIDIA H200", "cuda", measured(literal.journal(*lines)), expected)
    assert (norm.timed, norm.never, norm.cases_never) == (("kernelmark",), ("torch",), ("S9",))
    assert norm.failed == {("unavailable", "not installed"): ("liger",)}
    assert (rope.run, rope.never) == (False, ("torch",))


def test_lines_of_the_journal_are_kept(literal: Any) -> None:
    first, second = (literal.record("torch", 1.0, replicate=x) for x in range(2))
    journal = literal.journal(literal.footer(), first, literal.footer(), second, second)
    assert journal.lines == (3, 5)
    assert facts(journal)[0].lines == (3, 5)
