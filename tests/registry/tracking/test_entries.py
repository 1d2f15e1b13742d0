"""What a journal becomes in MLflow, without MLflow."""

from __future__ import annotations

from typing import Any

from kernelmark.registry.tracking.entries import entries


def test_a_conversion_is_a_metric_where_there_is_one(literal: Any) -> None:
    lines = [literal.record("torch", 2.0), literal.record("vllm", 3.0, beside={"conversion": 0.5})]
    found = {x.tags["implementation"]: x.metrics for x in entries(literal.journal(*lines))}
    assert found["vllm"]["conversion/median_ms"] == 0.5
    assert found["vllm"]["latency/median_ms"] == 3.0
    assert "conversion/median_ms" not in found["torch"]
