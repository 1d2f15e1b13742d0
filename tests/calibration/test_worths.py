"""Cells of the tables on worth: the truth that its rows are held to; the whole is a command."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kernelmark.registry.analysis import worth

_SPEC = importlib.util.spec_from_file_location("calibration_worths", Path(__file__).with_name("worths.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
table = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(table)


def test_the_table_is_of_what_ships():
    assert table.worths is worth.worths


def test_exchanges_that_move_the_step_are_right_and_nothing_is_null():
    for name in ("200 µs a call", "1000 µs a call", "-200 µs a call"):
        found = list(table.simulated(7, 1.0, table.PLANTED[name], 200))
        assert all(map(table.moving, found)), name
        assert sum(map(table.right, found)) >= 180, name
        assert sum(map(table.signed, found)) >= 190, name
    nothing = list(table.simulated(7, 1.0, 0.0, 200))
    assert sum(map(table.moving, nothing)) <= 4
    assert 184 <= sum(x.null for x in nothing) <= 198


def test_a_step_that_gains_half_of_what_was_expected_is_not_right():
    step, alone = [[100.0] * 5, [95.0] * 5], [[1.0] * 5, [0.6] * 5]  # 25 calls gain 10 ms alone, 5 in the model
    (found,) = table.worths(table.journal(step, alone))
    assert table.moving(found)
    assert table.signed(found)
    assert not table.right(found)
    (found,) = table.worths(table.journal([step[0], [105.0] * 5], alone))
    assert not table.signed(found)
    (found,) = table.worths(table.journal([step[0], [91.0] * 5], alone))
    assert table.right(found)
    assert "| 100.0% | 100.0% | 100.0% | 0.0% | 0.0% | 0.0% |" in table.row("x1", "x", -10.0, [found])
