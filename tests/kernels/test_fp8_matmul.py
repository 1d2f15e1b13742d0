"""Our products of 8-bit floats, as far as any GPU has them; `test_matmul_hopper.py` plays Hopper's."""

import pytest
import torch
from kernelmark.kernels.matmul.fp8_matmul import fp8_matmul


@pytest.mark.parametrize("recipe", ["block", "row", "tensor"])
@pytest.mark.parametrize("axes", [{"M": 17, "N": 40, "K": 72}, {"M": 33, "N": 150, "K": 300}])
def test_agrees(agrees, axes, recipe):
    agrees("fp8_matmul", axes, "e4m3", recipe=recipe)


def test_scales_that_lie_otherwise(agrees):
    def contiguous(given):
        return {name: given[name].contiguous() for name in ("scale_a", "scale_b")}

    agrees("fp8_matmul", {"M": 17, "N": 140, "K": 300}, "e4m3", change=contiguous)


def test_empty():
    q = torch.zeros(4, 0).to(torch.float8_e4m3fn)
    one = torch.ones(())
    assert fp8_matmul(q, q.t(), one, one, "tensor").eq(0).all()
    assert fp8_matmul(q.t(), q, one, one, "tensor").shape == (0, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"recipe": "column"}, ValueError, "recipe is 'column'"),
        ({"recipe": "row"}, ValueError, r"scale_a has shape \(\), expected \(4, 1\)"),
        ({"recipe": "block"}, ValueError, r"scale_a has shape \(\), expected \(4, 2\)"),
        ({"a": torch.zeros(4, 200)}, TypeError, "a has dtype torch.float32"),
    ],
)
def test_says_what_is_wrong(change, error, message):
    q = torch.zeros(4, 200).to(torch.float8_e4m3fn)
    given = {"a": q, "b": q.t(), "scale_a": torch.ones(()), "scale_b": torch.ones(()), "recipe": "tensor"}
    with pytest.raises(error, match=message):
        fp8_matmul(**given | change)
