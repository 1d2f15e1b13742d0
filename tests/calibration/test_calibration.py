"""A small calibration on every test run, and proof that what it calibrates is what ships."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from kernelmark.registry.detection import decision, verdict

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def calibrate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calibration_calibrate", HERE / "calibrate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_calibration_calls_what_ships(calibrate: ModuleType) -> None:
    """The same objects, not copies; the command line has no other entrance (test_decision.py sees to that)."""
    assert calibrate.decide is decision.decide
    assert calibrate.stage_one is decision.stage_one
    assert calibrate.stored is decision.stored
    assert calibrate.exit_code is verdict.exit_code
    assert calibrate.DEFAULTS is decision.DEFAULTS


def test_the_calibration_decides_nothing_itself() -> None:
    """It imports only entrances of the decision, and neither makes nor alters a verdict."""
    inner = {"assessment", "outcome", "eligibility", "metrics"}
    for path in (HERE / "calibrate.py", HERE / "noisemodel.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").rsplit(".", 1)[-1] not in inner
                if node.module == "kernelmark.registry.detection.noise":
                    assert [alias.name for alias in node.names] == ["run_mean"]
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                assert name not in ("Verdict", "replace") or isinstance(
                    getattr(node.func, "value", None), ast.Constant
                )


@pytest.mark.usefixtures("untraced")
def test_small_calibration(calibrate: ModuleType) -> None:
    """Loose bounds on few suites: catches a broken rule, not a drifted one (the full table does)."""
    table = calibrate.calibrate(suites=5, noise=1.0, seed=2)
    assert sum(table.alarms["A/B"]) == 0
    assert sum(table.alarms["A/B, no history"]) == 0
    assert sum(table.alarms["stored"]) <= 3
    assert table.greens["A/B"] >= 4
    assert table.power["A/B", 0.02].rate <= 0.1
    assert table.power["A/B", 0.05].rate >= 0.9
    assert table.power["A/B", 0.10].rate >= 0.96
    assert table.overlooked["A/B", 0.10].rate == 0
    for rule in ("A/B, stage 1", "A/B, no history, stage 1", "stored"):
        assert 0.92 <= table.coverage[rule].rate <= 0.98
    text = calibrate.markdown([table])
    assert text.startswith("| noise | rule | false alarms per 200")


@pytest.mark.usefixtures("untraced")
def test_the_order_of_processes_matters(calibrate: ModuleType) -> None:
    """Why the schedule is interleaved: at three times the noise, blocked processes cry wolf."""
    table = calibrate.calibrate(suites=2, noise=3.0, seed=2)
    assert sum(table.alarms["A/B"]) <= 1
    assert sum(table.alarms["A/B, blocked"]) + table.improvements["A/B, blocked"] > 3
