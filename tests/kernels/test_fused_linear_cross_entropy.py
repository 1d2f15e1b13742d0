"""Our linear layer with cross-entropy."""

import pytest
import torch
from kernelmark.kernels._launch import forget
from kernelmark.kernels.loss import fused_linear_cross_entropy as module
from kernelmark.kernels.loss.fused_linear_cross_entropy import fused_linear_cross_entropy, rows_of_chunk

AXES = [
    {"M": 5, "D": 8, "V": 37},
    {"M": 11, "D": 16, "V": 128},
    {"M": 1, "D": 3, "V": 70},
    {"M": 9, "D": 4, "V": 2},
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("axes", AXES)
def test_agrees(agrees, axes, dtype):
    agrees("fused_linear_cross_entropy", axes, dtype)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
def test_chunks(chunk):
    """Any number of rows at a time, with a shorter last chunk."""
    x, weight, target = given(M=5)
    loss = fused_linear_cross_entropy(x, weight, target, chunk=chunk)
    plain = torch.nn.functional.cross_entropy(x @ weight.t(), target)
    torch.testing.assert_close(loss, plain)
    got, expected = (torch.autograd.grad(y, (x, weight)) for y in (loss, plain))
    torch.testing.assert_close(got, expected)


def test_agrees_with_strides(agrees):
    axes = {"M": 5, "D": 8, "V": 37}
    agrees("fused_linear_cross_entropy", axes, change=lambda given: {"x": torch.randn(8, 5).t()})
    agrees("fused_linear_cross_entropy", axes, change=lambda given: {"weight": torch.randn(8, 37).t()})
    agrees("fused_linear_cross_entropy", axes, change=lambda given: {"weight": torch.randn(37, 12)[:, 2:10]})
    agrees("fused_linear_cross_entropy", axes, change=lambda given: {"target": torch.arange(10)[::2]})


def given(M=6, D=8, V=21):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(M, D, generator=generator, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, requires_grad=True)
    return x, weight, torch.randint(0, V, (M,), generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_options(smoothing, z_loss):
    x, weight, target = given()
    target[::3] = -1
    loss = fused_linear_cross_entropy(x, weight, target, -1, smoothing, z_loss, chunk=4)
    logits = x @ weight.t()
    plain = torch.nn.functional.cross_entropy(logits, target, ignore_index=-1, label_smoothing=smoothing)
    plain = plain + z_loss * logits.logsumexp(-1)[target != -1].square().mean()
    torch.testing.assert_close(loss, plain)
    got, expected = (torch.autograd.grad(y.mul(3), (x, weight)) for y in (loss, plain))
    torch.testing.assert_close(got, expected)


def test_precise():
    """The weight's gradient is nearer without a rounding after each chunk; x's has none anyway."""
    x, weight, target = (v.bfloat16() if v.is_floating_point() else v for v in given(M=32))
    inputs = [v.detach().requires_grad_() for v in (x, weight)]
    errors = []
    for precise in (False, True):
        loss = fused_linear_cross_entropy(*inputs, target, chunk=1, precise=precise)
        got = torch.autograd.grad(loss, inputs, torch.tensor(1.7, dtype=torch.bfloat16))
        wide = [v.detach().double().requires_grad_() for v in inputs]
        plain = torch.nn.functional.cross_entropy(wide[0] @ wide[1].t(), target)
        expected = torch.autograd.grad(plain, wide, torch.tensor(1.7).bfloat16().double())
        errors.append([((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, expected, strict=True)])
        assert [g.dtype for g in got] == [torch.bfloat16] * 2
    assert errors[1][0] == errors[0][0]
    assert errors[1][1] < errors[0][1]


@pytest.mark.parametrize("leaf", [0, 1])
def test_only_one_gradient(leaf):
    x, weight, target = given()
    (weight, x)[leaf].requires_grad_(False)
    loss = fused_linear_cross_entropy(x, weight, target)
    plain = torch.nn.functional.cross_entropy(x @ weight.t(), target)
    got, expected = (torch.autograd.grad(y, (x, weight)[leaf]) for y in (loss, plain))
    torch.testing.assert_close(got, expected)


def test_backward_twice():
    """A kept graph gives the same gradients again, with another factor too; the last time in place."""
    x, weight, target = given()
    loss = fused_linear_cross_entropy(x, weight, target)
    first = torch.autograd.grad(loss, (x, weight), torch.tensor(2.0), retain_graph=True)
    copies = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (x, weight), torch.tensor(0.5), retain_graph=True)
    third = torch.autograd.grad(loss, (x, weight), torch.tensor(4.0))
    torch.testing.assert_close(first, tuple(copies), rtol=0, atol=0)
    torch.testing.assert_close([g / 2 for g in first], [g * 2 for g in second])
    torch.testing.assert_close([g * 2 for g in first], list(third))


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # numpy; NaN is the answer
def test_nothing_counts():
    x, weight, target = given()
    assert fused_linear_cross_entropy(x, weight, torch.full_like(target, -100)).isnan()
    loss = fused_linear_cross_entropy(x[:0], weight, target[:0])
    assert loss.isnan()
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    assert dx.count_nonzero() == dweight.count_nonzero() == 0


@pytest.mark.parametrize("chunk", [2, None])
def test_a_loss_alone_counts_its_rows_at_the_end(monkeypatch, chunk):
    """Gradients alone are of the share of a row before that: no launch for it."""
    x, weight, target = given(M=7, D=6)
    target[2] = -100
    counted = []
    of = module.kernels.share_of_rows
    monkeypatch.setattr(
        module.kernels, "share_of_rows", lambda *given: lambda *tensors: counted.append(1) or of(*given)(*tensors)
    )
    plain = torch.nn.functional.cross_entropy(x @ weight.t(), target)
    forget()
    try:
        with torch.no_grad():
            alone = fused_linear_cross_entropy(x, weight, target, chunk=chunk)
        assert not counted
        loss = fused_linear_cross_entropy(x, weight, target, chunk=chunk)
    finally:
        forget()
    assert len(counted) == 1
    torch.testing.assert_close(alone, plain)
    assert torch.equal(alone, loss)


def test_rows_of_chunk(monkeypatch):
    monkeypatch.setattr(module, "BUFFER", 1 << 30)
    monkeypatch.setattr(module, "STEP", 256)
    assert rows_of_chunk(16384, 128256, 2) == 4096
    assert rows_of_chunk(4096, 128256, 2) == 4096
    assert rows_of_chunk(5000, 128256, 2) == 2560
    assert rows_of_chunk(100, 128256, 2) == 100
    assert rows_of_chunk(8192, 1 << 30, 4) == 256


X, W, T = torch.randn(4, 3), torch.randn(9, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "x must be a tensor, not list", ([], W, T)),
        (ValueError, r"x has shape \(3,\), expected 2 dimensions", (X[0], W, T)),
        (TypeError, "weight has dtype torch.bfloat16, expected torch.float32", (X, W.bfloat16(), T)),
        (ValueError, r"weight has shape \(9, 2\), expected \(V, 3\)", (X, W[:, :2], T)),
        (TypeError, "target has dtype torch.int32, expected torch.int64", (X, W, T.int())),
        (ValueError, r"target has shape \(3,\), expected \(4,\)", (X, W, T[:3])),
        (ValueError, "x is on meta", (X.to("meta"), W, T)),
        (ValueError, "label_smoothing is 2, expected 0 to 1", (X, W, T, -100, 2)),
        (ValueError, "chunk is 0, expected a number of rows", (X, W, T, -100, 0.0, 0.0, 0)),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        fused_linear_cross_entropy(*arguments)


def test_registration():
    x, weight, target = given()
    arguments = (x, weight, target, -100, 0.1, 0.0, 4, False, True, True)
    torch.library.opcheck(torch.ops.kernelmark.fused_linear_cross_entropy.default, arguments)
