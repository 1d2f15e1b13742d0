"""When to stop: pure, on literal samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.suite.measure.stopping import Sampling, converged, finished, half_width, steady

times = st.lists(st.floats(1e-6, 1e6), max_size=60)


def test_half_width():
    assert half_width([1, 2, 3, 4, 5]) is None
    assert half_width([1.0] * 6) == 0
    assert half_width([9, 10, 10, 10, 10, 11]) == pytest.approx(0.1)  # of 6, the interval is from end to end
    assert half_width([0.0] * 10) == 0


@given(times)
def test_half_width_is_a_share(samples):
    width = half_width(samples)
    assert (width is None) == (len(samples) < 6)
    assert width is None or 0 <= width < 1


def test_converged():
    sampling = Sampling(target=0.1)
    assert converged([9, 10, 10, 10, 10, 11], sampling)
    assert not converged([8.9, 10, 10, 10, 10, 11], sampling)
    assert not converged([1.0] * 5, sampling)


@pytest.mark.parametrize(
    ("samples", "seconds", "stop"),
    [
        ([], 99.0, False),  # never without a sample
        ([1.0] * 10, 0.1, True),  # both minima, and converged
        ([1.0] * 9, 0.1, False),  # too few
        ([1.0] * 10, 0.09, False),  # too short
        ([1.0, 2.0] * 10, 0.5, False),  # not known well enough
        ([1.0, 2.0] * 20, 0.5, True),  # the most samples
        ([1.0, 2.0], 1.0, True),  # the most seconds
    ],
)
def test_finished(samples, seconds, stop):
    sampling = Sampling(min_samples=10, max_samples=40, min_seconds=0.1, max_seconds=1.0, target=0.01)
    assert finished(samples, seconds, sampling) is stop


@given(times, st.floats(0, 10))
def test_finished_stays_finished_with_time(samples, seconds):
    sampling = Sampling(min_samples=6, max_samples=30, min_seconds=1, max_seconds=5, target=0.1)
    if finished(samples, seconds, sampling):
        assert finished(samples, seconds + 1, sampling)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_samples": 0},
        {"min_samples": 9, "max_samples": 8},
        {"min_seconds": -1},
        {"min_seconds": 2, "max_seconds": 1},
        {"target": 0},
        {"target": -1},
    ],
)
def test_impossible_limits(wrong):
    with pytest.raises(ValueError, match="must"):
        Sampling(**wrong)


def test_steady():
    assert not steady([1.0] * 9)
    assert steady([1.0] * 10)
    assert not steady([2.0] * 5 + [1.0] * 5)
    assert steady([1.02] * 5 + [1.0] * 5)
    assert steady([9.0] * 20 + [1.0] * 10)  # only the last two windows count
    assert steady([1, 1, 9, 1, 1, 1, 1, 9, 9, 1])  # the median shrugs at outliers
