"""Our Gaussian error linear unit."""

import pytest
import torch
from kernelmark.kernels.activation.gelu import gelu


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("axes", [{"M": 3, "N": 5}, {"M": 9, "N": 1024}])
def test_agrees(agrees, axes, dtype, approximate):
    agrees("gelu", axes, dtype, approximate=approximate)


def test_agrees_with_strides(agrees):
    agrees("gelu", {"M": 5, "N": 7}, change=lambda given: {"x": torch.randn(7, 5).t()})
    agrees("gelu", {"M": 5, "N": 7}, change=lambda given: {"x": torch.randn(5, 20)[:, 1:15:2]})


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy; the limits are right
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_far_from_zero(approximate):
    x = torch.tensor([-100.0, -20.0, -0.0, 20.0, 100.0], requires_grad=True)
    y = gelu(x, approximate)
    assert y.tolist() == [0.0, 0.0, 0.0, 20.0, 100.0]
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2)])
def test_one_and_no_element(shape):
    x = torch.full(shape, 0.5, requires_grad=True)
    y = gelu(x)
    torch.testing.assert_close(y, torch.nn.functional.gelu(x))
    assert torch.autograd.grad(y.sum(), x)[0].shape == shape


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "x must be a tensor, not float", (1.0,)),
        (TypeError, "x has dtype torch.int32", (torch.ones(3, dtype=torch.int32),)),
        (ValueError, "x is on meta", (torch.ones(3, device="meta"),)),
        (ValueError, "approximate is 'erf', expected 'none' or 'tanh'", (torch.ones(3), "erf")),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        gelu(*arguments)


def test_registration():
    x = torch.randn(3, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.kernelmark.gelu.default, (x, "tanh"))
    torch.library.opcheck(torch.ops.kernelmark.gelu_backward.default, (x.detach(), x.detach(), "none"))
