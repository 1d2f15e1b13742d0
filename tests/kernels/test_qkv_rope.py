"""Projections to queries, keys and values that turn the first two; `test_matmul_hopper.py` plays Hopper's."""

import pytest
import torch
from kernelmark.kernels._launch import forget
from kernelmark.kernels.matmul import matmul, qkv_rope
from kernelmark.suite.operators.rope import reference


@pytest.mark.parametrize(("B", "S", "H", "Hkv", "D"), [(2, 9, 4, 2, 16), (3, 5, 3, 1, 10)])
def test_agrees(agrees, B, S, H, Hkv, D):
    agrees("qkv_rope", {"B": B, "S": S, "K": 33, "H": H, "Hkv": Hkv, "D": D}, "fp16")


def test_strides(agrees):
    change = {"x": torch.randn(2, 9, 90).half()[:, :, 7:47], "cos": torch.rand(16, 9).half().t()[:, ::2]}
    agrees("qkv_rope", {"B": 2, "S": 9, "K": 40, "H": 2, "Hkv": 1, "D": 16}, "fp16", change=lambda given: change)


def test_results_lie_as_attention_reads_them():
    x, w = torch.randn(2, 5, 32).bfloat16(), torch.randn(32, 32).bfloat16()
    table = torch.rand(5, 8).bfloat16()
    q, k, v = qkv_rope.qkv_rope(x, w, w[:16], w[:16], table, table)
    assert [tuple(y.shape) for y in (q, k, v)] == [(2, 2, 5, 16), (2, 1, 5, 16), (2, 1, 5, 16)]
    assert all(y.transpose(1, 2).is_contiguous() for y in (q, k, v))
    assert qkv_rope.qkv_rope(x[:0], w, w[:16], w[:16], table, table)[0].shape == (0, 2, 5, 16)


def test_hopper_is_given_whole_heads(request, monkeypatch):
    """Each tile's columns are whole heads, and tables come in the place of scales."""
    from kernelmark.kernels.matmul import _matmul_hopper as hopper

    seen = []

    def planned(a, b, out, schedule, *_, **named):
        lie = [(x.shape, x.stride()) for x in (a, b, out)]

        def run(a, b, out, scale_a=None, scale_b=None, bias=None):
            # Of these only addresses are read.
            a, b, out = (x.as_strided(*how) for x, how in zip((a, b, out), lie, strict=True))
            y = (a.double() @ b.double().t()).to(out.dtype)
            if schedule.head:
                assert schedule.columns % schedule.head == 0
                assert schedule.head == 2 * schedule.chunk * max(1, schedule.head // 128)
                heads = y.view(-1, len(scale_a), y.shape[1] // schedule.head, schedule.head).transpose(1, 2)
                y = reference(heads, heads, scale_a, scale_b, "half")[0].transpose(1, 2).reshape(y.shape)
                seen.append(schedule.head)
            out.copy_(y)

        return run

    forget()
    request.addfinalizer(forget)
    monkeypatch.setattr(hopper, "planned", planned)
    for module in (matmul, qkv_rope):
        monkeypatch.setattr(module, "multiprocessors", lambda x: 132)
    monkeypatch.setattr(matmul, "capability", lambda device: (9, 0))
    for D in (64, 128, 256):
        x, table = torch.randn(2, 20, 64).bfloat16(), torch.rand(20, D // 2).bfloat16()
        query, key = torch.randn(2 * D, 64).bfloat16(), torch.randn(D, 64).bfloat16()
        q, k, _ = qkv_rope.qkv_rope_fused(x, query, key, key, table, table)
        plain = qkv_rope.qkv_rope(x, query, key, key, table, table)[0]
        assert torch.equal(plain, q) == (D in qkv_rope.FASTER)  # else rounded once more
        for y, weight in ((q, query), (k, key)):
            heads = (x.double() @ weight.double().t()).unflatten(-1, (-1, D)).transpose(1, 2)
            want = reference(heads, heads, table.double(), table.double(), "half")[0]
            assert (y.double() - want).norm() < 1e-2 * want.norm()
    assert seen == [64, 64, 64, 64, 128, 128, 256, 256]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key": torch.zeros(24, 32)}, ValueError, "expected heads of 16"),
        ({"cos": torch.zeros(4, 8)}, ValueError, "cos has shape"),
        ({"x": torch.zeros(5, 32)}, ValueError, "expected 3 dimensions"),
    ],
)
def test_what_is_wrong_is_named(change, error, message):
    given = {
        "x": torch.zeros(2, 5, 32),
        "query": torch.zeros(32, 32),
        "key": torch.zeros(16, 32),
        "value": torch.zeros(16, 32),
        "cos": torch.zeros(5, 8),
        "sin": torch.zeros(5, 8),
    } | change
    with pytest.raises(error, match=message):
        qkv_rope.qkv_rope(**{name: y.bfloat16() for name, y in given.items()})


def test_results_are_changed_in_place():
    """As those of PyTorch's own functions are; autograd refuses it of views that a function gives."""
    x = torch.randn(1, 3, 8).half()
    weights = [torch.randn(16, 8).half().requires_grad_() for _ in range(3)]
    angles = torch.randn(3, 4).half()
    q, k, v = qkv_rope.qkv_rope(x, *weights, angles.cos(), angles.sin())
    want = torch.autograd.grad([2 * q, k, v], weights, [torch.ones_like(q)] * 3)
    q, k, v = qkv_rope.qkv_rope(x, *weights, angles.cos(), angles.sin())
    got = torch.autograd.grad([q.mul_(2), k.add_(1), v], weights, [torch.ones_like(q)] * 3)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
