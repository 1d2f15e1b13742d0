"""Training to a loss on a report's page: verdicts, differences by step, gradients by layer."""

from __future__ import annotations

import dataclasses
import re

import msgspec
import pytest
from kernelmark.registry.analysis.health import layers
from kernelmark.registry.detection.arms import arms, differences, rates_tried
from kernelmark.registry.store.journal import Journal
from kernelmark.registry.store.metric import Equivalence, Metric
from kernelmark.registry.store.record import Case, Header, Measurement, Record
from kernelmark.registry.views import answer, convergence_table, lines
from kernelmark.registry.views.convergence import layer_cells
from kernelmark.registry.views.looks import Series
from kernelmark.registry.views.report import render
from msgspec.structs import replace

RULE = Equivalence(0.0025)
METRICS = (
    Metric("bits_per_byte", "bit", summary="last", judged=RULE),
    Metric("bits_per_byte@1000", "bit", summary="last", judged=RULE),
    Metric("copying_bits", "bit", summary="last", judged=Equivalence(0.05, relative=False)),
    Metric("bits_by_step", "bit", shown="never", abscissa="validated_step"),
    Metric("validated_step", "1", better="neither", shown="never"),
)
STEPS = (0.0, 1000.0, 2000.0)
LAYERS = {
    "health_step": (0.0, 0.0, 500.0, 500.0),
    "health_layer": (-1.0, 0.0, -1.0, 0.0),
    "gradient_norm_by_layer": (4.0, 2.0, 1.0, 0.5),
    "update_ratio_by_layer": (0.01, 0.02, 0.003, 0.004),
    "gradient_cosine_by_layer": (0.999, 0.97, 0.998, 0.96),
}

ARMS = (("torch", 1.0, 0.2), ("near", 1.001, 0.21), ("far", 1.03, 0.2), ("window", 1.0, 0.9))
"""Name, loss over the base's, bits of copying."""


@pytest.fixture(scope="module")
def journal() -> Journal:
    """Five seeds of an arm that is 0.1 % off, one that is 3 % off, one that copies worse, one that is wrong."""
    header = Header(2, "r", "2026-11-22T00:00:00Z", "0", None, False, "p", 0, 5, "cpu", "k", {}, {})
    case = Case(
        "converge", "N2000", {"N": 2000}, {"lr": 1e-3}, "fp32", "program", "c", 0, 0, None, "bits_per_byte"
    )
    records = []
    for seed in range(5):
        for name, off, copying in ARMS:
            curve = tuple(x * off * (1 + 1e-4 * ((seed * 7 + len(name)) % 5)) for x in (8.0, 2.0, 1.5))
            samples = {"bits_per_byte": curve[-1:], "bits_per_byte@1000": curve[1:2], "copying_bits": (copying,)}
            samples |= {"bits_by_step": curve, "validated_step": STEPS, **LAYERS}
            said = ("named 75 %",) if name == "window" else ()
            seen = Measurement(samples, "own clock", remarks=said)
            records.append(Record(case, name, "torch", None, seed, 0, "cold", "ok", None, seen))
        records.append(Record(case, "wrong", "torch", None, seed, 0, "cold", "incorrect", "a <b>leak</b>"))
    return Journal(msgspec.structs.replace(header, metrics=METRICS), tuple(records))


def test_a_loss_at_a_declared_step_is_a_point_and_other_metrics_stand_beside(journal: Journal) -> None:
    found = {x.name: x for x in arms(journal)}
    assert [(x.step, x.found.kind) for x in found["near"].points] == [(1000, "equivalent"), (2000, "equivalent")]
    assert [x.found.kind for x in found["far"].points] == ["worse", "worse"]
    (copying,) = found["window"].beside
    assert (copying.metric, copying.found.kind, found["window"].overall) == ("copying_bits", "worse", "equivalent")
    assert [convergence_table.remarks(found[x])[-1] == "named 75 %" for x in ("near", "window")] == [False, True]


def test_an_arm_that_is_undecided_early_says_what_it_is_later(journal: Journal) -> None:
    """Seeds are per cents apart after 1,000 steps: the arm's verdict is undecided, the last step's is not."""

    def early(x: Record) -> Record:
        if x.measurement is None or x.implementation != "near":
            return x
        apart = {"bits_per_byte@1000": (2.0 * (1 + 0.03 * (x.replicate - 2)),)}
        return replace(x, measurement=replace(x.measurement, samples={**x.measurement.samples, **apart}))

    changed = dataclasses.replace(journal, records=tuple(map(early, journal.records)))
    (near,) = [x for x in arms(changed) if x.name == "near"]
    assert near.overall == "inconclusive", "the rule is of all steps"
    told = "inconclusive: 1,000 steps inconclusive, 2,000 steps equivalent, 105 % rule within"
    assert convergence_table.by_step(near) == told
    rows = convergence_table.rows_of(near)
    assert [(x[0], x[1], x[-1]) for x in rows] == [
        ("near", "1,000", "inconclusive"),
        ("", "2,000", "equivalent"),
        ("", "all", "inconclusive"),
    ]
    assert "Undecided, yet as good after the last step: near." in answer._as_good([near]).reason


def test_of_a_base_of_0_nothing_is_a_fraction(journal: Journal) -> None:
    records = tuple(
        x
        if x.measurement is None or x.implementation != "torch"
        else msgspec.structs.replace(
            x,
            measurement=msgspec.structs.replace(
                x.measurement, samples={**x.measurement.samples, "bits_per_byte": (0.0,)}
            ),
        )
        for x in journal.records
    )
    changed = Journal(journal.header, records)
    last = next(x for x in arms(changed) if x.name == "near").points[-1]
    assert (last.difference, convergence_table.difference(last), last.found.kind) == (None, "–", "inconclusive")
    assert last.found.reason == "0 of at least 5 seeds, 5 more needed; 5 without a usable value"
    render([changed])


def test_differences_are_paired_and_have_an_interval(journal: Journal) -> None:
    by_arm = differences(journal)["N2000"]
    assert set(by_arm) == {"near", "far", "window"}
    low, middle, high = by_arm["near"][2000.0]
    assert low < middle < high
    assert middle == pytest.approx(0.001, abs=2e-5)


def test_somebodys_own_workload_may_have_the_metric_alone(journal: Journal) -> None:
    """It has no steps, so that nothing is an arm there, or no learning rate, so that none was tried."""
    trained = journal.records[0].case
    for case in (replace(trained, axes={"M": 2}), replace(trained, options={})):
        own = dataclasses.replace(journal, records=tuple(replace(x, case=case) for x in journal.records))
        assert bool(arms(own)) == bool(differences(own)) == ("N" in case.axes)
        assert rates_tried(own) == {}
        assert "near" in render([own])


def test_what_several_steps_lack_is_said_once(journal: Journal) -> None:
    two = dataclasses.replace(journal, records=tuple(x for x in journal.records if x.replicate < 2))
    (near,) = [x for x in arms(two) if x.name == "near"]
    lacking = [x for x in convergence_table.remarks(near) if "of at least 5 seeds" in x]
    assert lacking == ["1,000, 2,000 steps: 2 of at least 5 seeds, 3 more needed"]


def test_the_worst_of_each_layer_over_looks_and_seeds(journal: Journal) -> None:
    seen = [x.measurement for x in journal.records if x.implementation == "torch" and x.measurement]
    first, rest = layers(seen)
    assert (first.name, first.norm, first.update, first.cosine) == ("layer 0", (0.5, 2.0), 0.02, (0.96, 500))
    assert (rest.name, rest.amax) == ("in no layer", None)
    assert layers([]) == ()
    broken = {"health_step": (0.0,), "health_layer": (0.0,), "gradient_norm_by_layer": (4.0,)}
    broken |= {"exploded_step": (1000.0, 500.0, 500.0), "exploded_layer": (0.0, 0.0, 1.0)}
    one, other = layers([Measurement(broken, "own clock")])
    assert (layer_cells(one)[0], layer_cells(other)[0]) == (
        "4.00 to 4.00; not finite at 500",
        "not finite at 500",
    )


@pytest.mark.parametrize(
    ("ends", "highest"),
    [([0.1, -0.2, 30.0], "1 %"), ([-8.0, 7.0, 40.0], "10 %"), ([0.1, 30.0], "1 %"), ([30.0], "20 %")],
)
def test_the_frame_reaches_as_far_as_half_of_the_lines_end(ends: list[float], highest: str) -> None:
    """One bad arm hides no others, and where all are far off it is seen how far."""
    points = {str(x): {0.0: (0.0, 0.0, 0.0), 9.0: (x - 1, x, x + 1)} for x in ends}
    drawn = lines.curves(points, {x: Series(x, "--q1", "o") for x in points}, "far", 0.25, " %")
    assert re.findall(r"<text[^>]*>([^<]* %)", drawn)[-1] == highest


def test_a_rate_that_another_run_of_the_page_tried_counts(journal: Journal) -> None:
    other = tuple(replace(x, case=replace(x.case, name="other", options={"lr": 5e-4})) for x in journal.records)
    page = render([journal, dataclasses.replace(journal, records=other)])
    assert page.count("Learning rate of torch: 2 rates were tried, at least 5 needed.") == 2


def test_the_page_says_whether_it_is_as_good(journal: Journal) -> None:
    page = render([journal])
    assert "2 of 4 arms as good, 2 not as good" in page
    own = page[page.index('id="run1-convergence"') : page.index('id="run1-converge"')]
    text = " ".join(re.sub(r"<[^>]+>", " ", own).split())
    assert "near 1,000 2.0004 2.0024 +0.10%" in text
    assert "1.5003 1.5453 +3.00%" in text
    assert "copying bits 0.9000 (base 0.2000, worse)" in text
    assert "Learning rate of torch: not tried against others in this run." in text
    assert "a &lt;b&gt;leak&lt;/b&gt;" in own
    assert "layer 0 0.500 to 2.00 0.0200 0.9600 at 500" in text
    drawing = own[own.index("<svg viewBox") :]
    assert "far: 3.000 % [" in drawing
    assert drawing.count("<path") >= 2 * 3, "a line and a band an arm"
    curves = page[page.index('id="run1-converge"') :]
    assert "in a band that holds all of them" in curves
