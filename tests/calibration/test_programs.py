"""The programs that take a device or minutes: what they compute, on literal data and on a CPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from kernelmark.registry.detection import changepoints
from kernelmark.suite import plan as plans
from kernelmark.suite import worth
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.workbench import Workbench


@pytest.fixture(scope="module")
def program() -> Callable[[str], ModuleType]:
    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(
            f"calibration_{name}", Path(__file__).with_name(f"{name}.py")
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


def test_power_between_two_times(program):
    mean = program("energies").mean_power
    steady = [(0.1 * i, 500.0) for i in range(50)]
    assert mean(steady, 1.03, 3.97) == pytest.approx(500)
    ramp = [(float(i), 100.0 * i) for i in range(6)]
    assert mean(ramp, 1.0, 4.0) == pytest.approx(250)
    assert mean(ramp, 1.5, 2.5) == pytest.approx(200)
    assert mean(ramp, 2.2, 2.4) == pytest.approx(230)
    assert mean(ramp, 4.0, 5.1) is None  # nobody read there
    assert mean(ramp[:1], 0.0, 0.0) is None


def test_the_counter_counts_from_step_to_step(program):
    counted = program("energies").counted_power
    readings = [(0.01 * i, 40.0 * (i // 10)) for i in range(200)]  # 40 J every tenth of a second
    assert counted(readings, 0.233, 1.777) == pytest.approx(400)
    assert counted(readings, 0.21, 0.29) is None


def test_joules_of_a_call_by_an_independent_integral(program):
    """A board of 600 W, calls of 2 ms; what comes before the power has settled is not looked at."""
    energies = program("energies")
    ends = [(10 + 0.04 * i, 20 * i) for i in range(1, 100)]
    readings = [(9 + 0.02 * i, 100.0 if i < 70 else 600.0) for i in range(300)]
    found = energies.integrated({"instant": readings, "average": [], "counter": []}, ends)
    assert (found["call_ms"], found["instant"]) == (pytest.approx(2), pytest.approx(1.2))
    assert (found["average"], found["counter"]) == (None, None)
    rounds = [{"kernelmark": x, "independent": found} for x in (1.2, 1.212, None)]
    assert energies.compared(rounds)["ratio"] == pytest.approx(1.005)
    assert energies.compared(rounds[2:])["ratio"] is None


def test_what_a_defence_costs(program):
    defences = program("defences")
    assert defences.cost([1.0, 1.1, 1.4], [1.0, 1.0, 1.0]) == {"median": pytest.approx(0.1), "interval": None}
    many = defences.cost([1.01, 1.02, 1.03, 1.04, 1.05, 1.06], [1.0] * 6)
    assert defences.said(many) == "+3.50 % [+1.00, +6.00]"


def test_defences_one_by_one(program):
    """Exchanging inputs alone, or keeping answers alone: in ten calls some block is another draw's, or none is."""
    defences = program("defences")
    operator = Catalog.default().operator("softmax")
    case = operator.case({"M": 4, "D": 32}, "fp32", "forward")
    for way, changes in (("Inputs", True), ("Answers", False)):
        bench = Workbench.build(operator, case, torch.device("cpu"), 1)
        fresh = getattr(defences, way)(bench)
        fresh.start(10)
        for _ in range(10):
            fresh.before()
            fresh.after(bench.varied[0] + 0)
        assert torch.equal(bench.varied[0], bench.values[0]) is not changes, way


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_six_rows_a_process(program, tmp_path, device):
    run = program("starts").run_of(device, tmp_path, 3)
    assert len(run.cells) == 6
    assert run.plan.replicates == 3


def test_histories_are_judged_by_what_ships(program):
    series = program("series")
    assert series.change_points is changepoints.change_points
    assert series.false_series(np.random.default_rng(1), series.KINDS["3 %"], 40, 20) == 0
    assert series.found(np.random.default_rng(1), "0.5 %, one odd run", 10) == 10


def test_delays_are_put_into_a_models_norms(monkeypatch):
    """Each as often as GPT-2's step has norms; what they compute is PyTorch's own."""
    monkeypatch.setenv("KERNELMARK_PATH", str(Path(__file__).with_name("delayed_root")))
    catalog = Catalog.default()
    options = {"model": "gpt2-124m", "state": "plain", "slice": "whole"}
    step = catalog.definition("train").case({"B": 1, "S": 128}, "bf16", "program", **options)
    base = worth.base_named("torch_graph", catalog)
    made = plans.of_worth(step, base, catalog, "cuda", ["norm"], ["planted"])
    assert {(x.implementation, x.calls) for x in made.exchanges} == {
        (f"planted_{us}", 25) for us in ("null", "50us", "200us", "1000us")
    }
    case = catalog.operator("layer_norm").case({"B": 1, "S": 3, "D": 8}, "fp32", "forward")
    (delayed,) = (x for x in catalog.of_operator("layer_norm") if x.name == "planted_50us")
    given = torch.randn(1, 3, 8), torch.randn(8), torch.randn(8)
    assert torch.equal(
        delayed.load()(case)(*given, 1e-5), torch.nn.functional.layer_norm(given[0], (8,), *given[1:])
    )


def test_how_far_three_steps_are_apart(program):
    """Elements count by the exact gradient; what storing may round away does not count."""
    rounding = program("rounding")
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    first, initial = {"w": torch.tensor([0.0, 1.0])}, {"w": torch.zeros(2)}
    wanted = rounding.Way([{"w": one}] * 3, {"w": torch.tensor([5.0, 4.0])})
    got = rounding.Way([{"w": one}, {"w": one}, {"w": two}], {"w": torch.tensor([9.0, 5.0])})
    assert rounding.apart(wanted, wanted, first, initial) == {"w": (0, 0, 0, 0)}
    assert rounding.apart(got, wanted, first, initial)["w"] == pytest.approx((0, 0, 0.5 / 5**0.5, 0.25))
    assert rounding.apart(got, wanted, first, initial, stored=1 / 24)["w"][-1] == pytest.approx(0.125)
    assert rounding.apart(got, wanted, first, initial, stored=1.0)["w"][-1] == 0


def test_how_far_all_parameters_are_together(program):
    """Those whose steps are not lost where weights are stored in bf16."""
    rounding = program("rounding")
    given = {"v": torch.ones(1), "w": torch.ones(2), "gain": torch.ones(3)}
    start = {"v": torch.ones(1), "w": torch.ones(2), "gain": torch.ones(3)}
    right = {"v": start["v"] + 2, "w": start["w"] + 2, "gain": start["gain"] + 1e-3}
    off = {"v": right["v"] + 1.0, "w": right["w"] - 0.2, "gain": right["gain"] + 8e-4}
    assert rounding.told(off, right, given, start) == (
        "0.800, together 0.361, along 0.900 to 1.500, on average 1.200"
    )


def test_rounding_by_itself_changes_what_a_model_learns(program, monkeypatch, capsys):
    asked = ["rounding", "--model", "gpt2-tiny", "-B", "1", "-S", "32", "--seed", "3", "--faults"]
    monkeypatch.setattr("sys.argv", asked)
    assert program("rounding").main() == 0
    said = capsys.readouterr().out
    assert said.count("emulated, from fp32") == 4
    lines = [x for x in said.splitlines() if "together" in x]
    together = [float(x.split("together ")[1].split(",")[0]) for x in lines]
    assert min(together[:5]) > 0.35 > 0.2 > max(together[5:]) > 0, "faults, then rounding"
    along = [abs(float(x.split()[-1]) - 1) for x in lines]
    assert min(along[:5]) > 0.25 > 0.02 > max(along[5:]) > 0, "faults, then rounding"
    assert all(0 < float(line.split()[-1]) < 1 for line in said.splitlines() if " change " in line)
