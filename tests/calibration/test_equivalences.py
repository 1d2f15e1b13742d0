"""A cell of the table of equivalence on every test run; the whole is a command."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kernelmark.registry.detection import equivalence

_SPEC = importlib.util.spec_from_file_location(
    "calibration_equivalences", Path(__file__).with_name("equivalences.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
table = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(table)


def test_the_table_is_of_what_ships():
    assert table.equivalent is equivalence.equivalent


def test_at_the_margin_the_level_holds_and_far_from_it_the_truth_is_found():
    normal = table.KINDS["normal"]
    at = table.outcomes(normal, 1.0, 0.3, 5, 500, (1, 2))
    assert all(at[x] <= 25 for x in ("equivalent", "worse"))
    assert at["better"] == 0
    assert table.outcomes(normal, 0.0, 0.3, 5, 100, (1, 3))["equivalent"] >= 97
    assert table.outcomes(normal, 2.0, 0.3, 5, 100, (1, 4))["worse"] >= 97
