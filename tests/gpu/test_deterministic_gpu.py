"""A training with more than one block of keys on a GPU, twice under deterministic algorithms: the same bits; and
the same again where it was killed and goes on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAINED = """
import sys
from pathlib import Path

from kernelmark.suite.measure.device import Cuda
from kernelmark.suite.measure.session import Session
from kernelmark.suite.measure.stages import Stages
from kernelmark.suite.measure.stopping import Sampling
from kernelmark.suite.system import Assembly, System
from kernelmark.suite.workloads import _training, converge

base, scratch = sys.argv[1], Path(sys.argv[2])
options = {"model": "gpt2-86m-bytes", "data": "synthetic", "deterministic": True}
case = converge.WORKLOAD.case({"B": 4, "S": 512, "N": 16}, "bf16", "program", **options)
device = Cuda.open()
kept = _training.Training._step


class Killed(Exception):
    pass


def until(stop):
    def step(self, n, look):
        if n == stop:
            raise Killed
        kept(self, n, look)

    return step


def trained(scratch=None):
    session = Session(device, 5, 0, Sampling(), Stages(), scratch)
    expected = converge.WORKLOAD.prepare(case, session)
    arm = converge.assemble(case, Assembly(System("arm", base=base), converge.catalog()))
    found = converge.measured(case, arm, session, expected).samples
    return {x: y for x, y in found.items() if x not in ("tokens_per_s", "seconds_to_target")}


first, again = trained(), trained()
assert first == again, [x for x in first if first[x] != again[x]]
_training.Training._step = until(11)
try:
    trained(scratch)
except Killed:
    pass
assert list(scratch.glob("*.pt"))
_training.Training._step = kept
resumed = trained(scratch)
assert first == resumed, [x for x in first if first[x] != resumed[x]]
print("the same")
"""


@pytest.mark.parametrize("base", ["torch", "kernelmark"])
def test_a_training_repeats_bitwise_and_goes_on_bitwise(base: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAINED, base, str(tmp_path / "scratch")],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
        # PyTorch reads it when the process first multiplies.
        env={**os.environ, "PYTHONSAFEPATH": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    )
    assert done.stdout.split("\n")[-2:] == ["the same", ""], done.stderr
