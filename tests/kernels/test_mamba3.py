"""Our mamba3, on the interpreter: chunks of 16 there."""

import pytest
import torch
from kernelmark.kernels.state_space import mamba3 as launches
from kernelmark.kernels.state_space import ssd
from kernelmark.kernels.state_space.mamba3 import mamba3
from kernelmark.suite.operators.mamba3 import OPERATOR, inputs, reference

CPU = torch.device("cpu")
SMALL = {"B": 2, "S": 37, "H": 4, "P": 16, "N": 32, "G": 2, "A": 4}


def drawn(axes=SMALL, dtype="fp32"):
    return inputs(OPERATOR.case(axes, dtype, "forward"), CPU, torch.Generator().manual_seed(0))


def compare(given):
    """The result and all gradients against the reference in fp64."""
    wide = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    given = {name: x.detach().requires_grad_() for name, x in given.items()}
    y, expected = mamba3(**given), reference(**wide)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(y, list(given.values()), weight)
    references = torch.autograd.grad(expected, list(wide.values()), weight.double())
    for a, b in zip((y, *gradients), (expected, *references), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-5 * float(b.detach().abs().max()))


# The interpreter has no bf16 products. In fp16 not the two that take it longest.
@pytest.mark.parametrize(
    ("axes", "dtype"),
    [
        (SMALL, "fp32"),
        ({"B": 1, "S": 18, "H": 17, "P": 16, "N": 16, "G": 1, "A": 8}, "fp32"),
        *(
            (axes, dtype)
            for dtype in ("fp16", "fp32")
            for axes in (
                {"B": 2, "S": 3, "H": 2, "P": 5, "N": 6, "G": 1, "A": 2},
                {"B": 1, "S": 48, "H": 3, "P": 24, "N": 20, "G": 1, "A": 5},
                {"B": 1, "S": 20, "H": 2, "P": 8, "N": 33, "G": 2, "A": 3},
            )
        ),
    ],
)
def test_agrees(agrees, axes, dtype):
    agrees("mamba3", axes, dtype)


def test_one_position():
    """Which k and q are turned alike, so that nothing says anything of its angles."""
    given = {name: x.requires_grad_() for name, x in drawn(SMALL | {"S": 1}).items()}
    y = mamba3(**given)
    torch.testing.assert_close(y, reference(**given), rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert float(given["angles"].grad.abs().max()) < 1e-6


def test_nothing_turns():
    """No angles, which then have no gradient; a state of one number."""
    given = drawn({"B": 1, "S": 20, "H": 2, "P": 8, "N": 1, "G": 2, "A": 0})
    y = mamba3(**{name: x.requires_grad_() for name, x in given.items()})
    torch.testing.assert_close(y, reference(**given))
    y.sum().backward()
    assert given["angles"].grad.shape == (1, 20, 0)
    assert float(given["dt"].grad.abs().sum()) > 0


@pytest.mark.parametrize("A", [4, 16])
def test_segments(monkeypatch, A):
    """Several programs a sequence, each of which begins with the state and the angles where it does."""
    monkeypatch.setattr(launches, "segments", lambda programs, chunks, slots: -(-chunks // 2))
    compare(drawn(SMALL | {"B": 1, "S": 90, "H": 2, "G": 1, "A": A}))


def test_long_sequences(monkeypatch):
    """The gradient of an angle is a sum over all that follows, the error of which does not grow with it."""
    for module in (launches, ssd):
        monkeypatch.setattr(module, "CHUNK", 64)  # as on a GPU: few programs

    def error(S):
        axes = {"B": 1, "S": S, "H": 1, "P": 32, "N": 64, "G": 1, "A": 16}
        given = {name: x.requires_grad_() for name, x in drawn(axes, "fp16").items()}
        wide = {name: x.detach().double().requires_grad_() for name, x in given.items()}
        y, expected = mamba3(**given), reference(**wide)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).half()
        (gradient,) = torch.autograd.grad(y, [given["angles"]], weight)
        (right,) = torch.autograd.grad(expected, [wide["angles"]], weight.double())
        return float((gradient - right).norm() / right.norm())

    assert error(1024) < 1.5 * error(64)


def test_wide_heads():
    compare(drawn(SMALL | {"B": 1, "S": 20, "H": 2, "P": 136}))


def test_many_revolutions():
    """Angles of thousands of revolutions, whose fractions decide."""
    given = drawn(SMALL | {"S": 60})
    given["dt"] = given["dt"] + 300
    given["trap"] = torch.full_like(given["trap"], -9.0)
    given["angles"] = given["angles"].round()  # so that π tanh(angles) dt is all that fp32 rounds
    wide = {name: x.double() for name, x in given.items()}
    y, expected = mamba3(**given), reference(**wide)
    assert float((y - expected).norm() / expected.norm()) < 1e-3


def test_strong_decays_and_none():
    """exp(-800) a position, and no decay at all."""
    given = drawn()
    given["adt"] = torch.tensor([-800.0, 0.0, -800.0, 0.0]).expand(2, 37, 4).contiguous()
    compare(given)


def test_strides():
    """z, B and C as parts of one projection; what belongs to heads with time last; columns of x apart."""
    given = drawn()
    parts = torch.randn(2, 37, 4 * 16 * 2 + 2 * 32 * 2 + 4).split((64, 64, 64, 64, 4), -1)
    given |= {"z": parts[1].unflatten(-1, (4, 16))}
    given |= {name: t.unflatten(-1, (2, 32)) for name, t in zip("BC", parts[2:4], strict=True)}
    given |= {name: given[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("dt", "adt", "trap")}
    given |= {"angles": parts[4], "D": torch.randn(8)[::2], "B_bias": given["B_bias"].T.contiguous().T}
    compare(given | {"x": torch.randn(2, 37, 4, 32)[..., ::2]})


def test_without_skip_and_gate():
    given = drawn()
    bare = mamba3(**given | {"D": None, "z": None})
    y = (bare + given["D"][:, None] * given["x"]) * torch.nn.functional.silu(given["z"])
    torch.testing.assert_close(mamba3(**given), y, rtol=1e-4, atol=1e-5)


def test_nothing():
    assert mamba3(**drawn(SMALL | {"S": 0})).shape == (2, 0, 4, 16)
    assert mamba3(**drawn(SMALL | {"B": 0})).shape == (0, 37, 4, 16)


ROWS = drawn(SMALL | {"S": 5})


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "x must be a tensor, not NoneType", {"x": None}),
        (ValueError, r"x has shape \(5, 4, 16\), expected 4 dimensions", {"x": ROWS["x"][0]}),
        (TypeError, "B has dtype torch.float16", {"B": ROWS["B"].half()}),
        (ValueError, "B has 3 groups, which do not divide the 4 heads", {"B": torch.ones(2, 5, 3, 32)}),
        (ValueError, "B has state dimension 257, expected 1 to 256", {"B": torch.ones(2, 5, 2, 257)}),
        (ValueError, r"C has shape \(2, 5, 1, 32\), expected \(2, 5, 2, 32\)", {"C": ROWS["C"][:, :, :1]}),
        (ValueError, r"dt has shape \(2, 4, 5\)", {"dt": ROWS["dt"].mT}),
        (ValueError, r"adt has shape \(2, 5, 3\)", {"adt": ROWS["adt"][..., :3]}),
        (TypeError, "trap has dtype torch.float64", {"trap": ROWS["trap"].double()}),
        (ValueError, r"angles has shape \(2, 3, 4\)", {"angles": ROWS["angles"][:, :3]}),
        (ValueError, "angles has 17 angles, more than pairs", {"angles": torch.ones(2, 5, 17)}),
        (ValueError, r"B_bias has shape \(32,\)", {"B_bias": ROWS["B_bias"][0]}),
        (ValueError, "C_bias is on meta", {"C_bias": ROWS["C_bias"].to("meta")}),
        (ValueError, r"D has shape \(3,\)", {"D": ROWS["D"][:3]}),
        (TypeError, "z has dtype torch.bfloat16", {"z": ROWS["z"].bfloat16()}),
    ],
)
def test_wrong_arguments(error, message, change):
    with pytest.raises(error, match=message):
        mamba3(**ROWS | change)


def test_registration():
    given = drawn(SMALL | {"B": 1, "S": 16, "H": 2})
    torch.library.opcheck(torch.ops.kernelmark.mamba3.default, tuple(x.requires_grad_() for x in given.values()))


def test_the_gradient_of_a_wide_head_is_rounded_once():
    """Not that of each head it is computed as: bf16 has no 257, whose sum with -256 it has."""
    x, one, given = torch.ones(1, 1, 1, 128), torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 128)
    given[..., 0], given[..., 64] = 257, -256
    dt, bias, D = (
        torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((1, 1, 1), (1, 1), (1,))
    )
    nothing = torch.zeros(1, 1, 1)
    # λ = ½, of twice the step: y = x (k · q) + D x.
    y = mamba3(x, one * 0, one, dt * 2, nothing, nothing, torch.zeros(1, 1, 0), bias, torch.zeros(1, 1), D)
    assert [x.item() for x in torch.autograd.grad(y, (dt, bias, D), given)] == [1, 1, 1]
