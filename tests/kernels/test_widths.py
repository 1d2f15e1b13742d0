"""Row operators at the drawn widths of plan `widths`, by Triton's interpreter: right at every one, forward and
backward. The widths are the plan's; rows are few, as each is computed like the next. What is in bf16 there is in
fp32 here: the interpreter cuts to bf16 where a GPU rounds.
"""

from __future__ import annotations

import pytest
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.shapes import ROW_OPERATORS

CASES = plans.load("widths", Catalog.default(), "cuda").cases
ROWS = 2
WIDE = 600
"""Of what is run each time: the interpreter takes a second for such a row, and minutes for the widest."""


def width(case):
    return case.axes[ROW_OPERATORS[case.operator][1]]


def few():
    """Of each operator its widest draw that is not above `WIDE`."""
    return [
        max((x for x in CASES if x.operator == operator and width(x) <= WIDE), key=width)
        for operator in ROW_OPERATORS
    ]


def check(agrees, case):
    rows = ROW_OPERATORS[case.operator][0]
    axes = case.axes | {rows: min(ROWS, case.axes[rows])}
    agrees(case.operator, axes, case.dtype.replace("bf16", "fp32"), **case.options)


@pytest.mark.parametrize("case", few(), ids=lambda x: f"{x.operator}-{x.name}")
def test_right_at_some(agrees, case):
    check(agrees, case)


@pytest.mark.minutes
@pytest.mark.parametrize("case", CASES, ids=lambda x: f"{x.operator}-{x.name}")
def test_right_at_all(agrees, case):
    check(agrees, case)
