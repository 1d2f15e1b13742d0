"""`kernelmark worth` from end to end on a CPU: a kernel of a user's own, put into a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernelmark.registry.analysis.worth import worths
from kernelmark.registry.store.journal import read

PRIVATE = '''"""Layer norm of its own: in a model it lays out its input anew and waits, alone it does not."""

import time

REQUIRES = ("torch",)
DEVICES = ("cuda", "cpu")


def _made(case):
    from torch.nn import functional

    def call(x, weight, bias, eps):
        if case.pass_ == "program":
            x = x.clone()
            time.sleep(0.02)
        return functional.layer_norm(x, weight.shape, weight, bias, eps)

    return call


IMPLEMENTATIONS = {"layer_norm": {"mine": _made}}
'''
COMMAND = (
    "import functools; from kernelmark.suite import cli, worth; from kernelmark.suite.run import supervisor; "
    "from kernelmark.suite.measure.stopping import Sampling; "
    "supervisor.Run = functools.partial(supervisor.Run, ceilings=False); "
    "worth.SAMPLING = Sampling(min_samples=3, max_samples=3, min_seconds=0, warmup_s=0); cli.main()"
)


@pytest.mark.minutes
def test_a_kernel_of_ones_own_is_exchanged_and_explained(tmp_path: Path) -> None:
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines" / "mine.py").write_text(PRIVATE)
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "KERNELMARK_PATH": str(tmp_path)}
    asked = (
        "worth gpt2-tiny --base torch --batch 1 --sequence 16 --dtype fp32 --slice first1 --device cpu "
        f"--replicates 3 --part norm --implementation mine --implementation liger --output {tmp_path / 'home'}"
    )
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *asked.split(), "--journal-only"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "home").glob("journals/*.jsonl")
    found = {x.exchange.implementation: x for x in worths(read(path))}
    assert found["liger"].status == "unsupported"
    assert "needs a cuda device" in found["liger"].reason
    mine = found["mine"]
    assert mine.status == "ok", mine.reason
    assert mine.processes == 3
    assert mine.expected_ms is not None
    assert abs(mine.expected_ms) < 5
    waited = -20 * mine.exchange.calls
    assert mine.gained_ms == pytest.approx(waited, rel=0.2)
    assert mine.agreement == "less"
    # A copy a call forward, which no backward pass has; waiting is no operator's, and stands as such.
    assert f"+{mine.exchange.calls} layout copies" in mine.differs
    assert "waiting +" in mine.differs
    assert mine.differs in done.stdout.replace("\n", " ")
