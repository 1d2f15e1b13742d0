"""A run of arms killed and resumed: the same numbers as of one that ran through. `make test-training`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from kernelmark.registry.detection.arms import arms
from kernelmark.registry.store.journal import read
from kernelmark.registry.store.record import Measurement

pytestmark = pytest.mark.training


def numbers(found: Measurement) -> dict[str, tuple[float, ...]]:
    """All that does not hang on a clock."""
    return {x: y for x, y in found.samples.items() if x not in ("tokens_per_s", "seconds_to_target")}


PLAN = """
replicates = 1
deadline_s = 200

[[systems]]
name = "int8"
changes = {{ gradients = "int8" }}

[[cases]]
operator = "converge"
axes = {{ B = 2, S = 16, N = {steps} }}
options = {{ model = "gpt2-tiny", data = "synthetic", deterministic = true }}
dtype = "fp32"
pass = "program"
implementations = ["int8", "torch"]
"""


def run(*arguments: str) -> subprocess.Popen[str]:
    # The device's ceilings take seconds in every process and are not what this looks at.
    code = (
        "import functools; from kernelmark.suite import cli; from kernelmark.suite.run import supervisor; "
        "supervisor.Run = functools.partial(supervisor.Run, ceilings=False); cli.main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, "run", *arguments, "--no-report", "--journal-only"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
    )


def test_a_killed_run_goes_on_and_ends_with_the_same_numbers(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.format(steps=80))
    asked = ("--plan", str(plan), "--device", "cpu", "--seed", "5")
    first = run(*asked, "--run", "killed", "--output", str(tmp_path / "a"))
    scratch = tmp_path / "a" / "scratch" / "killed"
    until = time.monotonic() + 250
    while time.monotonic() < until and first.poll() is None and not list(scratch.glob("*.pt")):
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)  # its worker ends with it
    first.communicate()
    assert list(scratch.glob("*.pt")), "killed between a checkpoint and the end"
    (kept,) = scratch.glob("*.pt")
    at = torch.load(kept, weights_only=True)["progress"]["step"]
    assert 0 < at < 80
    again = run("--resume", "killed", "--output", str(tmp_path / "a"))
    said, _ = again.communicate(timeout=250)
    assert again.returncode == 0, said
    assert not scratch.exists(), "what is finished leaves nothing"
    whole = run(*asked, "--run", "whole", "--output", str(tmp_path / "b"))
    said, _ = whole.communicate(timeout=250)
    assert whole.returncode == 0, said
    sides = [read(tmp_path / x / "journals" / f"{name}.jsonl") for x, name in (("a", "killed"), ("b", "whole"))]
    made = [{x.implementation: numbers(x.measurement) for x in side.records if x.measurement} for side in sides]
    assert set(made[0]) == {"torch", "int8"}
    assert json.dumps(made[0], sort_keys=True) == json.dumps(made[1], sort_keys=True)
    (found,) = arms(sides[0])
    assert (found.name, found.overall, found.points[0].step) == ("int8", "inconclusive", 80)
    assert "1 of at least 5 seeds" in found.points[0].found.reason
