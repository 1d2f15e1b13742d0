"""What a metric says of itself."""

from __future__ import annotations

import pytest
from kernelmark.registry.store.metric import Metric


@pytest.mark.parametrize(
    ("label", "unit", "heading"),
    [("generated tokens/s", "tokens/s", "generated tokens/s"), ("items", "ms", "items ms"), ("", "ms", "x y ms")],
)
def test_a_heading_says_its_unit_once(label: str, unit: str, heading: str) -> None:
    assert Metric("x_y", unit, label=label).heading == heading
