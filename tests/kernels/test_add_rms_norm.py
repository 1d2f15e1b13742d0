"""Our residual addition with RMS normalization."""

import pytest
import torch
from kernelmark.kernels.norm.add_rms_norm import add_rms, add_rms_norm


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("D", [2, 13, 16, 40])
def test_agrees(agrees, D, dtype):
    agrees("add_rms_norm", {"B": 2, "S": 5, "D": D}, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("S", "D"), [(1, 32), (1, 101), (2, 300), (3, 77)])
def test_few_long_rows(agrees, S, D, dtype):
    """Fewer rows than multiprocessors, spread over programs."""
    agrees("add_rms_norm", {"B": 1, "S": S, "D": D}, dtype)


def test_agrees_with_strides(agrees):
    axes = {"B": 3, "S": 4, "D": 12}
    agrees("add_rms_norm", axes, change=lambda given: {"x": torch.randn(3, 4, 20)[..., 3:15]})
    agrees("add_rms_norm", axes, change=lambda given: {"residual": torch.randn(12, 4, 3).transpose(0, 2)})


@pytest.mark.parametrize("used", [0, 1])
def test_gradient_of_one_output(used):
    """Only y or only h goes on."""
    inputs = [torch.randn(3, 8, requires_grad=True) for _ in range(2)] + [torch.randn(8, requires_grad=True)]
    got = torch.autograd.grad(add_rms_norm(*inputs)[used].square().sum(), inputs, allow_unused=True)
    h = inputs[0] + inputs[1]
    plain = (torch.nn.functional.rms_norm(h, (8,), inputs[2], 1e-6), h)
    expected = torch.autograd.grad(plain[used].square().sum(), inputs, allow_unused=True)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_one_element():
    y, h = add_rms_norm(torch.tensor([-3.0]), torch.tensor([1.0]), torch.tensor([2.0]), 0.0)
    assert (y.item(), h.item()) == (pytest.approx(-2.0), -2.0)


def test_empty():
    y, h = add_rms_norm(torch.ones(0, 4), torch.ones(0, 4), torch.ones(4))
    assert y.shape == h.shape == (0, 4)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "residual must be a tensor, not NoneType", (torch.ones(2, 3), None, torch.ones(3))),
        (ValueError, r"residual has shape \(3,\)", (torch.ones(2, 3), torch.ones(3), torch.ones(3))),
        (TypeError, "residual has dtype", (torch.ones(2, 3), torch.ones(2, 3).half(), torch.ones(3))),
        (ValueError, r"weight has shape \(4,\)", (torch.ones(2, 3), torch.ones(2, 3), torch.ones(4))),
        (ValueError, r"x has shape \(\)", (torch.tensor(1.0), torch.tensor(1.0), torch.ones(1))),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        add_rms_norm(*arguments)


def test_registration():
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    residual = torch.randn(2, 3, 8, requires_grad=True)
    operators = torch.ops.kernelmark
    torch.library.opcheck(operators.add_rms_norm_saving.default, (x, residual, weight, 1e-6))
    x, residual, weight = x.detach(), residual.detach(), weight.detach()
    torch.library.opcheck(operators.add_rms_norm.default, (x, residual, weight, 1e-6))
    torch.library.opcheck(operators.add_rms_norm_backward.default, (x, residual, x, weight, torch.rand(2, 3)))
    torch.library.opcheck(operators.add_rms_norm_backward.default, (x, None, x, weight, torch.rand(2, 3)))


@pytest.mark.parametrize("added", [False, True])
def test_what_is_left_without_the_norm(added):
    """The sum as the whole operator has it, and by what its rows are to be multiplied; of long rows in pieces."""
    x, residual = torch.randn(1, 3, 70)[..., :67].bfloat16(), torch.randn(1, 3, 67).bfloat16()
    h, rstd = add_rms(x, residual if added else None, 1e-5)
    want = add_rms_norm(x, residual, torch.ones(67).bfloat16(), 1e-5)[1] if added else x
    assert torch.equal(h, want)
    torch.testing.assert_close(rstd, (want.float().square().mean(-1) + 1e-5).rsqrt())
    assert add_rms(x[:0], residual[:0])[1].shape == (0, 3)
