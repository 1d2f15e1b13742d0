"""Our SwiGLU gate."""

import pytest
import torch
from kernelmark.kernels.activation.swiglu import swiglu


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("axes", [{"M": 3, "N": 5}, {"M": 5, "N": 1024}])
def test_agrees(agrees, axes, dtype):
    agrees("swiglu", axes, dtype)


def test_agrees_with_strides(agrees):
    """Both projections in one tensor, and transposed ones."""
    both = torch.randn(5, 14)
    agrees("swiglu", {"M": 5, "N": 7}, change=lambda given: {"gate": both[:, :7], "up": both[:, 7:]})
    agrees("swiglu", {"M": 5, "N": 7}, change=lambda given: {"up": torch.randn(7, 5).t()})


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0)])
def test_one_and_no_element(shape):
    gate, up = torch.zeros(shape, requires_grad=True), torch.ones(shape, requires_grad=True)
    y = swiglu(gate, up)
    torch.testing.assert_close(y, torch.zeros(shape))
    dgate, dup = torch.autograd.grad(y.sum(), (gate, up))
    torch.testing.assert_close(dgate, torch.full(shape, 0.5))
    torch.testing.assert_close(dup, torch.zeros(shape))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy; the limits are right
def test_far_from_zero():
    gate = torch.tensor([-200.0, 200.0], requires_grad=True)
    y = swiglu(gate, torch.ones(2))
    assert y.tolist() == [0.0, 200.0]
    assert torch.autograd.grad(y.sum(), gate)[0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "gate must be a tensor, not float", (1.0, torch.ones(3))),
        (TypeError, "up has dtype torch.float16, expected torch.float32", (torch.ones(3), torch.ones(3).half())),
        (ValueError, r"up has shape \(4,\), expected \(3,\)", (torch.ones(3), torch.ones(4))),
        (ValueError, "gate is on meta", (torch.ones(3, device="meta"), torch.ones(3))),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        swiglu(*arguments)


def test_registration():
    gate, up = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.kernelmark.swiglu.default, (gate, up))
    gate, up = gate.detach(), up.detach()
    torch.library.opcheck(torch.ops.kernelmark.swiglu_backward.default, (gate, gate, up))
