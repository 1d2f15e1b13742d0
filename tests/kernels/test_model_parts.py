"""A small Llama whose products are ours, with their rotation or their gate: gradients of every parameter."""

import pytest
import torch
from kernelmark.kernels.matmul import _few_rows as few_rows
from kernelmark.kernels.matmul import _matmul as portable
from kernelmark.kernels.matmul.gate_up_swiglu import gate_up_swiglu
from kernelmark.kernels.matmul.linear import linear
from kernelmark.kernels.matmul.qkv_rope import qkv_rope
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.model import chosen, draw

B, S = 1, 9


def built(dtype, **ours):
    catalog = Catalog.default()
    found = chosen(catalog.models, "llama-tiny").first(1)
    operators = {x.name: x.operator for x in found.model.parts(found.configuration, B, S)}
    parts = {name: catalog.operator(x).reference for name, x in operators.items()}
    module = found.model.module(found.configuration, parts | {"linear": torch.nn.functional.linear} | ours)
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, x in draw(found.model.weights(found.configuration), 3, torch.float16, torch.device("cpu")):
            own[name].copy_(x)
    module.to(dtype).prepare(S, torch.device("cpu"), dtype)
    return module


@pytest.mark.parametrize(
    ("ours", "batches"),
    [({}, 1), ({"qkv_rope": qkv_rope}, 3), ({"gate_up_swiglu": gate_up_swiglu}, 3)],
    ids=["linear", "qkv_rope", "gate_up_swiglu"],
)
def test_gradients_of_every_parameter(monkeypatch, ours, batches):
    """Of several micro-batches all but the first are added where they lie, as a trainer has it."""
    monkeypatch.setattr(few_rows, "takes", lambda a, weight: False)
    # Few programs, of which each costs the interpreter the same.
    monkeypatch.setattr(portable, "tile", lambda *_: (portable.Tile(64, 128, 64), 4, 1))
    wide, module = built(torch.float64), built(torch.float16, linear=linear, **ours)
    for i in range(batches):
        tokens = torch.randint(0, 512, (B, S + 1))
        for x in (wide, module):
            # Larger, so that fp16 loses none of what is small.
            (64 * x(tokens[:, :-1], tokens[:, 1:])).backward()
        if i == 0:
            for p in module.parameters():
                p.main_grad = p.grad
    for (name, p), q in zip(module.named_parameters(), wide.parameters(), strict=True):
        assert p.grad is p.main_grad
        assert (p.grad.double() - q.grad).norm() < 1e-2 * q.grad.norm(), name


def test_a_loss_that_nothing_is_differentiated_of():
    """There the epilogue writes no gate and no up; the answer is the same to the bit."""
    module = built(torch.float16, linear=linear, gate_up_swiglu=gate_up_swiglu)
    apart = built(torch.float16, linear=linear)
    tokens = torch.randint(0, 512, (3, S + 1))
    inputs = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        found, want = module(*inputs), apart(*inputs)
    assert torch.equal(found, module(*inputs))
    torch.testing.assert_close(found, want, rtol=2e-3, atol=0)
