"""Our calls of mamba-ssm and causal-conv1d, against stand-ins that follow their functions' documentation."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from kernelmark.baselines import causal_conv1d, mamba_ssm
from kernelmark.suite.measure.verify import deviation, flat
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators import (
    causal_conv1d as convolution,
)
from kernelmark.suite.operators import (
    causal_conv1d_update as convolution_step,
)
from kernelmark.suite.operators import (
    gated_rms_norm,
    selective_scan,
    selective_state_update,
)
from torch.nn import functional


@pytest.fixture
def put(monkeypatch):
    """Puts a module of functions where the library's would be."""

    def put(name, **functions):
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:k]))
            module.__path__ = []
            module.__spec__ = ModuleSpec(module.__name__, None)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module).update(functions)

    return put


def agrees(module, factory, axes, pass_="forward", **options):
    case = module.OPERATOR.case(axes, "fp32", pass_, **options)
    bench = Workbench.build(module.OPERATOR, case, torch.device("cpu"), seed=1)
    result = bench.comparable(bench.call(factory(case))())
    deviation(result, bench.references, module.OPERATOR.tolerances["fp32"])
    assert not bench.changed(flat(result))


@pytest.mark.parametrize("form", ["head", "channel"])
def test_state_update(put, form):
    def function(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
        assert dt.shape == x.shape == state.shape[:3]
        assert A.shape == state.shape[1:]
        assert (A.stride(-1) == A.stride(-2) == dt.stride(-1) == dt_bias.stride(-1) == 0) == (form == "head")
        step = functional.softplus(dt + dt_bias) if dt_softplus else dt + dt_bias
        wide = [t.repeat_interleave(state.shape[1] // t.shape[1], 1) for t in (B, C)]
        state.copy_(state * (step[..., None] * A).exp() + (step * x)[..., None] * wide[0][:, :, None])
        y = (state * wide[1][:, :, None]).sum(-1) + D * x
        return y if z is None else y * functional.silu(z)

    put("mamba_ssm.ops.triton.selective_state_update", selective_state_update=function)
    axes = {"B": 2, "H": 4, "P": 3, "N": 5, "G": 2}
    agrees(
        selective_state_update, mamba_ssm.IMPLEMENTATIONS["selective_state_update"]["mamba_ssm"], axes, form=form
    )


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("order", ["gate_first", "norm_first"])
def test_gated_norm(put, order, G):
    def function(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
        assert bias is None
        assert (group_size is None) == (G == 1)
        size = group_size or x.shape[-1]
        h = x if norm_before_gate else x * functional.silu(z)
        y = functional.rms_norm(h.unflatten(-1, (-1, size)), (size,), None, eps).flatten(-2) * weight
        return y * functional.silu(z) if norm_before_gate else y

    put("mamba_ssm.ops.triton.layernorm_gated", rmsnorm_fn=function)
    factory = mamba_ssm.IMPLEMENTATIONS["gated_rms_norm"]["mamba_ssm"]
    agrees(gated_rms_norm, factory, {"B": 2, "S": 3, "D": 12, "G": G}, "forward_backward", order=order)


def test_scan(put):
    def function(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
        return selective_scan.reference(u, delta, A, B, C, D, z, delta_bias, delta_softplus)

    put("mamba_ssm.ops.selective_scan_interface", selective_scan_fn=function, selective_scan_ref=function)
    axes = {"B": 2, "D": 3, "S": 9, "N": 4}
    factories = mamba_ssm.IMPLEMENTATIONS["selective_scan"]
    agrees(selective_scan, factories["mamba_ssm_reference"], axes)
    assert "selective_scan_cuda" not in sys.modules
    case = selective_scan.OPERATOR.case(axes, "fp32", "forward")
    with pytest.raises(ImportError, match="selective_scan_cuda"):
        factories["mamba_ssm"](case)
    put("selective_scan_cuda")
    agrees(selective_scan, factories["mamba_ssm"], axes)
    with pytest.raises(NotImplementedError, match="8192"):
        factories["mamba_ssm_reference"](selective_scan.OPERATOR.case({**axes, "S": 9000}, "fp32", "forward"))


@pytest.mark.parametrize("layout", ["bds", "bsd"])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("activation", ["silu", "none"])
def test_convolution(put, layout, initial, activation):
    def function(x, weight, bias=None, initial_states=None, activation=None):
        assert x.shape == (2, 3, 9)
        assert x.stride(1 if layout == "bsd" else 2) == 1
        longer = functional.pad(x, (3, 0)) if initial_states is None else torch.cat((initial_states, x), -1)
        y = functional.conv1d(longer, weight[:, None], bias, groups=3)
        return y if activation is None else functional.silu(y)

    put("causal_conv1d.causal_conv1d_interface", causal_conv1d_fn=function, causal_conv1d_ref=function)
    factories = causal_conv1d.IMPLEMENTATIONS["causal_conv1d"]
    axes, options = (
        {"B": 2, "D": 3, "S": 9, "W": 4},
        {"layout": layout, "activation": activation, "initial": initial},
    )
    agrees(convolution, factories["causal_conv1d_reference"], axes, "forward_backward", **options)
    assert "causal_conv1d_cuda" not in sys.modules
    put("causal_conv1d_cuda")
    if initial and layout == "bds":
        with pytest.raises(NotImplementedError, match="initial state"):
            agrees(convolution, factories["causal_conv1d"], axes, **options)
    else:
        agrees(convolution, factories["causal_conv1d"], axes, "forward_backward", **options)


@pytest.mark.parametrize("activation", ["silu", "none"])
def test_convolution_step(put, activation):
    def function(x, conv_state, weight, bias=None, activation=None):
        conv_state.copy_(torch.cat((conv_state[..., 1:], x[..., None]), -1))
        y = (conv_state * weight).sum(-1) + bias
        return y if activation is None else functional.silu(y)

    put("causal_conv1d.causal_conv1d_interface", causal_conv1d_update=function, causal_conv1d_update_ref=function)
    put("causal_conv1d_cuda")
    for factory in causal_conv1d.IMPLEMENTATIONS["causal_conv1d_update"].values():
        agrees(convolution_step, factory, {"B": 2, "D": 3, "W": 4}, activation=activation)


def test_absent():
    if any(name in sys.modules for name in ("mamba_ssm", "causal_conv1d", "causal_conv1d_cuda")):
        pytest.skip("one of the libraries is here")
    case = convolution.OPERATOR.case({"B": 2, "D": 3, "S": 9, "W": 4}, "fp32", "forward")
    for factory in causal_conv1d.IMPLEMENTATIONS["causal_conv1d"].values():
        with pytest.raises(ImportError):
            factory(case)
