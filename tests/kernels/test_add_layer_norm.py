"""Our residual addition with layer normalization, and what is left of it without the norm."""

import pytest
import torch
from kernelmark.kernels.norm.layer_norm import add_layer_norm, add_moments, gradients, layer_norm

# As wide as the interpreter is in 16 bits, of `layer_norm` too.
LOOSE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-6, 2**-5), torch.float16: (2**-7, 2**-6)}


def inputs(shape, dtype, **like):
    x, residual = torch.randn(2, *shape) + 0.5
    weight, bias = torch.rand(shape[-1]) + 0.5, torch.randn(shape[-1])
    return [y.to(dtype).requires_grad_() for y in (x, residual, weight, bias)]


def wide(given, rounded):
    """What it is, in fp64, of the sum that is returned, which the interpreter rounds in a way of its own."""
    x, residual, weight, bias = (y.detach().double().requires_grad_() for y in given)
    h = x + residual
    torch.testing.assert_close(rounded.double(), h, rtol=LOOSE[rounded.dtype][0], atol=1e-6)
    held = h + (rounded.double() - h).detach()
    return (
        [x, residual, weight, bias],
        torch.nn.functional.layer_norm(held, weight.shape, weight, bias, 1e-5),
        held,
    )


@pytest.mark.parametrize("dtype", LOOSE)
@pytest.mark.parametrize("shape", [(2, 5, 13), (10, 16), (3, 40), (1, 101), (2, 300), (1, 1)])
def test_agrees(shape, dtype):
    """Whole rows, rows in parts and in pieces, and few rows spread over programs; both gradients together."""
    given = inputs(shape, dtype)
    y, h = add_layer_norm(*given)
    exact, want_y, want_h = wide(given, h.detach())
    rtol, atol = LOOSE[dtype]
    torch.testing.assert_close(y.double(), want_y, rtol=rtol, atol=atol)
    dy, dh = torch.randn(2, *shape).to(dtype)
    got = torch.autograd.grad([y, h], given, [dy, dh])
    want = torch.autograd.grad([want_y, want_h], exact, [dy.double(), dh.double()])
    assert torch.equal(got[0], got[1])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=4 * rtol, atol=8 * atol)


def test_is_the_sum_and_then_the_norm():
    """Bit by bit, so that a model may take either; with rows of a wider matrix and a weight that is strided."""
    given = inputs((7, 24), torch.float32)
    x, residual = (torch.randn(7, 40)[:, 3:27] for _ in range(2))
    y = add_layer_norm(x, residual, given[2].repeat(2)[::2], given[3])[0]
    assert torch.equal(y, layer_norm(x + residual, given[2].repeat(2)[::2], given[3]))
    assert torch.equal(
        y, add_layer_norm(*(z.detach() for z in (x, residual, given[2].repeat(2)[::2], given[3])))[0]
    )


@pytest.mark.parametrize("used", [0, 1])
def test_gradient_of_one_output(used):
    """Only y or only h goes on."""
    given = inputs((3, 8), torch.float32)
    got = torch.autograd.grad(add_layer_norm(*given)[used].square().sum(), given, allow_unused=True)
    h = given[0] + given[1]
    plain = (torch.nn.functional.layer_norm(h, (8,), *given[2:], 1e-5), h)
    expected = torch.autograd.grad(plain[used].square().sum(), given, allow_unused=True)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_of_nothing(shape):
    given = inputs(shape, torch.float32)
    y, h = add_layer_norm(*given)
    assert y.shape == h.shape == shape
    found = torch.autograd.grad(y.sum(), given)
    assert found[2].tolist() == found[3].tolist() == [0.0] * shape[1]


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "residual must be a tensor, not NoneType", {1: None}),
        (ValueError, r"residual has shape \(3,\)", {1: torch.ones(3)}),
        (TypeError, "residual has dtype", {1: torch.ones(2, 3).half()}),
        (ValueError, r"weight has shape \(4,\)", {2: torch.ones(4)}),
        (TypeError, "bias has dtype", {3: torch.ones(3).half()}),
        (ValueError, r"x has shape \(\)", {0: torch.tensor(1.0)}),
    ],
)
def test_wrong_arguments(error, message, change):
    given = [torch.ones(2, 3), torch.ones(2, 3), torch.ones(3), torch.ones(3)]
    with pytest.raises(error, match=message):
        add_layer_norm(*(change.get(i, x) for i, x in enumerate(given)))


def test_registration():
    given = inputs((2, 3, 8), torch.float32)
    operators = torch.ops.kernelmark
    torch.library.opcheck(operators.add_layer_norm_saving.default, (*given, 1e-5))
    x, residual, weight, bias = (y.detach() for y in given)
    torch.library.opcheck(operators.add_layer_norm.default, (x, residual, weight, bias, 1e-5))
    moments = torch.rand(2, 2, 3)
    for dh in (residual, None):
        torch.library.opcheck(operators.add_layer_norm_backward.default, (x, dh, x, weight, *moments))
    for other in (residual, None):
        torch.library.opcheck(operators.add_moments.default, (x, other, 1e-5))


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("D", [1, 24, 32, 67])
def test_what_is_left_without_the_norm(added, D):
    """The sum as the whole operator has it, and its rows' moments; of rows of a wider matrix, in pieces from 33
    columns on. Sums of squares would cancel where the mean is large.
    """
    x, residual = (torch.randn(2, 3, D + 5) + 100)[..., 2:-3].bfloat16(), torch.randn(2, 3, D).bfloat16()
    h, mean, rstd = add_moments(x, residual if added else None, 1e-5)
    weight = torch.ones(D).bfloat16()
    want = add_layer_norm(x, residual, weight, weight)[1] if added else x
    assert torch.equal(h, want)
    torch.testing.assert_close(mean, want.float().mean(-1))
    torch.testing.assert_close(
        rstd, (want.double().var(-1, correction=0) + 1e-5).rsqrt().float(), rtol=1e-4, atol=1e-4
    )
    assert add_moments(x[:0], residual[:0])[1].shape == (0, 3)
    with pytest.raises(TypeError, match="residual has dtype"):
        add_moments(x, residual.half())


def test_gradients_by_moments_are_the_operators():
    given = inputs((5, 24), torch.float32)
    dy, dh = torch.randn(2, 5, 24)
    want = torch.autograd.grad(add_layer_norm(*given), given, [dy, dh])
    x, residual, weight, _ = (y.detach() for y in given)
    found = gradients(dy, dh, *(add_moments(x, residual)[0], weight, *add_moments(x, residual)[1:]))
    for a, b in zip((found[0], *found), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
