"""The program that plants slowdowns: its kernels, its commits, its table. What it finds takes a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.plan import parse

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def planted() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calibration_planted", HERE / "planted.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_commits_differ_in_the_switch_alone(planted: ModuleType, tmp_path: Path) -> None:
    planted.repository(tmp_path / "repository")
    told = subprocess.run(
        ["git", "-C", str(tmp_path / "repository"), "diff", "--unified=0", "HEAD~1", "HEAD"],
        check=True,
        capture_output=True,
        text=True,
    )
    changed = [x for x in told.stdout.splitlines() if x[:1] in "+-" and x[:3] not in ("+++", "---")]
    assert changed == ["-SLOW = False", "+SLOW = True"]


def test_which_commit_does_how_much_twice() -> None:
    spec = importlib.util.spec_from_file_location(
        "planted_commit", HERE / "planted_root" / "kernels" / "_commit.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert [module.extra(x) for x in (0.0, 0.05, -0.1)] == [0.0, 0.0, 0.1]
    module.SLOW = True
    assert [module.extra(x) for x in (0.0, 0.05, -0.1)] == [0.0, 0.05, 0.0]


def test_the_plan_has_each_effect_as_often_as_asked(planted: ModuleType) -> None:
    catalog = Catalog.of(HERE / "planted_root")
    text = planted.PLAN.format(
        seconds=0.1, rows=16, columns=64, repeats=[0, 1, 2], effects='["none", "plus5"]', dtype="fp32"
    )
    plan = parse(text, "planted", catalog)
    assert len(plan.cases) == 6
    assert {planted._effect(x.name) for x in plan.cases} == {"none", "plus5"}
    operator = catalog.operator("planted")
    for case in plan.cases:
        inputs = operator.inputs(case, torch.device("cpu"), torch.Generator().manual_seed(1))
        kernel = next(x for x in catalog.of_operator("planted") if x.name == "kernelmark_cpu").load()(case)
        torch.testing.assert_close(kernel(**inputs), operator.reference(**inputs))


def test_truth(planted: ModuleType) -> None:
    assert [planted.truth(x) for x in ("none", "plus10", "minus10")] == pytest.approx([0, 0.1, 1 / 1.1 - 1])


def test_the_table(planted: ModuleType) -> None:
    def row(effect: str, kind: str, change: float) -> dict[str, object]:
        return {
            "case": f"M16-D64-R0-effect{effect}-fp32-forward",
            "kind": kind,
            "change": change,
            "low": change - 0.01,
            "high": change + 0.01,
            "detectable": 0.035,
        }

    verdicts = [row("none", "no change", 0.001), row("plus5", "warning", 0.049), row("plus5", "no change", 0.03)]
    lines = planted.table({"verdicts": verdicts}).splitlines()
    assert lines[2] == "| +0.0% | 1 | 1 | 1 no change | +0.10% [+0.10%, +0.10%] | 1 of 1 | 3.50% |"
    assert lines[3].startswith("| +5.0% | 2 | 1 | 1 warning, 1 no change | +3.95% [+3.00%, +4.90%] | 1 of 2")
