"""Curves of a loss over steps: its value at a step, and the step at which it is reached. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

Curve: TypeAlias = Sequence[tuple[float, float]]
"""(step, loss), steps ascending."""


def reached(curve: Curve, loss: float) -> float | None:
    """The step, between two points, at which a loss is first reached; None where it never is."""
    if curve and curve[0][1] <= loss:
        return curve[0][0]
    for (before, above), (after, below) in pairwise(curve):
        if below <= loss:
            return before + (after - before) * (above - loss) / (above - below)
    return None


def at(curve: Curve, step: float) -> float:
    """The loss at a step, between two points."""
    steps, values = zip(*curve, strict=True)
    return float(np.interp(step, steps, values))
