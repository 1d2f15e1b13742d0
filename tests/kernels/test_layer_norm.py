"""Our layer normalization."""

import pytest
import torch
from kernelmark.kernels.norm._norm import Plan
from kernelmark.kernels.norm._norm_forward import prepare_forward
from kernelmark.kernels.norm.layer_norm import layer_norm


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("D", [3, 13, 16, 40])
def test_agrees(agrees, D, dtype):
    agrees("layer_norm", {"B": 2, "S": 5, "D": D}, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("S", "D"), [(1, 32), (1, 101), (2, 300), (3, 77)])
def test_few_long_rows(agrees, S, D, dtype):
    """Fewer rows than multiprocessors, spread over programs."""
    agrees("layer_norm", {"B": 1, "S": S, "D": D}, dtype)


@pytest.mark.parametrize("D", [90, 96])
@pytest.mark.parametrize("centred", [False, True])
def test_a_weight_that_is_read_ahead_is_the_same(D, centred):
    x, weight, bias = torch.randn(2, D), torch.randn(D), torch.randn(D)
    given = x, None, weight, bias if centred else None
    plan = Plan("spread", 1, 16, 6, 4)
    late, ahead = (prepare_forward(*given, 1e-5, False, x)(*given)[0] for x in (plan, plan._replace(flag=True)))
    assert torch.equal(late, ahead)
    assert late.square().mean() > 0.1


def test_agrees_with_strides(agrees):
    axes = {"B": 3, "S": 4, "D": 12}
    agrees("layer_norm", axes, change=lambda given: {"x": torch.randn(3, 4, 20)[..., 3:15]})
    agrees("layer_norm", axes, change=lambda given: {"x": torch.randn(12, 4, 3).transpose(0, 2)})
    agrees("layer_norm", axes, change=lambda given: {"bias": torch.randn(24)[::2]})


@pytest.mark.parametrize("D", [16, 48])
def test_large_mean(D):
    """Sums of squares would cancel here; whole rows and rows in pieces."""
    x = torch.randn(3, D) + 1000
    expected = torch.nn.functional.layer_norm(x.double(), (D,))
    got = layer_norm(x, torch.ones(D), torch.zeros(D))
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("D", [69, 70, 71])
def test_a_piece_without_elements_counts_none(D):
    """Of one row that is spread over programs: of 80 columns there is room for, the last 8 are of no row here."""
    x = torch.randn(1, D) + 100
    expected = torch.nn.functional.layer_norm(x.double(), (D,))
    got = layer_norm(x, torch.ones(D), torch.zeros(D))
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-3)


def test_one_element():
    assert layer_norm(torch.tensor([7.0]), torch.tensor([2.0]), torch.tensor([3.0])).item() == 3.0


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_empty(shape):
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    y = layer_norm(x, weight, weight)
    assert y.shape == shape
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert dx.shape == shape
    assert dweight.tolist() == [0.0] * shape[-1]


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "x must be a tensor, not int", (1, torch.ones(1), torch.ones(1))),
        (ValueError, r"weight has shape \(4,\)", (torch.ones(2, 3), torch.ones(4), torch.ones(3))),
        (ValueError, r"bias has shape \(4,\)", (torch.ones(2, 3), torch.ones(3), torch.ones(4))),
        (TypeError, "bias has dtype torch.float16", (torch.ones(2, 3), torch.ones(3), torch.ones(3).half())),
        (ValueError, r"x has shape \(\)", (torch.tensor(1.0), torch.ones(1), torch.ones(1))),
        (ValueError, "bias is on meta", (torch.ones(2, 3), torch.ones(3), torch.ones(3, device="meta"))),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        layer_norm(*arguments)


def test_registration():
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    bias = torch.randn(8, requires_grad=True)
    operators = torch.ops.kernelmark
    torch.library.opcheck(operators.layer_norm_saving.default, (x, weight, bias, 1e-6))
    x, weight, bias = x.detach(), weight.detach(), bias.detach()
    torch.library.opcheck(operators.layer_norm.default, (x, weight, bias, 1e-6))
    torch.library.opcheck(
        operators.layer_norm_backward.default, (x, x, weight, torch.rand(2, 3), torch.rand(2, 3))
    )
