"""Our linear layer with its backward pass, and gradients that are added where they lie."""

import pytest
import torch
from kernelmark.kernels.matmul.linear import linear
from kernelmark.kernels.matmul.matmul import matmul_add


@pytest.mark.parametrize(("M", "bias"), [(3, True), (33, False)])
def test_agrees(agrees, M, bias):
    agrees("linear", {"M": M, "N": 41, "K": 35}, "bf16", bias=bias)


def test_strides(agrees):
    """Rows of a wider input, and a weight that lies turned."""
    change = {"x": torch.randn(40, 90).bfloat16()[3:36, 5:69], "weight": torch.randn(64, 40).bfloat16().t()}
    agrees("linear", {"M": 33, "N": 40, "K": 64}, "bf16", change=lambda given: change)


def test_any_leading_dimensions_and_none():
    x, weight = torch.randn(2, 3, 32).bfloat16(), torch.randn(24, 32).bfloat16().requires_grad_()
    y = linear(x, weight)
    assert torch.equal(y, linear(x.flatten(0, 1), weight).view(2, 3, 24))
    y.sum().backward()
    assert weight.grad.shape == weight.shape
    assert linear(x[:0], weight).shape == (0, 3, 24)


def test_a_result_is_changed_in_place():
    """A residual that is added, an activation in place: autograd refuses it of views that a function gives."""
    x, weight = torch.randn(2, 3, 32).half(), torch.randn(24, 32).half().requires_grad_()
    torch.relu_(linear(x, weight).add_(1)).sum().backward()
    want = ((linear(x, weight) + 1) > 0).half().flatten(0, 1).t() @ x.flatten(0, 1)
    torch.testing.assert_close(weight.grad, want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 6e-4), (torch.float32, 1e-6)])
def test_gradients_are_added_where_they_lie(dtype, most):
    """Of three micro-batches; autograd is given the first at the most."""
    weight = torch.randn(24, 33).half().requires_grad_()
    want = torch.zeros(24, 33, dtype=torch.float64)
    if dtype == torch.float32:
        weight.main_grad = torch.zeros(24, 33)
    for _ in range(3):
        x, dy = torch.randn(17, 33).half(), torch.randn(17, 24).half()
        linear(x, weight).backward(dy)
        if weight.grad is not None:  # which it stays
            weight.main_grad = weight.grad
        want += dy.double().t() @ x.double()
    assert (weight.grad is None) == (dtype == torch.float32)
    assert (weight.main_grad.double() - want).norm() < most * want.norm()


@pytest.mark.parametrize("asked", ["x", "weight", "bias", "xw", "xb", "wb", "xwb"])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_that_are_asked_for(asked, compiled):
    """Of rows that lie apart too, by calls that come again and of other sizes, in graphs of any size."""
    call = torch.compile(linear, backend="aot_eager", dynamic=True) if compiled else linear
    torch._dynamo.reset()
    for M in (3, 40, 3, 40, 3):
        x, weight, bias = (
            torch.randn(2, M, 70).half()[..., :35],
            torch.randn(24, 35).half(),
            torch.randn(24).half(),
        )
        leaves = x.detach(), weight, bias
        for z, name in zip(leaves, ("x", "w", "b"), strict=True):
            z.requires_grad_(name in asked.replace("weight", "w").replace("bias", "b"))
        y, dy = call(*leaves), torch.randn(2, M, 24).half()
        y.backward(dy)
        rows, given = x.double().flatten(0, 1), dy.double().flatten(0, 1)
        dx, dw, db = dy.double() @ weight.double(), given.t() @ rows, given.sum(0)
        for z, want in zip(leaves, (dx, dw, db), strict=True):
            assert (z.grad is not None) == z.requires_grad
            if z.grad is not None:
                assert (z.grad.double() - want).norm() < 1e-3 * want.norm()


@pytest.mark.parametrize("asked", [(True, True, True), (False, True, False), (True, False, False)])
@pytest.mark.parametrize("sizes", [(2, 3, 32, 24), (1, 40, 35, 17)])
def test_registered(asked, sizes):
    B, M, K, N = sizes
    x, weight, dy = torch.randn(B, M, K).half(), torch.randn(N, K).half(), torch.randn(B, M, N).half()
    bias = torch.randn(N).half()
    torch.library.opcheck(torch.ops.kernelmark.linear_backward.default, (dy, x, weight, *asked))
    torch.library.opcheck(torch.ops.kernelmark.linear.default, (x, weight.requires_grad_(asked[1]), bias))


def test_a_gradient_that_lies_otherwise():
    """Expanded of one number, turned, every second row."""
    x, weight = torch.randn(6, 32).half().requires_grad_(), torch.randn(24, 32).half().requires_grad_()
    for dy in (
        torch.ones(1).half().expand(6, 24),
        torch.randn(24, 6).half().t(),
        torch.randn(12, 24).half()[::2],
        torch.randn(6, 49).half()[:, 1:25],
    ) * 3:
        dx, dweight = torch.autograd.grad(linear(x, weight), (x, weight), dy)
        for got, want in ((dx, dy.double() @ weight.double()), (dweight, dy.double().t() @ x.double())):
            assert (got.double() - want).norm() < 1e-3 * want.norm()


def test_a_main_grad_of_another_shape_is_refused():
    weight = torch.randn(24, 32).bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(32, 24)
    with pytest.raises(ValueError, match="main_grad has shape"):
        linear(torch.randn(3, 32).bfloat16(), weight)


@pytest.mark.parametrize("M", [5, 40])
def test_product_added(M):
    a, b, out = torch.randn(M, 35), torch.randn(19, 35).t(), torch.randn(M, 19)
    want = out + a @ b
    matmul_add(out, a, b)
    torch.testing.assert_close(out, want)
    matmul_add(out, a[:, :0], b[:0])
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (torch.zeros(3, 5), ValueError, "expected \\(3, 4\\)"),
        (torch.zeros(4, 3).t(), ValueError, "rows one after the other"),
        (torch.zeros(3, 4).half(), TypeError, "out has dtype"),
    ],
)
def test_what_is_wrong_is_named(out, error, message):
    with pytest.raises(error, match=message):
        matmul_add(out, torch.zeros(3, 2), torch.zeros(2, 4))


def test_no_columns():
    x, weight = (torch.randn(n, 0).bfloat16().requires_grad_() for n in (3, 5))
    y = linear(x, weight)
    assert torch.equal(y, torch.zeros(3, 5).bfloat16())
    y.sum().backward()
    x, weight = (torch.randn(n, 4).bfloat16().requires_grad_() for n in (3, 0))
    linear(x, weight).sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, 4).bfloat16())


def test_what_is_written_to_is_known_to_autograd():
    out, factor = torch.zeros(4, 4).bfloat16(), torch.randn(4, 4).bfloat16().requires_grad_()
    product = (out * factor).sum()
    matmul_add(out, *(torch.randn(n).bfloat16() for n in ((4, 8), (8, 4))))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        matmul_add(torch.zeros(4, 4).bfloat16(), *(torch.randn(n).bfloat16() for n in ((4, 8), (8, 4))))
