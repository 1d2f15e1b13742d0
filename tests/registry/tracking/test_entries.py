"""What a journal becomes in MLflow, without MLflow."""

from __future__ import annotations

from typing import Any

import msgspec
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.store.metric import Metric
from kernelmark.registry.tracking.entries import entries


def test_a_conversion_is_a_metric_where_there_is_one(literal: Any) -> None:
    lines = [literal.record("torch", 2.0), literal.record("vllm", 3.0, beside={"conversion": 0.5})]
    found = {x.tags["implementation"]: x.metrics for x in entries(literal.journal(*lines))}
    assert found["vllm"]["conversion/median_ms"] == 0.5
    assert found["vllm"]["latency/median_ms"] == 3.0
    assert "conversion/median_ms" not in found["torch"]


def test_a_value_at_a_declared_step_has_a_name_that_mlflow_takes(literal: Any) -> None:
    line = literal.record("torch", 2.0, beside={"loss@5000": 1.25})
    header = msgspec.structs.replace(
        literal.journal(line).header, metrics=(*literal.journal(line).header.metrics, Metric("loss@5000", "bit"))
    )
    (found,) = (x.metrics for x in entries(Journal(header, (line,))) if x.tags.get("implementation") == "torch")
    assert found["loss_at_5000/median_bit"] == 1.25
    assert not any("@" in x for x in found)


def test_a_curve_has_no_median(literal: Any) -> None:
    """Nor has the list of what its places are."""
    line = literal.record("torch", 2.0, beside={"loss": (3.0, 2.0), "loss_step": (10.0, 20.0), "peak": 5.0})
    drawn = (Metric("loss", "bit", shown="never", abscissa="loss_step"), Metric("loss_step", "1", shown="never"))
    header = literal.journal(line).header
    header = msgspec.structs.replace(header, metrics=(*header.metrics, *drawn, Metric("peak", "B")))
    (found,) = entries(Journal(header, (line,)))
    assert not [x for x in found.metrics if x.startswith("loss")]
    assert found.curves == {"loss/curve": ((10, 3.0), (20, 2.0))}
    assert found.metrics["peak/median_B"] == 5.0


def test_a_name_is_as_long_as_a_servers_database_takes(literal: Any) -> None:
    record = literal.record("i" * 200, 2.0)
    line = msgspec.structs.replace(record, case=msgspec.structs.replace(record.case, name="c" * 200))
    (found,) = entries(literal.journal(line))
    assert len(found.name) == 250 > len(found.tags["implementation"])
