"""Our attention through Triton's interpreter, against the operator's reference in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton.language as tl
from kernelmark.kernels.attention import _dispatch, _portable_backward, _portable_forward
from kernelmark.kernels.attention._tiling import Tiles
from kernelmark.kernels.attention.attention import attention, attention_gradients, attention_into
from kernelmark.suite.operators.attention import reference
from kernelmark.suite.operators.attention_window import reference as window_reference
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Relative norm of the deviation that rounding explains; the interpreter truncates to bf16."""


def draw(B, H, Hkv, S, D, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(S * 1000 + D)
    return [
        (torch.randn(B, heads, S, D, generator=generator) * scale).to(dtype).requires_grad_()
        for heads in (H, Hkv, Hkv)
    ]


def plain(q, k, v, mask, window=None):
    """By its formula, the last query and the last key in one place; zeros where nothing is seen."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    apart = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    hidden = apart < 0 if mask == "causal" else torch.zeros_like(apart, dtype=torch.bool)
    hidden |= apart.abs() >= (window or 1 << 30)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -math.inf)
    blind = hidden.all(1, keepdim=True)
    return (scores.masked_fill(blind, 0).softmax(-1) * ~blind) @ v


def check(q, k, v, mask, tolerance=None, window=None, formula=None):
    """Output and gradients of ours beside the reference's."""
    tolerance = tolerance or TOLERANCE[q.dtype]
    output = attention(q, k, v, mask, window)
    assert output.shape == q.shape
    assert output.dtype == q.dtype
    assert output.stride(-1) == 1
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(7)).to(q.dtype)
    gradients = torch.autograd.grad(output, (q, k, v), grad)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    if formula:
        expected = formula(*wide, mask, window)
    else:
        expected = reference(*wide, mask) if window is None else window_reference(*wide, mask, window)
    wanted = (expected, *torch.autograd.grad(expected, wide, grad.double()))
    for name, got, want in zip(("output", "dq", "dk", "dv"), (output, *gradients), wanted, strict=True):
        assert got.shape == want.shape, name
        size = want.detach().norm().item()
        error = (got.detach().double() - want.detach()).norm().item()
        assert error <= tolerance * size + 1e-5, (name, error, size)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(
    ("B", "H", "Hkv", "S", "D"),
    [
        (1, 1, 1, 128, 16),
        (2, 1, 1, 65, 64),
        (1, 4, 2, 70, 32),
        (1, 3, 1, 33, 48),
        (1, 1, 1, 40, 128),
        (1, 1, 1, 17, 160),
        (1, 1, 1, 31, 8),
        (1, 1, 1, 1, 16),
        (1, 2, 1, 2, 16),
    ],
)
def test_fp32(B, H, Hkv, S, D, mask):
    check(*draw(B, H, Hkv, S, D), mask)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(
    ("S", "Sk", "D", "window"),
    [(1, 100, 32, None), (70, 200, 16, None), (150, 40, 16, None), (64, 130, 16, 20), (150, 70, 16, 30)],
)
def test_as_many_keys_as_there_are(S, Sk, D, window, mask):
    """More than queries, as for a chunk of a prompt; fewer, so that causal rows see nothing."""
    generator = torch.Generator().manual_seed(S)
    shapes = (1, S, 4, D), (1, Sk, 2, D), (1, Sk, 2, D)
    q, k, v = (torch.randn(x, generator=generator).transpose(1, 2).requires_grad_() for x in shapes)
    check(q, k, v, mask, window=window, formula=plain)
    assert attention(q, k, v, mask, window).stride() == q.stride()


VARIED = (
    ({"S": 70}, {"sinks": True}),
    ({"S": 40, "Sk": 90, "D": 24}, {"sinks": True, "cap": 30}),
    ({"S": 70, "Sk": 40}, {"cap": 50, "mask": "full"}),
    ({"S": 33, "D": 72}, {"storage": "packed"}),
    ({"S": 17, "Sk": 40}, {"storage": "packed"}),
)


@pytest.mark.parametrize(("axes", "options"), VARIED, ids=str)
def test_sinks_caps_lengths_and_storage(agrees, axes, options):
    agrees("attention", {"B": 1, "H": 2, "Hkv": 1, "D": 16} | axes, **options)


def test_strided_sinks(agrees):
    axes = {"B": 1, "H": 4, "Hkv": 2, "S": 20, "D": 16}
    agrees("attention", axes, change=lambda given: {"sinks": torch.randn(8)[::2]}, sinks=True)


def test_sinks_and_caps_within_a_window(agrees):
    axes = {"B": 1, "H": 2, "Hkv": 1, "S": 40, "D": 16, "W": 10}
    agrees("attention_window", axes, sinks=True, cap=50, storage="bshd")


def test_sinks_take_weight_and_have_no_value():
    """By hand: of two equal scores and a sink of the same a row gives two thirds of the mean value."""
    q, k = torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 2, 16)
    v = torch.ones(1, 1, 2, 16)
    output, lse = attention(q, k, v, "full", sinks=torch.zeros(1), return_lse=True)
    torch.testing.assert_close(output, torch.full_like(q, 2 / 3))
    torch.testing.assert_close(lse, torch.full((1, 1, 2), math.log(3)))
    nothing = torch.full((1,), -math.inf)
    torch.testing.assert_close(attention(q, k, v, "full", sinks=nothing), v)
    blind = attention(q, k[:, :, :1], v[:, :, :1], sinks=torch.zeros(1))
    torch.testing.assert_close(blind[0, 0, :, 0], torch.tensor([0.0, 0.5]))


def test_values_of_another_dimension(agrees):
    agrees("attention_mla", {"B": 1, "H": 1, "S": 40, "D": 48, "Dv": 32}, storage="bshd")
    q, k, v = torch.zeros(1, 5, 2, 24).transpose(1, 2), torch.zeros(1, 2, 5, 24), torch.zeros(1, 2, 5, 8)
    assert attention(q, k, v).stride() == (5 * 2 * 8, 8, 2 * 8, 1)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks has shape \(3,\), expected \(2,\)"),
        ({"sinks": torch.zeros(2, dtype=torch.int32)}, TypeError, "sinks has dtype torch.int32"),
        ({"cap": -1.0}, ValueError, "cap is -1.0"),
        ({"cap": math.nan}, ValueError, "cap is nan"),
        ({"v": torch.zeros(1, 2, 4, 300)}, ValueError, "v has head dimension 300"),
    ],
)
def test_wrong_sinks_caps_and_values(given, error, said):
    x = torch.zeros(1, 2, 4, 16)
    with pytest.raises(error, match=said):
        attention(**({"q": x, "k": x, "v": x} | given))


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_without_keys(mask):
    q, k = torch.ones(1, 2, 3, 16, requires_grad=True), torch.ones(1, 1, 0, 16, requires_grad=True)
    output, lse = attention(q, k, k, mask, return_lse=True)
    assert output.eq(0).all()
    assert lse.eq(-math.inf).all()
    dq, dk = torch.autograd.grad(output, (q, k), torch.ones_like(output))
    assert dq.eq(0).all()
    assert dk.shape == k.shape


@pytest.fixture
def _bf16_matmul(monkeypatch):
    """Triton 3.7's interpreter keeps bf16 as its bits, and multiplies those."""
    multiply = InterpreterBuilder.create_dot

    def widened(x):
        if x.dtype.scalar.is_bf16():
            return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return x

    monkeypatch.setattr(
        InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: multiply(self, widened(a), widened(b), *rest),
    )


@pytest.mark.usefixtures("_bf16_matmul")
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype, mask):
    check(*draw(1, 2, 1, 100, 64, dtype), mask)


def test_one_element():
    check(*draw(1, 1, 1, 1, 1), "causal")


def test_other_layouts():
    """(B, S, H, D) storage, an expanded head and a last dimension that is not contiguous."""
    q, k, v = (x.detach() for x in draw(2, 2, 2, 40, 16))
    q = q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    k = k[:, :1].expand(2, 2, 40, 16).requires_grad_()
    v = v.mT.contiguous().mT.requires_grad_()
    check(q, k, v, "causal")


def test_expanded_gradient():
    q, k, v = draw(1, 1, 1, 20, 16)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    want = torch.autograd.grad(reference(*wide, "causal").sum(), wide)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_magnitudes(mask, sign):
    """Scores of about ±1000, far beyond what 2^x holds, and a tail whose zeros would stand out among them.

    Numpy warns of overflow in the rows of padding of dK and dV, which are never stored.
    """
    q, k, v = (x.detach().abs() + 1 for x in draw(1, 1, 1, 45, 16, scale=10.0))
    check(q.requires_grad_(), (sign * k).requires_grad_(), v.requires_grad_(), mask, tolerance=2e-3)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scale", [1e-40, 1e-6, 1e3])
def test_extreme_magnitudes(dtype, window, mask, scale):
    """Denormal and very large inputs, in both passes; of fp16 all are denormal at 1e-6."""
    q, k, v = (x.detach().float() * scale for x in draw(1, 2, 1, 40, 16))
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    output, lse = attention(*leaves, mask, window, return_lse=True)
    assert output.isfinite().all()
    assert lse.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(output, leaves, torch.ones_like(output)))
    wide = [x.detach().double() for x in leaves]
    expected = reference(*wide, mask) if window is None else window_reference(*wide, mask, window)
    # Scores of a million have no digits below 1/16; a denormal number's last digit is the least number's.
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    allowed = (0.05 if scale > 1 else 2e-3) * expected.norm() + least * output.numel() ** 0.5
    assert (output.double() - expected).norm() <= allowed


# Numpy's, of dQ, in which these keys are multiplied by 0.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("window", [None, 9])
def test_keys_of_minus_infinity(monkeypatch, mask, window):
    """They weigh nothing; rows that see no other give zeros, an lse of -inf and no gradient to keys and values."""
    small_tiles(monkeypatch, 16, 16)
    q, k, v = (x.detach() for x in draw(1, 1, 1, 80, 16))
    q = q.abs()
    k[:, :, :40, 3] = -math.inf
    k[:, :, 50, 3] = -math.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    output, lse = attention(*leaves, mask, window, return_lse=True)
    scores = q @ k.mT / 4
    distance = torch.arange(80)[:, None] - torch.arange(80)
    hidden = (distance.abs() >= (window or 80)) | ((distance < 0) if mask == "causal" else torch.tensor(False))
    scores = scores.masked_fill(hidden, -math.inf)
    empty = (scores == -math.inf).all(-1)
    # Under a full mask without a window every row sees a key that counts.
    assert (
        empty.sum() == {("causal", None): 40, ("causal", 9): 40, ("full", None): 0, ("full", 9): 32}[mask, window]
    )
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output, scores.softmax(-1).nan_to_num(0) @ v, atol=1e-5, rtol=1e-5)
    assert not output[empty].any()
    _, dk, dv = torch.autograd.grad((output, lse), leaves, (torch.ones_like(output), torch.ones_like(lse)))
    for x in (dk, dv):
        assert x.isfinite().all()
        assert not x[:, :, 50].any()
        assert x[:, :, 60].any()


# As above.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("S", [70, 64])
def test_keys_of_minus_infinity_beside_a_tail(monkeypatch, S, mask):
    """Rows that fill the last tile up are zeros, and 0 · -inf is NaN, which no gradient may get."""
    small_tiles(monkeypatch, 32, 32)
    q, k, v = (x.detach() for x in draw(1, 2, 1, S, 16))
    q = q.abs()
    k[:, :, 50, 3] = -math.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    _, dk, dv = torch.autograd.grad(attention(*leaves, mask).sum(), leaves)
    for x in (dk, dv):
        assert x.isfinite().all()
        assert not x[:, :, 50].any()
        assert x[:, :, 49].any()


@pytest.mark.parametrize("shape", [(0, 2, 2, 8, 16), (1, 0, 0, 8, 16), (1, 2, 2, 0, 16), (1, 0, 2, 8, 16)])
def test_empty(shape):
    q, k, v = draw(*shape)
    output = attention(q, k, v)
    assert output.shape == q.shape
    for x, gradient in zip((q, k, v), torch.autograd.grad(output.sum(), (q, k, v)), strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any()


def test_hidden_keys_have_no_effect():
    """Changing the future changes nothing, bit for bit, and the future gets no gradient from the past."""
    q, k, v = (x.detach() for x in draw(1, 1, 1, 70, 16))
    before = attention(q, k, v)
    k[:, :, 40:], v[:, :, 40:] = 5.0, -5.0
    assert torch.equal(attention(q, k, v)[:, :, :40], before[:, :, :40])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    _, dk, dv = torch.autograd.grad(attention(*leaves)[:, :, :40].sum(), leaves)
    assert not dk[:, :, 40:].any()
    assert not dv[:, :, 40:].any()


def test_blocks_of_other_sizes(monkeypatch):
    """Resident blocks larger and smaller than streamed ones, and heads in groups that do not divide them."""
    for each in (_portable_forward, _portable_backward):
        monkeypatch.setattr(each, "heads_in_l2", lambda k, groups: 2 * groups)
    for resident, streamed in ((16, 64), (64, 16)):
        small_tiles(monkeypatch, resident, streamed)
        for mask in ("causal", "full"):
            check(*draw(1, 3, 3, 70, 16), mask)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_descriptors(monkeypatch, mask):
    """The path through tensor descriptors, which a GPU takes from compute capability 9.0 on."""
    monkeypatch.setattr(_dispatch, "describable", lambda *tensors: True)
    small_tiles(monkeypatch, 32, 16)
    q, k, v = draw(1, 2, 1, 50, 24)
    check(q, k, v, mask)


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (ValueError, "mask is 'sliding'", {"mask": "sliding"}),
        (TypeError, "q must be a tensor", {"q": None}),
        (TypeError, "q has dtype torch.float64", {"q": torch.zeros(1, 2, 8, 16, dtype=torch.float64)}),
        (TypeError, "v has dtype torch.float16", {"v": torch.zeros(1, 2, 8, 16, dtype=torch.float16)}),
        (ValueError, r"q has shape \(2, 8, 16\)", {"q": torch.zeros(2, 8, 16)}),
        (ValueError, r"k has shape \(1, 2, 8, 8\)", {"k": torch.zeros(1, 2, 8, 8)}),
        (ValueError, r"v has shape \(1, 2, 8, 16\), expected \(1, 2, 9, 16\)", {"k": torch.zeros(1, 2, 9, 16)}),
        (ValueError, r"v has shape \(1, 1, 8, 16\)", {"v": torch.zeros(1, 1, 8, 16)}),
        (ValueError, "k has 3 heads, which do not divide the 2 of q", {"k": torch.zeros(1, 3, 8, 16)}),
        (ValueError, "head dimension 257", {"q": torch.zeros(1, 2, 8, 257)}),
        (ValueError, "k is on meta", {"k": torch.zeros(1, 2, 8, 16, device="meta")}),
        (ValueError, "window is 0, expected at least 1", {"window": 0}),
        (TypeError, "window must be an integer or None, not float", {"window": 2.0}),
        (TypeError, "window must be an integer or None, not bool", {"window": True}),
    ],
)
def test_errors(error, match, change):
    inputs = {name: torch.zeros(1, 2, 8, 16) for name in "qkv"} | change
    with pytest.raises(error, match=match):
        attention(**inputs)


@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (True, 5)])
def test_operator_contract(causal, window):
    """Schema, fake tensors, autograd registration and tracing, as torch checks them."""
    given = (*draw(1, 2, 1, 20, 16), causal, window, None, 0.0)
    torch.library.opcheck(torch.ops.kernelmark.attention.default, given)


def test_operator_contract_of_sinks_and_a_cap():
    given = (*draw(1, 2, 1, 20, 16), True, 0, torch.zeros(2, requires_grad=True), 30.0)
    torch.library.opcheck(torch.ops.kernelmark.attention.default, given)


def small_tiles(monkeypatch, resident, streamed):
    for each in (_portable_forward, _portable_backward):
        monkeypatch.setattr(each, "tiles", lambda *_: Tiles(resident, streamed, 4, 1))


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("window", [1, 2, 16, 17, 33, 48, 69])
@pytest.mark.parametrize(("resident", "streamed"), [(16, 16), (32, 16), (16, 32)])
def test_window(monkeypatch, mask, window, resident, streamed):
    """Windows that end inside blocks and at their edges, shorter than a block and longer than the sequence."""
    small_tiles(monkeypatch, resident, streamed)
    check(*draw(1, 1, 1, 70, 16), mask, window=window)


@pytest.mark.usefixtures("_bf16_matmul")
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_window_in_low_precision(mask):
    check(*draw(1, 2, 1, 150, 24, torch.bfloat16), mask, window=40)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_window_by_descriptors(monkeypatch, mask):
    monkeypatch.setattr(_dispatch, "describable", lambda *tensors: True)
    small_tiles(monkeypatch, 32, 16)
    check(*draw(2, 2, 1, 70, 24), mask, window=21)


def test_a_window_of_the_whole_sequence_is_none():
    """Bit for bit: it is the same kernel."""
    q, k, v = (x.detach() for x in draw(1, 1, 1, 70, 16))
    assert torch.equal(attention(q, k, v, window=70), attention(q, k, v))
    assert not torch.equal(attention(q, k, v, window=69), attention(q, k, v))


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_blocks_outside_the_window_are_never_visited(monkeypatch, mask):
    """A NaN in a value or a gradient reaches every row of a block that is visited, if only with a weight of 0."""
    small_tiles(monkeypatch, 16, 16)
    q, k, v = draw(1, 1, 1, 160, 16)
    window = 20
    poisoned = v.detach().clone()
    poisoned[:, :, 80] = math.nan
    output = attention(q, k, poisoned.requires_grad_(), mask, window)
    spoiled = output.isnan().any(-1)[0, 0].nonzero()[:, 0].tolist()
    # Key 80 lies in the block from 80 to 95, which queries up to 114 see some of: in blocks, up to 127.
    low, high = (48 if mask == "full" else 80), 127
    assert set(range(80, 100)) <= set(spoiled) <= set(range(low, high + 1))
    grad = torch.ones_like(output)
    grad[:, :, 80] = math.nan
    _, dk, dv = torch.autograd.grad(attention(q, k, v, mask, window), (q, k, v), grad)
    low, high = 48, (127 if mask == "full" else 95)
    for x in (dk, dv):
        spoiled = x.isnan().any(-1)[0, 0].nonzero()[:, 0].tolist()
        assert set(range(61, 81)) <= set(spoiled) <= set(range(low, high + 1))


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("window", [None, 9])
def test_log_sum_exp(mask, window):
    """Against torch.logsumexp, with gradients through it and through the output at once."""
    q, k, v = draw(2, 4, 2, 40, 16)
    output, lse = attention(q, k, v, mask, window, return_lse=True)
    assert torch.equal(output, attention(q, k, v, mask, window))
    assert lse.shape == (2, 4, 40)
    assert lse.dtype == torch.float32
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = wide[0] @ wide[1].repeat_interleave(2, 1).mT / 4
    distance = torch.arange(40)[:, None] - torch.arange(40)
    hidden = (distance.abs() >= (window or 40)) | ((distance < 0) if mask == "causal" else torch.tensor(False))
    scores = scores.masked_fill(hidden, -math.inf)
    expected = torch.logsumexp(scores, -1)
    torch.testing.assert_close(lse.double(), expected, atol=1e-5, rtol=1e-6)
    generator = torch.Generator().manual_seed(3)
    grad, grad_lse = (torch.randn(x.shape, generator=generator) for x in (output, lse))
    mixed = scores.softmax(-1) @ wide[2].repeat_interleave(2, 1)
    for results, references, grads in (
        ((output, lse), (mixed, expected), (grad, grad_lse)),
        ((lse,), (expected,), (grad_lse,)),
    ):
        got = torch.autograd.grad(results, (q, k, v), grads, retain_graph=True)
        want = torch.autograd.grad(
            references, wide, [x.double() for x in grads], retain_graph=True, materialize_grads=True
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=1e-5)


def test_log_sum_exp_of_nothing():
    output, lse = attention(*draw(1, 2, 2, 0, 16), return_lse=True)
    assert output.shape == (1, 2, 0, 16)
    assert lse.shape == (1, 2, 0)


def test_outputs_merge_by_their_log_sum_exp():
    """Over two halves of the keys, as ring attention and split caches do it."""
    q, k, v = (x.detach() for x in draw(1, 2, 2, 64, 16))
    parts = [attention(q, torch.cat([x, x], 2), torch.cat([y, y], 2), "full", return_lse=True)
             for x, y in zip(k.split(32, 2), v.split(32, 2), strict=True)]  # fmt: skip
    levels = torch.stack([lse for _, lse in parts])
    shares = levels.softmax(0)
    merged = sum(share[..., None] * out for share, (out, _) in zip(shares, parts, strict=True))
    torch.testing.assert_close(merged, attention(q, k, v, "full"), atol=1e-6, rtol=1e-5)


def test_gradients_over_sets_of_keys_add_up():
    """Those after every query's place, in the late set, under the mask."""
    q, k, v = draw(1, 2, 1, 48, 16)
    out, lse = attention(q, k, v, "causal", return_lse=True)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(7))
    wanted = torch.autograd.grad(out, (q, k, v), grad)
    late = slice(16, 48)
    given = [x.detach()[:, :, late] for x in (grad, q, out, lse)]
    parts = []
    for keys, mask in ((slice(0, 16), "full"), (late, "causal")):
        own = given[0], given[1], k.detach()[:, :, keys], v.detach()[:, :, keys], *given[2:]
        parts.append(attention_gradients(*own, mask))
    torch.testing.assert_close(parts[0][0] + parts[1][0], wanted[0][:, :, late])
    for i in (1, 2):  # the late keys are seen by late queries alone
        torch.testing.assert_close(parts[1][i], wanted[i][:, :, late])


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_the_output_can_be_a_part_of_a_tensor(mask):
    """Chunks of a sequence are written where they lie in it; what is beside stays."""
    q, k, v = (x.detach() for x in draw(1, 4, 2, 40, 16))
    wanted, wanted_level = attention(q[:, :, 8:24], k, v, mask, return_lse=True)
    whole = torch.full((1, 4, 40, 16), 7.0)
    level = attention_into(whole[:, :, 8:24], q[:, :, 8:24], k, v, mask)
    torch.testing.assert_close(whole[:, :, 8:24], wanted)
    torch.testing.assert_close(level, wanted_level)
    assert bool((whole[:, :, :8] == 7).all() and (whole[:, :, 24:] == 7).all())
    with pytest.raises(ValueError, match="out has shape"):
        attention_into(whole, q[:, :, 8:24], k, v, mask)


def test_sinks_alone():
    """Without a key a row's log-sum-exp is its sink."""
    q, k, v = torch.randn(1, 2, 3, 8), *(torch.randn(1, 1, 0, 8) for _ in range(2))
    sinks = torch.randn(2, requires_grad=True)
    _, lse = attention(q, k, v, "full", sinks=sinks, return_lse=True)
    torch.testing.assert_close(lse, sinks[None, :, None].expand_as(lse).detach())
    (lse * torch.tensor([1.0, 2.0])[None, :, None]).sum().backward()
    torch.testing.assert_close(sinks.grad, torch.tensor([3.0, 6.0]))


@pytest.mark.parametrize("cap", [1e4, 1e7])
def test_a_large_cap_is_nearly_none(cap):
    leaves = draw(1, 2, 2, 64, 32)
    capped, plain = (attention(*leaves, cap=x) for x in (cap, 0.0))
    torch.testing.assert_close(capped, plain, rtol=1e-5, atol=1e-6)
    grads = [torch.autograd.grad(x.sum(), leaves) for x in (capped, plain)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_caps_too_large_for_fp16_are_the_portable_kernels():
    assert _dispatch._portable("forward", None, 1001.0)
    assert not _dispatch._portable("forward", None, 1000.0)
