"""How long the device's limits are looked at beside a program."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from kernelmark.suite.workloads import _rates


def test_a_slow_product_of_a_cpu_is_not_made_twelve_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rates, "SPAN_S", 0.1)
    calls: list[float] = []

    def took(s: float) -> float:
        calls.clear()
        return _rates._mean_ms(cpu, lambda: (calls.append(s), time.sleep(s)))

    cpu: Any = SimpleNamespace(kind="cpu")
    assert took(0.2) == pytest.approx(200, rel=0.2)
    assert len(calls) == 2  # one of them before the clock
    assert took(0.001) > 1
    assert len(calls) == 1 + _rates.CALLS
