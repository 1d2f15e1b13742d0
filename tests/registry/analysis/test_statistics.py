"""Welch's interval and the geometric mean, by hand."""

from __future__ import annotations

import math

import pytest
from kernelmark.registry.analysis.statistics import geometric_mean, welch
from scipy.special import stdtrit


def test_welchs_half_width_by_hand() -> None:
    # Parts 1/4 of 2 values and 1/3 of 3: (1/4 + 1/3)² / ((1/4)² / 1 + (1/3)² / 2) = 49/17 degrees of freedom.
    for probability in (0.975, 0.999):
        half = float(stdtrit(49 / 17, probability)) * math.sqrt(7 / 12)
        assert welch([(1 / 4, 2), (1 / 3, 3)], probability) == pytest.approx(half)
    assert welch([(1 / 4, 2), (1 / 3, 3)]) == welch([(1 / 4, 2), (1 / 3, 3)], 0.975)


def test_a_part_without_spread_has_no_say() -> None:
    assert welch([(1 / 3, 3), (0.0, 9)]) == pytest.approx(float(stdtrit(2, 0.975)) / math.sqrt(3))
    assert welch([(0.0, 3), (0.0, 3)]) == 0.0


def test_variances_whose_squares_vanish_have_a_width() -> None:
    tiny = 1e-200
    assert welch([(tiny / 4, 2), (tiny / 3, 3)]) == pytest.approx(
        math.sqrt(tiny) * welch([(1 / 4, 2), (1 / 3, 3)])
    )


def test_the_geometric_mean_is_of_known_values_above_zero() -> None:
    assert geometric_mean([2.0, None, 8.0, 0.0]) == pytest.approx(4.0)
    assert geometric_mean([None, 0.0]) is None
    assert geometric_mean(()) is None
