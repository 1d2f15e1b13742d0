"""Our cross-entropy."""

import pytest
import torch
from kernelmark.kernels.loss.cross_entropy import cross_entropy

BOTH = pytest.mark.parametrize("gradient", ["backward", "forward"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("axes", [{"M": 5, "V": 37}, {"M": 3, "V": 128}, {"M": 2, "V": 1}, {"M": 1, "V": 70}])
def test_agrees(agrees, axes, dtype):
    agrees("cross_entropy", axes, dtype)


def test_agrees_with_strides(agrees):
    axes = {"M": 5, "V": 37}
    agrees("cross_entropy", axes, change=lambda given: {"logits": torch.randn(37, 5).t()})
    agrees("cross_entropy", axes, change=lambda given: {"logits": torch.randn(5, 50)[:, 3:40]})
    agrees("cross_entropy", axes, change=lambda given: {"target": torch.arange(10)[::2]})


def test_fp16():
    logits, target = torch.randn(4, 9, dtype=torch.float16), torch.tensor([0, 8, 3, 3])
    expected = torch.nn.functional.cross_entropy(logits.float(), target)
    torch.testing.assert_close(cross_entropy(logits, target).float(), expected, rtol=1e-3, atol=1e-3)


def test_ignored_rows():
    logits, target = torch.randn(4, 9, requires_grad=True), torch.tensor([0, -100, 8, -100])
    loss, plain = cross_entropy(logits, target), torch.nn.functional.cross_entropy(logits, target)
    torch.testing.assert_close(loss, plain)
    got, expected = torch.autograd.grad(3 * loss, logits)[0], torch.autograd.grad(3 * plain, logits)[0]
    torch.testing.assert_close(got, expected)


def test_another_ignore_index():
    logits, target = torch.randn(4, 9), torch.tensor([0, 1, 8, 0])
    expected = torch.nn.functional.cross_entropy(logits, target, ignore_index=0)
    torch.testing.assert_close(cross_entropy(logits, target, ignore_index=0), expected)


def test_extreme_logits():
    """Large values do not overflow, and tokens that are ruled out have no probability."""
    logits = torch.full((2, 40), -torch.inf)
    logits[0, 3], logits[0, 5], logits[1, 39] = 300.0, 300.0, -300.0
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.tensor([3, 39]))
    assert loss.item() == pytest.approx(0.5 * 0.6931472)
    gradient = torch.autograd.grad(loss, logits)[0]
    assert gradient[0, 3].item() == pytest.approx(-0.25, rel=1e-4)
    assert gradient[0, 5].item() == pytest.approx(0.25, rel=1e-4)
    assert gradient.abs().sum().item() == pytest.approx(0.5, rel=1e-4)


@BOTH
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.1, 0.0), (0.0, 0.01), (0.3, 0.02), (1.0, 0.0)])
def test_smoothing_and_z_loss(smoothing, z_loss, gradient):
    """As torch's label smoothing and a plain z-loss, with rows left out, for any gradient of the loss."""
    logits, target = torch.randn(5, 70, requires_grad=True), torch.tensor([0, -100, 8, 69, 3])
    loss = cross_entropy(logits, target, label_smoothing=smoothing, z_loss=z_loss, gradient=gradient)
    plain = torch.nn.functional.cross_entropy(logits, target, label_smoothing=smoothing)
    plain = plain + z_loss * logits.logsumexp(-1)[target != -100].square().mean()
    torch.testing.assert_close(loss, plain)
    got, expected = torch.autograd.grad(3 * loss, logits)[0], torch.autograd.grad(3 * plain, logits)[0]
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("shape", [(5, 37), (3, 128), (2, 1), (1, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_in_the_same_pass(shape, dtype):
    """The gradient that the backward pass makes, for strided logits too."""
    for logits in (
        torch.randn(shape),
        torch.randn(shape[0], 200)[:, 3 : 3 + shape[1]],
        torch.randn(shape[::-1]).t(),
    ):
        logits = logits.to(dtype).requires_grad_()
        target = torch.randint(0, shape[1], shape[:1])
        one, other = (cross_entropy(logits, target, gradient=x) for x in ("backward", "forward"))
        torch.testing.assert_close(one, other)
        expected, got = (torch.autograd.grad(x, logits)[0] for x in (one, other))
        torch.testing.assert_close(got, expected)
        assert got.is_contiguous()


def test_gradient_in_the_same_pass_asked_twice():
    """A kept graph gives the same gradient again; the last one is scaled in place."""
    logits = torch.randn(3, 50, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1, 2, 3]), gradient="forward")
    first = torch.autograd.grad(loss, logits, torch.tensor(2.0), retain_graph=True)[0]
    copy = first.clone()
    second = torch.autograd.grad(loss, logits, torch.tensor(4.0))[0]
    assert torch.equal(first, copy)
    torch.testing.assert_close(second, first * 2)


@BOTH
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # numpy; NaN is the answer
def test_nothing_counts(gradient):
    assert cross_entropy(torch.randn(2, 3), torch.tensor([-100, -100])).isnan()
    assert cross_entropy(torch.randn(0, 3), torch.tensor([], dtype=torch.int64)).isnan()
    logits = torch.randn(0, 3, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([], dtype=torch.int64), gradient=gradient)
    assert torch.autograd.grad(loss, logits)[0].shape == (0, 3)


def test_wrong_target_is_nan():
    assert cross_entropy(torch.randn(2, 3), torch.tensor([1, 3])).isnan()


X, T = torch.randn(4, 9), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "logits must be a tensor, not list", ([], T)),
        (ValueError, r"logits has shape \(9,\), expected 2 dimensions", (X[0], T)),
        (TypeError, "target has dtype torch.int32, expected torch.int64", (X, T.int())),
        (ValueError, r"target has shape \(3,\), expected \(4,\)", (X, T[:3])),
        (ValueError, "logits is on meta", (X.to("meta"), T)),
        (ValueError, "label_smoothing is -1, expected 0 to 1", (X, T, -100, -1)),
        (ValueError, "gradient is 'never', expected 'backward' or 'forward'", (X, T, -100, 0.0, 0.0, "never")),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        cross_entropy(*arguments)


def test_registration():
    logits, options = torch.randn(4, 9, requires_grad=True), (-100, 0.1, 0.01)
    torch.library.opcheck(torch.ops.kernelmark.cross_entropy.default, (logits, T, *options))
    torch.library.opcheck(torch.ops.kernelmark.cross_entropy_with_gradient.default, (logits, T, *options))
    one, plain = torch.tensor(1.0), logits.detach()
    torch.library.opcheck(
        torch.ops.kernelmark.cross_entropy_backward.default, (one, plain, T, torch.rand(4, 2), one, *options)
    )
    torch.library.opcheck(torch.ops.kernelmark.cross_entropy_scale.default, (plain, one, torch.bfloat16))


@BOTH
@pytest.mark.parametrize("V", [10, 70, 1000])
def test_rows_of_the_lowest_number(gradient, V):
    logits, target = torch.full((2, V), torch.finfo(torch.float32).min), torch.tensor([1, 2])
    loss = cross_entropy(logits, target, gradient=gradient)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, target))


@BOTH
@pytest.mark.parametrize(("M", "V"), [(2, 10), (2, 70), (5, 70)])
def test_a_common_offset_costs_no_digits(gradient, M, V):
    """Of rows in registers, in pieces, and in one program: gradients do not change where all logits are larger."""
    plain, target = (torch.randn(M, V) * 16).round() / 8, torch.arange(M)
    raised = (plain + 2**20).requires_grad_()  # exact: fp32 has eighths there
    got = torch.autograd.grad(cross_entropy(raised, target, gradient=gradient), raised)[0]
    plain.requires_grad_()
    wanted = torch.autograd.grad(torch.nn.functional.cross_entropy(plain, target), plain)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["label_smoothing", "z_loss"])
def test_a_number_is_no_tensor(name):
    with pytest.raises(TypeError, match="must be a number, not a tensor"):
        cross_entropy(torch.randn(4, 9), torch.tensor([0, 8, 3, 3]), **{name: torch.tensor(0.5)})
