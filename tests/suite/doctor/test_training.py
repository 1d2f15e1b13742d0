"""What the doctor says of planted arms, on literal losses; the table that shows the same."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from kernelmark.registry.detection.arms import NOT_TRIED, arms, rates_tried
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.store.record import Case, Header, Measurement, Record
from kernelmark.registry.views.convergence_table import convergence_table, remarks
from kernelmark.registry.views.table import render
from kernelmark.registry.views.tables import run_table
from kernelmark.suite.doctor import training
from kernelmark.suite.workloads.converge import METRICS

STEPS = (0.0, 10.0, 20.0, 30.0, 40.0)
FALLING = (8.0, 6.0, 5.0, 4.5, 4.2)


def case(lr: float = 1e-3) -> Case:
    options = {"model": "tiny", "data": "synthetic", "lr": lr}
    return Case(
        "converge",
        f"N40-lr{lr:g}",
        {"B": 2, "N": 40},
        options,
        "fp32",
        "program",
        "x",
        0,
        0,
        None,
        "bits_per_byte",
    )


def record(name: str, seed: int, factor: float | None, of: Case, share: float | None = None) -> Record:
    wobble = 1 + 1e-4 * ((seed * 7 + len(name)) % 5)
    if factor is None:
        return Record(of, name, "torch", None, seed, 0, "cold", "incorrect", "verify: the loss is wrong")
    curve = tuple(8.0 - (8.0 - x) / factor * wobble for x in FALLING)
    samples = {
        "bits_per_byte": (curve[-1],),
        "bits_by_step": curve,
        "validated_step": STEPS,
        "tokens_per_s": (1000.0 * (1 + seed / 100) * (1.2 if name != "torch" else 1),),
    }
    if share is not None:
        samples["fp8_share"] = (share,)
    return Record(of, name, "torch", None, seed, 0, "cold", "ok", None, Measurement(samples, "own clock"))


def journal(factors: dict[str, float | None], seeds: int = 5, share: float | None = None) -> Journal:
    header = Header(
        2,
        "20261122-000000-abcd",
        "2026-11-22T00:00:00Z",
        "0.1",
        None,
        False,
        "converge",
        0,
        seeds,
        "cpu",
        "k",
        {},
        {},
    )
    header = msgspec.structs.replace(header, metrics=METRICS)
    records = tuple(
        record(name, seed, factor, case(), share if name != "torch" else None)
        for seed in range(seeds)
        for name, factor in {"torch": 1.0, **factors}.items()
    )
    return Journal(header, records)


def test_bad_arms_are_caught_and_good_ones_pass():
    factors = dict.fromkeys(training.PLANTED, None) | {
        "planted_again": 1.0,
        "planted_eight_bits": 1.0,
        "planted_topk": 1.2,
        "planted_scale": 1.0,
        "planted_half_a_percent": 1.005,
    }
    del factors["planted_bias"]
    found = {x.name: x for x in training.judge(journal(factors))}
    said = {name: found[what].verdict for name, (what, _) in training.PLANTED.items()}
    assert said == {
        "planted_again": "caught",
        "planted_eight_bits": "caught",
        "planted_topk": "caught",
        "planted_scale": "missed",
        "planted_bias": "missed",
        "planted_mask": "caught",
        "planted_half_a_percent": "caught",
        "planted_momentum": "caught",
    }
    assert found["a dropped bias correction"].detail == "no row"
    assert found["a mask that is off by one"].detail == "incorrect: verify: the loss is wrong"


def test_a_detector_that_calls_everything_worse_is_noticed():
    found = {x.name: x.verdict for x in training.judge(journal({"planted_again": 1.2}))}
    assert found["the same arm again passes"] == "missed"


def test_arms_of_a_journal():
    good, bad, wrong = arms(journal({"good": 1.0, "bad": 1.2, "wrong": None}, share=0.85))
    assert (good.overall, bad.overall, wrong.overall) == ("equivalent", "worse", "failed")
    assert good.points[0].step == 40
    assert good.matched.speedup == pytest.approx(1.2, rel=1e-2)
    assert bad.steps.kind == "exceeded"
    assert bad.matched is None
    assert not good.named
    assert remarks(good) == ["85.0 % of product operations in 8 bits, below 90 %: no name for it"]
    assert arms(journal({"good": 1.0}, seeds=4))[0].overall == "inconclusive"


def test_the_table_of_a_run():

    found = journal({"good": 1.0, "bad": 1.2, "wrong": None}, share=0.946)
    out = render(convergence_table(found))
    lines = [" ".join(x.split()) for x in out.splitlines() if x.strip()]
    assert lines == [
        "convergence · N40-lr0.001 · base torch",
        "arm step base bits arm bits difference 95 % steps × speed × 8 bits verdict",
        "─" * len(lines[2]),
        "good 40 4.1992 4.1992 +0.00% -0.03% +0.03% equivalent",
        "all 1.200 1.201 1.000 1.200 94.6 % equivalent",
        "bad 40 4.1992 4.8327 +15.09% +15.05% +15.12% worse",
        "all 1.053 94.6 % worse",
        "wrong – – – – – – – – incorrect",
        "bad: steps: 1.053 times the steps [1.053, 1.053], not reached in 5 of 5 seeds",
        "wrong: verify: the loss is wrong",
        "learning rate of torch: not tried against others in this run",
    ]
    assert "convergence · N40-lr0.001" in render(run_table(found))
    assert convergence_table(journal({})) == []


def test_the_learning_rates_that_were_tried():
    found = journal({})
    tried = tuple(
        record("torch", 0, 1.0 + abs(lr - 2e-3) * 50, case(lr), None) for lr in (2.5e-4, 5e-4, 2e-3, 4e-3)
    )
    # A rate's only seed that the others have not, however lucky, counts for nothing.
    lucky = record("torch", 7, 0.1, case(2.5e-4), None)
    said = rates_tried(replace(found, records=(*found.records, *tried, lucky)))
    assert said["N40-lr0.002"] is None
    assert "from the best of 5 tried" in str(said["N40-lr0.00025"])
    assert rates_tried(found) == {"N40-lr0.001": NOT_TRIED}
    lucky = record("torch", 1, 0.5, case(4e-3), None)
    assert rates_tried(replace(found, records=(*found.records, *tried, lucky))) == said  # which no other rate has


def test_rates_that_another_run_tried_count_where_it_is_like_this_one():
    found = journal({})
    tried = tuple(record("torch", 0, 1 + abs(lr - 2e-3) * 50, case(lr), None) for lr in (2.5e-4, 5e-4, 2e-3, 4e-3))
    other = replace(found, records=tried)
    name = "N40-lr0.001"
    assert rates_tried(found, [found, other]) == {name: None}, "of this run's cases alone; 1e-3 is near 2e-3"
    for field, value in (("seed", 1), ("key", "another GPU")):
        unlike = replace(other, header=msgspec.structs.replace(other.header, **{field: value}))
        assert rates_tried(found, [unlike]) == {name: NOT_TRIED}
    weights = tuple(msgspec.structs.replace(x, case=msgspec.structs.replace(x.case, spec="y")) for x in tried)
    assert rates_tried(found, [replace(other, records=weights)]) == {name: NOT_TRIED}, "another checkpoint's"


@pytest.mark.training
def test_planted_arms_through_the_real_harness(tmp_path):
    from kernelmark.registry.store.home import Home

    for check in training.planted_arms("cpu", Home(tmp_path)):
        assert check.verdict == "caught", check
