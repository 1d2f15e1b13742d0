"""Our RMS normalization."""

import pytest
import torch
from kernelmark.kernels.norm.rms_norm import rms_norm


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("D", [2, 13, 16, 40])
def test_agrees(agrees, D, dtype):
    agrees("rms_norm", {"B": 2, "S": 5, "D": D}, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("S", "D"), [(1, 32), (1, 101), (2, 300), (3, 77)])
def test_few_long_rows(agrees, S, D, dtype):
    """Fewer rows than multiprocessors, spread over programs."""
    agrees("rms_norm", {"B": 1, "S": S, "D": D}, dtype)


def test_agrees_with_strides(agrees):
    axes = {"B": 3, "S": 4, "D": 12}
    agrees("rms_norm", axes, change=lambda given: {"x": torch.randn(3, 4, 20)[..., 3:15]})
    agrees("rms_norm", axes, change=lambda given: {"x": torch.randn(12, 4, 3).transpose(0, 2)})
    agrees("rms_norm", axes, change=lambda given: {"weight": torch.randn(24)[::2]})


def test_one_element():
    assert rms_norm(torch.tensor([-3.0]), torch.tensor([2.0]), 0.0).item() == pytest.approx(-2.0)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0,)])
def test_empty(shape):
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    y = rms_norm(x, weight)
    assert y.shape == shape
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert dx.shape == shape
    assert dweight.tolist() == [0.0] * shape[-1]


def test_gradient_given_is_expanded():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    (dx,) = torch.autograd.grad(rms_norm(x, weight).sum(), x)
    wide = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.rms_norm(wide, (8,), weight.double(), 1e-6).sum(), wide)
    torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "x must be a tensor, not list", ([1.0], torch.ones(1))),
        (TypeError, "x has dtype torch.float64", (torch.ones(2, 3, dtype=torch.float64), torch.ones(3))),
        (TypeError, "weight has dtype torch.int64", (torch.ones(2, 3), torch.ones(3, dtype=torch.int64))),
        (ValueError, r"weight has shape \(4,\), expected \(3,\)", (torch.ones(2, 3), torch.ones(4))),
        (ValueError, r"x has shape \(\)", (torch.tensor(1.0), torch.ones(1))),
        (ValueError, "x is on meta", (torch.ones(2, 3, device="meta"), torch.ones(3))),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        rms_norm(*arguments)


def test_registration():
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    operators = torch.ops.kernelmark
    torch.library.opcheck(operators.rms_norm_saving.default, (x, weight, 1e-6))
    x, weight = x.detach(), weight.detach()
    torch.library.opcheck(operators.rms_norm.default, (x, weight, 1e-6))
    torch.library.opcheck(operators.rms_norm_backward.default, (x, x, weight, torch.rand(2, 3)))


def test_compiled():
    """torch.compile takes the registered operator and differentiates it."""
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    compiled = torch.compile(lambda x, w: rms_norm(x * 2, w) + 1, backend="aot_eager", fullgraph=True)
    plain = rms_norm(x * 2, weight) + 1
    y = compiled(x, weight)
    torch.testing.assert_close(y, plain)
    for a, b in zip(
        torch.autograd.grad(y.square().sum(), (x, weight)),
        torch.autograd.grad(plain.square().sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
