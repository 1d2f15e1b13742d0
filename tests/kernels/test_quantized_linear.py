"""A norm or a gate that writes E4M3, then the product."""

import pytest
import torch
from kernelmark.kernels.matmul.fp8_matmul import fp8_matmul
from kernelmark.kernels.matmul.quantized_linear import quantized_linear
from kernelmark.kernels.quantization.quantized_activation import quantized_activation
from kernelmark.suite.operators.fp8_matmul import quantized_weight


@pytest.mark.parametrize(
    ("axes", "activation"),
    [({"M": 1, "N": 40, "K": 2880}, "rms_norm"), ({"M": 17, "N": 150, "K": 200}, "swiglu")],
)
def test_agrees(agrees, axes, activation):
    agrees("quantized_linear", axes, "bf16", activation=activation)


def test_is_both_kernels():
    """And takes scales as `fp8_quant` leaves them, which are not padded."""
    x, weight = torch.randn(5, 200).bfloat16(), torch.rand(200).bfloat16()
    q, scale = quantized_weight(torch.randn(140, 200))
    y, scale_y = quantized_activation(x, weight)
    want = fp8_matmul(y, q.t(), scale_y, scale.t(), "block")
    assert torch.equal(quantized_linear(x, q, scale.contiguous(), weight), want)


def test_says_what_is_wrong():
    x, q = torch.zeros(2, 256), torch.zeros(3, 256).to(torch.float8_e4m3fn)
    for given, message in (
        ({}, r"x has shape \(2, 256\), expected \(M, 512\)"),
        ({"norm_weight": torch.ones(200)}, r"norm_weight has shape \(200,\), expected \(256,\)"),
        (
            {"scale": torch.ones(1, 3), "norm_weight": torch.ones(256)},
            r"scale has shape \(1, 3\), expected \(1, 2\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            quantized_linear(**{"x": x, "weight": q, "scale": torch.ones(1, 2)} | given)
