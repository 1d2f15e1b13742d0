"""The kernels on a CPU, through Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import importlib
import os
import sys

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("a test imported triton before tests/kernels/conftest.py could choose the interpreter")
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch
from kernelmark.kernels import _in_c, _launch
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.verify import deviation, flat
from kernelmark.suite.measure.workbench import differentiable
from triton.runtime import interpreter

from . import quick_interpreter

quick_interpreter.install()
_convert = interpreter._convert_float


def _convert_float(input: np.ndarray, input_dtype, output_dtype, rounding_mode) -> np.ndarray:
    """Rounds to 8-bit floats as the hardware does: the interpreter loses the carry of a rounded mantissa."""
    formats = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
    if output_dtype.name in formats and input_dtype.name == "fp32":
        wide = torch.from_numpy(np.ascontiguousarray(input).view(np.float32))
        return wide.to(formats[output_dtype.name]).view(torch.uint8).numpy()
    return _convert(input, input_dtype, output_dtype, rounding_mode)


@pytest.fixture(params=["python", "c"])
def way(request, monkeypatch):
    """What knows arguments again and launches: Python, or C as on a GPU."""
    if request.param == "python":
        monkeypatch.setattr(_in_c, "compiled", lambda: None)
    elif _in_c.compiled() is None:
        pytest.skip("there is no C compiler here")
    monkeypatch.setattr(_launch, "_DEVICES", ("cuda", "cpu"))
    return request.param


@pytest.fixture(autouse=True)
def _hardware_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_convert_float", _convert_float)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """In whichever order tests run: of what is rounded to 8 bits one draw in very many is beyond its tolerance."""
    torch.manual_seed(0)


@pytest.fixture
def agrees():
    """A check that a kernel agrees with its operator's reference in fp64: forward, and backward if it has one."""
    return _agrees


def _agrees(name, axes, dtype="fp32", change=None, **options):
    """`change` may replace inputs by others, such as ones with unusual strides."""
    operator = importlib.import_module(f"kernelmark.suite.operators.{name}").OPERATOR
    kernel = getattr(Catalog.default().roots[0].module("kernels", name), name)
    case = operator.case(axes, dtype, "forward", **options)
    inputs = operator.built(case, torch.device("cpu"), torch.Generator().manual_seed(1))
    inputs |= change(inputs) if change else {}
    tolerance = operator.tolerances[dtype]
    raised = {
        key: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for key, x in inputs.items()
    }
    expected = flat(operator.reference(**raised))
    result = kernel(**inputs)
    outputs = flat(operator.results(result, inputs) if operator.results else result)
    deviation(outputs, expected, tolerance)
    if not operator.gradients:
        return
    leaves = [inputs[key].requires_grad_() for key in operator.differentiated(inputs)]
    wide = [raised[key].requires_grad_() for key in operator.differentiated(inputs)]
    saving = differentiable(kernel(**inputs))
    assert all(torch.equal(a, b) for a, b in zip(saving, outputs, strict=True))
    assert all(a.dtype == leaves[0].dtype for a in saving)
    generator = torch.Generator().manual_seed(2)
    given = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in saving]
    gradients = torch.autograd.grad(saving, leaves, given)
    references = torch.autograd.grad(flat(operator.reference(**raised)), wide, [x.double() for x in given])
    assert [x.dtype for x in gradients] == [x.dtype for x in leaves]
    deviation(gradients, references, tolerance)
