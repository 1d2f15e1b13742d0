"""How long the device's limits are looked at beside a program."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from kernelmark.suite.workloads import _rates


@pytest.mark.parametrize(("span_s", "timed"), [(-1.0, 1), (inf, _rates.CALLS)])
def test_a_slow_product_of_a_cpu_is_not_made_twelve_times(
    monkeypatch: pytest.MonkeyPatch, span_s: float, timed: int
) -> None:
    monkeypatch.setattr(_rates, "SPAN_S", span_s)
    calls: list[None] = []
    cpu: Any = SimpleNamespace(kind="cpu")
    assert _rates._mean_ms(cpu, lambda: calls.append(None)) >= 0
    assert len(calls) == 1 + timed  # one of them before the clock
