"""Our attention through Triton's interpreter, against the operator's reference in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from kernelmark.kernels import attention as module
from kernelmark.kernels.attention import attention
from kernelmark.suite.operators.attention import reference
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Relative norm of the deviation that rounding explains; the interpreter truncates to bf16."""


def draw(B, H, Hkv, S, D, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(S * 1000 + D)
    return [
        (torch.randn(B, heads, S, D, generator=generator) * scale).to(dtype).requires_grad_()
        for heads in (H, Hkv, Hkv)
    ]


def check(q, k, v, mask, tolerance=None):
    """Output and gradients of ours beside the reference's."""
    tolerance = tolerance or TOLERANCE[q.dtype]
    output = attention(q, k, v, mask)
    assert output.shape == q.shape
    assert output.dtype == q.dtype
    assert output.is_contiguous()
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(7)).to(q.dtype)
    gradients = torch.autograd.grad(output, (q, k, v), grad)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = reference(*wide, mask)
    wanted = (expected, *torch.autograd.grad(expected, wide, grad.double()))
    for name, got, want in zip(("output", "dq", "dk", "dv"), (output, *gradients), wanted, strict=True):
        assert got.shape == want.shape, name
        size = want.detach().norm().item()
        error = (got.detach().double() - want.detach()).norm().item()
        assert error <= tolerance * size + 1e-6, (name, error, size)


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
    monkeypatch.setattr(module, "_shared", lambda k, groups: 2 * groups)
    for resident, streamed in ((16, 64), (64, 16)):
        monkeypatch.setattr(module, "tiles", lambda kernel, q, r=resident, s=streamed: module.Tiles(r, s, 4, 1))
        for mask in ("causal", "full"):
            check(*draw(1, 3, 3, 70, 16), mask)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_descriptors(monkeypatch, mask):
    """The path through tensor descriptors, which a GPU takes from compute capability 9.0 on."""
    monkeypatch.setattr(module, "_tma", lambda *tensors: True)
    monkeypatch.setattr(module, "tiles", lambda kernel, q: module.Tiles(32, 16, 4, 1))
    q, k, v = draw(1, 2, 1, 50, 24)
    check(q, k, v, mask)


def test_descriptors_are_for_long_sequences_with_even_strides(monkeypatch):
    monkeypatch.setattr(module, "_capability", lambda device: (9, 0))

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype)

    assert module._tma(empty(1, 2, 1024, 8))
    assert module._tma(empty(1, 1024, 2, 16).transpose(1, 2))
    assert not module._tma(empty(1, 2, 1024, 8, dtype=torch.float32))
    assert not module._tma(empty(1, 2, 1023, 8))
    assert not module._tma(empty(1, 2, 1024, 9))
    assert not module._tma(empty(1, 2, 1024, 17)[..., 1:])
    assert not module._tma(empty(1, 1, 1024, 16).expand(1, 4, 1024, 16))
    monkeypatch.setattr(module, "_capability", lambda device: (8, 0))
    assert not module._tma(empty(1, 2, 1024, 8))


def test_hopper_is_chosen_by_capability_and_shape(monkeypatch):
    for capability in ((0, 0), (8, 0), (10, 0)):
        module._hopper.cache_clear()
        monkeypatch.setattr(module, "_capability", lambda device, c=capability: c)
        assert module._hopper(torch.device("cpu")) is None
    module._hopper.cache_clear()
    monkeypatch.setattr(module, "_capability", lambda device: (9, 0))
    hopper, _ = module._hopper(torch.device("cpu"))
    module._hopper.cache_clear()

    def fits(H=2, S=1024, D=64, dtype=torch.bfloat16):
        x = torch.empty(1, H, S, D, dtype=dtype)
        return hopper.fits(x, x, x)

    assert fits()
    assert fits(S=1280, D=128, dtype=torch.float16)
    assert not fits(S=768)
    assert not fits(S=1152)
    assert not fits(D=96)
    assert not fits(dtype=torch.float32)
    x = torch.empty(1, 1024, 2, 64, dtype=torch.bfloat16)
    assert not hopper.fits(x.transpose(1, 2), x.transpose(1, 2), x.transpose(1, 2))


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (ValueError, "mask is 'sliding'", {"mask": "sliding"}),
        (TypeError, "q must be a tensor", {"q": None}),
        (TypeError, "q has dtype torch.float64", {"q": torch.zeros(1, 2, 8, 16, dtype=torch.float64)}),
        (TypeError, "v has dtype torch.float16", {"v": torch.zeros(1, 2, 8, 16, dtype=torch.float16)}),
        (ValueError, r"q has shape \(2, 8, 16\)", {"q": torch.zeros(2, 8, 16)}),
        (ValueError, r"k has shape \(1, 2, 9, 16\)", {"k": torch.zeros(1, 2, 9, 16)}),
        (ValueError, r"v has shape \(1, 1, 8, 16\)", {"v": torch.zeros(1, 1, 8, 16)}),
        (ValueError, "k has 3 heads, which do not divide the 2 of q", {"k": torch.zeros(1, 3, 8, 16)}),
        (ValueError, "head dimension 257", {"q": torch.zeros(1, 2, 8, 257)}),
        (ValueError, "k is on meta", {"k": torch.zeros(1, 2, 8, 16, device="meta")}),
    ],
)
def test_errors(error, match, change):
    inputs = {name: torch.zeros(1, 2, 8, 16) for name in "qkv"} | change
    with pytest.raises(error, match=match):
        attention(**inputs)


@pytest.mark.parametrize("causal", [True, False])
def test_operator_contract(causal):
    """Schema, fake tensors, autograd registration and tracing, as torch checks them."""
    torch.library.opcheck(torch.ops.kernelmark.attention.default, (*draw(1, 2, 1, 20, 16), causal))


def test_no_gradient_is_asked_of_the_log_sum_exp():
    q, k, v = draw(1, 1, 1, 8, 16)
    _, lse = module._attention(q, k, v, True)
    assert not lse.requires_grad
