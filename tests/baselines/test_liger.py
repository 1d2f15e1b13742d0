"""Liger-Kernel on our inputs through Triton's interpreter, where it is installed: those that this can run.

Its gates and norms call into CUDA's mathematical library, which the interpreter has not. The interpreter has to be
chosen before Triton is imported, so each case is a process of its own: this file, run as a program.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

CASES = [
    ("cross_entropy", {"M": 4, "V": 32}),
    ("fused_linear_cross_entropy", {"M": 4, "D": 16, "V": 32}),
    ("rope", {"B": 2, "H": 4, "Hkv": 2, "S": 3, "D": 16}),
    ("rope", {"B": 2, "H": 1, "Hkv": 1, "S": 3, "D": 16}),  # both orders are the same memory
    ("softmax", {"M": 3, "D": 16}),
]


WIDE = [
    ("add_rms_norm", {"B": 1, "S": 1, "D": 65537}),
    ("geglu", {"M": 1, "N": 65537}),
    ("layer_norm", {"B": 1, "S": 1, "D": 65537}),
    ("rms_norm", {"B": 1, "S": 1, "D": 65537}),
    ("softmax", {"M": 1, "D": 65537}),
    ("swiglu", {"M": 1, "N": 65537}),
]


def child(what, name, axes):
    if importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("liger-kernel is not installed")
    environment = {x: y for x, y in os.environ.items() if not x.startswith("COV")}
    done = subprocess.run(
        [sys.executable, __file__, what, name, json.dumps(axes)],
        env=environment | {"TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_right_thrice_and_inputs_untouched(name, axes):
    assert child("run", name, axes) == ["forward", "backward", "forward_backward"]


@pytest.mark.parametrize(("name", "axes"), WIDE)
def test_rows_too_wide_are_refused_in_its_words(name, axes):
    said = child("refused", name, axes)
    assert len(said) == 3  # passes
    assert set(said) == {
        "Cannot launch Triton kernel since n = 65537 exceeds the recommended Triton blocksize = 65536."
    }


def run(name: str, axes: dict[str, int]) -> None:
    """Each pass three times, the first on other inputs; prints those that are right."""
    import torch
    from kernelmark.baselines import liger
    from kernelmark.suite.measure.verify import deviation
    from kernelmark.suite.measure.workbench import Workbench

    operator = importlib.import_module(f"kernelmark.suite.operators.{name}").OPERATOR
    for pass_ in operator.passes:
        case = operator.case(axes, "fp32", pass_)
        bench = Workbench.build(operator, case, torch.device("cpu"), seed=1)
        loaded = liger.IMPLEMENTATIONS[name]["liger"](case)
        call = bench.call(loaded)
        for contents in (bench.decoys, bench.values, bench.values):
            bench.lay(contents)
            result = bench.comparable(call())
        assert not bench.changed(result)
        deviation(result, bench.references, operator.tolerances["fp32"])
        if hasattr(loaded, "conversion"):
            loaded.conversion(**bench.inputs)
            assert not bench.changed(result)
        print(pass_)


def refused(name: str, axes: dict[str, int]) -> None:
    """Prints why each pass is unsupported."""
    import torch
    from kernelmark.baselines import liger
    from kernelmark.suite.measure.workbench import Workbench

    operator = importlib.import_module(f"kernelmark.suite.operators.{name}").OPERATOR
    for pass_ in operator.passes:
        case = operator.case(axes, "bf16", pass_)
        bench = Workbench.build(operator, case, torch.device("cpu"), seed=1)
        loaded = liger.IMPLEMENTATIONS[name]["liger"](case)
        try:
            bench.call(loaded)()
        except NotImplementedError as error:
            print(error)


if __name__ == "__main__":
    {"run": run, "refused": refused}[sys.argv[1]](sys.argv[2], json.loads(sys.argv[3]))
