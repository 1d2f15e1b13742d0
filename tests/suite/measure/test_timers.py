"""Timers, as far as they go without a GPU, and CUPTI's records as literal data."""

from __future__ import annotations

import pytest
from kernelmark.registry.store.record import Case
from kernelmark.suite.measure.cupti import NoRecords, spans
from kernelmark.suite.measure.timers import SHORT_BYTES, SHORT_FLOPS, Monotonic, choose


def case(bytes: int, flops: int) -> Case:
    return Case("x", "x", {}, {}, "bf16", "forward", "", bytes, flops)


@pytest.mark.parametrize(
    ("bytes", "flops", "cupti", "timer"),
    [
        (SHORT_BYTES, 0, False, "graph"),
        (SHORT_BYTES, 0, True, "cupti"),
        (SHORT_BYTES + 1, 0, True, "events"),
        (0, int(SHORT_FLOPS), False, "graph"),
        (0, int(SHORT_FLOPS) + 1, True, "events"),
    ],
)
def test_choose(bytes, flops, cupti, timer):
    assert choose(case(bytes, flops), cupti) == timer


def test_monotonic_times_the_call_and_not_the_flush():
    now = [0]

    def clock() -> int:
        return now[0]

    def takes(ns: int):
        def call() -> None:
            now[0] += ns

        return call

    timer = Monotonic(takes(1_000_000))
    assert timer.sample(takes(2_500_000), now=clock) == [2.5]
    assert (timer.name, timer.batch) == ("monotonic", 1)
    assert now[0] == 3_500_000
    assert Monotonic(None).sample(takes(500_000), now=clock) == [0.5]


SPIN = "void at::cuda::spin_kernel(long)"


def test_spans_are_from_first_begin_to_last_end_between_two_fences():
    records = [
        (0, 90, SPIN),  # holds the queue back
        (100, 200, "fill"),  # a flush: outside
        (200, 210, SPIN),
        (1_000_000, 1_500_000, "first"),
        (1_400_000, 3_000_000, "second"),  # overlaps, ends last
        (1_600_000, 2_000_000, ""),  # a copy has no name
        (3_000_100, 3_000_200, SPIN),
        (3_000_300, 3_000_400, "fill"),
        (3_000_500, 3_000_600, SPIN),
        (4_000_000, 4_250_000, "only"),
        (5_000_000, 5_000_100, SPIN),
    ]
    assert spans(records) == [2.0, 0.25]
    assert spans(reversed(records)) == [2.0, 0.25]


def test_spans_of_nothing():
    with pytest.raises(NoRecords, match="recorded nothing"):
        spans([])
    with pytest.raises(NoRecords, match="recorded nothing"):
        spans([(0, 1, SPIN), (2, 3, "kernel before any fence")])
    with pytest.raises(NoRecords, match="no kernel for a call"):
        spans([(0, 1, SPIN), (2, 3, SPIN), (4, 5, SPIN)])
