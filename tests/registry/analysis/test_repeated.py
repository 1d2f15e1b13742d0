"""Agreement of two runs, on literal values."""

from __future__ import annotations

import msgspec
import pytest
from kernelmark.registry.analysis.repeated import NOT_YET, Repeated, differing, joined, repeated, said
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.store.record import Case, Header, Measurement, Record, Request


def journal(run: str, rows: dict[str, tuple[float, ...] | str], verifies: str | None = None) -> Journal:
    """Rows by case: each process's time in ms, or how it ended."""
    request = Request(verifies=verifies)
    header = Header(2, run, "", "0", None, False, "p", 0, 3, "cpu", "k", {}, {}, request)
    records = []
    for name, values in rows.items():
        case = Case("gelu", name, {}, {}, "fp32", "forward", "5bec", 1, 0)
        for replicate, value in enumerate(values if isinstance(values, tuple) else (values,)):
            ok = isinstance(value, float)
            seen = Measurement({"latency": (value,) * 6}, "events") if isinstance(value, float) else None
            status = "ok" if ok else value
            records.append(
                Record(case, "a", "b", None, replicate, 0, "cold", status, None if ok else "why", seen)  # type: ignore[arg-type]
            )
    return Journal(header, tuple(records))


THERE = (1.0, 1.01, 0.99)


def both(
    there: dict[str, tuple[float, ...] | str], here: dict[str, tuple[float, ...] | str]
) -> tuple[Repeated, ...]:
    return repeated(rows(journal("a", there)), rows(journal("b", here)))


@pytest.mark.parametrize(
    ("here", "agreement"),
    [
        ((1.005, 1.01, 1.0), "agree"),
        ((1.03, 1.02, 1.04), "agree"),
        ((1.25, 1.26, 1.24), "disagree"),
        ((0.75, 0.74, 0.76), "disagree"),
        ((0.6, 1.1, 1.9), "undecided"),
        ((1.0,), "undecided"),
        ("incorrect", "disagree"),
        ("timeout", "undecided"),
        ("unavailable", "undecided"),
    ],
)
def test_a_row_agrees_within_joint_uncertainty(here: tuple[float, ...] | str, agreement: str) -> None:
    (found,) = both({"M1": THERE}, {"M1": here})
    assert found.agreement == agreement


def test_a_value_of_0_says_why_it_is_undecided() -> None:
    (found,) = both({"M1": THERE}, {"M1": (0.0, 0.0, 0.0)})
    assert (found.agreement, found.there, found.here) == ("undecided", 1.0, 0.0)
    assert found.reason == "a value is 0 or below, and of such there is no ratio"


def test_of_many_rows_each_may_lie_further_apart() -> None:
    """Else one in twenty rows of a true run would disagree."""
    one = both({"M0": THERE}, {"M0": (1.06, 1.07, 1.05)})[0]
    many = {f"M{i}": THERE for i in range(30)}
    thirty = both(many, many | {"M0": (1.06, 1.07, 1.05)})[0]
    assert one.within is not None
    assert thirty.within is not None
    assert one.within < thirty.within
    assert (one.agreement, thirty.agreement) == ("disagree", "agree")


def test_what_stands_beside_a_published_table() -> None:
    published = journal("a", {"M0": THERE, "M1": THERE})
    again = journal("b", {"M0": THERE, "M1": (2.0, 2.01, 1.99)}, verifies="a")
    assert said(published, []) == said(published, [journal("c", {"M0": THERE})]) == NOT_YET == "not yet repeated"
    assert said(published, [again]) == "repeated by run b: 1 of 2 rows agree, 1 disagree, 0 undecided"
    elsewhere = msgspec.structs.replace(again.header, conditions={"gpu": "B"})
    assert said(published, [Journal(elsewhere, again.records)]).endswith("undecided, under other conditions (gpu)")
    assert said(published, [journal("d", {}, verifies="a")]) == NOT_YET  # its time ended before a row did
    assert joined(["one", "two"]) == "one; two"


def test_conditions_that_differ_are_named() -> None:
    assert differing({"gpu": "A", "torch": "2"}, {"gpu": "B", "torch": "2", "new": 1}) == {
        "gpu": ("A", "B"),
        "new": (None, 1),
    }
