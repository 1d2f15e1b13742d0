"""The search for a commit, with comparators that lie in no way but may not know."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.registry.detection.bisection import Answer, Search, judge
from kernelmark.registry.detection.verdict import Kind, Verdict
from kernelmark.registry.store.record import Key


def verdict(kind: Kind = "regression", low: float | None = 0.08, high: float | None = 0.12) -> Verdict:
    return Verdict(Key("gelu", "a", "kernelmark", "cold"), kind, "why", change=0.1, low=low, high=high)


def run(search: Search, answers: dict[int, Answer], culprit: int) -> tuple[Search, list[int]]:
    asked = []
    while (index := search.next()) is not None:
        asked.append(index)
        search = search.told(index, answers.get(index, "slower" if index >= culprit else "same"))
    return search, asked


@given(st.integers(1, 200), st.data())
def test_the_culprit_is_found_in_few_steps(count: int, data: st.DataObject) -> None:
    culprit = data.draw(st.integers(1, count))
    search, asked = run(Search(high=count), {}, culprit)
    assert search.suspects == (culprit,)
    assert len(asked) <= count.bit_length()


@given(st.integers(1, 40), st.data())
def test_what_does_not_build_is_passed_over(count: int, data: st.DataObject) -> None:
    culprit = data.draw(st.integers(1, count))
    broken = data.draw(st.sets(st.integers(1, count - 1), max_size=count)) if count > 1 else set()
    search, asked = run(Search(high=count), dict.fromkeys(broken, "broken"), culprit)
    assert culprit in search.suspects or culprit in broken
    # The range ends at the first commit from the culprit on that can be measured, and no earlier one is in it
    # but those that cannot.
    assert search.high == next(i for i in range(culprit, count + 1) if i not in broken)
    assert set(search.suspects[:-1]) <= broken
    assert len(asked) == len(set(asked))


def test_a_step_that_cannot_tell_ends_with_a_range() -> None:
    search, asked = run(Search(high=8), {6: "unknown"}, 6)
    assert asked == [4, 6]
    assert (search.suspects, search.stopped_at) == ((5, 6, 7, 8), 6)
    assert search.next() is None
    assert search.told(7, "slower") == search


def test_what_is_known_already_costs_nothing() -> None:
    assert Search(high=16).next() == 8
    assert Search(high=16).next(known=[3, 15]) == 3
    assert Search(high=16, low=8).next(known=[3]) == 12


def test_answers_from_outside_the_range_change_nothing() -> None:
    search = Search(high=8).told(4, "slower")
    assert search.told(6, "same") == search
    assert search.told(0, "slower") == search


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (verdict(), "slower"),
        (verdict("no change", -0.01, 0.02), "same"),
        (verdict("no change", 0.03, 0.045), "same"),
        (verdict("warning", 0.03, 0.06), "unknown"),
        (verdict("inconclusive", None, None), "unknown"),
        (verdict("not comparable", 0.2, 0.3), "unknown"),
        (verdict("missing"), "broken"),
        (verdict("incorrect"), "broken"),
        (verdict("skipped", None, None), "broken"),
    ],
)
def test_the_interval_must_lie_on_one_side_of_half_the_change(found: Verdict, expected: Answer) -> None:
    assert judge(found, whole=0.1) == expected
