"""Change points: literal series in, indices out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.registry.detection.changepoints import ChangePoint, Dated, _quiet, change_points, of_the_machine


def found(series: list[float], seed: int = 1, **more: float) -> list[int]:
    return [point.index for point in change_points(series, np.random.default_rng(seed), **more)]  # type: ignore[arg-type]


JITTER = [0.0, 0.004, -0.003, 0.002, -0.004, 0.001, 0.003, -0.002]


def steps(*levels: tuple[float, int]) -> list[float]:
    flat = [level for level, count in levels for _ in range(count)]
    return [x * (1 + JITTER[i % len(JITTER)]) for i, x in enumerate(flat)]


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ([], []),
        ([1.0], []),
        ([1.0] * 50, []),
        (steps((1.0, 40)), []),
        (steps((1.0, 10), (1.1, 10)), [10]),
        (steps((1.0, 20), (1.05, 20)), [20]),
        (steps((1.0, 10), (1.1, 10), (1.0, 10)), [10, 20]),
        (steps((1.0, 10), (1.1, 10), (1.2, 10), (0.8, 5)), [10, 20, 30]),
        (steps((1.0, 20), (1.015, 20)), []),  # less than 2 %
        (steps((1.0, 20), (1.5, 1), (1.0, 20)), []),  # one odd run
        (steps((1.0, 20), (1.5, 2), (1.0, 20)), []),  # two odd runs
        (steps((1.0, 20), (1.2, 3)), [20]),  # the shortest segment, at the end
        ([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], [3]),
        ([1.0, 1.0, 2.0, 2.0], []),
        (steps((1.0, 8), (1.4, 1), (1.0, 11), (1.1, 20)), [20]),  # one odd run before the step
        (steps((1.0, 20), (1.1, 7), (1.6, 1), (1.1, 12)), [20]),  # and after it
        (steps((1.0, 5), (0.6, 1), (1.0, 14), (1.1, 9), (1.9, 2), (1.1, 9)), [20]),
    ],
)
def test_literal_series(series: list[float], expected: list[int]) -> None:
    assert found(series) == expected


def test_the_change_is_the_ratio_of_the_segments() -> None:
    (point,) = change_points([2.0] * 10 + [2.5] * 10, np.random.default_rng(1))
    assert point.change == pytest.approx(0.25)
    assert point.p < 1e-5


def test_what_is_no_time_is_passed_over_and_indices_stay() -> None:
    series = [math.nan, *steps((1.0, 10)), 0.0, *steps((1.2, 10)), -1.0, math.inf]
    assert found(series) == [12]


def test_the_thresholds_are_parameters() -> None:
    series = steps((1.0, 20), (1.015, 20))
    assert found(series, change=0.01) == [20]
    assert found(steps((1.0, 10), (1.1, 10)), change=0.2) == []
    assert found(steps((1.0, 10), (1.1, 10)), p=1e-40) == []


def test_the_generator_makes_it_repeatable() -> None:
    series = np.exp(np.random.default_rng(5).normal(0, 0.02, 80)).tolist()
    assert found(series, 3) == found(series, 3)


def test_noise_is_quiet_and_a_step_is_found() -> None:
    generator = np.random.default_rng(11)
    alarms = hits = 0
    for _ in range(15):
        series = np.exp(generator.normal(0, 0.007, 60))
        series[generator.random(60) < 0.02] *= 1.1
        alarms += len(change_points(series.tolist(), generator))
        series[30:] *= 1.05
        hits += any(abs(point.index - 30) <= 1 for point in change_points(series.tolist(), generator))
    assert alarms == 0
    assert hits >= 14


def test_neighbours_that_are_alike_are_no_step() -> None:
    """Autocorrelation of .6: one state of the machine over several commits."""
    generator = np.random.default_rng(2)
    alarms = 0
    for _ in range(20):
        logs = generator.normal(0, 0.007, 60)
        for i in range(1, 60):
            logs[i] = 0.6 * logs[i - 1] + 0.8 * logs[i]
        alarms += bool(change_points(np.exp(logs).tolist(), generator))
    assert alarms <= 1


@settings(max_examples=40)
@given(st.integers(0, 39), st.floats(0.3, 4.0))
def test_no_odd_run_hides_a_step(place: int, factor: float) -> None:
    series = steps((1.0, 20), (1.1, 20))
    series[place] *= factor
    assert any(abs(x - 20) <= 1 for x in found(series))


@settings(max_examples=50)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30))
def test_garbage_does_not_crash(series: list[float]) -> None:
    points = change_points(series, np.random.default_rng(1))
    assert all(3 <= point.index < len(series) for point in points)


@settings(max_examples=30)
@given(st.integers(3, 15), st.integers(3, 15), st.floats(1.1, 3.0), st.floats(1e-3, 1e3))
def test_a_clean_step_is_found_at_any_scale(left: int, right: int, factor: float, scale: float) -> None:
    assert found([scale] * left + [scale * factor] * right) == [left]


DAYS = ("2026-11-01", "2026-11-02", "2026-11-03", "2026-11-04")


def dated(witness: bool, *changes: tuple[int, float], days: tuple[str, ...] = DAYS) -> Dated:
    return Dated(days, tuple(ChangePoint(i, size, 1e-9) for i, size in changes), witness)


def marked(*series: Dated) -> list[list[bool]]:
    return [[x.machine is not None for x in changes] for changes in of_the_machine(series)]


def test_what_many_series_of_unchanged_code_share_is_the_machines() -> None:
    others = [dated(True, (2, 0.05)), dated(True, (2, 0.06)), dated(True)]
    ours = dated(False, (1, 0.2), (2, 0.05), (3, 0.1))
    found = of_the_machine([ours, *others])
    assert [x.machine is not None for x in found[0]] == [False, True, False]
    assert found[0][1].machine == (
        "the machine's: 2 of 3 series of code that no commit changes moved on 2026-11-03, by +5.5 % in the median"
    )
    assert marked(*others) == [[True], [True], []]


@pytest.mark.parametrize(
    "others",
    [
        [],
        [dated(True, (2, 0.05))],  # one alone
        [dated(True, (2, 0.05)), dated(True, (2, -0.05))],  # not in one direction
        [dated(True, (2, 0.05)), dated(True, (1, 0.05))],  # not on one day
        [dated(True, (2, 0.05)), dated(True, (2, 0.05)), *[dated(True)] * 3],  # less than half
        [dated(False, (2, 0.05))] * 5,  # code that a commit may well change together
        [dated(True, (2, 0.05), days=DAYS[2:3] * 4)] * 3,  # nothing before that day
    ],
)
def test_what_does_not_make_it_the_machines(others: list[Dated]) -> None:
    assert marked(dated(False, (2, 0.05)), *others)[0] == [False]


@pytest.mark.parametrize("segment", [2, 3, 4])
def test_quiet_series_have_no_two_segments_that_far_apart(segment: int) -> None:
    """What is passed over without a search: by all pairs of segments of short series, odd runs among them."""
    generator = np.random.default_rng(5)
    quiet = 0
    for _ in range(300):
        logs = generator.normal(0, 0.006, int(generator.integers(1, 14)))
        logs += np.where(generator.random(len(logs)) < 0.15, generator.normal(0, 0.3, len(logs)), 0)
        ends = range(len(logs) + 1)
        middles = [np.median(logs[i:j]) for i in ends for j in ends if j - i >= segment]
        furthest = max(middles, default=0) - min(middles, default=0)
        if _quiet(logs, 0.02, segment):
            quiet += 1
            assert len(logs) < 2 * segment or furthest <= np.log(1.02) + 1e-12
    assert 50 < quiet < 290
