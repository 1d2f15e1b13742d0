"""The operators of matrix products: cost, references, what they say of errors, and PyTorch beside them."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
from kernelmark.baselines.torch import IMPLEMENTATIONS as EAGER
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators import fp8_matmul, mx_matmul
from kernelmark.suite.operators.sparse24_matmul import pruned

CPU = torch.device("cpu")
NAMES = ("matmul", "fp8_matmul", "mx_matmul", "sparse24_matmul")
SMALL = {"M": 8, "N": 48, "K": 64}


def operator(name):
    return importlib.import_module(f"kernelmark.suite.operators.{name}").OPERATOR


def variants(name):
    """The small case with each combination of options and dtypes."""
    chosen = operator(name)
    for values in itertools.product(*chosen.options.values()):
        for dtype in chosen.dtypes:
            if name == "mx_matmul" and dtype == "e4m3" and values != ("mxfp4",):
                continue
            yield chosen.case(SMALL, dtype, "forward", **dict(zip(chosen.options, values, strict=True)))


@pytest.mark.parametrize("name", NAMES)
def test_cost(name):
    """Operations are two a number and step of K, half of them in 2:4; bytes are at least the output's."""
    for case in variants(name):
        pieces = {"swiglu": 2}.get(case.options.get("epilogue"), 1)
        whole = 2 * SMALL["M"] * SMALL["N"] * SMALL["K"] * pieces
        assert case.flops == (whole // 2 if name == "sparse24_matmul" else whole)
        assert case.bytes > 2 * SMALL["M"] * SMALL["N"]
        assert case.tokens == SMALL["M"]
    chosen = operator(name)
    assert 1 <= len([x for grid in chosen.plans["quick"] for x in chosen.expand(grid)]) <= 3
    assert all(x.bytes < 64e6 for grid in chosen.plans["quick_cpu"] for x in chosen.expand(grid))


@pytest.mark.parametrize("name", ["matmul", "mx_matmul", "sparse24_matmul"])
def test_eager_is_right(name):
    chosen = operator(name)
    for case in variants(name):
        bench = Workbench.build(chosen, case, CPU, seed=1)
        for kind, factory in EAGER[name].items():
            if kind != "torch_cusparselt":
                deviation(
                    bench.comparable(bench.call(factory(case))()), bench.references, chosen.tolerances[case.dtype]
                )


@pytest.mark.parametrize("recipe", ["block", "row", "tensor"])
@pytest.mark.parametrize("data", ["normal", "outliers"])
def test_errors_of_fp8(recipe, data):
    """The exact product of quantized numbers is as far from that of the original ones as E4M3's rounding is; with
    blocks outliers cost no more, with one scale they do.
    """
    case = fp8_matmul.OPERATOR.case({"M": 64, "N": 96, "K": 400}, "e4m3", "forward", recipe=recipe, data=data)
    originals = fp8_matmul.original(case, CPU, torch.Generator().manual_seed(1))
    given = fp8_matmul.inputs(case, CPU, torch.Generator().manual_seed(1))
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    found = fp8_matmul.errors(fp8_matmul.reference(**wide), originals, given)
    assert found["error_quantized"] == 0
    assert 0.02 < found["error_unquantized"] < 0.045
    assert 0 < found["saturated"] < 0.02
    assert found["underflowed"] < 1e-3


def test_results_of_fp8_have_a_dtype():
    given = fp8_matmul.inputs(next(variants("fp8_matmul")), CPU, torch.Generator().manual_seed(1))
    right = torch.zeros(SMALL["M"], SMALL["N"], dtype=torch.bfloat16)
    assert fp8_matmul.results(right, given).eq(0).all()
    for wrong in (right.float(), right.T):
        assert fp8_matmul.results(wrong, given).isnan().all()


@pytest.mark.parametrize(
    ("format", "error", "size"), [("mxfp8", 0.03, 1.03), ("mxfp4", 0.13, 0.53), ("nvfp4", 0.11, 0.56)]
)
def test_errors_of_block_formats(format, error, size):
    case = mx_matmul.OPERATOR.case({"M": 32, "N": 64, "K": 640}, "bf16", "forward", format=format)
    originals = mx_matmul.original(case, CPU, torch.Generator().manual_seed(1))
    given = mx_matmul.inputs(case, CPU, torch.Generator().manual_seed(1))
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    found = mx_matmul.errors(mx_matmul.reference(**wide), originals, given)
    assert found["error_quantized"] == 0
    assert error * 0.8 < found["error_unquantized"] < error * 1.2
    assert found["weight_bytes"] == pytest.approx(size, abs=0.01)


def test_codes_are_rounded_to_nearest_even():
    """Of E2M1, between every two of its numbers, beyond the largest, and with signs."""
    numbers = [0.0, 0.25, 0.3, 0.5, 0.75, 1.0, 1.25, 1.3, 1.75, 2.5, 2.6, 3.5, 5.0, 5.1, 7.0, -0.75]
    wanted = [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0, -1.0]
    weight = torch.tensor([numbers + [0.0] * 16]).float()
    q, scales, _ = mx_matmul.quantized(weight, "mxfp4")
    assert scales.tolist() == [[127]]
    assert mx_matmul.dequantized(q, scales, "mxfp4", None, torch.float32)[0, :16].tolist() == wanted


def test_pruning_keeps_the_largest():
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5, 0.0, 0.0, 0.0, 0.0]])
    dense, values, positions = pruned(weight)
    assert dense.tolist() == [[0.0, -3.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    assert values.tolist() == [[-3.0, 2.0, 0.0, 0.0]]
    assert positions.tolist() == [[(1 | 2 << 2) | (0 | 1 << 2) << 4]]
