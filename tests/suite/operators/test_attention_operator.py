"""The attention operator: its cases, its reference, its tolerance."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernelmark.suite.measure.verify import Incorrect, deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators import _attention as shared
from kernelmark.suite.operators.attention import OPERATOR, reference
from torch.nn.functional import scaled_dot_product_attention

AXES = {"B": 1, "H": 2, "Hkv": 2, "S": 256, "D": 64}


def names(plan):
    return [case.name for grid in OPERATOR.plans[plan] for case in OPERATOR.expand(grid)]


def naive(q, k, v, mask):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    if mask == "causal":
        scores = scores + torch.full(scores.shape[-2:], float("-inf"), dtype=q.dtype).triu(1)
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, -1), v)


def test_standard_has_exactly_these_cases():
    masks = ("causal", "full")
    expected = {f"B1-H1-Hkv1-S{S}-D64-{m}-bf16-forward" for S in (32, 64, 128, 256, 512) for m in masks}
    expected |= {f"B2-H4-Hkv{Hkv}-S128-D64-{m}-bf16-forward" for Hkv in (4, 1) for m in masks}
    sizes = ((8, 2048), (4, 4096), (2, 8192), (1, 16384))
    for (B, S), (H, D), m in itertools.product(sizes, ((32, 64), (16, 128)), masks):
        expected |= {f"B{B}-H{H}-Hkv{Hkv}-S{S}-D{D}-{m}-bf16-forward" for Hkv in (H, H // 4)}
        expected.add(f"B{B}-H{H}-Hkv{H}-S{S}-D{D}-{m}-bf16-backward")
    expected |= {f"B2-H{H}-Hkv{H // 4}-S8192-D{D}-causal-bf16-backward" for H, D in ((32, 64), (16, 128))}
    assert sorted(names("standard")) == sorted(expected)
    assert len(expected) == 64


def test_other_plans():
    assert names("quick") == [
        "B2-H16-Hkv16-S2048-D128-causal-bf16-forward",
        "B2-H16-Hkv16-S2048-D128-causal-bf16-backward",
        "B2-H4-Hkv4-S128-D64-causal-bf16-forward",
    ]
    assert names("quick_cpu") == ["B1-H4-Hkv4-S256-D64-causal-fp32-forward"]
    assert any("S4095" in name for name in names("full"))
    assert not set(names("full")) & set(names("standard"))


def test_costs():
    axes = {"B": 2, "H": 16, "Hkv": 4, "S": 1024, "D": 128}
    full = OPERATOR.case(axes, "bf16", "forward", mask="full")
    causal = OPERATOR.case(axes, "bf16", "forward", mask="causal")
    backward = OPERATOR.case(axes, "bf16", "backward", mask="causal")
    both = OPERATOR.case(axes, "bf16", "forward_backward", mask="causal")
    assert full.flops == 4 * 2 * 16 * 1024 * 1024 * 128
    assert causal.flops == full.flops // 2
    assert backward.flops == causal.flops * 5 // 2
    assert both.flops == causal.flops + backward.flops
    assert full.bytes == 2 * 2 * 1024 * 128 * (16 + 16 + 4 + 4)
    assert both.bytes == causal.bytes + backward.bytes
    assert full.tokens == 2048


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("chunk", [1, 24 * 7, 24 * 24 * 3, 1 << 28])
@pytest.mark.parametrize("Hkv", [4, 2, 1])
def test_reference(monkeypatch, mask, chunk, Hkv):
    """One query at a time, seven, three heads or all at once, against the formula, with gradients."""
    monkeypatch.setattr(shared, "SCORES", chunk)
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(2, heads, 24, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, Hkv, Hkv)
    ]
    got, want = reference(*leaves, mask), naive(*leaves, mask)
    grad = torch.randn(got.shape, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad))


def bench(dtype, mask="causal", **axes):
    case = OPERATOR.case(AXES | axes, dtype, "forward_backward", mask=mask)
    return Workbench.build(OPERATOR, case, torch.device("cpu"), seed=3)


def results(laid, call):
    return list(laid.call(call)())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_tolerance_passes_a_fused_implementation(dtype, mask):
    laid = bench(dtype, mask, S=512)

    def call(q, k, v, mask):
        return scaled_dot_product_attention(q, k, v, is_causal=mask == "causal")

    assert deviation(results(laid, call), laid.references, OPERATOR.tolerances[dtype]) < 6e-3


def eager(q, k, v, mask):
    """As models write it: scores and probabilities rounded to the inputs' dtype."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask == "causal":
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return scores.float().softmax(-1).to(q.dtype) @ v


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_tolerance_passes_eager_bf16_at_a_long_sequence(mask):
    """Early rows of a causal output are large and late ones small; rounding of the early ones must pass."""
    laid = bench("bf16", mask, S=2048, H=1, Hkv=1)
    deviation(results(laid, eager), laid.references, OPERATOR.tolerances["bf16"])


def shifted(q, k, v, mask):
    """The mask one key too far."""
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(2), float("-inf"))
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def unscaled(q, k, v, mask):
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.02 * q.shape[-1] ** -0.5)


def no_last_block(q, k, v, mask):
    """The last 16 queries forget the last 16 keys."""
    output = scaled_dot_product_attention(q, k, v, is_causal=True)
    late = scaled_dot_product_attention(q[:, :, -16:], k[:, :, :-16], v[:, :, :-16])
    return torch.cat([output[:, :, :-16], late], 2)


def wrong_heads(q, k, v, mask):
    return scaled_dot_product_attention(q, k.flip(1), v.flip(1), is_causal=True)


def one_wrong_element(q, k, v, mask):
    output = scaled_dot_product_attention(q, k, v, is_causal=True)
    bump = torch.zeros_like(output)
    bump[0, 0, 200, 5] = 0.25
    return output + bump


@pytest.mark.parametrize("wrong", [shifted, unscaled, no_last_block, wrong_heads, one_wrong_element])
def test_tolerance_fails_what_is_broken(wrong):
    laid = bench("bf16")
    with pytest.raises(Incorrect):
        deviation(results(laid, wrong), laid.references, OPERATOR.tolerances["bf16"])


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_tolerance_fails_a_gradient_off_by_two_percent(broken):
    laid = bench("bf16")
    outputs = results(laid, lambda q, k, v, mask: scaled_dot_product_attention(q, k, v, is_causal=True))
    outputs[broken] = outputs[broken] * 1.02
    with pytest.raises(Incorrect, match=f"output {broken}"):
        deviation(outputs, laid.references, OPERATOR.tolerances["bf16"])


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_torchs_formula_gives_zeros_where_a_query_sees_nothing(pass_):
    """As the reference does: of fewer keys than queries, with a cap and no sinks, softmax alone would be NaN."""
    from kernelmark.baselines.torch import IMPLEMENTATIONS

    case = OPERATOR.case(AXES | {"S": 20, "Sk": 12}, "fp32", pass_, cap=30)
    bench = Workbench.build(OPERATOR, case, torch.device("cpu"), 1)
    call = bench.call(IMPLEMENTATIONS["attention"]["torch"](case))
    deviation(bench.comparable(call()), bench.references, bench.tolerance)
