"""Attention of queries, keys and values in one tensor on a GPU, against fp64 and attention of its views."""

from __future__ import annotations

import random

import pytest
import torch
from kernelmark.kernels.attention import _dispatch
from kernelmark.kernels.attention.attention import attention, attention_packed


def shapes():
    """What models call, and random ones: odd lengths, heads that no tile divides."""
    drawn = random.Random(20261128)
    some = [
        (drawn.choice((1, 2, 3)), drawn.randint(1, 2500), drawn.randint(1, 9), drawn.choice((40, 64, 72, 80, 128)))
        for _ in range(12)
    ]
    return [(16, 1024, 12, 64), (8, 1024, 16, 64), (2, 2048, 16, 128), (1, 5000, 5, 64), *some]


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(("B", "S", "H", "D"), shapes())
def test_as_attention_of_views(B, S, H, D, mask):
    torch.manual_seed(S)
    whole = torch.randn(B, S, 3, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = attention_packed(whole, mask)
    assert torch.equal(found, attention(*_dispatch.thirds(whole.detach()), mask).transpose(1, 2))
    grad = torch.randn_like(found)
    (got,) = torch.autograd.grad(found, whole, grad)
    assert got.is_contiguous()
    wide = whole.detach()[:1, :, :, :1].double().requires_grad_()
    q, k, v = _dispatch.thirds(wide)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal").transpose(1, 2)
    (exact,) = torch.autograd.grad(want, wide, grad[:1, :, :1].double())
    assert (found[:1, :, :1].double() - want).norm() < 6e-3 * want.norm()
    assert (got[:1, :, :, :1].double() - exact).norm() < 1e-2 * exact.norm()
    torch.use_deterministic_algorithms(True)
    try:
        (fixed,) = torch.autograd.grad(attention_packed(whole, mask), whole, grad)
        views = attention(*_dispatch.thirds(whole), mask).transpose(1, 2)
        assert torch.equal(fixed, torch.autograd.grad(views, whole, grad)[0])
    finally:
        torch.use_deterministic_algorithms(False)


def test_in_a_graph():
    whole = torch.randn(2, 1024, 3, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(2, 1024, 4, 64, device="cuda", dtype=torch.bfloat16)

    def step():
        return torch.autograd.grad(attention_packed(whole), whole, grad)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    with torch.no_grad():
        whole.copy_(torch.randn_like(whole))
    graph.replay()
    assert (got.float() - step().float()).norm() < 3e-3 * got.float().norm()
