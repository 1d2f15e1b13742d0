"""What a layer costs, and what follows of a whole model, on literal journals."""

from __future__ import annotations

from typing import Any

import pytest
from kernelmark.registry.analysis.slices import layers_of, sliced
from kernelmark.registry.errors import InputError
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.store.metric import Metric
from kernelmark.registry.store.record import Case, Record, Request
from kernelmark.registry.views.report import render as page
from kernelmark.registry.views.slices_table import slices_table
from kernelmark.registry.views.table import render

METRICS = (
    Metric("step", "ms"),
    Metric("peak_allocated", "B", across="maximum"),
    Metric("tokens_per_s", "tokens/s", "higher"),
)
GB = 10**9


def case(literal: Any, layers: int | None = 4, **changes: Any) -> Case:
    part = "whole" if layers is None else f"first{layers}"
    options = {"model": "large", "slice": part, "state": "plain"}
    return literal.case(operator="train", name=f"B4-large-{part}", options=options, primary="step", **changes)


def measured(literal: Any, of: Case, name: str, replicate: int, ms: float, gb: float | None = None) -> Record:
    beside = {"step": (ms,) * 3, "tokens_per_s": 8 / ms} | ({} if gb is None else {"peak_allocated": gb * GB})
    return literal.record(name, ms, case=of, replicate=replicate, beside=beside)


def run(literal: Any, *records: Record, layers: int | None = 80) -> Journal:
    known = {} if layers is None else {f"train/{case(literal, x).name}": layers for x in (2, 4, 8)}
    return literal.journal(*records, metrics=METRICS, replicates=3, request=Request(layers=known))


def both(literal: Any) -> list[Record]:
    """20 and 30 ms, 22 and 34, 24 and 32: a layer takes 2.5, 3 and 2 ms. Memory grows by 2 GB a layer."""
    times = ((20.0, 30.0), (22.0, 34.0), (24.0, 32.0))
    return [
        measured(literal, case(literal, layers), "torch", i, ms, gb)
        for i, pair in enumerate(times)
        for layers, ms, gb in zip((4, 8), pair, (20, 28), strict=True)
    ]


def test_a_layer_and_the_whole(literal: Any) -> None:
    (found,) = sliced(run(literal, *both(literal)))
    assert (found.layers, found.of, found.processes) == ((4, 8), 80, 3)
    step, memory = found.metrics
    assert (step.metric, step.small, step.large) == ("step", 22, 32)
    # 20 + 76 · 2.5 = 210, 22 + 76 · 3 = 250, 24 + 76 · 2 = 176. Student's t of two degrees of freedom: 4.3027.
    assert step.layer.value == pytest.approx(2.5)
    assert (step.layer.low, step.layer.high) == pytest.approx(
        (2.5 - 4.3027 * 0.5 / 3**0.5, 2.5 + 4.3027 * 0.5 / 3**0.5), abs=1e-3
    )
    assert step.whole is not None
    assert step.whole.value == pytest.approx(212)
    assert step.whole.low is not None
    assert step.whole.low == pytest.approx(212 - 4.3027 * 37.04 / 3**0.5, abs=0.1)
    assert memory.whole is not None
    assert (memory.metric, memory.layer.value, memory.whole.value) == ("peak_allocated", 2 * GB, 172 * GB)


def test_one_process_has_no_interval(literal: Any) -> None:
    records = [
        measured(literal, case(literal, 4), "torch", 0, 20),
        measured(literal, case(literal, 8), "torch", 0, 30),
    ]
    ((step,),) = [x.metrics for x in sliced(run(literal, *records))]
    assert (step.layer.value, step.layer.low, step.layer.high) == (2.5, None, None)


def test_of_a_model_of_unknown_depth_only_the_layer_is_known(literal: Any) -> None:
    (found,) = sliced(run(literal, *both(literal), layers=None))
    assert [x.whole for x in found.metrics] == [None, None]


def test_processes_are_paired(literal: Any) -> None:
    records = [*both(literal), measured(literal, case(literal, 4), "torch", 3, 900, 1)]
    assert sliced(run(literal, *records)) == sliced(run(literal, *both(literal)))


def test_a_slice_that_failed_says_why(literal: Any) -> None:
    records = [measured(literal, case(literal, 4), "torch", 0, 20)]
    records += [literal.record("torch", case=case(literal, 8), status="out_of_memory", reason="160 GB")]
    records += [measured(literal, case(literal, 4), "liger", 0, 20)]
    torch, liger = sliced(run(literal, *records))
    assert (torch.metrics, torch.missing) == ((), "B4-large-first8: out of memory: 160 GB")
    assert liger.missing == "B4-large-first8: unavailable: not measured"


def test_one_slice_or_another_case_is_no_difference(literal: Any) -> None:
    records = [
        measured(literal, case(literal, 4), "torch", 0, 20),
        measured(literal, case(literal, None), "torch", 0, 99),
        measured(literal, case(literal, 8, dtype="fp32"), "torch", 0, 30),
    ]
    assert sliced(run(literal, *records)) == ()
    assert slices_table(run(literal, *records)) == []
    assert [layers_of(x.case) for x in records] == [4, None, 8]


def test_of_three_slices_the_smaller_two(literal: Any) -> None:
    records = [*both(literal), measured(literal, case(literal, 2), "torch", 0, 15, 16)]
    (found,) = sliced(run(literal, *records))
    assert (found.layers, found.metrics[0].layer.value) == ((2, 4), 2.5)


def test_the_table_and_the_report_call_it_extrapolated(literal: Any) -> None:
    records = [*both(literal), measured(literal, case(literal, 4), "liger", 0, 20)]
    journal = run(literal, *records)
    text = render(slices_table(journal), 200)
    assert "whole, extrapolated" in text
    assert "EXTRAPOLATED from slices" in text
    assert " ".join(text.split()).count("B4-large-first4 and first8, of 80 layers") == 2
    assert "212.0 ms" in text
    assert "172 GB" in text
    assert "liger: B4-large-first8: unavailable: not measured" in text
    html = page([journal])
    assert '-slices">Larger than a GPU, from slices</h2>' in html
    assert "EXTRAPOLATED from slices" in html
    assert "212.0 ms" in html


def test_layers_of_a_foreign_journal_are_bounded(literal: Any) -> None:
    with pytest.raises(InputError, match="layers"):
        literal.journal(request=Request(layers={"train/a": 0}))
