"""Our causal convolution."""

import pytest
import torch
from kernelmark.kernels.convolution.causal_conv1d import causal_conv1d
from kernelmark.suite.operators.causal_conv1d import reference

LONG = {"B": 2, "D": 5, "S": 70, "W": 4}
WIDE = {"B": 1, "D": 24, "S": 16, "W": 3}


@pytest.mark.parametrize("layout", ["bds", "bsd"])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize(("axes", "dtype"), [(LONG, "fp32"), (LONG, "bf16"), (WIDE, "fp32"), (WIDE, "fp16")])
def test_agrees(agrees, axes, layout, initial, dtype):
    agrees("causal_conv1d", axes, dtype, layout=layout, initial=initial)


@pytest.mark.parametrize("layout", ["bds", "bsd"])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("S", [1, 2, 3, 5, 9])
def test_short(agrees, S, W, initial, layout):
    agrees("causal_conv1d", {"B": 2, "D": 3, "S": S, "W": W}, layout=layout, initial=initial, activation="none")


@pytest.mark.parametrize("layout", ["bds", "bsd"])
def test_strides(agrees, layout):
    axes = {"B": 2, "D": 8, "S": 24, "W": 4}

    def part(given):
        x = given["x"]
        return {"x": torch.randn(*x.shape[:2], x.shape[2] + 8)[..., 8:], "weight": torch.randn(4, 8).t()}

    def turned(given):
        return {"x": given["x"].transpose(1, 2).contiguous().transpose(1, 2)}

    agrees("causal_conv1d", axes, change=part, layout=layout)
    agrees("causal_conv1d", axes, change=turned, layout=layout)


@pytest.mark.parametrize("layout", ["bds", "bsd"])
@pytest.mark.parametrize("W", [2, 3, 4])
def test_gradient_of_the_initial_state(layout, W):
    shape, before = ((2, 3, 9), (2, 3, W - 1)) if layout == "bds" else ((2, 9, 3), (2, W - 1, 3))
    given = [torch.randn(*s, requires_grad=True) for s in (shape, (3, W), (3,), before)]
    wide = [t.detach().double().requires_grad_() for t in given]
    dy = torch.randn(shape)
    got = torch.autograd.grad(causal_conv1d(*given, layout=layout), given, dy)
    expected = torch.autograd.grad(reference(*wide, "silu", layout), wide, dy.double())
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["bds", "bsd"])
def test_pieces_join(layout):
    """A sequence in two pieces, the end of the first as the state of the second, is the sequence."""
    dim = 2 if layout == "bds" else 1
    x, weight = torch.randn(2, 12, 12), torch.randn(12, 4)
    first, second = x.split((7, 5), dim)
    whole = causal_conv1d(x, weight, layout=layout)
    y = causal_conv1d(second, weight, None, first.narrow(dim, 4, 3), layout=layout)
    torch.testing.assert_close(whole.narrow(dim, 7, 5), y)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty(shape):
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[1], 4, requires_grad=True)
    y = causal_conv1d(x, weight)
    assert y.shape == shape
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert dx.shape == shape
    assert not dweight.any()


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "x must be a tensor", (None, torch.ones(3, 4))),
        (ValueError, "weight has 5 taps, expected 2 to 4", (torch.ones(2, 3, 4), torch.ones(3, 5))),
        (ValueError, r"weight has shape \(4, 4\), expected \(3, 4\)", (torch.ones(2, 3, 4), torch.ones(4, 4))),
        (ValueError, r"bias has shape \(4,\)", (torch.ones(2, 3, 4), torch.ones(3, 4), torch.ones(4))),
        (
            ValueError,
            r"initial_state has shape \(2, 3, 4\), expected \(2, 3, 3\)",
            (torch.ones(2, 3, 4), torch.ones(3, 4), None, torch.ones(2, 3, 4)),
        ),
        (
            TypeError,
            "initial_state has dtype torch.float16, expected torch.float32",
            (torch.ones(2, 3, 4), torch.ones(3, 4), None, torch.ones(2, 3, 3).half()),
        ),
        (ValueError, "activation is 'gelu'", (torch.ones(2, 3, 4), torch.ones(3, 4), None, None, "gelu")),
        (ValueError, "layout is 'dbs'", (torch.ones(2, 3, 4), torch.ones(3, 4), None, None, "silu", "dbs")),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        causal_conv1d(*arguments)


@pytest.mark.parametrize("last", [False, True])
def test_registration(last):
    x, weight, bias = (torch.randn(s, requires_grad=True) for s in ((2, 4, 4), (4, 4), (4,)))
    state = torch.randn((2, 3, 4) if last else (2, 4, 3), requires_grad=True)
    operators = torch.ops.kernelmark
    torch.library.opcheck(operators.causal_conv1d.default, (x, weight, bias, state, True, last))
    torch.library.opcheck(operators.causal_conv1d.default, (x, weight, None, None, False, last))
    detached = [t.detach() for t in (x, x, weight, bias, state)]
    torch.library.opcheck(operators.causal_conv1d_backward.default, (*detached, True, last))
