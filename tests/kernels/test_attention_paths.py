"""Which kernels a Hopper GPU runs for the calls that models make: plan `shapes`, on tensors without memory."""

from __future__ import annotations

import pytest
import torch
from kernelmark.kernels.attention import _dispatch as module
from kernelmark.kernels.attention import _tiling
from kernelmark.suite import plan as plans
from kernelmark.suite.catalog import Catalog
from kernelmark.suite.operator import torch_dtype

OPERATORS = ["attention", "attention_window", "attention_mla"]
CASES = plans.load("shapes", Catalog.default(), "cuda", OPERATORS).cases


def stored(case, heads, length, D):
    """(B, heads, length, D) as the case has it, of a projection of all heads where it is packed."""
    B, storage = case.axes["B"], case.options["storage"]
    dtype = torch_dtype(case.dtype)
    if storage == "bhsd":
        return torch.empty(B, heads, length, D, dtype=dtype, device="meta")
    of = case.axes["H"] + 2 * case.axes["Hkv"] if storage == "packed" else heads
    return torch.empty(B, length, of, D, dtype=dtype, device="meta")[:, :, :heads].transpose(1, 2)


@pytest.fixture
def paths(monkeypatch):
    """What ran, by its module."""
    for each in (module, _tiling):
        monkeypatch.setattr(each, "capability", lambda device: (9, 0))
    module.hopper_modules.cache_clear()
    hopper = module.hopper_modules(torch.device("meta"))
    found = []
    for name, each, function in (
        ("hopper", hopper.forward, "forward"),
        ("paired", hopper.paired, "forward"),
        ("hopper", hopper.backward, "backward"),
        ("two kernels", hopper.deterministic, "backward"),
        ("two kernels", hopper.wide, "backward"),
    ):
        monkeypatch.setattr(each, function, lambda *_, name=name, **more: found.append(name))
    monkeypatch.setattr(hopper.deterministic, "statistics", lambda out, grad, lse: (lse, lse))
    monkeypatch.setattr(module, "planned_gradient_in_sinks", lambda *_: lambda *_: None)
    for function in ("planned_forward", "planned_backward"):
        monkeypatch.setattr(module, function, lambda *_: lambda *_: found.append("portable"))
    yield found
    module.hopper_modules.cache_clear()


@pytest.mark.parametrize("case", CASES, ids=lambda x: f"{x.operator}-{x.name}")
def test_models_calls_have_kernels_of_their_own(paths, case):
    """Sinks, caps, windows, layouts and values of other columns; the portable ones have short sequences alone."""
    axes, causal = case.axes, case.options["mask"] == "causal"
    S, Sk, heads = axes["S"], axes.get("Sk") or axes["S"], axes.get("Hkv", axes["H"])
    D, Dv = axes["D"], axes.get("Dv", axes["D"])
    q, k, v = stored(case, axes["H"], S, D), stored(case, heads, Sk, D), stored(case, heads, Sk, Dv)
    out = stored(case, axes["H"], S, Dv)
    sinks = torch.empty(axes["H"], dtype=q.dtype, device="meta") if case.options.get("sinks") else None
    given, cap = (causal, axes.get("W", 0)), float(case.options.get("cap", 0))
    if case.pass_ == "forward":
        module.launch_forward(q, k, v, *given, sinks, cap)
    else:
        lse = torch.empty(q.shape[:3], device="meta")
        module.launch_backward(out, q, k, v, out, lse, *given, None, sinks, cap)
    short = case.pass_ == "forward" and max(S, Sk) <= module.SHORT[Dv > 128]
    if case.pass_ == "forward":
        own = "paired" if D == Dv > 128 else "hopper"
    else:
        own = "two kernels" if D > 128 or Dv != D else "hopper"
    assert paths == ["portable" if short else own]
