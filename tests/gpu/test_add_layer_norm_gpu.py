"""Layer norms that add first on a GPU, against fp64; and GPT-2's layers of them, in 16 and in 8 bits."""

from __future__ import annotations

import random

import pytest
import torch
from kernelmark.kernels import _common
from kernelmark.kernels.norm.layer_norm import add_layer_norm, add_moments
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import chosen, draw
from kernelmark.suite.system import Assembly, System

CATALOG = Catalog.default()


def shapes():
    """What models call, and random ones: few rows, odd widths, rows that no block holds."""
    drawn = random.Random(20261128)
    some = [(drawn.choice((1, 3, 700)), drawn.choice((drawn.randint(1, 6000), 8193, 40000))) for _ in range(12)]
    return [(16384, 768), (8192, 1024), (4096, 4096), *some]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("N", "D"), shapes())
def test_against_fp64(N, D, dtype):
    torch.manual_seed(N + D)
    x, residual, dy, dh = (torch.randn(N, D + 24, device="cuda").to(dtype)[:, 8 : D + 8] for _ in range(4))
    weight, bias = (torch.randn(D, device="cuda").to(dtype) for _ in range(2))
    given = [y.requires_grad_() for y in (x, residual, weight, bias)]
    y, h = add_layer_norm(*given)
    assert torch.equal(h, x + residual)
    exact = [z.detach().double().requires_grad_() for z in (h, weight, bias)]
    want = torch.nn.functional.layer_norm(exact[0], (D,), exact[1], exact[2], 1e-5)
    close = 1e-2 if dtype == torch.bfloat16 else 1e-4
    assert (y.double() - want).norm() <= close * want.norm()
    got = torch.autograd.grad([y, h], given, [dy, dh])
    expected = torch.autograd.grad([want, exact[0]], exact, [dy.double(), dh.double()])
    assert torch.equal(got[0], got[1])
    for a, b in zip((got[0], got[2], got[3]), expected, strict=True):
        assert (a.double() - b).norm() <= close * b.norm()
    total, mean, rstd = add_moments(x.detach(), residual.detach())
    assert torch.equal(total, h)
    wide = h.detach().double()
    torch.testing.assert_close(mean.double(), wide.mean(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rstd.double(), (wide.var(-1, correction=0) + 1e-5).rsqrt(), rtol=1e-5, atol=0)


def gradients(precision, dtype):
    of, (B, S), device = chosen(CATALOG.models, "gpt2-tiny"), (3, 200), torch.device("cuda")
    base = "torch" if dtype == torch.float32 else "kernelmark"
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    assembly = Assembly(System("x", base=base, precision=precision), CATALOG)
    module = of.model.module(of.configuration, assembly.parts(of, B, S, name, "cuda")).to(device, dtype)
    weights = dict(module.named_parameters())
    with torch.no_grad():
        for key, x in draw(of.model.weights(of.configuration), 3, torch.bfloat16, device):
            weights[key].copy_(x)
    module.prepare(S, device, dtype)
    tokens = torch.arange(B * (S + 1), device=device).view(B, S + 1) * 17 % 512
    loss = module(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return float(loss.detach()), {key: x.grad.double() for key, x in weights.items()}


def test_layers_of_them():
    """In 16 bits as near to fp32 as bf16 is; in 8 bits as near as where each part writes 16 bits."""
    if not _common.converts_to_e4m3(torch.cuda.get_device_capability()):
        pytest.skip("needs a GPU that converts to E4M3")
    loss, exact = gradients("case", torch.float32)
    found = {x: gradients(x, torch.bfloat16) for x in ("case", "parts_1x128", "parts_1x128_fused")}
    off = {
        x: {key: (y - exact[key]).norm() / exact[key].norm() for key, y in of.items()}
        for x, (_, of) in found.items()
    }
    assert found["case"][0] == pytest.approx(loss, rel=2e-2)
    assert max(off["case"].values()) < 0.15
    assert found["parts_1x128_fused"][0] == pytest.approx(loss, rel=3e-2)
    for key, x in off["parts_1x128_fused"].items():
        assert x < max(1.3 * off["parts_1x128"][key], 0.02), key
