"""Our rotary position embedding."""

import pytest
import torch
from kernelmark.kernels.position.rope import rope

SMALL = {"B": 2, "H": 3, "Hkv": 1, "S": 5, "D": 12}


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("axes", [SMALL, {"B": 1, "H": 5, "Hkv": 2, "S": 33, "D": 128}])
def test_agrees(agrees, axes, dtype, layout):
    agrees("rope", axes, dtype, layout=layout)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_agrees_with_strides(agrees, layout):
    """Heads beside sequence, dimensions not side by side, a table longer than the sequence."""
    agrees("rope", SMALL, change=lambda given: {"q": torch.randn(2, 5, 3, 12).transpose(1, 2)}, layout=layout)
    agrees("rope", SMALL, change=lambda given: {"k": torch.randn(2, 1, 12, 5).transpose(2, 3)}, layout=layout)
    agrees("rope", SMALL, change=lambda given: {"cos": torch.randn(6, 9).t()[:5]}, layout=layout)


def test_keeps_the_layout_in_memory():
    q = torch.randn(2, 5, 3, 8).transpose(1, 2)
    k = torch.randn(2, 1, 5, 8)
    turned, _ = rope(q, k, torch.ones(5, 4), torch.zeros(5, 4))
    assert turned.stride() == q.stride()
    torch.testing.assert_close(turned, q)


def test_one_element_and_none():
    one = torch.ones(1, 1, 1, 2)
    q, k = rope(one, one[:, :0], torch.zeros(1, 1), torch.ones(1, 1))
    assert q.flatten().tolist() == [-1.0, 1.0]
    assert k.shape == (1, 0, 1, 2)
    q, _ = rope(torch.ones(0, 1, 1, 2), torch.ones(0, 1, 1, 2), torch.zeros(1, 1), torch.ones(1, 1))
    assert q.shape == (0, 1, 1, 2)
    q, _ = rope(one[..., :0], one[..., :0], torch.zeros(1, 0), torch.ones(1, 0))
    assert q.shape == (1, 1, 1, 0)


def test_gradient_of_one_output():
    q, k = torch.randn(1, 1, 3, 4, requires_grad=True), torch.randn(1, 1, 3, 4, requires_grad=True)
    angle = torch.rand(3, 2)
    _, turned = rope(q, k, angle.cos(), angle.sin())
    dk = torch.autograd.grad(turned.square().sum(), k)[0]
    # A rotation keeps the norm, whose gradient is that of k itself.
    torch.testing.assert_close(dk, 2 * k)


Q, K, C = torch.ones(2, 3, 5, 8), torch.ones(2, 1, 5, 8), torch.ones(5, 4)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "q must be a tensor, not NoneType", (None, K, C, C)),
        (ValueError, r"q has shape \(3, 5, 8\), expected 4 dimensions", (Q[0], K, C, C)),
        (ValueError, "q has shape .* even last dimension", (Q[..., :7], K, C, C)),
        (TypeError, "k has dtype torch.float16", (Q, K.half(), C, C)),
        (ValueError, r"k has shape \(2, 1, 4, 8\), expected \(2, 1, 5, 8\)", (Q, K[:, :, :4], C, C)),
        (ValueError, r"cos has shape \(5, 3\), expected \(5, 4\)", (Q, K, C[:, :3], C)),
        (TypeError, "sin has dtype torch.float16", (Q, K, C, C.half())),
        (ValueError, "layout is 'neox', expected 'half' or 'interleaved'", (Q, K, C, C, "neox")),
    ],
)
def test_wrong_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        rope(*arguments)


def test_registration():
    q, k = torch.randn(2, 3, 5, 8, requires_grad=True), torch.randn(2, 1, 5, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.kernelmark.rope.default, (q, k, C, C, "half", False))
