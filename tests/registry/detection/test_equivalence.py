"""Two one-sided tests on paired differences: on literal data, and how often they err."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.registry.detection.comparison import Comparison, Side
from kernelmark.registry.detection.decision import decide, stage_one, stored
from kernelmark.registry.detection.equivalence import MINIMUM_PAIRS, equivalent
from kernelmark.registry.store.metric import Equivalence, Metric
from kernelmark.registry.store.record import Key

BASE = (2.000, 2.010, 1.990, 2.005, 1.995)
RULE = Equivalence(0.01)


def moved(factor: float, spread: float = 0.0) -> tuple[float, ...]:
    return tuple(x * factor * (1 + spread * (-1) ** i) for i, x in enumerate(BASE))


@pytest.mark.parametrize(
    ("factor", "spread", "better", "kind"),
    [
        (1.0, 0.0, "lower", "equivalent"),
        (1.005, 0.001, "lower", "equivalent"),
        (1.03, 0.001, "lower", "worse"),
        (1.03, 0.001, "higher", "better"),
        (0.97, 0.001, "lower", "better"),
        (0.97, 0.001, "neither", "worse"),
        (1.0, 0.05, "lower", "inconclusive"),
        (1.01, 0.002, "lower", "inconclusive"),
    ],
)
def test_the_interval_of_the_paired_difference_decides(factor, spread, better, kind):
    found = equivalent(BASE, moved(factor, spread), RULE, better)
    assert found.kind == kind
    assert found.pairs == 5
    assert found.low <= found.change <= found.high


def test_the_interval_is_that_of_students_t_by_hand():
    found = equivalent((1.0, 1.0, 1.0, 1.0), (1.01, 1.02, 1.03, 1.04), Equivalence(0.5))
    half = 3.182446 * math.sqrt(5 / 3) * 0.01 / 2
    assert (found.change, found.low, found.high) == pytest.approx((0.025, 0.025 - half, 0.025 + half), rel=1e-6)


def test_an_absolute_margin_is_in_the_metrics_unit():
    accuracy = (0.901, 0.899, 0.900), (0.8985, 0.8965, 0.8975)
    assert equivalent(*accuracy, Equivalence(0.005, relative=False), "higher").kind == "equivalent"
    assert equivalent(*accuracy, Equivalence(0.001, relative=False), "higher").kind == "worse"


def test_a_base_of_0_has_no_fractions_and_no_more_pairs_are_asked_for():
    found = equivalent((0.0,) * 6, (0.0,) * 6, RULE)
    assert (found.kind, found.needed) == ("inconclusive", None)
    assert found.reason == "0 usable pairs, at least 3 needed; 6 with a base of 0, of which nothing is a fraction"
    sides = Side(medians=(0.0,) * 6), Side(medians=(0.0,) * 6)
    row = Comparison(Key("converge", "a", "kernelmark", "cold"), *sides, metric=Metric("loss", "bit", judged=RULE))
    asked = []
    (verdict,) = decide([row], lambda wanted: asked.append(wanted) or []).verdicts
    assert (verdict.kind, asked) == ("inconclusive", [])


ACCURACY = Metric("accuracy", "1", "higher", judged=Equivalence(0.01, relative=False))


def test_stored_runs_say_that_equivalence_takes_pairs():
    """However many runs of unchanged code there are: of an accuracy of 0 there is no mean of logarithms."""
    for value in (0.0, 0.7):
        sides = Side(medians=(value,) * 5), Side(medians=(value,) * 5)
        row = Comparison(Key("quality", "a", "kernelmark", "cold"), *sides, metric=ACCURACY)
        (verdict,) = stored([row]).verdicts
        assert (verdict.kind, verdict.reason) == (
            "inconclusive",
            "equivalence is judged on pairs: by an A/B",
        )


@pytest.mark.parametrize("lost", [0.0, 0.5, -0.2])
def test_a_value_of_0_or_below_is_judged_like_any_other(lost):
    """As a row's primary metric, and beside one: an accuracy that fell to 0 is no lack of measurements."""
    before, after = (0.9, 0.91, 0.9, 0.9, 0.905, 0.9), (lost,) * 6
    key, times = Key("a", "b", "c", "cold"), (1.0, 1.01, 0.99, 1.0, 1.02, 1.0)
    alone = Comparison(key, Side(medians=before), Side(medians=after), metric=ACCURACY)
    sides = [Side(medians=times, metrics={"accuracy": x}) for x in (before, after)]
    (own,), (timed,) = (
        stage_one([x]).verdicts for x in (alone, Comparison(key, sides[0], sides[1], beside=(ACCURACY,)))
    )
    assert (own.kind, own.current_value, own.notes) == ("regression", lost, ())
    assert [(x.metric, x.base, x.current) for x in timed.flags] == [("accuracy", 0.9, lost)]


def test_what_is_missing_is_left_out_and_too_little_is_inconclusive():
    current = (2.0, math.nan, 1.99, math.inf, math.nan)
    found = equivalent(BASE, current, RULE)
    assert (found.kind, found.pairs, found.needed) == ("inconclusive", 2, MINIMUM_PAIRS - 2)
    assert equivalent((0.0,) * 5, BASE, RULE).pairs == 0  # no fraction of 0


def test_how_many_more_pairs_would_settle_it_is_said():
    found = equivalent(BASE, moved(1.0, 0.012), RULE)
    assert found.kind == "inconclusive"
    assert f"about {found.needed + 5} pairs in all would settle it" in found.reason
    assert "more than 100 pairs needed" in equivalent(BASE, moved(1.01, 0.02), RULE).reason


@pytest.mark.parametrize("sd", [0.001, 0.003])
def test_errors_are_as_rare_as_the_level_says(sd):
    """Truly at the margin "equivalent" and "worse" may each be said in 2.5 % of cases."""
    generator = np.random.default_rng(1)
    at, within = {"equivalent": 0, "worse": 0}, 0
    for _ in range(4000):
        noise = generator.normal(0, sd, (2, 8))
        at_margin = equivalent((1.0,) * 8, tuple(1.01 + noise[0]), RULE)
        if at_margin.kind in at:
            at[at_margin.kind] += 1
        within += equivalent((1.0,) * 8, tuple(1.002 + noise[1]), RULE).kind == "worse"
    assert all(abs(x / 4000 - 0.025) < 0.008 for x in at.values())
    assert within / 4000 < 0.001


finite = st.floats(-1e6, 1e6)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=12), st.floats(1e-9, 1e6), st.booleans())
def test_anything_gets_an_answer(pairs, margin, relative):
    base, current = zip(*pairs, strict=True) if pairs else ((), ())
    found = equivalent(base, current, Equivalence(margin, relative))
    assert found.kind in ("equivalent", "worse", "better", "inconclusive")
    assert found.reason


@settings(max_examples=100)
@given(st.lists(st.tuples(finite, finite), min_size=3, max_size=12), st.floats(1e-3, 1e6))
def test_swapping_the_sides_mirrors_an_absolute_difference(pairs, margin):
    base, current = zip(*pairs, strict=True)
    there = equivalent(base, current, Equivalence(margin, relative=False))
    back = equivalent(current, base, Equivalence(margin, relative=False))
    mirror = {"worse": "better", "better": "worse"}
    assert back.kind == mirror.get(there.kind, there.kind)


def test_a_curve_is_never_judged():
    with pytest.raises(ValueError, match="curves are not judged"):
        Metric("loss", "nat", judged=RULE, abscissa="step")
