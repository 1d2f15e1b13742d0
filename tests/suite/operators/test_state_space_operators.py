"""The operators of state-space models: plans, cost, references, and PyTorch beside them."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from kernelmark.baselines.torch import IMPLEMENTATIONS as EAGER
from kernelmark.baselines.torch_compile import IMPLEMENTATIONS as COMPILED
from kernelmark.suite.measure.verify import deviation, flat
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operator import BYTES

CPU = torch.device("cpu")

SMALL = {
    "causal_conv1d": {"B": 2, "D": 3, "S": 9, "W": 4},
    "causal_conv1d_update": {"B": 2, "D": 3, "W": 4},
    "gated_rms_norm": {"B": 2, "S": 3, "D": 12, "G": 2},
    "selective_scan": {"B": 2, "D": 3, "S": 9, "N": 4},
    "selective_state_update": {"B": 2, "H": 4, "P": 3, "N": 5, "G": 2},
}

STANDARD = {
    "causal_conv1d": [
        *(
            f"B8-D4096-S2048-W4-{layout}-silu-bf16-{p}"
            for layout in ("bds", "bsd")
            for p in ("forward", "backward")
        ),
        *(f"B1-D5376-S32768-W4-bsd-silu-bf16-{p}" for p in ("forward", "backward")),
    ],
    "causal_conv1d_update": [f"B{B}-D8192-W4-silu-bf16-forward" for B in (32, 256, 4096)],
    "gated_rms_norm": [
        *(
            f"B8-S2048-D5120-G1-{order}-bf16-{p}"
            for order in ("gate_first", "norm_first")
            for p in ("forward", "backward")
        ),
        *(f"B8-S2048-D8192-G8-gate_first-bf16-{p}" for p in ("forward", "backward")),
    ],
    "selective_scan": [
        *(f"B{B}-D4096-S{S}-N16-bf16-forward" for B, S in ((8, 2048), (2, 8192), (1, 32768), (1, 131072))),
        *(f"B{B}-D4096-S{S}-N16-bf16-backward" for B, S in ((8, 2048), (1, 32768))),
    ],
    "selective_state_update": [
        *(f"B{B}-H80-P64-N128-G1-head-fp32-bf16-forward" for B in (1, 32, 256)),
        "B256-H80-P64-N128-G1-head-same-bf16-forward",
        *(f"B{B}-H1-P8192-N16-G1-channel-fp32-bf16-forward" for B in (32, 1024)),
    ],
}


def operator(name):
    return importlib.import_module(f"kernelmark.suite.operators.{name}").OPERATOR


def cases(name, plan):
    return [case for grid in operator(name).plans[plan] for case in operator(name).expand(grid)]


def variants(name):
    chosen = [{}]
    for option, values in operator(name).options.items():
        chosen = [{**given, option: value} for given in chosen for value in values]
    return chosen


@pytest.mark.parametrize("name", SMALL)
def test_plans(name):
    assert sorted(case.name for case in cases(name, "standard")) == sorted(STANDARD[name])
    assert len(cases(name, "quick")) in (1, 2)
    assert all(case.dtype == "fp32" and case.bytes < 64e6 for case in cases(name, "quick_cpu"))
    assert cases(name, "full")


@pytest.mark.parametrize("name", SMALL)
def test_cost(name):
    """Bytes are at least one read and one write, and grow with the sizes; nothing multiplies matrices."""
    small, chosen = SMALL[name], operator(name)
    large = {axis: size if axis == "W" else size * 2 for axis, size in small.items()}
    for pass_ in chosen.passes:
        case = chosen.case(small, "bf16", pass_)
        assert case.bytes < chosen.case(large, "bf16", pass_).bytes
        assert case.bytes < chosen.case(small, "fp32", pass_).bytes
        assert case.flops == 0
        assert case.bytes >= 2 * case.tokens * BYTES["bf16"]


def test_cost_of_a_state():
    """The state is read and written once: 671 MB of 128 sequences of Mamba-2's largest."""
    case = operator("selective_state_update").case(
        {"B": 128, "H": 80, "P": 64, "N": 128, "G": 1}, "bf16", "forward"
    )
    state = 2 * 4 * 128 * 80 * 64 * 128
    assert state < case.bytes < 1.02 * state


@pytest.mark.parametrize("pass_", ["forward", "backward", "forward_backward"])
@pytest.mark.parametrize("name", SMALL)
def test_eager_is_right(name, pass_):
    """PyTorch's answer on the workbench is the reference's, for every option and dtype, and again after that."""
    chosen = operator(name)
    if pass_ not in chosen.passes:
        assert not chosen.gradients
        return
    for options in variants(name):
        for dtype in chosen.dtypes:
            case = chosen.case(SMALL[name], dtype, pass_, **options)
            bench = Workbench.build(chosen, case, CPU, seed=1)
            call = bench.call(EAGER[name]["torch"](case))
            for _ in range(2):
                bench.lay(bench.values)
                result = bench.comparable(call())
                deviation(result, bench.references, chosen.tolerances[dtype])
            assert not bench.changed(flat(result))


@pytest.mark.parametrize("name", ["causal_conv1d_update", "selective_state_update"])
def test_the_state_is_the_result(name):
    """A call that leaves the state as it was is wrong."""
    chosen = operator(name)
    case = chosen.case(SMALL[name], "fp32", "forward")
    bench = Workbench.build(chosen, case, CPU, seed=1)
    state = bench.inputs[chosen.in_place[0]]
    before = state.clone()
    bench.call(EAGER[name]["torch"](case))()
    assert not torch.equal(state, before)
    torch.testing.assert_close(state.double(), bench.references[1], rtol=1e-5, atol=1e-5)


def token_by_token(u, delta, A, B, C, D, z, delta_bias, delta_softplus):
    """The selective scan as it is written."""
    h = torch.zeros(*u.shape[:2], A.shape[1], dtype=u.dtype)
    outputs = []
    for t in range(u.shape[2]):
        step = torch.log1p(torch.exp(delta[..., t] + delta_bias))
        h = torch.exp(step[..., None] * A) * h + (step * u[..., t])[..., None] * B[:, None, :, t]
        outputs.append((h * C[:, None, :, t]).sum(-1) + D * u[..., t])
    return torch.stack(outputs, -1) * z * torch.sigmoid(z)


@pytest.mark.parametrize("tokens", [1, 10, 100])
@pytest.mark.parametrize("S", [1, 2, 9, 23, 47])
def test_reference_of_the_scan_is_the_recurrence(monkeypatch, S, tokens):
    """However many tokens the reference holds at a time, and whether or not its runs are full; with gradients."""
    module = importlib.import_module("kernelmark.suite.operators.selective_scan")
    monkeypatch.setattr(module, "HELD", tokens * 2 * 3 * 4)
    case = module.OPERATOR.case(SMALL["selective_scan"] | {"S": S}, "fp32", "forward")
    inputs = module.OPERATOR.inputs(case, CPU, torch.Generator().manual_seed(1))
    inputs["delta"][..., S // 2] -= 40.0  # a token that all but leaves the state
    inputs["delta"][..., S // 3] += 40.0  # and one that all but forgets it
    inputs = {k: x.double().requires_grad_() if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}
    leaves = [x for x in inputs.values() if isinstance(x, torch.Tensor)]
    got, want = module.reference(**inputs), token_by_token(**inputs)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    gradient = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves, gradient), torch.autograd.grad(want, leaves, gradient),
        rtol=1e-10, atol=1e-11,
    )  # fmt: skip


def test_reference_of_the_scan_of_nothing():
    chosen = operator("selective_scan")
    case = chosen.case(SMALL["selective_scan"] | {"S": 0}, "fp32", "forward")
    assert chosen.reference(**chosen.inputs(case, CPU, torch.Generator().manual_seed(1))).shape == (2, 3, 0)


def test_loops_over_many_tokens_are_refused():
    chosen = operator("selective_scan")
    with pytest.raises(NotImplementedError, match="8192"):
        EAGER["selective_scan"]["torch"](chosen.case({"B": 1, "D": 1, "S": 8193, "N": 1}, "fp32", "forward"))
    with pytest.raises(NotImplementedError, match="256"):
        COMPILED["selective_scan"]["torch_compile"](
            chosen.case({"B": 1, "D": 1, "S": 257, "N": 1}, "fp32", "forward")
        )


@pytest.mark.parametrize("name", SMALL)
def test_cpu(name):
    """Our version for a CPU, as it is written: Inductor takes long for it."""
    with warnings.catch_warnings():
        # Importing Inductor warns of torch.jit, which it still uses itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        kernel = getattr(importlib.import_module(f"kernelmark.kernels.cpu.{name}"), name)
    chosen = operator(name)
    with torch.compiler.set_stance("force_eager"):
        for options in variants(name):
            for dtype in chosen.dtypes:
                case = chosen.case(SMALL[name], dtype, "forward", **options)
                bench = Workbench.build(chosen, case, CPU, seed=1)
                deviation(bench.comparable(bench.call(kernel)()), bench.references, chosen.tolerances[dtype])
