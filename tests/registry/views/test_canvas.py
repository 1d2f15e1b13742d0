"""Axes of drawings, whatever a journal says."""

from __future__ import annotations

import pytest
from kernelmark.registry.views.canvas import linear_axis


@pytest.mark.parametrize("high", [1e-9, 1.0, 3e16, 1e300])
def test_a_linear_axis_of_any_length(high: float) -> None:
    axis = linear_axis(high, 0, 100, str)
    assert 2 <= len(axis.ticks) <= 7
    assert 0 < axis.place(high) <= 100
