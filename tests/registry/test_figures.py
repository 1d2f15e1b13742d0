"""How values are written for people."""

from __future__ import annotations

import pytest
from kernelmark.registry import figures


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (figures.number(None), "–"),
        (figures.number(float("nan")), "–"),
        (figures.number(0.017213), "0.01721"),
        (figures.number(3410.7), "3,411"),
        (figures.number(0), "0"),
        (figures.number(2.5e-9), "2.5e-9"),
        (figures.scientific(0.00213), "2.1e-3"),
        (figures.scientific(None), "–"),
        (figures.scientific(0.0), "0"),
        (figures.ratio(1.325), "1.32×"),
        (figures.ratio(250.0), "250×"),
        (figures.ratio(3e7), ">1000×"),
        (figures.bounds(0.984, 1.0249), " [0.98, 1.02]"),
        (figures.bounds(1e-9, 6.5e15), " [too noisy]"),
        (figures.bounds(None, None), ""),
        (figures.change(12.0), "12.00×"),
        (figures.moment("2026-11-21T00:15:30.123+00:00"), "2026-11-21 00:15:30 UTC"),
        (figures.moment("2026-11-21T02:15:30+02:00"), "2026-11-21 00:15:30 UTC"),
        (figures.moment("yesterday"), "yesterday"),
        (figures.ratio(None), "–"),
        (figures.percent(0.834), "83 %"),
        (figures.percent(None), "–"),
        (figures.change(1.0211), "+2.1 %"),
        (figures.change(0.9), "−10.0 %"),
        (figures.change(0.99999), "0.0 %"),
        (figures.change(None), "–"),
        (figures.size(67_108_864), "67.1 MB"),
        (figures.size(0), "0 B"),
        (figures.size(None), "–"),
        (figures.energy(0.0123), "12.3 mJ"),
        (figures.seconds(3.21), "3.2 s"),
        (figures.seconds(250), "4 min 10 s"),
        (figures.seconds(7500), "2 h 5 min"),
        (figures.seconds(None), "–"),
        (figures.quantity(0.06157, "ms"), "0.06157 ms"),
        (figures.quantity(67_108_864, "B"), "67.1 MB"),
        (figures.quantity(None, "ms"), "–"),
        (figures.counted(1, "row"), "1 row"),
        (figures.counted(1000, "row"), "1,000 rows"),
        (figures.value(None), "–"),
        (figures.value(True), "yes"),
        (figures.value(False), "no"),
        (figures.value(700), "700"),
    ],
)
def test_values_in_words(told: str, text: str) -> None:
    assert told == text
