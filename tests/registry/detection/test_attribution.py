"""Attribution: literal data, planted effects, and what no data may break."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.registry.detection.attribution import CAUSES, OLD, Arm, Attribution, Cause, arms, attribute
from kernelmark.registry.detection.comparison import Noise, Options
from kernelmark.registry.store.record import Key

KEY = Key("rms_norm", "a", "kernelmark", "cold")
OPTIONS = Options()
STEADY = (1.001, 0.999, 1.002, 1.0, 0.998, 1.0, 1.001, 0.999, 1.0, 1.0)


def medians(rounds: int = 10, noise: float = 0.002, seed: int = 1, **effects: float) -> dict[Arm, list[float]]:
    """All arms, with planted effects (current / base - 1) by cause."""
    generator = np.random.default_rng(seed)
    machine = generator.normal(0, 0.02, rounds)
    out = {}
    for arm in arms(True, True, True):
        logs = machine + generator.normal(0, noise, rounds)
        for cause, effect in effects.items():
            both = arm.code and arm.environment
            if {"interaction": both}.get(cause, getattr(arm, cause, False)):
                logs = logs + math.log1p(effect)
        out[arm] = np.exp(logs).tolist()
    return out


def part(found: Attribution, cause: Cause):
    return next(x for x in found.parts if x.cause == cause)


def test_arms() -> None:
    assert arms(True, False, False) == [OLD, Arm(True, False, False)]
    assert len(arms(True, True, False)) == 4
    assert arms(True, True, True)[-1] == Arm(True, True, True)
    assert arms(True, False, True)[-1] == Arm(True, False, True)
    assert [str(x) for x in arms(False, True, False)] == [
        "old code, old environment, old tuning",
        "old code, new environment, old tuning",
    ]


def test_two_by_two_by_hand() -> None:
    """Without noise the contrasts are the logarithms' differences: 2 and 3 times as slow, together 24 times."""
    values = {(0, 0): 1.0, (1, 0): 2.0, (0, 1): 3.0, (1, 1): 24.0}
    found = attribute(KEY, {Arm(bool(c), bool(e), False): [x] * 4 for (c, e), x in values.items()}, OPTIONS)
    assert [x.cause for x in found.parts] == ["code", "environment", "interaction"]
    assert [x.change for x in found.parts] == pytest.approx([1.0, 2.0, 3.0], rel=1e-6)
    assert found.change == pytest.approx(23.0)
    shares = [math.log(x) / math.log(24) for x in (2, 3, 4)]
    assert [x.share for x in found.parts] == pytest.approx(shares, rel=1e-6)
    assert found.causes == ("interaction", "environment", "code")
    assert found.rounds == 4


@pytest.mark.parametrize(
    ("effects", "causes"),
    [
        ({"code": 0.05}, ("code",)),
        ({"environment": 0.05}, ("environment",)),
        ({"tuning": 0.05}, ("tuning",)),
        ({"interaction": 0.05}, ("interaction",)),
        ({"code": 0.10, "environment": 0.05}, ("code", "environment")),
        ({"environment": 0.10, "code": -0.03}, ("environment",)),
    ],
)
def test_what_was_planted_is_named(effects: dict[str, float], causes: tuple[str, ...]) -> None:
    found = attribute(KEY, medians(**effects), OPTIONS)
    assert found.causes == causes
    assert found.reason == " and ".join(causes)
    for cause in CAUSES:
        one = part(found, cause)
        assert one.low - 0.004 < effects.get(cause, 0.0) < one.high + 0.004
    assert sum(x.share or 0 for x in found.parts) == pytest.approx(1)


def test_nothing_planted_is_undecided() -> None:
    found = attribute(KEY, medians(noise=0.01), OPTIONS)
    assert found.causes == ()
    assert "not slower beyond doubt" in found.reason
    # A total that may be 0 cannot be shared out.
    assert all(x.share_low is None and x.share_high is None for x in found.parts)


def test_a_change_below_what_is_tolerated_names_nobody() -> None:
    found = attribute(KEY, medians(noise=0.0002, code=0.006), OPTIONS)
    assert found.causes == ()
    assert "no part is slower beyond doubt by more than is tolerated" in found.reason


def test_one_factor_has_the_whole_share() -> None:
    found = attribute(KEY, {OLD: STEADY, Arm(True, False, False): [1.1 * x for x in reversed(STEADY)]}, OPTIONS)
    assert found.causes == ("code",)
    one = part(found, "code")
    assert (one.share, one.share_low, one.share_high) == pytest.approx((1, 1, 1))
    assert one.change == pytest.approx(0.1, abs=0.003)


def test_a_bad_process_does_not_move_the_parts() -> None:
    data = medians(code=0.05)
    data[OLD][3] *= 2
    found = attribute(KEY, data, OPTIONS)
    assert found.causes == ("code",)
    assert part(found, "code").change == pytest.approx(0.05, abs=0.006)


def test_what_is_known_of_the_spread_narrows_the_intervals() -> None:
    data = medians(rounds=4, code=0.05)
    alone, told = (attribute(KEY, data, OPTIONS, noise=x) for x in (None, Noise(2 * 0.001**2, 40.0)))
    assert part(told, "code").high - part(told, "code").low < part(alone, "code").high - part(alone, "code").low


def test_rounds_without_a_time_are_left_out() -> None:
    data = medians(code=0.05)
    data[OLD][0] = math.nan
    data[Arm(True, True, False)][1] = 0.0
    assert attribute(KEY, data, OPTIONS).rounds == 8
    data[OLD][2:9] = [math.inf] * 7
    found = attribute(KEY, data, OPTIONS)
    assert (found.parts, found.causes, found.reason) == ((), (), "1 of 10 rounds usable, at least 3 needed")
    assert attribute(KEY, {}, OPTIONS).causes == ()
    assert attribute(KEY, {OLD: STEADY}, OPTIONS).causes == ()


anything = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=60)
@given(st.lists(st.lists(anything, max_size=8), min_size=5, max_size=5), st.builds(Noise, anything, anything))
def test_garbage_gives_a_reason(rows: list[list[float]], noise: Noise) -> None:
    found = attribute(KEY, dict(zip(arms(True, True, True), rows, strict=True)), OPTIONS, noise)
    assert found.reason
    msgspec.json.encode(found)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.floats(-0.3, 0.3), st.floats(-0.3, 0.3), st.floats(1e-6, 1e6))
def test_scaling_changes_nothing_and_shares_add_up(
    seed: int, code: float, environment: float, scale: float
) -> None:
    data = medians(seed=seed, code=code, environment=environment)
    found = attribute(KEY, data, OPTIONS)
    other = attribute(KEY, {arm: [scale * x for x in xs] for arm, xs in data.items()}, OPTIONS)
    assert found.causes == other.causes
    assert [x.change for x in found.parts] == pytest.approx([x.change for x in other.parts], abs=1e-6)
    logs = sum(math.log1p(x.change) for x in found.parts)
    assert found.change is not None
    assert logs == pytest.approx(math.log1p(found.change), abs=1e-9)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.floats(0.05, 0.3))
def test_swapping_the_factors_swaps_the_causes(seed: int, effect: float) -> None:
    data = {arm: x for arm, x in medians(seed=seed, code=effect).items() if not arm.tuning}
    turned = {Arm(arm.environment, arm.code, False): x for arm, x in data.items()}
    there, back = attribute(KEY, data, OPTIONS), attribute(KEY, turned, OPTIONS)
    assert there.causes == ("code",)
    assert back.causes == ("environment",)
    assert part(there, "code").low == pytest.approx(part(back, "environment").low)
