"""Curves of a loss, on literal points."""

from __future__ import annotations

from kernelmark.registry.analysis.curves import at, reached


def test_where_a_loss_is_reached():
    line = [(0.0, 4.0), (10.0, 2.0), (20.0, 1.0)]
    assert reached(line, 3.0) == 5.0
    assert reached(line, 1.5) == 15.0
    assert reached(line, 5.0) == 0.0
    assert reached(line, 0.5) is None
    assert at(line, 15) == 1.5
