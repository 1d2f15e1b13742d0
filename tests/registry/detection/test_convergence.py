"""Verdicts on training another way, on literal losses and curves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kernelmark.registry.detection.convergence import (
    at_step,
    matched,
    rate_tried,
    steps_ratio,
)
from kernelmark.registry.store.metric import Equivalence

RULE = Equivalence(margin=0.0025)
BASE = {0: 1.500, 1: 1.510, 2: 1.495, 3: 1.505, 4: 1.502}
WOBBLE = (0.0002, -0.0003, 0.0001, 0.0004, -0.0001)


def arm(change: float, seeds: int = 5, scale: float = 1.0) -> dict[int, float]:
    return {seed: BASE[seed] * (1 + change + scale * WOBBLE[seed]) for seed in range(seeds)}


@pytest.mark.parametrize(
    ("change", "kind"),
    [(0.0, "equivalent"), (0.0018, "equivalent"), (0.005, "worse"), (-0.005, "better"), (0.0025, "inconclusive")],
)
def test_a_loss_is_equivalent_within_a_quarter_of_a_percent(change, kind):
    assert at_step(BASE, arm(change), RULE).kind == kind


@pytest.mark.parametrize(("seeds", "more"), [(4, 1), (3, 2), (2, 3), (0, 5)])
def test_fewer_than_five_seeds_say_nothing_and_how_many_are_missing(seeds, more):
    found = at_step(BASE, arm(0.0, seeds), RULE)
    assert found.kind == "inconclusive"
    assert found.needed == more
    assert found.reason.startswith(f"{seeds} of at least 5 seeds, {more} more needed")


@pytest.mark.parametrize(("side", "value"), [("arm", math.nan), ("base", 0.0)])
def test_a_seed_without_a_usable_value_is_none_of_five(side, value):
    base, other = dict(BASE), arm(0.0)
    {"arm": other, "base": base}[side][3] = value
    found = at_step(base, other, RULE)
    assert (found.kind, found.pairs, found.needed) == ("inconclusive", 4, 1)
    assert found.reason.startswith("4 of at least 5 seeds, 1 more needed; 1 without a usable value; so far")


def test_four_seeds_at_the_margin_do_not_promise_that_one_more_would_settle_it():
    """As of an arm in 8 bits after 10,000 steps: +.22 %, apart by .1 %."""
    apart = {0: 0.0010, 1: 0.0020, 2: 0.0025, 3: 0.0034}
    found = at_step(BASE, {x: BASE[x] * (1 + y) for x, y in apart.items()}, RULE)
    assert (found.kind, found.pairs, found.needed) == ("inconclusive", 4, None)
    assert found.reason.startswith("4 of at least 5 seeds, more than 100 needed; so far +0.22% [")
    near = at_step(BASE, arm(0.0, 4), RULE)
    assert near.needed == 1, "of four that are within the margin a fifth decides"


def test_noisy_seeds_are_inconclusive_and_say_how_many_more():
    found = at_step(BASE, arm(0.0, scale=12), RULE)
    assert found.kind == "inconclusive"
    assert found.needed
    assert found.needed > 1


def test_an_arm_worsened_by_half_a_percent_is_called_worse_nine_times_in_ten():
    generator = np.random.default_rng(7)
    calls = 0
    for _ in range(100):
        drawn = {x: BASE[x] * (1 + 0.005 + generator.normal(0, 0.001)) for x in BASE}
        calls += at_step(BASE, drawn, RULE).kind == "worse"
    assert calls >= 90


def curve(speed: float = 1.0, steps: int = 100) -> list[tuple[float, float]]:
    """A loss that falls as a power of the step, some times as fast."""
    return [(float(x), 2.0 * (1 + speed * x / 10) ** -0.3) for x in range(0, steps + 1, 10)]


def test_the_same_curve_takes_as_many_steps_noise_or_not():
    noisy = [(x, y * (1.01 if x in (20.0, 90.0) else 1)) for x, y in curve()]
    found = steps_ratio(dict.fromkeys(range(5), noisy), dict.fromkeys(range(5), noisy))
    assert (found.kind, found.ratio, found.low, found.high) == ("within", 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("speed", "kind", "ratio"),
    [(1.02, "within", 1 / 1.02), (0.97, "within", 1 / 0.97), (0.9, "exceeded", 100 / 95)],
)
def test_the_105_percent_rule(speed, kind, ratio):
    found = steps_ratio(dict.fromkeys(range(5), curve()), {x: curve(speed) for x in range(5)})
    assert found.kind == kind
    assert found.ratio == pytest.approx(ratio, rel=2e-3)
    assert found.unreached == (5 if kind == "exceeded" else 0)


def test_one_seed_that_never_gets_there_is_no_pass():
    base = dict.fromkeys(range(5), curve())
    found = steps_ratio(base, {**base, 3: curve(0.5)})
    assert found.kind == "inconclusive"
    assert "not reached in 1 of 5 seeds" in found.reason


def test_the_rule_needs_five_seeds_too():
    few = dict.fromkeys(range(2), curve())
    found = steps_ratio(few, few)
    assert (found.kind, found.seeds) == ("inconclusive", 2)
    assert "3 more seeds needed" in found.reason
    assert steps_ratio({0: curve()}, {1: curve()}).kind == "inconclusive"


def test_speed_at_equal_quality_is_the_ratio_of_rates_over_that_of_steps():
    base, slower = dict.fromkeys(range(5), curve()), {x: curve(1 / 1.04) for x in range(5)}
    rates = dict.fromkeys(range(5), 100.0), dict.fromkeys(range(5), 130.0)
    found = matched(base, slower, *rates)
    assert found is not None
    assert found.speedup == pytest.approx(1.3 / 1.04, rel=2e-3)
    assert found.low <= found.speedup <= found.high
    assert matched(base, {x: curve(0.5) for x in range(5)}, *rates) is None, "the loss was never reached"
    assert matched(base, slower, {0: 1.0}, {0: 1.0}) is None


def test_the_rate_of_the_base_is_near_the_best_of_five():
    losses = {lr: {0: abs(math.log(lr / 1e-3)) + 1} for lr in (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)}
    assert rate_tried(losses, 1e-3) is None
    assert rate_tried(losses, 2e-3) is None
    assert "from the best of 5 tried, 0.001" in str(rate_tried(losses, 4e-3))
    assert "4 rates were tried" in str(rate_tried({k: v for k, v in losses.items() if k != 4e-3}, 1e-3))


def test_the_best_rate_is_that_of_the_seeds_that_all_have():
    """Neither a lucky seed makes it, nor one more that was easier, of either side."""
    rates = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
    losses = {lr: {seed: abs(math.log(lr / 1e-3)) + 1 for seed in (0, 1, 2)} for lr in rates}
    losses[4e-3] |= {1: 0.1, 3: 0.0}
    assert rate_tried(losses, 5e-4) is None
    assert "from the best of 5 tried, 0.001" in str(rate_tried(losses, 4e-3))
    losses[2.5e-4] = {4: 1.0}
    assert "the 5 rates tried have no seed in common" in str(rate_tried(losses, 1e-3))


def test_a_base_that_gets_no_better_has_no_steps_to_compare():
    """The reason is the base, and not that curves are missing; no seed counts as unreached for it."""
    worse, right = ((0.0, 4.0), (100.0, 5.0)), ((0.0, 4.0), (100.0, 3.0))
    found = steps_ratio(dict.fromkeys(range(5), worse), dict.fromkeys(range(5), right))
    assert (found.kind, found.reason) == (
        "inconclusive",
        "the base does not get below the loss that it begins with",
    )
    base = {**dict.fromkeys(range(5), right), 5: worse}
    arm = {**dict.fromkeys(range(5), right), 5: worse}
    assert steps_ratio(base, arm).unreached == 0
    assert steps_ratio(base, {**arm, 5: ((0.0, 6.0), (100.0, 6.0))}).kind == "within"


def test_an_interval_of_five_seeds_holds_the_truth_as_often_as_it_says():
    drawn = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        base, arm = {}, {}
        for seed in range(5):
            speed = float(np.exp(drawn.normal(0, 0.02)))
            base[seed] = tuple((x, math.exp(-x / 400)) for x in range(0, 1001, 50))
            arm[seed] = tuple((x, math.exp(-x * speed / 400)) for x in range(0, 1001, 50))
        found = steps_ratio(base, arm)
        held += found.low <= 1 <= found.high
    assert held >= 0.92 * 200
