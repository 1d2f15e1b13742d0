"""Our quantization to MXFP8, MXFP4 and NVFP4."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelmark.kernels.quantization.mx_quant import GROUPS, mx_quant
from kernelmark.suite.operators.mx_quant import MAGNITUDES

FORMATS = pytest.mark.parametrize("format", list(GROUPS))
POWERS = pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
ONE = torch.ones(1)


def quantized(x, format, rounding="floor"):
    return mx_quant(x, format, ONE if format == "nvfp4" else None, rounding)


def elements(q):
    """The numbers that bytes of E2M1 stand for."""
    if q.dtype == torch.float8_e4m3fn:
        return q.float()
    codes = q.view(torch.uint8).int()
    magnitudes = torch.tensor(MAGNITUDES)
    return torch.cat((magnitudes, -magnitudes))[torch.stack((codes & 15, codes >> 4), -1)].flatten(-2)


def factors(scales):
    return (
        torch.exp2(scales.view(torch.uint8).float() - 127)
        if scales.dtype != torch.float8_e4m3fn
        else scales.float()
    )


# numpy, in the branch of a group of zeros that is not taken
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")


@FORMATS
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("axes", [{"M": 3, "N": 128}, {"M": 5, "N": 300}, {"M": 8, "N": 515}])
def test_agrees(agrees, axes, dtype, format):
    agrees("mx_quant", axes, dtype, format=format)


@FORMATS
def test_agrees_with_strides(agrees, format):
    def scale(x):
        return {"x": x, "scale": x.abs().max() / (448 * 6) if format == "nvfp4" else None}

    axes = {"M": 5, "N": 300}
    agrees("mx_quant", axes, change=lambda given: scale(torch.randn(300, 5).t()), format=format)
    agrees("mx_quant", axes, change=lambda given: scale(torch.randn(5, 400)[:, 5:305]), format=format)


@POWERS
@pytest.mark.parametrize("rounding", ["floor", "up"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales(format, rounding, dtype):
    """Exactly the powers that the definition gives, over the whole range of exponents."""
    x = torch.randn(64, 96).mul(torch.exp2(torch.linspace(-140, 125, 64))[:, None]).to(dtype)
    _, scales = mx_quant(x, format, rounding=rounding)
    largest = x.double().view(64, 3, 32).abs().amax(-1)
    powers = {
        "floor": torch.floor(torch.log2(largest)) - {"mxfp8": 8, "mxfp4": 2}[format],
        "up": torch.ceil(torch.log2(largest / {"mxfp8": 448, "mxfp4": 6}[format])),
    }
    assert torch.equal(scales.view(torch.uint8).double(), (powers[rounding] + 127).clamp(0))


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.float32, torch.bfloat16]))
def test_nearest_in_four_bits(seed, dtype):
    """Each element is a nearest one of the format, and of two the one with the even code."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x[:, ::32] = 4.0  # the scale is 1
    x = x.clamp(-6, 6)
    q, scales = mx_quant(x, "mxfp4")
    assert (factors(scales) == 1).all()
    magnitudes = torch.tensor(MAGNITUDES)
    distance = (x.double().abs()[..., None] - magnitudes).abs()
    # Even codes first, so that the first of two equally near ones is even.
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    nearest = magnitudes[order][distance[..., order].argmin(-1)]
    assert torch.equal(elements(q), nearest.copysign(x.float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_and_saturation(dtype):
    """Ties go to the even code; beside one the nearer number counts; what is beyond the largest becomes it."""
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9] * 4, dtype=dtype)[None]
    q, _ = mx_quant(x, "mxfp4")
    assert elements(q)[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    assert elements(mx_quant(-x, "mxfp4")[0])[0, :8].tolist() == [0, -1, -1, -2, -2, -4, -4, -6]
    if dtype == torch.float32:
        above = x.nextafter(torch.tensor(8.0))
        assert elements(mx_quant(above, "mxfp4")[0])[0, :8].tolist() == [0.5, 1, 1.5, 2, 3, 4, 6, 6]
        below = x.nextafter(torch.tensor(0.0))
        assert elements(mx_quant(below, "mxfp4")[0])[0, :8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    q, scales = mx_quant(x * 64, "mxfp8")
    assert factors(scales).item() == 1
    assert elements(q)[0, 7].item() == 448


def test_packing():
    """The lower column is in the lower four bits."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([6.0, -0.5, 1.0, 2.0])
    q, _ = mx_quant(x, "mxfp4")
    assert q.view(torch.uint8)[0, :3].tolist() == [0x97, 0x42, 0]
    q, scales = mx_quant(torch.full((1, 3), 6.0), "mxfp4")
    assert (q.view(torch.uint8).tolist(), factors(scales).tolist()) == ([[0x77, 0x07]], [[1.0]])


def test_two_scales():
    """nvfp4: E4M3 nearest to the largest magnitude / (6 · scale)."""
    x = torch.randn(8, 160)
    scale = (x.abs().max() / (448 * 6)).reshape(())
    q, scales = mx_quant(x, "nvfp4", scale)
    largest = x.view(8, 10, 16).abs().amax(-1)
    assert torch.equal(scales.float(), (largest / (6 * scale)).to(torch.float8_e4m3fn).float())
    assert scales.float().max() == 448
    half = torch.tensor([0.25, 0.25, 0.5, 0.5, 1.0, 1.0, 1.0])
    y = x.double() / (scales.double() * scale).repeat_interleave(16, -1)
    allowed = half[y.abs().clamp(max=6).floor().long()].where(y.abs() < 6, y.abs() - 6 + 1e-9)
    assert ((elements(q) - y).abs() <= allowed + 1e-5).all()


@FORMATS
def test_zeros_and_empty(format):
    q, scales = quantized(torch.zeros(2, 130), format)
    assert elements(q).abs().max() == 0
    assert factors(scales).isfinite().all()
    for shape in ((0, 130), (2, 0), (0,)):
        q, scales = quantized(torch.zeros(shape), format)
        assert q.shape == (*shape[:-1], shape[-1] if format == "mxfp8" else shape[-1] // 2)
        assert scales.shape == (*shape[:-1], -(-shape[-1] // GROUPS[format]))


@FORMATS
def test_what_is_not_finite(format):
    """A NaN makes the scale of its group NaN, and of no other; so does an infinity for powers of two."""
    x = torch.ones(2, 96, dtype=torch.bfloat16)
    x[0, 40], x[1, 95] = torch.nan, torch.inf
    _, scales = quantized(x, format)
    nan = scales.float().isnan() if format == "nvfp4" else scales.view(torch.uint8) == 255
    groups = 96 // GROUPS[format]
    expected = torch.zeros(2, groups, dtype=torch.bool)
    expected[0, 40 // GROUPS[format]] = True
    expected[1, -1] = format != "nvfp4"
    assert torch.equal(nan, expected)


@FORMATS
def test_more_dimensions(format):
    x = torch.randn(2, 3, 64)
    q, scales = quantized(x, format)
    flat, other = quantized(x.view(6, 64), format)
    assert q.shape[:-1] == scales.shape[:-1] == (2, 3)
    assert torch.equal(q.view(torch.uint8).view(6, -1), flat.view(torch.uint8))
    assert torch.equal(scales.view(torch.uint8).view(6, -1), other.view(torch.uint8))


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "x must be a tensor, not int", (1,)),
        (TypeError, "x has dtype torch.int8", (torch.ones(3, dtype=torch.int8),)),
        (ValueError, r"x has shape \(\)", (torch.tensor(1.0),)),
        (ValueError, "x is on meta", (torch.ones(3, device="meta"),)),
        (ValueError, "format is 'fp4', expected 'mxfp8' or 'mxfp4' or 'nvfp4'", (torch.ones(3), "fp4")),
        (ValueError, "rounding is 'down', expected 'floor' or 'up'", (torch.ones(3), "mxfp8", None, "down")),
        (TypeError, "scale must be a tensor, not NoneType", (torch.ones(3), "nvfp4")),
        (TypeError, "scale has dtype torch.float64", (torch.ones(3), "nvfp4", ONE.double())),
        (ValueError, r"scale has shape \(2,\), expected one element", (torch.ones(3), "nvfp4", torch.ones(2))),
        (ValueError, "scale is given, but mxfp8 has none", (torch.ones(3), "mxfp8", ONE)),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        mx_quant(*arguments)


@FORMATS
def test_registration(format):
    scale = ONE if format == "nvfp4" else None
    torch.library.opcheck(torch.ops.kernelmark.mx_quant.default, (torch.randn(3, 200), format, scale, "floor"))


def test_zeros_by_the_scale_that_their_largest_gives():
    x = torch.zeros(2, 64)
    q, scales = mx_quant(x, "nvfp4", (x.abs().max() / 2688).reshape(1))
    assert not factors(scales).any()
    assert not elements(q).any()
