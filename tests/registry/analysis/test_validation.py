"""The six criteria and what speedups say, on literal rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.analysis.speedups import memory_per_sample, memory_saving, over, samples_per_s, sentence
from kernelmark.registry.analysis.validation import Validated, validate, verdict
from kernelmark.registry.store.journal import Journal, encode
from kernelmark.registry.store.metric import OPERATOR_METRICS, Equivalence, Metric
from kernelmark.registry.store.record import Case, Header, Measurement, Record
from kernelmark.suite.cli.validate import command_validate

QUALITY = (
    Metric("bits_per_byte", "bit", summary="last", judged=Equivalence(0.0025)),
    Metric("steps_to_target", "1"),
    Metric("nonfinite", "1"),
    Metric("gradient_cosine", "1", better="higher"),
)
GOOD = {"latency": 1.0, "memory": 100.0, "error": 1e-6}
BASE = {"latency": 2.0, "memory": 100.0, "error": 1e-6}
TRAINED = {"bits_per_byte": 1.2, "steps_to_target": 100.0, "nonfinite": 0.0, "gradient_cosine": 0.99}


def journal(
    ours: dict[str, float],
    base: dict[str, float] | None,
    program: bool = False,
    dtype: str = "fp32",
    cases: int = 1,
) -> Journal:
    """Three replicates of ours and of torch, which is a little slower in every replicate."""
    metrics = (*OPERATOR_METRICS, *QUALITY)
    header = Header(2, "r", "2026-11-22", "0", None, False, "p", 0, 3, "cpu", "k", {}, {}, metrics=metrics)
    records = []
    for number in range(cases):
        case = Case(
            "gelu", f"M{number}", {"B": 4}, {}, dtype, "program" if program else "forward", "5bec", 10, 10
        )  # fmt: skip
        for name, provider, values in (("kernelmark", "kernelmark", ours), ("torch", "torch", base)):
            for replicate in range(3) if values else ():
                seen = Measurement({x: (y * (1 + 0.001 * replicate),) * 6 for x, y in values.items()}, "events")
                records.append(Record(case, name, provider, "1", replicate, 0, "cold", "ok", None, seen))
    return Journal(header, tuple(records))


def ticks(found: tuple[Validated, ...]) -> str:
    (row,) = found
    return " ".join(x.verdict for x in row.criteria)


@pytest.mark.parametrize(
    ("ours", "said", "whole"),
    [
        (GOOD, "pass pass pass unknown unknown unknown", "pass"),
        (GOOD | {"latency": 1.7}, "fail pass pass unknown unknown unknown", "fail"),
        (GOOD | {"memory": 105.0}, "pass pass pass unknown unknown unknown", "pass"),
        (GOOD | {"memory": 105.2}, "pass fail pass unknown unknown unknown", "fail"),
        (GOOD | {"error": 1.1e-5}, "pass pass fail unknown unknown unknown", "fail"),
        ({"latency": 1.0}, "pass unknown unknown unknown unknown unknown", "unknown"),
    ],
)
def test_an_operators_row(ours: dict[str, float], said: str, whole: str) -> None:
    found = validate(journal(ours, BASE))
    assert ticks(found) == said
    assert (found[0].verdict, verdict(found)) == (whole, whole)


def test_an_error_is_held_to_its_dtype() -> None:
    found = validate(journal(GOOD | {"error": 4e-3}, BASE, dtype="bf16"))[0].criteria[2]
    assert (found.verdict, found.seen, found.bound) == ("pass", "4.0e-03", "at most 0.008 in bf16")
    assert validate(journal(GOOD, BASE, dtype="e4m3"))[0].criteria[2].verdict == "unknown"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "pass pass pass pass pass pass"),
        ({"bits_per_byte": 1.204}, "pass pass pass fail pass pass"),
        ({"steps_to_target": 106.0}, "pass pass pass pass fail pass"),
        ({"nonfinite": 1.0}, "pass pass pass pass pass fail"),
        ({"gradient_cosine": 0.5}, "pass pass pass pass pass fail"),
    ],
)
def test_a_models_row_is_asked_all_six(changed: dict[str, float], said: str) -> None:
    found = validate(journal(GOOD | TRAINED | changed, BASE | TRAINED, program=True))
    assert ticks(found) == said
    assert found[0].verdict == ("fail" if changed else "pass")


def test_without_a_baseline_nothing_is_known() -> None:
    found = validate(journal(GOOD, None))
    assert ticks(found) == "unknown unknown pass unknown unknown unknown"
    assert verdict(found) == "unknown"
    assert verdict(()) == "unknown"


def test_the_page_and_the_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    given = journal(GOOD | {"memory": 110.0}, BASE)
    path.write_bytes(b"".join(encode(x) for x in (given.header, *given.records)))
    done = CliRunner().invoke(command_validate, [str(path)])
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "✗ gelu/M0 kernelmark (cold)",
        "    ✓ speedup: 2.00× over torch, at least 2.00× (at least 1.2×)",
        "    ✗ memory: +10.0 % of torch's 0.0 MB (at most 5 % more)",
        "    ✓ error: 1.0e-06 (at most 1e-05 in fp32)",
        "    ? quality, stability, gradients: not measured of an operator alone, and not asked",
        "fail: 0 pass, 1 fail, 0 unknown",
    ]
    done = CliRunner().invoke(command_validate, [str(path), "--json"])
    assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (1, "fail")


def test_speedups_over_cases() -> None:
    found = rows(journal(GOOD, BASE, cases=3))
    for baseline in (None, "torch"):
        ours = over(found, "kernelmark", baseline)
        assert ours is not None
        assert (ours.cases, round(ours.geometric, 6), ours.lowest, ours.highest) == (
            3,
            2.0,
            ours.median,
            ours.median,
        )
    assert over(found, "kernelmark", "liger") is None
    assert sentence("Ours", 1.93) == "Ours: 1.93x speedup, +93% throughput"
    assert sentence("Theirs", 0.87) == "Theirs: 0.87x speedup, -13% throughput"


def test_samples_and_their_memory() -> None:
    ours, base = rows(journal(GOOD | {"memory": 85.0}, BASE))
    assert samples_per_s(ours) == pytest.approx(4 / 1.001e-3)
    assert memory_per_sample(ours) == pytest.approx(85 * 1.002 / 4)
    assert memory_saving(ours, base) == pytest.approx(0.15)
