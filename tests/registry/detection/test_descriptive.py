"""Statistics that decide nothing, against values computed elsewhere."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.registry.detection.descriptive import (
    WHY_NOT,
    Descriptive,
    describe,
    describe_records,
    tukey_outliers,
)
from kernelmark.registry.store.record import Case, Measurement, Record
from scipy import stats

# Student's sleep data (Biometrika 6 (1908) 20); Welch's t and p as R's t.test(extra ~ group) prints them.
SLEEP_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SLEEP_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_welch_on_the_sleep_data() -> None:
    row = describe(SLEEP_1, SLEEP_2)
    assert row.welch_t == pytest.approx(1.8608, abs=5e-5)
    assert row.welch_p == pytest.approx(0.07939, abs=5e-6)
    assert row.cohens_d == pytest.approx(0.8321811, abs=1e-6)
    assert row.mann_whitney_p == pytest.approx(0.06932758, abs=1e-6)
    assert (row.samples_base, row.samples_current) == (10, 10)


def test_agreement_with_scipy() -> None:
    x, y = [1.0, 1.2, 0.9, 1.1, 1.05, 1.3], [1.2, 1.25, 1.4, 1.1]
    expected = stats.ttest_ind(y, x, equal_var=False)
    row = describe(x, y)
    assert row.welch_t == pytest.approx(float(expected.statistic))
    assert row.welch_p == pytest.approx(float(expected.pvalue))


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([1.0, 1.0, 2.0], [2.0, 3.0, 3.0, 4.0]),
        ([5.0, 4.0, 4.0, 3.0, 3.0], [3.0, 2.0, 1.0]),
        ([1.0], [1.0, 2.0]),
        ([1.0, 2.0, 2.0, 9.0], [2.0, 2.0, 3.0, 3.0]),
    ],
)
def test_small_samples_with_ties_are_counted_out(x: list[float], y: list[float]) -> None:
    ranks = stats.rankdata(x + y)
    sums = [sum(found) for found in itertools.combinations(ranks, len(x))]
    seen = sum(ranks[: len(x)])
    tails = sum(s <= seen for s in sums), sum(s >= seen for s in sums)
    p = describe(x, y).mann_whitney_p
    assert p == pytest.approx(min(1.0, 2 * min(tails) / len(sums)))
    assert p == describe(y, x).mann_whitney_p


def test_outliers_literal() -> None:
    assert tukey_outliers([1.0, 2.0, 3.0, 4.0, 100.0, -100.0]) == 2
    assert tukey_outliers([1.0, 2.0, 3.0, 4.0]) == 0
    assert tukey_outliers([1.0, 1.0, 1.0, 1.0, 1.0, 1.1]) == 1
    assert tukey_outliers([1.0, 1e9]) == 0


def test_too_little_and_constant_data() -> None:
    assert describe([], []) == Descriptive(None, None, None, None, 0, 0, 0, 0)
    assert describe([1.0], [2.0]).welch_t is None
    constant = describe([1.0] * 5, [1.0] * 5)
    assert (constant.welch_t, constant.cohens_d, constant.mann_whitney_p) == (None, None, 1.0)
    assert describe([1.0, math.nan], [2.0, math.inf]).samples_base == 1


def test_each_says_why_it_does_not_decide() -> None:
    fields = {name for name in Descriptive.__struct_fields__ if not name.startswith("samples")}
    assert {name.removesuffix("_base").removesuffix("_current") for name in fields} == set(WHY_NOT)


def test_records_pair_up_over_all_processes() -> None:
    def record(name: str, replicate: int, *samples: float) -> Record:
        case = Case("rmsnorm", name, {}, {}, "fp32", "forward", "s", 1, 1)
        measurement = Measurement({"latency": samples}, "clock")
        return Record(case, "torch", "torch", None, replicate, 0, "hot", "ok", measurement=measurement)

    base = [record("a", 0, 1.0, 2.0), record("a", 1, 3.0), record("b", 0, 1.0)]
    (row,) = describe_records(base, [record("a", 0, 2.0, 3.0)]).values()
    assert (row.samples_base, row.samples_current) == (3, 2)
    # Of a rate more is better: the same numbers say that the current side is the quicker one.
    (turned,) = describe_records(base, [record("a", 0, 2.0, 3.0)], {"latency"}).values()
    assert row.cohens_d is not None
    assert turned.cohens_d == -row.cohens_d
    assert turned.welch_p == row.welch_p


def test_scipy_stats_is_not_imported_to_decide() -> None:
    code = (
        "import sys, kernelmark.registry.detection.decision, kernelmark.registry.detection.verdict_output, "
        "kernelmark.registry.detection.changepoints, kernelmark.registry.detection.descriptive; "
        "sys.exit('scipy.stats' in sys.modules or 'rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@settings(max_examples=50)
@given(st.lists(st.floats(1e-6, 1e6), max_size=12), st.lists(st.floats(1e-6, 1e6), max_size=12))
def test_swapping_turns_the_signs(x: list[float], y: list[float]) -> None:
    there, back = describe(x, y), describe(y, x)
    for a, b in ((there.welch_t, back.welch_t), (there.cohens_d, back.cohens_d)):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a == pytest.approx(-b)
