"""Quantization to 8 bits on a GPU, where launches are prepared once for calls that are alike: new numbers, other
strides and other shapes in turn, each held to what was given.
"""

from __future__ import annotations

import random

import pytest
import torch
from kernelmark.kernels import _common
from kernelmark.kernels.quantization.fp8_quant import (
    GROUP,
    LARGEST,
    both_summed,
    fp8_quant,
    gelu_both,
    gelu_gradient_both_summed,
    layer_norm_both,
    norm_both,
    rows_both,
    rows_both_summed,
    swiglu_both,
)

HALF = 2.0**-4
"""Half a step of E4M3 (3 bits of mantissa) over the number."""

LEAST = 2.0**-10
"""Half of its least number."""


@pytest.fixture(autouse=True)
def _e4m3():
    if not _common.converts_to_e4m3(torch.cuda.get_device_capability()):
        pytest.skip("needs a GPU that converts to E4M3")


def wide(scale, shape, rows, columns):
    """A scale for `rows` × `columns` numbers each, for each of them."""
    return scale.double().repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def holds(q, scale, x, rows, columns):
    """That q · scale is x to half a step, and each group's largest magnitude the format's largest number."""
    of_each = wide(scale, x.shape, rows, columns)
    x = x.double()
    off = (q.double() * of_each - x).abs()
    # What is multiplied, and its scale, are rounded to fp32, which can move a number over a boundary.
    allowed = x.abs() * (HALF + 2.0**-18) + of_each * LEAST
    assert bool((off <= allowed).all()), (off - allowed).max().item()
    beyond = (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)
    whole = torch.nn.functional.pad(q.float().abs(), beyond)
    groups = whole.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    assert bool((groups.amax((1, 3)) == LARGEST["e4m3"]).all())


def sums_hold(sums, x):
    """That they are x's columns', added in fp32 in any order and rounded to x's dtype."""
    exact, size = x.double().sum(0), x.double().abs().sum(0)
    rounded = torch.finfo(x.dtype).eps / 2
    assert ((sums.double() - exact).abs() <= rounded * exact.abs() + 1e-6 * size).all()


def drawn(rng, M, N, dtype):
    """(M, N), whole or a part of wider rows."""
    if rng.random() < 0.5:
        return torch.randn(M, N, device="cuda", dtype=dtype)
    return torch.randn(M, N + 16, device="cuda", dtype=dtype)[:, 8 : 8 + N]


@pytest.mark.parametrize("seed", range(8))
def test_calls_that_are_alike_are_held_to_their_own_numbers(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    shapes = [(rng.randint(1, 700), rng.choice([rng.randint(1, 900), 128 * rng.randint(1, 9)])) for _ in range(3)]
    dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32])
    for M, N in [rng.choice(shapes) for _ in range(12)]:
        x = drawn(rng, M, N, dtype)
        q, scale = fp8_quant(x)
        holds(q, scale, x, 1, N)
        q, scale = fp8_quant(x, "block", layout=rng.choice(["rows", "matmul"]))
        holds(q, scale, x, 1, GROUP)
        across, of_across = fp8_quant(x, "column")
        holds(across, of_across, x.t(), 1, GROUP)
        both = fp8_quant(x, "both")
        for got, want in zip(both, (q, scale, across, of_across), strict=True):
            assert torch.equal(got.float(), want.float())
        *rows, sums = rows_both_summed(x)
        own, turned = fp8_quant(x), fp8_quant(x.t().contiguous())
        for found in (rows, rows_both(x)):
            assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, (*own, *turned), strict=True))
        sums_hold(sums, x)
        assert torch.equal(sums, rows_both_summed(x)[4]), "the same order each time"
        q, scale, turned, of_turned = fp8_quant(x, "tile_both")
        holds(q, scale, x, GROUP, GROUP)
        holds(turned, of_turned, x.t(), GROUP, GROUP)
        assert torch.equal(turned.float(), q.float().t())


@pytest.mark.parametrize("seed", range(4))
def test_what_is_made_in_the_kernel_is_held_to_its_formula(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    M, N = rng.randint(1, 700), rng.choice([rng.randint(1, 900), 128 * rng.randint(1, 9)])
    for _ in range(6):
        h, up = (drawn(rng, M, N, torch.bfloat16) for _ in range(2))
        rstd, weight = torch.rand(M, device="cuda") + 0.5, torch.randn(N, device="cuda").bfloat16()
        want = h.float() * rstd[:, None] * weight.float()
        q, scale, across, of_across = norm_both(h, rstd, weight)
        holds(q, scale, want, 1, GROUP)
        holds(across, of_across, want.t(), 1, GROUP)
        *found, sums = both_summed(h)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, fp8_quant(h, "both"), strict=True))
        sums_hold(sums, h)
        want = torch.nn.functional.silu(h.float()) * up.float()
        q, scale, across, of_across = swiglu_both(h, up)
        holds(q, scale, want, 1, GROUP)
        holds(across, of_across, want.t(), 1, GROUP)
        mean, bias = torch.randn(M, device="cuda"), torch.randn(N, device="cuda").bfloat16()
        want = (h.float() - mean[:, None]) * rstd[:, None] * weight.float() + bias.float()
        q, scale, across, of_across = layer_norm_both(h, mean, rstd, weight, bias)
        holds(q, scale, want, 1, GROUP)
        holds(across, of_across, want.t(), 1, GROUP)
        held = up.double().requires_grad_()
        want = torch.nn.functional.gelu(held, approximate="tanh")
        want.backward(h.double())
        q, scale, across, of_across = gelu_both(up)
        holds(q, scale, want.detach(), 1, GROUP)
        holds(across, of_across, want.detach().t(), 1, GROUP)
        q, scale, across, of_across, sums = gelu_gradient_both_summed(h, up)
        holds(q, scale, held.grad, 1, GROUP)
        holds(across, of_across, held.grad.t(), 1, GROUP)
        exact, size = held.grad.double().sum(0), held.grad.double().abs().sum(0)
        assert ((sums.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5 * size).all()
