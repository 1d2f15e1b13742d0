"""How ours stands where models call it, on literal journals."""

from __future__ import annotations

from typing import Any

import pytest
from kernelmark.registry.analysis.calls import by_model, by_operator, calls, untold
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.views import calls_table


def run(literal: Any, **request: Any) -> Journal:
    """Ours twice as fast, ours half as fast, ours unsupported, and ours wrong without eager PyTorch."""
    a, b, c, d = (literal.case(name=x) for x in "abcd")
    lines = [
        literal.record("kernelmark", 1.0, case=a),
        literal.record("torch", 4.0, case=a),
        literal.record("liger", 2.0, case=a),
        literal.record("kernelmark", 2.0, case=b),
        literal.record("torch", 3.0, case=b),
        literal.record("liger", 1.0, case=b),
        literal.record("kernelmark", case=c, status="unsupported", reason="no odd rows"),
        literal.record("torch", 8.0, case=c),
        literal.record("liger", 2.0, case=c),
        literal.record("kernelmark", case=d, status="incorrect", reason="NaN"),
        literal.record("liger", 2.0, case=d),
        literal.record("quack", case=a, status="unavailable", reason="quack is not installed"),
    ]
    models = {"rms_norm/a": ["m", "n"], "rms_norm/b": ["m"], "rms_norm/c": ["m"], "rms_norm/d": ["n"]}
    return literal.journal(*lines, request={"models": models, "peers": {"rms_norm": ["liger"]}} | request)


def test_a_call_that_ours_cannot_make_counts_as_eager(literal: Any) -> None:
    found = calls(run(literal))
    assert [(x.case, x.ratio, x.peer, x.by_eager) for x in found] == [
        ("a", 2.0, "liger", False),
        ("b", 0.5, "liger", False),
        ("c", 0.25, "liger", True),
    ]


def test_quantiles_by_model(literal: Any) -> None:
    found = by_model(calls(run(literal)))
    assert list(found) == ["m", "n"]
    m, n = found["m"], found["n"]
    assert (m.calls, m.by_eager, m.lowest, m.quarter, m.median, m.three_quarters, m.highest) == (
        3, 1, 0.25, 0.375, 0.5, 1.25, 2.0,
    )  # fmt: skip
    assert m.geometric == pytest.approx(0.25 ** (1 / 3))
    assert (n.calls, n.lowest, n.median, n.highest, n.geometric) == (1, 2.0, 2.0, 2.0, 2.0)


def test_nothing_is_said_of_an_operator_without_all_its_peers(literal: Any) -> None:
    journal = run(literal)
    (norm,) = by_operator(journal, calls(journal))
    assert norm.shown
    journal = run(literal, peers={"rms_norm": ["liger", "quack", "fla"]})
    (norm,) = by_operator(journal, calls(journal))
    assert not norm.shown
    assert norm.absent == (("quack", "unavailable: quack is not installed"), ("fla", "it was not asked for"))


def test_the_tables(literal: Any) -> None:
    found = calls_table.table(run(literal, peers={"rms_norm": ["quack"]})).splitlines()
    assert found[2:6] == [
        "| model | calls | worst | 25 % | median | 75 % | best | geometric mean |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        "| m | 3, 1 by eager | 0.25× | 0.38× | 0.50× | 1.25× | 2.00× | 0.63× |",
        "| n | 1 | 2.00× | 2.00× | 2.00× | 2.00× | 2.00× | 2.00× |",
    ]
    assert found[9].endswith("| not shown: quack did not run (unavailable: quack is not installed) |")
    assert found[13] == "| rms\\_norm c (eager's time) | liger | 0.25× | m |"


def test_a_run_of_no_model_is_refused(literal: Any) -> None:
    with pytest.raises(InputError, match="--plan shapes"):
        calls_table.table(literal.journal(literal.record("kernelmark"), literal.record("torch")))


def test_one_sentence_of_all_drawn_sizes(literal: Any) -> None:
    journal = run(literal)
    assert untold(journal, calls(journal)) == (("rms_norm", "d"),)
    text = calls_table.drawn(journal)
    assert "Of 3 of 4 cases, 2 are worse than 0.90× of the fastest peer." in text
    assert "(eager's time) | liger | 0.25× | m |" in text
    even = [literal.case(name=x) for x in "ab"]
    lines = [literal.record("kernelmark", 1.0, case=x) for x in even] + [
        literal.record("liger", 0.91, case=even[0])
    ]
    said = calls_table.drawn(literal.journal(*lines))
    assert "Of 1 of 2 cases none is worse" in said
    assert "such as rms\\_norm b" in said
    whole = literal.journal(*lines, literal.record("liger", 3.0, case=even[1]))
    assert "None of 2 cases is worse than 0.90× of the fastest peer." in calls_table.drawn(whole)


def test_minutes_of_tuning_for_one_size_are_no_peer(literal: Any) -> None:
    case = literal.case(name="a")
    times = {"kernelmark": 1.0, "liger": 1.1, "torch_compile_max_autotune": 0.1}
    journal = literal.journal(*(literal.record(x, ms, case=case) for x, ms in times.items()))
    assert "None of 1 cases" in calls_table.drawn(journal)


def test_a_run_without_a_peer_has_no_sentence(literal: Any) -> None:
    with pytest.raises(InputError, match="--plan widths"):
        calls_table.drawn(literal.journal(literal.record("kernelmark", 1.0)))
