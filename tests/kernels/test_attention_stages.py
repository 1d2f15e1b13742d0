"""The stages of `docs/stages/` that a CPU can compute, and what the others say where they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernelmark.kernels.attention import _dispatch as module
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.measure.verify import deviation

STAGES = Path(__file__).parents[2] / "docs" / "stages"


@pytest.fixture(scope="module")
def catalog():
    patch = pytest.MonkeyPatch()
    patch.setenv("KERNELMARK_PATH", str(STAGES))
    yield Catalog.default()
    patch.undo()


def stage(catalog, name, dtype, pass_, mask, **axes):
    """The operator, the inputs of a case, and a stage's callable."""
    operator = catalog.operator("attention")
    case = operator.case({"B": 1, "H": 4, "Hkv": 2, "S": 150, "D": 32} | axes, dtype, pass_, mask=mask)
    inputs = operator.inputs(case, torch.device("cpu"), torch.Generator().manual_seed(1))
    factory = next(x for x in catalog.of_operator("attention") if x.name == name).load()
    return operator, inputs, factory(case)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(("name", "dtype"), [("plain", "fp32"), ("plain", "bf16"), ("tiled", "fp32")])
def test_right(catalog, name, dtype, mask):
    operator, inputs, call = stage(catalog, name, dtype, "backward", mask)
    leaves = [inputs[x].requires_grad_() for x in "qkv"]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out, want = call(**inputs), operator.reference(*wide, mask)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    gradients = torch.autograd.grad(out, leaves, grad)
    references = torch.autograd.grad(want, wide, grad.double())
    deviation([out.detach(), *gradients], [want.detach(), *references], operator.tolerances[dtype])


def test_descriptors_are_the_same_kernels(catalog, monkeypatch):
    """As in `test_attention.py`: the interpreter has descriptors, a CPU no need of them."""
    _, inputs, tiled = stage(catalog, "tiled", "fp32", "forward", "causal")
    _, _, tma = stage(catalog, "tma", "fp32", "forward", "causal")
    with pytest.raises(NotImplementedError, match="descriptors cannot describe these inputs on this device"):
        tma(**inputs)
    monkeypatch.setattr(module, "describable", lambda *tensors: True)
    assert torch.equal(tma(**inputs), tiled(**inputs))


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("D", [64, 128])
def test_specialised_has_pairs_of_tiles(catalog, monkeypatch, D, mask):
    monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    module.hopper_modules.cache_clear()
    hopper = module.hopper_modules(torch.device("cpu"))
    module.hopper_modules.cache_clear()
    monkeypatch.setattr(module, "hopper_modules", lambda device: hopper)
    taken = []
    monkeypatch.setattr(hopper.paired, "forward", lambda *given: taken.append(given[5:]))
    _, inputs, call = stage(catalog, "specialised", "bf16", "forward", mask, S=1024, D=D)
    call(**inputs)
    ((causal, window, schedule, sinks, cap),) = taken
    assert (causal, window, sinks, cap) == (mask == "causal", 0, None, 0)
    assert schedule == hopper.paired.SCHEDULES[D, causal]


def test_a_path_that_is_not_there_is_named(catalog):
    _, inputs, call = stage(catalog, "specialised", "bf16", "forward", "causal", D=64)
    with pytest.raises(NotImplementedError, match="the kernels for Hopper do not take these inputs"):
        call(**inputs)
    with pytest.raises(NotImplementedError, match="no kernel for Hopper is 32 columns wide"):
        stage(catalog, "specialised", "bf16", "forward", "causal")
    q, k, v = (inputs[x] for x in "qkv")
    out, lse = module.launch_forward(q, k, v, True)
    for path, said in (("hopper", "the kernels for Hopper"), ("descriptors", "descriptors cannot")):
        with pytest.raises(NotImplementedError, match=said):
            module.launch_backward(torch.ones_like(q), q, k, v, out, lse, True, path=path)
