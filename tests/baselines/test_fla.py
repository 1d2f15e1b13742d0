"""flash-linear-attention on our inputs, where it is installed: what needs no GPU to be seen.

Triton's interpreter has to be chosen before Triton is imported, so this file is also a program.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["add_rms_norm", "layer_norm", "rms_norm"])
def test_rows_too_wide_are_refused_in_its_words(name):
    if importlib.util.find_spec("fla") is None:
        pytest.skip("flash-linear-attention is not installed")
    environment = {x: y for x, y in os.environ.items() if not x.startswith("COV")}
    done = subprocess.run(
        [sys.executable, __file__, name],
        env=environment | {"TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["This layer norm doesn't support feature dim >= 64KB."] * 3  # passes


def refused(name: str) -> None:
    """Prints why each pass is unsupported."""
    import torch
    from kernelmark.baselines import fla
    from kernelmark.suite.measure.workbench import Workbench

    operator = importlib.import_module(f"kernelmark.suite.operators.{name}").OPERATOR
    for pass_ in operator.passes:
        case = operator.case({"B": 1, "S": 2, "D": 32769}, "bf16", pass_)
        bench = Workbench.build(operator, case, torch.device("cpu"), seed=1)
        try:
            bench.call(fla.IMPLEMENTATIONS[name]["fla"](case))()
        except NotImplementedError as error:
            print(error)


if __name__ == "__main__":
    refused(sys.argv[1])
