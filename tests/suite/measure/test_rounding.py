"""Digits of samples."""

from __future__ import annotations

from kernelmark.suite.measure.rounding import FP32, rounded


def test_digits() -> None:
    assert rounded([1 / 3, 2e10 / 3, 0.0]) == (0.3333333, 6666667000.0, 0.0)
    assert rounded([123456789012]) == (123456789012.0,), "bytes stay whole"
    assert rounded([1 / 3], FP32) == (0.333333333,)
