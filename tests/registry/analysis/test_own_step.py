"""What implementations are worth to a captured program's step, from literal journals."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from kernelmark.registry.analysis.own_step import own_step
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.store.metric import OPERATOR_METRICS
from kernelmark.registry.store.record import Case, Header, Measurement, Pass, Record, Request
from kernelmark.registry.views.own_step_table import own_step_table
from kernelmark.registry.views.table import render
from kernelmark.registry.views.tables import run_table

STEP_MS = 100.0


def case(operator: str, pass_: Pass) -> Case:
    return Case(operator, f"B2-bf16-{pass_}", {}, {}, "bf16", pass_, "5bec", 1, 1)


FORWARD, BACKWARD = case("rms_norm", "forward"), case("rms_norm", "backward")
LOSS = case("cross_entropy", "forward_backward")
CALLS = {FORWARD.full_name: 20.0, BACKWARD.full_name: 20.0, LOSS.full_name: 1.0}


def journal(times: Mapping[tuple[str, str], float | None], step_ms: float | None = STEP_MS) -> Journal:
    """By operator/case and implementation; None is out of memory."""
    by_name = {x.full_name: x for x in (FORWARD, BACKWARD, LOSS)}
    records = tuple(
        Record(by_name[name], who, who, None, i, 0, "cold", "out_of_memory", "no room")
        if ms is None
        else Record(
            by_name[name], who, who, None, i, 0, "cold", "ok", None, Measurement({"latency": (ms,) * 3}, "events")
        )
        for (name, who), ms in times.items()
        for i in range(2)
    )
    request = Request(calls=CALLS, step_ms=step_ms)
    header = Header(
        2, "r", "", "", None, False, "mine", 0, 2, "cuda", "k", {}, {}, request, OPERATOR_METRICS
    )  # fmt: skip
    return Journal(header, records)


TIMES = {
    (FORWARD.full_name, "torch"): 0.2,
    (BACKWARD.full_name, "torch"): 0.4,
    (FORWARD.full_name, "liger"): 0.1,
    (BACKWARD.full_name, "liger"): 0.3,
    (FORWARD.full_name, "vllm"): 0.05,
    (LOSS.full_name, "torch"): 8.0,
    (LOSS.full_name, "liger"): 9.0,
    (LOSS.full_name, "quack"): None,
}


def test_calls_times_what_one_takes_against_the_step() -> None:
    found = own_step(journal(TIMES))
    assert found is not None
    norm, loss = found.calls
    assert (norm.operator, norm.name, norm.calls, norm.ms) == ("rms_norm", "B2-bf16", 20, pytest.approx(12.0))
    by_name = {x.implementation: x for x in norm.offers}
    assert by_name["liger"].ms == pytest.approx(8.0)
    assert by_name["liger"].worth == pytest.approx(100 / 96)
    assert by_name["torch"].worth == pytest.approx(1.0)
    assert (by_name["vllm"].ms, by_name["vllm"].reason) == (None, "not of all passes")
    assert [x.implementation for x in norm.offers] == ["liger", "torch", "vllm"]
    assert [(x.implementation, x.reason) for x in loss.offers][-1] == ("quack", "out_of_memory: no room")
    assert loss.offers[1].worth == pytest.approx(100 / 101)
    assert found.best == pytest.approx(100 / 96)  # PyTorch's loss is the fastest there is


def test_of_a_cold_and_a_hot_cache_the_cold_one_counts() -> None:
    found = journal(TIMES)
    hot = tuple(
        msgspec.structs.replace(x, cache="hot")
        for x in journal({k: (v or 1) / 2 for k, v in TIMES.items()}).records
    )
    both = Journal(found.header, found.records + hot)
    assert own_step(both) == own_step(found)


def test_what_is_no_captured_program() -> None:
    assert own_step(journal(TIMES, None)) is None
    assert own_step_table(journal(TIMES, None)) == []
    few = journal({(FORWARD.full_name, "liger"): 0.1, (BACKWARD.full_name, "liger"): 0.1})
    found = own_step(few)
    assert found is not None
    assert (found.calls[0].ms, found.calls[0].offers[0].worth, found.best) == (None, None, None)


def test_no_step_holds_more_than_it_takes() -> None:
    found = own_step(journal(TIMES, 3.0))
    assert found is not None
    assert found.calls[0].offers[0].worth is None


def test_the_table_stands_in_the_runs() -> None:
    text = render(run_table(journal(TIMES)), 160)
    assert "worth to your step of 100.000 ms" in text
    assert "1.0417" in text
    assert "rms_norm B2-bf16 vllm: not of all passes" in text
    assert "The fastest of each together: 1.0417 ×" in text
