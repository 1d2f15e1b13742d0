"""A workload with metrics that nothing knows: from a plan over journal, rows, report and MLflow to a verdict.

Its primary metric is better higher and has a unit of its own, another is judged by equivalence, a curve is drawn.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from kernelmark.registry.analysis.rows import rows
from kernelmark.registry.detection.comparison_report import ComparisonReport
from kernelmark.registry.detection.decision import decide
from kernelmark.registry.detection.pairing import pair
from kernelmark.registry.detection.verdict_output import to_json
from kernelmark.registry.store.journal import read
from kernelmark.registry.store.record import Header
from kernelmark.registry.tracking.entries import entries
from kernelmark.registry.views.report import render
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.device import Cpu
from kernelmark.suite.measure.session import Session
from kernelmark.suite.measure.stages import Stages
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.plan import Cell

WORKLOAD = """
from kernelmark.registry.store.metric import Equivalence, Metric, Ratio
from kernelmark.registry.store.record import Measurement
from kernelmark.suite.definition import grid
from kernelmark.suite.measure.verify import Incorrect
from kernelmark.suite.workload import Workload


def prepare(case, session):
    return case.axes["N"]


def measure(case, system, session, prepared):
    with session.stage("verify"):
        if system["answer"] != prepared:
            raise Incorrect(f"the answer is {system['answer']}, not {prepared}")
    with session.stage("sample"):
        wobble = 1 + 0.001 * ((session.seed + session.replicate) % 5)
        rate, loss = system["rate"] * wobble, system["loss"] * wobble
    steps = tuple(float(x) for x in range(0, 100, 10))
    return Measurement(
        samples={
            "rate": (rate, rate * 1.001, rate * 0.999),
            "loss_at_90": (loss,),
            "loss": tuple(loss * (2 - x / 90) for x in steps),
            "at": steps,
        },
        timer="own clock",
    )


WORKLOAD = Workload(
    name="learn",
    summary="Learns nothing",
    axes={"N": "size"},
    dtypes=("fp32",),
    measured=(
        Metric("rate", "widgets/s", "higher", judged=Ratio(), shown="table", about="Widgets a second."),
        Metric("loss_at_90", "nat", "lower", "last", judged=Equivalence(0.01), shown="table"),
        Metric("loss", "nat", "lower", "last", abscissa="at"),
        Metric("at", "1", "neither", "last", shown="never"),
    ),
    prepare=prepare,
    measure=measure,
    bytes=lambda case: 0,
    flops=lambda case: 0,
    plans={"quick_cpu": (grid("program", N=[1, 2], dtypes="fp32"),)},
)
"""
SYSTEMS = """
def system(rate, loss, answer=None):
    return lambda case: {{"rate": rate, "loss": loss, "answer": answer or case.axes["N"]}}


IMPLEMENTATIONS = {{
    "learn": {{"torch": system(100.0, 2.0), "fast": system({rate}, {loss}), "liar": system(900.0, 2.0, 7)}}
}}
"""
FAST = "N1-fp32", "fast"
PROGRAM = """
import functools
from kernelmark.suite.cli{} import main
from kernelmark.suite.run import supervisor
# The device's ceilings take seconds in every process, and no metric here is held against them.
supervisor.Run = functools.partial(supervisor.Run, ceilings=False)
main()
"""


@pytest.fixture
def folder(make_repository, tmp_path, monkeypatch):
    """A repository whose last commit makes one system slower and worse."""
    repository = make_repository("root")
    repository.write(workloads__learn=WORKLOAD)
    repository.commit(baselines__others=SYSTEMS.format(rate=200.0, loss=2.0))
    repository.commit(baselines__others=SYSTEMS.format(rate=150.0, loss=2.2))
    monkeypatch.setenv("KERNELMARK_PATH", str(repository.folder))
    monkeypatch.setenv("KERNELMARK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    return repository.folder


def call(module, folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={x: y for x, y in os.environ.items() if x != "TRITON_INTERPRET"} | {"COLUMNS": "120"},
    )
    return done.returncode, done.stdout, done.stderr


def test_it_goes_the_whole_way(folder, tmp_path):
    arguments = ("--operator", "learn", "--replicates", "3", "--seed", "5", "--journal-only")
    code, _, err = call("", folder, "run", *arguments)
    assert code == 0, err
    journal = read(next((tmp_path / "home" / "journals").glob("*.jsonl")))
    assert [x.name for x in journal.header.metrics] == ["rate", "loss_at_90", "loss", "at"]
    found = {(x.case, x.implementation): x for x in rows(journal)}
    fast, liar = found[FAST], found["N1-fp32", "liar"]
    assert (liar.status, liar.reason) == ("incorrect", "verify: the answer is 7, not 1")
    assert (fast.primary, fast.get().unit, fast.pass_) == ("rate", "widgets/s", "program")
    assert fast.speedup_vs_eager == pytest.approx(1.5)
    assert fast.best_baseline == "fast"

    code, out, _ = call("", folder, "show", journal.header.run)
    assert code == 0
    assert "rate widgets/s" in out
    assert "loss at 90 nat" in out

    page = render([journal])
    assert "Rate widgets/s" in page
    assert "Loss nat over time" in page
    assert "further right is better" in page

    made = {x.identity: x for x in entries(journal)}["learn/N1-fp32/fast/cold"]
    assert made.metrics["rate/median_widgets_per_s"] == pytest.approx(150.0, rel=0.01)
    assert [step for step, _ in made.curves["loss/curve"]] == list(range(0, 100, 10))


def side(folder, commit, rate, loss, replicates):
    """What runs of the workload leave in a journal: a header and records."""
    catalog = Catalog.of(folder)
    workload = catalog.workloads["learn"]
    (case, _) = workload.expand(workload.plans["quick_cpu"][0])
    system = next(x for x in catalog.of_operator("learn") if x.name == "fast")
    header = Header(
        schema_version=2, run=commit, created="2026-11-22T00:00:00Z", harness="0", commit=commit, dirty=False,
        plan="quick", seed=0, replicates=replicates, device="cpu", key="k", conditions={}, environment={},
        metrics=workload.metrics,
    )  # fmt: skip
    made = []
    for replicate in range(replicates):
        session = Session(Cpu.open(), 7 * replicate, replicate, Sampling(), Stages())
        given = {"rate": rate, "loss": loss, "answer": 1}
        measured = workload.measure(case, given, session, workload.prepare(case, session))
        made.append(Cell(case, system, "cold").record(replicate, 0, "ok", None, measured))
    return header, made


def test_it_is_judged(folder):
    base, current = side(folder, "base", 200.0, 2.0, 15), side(folder, "current", 150.0, 2.2, 15)
    progress = decide(pair(base, current, controls=()), lambda wanted: pair(base, current, controls=()))
    report = to_json(ComparisonReport("base", "current", progress))
    (verdict,) = report["verdicts"]
    assert report["exit_code"] == 1
    assert (verdict["kind"], verdict["metric"], verdict["unit"]) == ("regression", "rate", "widgets/s")
    assert verdict["change"] == pytest.approx(1 / 3, rel=0.01)  # base / current - 1 of what is better higher
    assert (verdict["base_value"], verdict["base_ms"]) == (pytest.approx(200, rel=0.01), None)
    (flag,) = verdict["flags"]
    assert flag["metric"] == "loss_at_90"
    assert flag["reason"].endswith("not within ±1.00%")


def test_a_primary_metric_may_be_judged_by_equivalence(folder):
    def turned(rate, loss):
        header, records = side(folder, "x", rate, loss, 15)
        return header, [
            msgspec.structs.replace(x, case=msgspec.structs.replace(x.case, primary="loss_at_90")) for x in records
        ]

    kinds = {}
    for name, loss in (("as good", 2.004), ("worse", 2.2), ("better", 1.8), ("near the margin", 2.0195)):
        rows_ = pair(turned(200.0, 2.0), turned(200.0, loss), controls=())
        (verdict,) = decide(rows_, lambda wanted: ()).verdicts
        kinds[name] = verdict.kind
    assert kinds == {
        "as good": "no change",
        "worse": "regression",
        "better": "improvement",
        "near the margin": "no change",
    }
