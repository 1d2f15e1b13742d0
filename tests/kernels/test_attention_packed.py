"""Attention of queries, keys and values in one tensor: attention's numbers, and a gradient that nobody copies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kernelmark.kernels.attention import _dispatch, _tiling
from kernelmark.kernels.attention.attention import attention, attention_packed
from kernelmark.kernels.norm.layer_norm import layer_norm
from kernelmark.kernels.optimizer.adamw import adamw
from kernelmark.suite import fused_blocks
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import chosen, draw
from kernelmark.suite.system import Assembly, System

CATALOG = Catalog.default()


def drawn(B, S, H, D, dtype=torch.float32):
    generator = torch.Generator().manual_seed(S * 1000 + D)
    return torch.randn(B, S, 3, H, D, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("B", "S", "H", "D"), [(2, 65, 3, 16), (1, 40, 1, 40), (2, 1, 2, 8), (1, 130, 2, 64)])
def test_the_same_bits_as_of_views(B, S, H, D, dtype, mask):
    whole = drawn(B, S, H, D, dtype)
    found = attention_packed(whole, mask)
    assert found.shape == (B, S, H, D)
    assert found.is_contiguous()
    apart = attention(*_dispatch.thirds(whole), mask).transpose(1, 2)
    assert torch.equal(found, apart)
    grad = torch.randn_like(found)
    (got,), (want,) = (torch.autograd.grad(x, whole, grad) for x in (found, apart))
    assert got.is_contiguous()
    assert torch.equal(got, want)


def test_as_it_lies():
    """Between other columns, and with a gradient that is expanded."""
    room = torch.randn(2, 40, 3, 2, 24)
    for whole in (room[..., 3:19], room[..., 1:17:1], room[:, ::2], room[..., ::2]):
        whole = whole.detach().requires_grad_()
        found, apart = attention_packed(whole), attention(*_dispatch.thirds(whole)).transpose(1, 2)
        assert torch.equal(found, apart)
        (got,), (want,) = (torch.autograd.grad(x.sum(), whole) for x in (found, apart))
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "order", [(1, 0, 2, 3, 4), (0, 3, 1, 2, 4), (2, 0, 1, 3, 4), (3, 2, 1, 0, 4), (4, 3, 2, 1, 0)]
)
def test_in_any_order_in_memory(order):
    """The output lies as B, S, H, D, wherever batch, tokens and heads lie in what it is made of."""
    whole = drawn(2, 20, 3, 8)
    dense = whole.detach()
    back = [order.index(i) for i in range(5)]
    turned = dense.permute(order).contiguous().permute(back).requires_grad_()
    found, wanted = attention_packed(turned), attention_packed(whole)
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted)
    grad = torch.randn_like(found)
    (got,), (want,) = torch.autograd.grad(found, turned, grad), torch.autograd.grad(wanted, whole, grad)
    torch.testing.assert_close(got, want)


def test_what_it_gives_can_be_changed_in_place():
    whole = drawn(1, 20, 2, 16)
    out = attention_packed(whole)
    assert torch.equal(out.detach().clone(), out.mul_(2) / 2)


def test_without_gradients_and_of_nothing():
    whole = drawn(1, 20, 2, 16)
    with torch.no_grad():
        assert torch.equal(attention_packed(whole), attention_packed(whole.detach()))
    for shape in ((0, 4, 3, 2, 8), (2, 0, 3, 2, 8), (2, 4, 3, 0, 8)):
        nothing = torch.zeros(shape, requires_grad=True)
        out = attention_packed(nothing)
        assert out.shape == (*shape[:2], *shape[3:])
        assert torch.autograd.grad(out.sum(), nothing)[0].shape == shape


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (
            {"projected": torch.zeros(1, 4, 2, 2, 8)},
            ValueError,
            r"projected has shape .* expected \(B, S, 3, H, D\)",
        ),
        ({"projected": torch.zeros(1, 4, 48)}, ValueError, "projected"),
        ({"projected": torch.zeros(1, 4, 3, 2, 300)}, ValueError, "head dimension 300"),
        ({"projected": torch.zeros(1, 4, 3, 2, 8).double()}, TypeError, "float64"),
        ({"projected": torch.zeros(1, 4, 3, 2, 8), "mask": "window"}, ValueError, "mask is 'window'"),
    ],
)
def test_errors(given, error, said):
    with pytest.raises(error, match=said):
        attention_packed(**given)


@pytest.mark.parametrize("causal", [True, False])
def test_operator_contract(causal):
    torch.library.opcheck(torch.ops.kernelmark.attention_packed.default, (drawn(1, 20, 2, 16), causal))


def test_hopper_writes_gradients_where_they_lie(monkeypatch):
    for each in (_dispatch, _tiling):
        monkeypatch.setattr(each, "capability", lambda device: (9, 0))
    _dispatch.hopper_modules.cache_clear()
    hopper = _dispatch.hopper_modules(torch.device("meta"))
    planned, ran = [], []
    monkeypatch.setattr(hopper.backward, "AVAILABLE", True)

    def plan(*given, **_):
        planned.extend(given[4:7])
        return SimpleNamespace(sums=(1, 256))

    monkeypatch.setattr(hopper.backward, "planned", plan)
    monkeypatch.setattr(hopper.backward, "run", lambda plan, *given: ran.extend(given[6:9]))
    monkeypatch.setattr(hopper.deterministic, "planned_statistics", lambda out, grad, zeroed: out)
    monkeypatch.setattr(hopper.deterministic, "run_statistics", lambda *_: (None, None))
    monkeypatch.setattr(_dispatch, "planned_gradient_in_sinks", lambda *_: lambda *_: None)
    B, S, H, D = 2, 1024, 12, 64
    whole = torch.empty(B, S, 3, H, D, dtype=torch.bfloat16, device="meta")
    out = torch.empty(B, S, H, D, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(B, H, S, device="meta")
    try:
        found = _dispatch.prepare_packed_backward(out, whole, out, lse, True)(out, whole, out, lse, True)
    finally:
        _dispatch.hopper_modules.cache_clear()
    assert found.is_contiguous()
    strides = (S * 3 * H * D, D, 3 * H * D, 1)
    assert [x.stride() for x in (*planned, *ran)] == [strides] * 6
    assert [x.storage_offset() for x in ran] == [0, H * D, 2 * H * D]
    assert {x.untyped_storage()._cdata for x in ran} == {found.untyped_storage()._cdata}


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-tiny"])
def test_models_take_it(name):
    """The same gradients as with views, bit for bit."""
    of = chosen(CATALOG.models, name).first(1)
    B, S = 2, 24
    references = {x.name: CATALOG.operator(x.operator).reference for x in of.model.parts(of.configuration, B, S)}
    found = []
    for own in (attention, fused_blocks.packed(CATALOG, attention)):
        parts = references | {"attention": own, "linear": torch.nn.functional.linear}
        module = of.model.module(of.configuration, parts)
        weights = dict(module.named_parameters())
        with torch.no_grad():
            for weight, x in draw(of.model.weights(of.configuration), 3, torch.float32, torch.device("cpu")):
                weights[weight].copy_(x)
        module.prepare(S, torch.device("cpu"), torch.float32)
        tokens = torch.arange(B * (S + 1)).view(B, S + 1) * 17 % 512
        loss = module(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        found.append((loss.detach(), {key: x.grad for key, x in weights.items()}))
    (loss, gradients), (other_loss, others) = found
    assert torch.equal(loss, other_loss)
    assert all(torch.equal(gradients[key], others[key]) for key in gradients)


def test_which_systems_take_it():
    """And norms that add first, and AdamW that clips."""

    def takes(device="cuda", **fields):
        assembly = Assembly(System("x", **{"base": "kernelmark"} | fields), CATALOG)
        found = {"attention": attention, "norm": layer_norm}
        assembly._take_fused(found, chosen(CATALOG.models, "gpt2-tiny"), 1, 24, device)
        return hasattr(found["attention"], "packed"), hasattr(found["norm"], "added")

    both, neither = (True, True), (False, False)
    assert takes() == both
    assert takes(execution="graph", precision="parts_1x128") == both
    assert takes(device="cpu") == neither
    assert takes(base="torch") == neither
    assert takes(base="torch", parts={"attention": "kernelmark", "norm": "kernelmark"}) == neither
    assert takes(parts={"attention": "torch"}) == (False, True)
    assert takes(parts={"layer_norm": "torch"}) == (True, False)
    assert takes(recompute="every_layer") == (True, False), "its norm would be kept beside the stream"
    assert takes(parts={"attention": "kernelmark", "norm": "kernelmark"}) == both, "an exchange for itself is none"

    def clips(device="cuda", **fields):
        assembly = Assembly(System("x", **{"base": "kernelmark"} | fields), CATALOG)
        return hasattr(assembly.beside("optimizer", "adamw", adamw, device), "clipped")

    assert clips()
    assert clips(recompute="every_layer", execution="compile")
    assert not clips(device="cpu")
    assert not clips(base="torch", parts={"optimizer": "kernelmark"})
    assert not clips(parts={"optimizer": "torch"})
