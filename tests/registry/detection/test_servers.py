"""The detector on rows of `serve`: what is counted is starts of a server, however many requests each answered."""

from __future__ import annotations

import random

import pytest
from kernelmark.registry.detection.comparison import Comparison
from kernelmark.registry.detection.decision import decide
from kernelmark.registry.detection.pairing import pair
from kernelmark.registry.detection.verdict import Verdict
from kernelmark.registry.store.record import Case, Header, Measurement, Record
from kernelmark.suite.workloads.serve import METRICS

CASE = Case("serve", "users16", {"users": 16}, {}, "bf16", "program", "s0", 0, 0, None, METRICS[0].name)


def compared(starts: int, slower: float, between: float, slow_start: int | None = None) -> Comparison:
    """Two commits' servers, each started so often for 200 requests. `between` is the spread of starts; in one of
    the current commit's all requests may take three times as long.
    """
    chance = random.Random(f"{starts}/{slower}/{between}")

    def records(factor: float, bad: int | None) -> list[Record]:
        found = []
        for start in range(starts):
            mean = 1000 * factor * chance.gauss(1, between) * (3 if start == bad else 1)
            times = tuple(mean * chance.gauss(1, 0.02) for _ in range(200))
            measured = Measurement({CASE.primary: times, "ttft": tuple(x / 10 for x in times)}, "monotonic")
            found.append(Record(CASE, "kernelmark", "kernelmark", "1", start, 0, "cold", "ok", None, measured))
        return found

    header = Header(2, "r", "2026-11-22", "0", None, False, "p", 0, starts, "cuda", "k", {}, {}, metrics=METRICS)
    (row,) = pair((header, records(1.0, None)), (header, records(slower, slow_start)))
    return row


def verdict(slower: float, between: float, slow_start: int | None = None) -> Verdict:
    first = compared(5, slower, between, slow_start)
    assert len(first.base.medians) == len(first.current.medians) == 5
    (found,) = decide([first], lambda wanted: [compared(n, slower, between) for n in wanted.values()]).verdicts
    return found


@pytest.mark.parametrize(("slower", "kind"), [(1.0, "no change"), (1.1, "regression"), (0.9, "improvement")])
def test_a_server_that_became_slower(slower: float, kind: str) -> None:
    found = verdict(slower, between=0.002)
    assert found.kind == kind
    assert found.change == pytest.approx(slower - 1, abs=0.01)


def test_requests_are_no_samples_of_a_commit() -> None:
    """Of starts that differ by a tenth, 200 requests each would be sure of anything."""
    assert verdict(1.0, between=0.1).kind not in ("regression", "improvement")
    (found,) = decide([compared(5, 1.2, between=0.1)], lambda wanted: []).verdicts
    assert found.kind not in ("regression", "no change")  # of five starts
    assert verdict(1.2, between=0.1).pairs > 10  # and so more are asked for


def test_one_bad_start_is_not_the_commit() -> None:
    assert verdict(1.0, between=0.002, slow_start=2).kind == "no change"
