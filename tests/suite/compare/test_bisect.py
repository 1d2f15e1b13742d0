"""Bisection over a real repository's commits; the A/B is a table of each commit's time."""

from __future__ import annotations

import math
import time

import pytest
from kernelmark.registry.detection.comparison import Options
from kernelmark.registry.detection.verdict import Verdict
from kernelmark.registry.store.record import Key
from kernelmark.suite.compare.bisect import Bisection
from kernelmark.suite.compare.interleaved import NotMeasurable
from kernelmark.suite.compare.revisions import Checkout, Revision

ROW, OTHER = Key("double", "a", "kernelmark_cpu", "hot"), Key("double", "b", "kernelmark_cpu", "hot")


@pytest.fixture
def repository(make_repository):
    """Commits 0 to 6 that each change the kernel, and one between 3 and 4 that does not."""
    repository = make_repository("repository")
    for number in range(7):
        repository.commit(kernels__double=f"{number}\n")
        if number == 3:
            repository.commit(notes="nothing\n")
    return repository


@pytest.fixture
def search(repository):
    """Searches for what made rows slower, given a time for each commit, None where it cannot be measured."""
    checkout = Checkout(repository.folder)
    asked: list[tuple[str, str, int]] = []

    def number(revision: Revision) -> int:
        return int(repository.git("show", f"{revision.commit}:kernels/double.py"))

    def search(times, keys=(ROW,), width=0.01, until=math.inf, base="HEAD~7", current="HEAD"):
        def compare(first, second, rows, options):
            a, b = number(first), number(second)
            asked.append((a, b, options.pairs))
            out = {}
            for key in rows:
                mine = times[key] if isinstance(times, dict) else times
                if mine[a] is None or mine[b] is None:
                    raise NotMeasurable("it does not build")
                change = mine[b] / mine[a] - 1
                half = width(b, options) if callable(width) else width
                out[key] = Verdict(key, "warning", "", change=change, low=change - half, high=change + half)
            return out

        del asked[:]
        one = Bisection(
            checkout, checkout.resolve(base), checkout.resolve(current), ["kernels"], compare, Options(), until,
            lambda text: None,
        )  # fmt: skip
        whole = []
        for key in keys:
            mine = times[key] if isinstance(times, dict) else times
            whole.append(Verdict(key, "regression", "", change=mine[6] / mine[0] - 1, low=0.05, high=0.4))
        return one.find(whole)

    search.asked = asked
    return search


def subjects(repository, finding) -> list[int]:
    return [int(repository.git("show", f"{x.commit}:kernels/double.py")) for x in finding.suspects]


def test_the_commit_is_found_with_its_own_effect(repository, search):
    (found,) = search([1, 1.02, 1.02, 1.02, 1.32, 1.33, 1.33])
    assert subjects(repository, found) == [4]
    assert found.reason == "found"
    assert found.change == pytest.approx(1.32 / 1.02 - 1)
    assert (found.suspects[0].author, found.suspects[0].subject) == ("somebody", "more")
    assert found.suspects[0].date[:2] == "20"
    assert found.steps == 2
    assert search.asked[-1][:2] == (3, 4), "the effect is that of the step alone"


def test_the_first_and_the_last(repository, search):
    (found,) = search([1, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3])
    assert subjects(repository, found) == [1]
    (found,) = search([1, 1, 1, 1, 1, 1, 1.3])
    assert subjects(repository, found) == [6]


def test_rows_that_go_different_ways_share_their_steps(repository, search):
    times = {ROW: [1, 1, 1, 1, 1, 1.3, 1.3], OTHER: [1, 1.2, 1.2, 1.2, 1.2, 1.2, 1.2]}
    found = search(times, keys=(ROW, OTHER))
    assert [subjects(repository, x) for x in found] == [[5], [1]]
    steps = [x for x in search.asked if x[0] == 0]
    assert len(steps) == len({x[1] for x in steps})


def test_what_does_not_build_leaves_a_range(repository, search):
    (found,) = search([1, 1, 1, None, None, 1.3, 1.3])
    assert subjects(repository, found) == [3, 4, 5]
    assert "cannot be measured" in found.reason
    assert found.change == pytest.approx(0.3), "of all three together"


def test_what_cannot_be_told_is_asked_again_and_then_ends(repository, search):
    (found,) = search([1, 1, 1, 1.1, 1.1, 1.3, 1.3], width=0.08)
    assert [x for x in search.asked if x[1] == 3] == [(0, 3, 6), (0, 3, 20)]
    assert subjects(repository, found) == [1, 2, 3, 4, 5, 6]
    assert "could not be told beyond doubt" in found.reason
    # The second, longer look may well tell.
    (found,) = search([1, 1, 1, 1.1, 1.1, 1.3, 1.3], width=lambda commit, options: 0.3 / options.pairs)
    assert subjects(repository, found) == [5]


def test_the_budget_ends_it(repository, search):
    (found,) = search([1, 1, 1, 1.15, 1.3, 1.3, 1.3], width=0.2, until=time.monotonic())
    assert len(search.asked) == 1
    assert "within the budget" in found.reason


def test_no_commit_between(search):
    (found,) = search([1, 1, 1, 1.3, 1.3, 1.3, 1.3], base="HEAD~3", current="HEAD~3")
    assert (found.suspects, found.reason) == ((), "no commit between the two changes any kernel")


def test_a_baseline_that_went_another_way(repository, search):
    repository.git("checkout", "--quiet", "-b", "side", "HEAD~4")
    repository.commit(kernels__double="0\n")
    repository.git("checkout", "--quiet", "main")
    (found,) = search([1, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3], base="side")
    assert subjects(repository, found) == [3]
    assert "the baseline has something that this line lacks" in found.reason


def test_the_line_between_two_commits(repository):
    checkout = Checkout(repository.folder)
    head, before = (repository.git("rev-parse", x) for x in ("HEAD", "HEAD~2"))
    line = checkout.between(before, head)
    assert [x.commit for x in line] == repository.git("rev-list", "--reverse", f"{before}..{head}").split()
    assert checkout.between(head, before)[-1].commit == before
