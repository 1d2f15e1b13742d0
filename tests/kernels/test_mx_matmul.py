"""Our products with weights in block formats."""

import pytest
import torch
from kernelmark.kernels.matmul import mx_matmul as module
from kernelmark.kernels.matmul._mx import widen
from kernelmark.suite.operators.mx_matmul import dequantized, quantized

FORMATS = pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "nvfp4"])


@FORMATS
@pytest.mark.parametrize("axes", [{"M": 5, "N": 40, "K": 90}, {"M": 17, "N": 33, "K": 320}])
def test_agrees(agrees, axes, format):
    agrees("mx_matmul", axes, "bf16", format=format)


@FORMATS
def test_agrees_with_many_rows(agrees, format, monkeypatch):
    monkeypatch.setattr(module, "FEW", 4)
    agrees("mx_matmul", {"M": 17, "N": 40, "K": 90}, "bf16", format=format)


@FORMATS
def test_widening_is_exact(format):
    """Every code and sign, and scales small, large and NaN."""
    q, scales, _ = quantized(torch.randn(8, 320), format)
    codes = torch.randint(0, 256, q.shape, dtype=torch.uint8)
    if format == "mxfp8":
        codes[(codes & 127) == 127] = 0  # NaN
    q = codes.view(q.dtype)
    if format != "nvfp4":
        scales[:, :4] = torch.tensor([20, 100, 240, 255], dtype=torch.uint8)
    got = widen(q, scales, format, 320)
    want = dequantized(q, scales, format, None, torch.float64)
    want[:, 96:128] = torch.where(scales[:, 3:4].view(torch.uint8) == 255, torch.nan, want[:, 96:128])
    assert torch.equal(got.double().nan_to_num(7), want.nan_to_num(7))


def test_says_what_is_wrong():
    x, q, scales = torch.zeros(2, 64).bfloat16(), torch.zeros(3, 32, dtype=torch.uint8), torch.zeros(3, 2).byte()
    for change, message in (
        ({"format": "mxfp6"}, "format is 'mxfp6'"),
        ({"q": q[:, :31]}, r"q has shape \(3, 31\), expected \(3, 32\)"),
        ({"scales": scales[:, :1]}, r"scales has shape \(3, 1\), expected \(3, 2\)"),
        ({"scale": torch.ones(())}, "scale is given, but mxfp4 has none"),
        ({"x": x[:, :63]}, "expected an even number of columns"),
    ):
        with pytest.raises(ValueError, match=message):
            module.mx_matmul(**{"x": x, "q": q, "scales": scales} | change)
