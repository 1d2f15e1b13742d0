"""Rows, ceilings and summaries, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from array import array
from statistics import median
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernelmark.registry.analysis import statistics
from kernelmark.registry.analysis.ceilings import Ceilings
from kernelmark.registry.analysis.rows import (
    Row,
    Value,
    category,
    named_before,
    over_links,
    rows,
    speedup,
    spent,
    summarize,
)
from kernelmark.registry.store.metric import Metric, Summary, summarized
from kernelmark.registry.store.record import Case, Ceiling, Key, Telemetry
from kernelmark.registry.views import summary

T2 = 4.302652729749464
"""The 97.5 % quantile of Student's t with 2 degrees of freedom (any table)."""
T1 = 12.706204736174706
"""The same with 1 degree of freedom."""


def by_name(found: Any) -> dict[str, Row]:
    return {x.implementation: x for x in found}


def test_the_limit_of_a_collective_is_the_link() -> None:
    """By the fastest copies between as many GPUs of the run; none without them."""

    def row(name: str, ms: float, world: int = 2, status: Any = "ok", **metrics: float) -> Row:
        found = {"latency": Value(ms, "ms", "lower", 3, 60)}
        found |= {x: Value(y, "GB/s", "higher", 3, 60) for x, y in metrics.items()}
        return Row(
            operator=name, case=name, axes={"N": 8, "gpus": world}, options={}, dtype="bf16", pass_="forward",
            implementation=f"{name}-{ms}", provider="ours", version=None, cache="cold", status=status, reason=None,
            key="k", primary="latency", metrics=found, limit=0.1, fraction_of_limit=0.1, above_limit=False,
        )  # fmt: skip

    found = by_name(
        over_links(
            [
                row("copy", 2.0, link_rate=380.0),
                row("copy", 1.0, link_rate=400.0),
                row("copy", 0.1, status="incorrect", link_rate=4000.0),
                row("reduce", 4.0, busbw=300.0),
                row("reduce", 3.0, busbw=410.0),
                row("reduce", 5.0, world=4, busbw=300.0),
                row("rounded", 2.5, busbw=500.0, wire=250.0),
                row("product", 6.0),
            ]
        )
    )
    assert found["copy-2.0"].fraction_of_limit == pytest.approx(0.95)
    assert (found["reduce-4.0"].limit, found["reduce-4.0"].fraction_of_limit) == (pytest.approx(3.0), 0.75)
    assert [found[f"reduce-{x}"].above_limit for x in (4.0, 3.0, 5.0)] == [False, True, None]
    assert (found["reduce-5.0"].limit, found["reduce-5.0"].fraction_of_limit) == (None, None)
    assert found["product-6.0"].limit == 0.1
    assert (found["rounded-2.5"].fraction_of_limit, found["rounded-2.5"].above_limit) == (0.625, False)


# --- ceilings -----------------------------------------------------------------------------------------


def copy(size: int, ms: float, replicate: int = 0) -> Ceiling:
    return Ceiling("copy", size, ms, replicate)


def matmul(dtype: str, flops: int, ms: float, replicate: int = 0) -> Ceiling:
    return Ceiling("matmul", flops, ms, replicate, dtype)


def test_copy_time_is_the_median_over_replicates_at_a_measured_size() -> None:
    found = Ceilings.of([copy(1000, 1.0), copy(1000, 5.0, 1), copy(1000, 2.0, 2)])
    assert found.moving_ms(1000) == pytest.approx(2.0)


def test_copy_time_between_sizes_follows_the_power_law_and_beyond_the_largest_the_bandwidth() -> None:
    found = Ceilings.of([copy(100, 1.0), copy(10_000, 100.0)])
    assert found.moving_ms(1000) == pytest.approx(10.0)
    assert found.moving_ms(20_000) == pytest.approx(200.0)


def test_copy_time_below_the_smallest_size_is_its_floor() -> None:
    assert Ceilings.of([copy(100, 1.0), copy(10_000, 100.0)]).moving_ms(1) == pytest.approx(1.0)


def test_copy_time_is_unknown_without_a_copy_or_without_bytes() -> None:
    assert Ceilings.of([]).moving_ms(100) is None
    assert Ceilings.of([copy(100, 1.0)]).moving_ms(0) is None


def test_limit_is_the_larger_of_copy_and_matmul(literal: Any) -> None:
    found = Ceilings.of([copy(1000, 1.0), matmul("bf16", 500, 1.0)])
    assert found.limit_ms(literal.case(bytes=1000, flops=0)) == pytest.approx(1.0)
    assert found.limit_ms(literal.case(bytes=1000, flops=100)) == pytest.approx(1.0)
    assert found.limit_ms(literal.case(bytes=1000, flops=5000)) == pytest.approx(10.0)
    assert found.limit_ms(literal.case(bytes=0, flops=5000)) == pytest.approx(10.0)


def test_products_that_may_be_narrower_are_held_to_their_own_rate(literal: Any) -> None:
    found = Ceilings.of([copy(1000, 1.0), matmul("bf16", 500, 1.0), matmul("e4m3", 1000, 1.0)])
    assert found.limit_ms(literal.case(bytes=1000, flops=5000, options={"products": "e4m3"})) == pytest.approx(5.0)
    assert found.limit_ms(literal.case(bytes=1000, flops=5000, options={"products": "dtype"})) == pytest.approx(
        10.0
    )


def test_only_what_may_multiply_as_tf32_is_held_to_its_rate(literal: Any) -> None:
    known = [copy(1000, 1.0), matmul("fp32", 500, 1.0), matmul("bf16", 4000, 1.0)]
    call = literal.case(operator="matmul", bytes=1000, flops=8000, dtype="fp32")
    assert Ceilings.of(known).limit_ms(call) == pytest.approx(16.0), "older journals have no such ceiling"
    found = Ceilings.of([*known, matmul("tf32", 2000, 1.0)])
    assert found.limit_ms(call) == pytest.approx(4.0)
    assert found.limit_ms(msgspec.structs.replace(call, operator="attention")) == pytest.approx(16.0)
    assert found.limit_ms(msgspec.structs.replace(call, dtype="bf16")) == pytest.approx(2.0)


def test_limit_is_unknown_where_a_needed_ceiling_was_not_measured(literal: Any) -> None:
    found = Ceilings.of([copy(1000, 1.0), matmul("bf16", 500, 1.0)])
    assert found.limit_ms(literal.case(bytes=1000, flops=5000, dtype="fp16")) is None
    assert found.limit_ms(literal.case(bytes=0, flops=0)) is None
    assert Ceilings.of([matmul("bf16", 500, 1.0)]).limit_ms(literal.case(bytes=1000, flops=5000)) is None


def test_ceilings_summary_in_readable_units() -> None:
    found = Ceilings.of([copy(2_000_000, 1.0), copy(8_000_000, 2.0), matmul("bf16", 10**12, 2.0)])
    assert found.summary() == {
        "copy_gbps": pytest.approx(4.0),
        "one_way_gbps": None,
        "matmul_tflops": {"bf16": pytest.approx(500.0)},
        "exponentials_per_s": None,
    }
    assert set(map(str, Ceilings.of([]).summary().values())) == {"None", "{}"}
    more = Ceilings.of([Ceiling("read", 4_000_000, 0.5, 0), Ceiling("exponential", 10**12, 250.0, 0)]).summary()
    assert (more["one_way_gbps"], more["exponentials_per_s"]) == (pytest.approx(8.0), pytest.approx(4e12))


def test_bytes_take_at_least_what_the_quickest_of_copy_read_and_write_takes() -> None:
    found = Ceilings.of([copy(1000, 2.0), Ceiling("read", 1000, 1.5, 0), Ceiling("write", 1000, 3.0, 0)])
    assert found.moving_ms(1000) == pytest.approx(1.5)
    assert found.moving_ms(500) == pytest.approx(1.5), "reads were measured at no smaller size"
    assert Ceilings.of([copy(500, 1.0), copy(1000, 2.0), Ceiling("read", 1000, 1.5, 0)]).moving_ms(500) == 1.0


def test_exponentials_are_a_limit_where_their_rate_was_measured(literal: Any) -> None:
    case = msgspec.structs.replace(literal.case(bytes=1000, flops=500), exponentials=4000)
    before = [copy(1000, 1.0), matmul("bf16", 500, 1.0)]
    assert Ceilings.of(before).limit_ms(case) == pytest.approx(1.0)
    assert Ceilings.of([*before, Ceiling("exponential", 1000, 1.0, 0)]).limit_ms(case) == pytest.approx(4.0)
    assert Ceilings.of([*before, Ceiling("exponential", 8000, 1.0, 0)]).limit_ms(case) == pytest.approx(1.0)


def test_a_hot_cache_has_no_limit_by_bytes(literal: Any) -> None:
    found = Ceilings.of([copy(1000, 9.0), matmul("bf16", 500, 1.0)])
    assert found.limit_ms(literal.case(bytes=1000, flops=0), "hot") is None
    assert found.limit_ms(literal.case(bytes=1000, flops=500), "hot") == pytest.approx(1.0)


def test_a_row_that_passes_its_limit_is_marked(literal: Any) -> None:
    case = literal.case(bytes=1000, flops=0)

    def above(ms: float) -> bool | None:
        (row,) = rows(literal.journal(literal.record(samples=ms, case=case), copy(1000, 1.0)))
        return row.above_limit

    assert (above(1.1), above(0.99), above(0.9)) == (False, False, True)
    assert rows(literal.journal(literal.record()))[0].above_limit is None


@pytest.mark.parametrize(("size", "ms"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0), (1, math.nan), (1, math.inf)])
def test_a_ceiling_without_a_size_or_time_is_refused(size: int, ms: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        copy(size, ms)


# --- one row ------------------------------------------------------------------------------------------


def test_latency_is_the_median_of_the_replicates_medians(literal: Any) -> None:
    (row,) = rows(
        literal.journal(
            literal.record(samples=[1.0, 2.0, 9.0]),
            literal.record(samples=[4.0, 4.0, 4.0], replicate=1),
            literal.record(samples=[3.0, 3.0, 30.0], replicate=2),
        )
    )
    assert row.value() == 3.0  # of 2, 4 and 3; pooled it would be 4
    found = row.get()
    assert (row.replicates, found.processes, found.samples) == (3, 3, 9)
    assert (found.minimum, found.maximum, found.median) == (1.0, 30.0, 4.0)
    assert found.mean == pytest.approx(60 / 9)
    assert found.cv_between == pytest.approx(1 / 3)


def test_interval_is_t_over_the_logarithms_of_the_replicates_medians(literal: Any) -> None:
    medians = [1.0, math.e, math.e**2]  # logarithms 0, 1, 2: mean 1, standard deviation 1
    (row,) = rows(literal.journal(*(literal.record(samples=x, replicate=i) for i, x in enumerate(medians))))
    half = T2 / math.sqrt(3)
    assert row.bounds() == pytest.approx((math.exp(1 - half), math.exp(1 + half)))


def test_interval_of_two_replicates_uses_one_degree_of_freedom(literal: Any) -> None:
    (row,) = rows(literal.journal(literal.record(samples=1.0), literal.record(samples=math.e, replicate=1)))
    half = T1 * math.sqrt(0.5) / math.sqrt(2)
    assert row.bounds()[1] == pytest.approx(math.exp(0.5 + half))


def test_interval_holds_the_latency_even_where_the_geometric_mean_is_far_from_the_median() -> None:
    ((low, high),) = statistics.intervals([[1.0, 1.0, 1.0, 1.0, 1.0001]], [[]])
    assert low is not None
    assert high is not None
    assert low <= 1.0 <= high


def test_the_interval_of_a_single_process_is_of_what_its_value_is() -> None:
    """Of a median by ranks, of a mean by Student's t; the median's says nothing of the last, least or largest."""
    samples = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0]

    def interval(summary: Summary) -> tuple[float | None, float | None]:
        value = summarized(samples, summary)
        ((low, high),) = statistics.intervals([[value]], [samples], summary)
        assert low is None or high is None or low <= value <= high
        return low, high

    half = 2.3646242515927844 * math.sqrt(8) / math.sqrt(8)  # 7 degrees of freedom; mean 2, variance 8
    assert interval("median") == (1.0, 9.0)
    assert interval("mean") == pytest.approx((2 - half, 2 + half))
    others: tuple[Summary, ...] = ("last", "minimum", "maximum", "p99")
    assert [interval(x) for x in others] == [(None, None)] * 4
    assert statistics.intervals([[1.0]], [[1.0]], "mean") == [(None, None)]


def test_a_bound_of_a_time_that_is_none_bounds_no_rate(literal: Any) -> None:
    """Of a tiny call what is taken off for flushes may leave some samples below 0."""
    case = literal.case(bytes=10**6)
    (row,) = rows(literal.journal(literal.record(samples=[-0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6], case=case)))
    assert (row.metrics["latency"].low, row.metrics["latency"].high) == (-0.1, 0.6)
    assert row.metrics["bandwidth"].low == pytest.approx(1e6 / 0.6e-3 / 1e9)
    assert row.metrics["bandwidth"].high is None


def test_a_single_replicate_has_the_interval_of_its_samples_median_and_pages_show_none(literal: Any) -> None:
    (row,) = rows(literal.journal(literal.record(samples=[6.0, 5.0, 4.0, 3.0, 2.0, 1.0])))
    found = row.metrics["latency"]
    assert (found.low, found.high) == (1.0, 6.0)  # 1 - 2/2⁶ = 0.969, and one rank further in 0.78
    assert row.bounds() == found.interval == (None, None)
    assert row.value() == 3.5
    assert row.get().cv_between is None


def test_a_single_replicate_of_few_samples_has_no_interval(literal: Any) -> None:
    (row,) = rows(literal.journal(literal.record(samples=[1.0, 2.0, 3.0, 4.0, 5.0])))
    assert row.bounds() == (None, None)
    assert row.value() == 3.0


def test_rates_follow_from_bytes_operations_and_tokens(literal: Any) -> None:
    case = literal.case(bytes=3_000_000, flops=4 * 10**9, tokens=8)
    lines = [copy(3_000_000, 1.5), matmul("bf16", 4 * 10**9, 0.5), literal.record(samples=2.0, case=case)]
    (row,) = rows(literal.journal(*lines))
    assert row.value("bandwidth") == pytest.approx(1.5)
    assert row.value("throughput") == pytest.approx(2.0)
    assert row.value("tokens") == pytest.approx(4000.0)
    assert row.limit == pytest.approx(1.5)
    assert row.fraction_of_limit == pytest.approx(0.75)


def test_a_workload_s_own_limit_goes_before_the_device_s(literal: Any) -> None:
    case = literal.case(bytes=3_000_000)
    lines = [copy(3_000_000, 1.5), literal.record(samples=2.0, case=case, beside={"limit_fraction": 0.9})]
    (row,) = rows(
        literal.journal(
            *lines, metrics=(*literal.header().metrics, Metric("limit_fraction", "1", about="Of the limit."))
        )
    )
    assert row.limit == pytest.approx(1.8)
    assert row.fraction_of_limit == pytest.approx(0.9)
    assert row.above_limit is False


def test_no_row_has_the_device_s_limit_where_another_has_its_workload_s(literal: Any) -> None:
    case = literal.case(bytes=3_000_000)
    lost = literal.record("kernelmark", status="unavailable", reason="no", case=case)
    lines = [
        copy(3_000_000, 1.5),
        lost,
        literal.record("torch", samples=2.0, case=case, beside={"limit_fraction": 0.9}),
    ]
    found = rows(
        literal.journal(
            *lines, metrics=(*literal.header().metrics, Metric("limit_fraction", "1", about="Of the limit."))
        )
    )
    first, second = found
    assert (first.implementation, first.limit, second.limit) == ("kernelmark", None, pytest.approx(1.8))


def test_unknown_values_are_none_and_never_zero(literal: Any) -> None:
    (row,) = rows(literal.journal(literal.record(samples=2.0)))
    told = msgspec.to_builtins(row) | named_before(row)
    unknown = ("flops", "tflops", "tokens_per_s", "limit_ms", "fraction_of_limit", "peak_memory_bytes")
    for name in (*unknown, "energy_j", "error", "launch_latency_ms", "sm_mhz", "speedup_ci_low"):
        assert told[name] is None, name


def test_memory_and_error_are_the_largest_energy_and_launch_the_median(literal: Any) -> None:
    seen = [(100, 1.0, 0.1, [1.0, 2.0]), (300, 3.0, 0.3, [3.0]), (200, 2.0, 0.2, [9.0, 9.0])]
    (row,) = rows(
        literal.journal(
            *(
                literal.record(
                    replicate=i,
                    beside={"memory": memory, "energy": energy, "error": error, "launch": launch},
                    telemetry=Telemetry(sm_mhz=(1000 + i, 1900 + i)),
                )
                for i, (memory, energy, error, launch) in enumerate(seen)
            )
        )
    )
    assert tuple(map(row.value, ("memory", "energy", "error"))) == (300, 2.0, 0.3)
    assert row.get("launch").median == 3.0
    assert row.sm_mhz == (1000, 1902)


def test_a_conversion_is_the_median_of_the_replicates_that_have_one(literal: Any) -> None:
    seen = [3.0, None, 1.0, 2.0]
    (row,) = rows(
        literal.journal(*(literal.record(replicate=i, beside={"conversion": x}) for i, x in enumerate(seen)))
    )
    assert row.value("conversion") == 2.0
    (row,) = rows(literal.journal(literal.record()))
    assert row.value("conversion") is None


def test_throttled_only_if_more_than_half_of_the_samples_were(literal: Any) -> None:
    def throttled(*counts: int) -> bool | None:
        lines = [
            literal.record(samples=[1.0] * 4, replicate=i, throttled=tuple(range(n))) for i, n in enumerate(counts)
        ]
        return rows(literal.journal(*lines))[0].throttled

    assert throttled(4, 0) is False
    assert throttled(4, 1) is True


def test_converged_only_if_every_replicate_did(literal: Any) -> None:
    lines = [literal.record(replicate=0), literal.record(replicate=1, converged=False)]
    assert rows(literal.journal(*lines))[0].converged is False


# --- statuses -----------------------------------------------------------------------------------------


def test_a_replicate_that_crashed_costs_itself_only_and_is_told(literal: Any) -> None:
    lines = [literal.record(samples=1.0), literal.record(replicate=1, status="crashed", reason="signal 11")]
    (row,) = rows(literal.journal(*lines))
    assert (row.status, row.reason) == ("ok", "1 of 2 replicates: crashed: signal 11")
    assert (row.value(), row.replicates) == (1.0, 1)


def test_a_wrong_answer_is_never_outvoted(literal: Any) -> None:
    lines = [literal.record(replicate=0), literal.record(replicate=1)]
    lines.append(literal.record(replicate=2, status="incorrect", reason="NaN"))
    (row,) = rows(literal.journal(*lines))
    assert (row.status, row.reason, row.value()) == ("incorrect", "NaN", None)


def test_a_wrong_answer_outranks_other_failures(literal: Any) -> None:
    lines = [literal.record(status="timeout", reason="60 s")]
    lines.append(literal.record(replicate=1, status="incorrect", reason="NaN"))
    assert rows(literal.journal(*lines))[0].status == "incorrect"


@pytest.mark.parametrize("status", ["unsupported", "unavailable", "out_of_memory", "timeout", "crashed", "error"])
def test_a_failure_keeps_its_row_with_status_and_reason(literal: Any, status: str) -> None:
    (row,) = rows(literal.journal(copy(2_000_000, 1.0), literal.record(status=status, reason="because")))
    assert (row.status, row.reason, row.value(), row.replicates) == (status, "because", None, 0)
    assert row.limit == pytest.approx(1.0)  # a limit is the case's, whoever fails at it


def test_a_wrong_baseline_is_no_baseline(literal: Any) -> None:
    lines = [
        literal.record("kernelmark", 2.0),
        literal.record("fast_and_wrong", status="incorrect", reason="NaN"),
        literal.record("torch", 3.0),
    ]
    assert by_name(rows(literal.journal(*lines)))["kernelmark"].best_baseline == "torch"


# --- speedups -----------------------------------------------------------------------------------------


def test_speedup_is_against_the_fastest_baseline_and_against_eager(literal: Any) -> None:
    lines = [
        literal.record("kernelmark", 1.0),
        literal.record("torch", 4.0),
        literal.record("liger", 2.0),
        literal.record("clone", 0.5, provider="yardstick"),
    ]
    found = by_name(rows(literal.journal(*lines)))
    ours = found["kernelmark"]
    assert (ours.speedup_vs_best_baseline, ours.best_baseline, ours.speedup_vs_eager) == (2.0, "liger", 4.0)
    assert (found["torch"].speedup_vs_best_baseline, found["torch"].speedup_vs_eager) == (0.5, 1.0)
    assert found["liger"].speedup_vs_best_baseline == 1.0


def test_a_librarys_own_reference_is_no_baseline(literal: Any) -> None:
    """It is timed and shown, and beating it is nothing to boast of."""
    lines = [literal.record("kernelmark", 1.0), literal.record("mamba_ssm_reference", 0.5)]
    found = by_name(rows(literal.journal(*lines)))
    assert found["kernelmark"].speedup_vs_best_baseline is None
    assert found["mamba_ssm_reference"].value() is not None
    found = by_name(rows(literal.journal(*lines, literal.record("torch", 3.0))))
    assert found["kernelmark"].best_baseline == "torch"


def test_without_a_baseline_there_is_no_speedup(literal: Any) -> None:
    lines = [literal.record("kernelmark", 1.0), literal.record("clone", 0.5, provider="yardstick")]
    row = by_name(rows(literal.journal(*lines)))["kernelmark"]
    assert (row.speedup_vs_best_baseline, row.best_baseline, row.speedup_vs_eager) == (None, None, None)


def test_speedup_interval_pairs_replicates() -> None:
    # Both sides drift together by a factor of 2 and 4: the ratios within processes are all 2.
    assert speedup({0: 2.0, 1: 4.0, 2: 8.0}, {0: 1.0, 1: 2.0, 2: 4.0}) == (2.0, pytest.approx(2), pytest.approx(2))


def test_speedup_interval_by_hand() -> None:
    value, low, high = speedup({0: 1.0, 1: math.e, 2: math.e**2}, {0: 1.0, 1: 1.0, 2: 1.0})
    half = T2 / math.sqrt(3)
    assert value == pytest.approx(math.e)
    assert low == pytest.approx(math.exp(1 - half))
    assert high == pytest.approx(math.exp(1 + half))


def test_a_speedup_is_of_the_processes_that_have_both() -> None:
    """Three processes met a machine half as fast, and only one side ended well in them."""
    base, other = {0: 2.0, 1: 2.0, 2: 2.0, 3: 1.0, 4: 1.0}, {3: 0.5, 4: 0.5}
    assert speedup(base, other) == pytest.approx((2.0, 2.0, 2.0))
    assert speedup(other, base) == pytest.approx((0.5, 0.5, 0.5))


def test_the_best_baseline_is_the_best_where_both_ran(literal: Any) -> None:
    times = {"torch": {0: 2.0, 1: 2.0, 2: 1.0}, "liger": {2: 1.2}, "kernelmark": {0: 1.8, 1: 1.8, 2: 0.9}}
    records = [
        literal.record(name, ms, provider=name, replicate=i) for name, x in times.items() for i, ms in x.items()
    ]
    found = {x.implementation: x for x in rows(literal.journal(*records))}
    assert found["kernelmark"].best_baseline == "torch"
    assert found["kernelmark"].speedup_vs_best_baseline == pytest.approx(1 / 0.9)


def test_speedup_without_common_replicates_has_a_value_and_no_interval() -> None:
    assert speedup({0: 4.0}, {1: 2.0}) == (2.0, None, None)
    assert speedup({0: 4.0}, {0: 2.0}) == (2.0, None, None)
    assert speedup({}, {0: 2.0}) == (None, None, None)
    assert speedup({0: 4.0}, {0: 0.0}) == (None, None, None)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.5, 1.6, "excellent"),
        (1.2, 1.9, "good"),
        (1.0, 1.1, "faster"),
        (0.99, 1.3, "undecided"),
        (0.8, 1.0, "undecided"),
        (0.8, 0.99, "slower"),
        (None, None, None),
    ],
)
def test_category_goes_by_the_bound(
    literal: Any, low: float | None, high: float | None, expected: str | None
) -> None:
    (row,) = rows(literal.journal(literal.record()))
    assert category(msgspec.structs.replace(row, speedup_ci_low=low, speedup_ci_high=high)) == expected


# --- keys, order, the whole ---------------------------------------------------------------------------


def test_key_changes_with_conditions_definition_timer_and_cache_and_with_nothing_else(literal: Any) -> None:
    def key(record: Any = None, **header: Any) -> str:
        return rows(literal.journal(record or literal.record(), **header))[0].key

    same = key()
    assert key(literal.record(samples=5.0, version="2.0"), run="other", commit=None, plan="full") == same
    different = [
        key(key="key1"),
        key(literal.record(case=literal.case(spec="ffff"))),
        key(literal.record(timer="graph")),
        key(literal.record(cache="hot")),
    ]
    assert len({same, *different}) == 5
    conditions = {"gpu": "NVIDIA H200", "python": "3.11.7"}
    versions = [key(literal.record(version=x), conditions=conditions) for x in ("1.0", "2.0", None)]
    assert len({same, *versions}) == 4, "a library's version counts in a journal that says which Python measured"


def test_cold_and_hot_are_two_rows_with_baselines_of_their_own(literal: Any) -> None:
    lines = [
        literal.record(name, samples, cache=cache)
        for cache, pairs in (
            ("cold", (("kernelmark", 1.0), ("torch", 2.0))),
            ("hot", (("kernelmark", 1.0), ("torch", 3.0))),
        )
        for name, samples in pairs
    ]
    found = {x.identity: x for x in rows(literal.journal(*lines))}
    case = literal.case()
    assert found[Key(case.operator, case.name, "kernelmark", "cold")].speedup_vs_eager == 2.0
    assert found[Key(case.operator, case.name, "kernelmark", "hot")].speedup_vs_eager == 3.0


def test_order_is_by_operator_then_pass_then_size_and_ours_first(literal: Any) -> None:
    def case(size: int, pass_: str, operator: str = "rms_norm") -> Case:
        made: Case = literal.case(operator=operator, name=f"S{size}-{pass_}", axes={"S": size}, pass_=pass_)
        return made

    cases = [case(16, "backward"), case(16, "forward"), case(4, "forward"), case(4, "forward", "gelu")]
    lines = [literal.record(x, case=y) for x in ("torch", "kernelmark") for y in cases]
    lines.append(literal.record("clone", case=cases[3], provider="yardstick"))
    found = [(x.operator, x.case, x.implementation) for x in rows(literal.journal(*lines))]
    assert found[:3] == [("gelu", "S4-forward", x) for x in ("kernelmark", "torch", "clone")]
    assert [x[1] for x in found[3::2]] == ["S4-forward", "S16-forward", "S16-backward"]


def test_summarize_has_header_time_and_rows(literal: Any) -> None:
    journal = literal.journal(
        copy(2_000_000, 1.0),
        literal.record("kernelmark", 1.0),
        literal.footer(complete=False),
        literal.footer(),
        replicates=3,
    )
    told = summarize(journal)
    assert (told["comparability_key"], told["replicates"], told["complete"], told["torn"]) == (
        "key0",
        3,
        True,
        False,
    )
    assert told["wall_s"] == 120.0
    assert told["spent_s"] == {"sample": 90.0, "overhead": 30.0}
    assert told["conditions"]["gpu"] == "NVIDIA H200"
    (row,) = told["rows"]
    assert row["pass"] == "forward"
    assert "pass_" not in row


def test_a_killed_run_is_not_complete_and_has_no_wall_time(literal: Any) -> None:
    told = summarize(literal.journal(literal.record()))
    assert (told["complete"], told["wall_s"], told["spent_s"]) == (False, None, {})
    assert spent(literal.journal()) == {}


def test_rows_of_issue_contract(literal: Any) -> None:
    """The names that `kernelmark show --json` promises."""
    promised = (
        "operator case axes dtype pass implementation provider version status reason timer cache replicates "
        "latency_ms ci_low_ms ci_high_ms bytes flops gbps tflops tokens_per_s limit_ms fraction_of_limit "
        "speedup_vs_best_baseline speedup_vs_eager peak_memory_bytes energy_j error"
    )
    assert set(promised.split()) <= summarize(literal.journal(literal.record()))["rows"][0].keys()


# --- anything a journal may hold ----------------------------------------------------------------------

times = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))
seen_in = st.fixed_dictionaries(
    {
        "samples": st.lists(times, min_size=1, max_size=8),
        "beside": st.fixed_dictionaries(
            {
                "launch": st.lists(times, max_size=3),
                "error": st.none() | st.just(0.0) | st.floats(1e-9, 1e9),
                "conversion": st.none() | times,
                "energy": st.none() | st.just(0.0) | st.floats(1e-9, 1e9),
                "memory": st.none() | st.integers(-(2**50), 2**50),
            }
        ),
        "converged": st.booleans(),
    }
)
outcome = st.one_of(seen_in, st.sampled_from(["incorrect", "crashed", "out_of_memory"]))
cells = st.dictionaries(
    st.tuples(st.sampled_from(["kernelmark", "torch", "liger"]), st.integers(0, 3)), outcome, min_size=1
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    found=cells,
    bytes_=st.integers(0, 2**45),
    flops=st.integers(0, 2**55),
    ceilings=st.lists(st.tuples(st.integers(1, 2**45), st.floats(1e-6, 1e6)), max_size=4),
)
def test_rows_never_hold_nan_or_infinity_and_survive_json(
    literal: Any,
    found: dict[tuple[str, int], Any],
    bytes_: int,
    flops: int,
    ceilings: list[tuple[int, float]],
) -> None:
    case = literal.case(bytes=bytes_, flops=flops, tokens=7)
    lines: list[Any] = [x for size, ms in ceilings for x in (copy(size, ms), matmul("bf16", size, ms))]
    for (name, replicate), what in found.items():
        if isinstance(what, str):
            lines.append(literal.record(name, case=case, replicate=replicate, status=what, reason="because"))
        else:
            lines.append(literal.record(name, case=case, replicate=replicate, **what))
    journal = literal.journal(*lines)
    for row in rows(journal):
        told = msgspec.to_builtins(row)
        numbers = [x for y in (told, *told["metrics"].values()) for x in y.values() if isinstance(x, float)]
        assert all(math.isfinite(x) for x in numbers)
        assert msgspec.convert(msgspec.to_builtins(row), Row) == row
        assert msgspec.json.decode(msgspec.json.encode(row), type=Row) == row
        assert (row.value() is None) == (row.status != "ok")
        for value in row.metrics.values():
            if value.low is not None and value.high is not None and value.processes > 1:
                assert value.low <= value.high
        low, high = row.bounds()
        if low is not None and high is not None:
            assert low <= row.value() <= high
        if row.speedup_ci_low is not None and row.speedup_ci_high is not None:
            assert row.speedup_ci_low <= (row.speedup_vs_best_baseline or 0) <= row.speedup_ci_high
    told = summarize(journal)
    assert msgspec.json.decode(msgspec.json.encode(told)) == json.loads(json.dumps(msgspec.to_builtins(told)))
    summary.overall(rows(journal))
    summary.failures(rows(journal))


# --- statistics that rows rest on ---------------------------------------------------------------------


def test_median_interval_ranks_agree_with_the_binomial() -> None:
    for n in (6, 7, 9, 20, 100, 501):
        ranks = statistics.median_ranks(n)
        assert ranks is not None
        low, high = ranks
        inside = sum(math.comb(n, k) for k in range(low + 1, high + 1)) / 2**n
        narrower = sum(math.comb(n, k) for k in range(low + 2, high)) / 2**n
        assert inside >= 0.95 > narrower
    assert statistics.median_ranks(5) is None


def test_coefficients_of_variation() -> None:
    found = statistics.coefficients_of_variation([[1.0], [0.0, 0.0], [1.0, 3.0]])
    assert found == [None, None, pytest.approx(math.sqrt(2) / 2)]


def test_log_mean_interval_of_one_value_knows_nothing() -> None:
    assert statistics.log_mean_interval([2.0]) == (pytest.approx(2.0), 0.0, math.inf)


# --- the summary --------------------------------------------------------------------------------------


def standing_journal(literal: Any) -> Any:
    """Two cases in three replicates: on one ours is 4× as fast as the fastest, on the other half as fast."""
    lines = []
    for name, ours in (("S1", 0.5), ("S2", 4.0)):
        case = literal.case(name=name)
        for r in range(3):
            lines.append(literal.record("kernelmark", ours * (1 + r / 1000), case=case, replicate=r))
            lines.append(literal.record("liger", 2.0, case=case, replicate=r))
            lines.append(literal.record("torch", 8.0, case=case, replicate=r))
    return literal.journal(*lines)


def test_standing_of_an_operator(literal: Any) -> None:
    (found,) = summary.standings(rows(standing_journal(literal)))
    assert found.versus_best == pytest.approx(math.sqrt(4 * 0.5), rel=1e-2)
    assert found.versus_eager == pytest.approx(math.sqrt(16 * 2), rel=1e-2)
    assert (found.cases, found.faster, found.undecided, found.slower) == (2, 1, 0, 1)
    assert found.categories == {"excellent": 1, "slower": 1}
    assert found.best is not None
    assert found.worst is not None
    assert (found.best.case, found.worst.case) == ("S1", "S2")


def test_standing_without_ours_is_empty(literal: Any) -> None:
    found = summary.overall(rows(literal.journal(literal.record("torch"))))
    assert (found.cases, found.compared, found.versus_best, found.best, found.worst) == (1, (), None, None, None)


def test_standing_counts_what_has_no_interval_as_undecided(literal: Any) -> None:
    found = summary.overall(rows(literal.journal(literal.record("kernelmark", 1.0), literal.record("torch", 9.0))))
    assert (found.faster, found.undecided, found.slower) == (0, 1, 0)
    assert found.categories == {"no interval": 1}


def test_failures_are_gathered_by_reason_gravest_first(literal: Any) -> None:
    lines = [
        *(
            literal.record("flash", case=literal.case(name=f"S{i}"), status="unsupported", reason="fp32")
            for i in range(3)
        ),
        literal.record("liger", status="unavailable", reason="not installed"),
        literal.record("torch", status="incorrect", reason="NaN"),
    ]
    found = summary.failures(rows(literal.journal(*lines)))
    assert [(x.status, len(x.rows)) for x in found] == [("incorrect", 1), ("unsupported", 3), ("unavailable", 1)]
    assert found[1].implementations == ("flash",)
    assert found[1].operators == ("rms_norm",)


def test_device_and_commit_by_name(literal: Any) -> None:
    assert summary.device_name(literal.header()) == "NVIDIA H200"
    assert summary.device_name(literal.header(device="cpu", conditions={"cpu": "Xeon"})) == "CPU: Xeon"
    assert summary.device_name(literal.header(device="cpu", conditions={})) == "CPU"
    assert summary.device_name(literal.header(conditions={})) == "CUDA device"
    assert summary.commit(literal.header(commit=None)) == "no commit"
    assert summary.commit(literal.header(dirty=True)) == "0123456789ab + uncommitted changes"


def test_warnings_name_everything_a_reader_must_know(literal: Any) -> None:
    lines = [
        literal.record("a", throttled=(0, 1, 2)),
        literal.record("b", converged=False),
        literal.record("c", status="incorrect", reason="NaN"),
    ]
    journal = msgspec.structs.replace(literal.header(), device="cpu", dirty=True)
    told = " ".join(
        summary.warnings(literal.journal(*lines, device="cpu", dirty=True), rows(literal.journal(*lines)))
    )
    assert journal.device == "cpu"
    for word in ("CPU", "Incomplete", "uncommitted", "wrong answer", "throttled", "precision"):
        assert word in told
    assert summary.warnings(literal.journal(literal.footer()), ()) == ()


def test_a_run_whose_shards_are_missing_was_not_stopped(literal: Any) -> None:
    request = msgspec.structs.replace(literal.header().request, hosts={"rms_norm/a": "host"})
    (told,) = summary.warnings(literal.journal(request=request), ())
    assert told.startswith("Incomplete: shards of the run are missing, or one was stopped")


def test_a_remark_is_said_once_for_all_that_have_it(literal: Any) -> None:
    lines = [
        literal.record(name, remarks=said)
        for name, said in (("a", ("x",)), ("b", ("y", "x")), ("a", ("x",)), ("c", ()))
    ]
    journal = literal.journal(*lines, literal.footer())
    assert summary.warnings(journal, rows(journal)) == ("a, b: x.", "b: y.")


def test_a_remark_with_another_size_in_each_row_is_one(literal: Any) -> None:
    said = (
        "10.02 GiB kept",
        "0.18 GiB kept",
        "0.42 GiB kept",
        "0.42 GiB held",
        "v1.5.2 GiB kept",
        "v1.5.3 GiB kept",
    )
    lines = [literal.record(name, remarks=(remark,)) for name, remark in zip("abcdef", said, strict=True)]
    journal = literal.journal(*lines, literal.footer())
    assert summary.warnings(journal, rows(journal)) == (
        "a, b, c: 0.18 to 10.02 GiB kept.",
        "d: 0.42 GiB held.",
        "e: v1.5.2 GiB kept.",
        "f: v1.5.3 GiB kept.",
    )


@pytest.mark.parametrize(
    ("clocks", "told"),
    [
        (
            [(1980, 1980), (1950, 1970)],
            "throttled for most samples, none of them at a clock 2 % or more below its highest.",
        ),
        (
            [(1700, 1800), (1965, 1980)],
            "throttled for most samples, 1 of them at a clock 2 % or more below its highest.",
        ),
        ([None, None], "throttled for most samples."),
    ],
)
def test_throttled_rows_are_told_apart_by_their_clock(
    literal: Any, clocks: list[tuple[int, int] | None], told: str
) -> None:
    lines = [
        literal.record(name, throttled=(0, 1, 2), telemetry=x and Telemetry(sm_mhz=x))
        for name, x in zip("ab", clocks, strict=True)
    ]
    journal = literal.journal(*lines, literal.footer(), environment={"gpu/max_sm_mhz": 1980})
    (warning,) = summary.warnings(journal, rows(journal))
    assert warning == f"2 rows measured while the device was {told}"


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 9, 20, 127, 128, 129, 1000, 9000])
def test_many_lists_at_a_time_give_the_same_as_each_alone(count: int) -> None:
    generator = np.random.default_rng(count)
    lists = [[*generator.lognormal(0, 0.3, count).tolist()] for _ in range(40)]
    mixed = [array("d", x) for x in lists[:20]] + [tuple(x) for x in lists[20:]] + [(2.0, 3.0)]
    for place, matrix in (
        (i, m[j : j + 1]) for p, m in statistics.matrices([(x,) for x in mixed]) for j, i in enumerate(p)
    ):
        values = np.asarray(mixed[place])
        assert matrix.tolist() == [values.tolist()]
        ordered = np.sort(matrix)
        assert statistics.medians(ordered).tolist() == [median(mixed[place])]
        assert [statistics.quantiles(ordered, x)[0] for x in (0.05, 0.2, 0.95)] == [
            float(np.quantile(values, x)) for x in (0.05, 0.2, 0.95)
        ]
    whole = np.asarray(lists)
    means, variances = statistics.means_and_variances(whole)
    assert means.tolist() == [float(np.asarray(x).mean()) for x in lists]
    assert variances is None if count < 2 else variances.tolist() == [float(np.var(x, ddof=1)) for x in lists]
    assert statistics.log_mean_intervals(lists) == [statistics.log_mean_interval(x) for x in lists]
    assert statistics.summaries(mixed, "median") == [median(x) for x in mixed]
