"""The operator of attention in E4M3: its cases, its inputs, its costs, what its tolerance passes and what not."""

from __future__ import annotations

import pytest
import torch
from kernelmark.baselines.torch import IMPLEMENTATIONS
from kernelmark.suite.measure.verify import Incorrect, deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators import attention_fp8 as module
from kernelmark.suite.operators.attention_fp8 import (
    OPERATOR,
    attended,
    evened,
    original,
    quantized,
)
from torch.nn.functional import scaled_dot_product_attention

AXES = {"B": 1, "H": 2, "Hkv": 2, "S": 512, "D": 64}
CPU = torch.device("cpu")
TOLERANCE = OPERATOR.tolerances["e4m3"]


def names(plan):
    return [case.name for grid in OPERATOR.plans[plan] for case in OPERATOR.expand(grid)]


def test_standard_has_exactly_these_cases():
    sizes = ((8, 2048), (4, 4096), (2, 8192), (1, 16384))
    models = ((32, 64), (16, 128))
    expected = {
        f"B{B}-H{H}-Hkv{H}-S{S}-D{D}-{mask}-rowmajor-e4m3-forward"
        for B, S in sizes
        for H, D in models
        for mask in ("causal", "full")
    }
    for H, D in models:
        expected |= {f"B2-H{H}-Hkv{H}-S8192-D{D}-{mask}-colmajor-e4m3-forward" for mask in ("causal", "full")}
        expected.add(f"B2-H{H}-Hkv{H // 4}-S8192-D{D}-causal-rowmajor-e4m3-forward")
    assert sorted(names("standard")) == sorted(expected)
    assert not set(names("full")) & expected
    assert names("quick") == ["B2-H16-Hkv16-S2048-D128-causal-rowmajor-e4m3-forward"]
    assert names("quick_cpu") == ["B1-H4-Hkv4-S256-D64-causal-rowmajor-e4m3-forward"]


def test_costs():
    axes = {"B": 2, "H": 16, "Hkv": 4, "S": 1024, "D": 128}
    full = OPERATOR.case(axes, "e4m3", "forward", mask="full")
    causal = OPERATOR.case(axes, "e4m3", "forward", mask="causal")
    assert full.flops == 4 * 2 * 16 * 1024 * 1024 * 128
    assert causal.flops == full.flops // 2
    assert full.bytes == causal.bytes == 2 * 1024 * 128 * (16 + 4 + 4 + 2 * 16) + 4 * 2 * (16 + 4 + 4)
    assert full.tokens == 2048


def laid(mask="causal", axes=None, **options):
    case = OPERATOR.case(AXES | (axes or {}), "e4m3", "forward", mask=mask, **options)
    return Workbench.build(OPERATOR, case, CPU, seed=3)


def passes(bench, call):
    return deviation(bench.comparable(bench.call(call)()), bench.references, TOLERANCE)


@pytest.mark.parametrize("v_layout", ["rowmajor", "colmajor"])
def test_inputs_are_the_original_s(v_layout):
    case = OPERATOR.case(AXES | {"Hkv": 1}, "e4m3", "forward", v_layout=v_layout)
    given = OPERATOR.inputs(case, CPU, torch.Generator().manual_seed(1))
    before = original(case, CPU, torch.Generator().manual_seed(1))
    for name, x in before.items():
        assert given[name].dtype == torch.float8_e4m3fn
        scale = given[f"{name}_scale"]
        assert scale.shape == x.shape[:2]
        assert float(given[name].float().abs().amax()) == 448
        back = given[name].float() * scale[..., None, None]
        assert float((back - x).norm() / x.norm()) < 0.03
    assert given["v"].stride(2 if v_layout == "colmajor" else 3) == 1
    assert given["q_scale"][0, 0] == given["q_scale"][0, 1]


def test_reference_agrees_with_torch():
    for mask in ("causal", "full"):
        case = OPERATOR.case(AXES | {"B": 2, "H": 4, "S": 100}, "e4m3", "forward", mask=mask)
        given = OPERATOR.inputs(case, CPU, torch.Generator().manual_seed(1))
        wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        q, k, v = (wide[x] * wide[f"{x}_scale"][..., None, None] for x in "qkv")
        want = scaled_dot_product_attention(q, k, v, is_causal=mask == "causal", enable_gqa=True)
        torch.testing.assert_close(OPERATOR.reference(**wide), evened(want, mask))


def test_reference_in_chunks(monkeypatch):
    q, k, v = (torch.randn(2, heads, 30, 8, dtype=torch.float64) for heads in (4, 2, 2))
    want = attended(q, k, v, "causal")
    monkeypatch.setattr(module, "SCORES", 1)
    torch.testing.assert_close(attended(q, k, v, "causal"), want)


def test_evened_rows_are_of_one_size():
    q, k, v = (torch.randn(1, 8, 600, 64, generator=torch.Generator().manual_seed(x)) for x in range(3))
    out = evened(attended(q * 0.1, k, v, "causal"), "causal")
    sizes = out.square().mean((0, 1, 3)).sqrt()
    assert float(sizes.amax() / sizes.amin()) < 1.6
    assert evened(out, "full") is out


def emulated(weights=torch.float8_e4m3fn, block=128, offset=256.0, truncated=False):
    """Attention as a kernel computes it: blocks of keys, each row's maximum so far, rounded weights."""

    def call(q, k, v, q_scale, k_scale, v_scale, mask):
        S, D = q.shape[2:]
        groups = q.shape[1] // k.shape[1]
        k, v = (x.float().repeat_interleave(groups, 1) for x in (k, v))
        k_scale, v_scale = (x.repeat_interleave(groups, 1) for x in (k_scale, v_scale))
        scores = q.float() @ k.mT * (q_scale * k_scale)[..., None, None] * D**-0.5
        if mask == "causal":
            scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
        total, weight, highest = torch.zeros_like(v), 0.0, torch.full_like(scores[..., :1], -1e30)
        for start in range(0, S, block):
            part = scores[..., start : start + block]
            raised = torch.maximum(highest, part.amax(-1, keepdim=True))
            p = (part - raised).exp() * offset
            shrink = (highest - raised).exp()
            weight = weight * shrink + p.sum(-1, keepdim=True)
            rounded = p.to(weights)
            if truncated:
                rounded = (rounded.view(torch.uint8) - (rounded.float() > p).to(torch.uint8)).view(weights)
            total = total * shrink + rounded.float() @ v[..., start : start + block, :]
            highest = raised
        return (total / weight * v_scale[..., None, None]).bfloat16()

    return call


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("S", [512, 2048])
def test_tolerance_passes_rounded_weights(mask, S):
    """About 0.026 whatever S is; with weights of at most 1 in place of 2⁸ it is little more on these inputs."""
    bench = laid(mask, {"S": S})
    error = passes(bench, emulated())
    assert 0.018 < error < 0.03
    assert passes(bench, emulated(offset=1.0)) > error


@pytest.mark.parametrize("name", ["torch"])
@pytest.mark.parametrize("axes", [{}, {"Hkv": 1, "S": 100}])
def test_tolerance_passes_bf16(name, axes):
    bench = laid(axes=axes)
    assert passes(bench, IMPLEMENTATIONS["attention_fp8"][name](bench.case)) < 8e-3
    assert not bench.changed()


def forgotten(name):
    def call(**given):
        given[f"{name}_scale"] = torch.ones_like(given[f"{name}_scale"]) * given[f"{name}_scale"][:, :1]
        return emulated()(**given)

    return call


def shifted(mask, **given):
    """The mask one key too far."""
    scores = given["q"].float() @ given["k"].float().mT * (given["q_scale"] * given["k_scale"])[..., None, None]
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(2)
    p = (scores * 64**-0.5).masked_fill(hidden, float("-inf")).softmax(-1)
    return (p @ given["v"].float() * given["v_scale"][..., None, None]).bfloat16()


def no_last_block(**given):
    """The last 16 queries forget the last 16 keys."""
    out = emulated()(**given)
    wide = {x: given[x].float() * given[f"{x}_scale"][..., None, None] for x in "qkv"}
    late = scaled_dot_product_attention(wide["q"][:, :, -16:], wide["k"][:, :, :-16], wide["v"][:, :, :-16])
    out[:, :, -16:] = late.bfloat16()
    return out


def one_late_element(**given):
    """Of three times its row's size, where a row is a twentieth of the first one's."""
    out = emulated()(**given)
    out[0, 0, 400, 5] += 3 * out[0, 0, 400].float().square().mean().sqrt()
    return out


@pytest.mark.parametrize(
    "wrong",
    [
        emulated(torch.float8_e5m2),
        emulated(truncated=True),
        shifted,
        no_last_block,
        one_late_element,
        lambda **given: emulated()(**given).half(),
        lambda **given: emulated()(**given)[:, :, :-1],
    ],
    ids=["e5m2", "truncated", "shifted", "no last block", "late element", "dtype", "shape"],
)
def test_tolerance_fails_what_is_broken(wrong):
    with pytest.raises(Incorrect):
        passes(laid(), wrong)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_tolerance_fails_another_head_s_scale(name):
    bench = laid()
    for x in "qkv":  # as drawn, heads' scales are alike
        scale = bench.inputs[f"{x}_scale"]
        scale[:, 1] *= 1.3
    raised = {key: x.float() if isinstance(x, torch.Tensor) else x for key, x in bench.inputs.items()}
    bench.references = [OPERATOR.reference(**raised)]
    passes(bench, emulated())
    with pytest.raises(Incorrect):
        passes(bench, forgotten(name))


def test_decoys_give_another_answer():
    """Scales are doubled: 8-bit numbers themselves have no product in PyTorch."""
    bench = laid()
    bench.lay(bench.decoys)
    with pytest.raises(Incorrect):
        passes(bench, emulated())
    bench.lay(bench.values)
    passes(bench, emulated())


def quantization_error(output: torch.Tensor, originals: dict[str, torch.Tensor], mask: str) -> float:
    """‖output − exact‖ / ‖exact‖ with exact the attention of `original`'s numbers in fp32, rows evened in both."""
    q, k, v = (originals[x].float() for x in "qkv")
    exact = evened(attended(q, k, v, mask), mask)
    return float(torch.linalg.vector_norm(evened(output.float(), mask) - exact) / torch.linalg.vector_norm(exact))


def test_quantization_error_is_of_inputs_and_weights():
    case = OPERATOR.case(AXES, "e4m3", "forward")
    given = OPERATOR.inputs(case, CPU, torch.Generator().manual_seed(5))
    before = original(case, CPU, torch.Generator().manual_seed(5))
    exact = attended(*(before[x].float() for x in "qkv"), "causal")
    assert quantization_error(exact, before, "causal") == 0
    wide = (given[x].float() * given[f"{x}_scale"][..., None, None] for x in "qkv")
    inputs_alone = quantization_error(attended(*wide, "causal"), before, "causal")
    both = quantization_error(emulated()(**given), before, "causal")
    assert 0.02 < inputs_alone < both < 0.08


def test_quantized_groups_share_a_scale():
    x = torch.randn(2, 4, 10, 8) * torch.tensor([1.0, 2, 3, 4])[:, None, None]
    x8, scale = quantized(x, 2)
    assert torch.equal(scale[:, 0], scale[:, 1])
    assert not torch.equal(scale[:, 1], scale[:, 2])
    torch.testing.assert_close(x8.float() * scale[..., None, None], x, rtol=2**-4, atol=1e-3)
