"""What a kernel is worth in a model, from literal journals: sums, intervals, and what becomes of failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest
from kernelmark.registry.analysis.worth import Worth, unexplained, worths
from kernelmark.registry.store.journal import Journal, encode, parse
from kernelmark.registry.store.metric import OPERATOR_METRICS, Metric
from kernelmark.registry.store.record import (
    Case,
    Exchange,
    Header,
    Launched,
    Launches,
    Measurement,
    Record,
    Request,
    Status,
)
from kernelmark.registry.views import report
from kernelmark.registry.views.table import render
from kernelmark.registry.views.worth_table import cells, missing, worth_table

CALLS = 16


def case(operator: str, name: str, primary: str) -> Case:
    return Case(operator, name, {}, {}, "bf16", "program", "5bec", 1, 1, primary=primary)


STEP, PART = case("train", "B4-tiny", "step"), case("attention", "B4-H16", "latency")


METRICS = (Metric("step", "ms"), *OPERATOR_METRICS)


def exchange(system: str, implementation: str = "fa4") -> Exchange:
    return Exchange(
        system,
        "torch_compile",
        "attention",
        "train",
        "B4-tiny",
        "attention",
        "B4-H16",
        implementation,
        "torch",
        CALLS,
    )


def record(of: Case, implementation: str, replicate: int, ms: float, status: Status = "ok") -> Record:
    measurement = Measurement({of.primary: (ms, ms, ms)}, "events")
    return Record(
        case=of,
        implementation=implementation,
        provider="torch",
        version=None,
        replicate=replicate,
        position=0,
        cache="cold",
        status=status,
        reason=None if status == "ok" else "why",
        measurement=measurement if status == "ok" else None,
    )


def journal(
    steps: Mapping[str, Sequence[float]], alone: Mapping[str, float], exchanges: Sequence[Exchange], *more: Record
) -> Journal:
    records = [record(STEP, name, i, ms) for name, times in steps.items() for i, ms in enumerate(times)]
    records += [record(PART, name, 0, ms) for name, ms in alone.items()]
    header = Header(
        2,
        "r",
        "2026-11-21T00:00:00Z",
        "",
        None,
        False,
        "worth",
        0,
        5,
        "cuda",
        "k",
        {},
        {},
        Request(exchanges=tuple(exchanges)),
        METRICS,
    )
    return Journal(header, (*records, *more))


def test_alone_expected_and_measured() -> None:
    times = {"torch_compile": [200.0] * 3, "a": [190.0, 190.0, 190.0]}
    (found,) = worths(journal(times, {"torch": 2.0, "fa4": 1.5}, [exchange("a")]))
    assert found.alone == pytest.approx(2.0 / 1.5)
    assert found.expected_ms == pytest.approx(CALLS * 0.5)
    assert found.expected == pytest.approx(200 / 192)
    assert found.measured == pytest.approx(200 / 190)
    assert (found.low, found.high) == pytest.approx((200 / 190, 200 / 190))
    assert found.gained_ms == pytest.approx(10.0)
    assert found.processes == 3
    assert found.agreement == "more"
    assert not found.null


def test_a_lost_process_costs_its_pair_alone() -> None:
    """The row of the base is ok, as four of its processes are."""
    lost = record(STEP, "torch_compile", 4, 0, "timeout")
    times = {"torch_compile": [200.0] * 4, "a": [190.0] * 5}
    (found,) = worths(journal(times, {}, [exchange("a")], lost))
    assert (found.status, found.processes) == ("ok", 4)
    assert found.measured == pytest.approx(200 / 190)


def test_pairs_are_of_one_process() -> None:
    # Processes differ by half; the exchange gains 1 % in each.
    base = [100.0, 150.0, 120.0, 90.0]
    (found,) = worths(journal({"torch_compile": base, "a": [x / 1.01 for x in base]}, {}, [exchange("a")]))
    assert found.measured == pytest.approx(1.01)
    assert found.low == pytest.approx(1.01)
    assert found.expected is None
    assert found.agreement == "unknown"


@pytest.mark.parametrize("delay_us", [50, 200, 1000])
def test_a_delay_of_each_call_is_recovered(delay_us: int) -> None:
    random = np.random.default_rng(5)
    drift = random.normal(1, 0.02, 5)
    base = [200 * x * random.normal(1, 0.0002) for x in drift]
    slow = [(200 + CALLS * delay_us / 1e3) * x * random.normal(1, 0.0002) for x in drift]
    (found,) = worths(
        journal({"torch_compile": base, "a": slow}, {"torch": 2.0, "fa4": 2.0 + delay_us / 1e3}, [exchange("a")])
    )
    assert found.gained_ms == pytest.approx(-CALLS * delay_us / 1e3, rel=0.05)
    assert found.expected_ms == pytest.approx(-CALLS * delay_us / 1e3)


def test_a_null_exchange_is_called_null_in_95_of_100() -> None:
    random = np.random.default_rng(7)
    null = 0
    for _ in range(400):
        base, same = (list(200 * random.normal(1, 0.003, 5)) for _ in range(2))
        (found,) = worths(journal({"torch_compile": base, "a": same}, {}, [exchange("a")]))
        null += found.null
    assert 0.92 <= null / 400 <= 0.98


def test_one_process_shows_nothing() -> None:
    (found,) = worths(journal({"torch_compile": [200.0], "a": [100.0]}, {}, [exchange("a")]))
    assert found.measured == pytest.approx(2.0)
    assert found.null


def test_one_process_says_nothing_of_an_expectation() -> None:
    """Half as long was expected and twice as long was measured: an interval that holds all agrees with nothing."""
    given = {"torch": 20.0, "fa4": 14.0}
    (found,) = worths(journal({"torch_compile": [200.0], "a": [400.0]}, given, [exchange("a")]))
    assert found.expected == pytest.approx(200 / 104)
    assert found.measured == pytest.approx(0.5)
    assert found.agreement == "unknown"


def test_what_failed_says_so_and_a_wrong_answer_first() -> None:
    wrong = record(STEP, "a", 1, 0, "incorrect")
    (found,) = worths(journal({"torch_compile": [200.0, 200.0], "a": [150.0]}, {}, [exchange("a")], wrong))
    assert (found.status, found.reason) == ("incorrect", "a: why")
    (found,) = worths(journal({"torch_compile": [200.0]}, {}, [exchange("a")]))
    assert found.status == "unavailable"


def test_an_isolated_row_that_failed_leaves_the_expectation_open() -> None:
    lost = record(PART, "fa4", 0, 0, "out_of_memory")
    (found,) = worths(
        journal({"torch_compile": [2.0, 2.0], "a": [1.0, 1.0]}, {"torch": 1.0}, [exchange("a")], lost)
    )
    assert found.alone is None
    assert found.measured == pytest.approx(2.0)


def test_gains_that_no_step_can_hold_are_not_expected() -> None:
    (found,) = worths(journal({"torch_compile": [2.0], "a": [1.0]}, {"torch": 9.0, "fa4": 1.0}, [exchange("a")]))
    assert found.expected is None


def test_the_table() -> None:
    made = journal(
        {"torch_compile": [200.0] * 3, "a": [190.0] * 3},
        {"torch": 2.0, "fa4": 1.5},
        [exchange("a"), exchange("b")],
    )
    text = render(worth_table(made), 120)
    assert "base torch_compile, 200.00 ms" in text
    assert "1.0526" in text
    assert "not measured yet" in text
    assert worth_table(journal({}, {}, [])) == []


def test_what_is_not_as_expected_is_profiled_and_told() -> None:
    times = {"torch_compile": [200.0] * 3, "a": [190.0] * 3, "b": [200.0, 200.1, 199.9]}
    alone = {"torch": 2.0, "fa4": 1.5, "same": 2.0}
    made = journal(times, alone, [exchange("a"), exchange("b", "same")])
    rows = [("train", "B4-tiny", name) for name in ("torch_compile", "a")]
    assert list(unexplained(made)) == rows  # b is what was expected of it
    told = "kernelmark worth --resume"
    assert told in render(worth_table(made), 120)
    kernels = [Launched("rows", "other", CALLS, 3.0)], [Launched("fa4_forward", "other", CALLS, 1.0)]
    lines = tuple(Launches(*row, 2, 0.0, tuple(x)) for row, x in zip(rows, kernels, strict=True))
    made = dataclasses.replace(made, launches=lines)
    assert unexplained(made) == ()
    first, second = worths(made)
    assert first.differs == "gone: rows × 16 (3.000 ms); new: fa4_forward × 16 (1.000 ms)"
    assert second.differs == ""
    text = render(worth_table(made), 160)
    assert f"attention fa4 more: {first.differs}" in text
    assert told not in text
    assert f"more: {first.differs}" in report.render([made])
    read = parse(b"".join(encode(x) for x in (made.header, *made.records, *lines)))
    assert worths(read) == worths(made)


def test_an_exchange_that_is_refused_says_why() -> None:
    refused = msgspec.structs.replace(exchange("a"), refused="two environments")
    (found,) = worths(journal({"torch_compile": [200.0]}, {}, [refused]))
    assert (found.status, found.reason) == ("unsupported", "a: two environments")


def test_a_header_with_exchanges_is_read_back() -> None:
    header = journal({}, {}, [exchange("a")]).header
    assert msgspec.json.decode(msgspec.json.encode(header), type=Header) == header


def test_cells_of_what_is_not_known() -> None:
    assert cells(Worth(exchange("a"), "ok", None))[3:] == ("–",) * 6


def test_what_has_no_figure_stands_by_its_reason() -> None:
    reasons = {"a": "a: no cuda", "b": "torch: no cuda", "c": "c: no cuda", "d": None}
    found = [Worth(exchange(x, x), "unsupported", reason) for x, reason in reasons.items()]
    assert missing(
        [*found, Worth(exchange("e"), "ok", None), Worth(exchange("a", "a"), "out_of_memory", "a: 3 GiB")]
    ) == (
        ("unsupported, no cuda", ("attention a, c",)),
        ("unsupported, torch: no cuda", ("attention b",)),
        ("unsupported, no reason given", ("attention d",)),
        ("out of memory, 3 GiB", ("attention a",)),
    )


def test_the_table_of_a_run_and_its_report_have_them() -> None:
    from kernelmark.registry.views.tables import run_table

    made = journal(
        {"torch_compile": [200.0] * 3, "a": [190.0] * 3},
        {"torch": 2.0, "fa4": 1.5},
        [exchange("a"), exchange("b")],
    )
    page = report.render([made])
    assert 'aria-label="1 gain"><i class="faster"' in page, "of exchanges, as the headline"
    assert "What a kernel is worth in a model" in page
    assert "1.0526" in page
    assert "not measured yet" in page
    assert "worth in a model" not in report.render([journal({"torch_compile": [200.0]}, {}, [])])
    assert "1.0526" in render(run_table(made), 120)


def test_an_exchanged_system_is_in_no_table_of_the_fastest() -> None:
    """It is neither a baseline nor ours: its step stands beside its base's, as its worth."""
    from kernelmark.registry.analysis.peers import peers
    from kernelmark.registry.analysis.rows import rows
    from kernelmark.registry.views.tables import run_table

    ours = msgspec.structs.replace(record(STEP, "kernelmark", 0, 195.0), provider="kernelmark")
    mine = msgspec.structs.replace(record(STEP, "b", 0, 180.0), provider="kernelmark")
    steps = {"torch_compile": [200.0], "a": [190.0]}
    made = journal(steps, {"torch": 2.0, "fa4": 1.5}, [exchange("a"), exchange("b")], ours, mine)
    found = {x.implementation: x for x in rows(made) if x.operator == "train"}
    assert set(found) == {"torch_compile", "a", "b", "kernelmark"}, "each still is a row"
    assert found["kernelmark"].best_baseline == "torch_compile"
    assert found["kernelmark"].speedup_vs_best_baseline == pytest.approx(200 / 195)
    assert [found[x].speedup_vs_best_baseline for x in "ab"] == [None, None]
    ((key, rivals),) = peers(made, rows(made)).items()
    assert (key.implementation, set(rivals)) == ("kernelmark", {"torch_compile"})
    table, worth = render(run_table(made), 120).split("worth · B4-tiny", 1)
    assert "torch_compile" in table
    assert not any(x.split()[:1] in (["a"], ["b"]) for x in table.splitlines())
    assert "1.0526" in worth
    page = report.render([made])
    assert 'data-name="a"' not in page


def test_mlflow_has_the_figures_of_worth() -> None:
    from kernelmark.registry.tracking.entries import entries

    made = journal({"torch_compile": [200.0] * 3, "a": [190.0] * 3}, {"torch": 2.0, "fa4": 1.5}, [exchange("a")])
    found = {x.tags["implementation"]: x for x in entries(made) if x.tags["operator"] == "train"}
    worth = {name: x for name, x in found["a"].metrics.items() if name.startswith("worth/")}
    assert worth == pytest.approx(
        {
            "worth/alone": 2 / 1.5,
            "worth/expected": 200 / 192,
            "worth/measured": 200 / 190,
            "worth/measured_ci_low": 200 / 190,
            "worth/measured_ci_high": 200 / 190,
        }
    )
    assert not any(x.startswith("worth/") for x in found["torch_compile"].metrics)
    other = journal({"torch_compile": [200.0] * 3, "a": [190.0] * 3}, {"torch": 2.0, "fa4": 1.4}, [exchange("a")])
    again = {x.tags["implementation"]: x for x in entries(other) if x.tags["operator"] == "train"}
    assert again["a"].sha256 != found["a"].sha256, "the isolated row is another"
    assert again["torch_compile"].sha256 == found["torch_compile"].sha256
