"""The six criteria and what speedups say, on literal rows with the metrics that workloads name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.analysis.speedups import (
    excludes_one,
    mean_bounds,
    memory_per_sample,
    memory_saving,
    over,
    samples_per_s,
    sentence,
)
from kernelmark.registry.detection.arms import arms
from kernelmark.registry.detection.validation import Validated, validate, verdict
from kernelmark.registry.store.journal import Journal, encode
from kernelmark.registry.store.metric import OPERATOR_METRICS, Metric
from kernelmark.registry.store.record import Case, Header, Measurement, Record
from kernelmark.suite.cli.validate import command_validate
from kernelmark.suite.workloads import converge, endpoint, forward, generate, quality, serve, train

GOOD = {"latency": 1.0, "memory": 100.0, "error": 1e-6}
BASE = {"latency": 2.0, "memory": 100.0, "error": 1e-6}
STEPS = (0.0, 250.0, 500.0, 750.0, 1000.0)
LOSSES = (8.0, 3.0, 2.0, 1.5, 1.2)
"""Of an arm on the validation text, in bits a byte, at these steps."""
HEALTHY = {"nonfinite": 0.0, "gradient_cosine": 0.99, "loss_error": 1e-3, "gradient_error": 0.02}
"""gradient_error is what PyTorch's own step has in bf16."""


def journal(
    ours: dict[str, float],
    base: dict[str, float] | None,
    dtype: str = "fp32",
    cases: int = 1,
) -> Journal:
    """Three replicates of ours and of torch, which is a little slower in every replicate."""
    records = []
    for number in range(cases):
        case = Case("gelu", f"M{number}", {"B": 4}, {}, dtype, "forward", "5bec", 10, 10)
        for name, provider, values in (("kernelmark", "kernelmark", ours), ("torch", "torch", base)):
            for replicate in range(3) if values else ():
                seen = Measurement({x: (y * (1 + 0.001 * replicate),) * 6 for x, y in values.items()}, "events")
                records.append(Record(case, name, provider, "1", replicate, 0, "cold", "ok", None, seen))
    return Journal(header(OPERATOR_METRICS), tuple(records))


def header(metrics: tuple[Metric, ...]) -> Header:
    return Header(2, "r", "2026-11-22", "0", None, False, "p", 0, 3, "cpu", "k", {}, {}, metrics=metrics)


def arm(name: str, provider: str, seed: int, rate: float, loss: float = 1.0, **health: float) -> Record:
    """A seed of an arm of `converge`: so many tokens/s, so many times the loss."""
    case = Case("converge", "N1000", {"N": 1000}, {}, "bf16", "program", "c0", 0, 0, None, "bits_per_byte")
    curve = tuple(x * loss * (1 + 1e-4 * ((seed * 7 + len(name)) % 5)) for x in LOSSES)
    samples = {
        "bits_per_byte": (curve[-1],),
        "bits_by_step": curve,
        "validated_step": STEPS,
        "tokens_per_s": (rate * (1 + seed / 100),),
        **{x: (y,) for x, y in (HEALTHY | health).items()},
    }
    return Record(case, name, provider, "1", seed, 0, "cold", "ok", None, Measurement(samples, "own clock"))


def trained(seeds: int = 5, **ours: float) -> Journal:
    """Ours beside PyTorch, what it compiles to, and an arm that is faster still and learns less."""
    records = []
    for seed in range(seeds):
        records += [
            arm("torch", "torch", seed, 1000.0),
            arm("torch_compile", "torch", seed, 1200.0),
            arm("linear_attention", "torch", seed, 5000.0, loss=1.1),
            arm("kernelmark", "kernelmark", seed, **{"rate": 1500.0, **ours}),
        ]
    return Journal(header(converge.METRICS), tuple(records))


def program(named: tuple[Metric, ...], name: str, primary: str, samples: dict[str, float]) -> tuple[Record, ...]:
    """Ours and PyTorch's of a workload, three replicates."""
    case = Case(name, "P", {"B": 1}, {}, "bf16", "program", "f0", 0, 0, None, primary)
    assert samples.keys() <= {x.name for x in named}
    measured = Measurement({x: (y,) for x, y in samples.items()}, "own clock")
    return tuple(
        Record(case, x, x, "1", replicate, 0, "cold", "ok", None, measured)
        for x in ("kernelmark", "torch")
        for replicate in range(3)
    )


def asked(found: tuple[Validated, ...]) -> list[str]:
    (row,) = found
    return [x.name for x in row.asked]


def ticks(found: tuple[Validated, ...]) -> str:
    (row,) = found
    return " ".join("-" if x.verdict == "not asked" else x.verdict for x in row.criteria)


@pytest.mark.parametrize(
    ("ours", "said", "whole"),
    [
        (GOOD, "pass pass pass - - -", "pass"),
        (GOOD | {"latency": 1.7}, "fail pass pass - - -", "fail"),
        (GOOD | {"memory": 105.0}, "pass pass pass - - -", "pass"),
        (GOOD | {"memory": 105.2}, "pass fail pass - - -", "fail"),
        (GOOD | {"error": 1.1e-5}, "pass pass fail - - -", "fail"),
        ({"latency": 1.0}, "pass unknown unknown - - -", "unknown"),
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
        ({}, "pass - - pass pass pass"),
        ({"rate": 1300.0}, "fail - - pass pass pass"),
        ({"loss": 1.01}, "pass - - fail pass pass"),
        ({"loss": 1.1}, "pass - - fail fail pass"),
        ({"loss": 0.99}, "pass - - pass pass pass"),
        ({"loss": 1.0025}, "pass - - unknown pass pass"),
        ({"nonfinite": 1.0}, "pass - - pass pass fail"),
        ({"gradient_cosine": 0.5}, "pass - - pass pass fail"),
    ],
)
def test_a_row_that_trains_to_a_loss(changed: dict[str, float], said: str) -> None:
    found = validate(trained(**changed))
    assert ticks(found) == said
    assert verdict(found) == ("fail" if "fail" in said else "unknown" if "unknown" in said else "pass")


def test_quality_and_steps_are_those_of_the_paired_arms() -> None:
    given = trained(loss=1.1)
    (row,) = validate(given)
    (ours,) = [x for x in arms(given) if x.name == "kernelmark"]
    quality, stability = row.criteria[3:5]
    assert ours.steps is not None
    assert quality.seen.endswith(ours.points[0].found.reason)
    assert (quality.value, stability.value) == (ours.points[0].found.change, ours.steps.ratio)
    assert (stability.seen, stability.bound) == (ours.steps.reason, "at most 105 % of torch's steps")


def test_fewer_seeds_than_training_needs_are_unknown() -> None:
    found = validate(trained(seeds=4))
    assert ticks(found) == "pass - - unknown unknown pass"
    assert "4 of at least 5 seeds" in found[0].criteria[3].seen


@pytest.mark.parametrize("health", [{"nonfinite": 1.0}, {"gradient_cosine": 0.5}])
def test_one_seed_with_bad_gradients_is_enough(health: dict[str, float]) -> None:
    given = trained()
    bad = arm("kernelmark", "kernelmark", 0, 1500.0, **health)
    records = tuple(bad if x.identity == bad.identity and x.replicate == 0 else x for x in given.records)
    assert ticks(validate(replace(given, records=records))) == "pass - - pass pass fail"


def test_speed_is_over_the_fastest_that_learns_as_well() -> None:
    speed = validate(trained())[0].criteria[0]
    assert speed.seen == "1.25× over torch_compile, lower bound 1.25×"
    assert validate(trained(seeds=1))[0].criteria[0].seen == "no interval"


@pytest.mark.parametrize(
    ("workload", "names"),
    [
        (train, ["speedup", "memory"]),
        (forward, ["speedup", "memory"]),
        (generate, ["speedup", "memory"]),
        (serve, ["speedup"]),
        (endpoint, ["speedup"]),
        (quality, []),
    ],
)
def test_a_workload_is_asked_what_it_measures(workload: ModuleType, names: list[str]) -> None:
    metrics = workload.METRICS
    given = program(metrics, "w", metrics[0].name, {x.name: 2.0 for x in metrics})
    found = validate(Journal(header(metrics), given))
    assert asked(found) == names
    assert ticks(found).split()[1] == ("pass" if "memory" in names else "-")
    # It is as fast as PyTorch is. Of whom nothing is asked, nothing is known.
    assert verdict(found) == ("fail" if names else "unknown")


def test_what_is_asked_and_was_not_measured_is_unknown() -> None:
    found = validate(Journal(header(train.METRICS), program(train.METRICS, "train", "step", {"step": 2.0})))
    assert ticks(found) == "fail unknown - - - -"


def test_metrics_of_others_in_a_run_are_not_asked() -> None:
    metrics = (*forward.METRICS, *serve.METRICS, *converge.METRICS, *OPERATOR_METRICS)
    parts = (
        journal(GOOD, BASE),
        trained(),
        Journal(header(metrics), program(metrics, "forward", "pass", {"pass": 2.0, "pass_memory": 100.0})),
        Journal(header(metrics), program(metrics, "serve", serve.METRICS[0].name, {serve.METRICS[0].name: 2.0})),
    )
    found = validate(Journal(header(metrics), tuple(x for part in parts for x in part.records)))
    assert {x.row.operator: [y.name for y in x.asked] for x in found} == {
        "gelu": ["speedup", "memory", "error"],
        "converge": ["speedup", "quality", "stability", "gradients"],
        "forward": ["speedup", "memory"],
        "serve": ["speedup"],
    }


def test_without_a_baseline_nothing_is_known() -> None:
    found = validate(journal(GOOD, None))
    assert ticks(found) == "unknown unknown pass - - -"
    assert verdict(found) == "unknown"
    assert verdict(()) == "unknown"


def test_the_page_and_the_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    given = journal(GOOD | {"memory": 110.0}, BASE)
    path.write_bytes(b"".join(encode(x) for x in (given.header, *given.records)))
    done = CliRunner().invoke(command_validate, [str(path)])
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "✗ gelu M0 kernelmark",
        "    ✓ speedup: 2.00× over torch, lower bound 2.00× (at least 1.2×)",
        "    ✗ memory: +10.0 % of torch's 0.0 MB (at most 5 % more)",
        "    ✓ error: 1.0e-06 (at most 1e-05 in fp32)",
        "    – quality, stability, gradients of a training run: not measured of gelu, and not asked",
        "fail: 0 pass, 1 fail, 0 unknown",
    ]
    done = CliRunner().invoke(command_validate, [str(path), "--json"])
    assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (1, "fail")


def test_an_interval_of_a_mean_needs_one_of_each_case() -> None:
    assert mean_bounds([(1.0, 2.0), (4.0, 8.0)]) == pytest.approx((2.0, 4.0))
    assert mean_bounds([(1.0, 2.0), (None, None)]) is None
    assert mean_bounds([]) is None
    found = [excludes_one(*x) for x in ((1.1, 2), (0.5, 0.9), (1.0, 2), (0.9, 1.1), (None, 2), (1.1, None))]
    assert found == [True, True, False, False, False, False]


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
