"""Our products with weights in block formats."""

import pytest
import torch
from kernelmark.kernels.matmul import mx_matmul as module
from kernelmark.kernels.matmul._mx import reencode, widen
from kernelmark.suite.operators.mx_matmul import dequantized, quantized

FORMATS = pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "nvfp4"])


@FORMATS
@pytest.mark.parametrize(
    "axes", [{"M": 5, "N": 40, "K": 90}, {"M": 17, "N": 33, "K": 320}, {"M": 5, "N": 40, "K": 256}]
)
def test_agrees(agrees, axes, format):
    agrees("mx_matmul", axes, "bf16", format=format)


@FORMATS
def test_agrees_with_many_rows(agrees, format, monkeypatch):
    monkeypatch.setattr(module, "FEW", 4)
    agrees("mx_matmul", {"M": 17, "N": 40, "K": 90}, "bf16", format=format)


def test_agrees_with_8_bit_inputs(agrees):
    agrees("mx_matmul", {"M": 5, "N": 140, "K": 288}, "e4m3")


@pytest.mark.parametrize("K", [288, 264, 266])
@pytest.mark.parametrize("spread", [0, 14, 15])
def test_reencoding_is_exact(spread, K):
    """As far as scales are within 2^14 of each other, and for no more; of rows by words, and byte by byte."""
    exponents = torch.randint(0, spread + 1, (150, 9))
    exponents[0, ::4], exponents[128, ::4] = 0, spread
    exponents[1, ::4], exponents[129, ::4] = spread, 0
    q = torch.randint(0, 256, (150, K // 2), dtype=torch.uint8)
    scales = (exponents + 110).to(torch.uint8)
    e4m3, tops = reencode(q, scales, K)
    wide = e4m3.double() * tops.double().repeat_interleave(128, 0)[:150].repeat_interleave(128, 1)[:, :K]
    want = dequantized(q, scales, "mxfp4", None, torch.float64)
    assert torch.equal(wide, want) == (spread <= 14)
    torch.testing.assert_close(wide, want, rtol=0, atol=2.0 ** (spread - 16 + 110 - 127))


def test_a_group_that_is_no_number_stays_none():
    q, scales = torch.randint(0, 256, (4, 64), dtype=torch.uint8), torch.full((4, 4), 120, dtype=torch.uint8)
    scales[2, 1] = 255
    e4m3, _ = reencode(q, scales, 128)
    assert e4m3[2, 32:64].float().isnan().all()
    assert e4m3.float().isnan().sum() == 32


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
        ({"scale_x": torch.ones(2, 1)}, "scale_x is given, but x is bf16"),
    ):
        with pytest.raises(ValueError, match=message):
            module.mx_matmul(**{"x": x, "q": q, "scales": scales} | change)
    with pytest.raises(NotImplementedError, match="mxfp8 is not re-encoded"):
        module.mx_matmul(x.to(torch.float8_e4m3fn), torch.zeros(3, 64).to(torch.float8_e4m3fn), scales, "mxfp8")


@FORMATS
def test_few_rows_are_exact(format):
    """Rows that lie anywhere, and a weight of many scales: what is rounded is the result, which the interpreter
    cuts off.
    """
    generator = torch.Generator().manual_seed(len(format))
    q, scales, scale = quantized(torch.randn(35, 202, generator=generator) * 3, format)
    for x in (torch.randn(202, 50, generator=generator).t(), torch.randn(33, 404, generator=generator)[:, ::2]):
        x = x.bfloat16()
        got = module.mx_matmul(x, q, scales, format, scale)
        want = x.double() @ dequantized(q, scales, format, scale, torch.float64).t()
        torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=1e-3)


def test_one_scale_for_all():
    x, q = torch.randn(2, 64).bfloat16(), torch.zeros(8, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    scales = torch.ones(8, 4).to(torch.float8_e4m3fn)
    for scale in (torch.ones(8), torch.ones(0)):
        with pytest.raises(ValueError, match=r"scale has shape \(\d,\), expected one number"):
            module.mx_matmul(x, q, scales, "nvfp4", scale)
