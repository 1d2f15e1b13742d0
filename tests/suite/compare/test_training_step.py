"""`regression_detector` on a row of a workload: a commit that makes a tiny model's training step slower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PART = '''"""PyTorch's layer norm, after so many milliseconds."""

import time

REQUIRES = ("torch",)
DEVICES = ("cuda", "cpu")


def _made(case):
    from torch.nn import functional

    def call(x, weight, bias, eps):
        time.sleep({ms} / 1e3)
        return functional.layer_norm(x, weight.shape, weight, bias, eps)

    return call


IMPLEMENTATIONS = {{"layer_norm": {{"mine": _made}}}}
'''
PLAN = """
deadline_s = 60

[sampling]
min_samples = 5
max_samples = 5
min_seconds = 0
warmup_s = 0

[[systems]]
name = "with_mine"
parts = { layer_norm = "mine" }

[[cases]]
operator = "train"
axes = { B = 1, S = 16 }
options = { model = "gpt2-tiny", slice = "first1" }
dtype = "fp32"
pass = "program"
implementations = ["with_mine"]
"""
PROGRAM = (
    "import functools; from kernelmark.suite.run import supervisor; "
    "supervisor.Run = functools.partial(supervisor.Run, ceilings=False); "
    "from kernelmark.suite.cli.regression import main; main()"
)

ASKED = ("--baseline", "HEAD~1", "--implementation", "with_mine", "--json", "--budget", "400s")


@pytest.mark.minutes
def test_a_slower_part_fails_the_row_of_a_training_step(make_repository, tmp_path: Path) -> None:
    """Three norms a step, of 30 ms each and then of 60: the step takes twice as long."""
    repository = make_repository("mine")
    for ms in (30, 60):
        repository.commit(baselines__mine=PART.format(ms=ms))
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    left_out = "TRITON_INTERPRET", "COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--plan", str(plan), *ASKED],
        env={
            **{name: value for name, value in os.environ.items() if name not in left_out},
            "KERNELMARK_PATH": str(repository.folder),
            "KERNELMARK_HOME": str(tmp_path / "home"),
            "OMP_NUM_THREADS": "1",
            "PYTHONSAFEPATH": "1",
        },
        cwd=repository.folder,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.stdout, done.stderr
    (verdict,) = json.loads(done.stdout)["verdicts"]
    assert (done.returncode, verdict["kind"]) == (1, "regression"), done.stderr
    assert (verdict["operator"], verdict["implementation"]) == ("train", "with_mine")
    assert 0.5 < verdict["change"] < 1.2
