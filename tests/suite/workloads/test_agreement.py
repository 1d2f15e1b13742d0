"""What exchanging a kernel may cost, on literal numbers."""

from __future__ import annotations

import math

import pytest
from kernelmark.suite.workloads._agreement import LIMITS, exchanged, of_goal


@pytest.mark.parametrize(
    ("kl", "agreement", "change", "precision", "said"),
    [
        (1e-3, 0.995, 1e-3, "bf16", None),
        (1e-3, 0.995, 1e-3, "fp32", "KL divergence 0.001 nats a byte, allowed 1e-05"),
        (1e-3, 0.98, 1e-3, "bf16", "the same in 98.00% of positions, below 99.00%"),
        (1e-3, 0.995, -0.004, "bf16", "bits a byte change by -0.400%, allowed ±0.25%"),
        (1e-2, 0.95, 0.004, "e4m3", None),
        (math.nan, 1.0, 0.0, "bf16", "KL divergence nan"),
        (0.0, 1.0, math.nan, "bf16", "bits a byte change by +nan"),
    ],
)
def test_an_exchange_costs_no_more_than_its_precision(kl, agreement, change, precision, said):
    found = exchanged(kl, agreement, change, precision)
    assert (found is None) if said is None else said in str(found)


def test_a_goal_is_closer_than_what_is_wrong():
    assert of_goal(-5e-5, "bf16") == pytest.approx(0.5)
    assert of_goal(LIMITS["bf16"].bits, "bf16") == pytest.approx(25)
    assert of_goal(1e-4, "e4m3") is None
