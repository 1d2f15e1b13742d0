"""A small Llama in 8 bits whose norms and gates write what its products read, beside one where they do not."""

import pytest
import torch
from kernelmark.suite import fused_blocks
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import chosen, draw
from kernelmark.suite.products import by_blocks
from kernelmark.suite.system import Assembly, System

B, S = 1, 5
CATALOG = Catalog.default()
LLAMA = chosen(CATALOG.models, "llama-tiny").first(1)


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


def product(a, b, scale_a, scale_b, recipe, bias=None):
    """As `fp8_matmul`, of no more than 128 rows where scales are of tiles; a Llama's layers have no bias."""
    assert bias is None
    return (wide(a, scale_a) @ wide(b.t(), scale_b.t()).t()).bfloat16()


def gradients(**ours):
    operators = {x.name: x.operator for x in LLAMA.model.parts(LLAMA.configuration, B, S)}
    parts = {name: CATALOG.operator(x).reference for name, x in operators.items()}
    module = LLAMA.model.module(LLAMA.configuration, parts | ours)
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, x in draw(LLAMA.model.weights(LLAMA.configuration), 3, torch.bfloat16, torch.device("cpu")):
            own[name].copy_(x)
    module.to(torch.bfloat16).prepare(S, torch.device("cpu"), torch.bfloat16)
    tokens = torch.arange(B * (S + 1)).view(B, S + 1) * 17 % 512
    loss = module(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return float(loss.detach()), {name: p.grad.float() for name, p in own.items()}


def test_the_same_but_for_a_rounding():
    given = CATALOG, quantize, product
    loss, found = gradients(
        linear=by_blocks(quantize, product), normed=fused_blocks.normed(*given), down=fused_blocks.down(*given)
    )
    want_loss, want = gradients(linear=by_blocks(quantize, product))
    exact_loss, exact = gradients(linear=torch.nn.functional.linear)
    assert loss == pytest.approx(want_loss, rel=2e-2)
    assert loss == pytest.approx(exact_loss, rel=3e-2)
    for name, x in want.items():
        off, allowed = ((y - exact[name]).norm() / exact[name].norm() for y in (found[name], x))
        assert off < max(1.3 * allowed, 0.02), name


def test_which_systems_have_it():
    def parts(model="llama-tiny", device="cuda", **fields):
        system = System("x", **{"base": "kernelmark", "precision": "parts_1x128_fused"} | fields)
        of = chosen(CATALOG.models, model)
        products = of.model.products(of.configuration, 2, 128)
        return Assembly(system, CATALOG)._fused_blocks(of, "bf16", device, products)

    assert set(parts()) == {"normed", "down"}
    for said, given in (
        ("has no norm or gate", {"model": "gpt2-tiny"}),
        ("has no norm or gate", {"model": "mixtral-tiny"}),
        ("not parts by choice", {"base": "torch"}),
        ("not parts by choice", {"parts": {"attention": "torch"}}),
        ("not for cpu", {"device": "cpu"}),
    ):
        with pytest.raises(NotImplementedError, match=said):
            parts(**given)
