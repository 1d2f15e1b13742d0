"""What a run says before any number: remarks, each once."""

from __future__ import annotations

from typing import Any

import pytest
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.views.summary import warnings


def told(literal: Any, **remarks: str) -> list[str]:
    """Warnings that are remarks, of implementations by name."""
    records = [literal.record(name, remarks=(text,) if text else ()) for name, text in remarks.items()]
    journal = literal.journal(*records, literal.footer())
    return [x for x in warnings(journal, rows(journal)) if "held" in x]


def test_a_remark_is_told_once_with_its_least_and_its_most(literal):
    found = told(
        literal, torch="0.18 GiB were held", liger="1.50 GiB were held", ours="0.20 GiB were held", quack=""
    )
    assert found == ["torch, liger, ours: 0.18 to 1.50 GiB were held."]


@pytest.mark.parametrize(("count", "names"), [(5, "n0, n1, n2, n3, n4"), (6, "6 of 7 implementations")])
def test_many_are_counted(literal, count, names):
    found = told(literal, quiet="", **{f"n{i}": "it was held" for i in range(count)})
    assert found == [f"{names}: it was held."]
