"""The factorial, measured: which arms of which code, environment and configuration, on a bench without workers."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from kernelmark.registry.detection.comparison import Noise, Options
from kernelmark.registry.detection.verdict import Verdict
from kernelmark.registry.store.home import Home
from kernelmark.registry.store.journal import Writer, read
from kernelmark.registry.store.metric import LATENCY, OPERATOR_METRICS
from kernelmark.registry.store.record import Header, Key, Measurement, Record
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.compare import interleaved as ab
from kernelmark.suite.compare.attribute import Factorial, winners
from kernelmark.suite.compare.interleaved import trees
from kernelmark.suite.compare.revisions import Revision
from kernelmark.suite.measure.stages import pinned
from kernelmark.suite.run import supervisor
from kernelmark.suite.run.supervisor import Run

SLOW = Path("/opt/other/bin/python")
ROW = Key("double", "N16-fp32-forward", "kernelmark_cpu", "hot")


class Bench(Run):
    """A run whose times follow from commit, interpreter and pinned configuration."""

    effects: dict[str, float] = {}  # noqa: RUF012  # set by each test
    refuses = False
    metrics = OPERATOR_METRICS

    def replicate(self, replicate, cells):
        if self._writer is None:
            self._begin()
        new, other = self.commit[0].startswith("c"), self.python("core") == SLOW
        for cell in cells:
            held = self.pinned.get(cell.identity)
            ms = 1 + 0.001 * math.sin(31 * replicate + 7 * new + 3 * other + bool(held))
            ms *= 1 + self.effects.get("code", 0) * new + self.effects.get("environment", 0) * other
            ms *= 1 + self.effects.get("tuning", 0) * (new and not held)
            common = (cell.case, cell.implementation.name, "kernelmark", "1", replicate, 0, cell.cache)
            if held and new and self.refuses:
                self._write_record(Record(*common, "unsupported", "tile cannot be held to 64"))
            else:
                chosen = {"tile": "128" if new and not held else "64"}
                self._write_record(
                    Record(*common, "ok", None, Measurement({"latency": (ms,) * 6}, "monotonic", tuning=chosen))
                )

    def _begin(self):
        self._writer = Writer(self.path)
        header = Header(
            schema_version=2, run=self.name, created="2026-11-21T00:00:00+00:00", harness="1",
            commit=self.commit[0], dirty=False, plan=self.plan.name, seed=self.seed,
            replicates=self.plan.replicates, device="cpu", key="k", conditions={"device": "cpu"}, environment={},
            request=self.request, metrics=self.metrics,
        )  # fmt: skip
        self._writer.write(header)
        self.past = supervisor.Journal(header)


@pytest.fixture
def factorial(root, plan_file, tmp_path, monkeypatch):
    """Attributes a change of one row, given what was planted and what differs."""
    monkeypatch.setattr(ab, "Run", Bench)
    monkeypatch.setattr(Bench, "refuses", False)
    folders = []
    for name in ("one", "two"):
        folder = tmp_path / name / "kernels" / "cpu"
        folder.mkdir(parents=True)
        (folder / "double.py").write_text("def double(x):\n    return 2 * x\n")
        folders.append(tmp_path / name)
    catalog = Catalog.of(root)
    plan = plans.load(str(plan_file([16, 64])), catalog, "cpu")
    sides = list(zip((Revision("base", "b" * 40), Revision("HEAD", "c" * 40)), folders, strict=True))
    base, current = trees(sides, {str(root): "."}, catalog, plan, "cpu", ["kernelmark"])

    def attribute(effects, environment=True, same_code=False, retuned=False, key=ROW, until=math.inf):
        monkeypatch.setattr(Bench, "effects", effects)
        home = Home(tmp_path / "home")
        home.journals.mkdir(parents=True, exist_ok=True)
        there = replace(current, python=SLOW) if environment else current
        one = Factorial(base, there, plan, "cpu", home, Options(), 7, until, lambda text: None, same_code)
        chosen = ("64", "128") if retuned else ("64", "64")
        records = [[_tuned(key, x)] for x in chosen]
        verdict = Verdict(key, "regression", "", change=0.1, low=0.09, high=0.11, noise=Noise(1e-6, 10.0))
        (found,) = one.attribute([verdict], (records[0], records[1]))
        return found, [read(x) for x in sorted(home.journals.glob("*.jsonl"))]

    return attribute


def _tuned(key: Key, chosen: str):
    case = SimpleNamespace(operator=key.operator, name=key.case)
    measurement = SimpleNamespace(tuning={"tile": chosen})
    return SimpleNamespace(case=case, identity=key, measurement=measurement)


@pytest.mark.parametrize(
    ("effects", "causes"),
    [
        ({"code": 0.1}, ("code",)),
        ({"environment": 0.1}, ("environment",)),
        ({"code": 0.2, "environment": 0.1}, ("code", "environment")),
        ({"tuning": 0.1}, ("tuning",)),
    ],
)
def test_each_cause_is_told_apart(factorial, effects, causes):
    found, journals = factorial(effects, retuned="tuning" in effects)
    assert found.causes == causes
    assert len(journals) == (5 if "tuning" in effects else 4)
    assert {len(x.records) for x in journals} == {10}
    assert {x.header.request.stage for x in journals} == {2}
    assert len({x.header.request.arm for x in journals}) == len(journals)
    names = {x.header.run for x in journals}
    assert all(set(x.header.request.partner.split(",")) == names - {x.header.run} for x in journals)


def test_of_a_rate_less_is_slower(factorial, monkeypatch):
    rate = msgspec.structs.replace(LATENCY, better="higher")
    monkeypatch.setattr(Bench, "metrics", (rate, *OPERATOR_METRICS[1:]))
    found, _ = factorial({"code": -0.1})
    assert found.causes == ("code",)
    assert found.change == pytest.approx(1 / 0.9 - 1, abs=0.01)


def test_the_old_configuration_is_held_in_all_arms_but_one(factorial):
    found, journals = factorial({"tuning": 0.1}, environment=False, retuned=True)
    assert found.causes == ("tuning",)
    held = {x.header.request.arm: bool(x.header.request.pinned) for x in journals}
    assert held == {
        "old code, old environment, old tuning": True,
        "new code, old environment, old tuning": True,
        "new code, old environment, new tuning": False,
    }


def test_a_configuration_that_is_gone_is_part_of_the_code(factorial, monkeypatch):
    monkeypatch.setattr(Bench, "refuses", True)
    found, _ = factorial({"tuning": 0.1}, retuned=True)
    assert found.causes == ("code",)
    assert found.notes == ("tuning is part of the code here: tile cannot be held to 64",)


@pytest.mark.parametrize(
    ("environment", "same_code", "causes"),
    [(False, False, ("code",)), (True, True, ("environment",)), (False, True, ())],
)
def test_what_alone_differs_needs_no_measuring(factorial, environment, same_code, causes):
    found, journals = factorial({}, environment=environment, same_code=same_code)
    assert (found.causes, journals) == (causes, [])
    assert "nothing else differs" in found.reason or "both sides have the same" in found.reason


def test_what_cannot_be_measured_is_undecided(factorial):
    found, journals = factorial({}, key=Key("double", "N9", "kernelmark_cpu", "hot"))
    assert (found.reason, journals) == ("undecided: it cannot be measured here", [])
    found, _ = factorial({}, until=0.0)
    assert found.reason == "0 of 0 rounds usable, at least 3 needed"


def test_the_choice_of_most_processes_counts():
    records = [_tuned(ROW, x) for x in ("64", "128", "128")]
    assert winners(records) == {ROW: {"tile": "128"}}


def test_a_real_autotuner_is_held_to_one_configuration():
    triton = pytest.importorskip("triton", reason="triton is not installed")
    configs = [triton.Config({"BLOCK": x}, num_warps=4) for x in (64, 128)]

    @triton.autotune(configs=configs, key=["n"])
    @triton.jit
    def kernel(X, n, BLOCK: triton.language.constexpr):
        pass

    before = list(kernel.configs)
    with pinned({"kernel": kernel}, {"kernel": str(before[1])}):
        assert kernel.configs == [before[1]]
    assert kernel.configs == before
    for namespace in ({"kernel": kernel}, {}):
        with (
            pytest.raises(NotImplementedError, match="kernel cannot be held to the configuration BLOCK: 32"),
            contextlib.ExitStack() as stack,
        ):
            stack.enter_context(pinned(namespace, {"kernel": "BLOCK: 32"}))
    assert kernel.configs == before
