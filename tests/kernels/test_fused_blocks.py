"""A small Llama and a small GPT-2 in 8 bits whose norms, gates and activations write what their products read,
beside such where they do not; and models whose layer norms add first.
"""

from unittest import mock

import pytest
import torch
from kernelmark.kernels.matmul import _columns, _lookup
from kernelmark.kernels.norm.layer_norm import layer_norm
from kernelmark.kernels.quantization import fp8_quant
from kernelmark.suite import fused_blocks
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import chosen, draw
from kernelmark.suite.products import by_blocks
from kernelmark.suite.system import Assembly, System

B, S = 1, 5
CATALOG = Catalog.default()


def grouped(x, rows):
    """Rounded to E4M3 with a scale for so many rows and 128 columns: values and scales."""
    M, N = x.shape
    padded = torch.zeros(-(-M // rows) * rows, -(-N // 128) * 128)
    padded[:M, :N] = x
    tiles = padded.view(padded.shape[0] // rows, rows, -1, 128)
    scale = tiles.abs().amax((1, 3)).clamp_min(1e-30) / 448
    return (tiles / scale[:, None, :, None]).view(padded.shape)[:M, :N].to(torch.float8_e4m3fn), scale


def quantize(x, granularity):
    rows = 128 if granularity.startswith("tile") else 1
    one, other = grouped(x.float(), rows), grouped(x.float().t(), rows)
    return (*one, *other) if granularity.endswith("both") else one


def wide(x, scale):
    M, K = x.shape
    return (
        x.float()
        * scale.repeat_interleave(-(-M // len(scale)) if len(scale) < M else 1, 0)[:M].repeat_interleave(128, 1)[
            :, :K
        ]
    )


def product(a, b, scale_a, scale_b, recipe, bias=None, dtype=torch.bfloat16):
    """As `fp8_matmul`, of no more than 256 rows where scales are of tiles."""
    out = wide(a, scale_a) @ wide(b.t(), scale_b.t()).t()
    return (out if bias is None else out + bias.float()).to(dtype)


def gradients(model, dtype=torch.bfloat16, layers=2, recompute=False, **ours):
    of = chosen(CATALOG.models, model).first(layers)
    operators = {x.name: x.operator for x in of.model.parts(of.configuration, B, S)}
    parts = {name: CATALOG.operator(x).reference for name, x in operators.items()}
    module = of.model.module(of.configuration, parts | ours)
    module.recompute = recompute
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, x in draw(of.model.weights(of.configuration), 3, dtype, torch.device("cpu")):
            own[name].copy_(x)
    module.to(dtype).prepare(S, torch.device("cpu"), dtype)
    tokens = torch.arange(B * (S + 1)).view(B, S + 1) * 17 % 512
    loss = module(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return float(loss.detach()), {name: p.grad.float() for name, p in own.items()}


def test_the_same_but_for_a_rounding():
    """By our kernels. The interpreter rounds some numbers of 8 bits in a way of its own."""
    given = CATALOG, quantize, product
    loss, found = gradients(
        "llama-tiny",
        layers=1,
        linear=by_blocks(quantize, product),
        normed=fused_blocks.normed(*given),
        down=fused_blocks.down(*given),
    )
    want_loss, want = gradients("llama-tiny", layers=1, linear=by_blocks(quantize, product))
    exact_loss, exact = gradients("llama-tiny", layers=1, linear=torch.nn.functional.linear)
    assert loss == pytest.approx(want_loss, rel=2e-2)
    assert loss == pytest.approx(exact_loss, rel=3e-2)
    for name, x in want.items():
        off, allowed = ((y - exact[name]).norm() / exact[name].norm() for y in (found[name], x))
        assert off < max(1.3 * allowed, 0.02), name


SEVERAL = {"llama-tiny": [3, 2], "mixtral-tiny": [3, 3]}
"""Weights that multiply one input, of the first layers: of experts gate and up are no part of it."""


@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny", "bert-tiny", "mixtral-tiny"])
@pytest.mark.parametrize("recompute", [False, True])
def test_products_that_sum_their_gradients(model, recompute):
    """By our kernels, of biases and of the table of tokens, and by the products, where several weights multiply
    one input.
    """
    linear = fused_blocks.multiplied(CATALOG)
    several, called = linear.several, []
    linear.several = lambda x, *weights: called.append(len(weights)) or several(x, *weights)
    of_biases = mock.patch.object(_columns, "_summed", side_effect=_columns._summed)
    of_table = mock.patch.object(_lookup, "_add_rows", side_effect=_lookup._add_rows)
    with of_biases as summed, of_table as looked_up:
        loss, found = gradients(model, torch.float32, recompute=recompute, linear=linear)
    biases = sum("bias" in name and "norm" not in name for name in found)
    assert (called[:2], summed.call_count, looked_up.call_count) == (SEVERAL.get(model, []), biases, 1)
    want_loss, want = gradients(model, torch.float32, linear=torch.nn.functional.linear)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    for name, x in want.items():
        assert (found[name] - x).norm() <= 1e-5 * x.norm(), name


def test_products_of_inputs_that_nobody_differentiates():
    linear = fused_blocks.multiplied(CATALOG)
    x, weight, bias = (
        torch.randn(2, 3, 8),
        torch.randn(4, 8, requires_grad=True),
        torch.randn(4, requires_grad=True),
    )
    linear(x, weight, bias).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum((0, 1)).expand(4, 8))
    assert torch.equal(bias.grad, torch.full((4,), 6.0))
    with torch.no_grad():
        assert len(linear.several(x, weight, weight)) == 2


def test_which_systems_multiply_so():
    """Where what layers take in Python is nothing, and nobody asks for anything else."""

    def sums(device="cuda", **fields):
        system = System("x", **{"base": "kernelmark", "execution": "graph"} | fields)
        return hasattr(Assembly(system, CATALOG).linear("bf16", device), "several")

    assert sums()
    assert not sums(device="cpu")
    assert not sums(base="torch")
    assert not sums(execution="eager")
    assert not sums(execution="compile")
    assert not sums(recompute="by_part")
    assert not sums(parts={"linear": "kernelmark"})
    assert not sums(precision="parts_1x128")


def gelus_gradient(dy, x):
    with torch.enable_grad():
        held = x.detach().requires_grad_()
        torch.nn.functional.gelu(held, approximate="tanh").backward(dy)
    return held.grad


IN_TORCH = {
    "norm_both": lambda h, rstd, weight: quantize(h * rstd[:, None] * weight, "both"),
    "swiglu_both": lambda gate, up: quantize(torch.nn.functional.silu(gate) * up, "both"),
    "layer_norm_both": lambda h, mean, rstd, weight, bias: quantize(
        (h - mean[:, None]) * rstd[:, None] * weight + bias, "both"
    ),
    "gelu_both": lambda x: quantize(torch.nn.functional.gelu(x, approximate="tanh"), "both"),
    "both_summed": lambda x: (*quantize(x, "both"), x.sum(0)),
    "gelu_gradient_both_summed": lambda dy, x: IN_TORCH["both_summed"](gelus_gradient(dy, x)),
}


@pytest.mark.parametrize("model", ["llama-tiny", "gpt2-tiny"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_same_without_a_rounding(model, recompute, monkeypatch):
    """In fp32, where what is in memory in 16 bits otherwise is not rounded; 8 bits by PyTorch."""
    for name, call in IN_TORCH.items():
        monkeypatch.setattr(fp8_quant, name, call)
    of = chosen(CATALOG.models, model)

    def exact(*given):
        return product(*given, dtype=torch.float32)

    names = of.model.fused(of.configuration)
    fused = {name: getattr(fused_blocks, name)(CATALOG, quantize, exact) for name in names}
    by = by_blocks(quantize, exact)
    loss, found = gradients(model, torch.float32, recompute=recompute, linear=by, **fused)
    want_loss, want = gradients(model, torch.float32, linear=by)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    for name, x in want.items():
        assert (found[name] - x).norm() < 5e-3 * x.norm(), name


@pytest.mark.parametrize("model", ["gpt2-tiny", "bert-tiny"])
@pytest.mark.parametrize("recompute", [False, True])
def test_norms_that_add_first(model, recompute):
    """Of two layers: what follows one is the other's norm, and the last one's the model's."""
    norm = CATALOG.operator("layer_norm").reference
    added, calls = fused_blocks.added(CATALOG, layer_norm), []
    own = added.added
    added.added = lambda **given: calls.append(1) or own(**given)
    linear = torch.nn.functional.linear
    loss, found = gradients(model, torch.float32, norm=added, linear=linear, recompute=recompute)
    want_loss, want = gradients(model, torch.float32, norm=norm, linear=linear)
    assert len(calls) == 4 * (1 + recompute), "two a layer, again where it is computed again"
    assert loss == pytest.approx(want_loss, rel=1e-5)
    for name, x in want.items():
        torch.testing.assert_close(found[name], x, rtol=1e-3, atol=1e-5)


def test_which_systems_have_it():
    def parts(model="llama-tiny", device="cuda", **fields):
        system = System("x", **{"base": "kernelmark", "precision": "parts_1x128_fused"} | fields)
        of = chosen(CATALOG.models, model)
        products = of.model.products(of.configuration, 2, 128)
        return Assembly(system, CATALOG)._fused_blocks(of, "bf16", device, products)

    assert set(parts()) == {"normed", "down"}
    assert set(parts("gpt2-tiny")) == {"layer_normed", "fed"}
    for said, given in (
        ("has no norm or gate", {"model": "bert-tiny"}),
        ("has no norm or gate", {"model": "mixtral-tiny"}),
        ("not parts by choice", {"base": "torch"}),
        ("not parts by choice", {"parts": {"attention": "torch"}}),
        ("not for cpu", {"device": "cpu"}),
    ):
        with pytest.raises(NotImplementedError, match=said):
            parts(**given)
