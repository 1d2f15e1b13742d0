"""Our calls of the libraries' state-space operators: stand-ins that follow their functions' documentation, for
those that need a GPU; Transformers' slow path as it is."""

from __future__ import annotations

import itertools
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from kernelmark.baselines import causal_conv1d, fla, mamba_ssm, transformers, vllm
from kernelmark.suite.measure.verify import deviation, flat
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators import (
    causal_conv1d as convolution,
)
from kernelmark.suite.operators import (
    causal_conv1d_update as convolution_step,
)
from kernelmark.suite.operators import (
    gated_delta_rule,
    gated_rms_norm,
    linear_attention,
    mamba3,
    selective_scan,
    selective_state_update,
    ssd,
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


def agrees(module, factory, axes, pass_="forward", dtype="fp32", **options):
    case = module.OPERATOR.case(axes, dtype, pass_, **options)
    bench = Workbench.build(module.OPERATOR, case, torch.device("cpu"), seed=1)
    call = factory(case)
    result = bench.comparable(bench.call(call)())
    deviation(result, bench.references, module.OPERATOR.tolerances[dtype])
    assert not bench.changed(flat(result))
    if hasattr(call, "conversion"):
        call.conversion(**bench.inputs)
        assert not bench.changed(flat(result))
    return call


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


# --- flash-linear-attention -----------------------------------------------------------------------------


def simple_gla(q, k, v, g=None, scale=None, initial_state=None, output_final_state=False, state_v_first=False):
    """o_t = scale · q_t S_t, S_t = exp(g_t) S_{t-1} + k_t v_tᵀ, token by token; states are S, or Sᵀ."""
    assert q.shape == k.shape
    assert v.shape[:3] == q.shape[:3] == g.shape
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    state = torch.zeros(*q.shape[:1], *q.shape[2:], v.shape[-1], dtype=torch.float32)
    if initial_state is not None:
        state = initial_state.float().mT if state_v_first else initial_state.float()
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].float().exp()
        state = state + k[:, t, :, :, None].float() * v[:, t, :, None].float()
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t].float(), state))
    state = state.mT if state_v_first else state
    return torch.stack(outputs, 1).to(v.dtype), state if output_final_state else None


def put_gla(put, hopper=False, above=True):
    put("fla.utils", IS_NVIDIA_HOPPER=hopper, TRITON_ABOVE_3_4_0=True, TRITON_ABOVE_3_7_1=above)
    put("fla.ops.simple_gla", chunk_simple_gla=simple_gla)
    put("fla.ops.gated_delta_rule", chunk_gated_delta_rule=delta_rule)


def delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    """Position after position; without a final state that is asked for, None."""
    assert scale == 1.0
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    rows = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        taken = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkd->bhd", k[:, t], state))
        state = state + k[:, t, :, :, None] * taken[:, :, None]
        rows.append(torch.einsum("bhk,bhkd->bhd", q[:, t], state))
    return torch.stack(rows, 1), state if output_final_state else None


@pytest.mark.parametrize(
    ("hopper", "above", "refused"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_gradients_that_the_library_gets_wrong_are_refused(put, hopper, above, refused):
    """Before it would autotune for long and then refuse them itself."""
    put_gla(put, hopper, above)
    for operator, name, axes in (
        (linear_attention, "fla", {"B": 1, "S": 4, "H": 1, "K": 2, "D": 2}),
        (gated_delta_rule, "fla", {"B": 1, "S": 4, "H": 1, "K": 2, "D": 2}),
        (ssd, "fla_simple_gla", {"B": 1, "S": 4, "H": 1, "P": 2, "N": 2, "G": 1}),
    ):
        factory = fla.IMPLEMENTATIONS[operator.OPERATOR.name][name]
        assert callable(factory(operator.OPERATOR.case(axes, "bf16", "forward")))
        backward = operator.OPERATOR.case(axes, "bf16", "backward")
        if refused:
            with pytest.raises(NotImplementedError, match=r"Triton 3\.4\.0 to 3\.7\.0"):
                factory(backward)
        else:
            assert callable(factory(backward))


@pytest.mark.parametrize("states", [False, True])
def test_linear_attention(put, states):
    put_gla(put)
    factory = fla.IMPLEMENTATIONS["linear_attention"]["fla"]
    agrees(linear_attention, factory, {"B": 2, "S": 9, "H": 2, "K": 5, "D": 3}, "forward_backward", states=states)


@pytest.mark.parametrize("states", [False, True])
def test_gated_delta_rule(put, states):
    put_gla(put)
    factory = fla.IMPLEMENTATIONS["gated_delta_rule"]["fla"]
    agrees(gated_delta_rule, factory, {"B": 2, "S": 9, "H": 2, "K": 5, "D": 3}, "forward_backward", states=states)


@pytest.mark.parametrize("G", [1, 4])
@pytest.mark.parametrize("states", [False, True])
def test_ssd_as_linear_attention(put, G, states):
    put_gla(put)
    factory = fla.IMPLEMENTATIONS["ssd"]["fla_simple_gla"]
    axes = {"B": 2, "S": 9, "H": 4, "P": 3, "N": 5, "G": G}
    call = agrees(ssd, factory, axes, "forward_backward", states=states)
    assert hasattr(call, "conversion") == (G == 1)
    with pytest.raises(NotImplementedError, match="packed"):
        factory(ssd.OPERATOR.case(axes, "fp32", "forward", packed=True))


@pytest.mark.parametrize("layout", ["bds", "bsd"])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("activation", ["silu", "none"])
def test_convolution_of_tokens(put, layout, initial, activation):
    def function(x, weight=None, bias=None, residual=None, initial_state=None, activation=None):
        assert x.shape == (2, 9, 3)
        state = torch.zeros(2, 3, 4, dtype=x.dtype) if initial_state is None else initial_state
        longer = torch.cat((state[..., 1:], x.transpose(1, 2)), -1)
        y = functional.conv1d(longer, weight[:, None], bias, groups=3).transpose(1, 2)
        return y if activation is None else functional.silu(y), None

    put("fla.modules.causal_conv1d", causal_conv1d=function)
    options = {"layout": layout, "activation": activation, "initial": initial}
    factory = fla.IMPLEMENTATIONS["causal_conv1d"]["fla"]
    call = agrees(convolution, factory, {"B": 2, "D": 3, "S": 9, "W": 4}, "forward_backward", **options)
    assert hasattr(call, "conversion") == initial


def test_convolution_step_of_tokens(put):
    def function(x, cache, residual=None, weight=None, bias=None, activation=None):
        cache.copy_(torch.cat((cache[..., 1:], x[..., None]), -1))
        y = (cache * weight).sum(-1) + bias
        return y if activation is None else functional.silu(y), cache

    put("fla.modules.causal_conv1d", causal_conv1d_update=function)
    factory = fla.IMPLEMENTATIONS["causal_conv1d_update"]["fla"]
    for activation in ("silu", "none"):
        agrees(convolution_step, factory, {"B": 2, "D": 3, "W": 4}, activation=activation)


@pytest.mark.parametrize("G", [1, 2])
def test_mamba3(put, G):
    def function(
        Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D=None, Z=None, Input_States=None, chunk_size=64,
        return_final_states=False, cu_seqlens=None,
    ):  # fmt: skip
        assert ADT.shape == DT.shape == Trap.shape == (2, 4, 9)
        assert Angles.shape == (2, 9, 4, 2)
        assert not Angles.stride(2)
        assert (Input_States, chunk_size, return_final_states, cu_seqlens) == (None, 64, False, None)
        steps = (t.transpose(1, 2).float() for t in (DT, ADT, Trap))
        x, B, C, z = (t.float() for t in (V, K, Q, Z))
        return mamba3.reference(x, B, C, *steps, Angles[:, :, 0].float(), K_bias, Q_bias, D, z).to(V.dtype)

    put("mamba_ssm.ops.triton.mamba3.mamba3_siso_combined", mamba3_siso_combined=function)
    factory = mamba_ssm.IMPLEMENTATIONS["mamba3"]["mamba_ssm"]
    axes = {"B": 2, "S": 9, "H": 4, "P": 3, "N": 6, "G": G, "A": 2}
    agrees(mamba3, factory, axes, mamba3.OPERATOR.passes[-1], "bf16")
    with pytest.raises(NotImplementedError, match="bf16"):
        factory(mamba3.OPERATOR.case(axes, "fp32", "forward"))
    with pytest.raises(NotImplementedError, match="even number"):
        factory(mamba3.OPERATOR.case(axes | {"A": 3}, "bf16", "forward"))


# --- vLLM -----------------------------------------------------------------------------------------------

OPS = "vllm.model_executor.layers.mamba.ops"


def test_serving_scan(monkeypatch):
    def function(u, delta, A, B, C, D, z, bias, softplus, starts, indices, initial, states, *rest):
        """Writes y over delta, and y · silu(z) over z; leaves the last states."""
        assert (starts, indices, initial) == (None, None, None)
        assert rest == (-1, 1024, None, None, None, None, None)
        assert states.shape == (*u.shape[:2], A.shape[1])
        assert B.shape == C.shape == (u.shape[0], 1, A.shape[1], u.shape[2])
        given = (u, delta, A, B[:, 0], C[:, 0], D)
        gated = selective_scan.reference(*given, z, bias, softplus)
        delta.copy_(gated / functional.silu(z))
        z.copy_(gated)

    monkeypatch.setattr(vllm, "_library", lambda name: SimpleNamespace(selective_scan_fwd=function))
    agrees(selective_scan, vllm.IMPLEMENTATIONS["selective_scan"]["vllm"], {"B": 2, "D": 3, "S": 9, "N": 4})


@pytest.mark.parametrize("form", ["head", "channel"])
def test_serving_state_update(put, form):
    def function(state, x, dt, A, B, C, D, dt_bias, z=None, dt_softplus=False, out=None):
        assert dt.shape == x.shape == out.shape == state.shape[:3]
        assert A.shape == state.shape[1:]
        assert (A.stride(-1) == A.stride(-2) == dt.stride(-1) == dt_bias.stride(-1) == 0) == (form == "head")
        given = (x, dt, A, B, C, D, torch.ones_like(x) if z is None else z, dt_bias, dt_softplus)
        y, after = selective_state_update.reference(state, *given)
        state.copy_(after)
        out.copy_(y if z is not None else y / functional.silu(torch.ones(())))

    put(f"{OPS}.mamba_ssm", selective_state_update=function)
    factory = vllm.IMPLEMENTATIONS["selective_state_update"]["vllm"]
    agrees(selective_state_update, factory, {"B": 2, "H": 4, "P": 3, "N": 5, "G": 2}, form=form)


@pytest.mark.parametrize("S", [9, 300, 512])
@pytest.mark.parametrize("states", [False, True])
def test_serving_ssd(put, S, states):
    def function(
        x, dt, A, B, C, chunk_size, cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx, out,
        D=None, dt_bias=None, initial_states=None, dt_softplus=False, state_dtype=None,
    ):  # fmt: skip
        """One sequence after the other; a chunk ends where one does, and at multiples of its size."""
        starts, ends = cu_seqlens.tolist(), cu_chunk_seqlens.tolist()
        assert ends == sorted({*starts, *range(0, x.shape[0], chunk_size)})
        assert [ends[i + 1] for i in last_chunk_indices.tolist()] == starts[1:]
        assert all(
            starts[i] <= a < b <= starts[i + 1]
            for i, (a, b) in zip(seq_idx, itertools.pairwise(ends), strict=True)
        )
        assert (state_dtype == torch.float32) == states
        results = []
        for i, (a, b) in enumerate(itertools.pairwise(starts)):
            part = [t[None, a:b] for t in (x, dt)], [t[None, a:b] for t in (B, C)]
            first = None if initial_states is None else initial_states[i : i + 1]
            y, state = ssd.reference(*part[0], A, *part[1], D, dt_bias, first, None, dt_softplus, True)
            out[a:b] = y[0]
            results.append(state)
        return torch.cat(results)

    put(f"{OPS}.ssd_combined", mamba_chunk_scan_combined_varlen=function)
    factory = vllm.IMPLEMENTATIONS["ssd"]["vllm"]
    axes = {"B": 3, "S": S, "H": 2, "P": 3, "N": 4, "G": 1}
    agrees(ssd, factory, axes, states=states)
    with pytest.raises(NotImplementedError, match="sequences in a row"):
        factory(ssd.OPERATOR.case(axes, "fp32", "forward", packed=True))
    with pytest.raises(NotImplementedError, match="no backward pass"):
        factory(ssd.OPERATOR.case(axes, "fp32", "backward"))


@pytest.mark.parametrize("layout", ["bds", "bsd"])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("activation", ["silu", "none"])
def test_serving_convolution(put, layout, initial, activation):
    def function(
        x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None,
        activation="silu", null_block_id=0, metadata=None,
    ):  # fmt: skip
        assert x.shape == (3, 18)
        assert x.stride(0) == 1
        assert metadata.nums_dict == {8: query_start_loc.diff().tolist()}
        out, starts = torch.empty_like(x), query_start_loc.tolist()
        for i, (a, b) in enumerate(itertools.pairwise(starts)):
            line = cache_indices[i]
            assert line != null_block_id
            before = conv_states[line] if has_initial_state[i] else torch.zeros(3, 3)
            longer = torch.cat((before, x[:, a:b]), 1)
            conv_states[line] = longer[:, -3:]
            out[:, a:b] = functional.conv1d(longer[None], weight[:, None], bias, groups=3)[0]
        return out if activation is None else functional.silu(out)

    def metadata(starts, *, device):
        return {8: starts.diff().tolist()}, None, None

    put(f"{OPS}.causal_conv1d", causal_conv1d_fn=function)
    put("vllm.v1.attention.backends.utils", compute_causal_conv1d_metadata=metadata)
    options = {"layout": layout, "activation": activation, "initial": initial}
    axes = {"B": 2, "D": 3, "S": 9, "W": 4}
    call = agrees(convolution, vllm.IMPLEMENTATIONS["causal_conv1d"]["vllm"], axes, **options)
    assert hasattr(call, "conversion") == (initial or layout == "bds")


@pytest.mark.parametrize("activation", ["silu", "none"])
def test_serving_convolution_step(put, activation):
    def function(
        x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, null_block_id=0, out=None
    ):  # fmt: skip
        assert conv_state.shape[-1] == weight.shape[1] - 1
        assert null_block_id not in conv_state_indices
        window = torch.cat((conv_state[conv_state_indices], x[..., None]), -1)
        conv_state[conv_state_indices] = window[..., 1:]
        y = (window * weight).sum(-1) + bias
        out.copy_(y if activation is None else functional.silu(y))
        return out

    put(f"{OPS}.causal_conv1d", causal_conv1d_update=function)
    factory = vllm.IMPLEMENTATIONS["causal_conv1d_update"]["vllm"]
    case = convolution_step.OPERATOR.case({"B": 2, "D": 3, "W": 4}, "fp32", "forward", activation=activation)
    bench = Workbench.build(convolution_step.OPERATOR, case, torch.device("cpu"), seed=1)
    result = bench.comparable(bench.call(factory(case))())
    deviation(result, bench.references, convolution_step.OPERATOR.tolerances["fp32"])


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("order", ["gate_first", "norm_first"])
def test_serving_gated_norm(put, order, G):
    def function(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
        order = "norm_first" if norm_before_gate else "gate_first"
        return gated_rms_norm.reference(x, z, weight, eps, group_size or x.shape[-1], order)

    put(f"{OPS}.layernorm_gated", rms_norm_gated=function)
    factory = vllm.IMPLEMENTATIONS["gated_rms_norm"]["vllm"]
    agrees(gated_rms_norm, factory, {"B": 2, "S": 3, "D": 12, "G": G}, order=order)


# --- Transformers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("states", [False, True])
def test_slow_ssd(dtype, states):
    factory = transformers.IMPLEMENTATIONS["ssd"]["transformers"]
    axes = {"B": 2, "S": 300, "H": 4, "P": 8, "N": 16, "G": 2}
    agrees(ssd, factory, axes, dtype=dtype, states=states)
    if dtype == "fp32":  # steps rounded to bf16 leave the gradient of A beside its tolerance at some sizes
        agrees(ssd, factory, axes, "backward", states=states)
    with pytest.raises(NotImplementedError, match="packed"):
        factory(ssd.OPERATOR.case(axes, dtype, "forward", packed=True))


def test_slow_scan():
    factory = transformers.IMPLEMENTATIONS["selective_scan"]["transformers"]
    axes = {"B": 2, "D": 3, "S": 9, "N": 4}
    agrees(selective_scan, factory, axes, "forward_backward")
    with pytest.raises(NotImplementedError, match="8192"):
        factory(selective_scan.OPERATOR.case({**axes, "S": 9000}, "fp32", "forward"))


@pytest.mark.parametrize(("form", "axes"), [("head", {"H": 4, "G": 2}), ("channel", {"H": 1, "G": 1})])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_slow_state_update(form, axes, dtype):
    factory = transformers.IMPLEMENTATIONS["selective_state_update"]["transformers"]
    agrees(selective_state_update, factory, {"B": 2, "P": 3, "N": 5} | axes, dtype=dtype, form=form)
    if form == "channel":
        grouped = {"B": 2, "P": 3, "N": 5, "H": 3, "G": 3}
        with pytest.raises(NotImplementedError, match="one B and C"):
            factory(selective_state_update.OPERATOR.case(grouped, dtype, "forward", form=form))


@pytest.mark.parametrize("G", [1, 3])
def test_slow_gated_norm(G):
    factory = transformers.IMPLEMENTATIONS["gated_rms_norm"]["transformers"]
    axes = {"B": 2, "S": 3, "D": 12, "G": G}
    agrees(gated_rms_norm, factory, axes, "forward_backward", order="gate_first")
    with pytest.raises(NotImplementedError, match="before the norm only"):
        factory(gated_rms_norm.OPERATOR.case(axes, "fp32", "forward", order="norm_first"))


def test_the_slow_path_gives_way_to_nothing(put, monkeypatch):
    """With mamba-ssm installed, Transformers' own functions call that; our rows under its name do not."""
    from transformers.models.mamba2 import modeling_mamba2

    def other(*arguments, **named):
        raise AssertionError("another library's function")

    found = modeling_mamba2.mamba2_chunk_scan

    def gives_way(*arguments, **named):
        return other(*arguments, **named)

    gives_way.__wrapped__ = found.__wrapped__
    monkeypatch.setattr(modeling_mamba2, "mamba2_chunk_scan", gives_way)
    factory = transformers.IMPLEMENTATIONS["ssd"]["transformers"]
    agrees(ssd, factory, {"B": 1, "S": 9, "H": 2, "P": 4, "N": 4, "G": 1})


def test_absent():
    if any(name in sys.modules for name in ("mamba_ssm", "causal_conv1d", "causal_conv1d_cuda")):
        pytest.skip("one of the libraries is here")
    case = convolution.OPERATOR.case({"B": 2, "D": 3, "S": 9, "W": 4}, "fp32", "forward")
    for factory in causal_conv1d.IMPLEMENTATIONS["causal_conv1d"].values():
        with pytest.raises(ImportError):
            factory(case)
