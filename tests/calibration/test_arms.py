"""A real arm that is half a percent worse, and one in 8 bits that is not, trained anew; the whole is a command."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from kernelmark.registry.detection import convergence

_SPEC = importlib.util.spec_from_file_location("calibration_arms", Path(__file__).with_name("arms.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
table = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(table)


def test_the_table_is_of_what_ships():
    assert table.at_step is convergence.at_step
    assert table.RULE.margin == 0.0025


@pytest.mark.minutes
def test_half_a_percent_is_called_worse_once():
    """A repeat: five seeds of two arms."""
    found = table.judged(table.Changes(lost=table.HALF_A_PERCENT), 0)
    assert found.kind == "worse"
    assert 0.004 < found.change < 0.006


@pytest.mark.training
def test_half_a_percent_is_called_worse_nine_times_of_ten_and_eight_bits_never():
    good, *bad = ([table.judged(x, repeat) for repeat in range(10)] for x in table.ARMS.values())
    assert [x.kind for x in good].count("equivalent") >= 9
    assert all(x.kind != "worse" for x in good)
    for found in bad:
        assert [x.kind for x in found].count("worse") >= 9
        assert 0.004 < sum(x.change for x in found) / 10 < 0.006, "about half a percent, and not more"
