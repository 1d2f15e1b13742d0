"""`regression_detector` on rows of workloads: a commit that makes a training step, or a server, slower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PART = '''"""PyTorch's own, after so many milliseconds."""

import time

REQUIRES = ("torch",)
DEVICES = ("cuda", "cpu")


def _norm(case):
    from torch.nn import functional

    def call(x, weight, bias, eps):
        time.sleep({ms} / 1e3)
        return functional.layer_norm(x, weight.shape, weight, bias, eps)

    return call


def _gate(case):
    from torch.nn import functional

    def call(gate, up):
        time.sleep({ms} / 1e3)
        return functional.silu(gate) * up

    return call


IMPLEMENTATIONS = {{"layer_norm": {{"mine": _norm}}, "swiglu": {{"mine": _gate}}}}
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
parts = {{ {part} = "mine" }}

[[cases]]
operator = "{operator}"
axes = {axes}
options = {options}
dtype = "fp32"
pass = "program"
implementations = ["with_mine"]
"""
STEP = {
    "operator": "train",
    "part": "layer_norm",
    "axes": "{ B = 1, S = 16 }",
    "options": '{ model = "gpt2-tiny", slice = "first1" }',
}
SERVER = {
    "operator": "serve",
    "part": "gate",
    "axes": "{ rate = 0, users = 2, requests = 16, input = 8, output = 6 }",
    "options": '{ model = "llama-tiny", slice = "first1", load = "closed" }',
}
PROGRAM = (
    "import functools; from kernelmark.suite.run import supervisor; "
    "supervisor.Run = functools.partial(supervisor.Run, ceilings=False); "
    "from kernelmark.suite.cli.regression import main; main()"
)

ASKED = ("--baseline", "HEAD~1", "--implementation", "with_mine", "--json", "--budget", "400s")


@pytest.mark.minutes
@pytest.mark.parametrize("row", [STEP, SERVER], ids=["a training step", "a server"])
def test_a_slower_part_fails_the_row_of_a_workload(make_repository, tmp_path: Path, row: dict[str, str]) -> None:
    """Three norms a step of 30 ms each, or one gate a token, and then of 60: all takes twice as long. A server is
    a process of its own, which has to get the commit's code too.
    """
    repository = make_repository("mine")
    for ms in (30, 60):
        repository.commit(baselines__mine=PART.format(ms=ms))
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.format(**row))
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
    assert (verdict["operator"], verdict["implementation"]) == (row["operator"], "with_mine")
    assert 0.5 < verdict["change"] < 1.2
