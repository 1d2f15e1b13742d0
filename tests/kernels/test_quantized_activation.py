"""RMSNorm and SwiGLU that write E4M3 with a scale for 128 columns."""

import pytest
import torch
from kernelmark.kernels.quantization.quantized_activation import quantized_activation
from kernelmark.suite.operators.fp8_matmul import scaled
from kernelmark.suite.operators.quantized_activation import reference


@pytest.mark.parametrize("activation", ["rms_norm", "swiglu"])
@pytest.mark.parametrize("axes", [{"M": 9, "K": 200}, {"M": 2, "K": 1157}])
def test_agrees(agrees, axes, activation):
    """Of widths that no group divides, of fewer groups than are held, and of more."""
    agrees("quantized_activation", axes, "bf16", activation=activation, data="outliers")


@pytest.mark.parametrize("weight", [None, torch.rand(300) + 0.5])
def test_is_the_activation_quantized(weight):
    """To the bit what quantizing the exact activation gives, but where a number lies between two."""
    x = torch.randn(5, 300 if weight is not None else 600)
    q, scale = quantized_activation(x, weight)
    want, want_scale = scaled(reference(x.double(), None if weight is None else weight.double(), 1e-6), 1, 128)
    torch.testing.assert_close(scale, want_scale, rtol=1e-5, atol=0)
    assert (q.view(torch.uint8) != want.view(torch.uint8)).float().mean() < 2e-3
    assert scale.stride() == (1, 5)
    assert q.float().abs().amax() == 448


def test_strides_and_nothing():
    part, weight = torch.randn(4, 700).half()[:, 100:400], torch.ones(300).half()
    q, scale = quantized_activation(part, weight)
    want, want_scale = quantized_activation(part.clone(), weight)
    assert torch.equal(q.float(), want.float())
    assert torch.equal(scale, want_scale)
    q, scale = quantized_activation(torch.zeros(0, 300), torch.ones(300))
    assert (q.shape, scale.shape) == ((0, 300), (0, 3))
    q, scale = quantized_activation(torch.zeros(2, 256))
    assert q.float().eq(0).all()
    assert scale.gt(0).all()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": torch.zeros(3, 5)}, ValueError, "even number of columns"),
        ({"x": torch.zeros(3, 8).int()}, TypeError, "x has dtype"),
        ({"norm_weight": torch.zeros(7)}, ValueError, r"norm_weight has shape \(7,\), expected \(8,\)"),
        ({"norm_weight": torch.zeros(8).half()}, TypeError, "norm_weight has dtype"),
    ],
)
def test_says_what_is_wrong(given, error, message):
    with pytest.raises(error, match=message):
        quantized_activation(**{"x": torch.zeros(3, 8)} | given)
