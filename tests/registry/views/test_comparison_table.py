"""Two runs side by side: literal runs, intervals worked out by hand, and what is never compared."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.registry.analysis.statistics import logarithms
from kernelmark.registry.errors import InputError
from kernelmark.registry.views.comparison_page import comparison_page
from kernelmark.registry.views.comparison_table import (
    RowComparison,
    Run,
    RunComparison,
    compare,
    compared,
    ratio_interval,
)
from kernelmark.registry.views.table import render


def run(literal: Any, medians: list[float], name: str = "torch", **header: Any) -> Any:
    lines = [literal.record(name, x, replicate=i) for i, x in enumerate(medians)]
    return literal.journal(*lines, literal.footer(), **header)


def only(comparison: RunComparison) -> RowComparison:
    (row,) = comparison.rows
    return row


def test_ratio_is_second_over_first_with_welchs_interval_by_hand(literal: Any) -> None:
    # Logarithms 0, 1, 2 (variance 1, n 3) and 3, 3, 3 (variance 0): Welch has 2 degrees of freedom.
    first, second = [math.exp(x) for x in (0, 1, 2)], [math.exp(3)] * 3
    row = only(compare(run(literal, first), run(literal, second)))
    half = 4.302652729749464 / math.sqrt(3)
    assert row.outcome == "compared"
    assert row.ratio == pytest.approx(math.exp(2))
    assert row.ratio_low == pytest.approx(math.exp(2 - half))
    assert row.ratio_high == pytest.approx(math.exp(2 + half))
    assert (row.first_value, row.first_replicates, row.second_replicates) == (pytest.approx(math.e), 3, 3)


def test_welchs_degrees_of_freedom_with_unequal_sides() -> None:
    # Variances of the logarithms 0.5 (n 2) and 1 (n 3): parts 1/4 and 1/3, so by Satterthwaite
    # (1/4 + 1/3)² / ((1/4)² / 1 + (1/3)² / 2) = (49/144) / (17/144) = 49/17.
    from scipy.special import stdtrit

    value, low, high = ratio_interval(*logarithms([[1.0, math.e], [1.0, math.e, math.e**2]]))
    half = float(stdtrit(49 / 17, 0.975)) * math.sqrt(7 / 12)
    assert value == pytest.approx(math.e / ((1 + math.e) / 2))
    assert low == pytest.approx(math.exp(0.5 - half))
    assert high == pytest.approx(math.exp(0.5 + half))


def test_one_process_on_a_side_gives_a_ratio_without_an_interval(literal: Any) -> None:
    row = only(compare(run(literal, [1.0]), run(literal, [2.0, 2.0])))
    assert (row.ratio, row.ratio_low, row.ratio_high) == (2.0, None, None)


def test_no_spread_at_all_gives_a_point() -> None:
    assert ratio_interval(*logarithms([[1.0, 1.0], [2.0, 2.0]])) == (2.0, pytest.approx(2.0), pytest.approx(2.0))


def test_a_time_of_zero_has_no_ratio() -> None:
    assert ratio_interval(*logarithms([[0.0, 1.0], [1.0, 1.0]])) == (None, None, None)


def test_rows_without_a_ratio_are_not_compared(literal: Any) -> None:
    """An accuracy of 0 on both sides, a rate that fell to 0: neither is undecided."""
    for first, second in (([0.0, 0.0], [0.0, 0.0]), ([1.0, 1.0], [0.0, 0.0])):
        comparison = compare(run(literal, first), run(literal, second))
        row = only(comparison)
        assert (row.outcome, row.first_value, row.second_value) == ("not comparable", first[0], second[0])
        assert "of such there is no ratio" in (row.reason or "")
        assert comparison.compared == ()


positive = st.lists(st.floats(1e-4, 1e4), min_size=2, max_size=6)


@given(positive, positive)
def test_the_interval_holds_the_ratio_and_turns_round_with_the_sides(a: list[float], b: list[float]) -> None:
    value, low, high = ratio_interval(*logarithms([a, b]))
    back, back_low, back_high = ratio_interval(*logarithms([b, a]))
    assert value is not None
    assert low is not None
    assert high is not None
    assert low <= value <= high
    assert back == pytest.approx(1 / value)
    assert back_low == pytest.approx(1 / high)
    assert back_high == pytest.approx(1 / low)


def test_a_run_compared_with_itself_is_all_ones(literal: Any) -> None:
    journal = run(literal, [1.0, 1.1, 0.9])
    row = only(compare(journal, journal))
    assert row.ratio == pytest.approx(1.0)
    assert row.ratio_low is not None
    assert row.ratio_high is not None
    assert row.ratio_low < 1 < row.ratio_high
    assert row.notes == ()


def test_different_conditions_are_named_and_nothing_is_compared(literal: Any) -> None:
    first = run(literal, [1.0, 1.0], conditions={"gpu": "H200", "driver": "580", "ecc": True, "old": 1}, key="a")
    second = run(literal, [1.0, 1.0], conditions={"gpu": "H200", "driver": "590", "ecc": None, "new": 2}, key="b")
    comparison = compare(first, second)
    assert [(x.condition, x.first, x.second) for x in comparison.differences] == [
        ("driver", "580", "590"),
        ("ecc", True, None),
        ("old", 1, None),
        ("new", None, 2),
    ]
    row = only(comparison)
    assert (row.outcome, row.ratio) == ("not comparable", None)
    assert row.reason == "conditions differ: driver, ecc, old, new"
    assert (row.first_value, row.second_value) == (1.0, 1.0)
    assert comparison.compared == ()


def test_runs_may_differ_in_the_condition_that_is_compared(literal: Any) -> None:
    alone = Run(run(literal, [1.0, 1.01], conditions={"gpu": "H200"}, key="a"))
    beside = Run(run(literal, [1.1, 1.11], conditions={"gpu": "H200", "parallel": "4"}, key="b"))
    row = only(compared(alone, beside, across=["parallel"]))
    assert (row.outcome, row.standing, row.ratio) == ("compared", "slower", pytest.approx(1.105 / 1.005))
    other = Run(run(literal, [1.1], conditions={"gpu": "H100", "parallel": "4"}, key="c"))
    row = only(compared(alone, other, across=["parallel"]))
    assert (row.outcome, row.reason) == ("not comparable", "conditions differ: gpu")
    redefined = literal.record(case=literal.case(spec="ffffffffffff"))
    conditions = {"gpu": "H200", "parallel": "4"}
    changed = Run(literal.journal(redefined, conditions=conditions, key="b"))
    row = only(compared(alone, changed, across=["parallel"]))
    assert (row.outcome, row.reason) == ("not comparable", "the case's definition changed")
    with pytest.raises(InputError, match=r"do not differ in the condition 'driver'; they differ in: parallel\."):
        compared(alone, beside, across=["driver"])
    with pytest.raises(InputError, match="they do not differ in any"):
        compared(alone, alone, across=["parallel"])


def test_keys_that_differ_without_a_condition_to_blame(literal: Any) -> None:
    row = only(compare(run(literal, [1.0]), run(literal, [1.0], key="other")))
    assert (row.outcome, row.reason) == ("not comparable", "the runs' keys differ")


def test_a_changed_definition_and_another_timer_are_named(literal: Any) -> None:
    first = literal.journal(literal.record())
    changed = literal.journal(literal.record(case=literal.case(spec="ffffffffffff"), timer="graph"))
    row = only(compare(first, changed))
    assert row.outcome == "not comparable"
    assert row.reason == "the case's definition changed; timer events and graph"


def test_rows_of_one_side_only(literal: Any) -> None:
    first = literal.journal(literal.record("torch"), literal.record("old"))
    second = literal.journal(literal.record("torch"), literal.record("new"))
    outcomes = {x.implementation: x.outcome for x in compare(first, second).rows}
    assert outcomes == {"torch": "compared", "old": "only in first", "new": "only in second"}


def test_a_row_without_a_time_says_why(literal: Any) -> None:
    first = literal.journal(literal.record())
    second = literal.journal(literal.record(status="crashed", reason="signal 11"))
    row = only(compare(first, second))
    assert (row.outcome, row.reason) == ("not measured", "second run: crashed: signal 11")
    assert (row.first_value, row.second_value) == (1.0, None)


def test_a_replicate_of_a_wrong_row_is_not_compared(literal: Any) -> None:
    wrong = [literal.record(), literal.record(replicate=1, status="incorrect", reason="NaN")]
    row = only(compare(literal.journal(literal.record()), literal.journal(*wrong)))
    assert (row.outcome, row.reason) == ("not measured", "second run: incorrect: NaN")


def test_another_version_of_the_library_is_named(literal: Any) -> None:
    known = {"gpu": "NVIDIA H200", "python": "3.11.7"}
    first, second = (literal.journal(literal.record(version=x), conditions=known) for x in ("2.13", None))
    row = only(compare(first, second))
    assert (row.outcome, row.reason) == ("not comparable", "library version 2.13 and unknown")


def test_older_journals_versions_and_tuning_are_noted_and_do_not_forbid_comparing(literal: Any) -> None:
    first = literal.journal(literal.record(version="2.13", tuning={"k": "BLOCK=64"}))
    second = literal.journal(literal.record(version=None, tuning={"k": "BLOCK=128"}))
    row = only(compare(first, second))
    assert row.outcome == "compared"
    assert row.notes == ("version 2.13 → unknown", "tuned to another configuration")


def test_other_judged_metrics_are_flags_by_the_detectors_rule(literal: Any) -> None:
    """Memory by 6 % of its median, energy by its interval, the error only where all of it exceeds the other's."""

    def measured(memory: float, energy: float, error: float) -> Any:
        return literal.journal(
            *(
                literal.record(beside={"memory": memory, "energy": energy + i / 1e3, "error": error}, replicate=i)
                for i in range(4)
            ),
            replicates=4,
        )

    comparison = compare(measured(100.0, 1.0, 1e-3), measured(106.0, 1.0, 5e-3))
    row = only(comparison)
    assert row.beside == ("memory", "energy", "error")
    assert [x.reason for x in row.flags] == [
        "peak memory +6.0 %",
        "relative error grew 5.0 times: at most 0.001 before, at least 0.005 now",
    ]
    assert [(x.metric, x.rows, x.worse) for x in comparison.beside] == [
        ("memory", 1, 1), ("energy", 1, 0), ("error", 1, 1),
    ]  # fmt: skip
    text = render(comparison_page(comparison), 200)
    assert "  memory: 1 of 1 row worse\n  energy: none of 1 row worse\n  error: 1 of 1 row worse\n" in text
    assert "    rms_norm B2-S4-D8-bf16-forward torch: peak memory +6.0 %\n" in text


def test_cache_states_do_not_mix(literal: Any) -> None:
    comparison = compare(
        literal.journal(literal.record(cache="hot")), literal.journal(literal.record(cache="cold"))
    )
    assert [x.outcome for x in comparison.rows] == ["only in first", "only in second"]


def test_to_builtins_is_plain_json(literal: Any) -> None:
    told = compare(run(literal, [1.0, 1.0]), run(literal, [2.0, 2.0], run="second")).to_builtins()
    assert json.loads(json.dumps(told)) == told
    assert (told["compared"], told["second"]["run"], told["differences"]) == (1, "second", [])
    assert told["rows"][0]["pass"] == "forward"


@pytest.mark.parametrize(
    ("first", "second", "better", "standing"),
    [
        ([1.0, 1.01], [2.0, 2.01], "lower", "slower"),
        ([1.0, 1.01], [2.0, 2.01], "higher", "faster"),
        ([2.0, 2.01], [1.0, 1.01], "lower", "faster"),
        ([1.0, 1.5], [1.1, 1.2], "lower", "undecided"),
        ([1.0], [2.0], "lower", "undecided"),  # one process decides nothing
    ],
)
def test_how_a_row_stands(
    literal: Any, first: list[float], second: list[float], better: str, standing: str
) -> None:
    row = only(compare(run(literal, first), run(literal, second)))
    assert msgspec.structs.replace(row, better=better).standing == standing
