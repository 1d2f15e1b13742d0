"""Rows of a case, read side by side."""

from __future__ import annotations

from typing import Any

import msgspec
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.views.grouping import CaseRows


def test_the_limit_of_a_case_whose_first_row_has_none(literal: Any) -> None:
    case = literal.case(bytes=3_000_000)
    lost = literal.record("kernelmark", status="unavailable", reason="no", case=case)
    (row,) = rows(literal.journal(literal.record("torch", samples=2.0, case=case)))
    (first,) = rows(literal.journal(lost))
    assert CaseRows("rms_norm", "x", "forward", {}, (first, row)).limit is None
    known = msgspec.structs.replace(row, limit=1.8)
    assert CaseRows("rms_norm", "x", "forward", {}, (first, known)).limit == 1.8
