"""The operator of packed sequences: its lengths, its cases beside dense attention's, its reference, its costs."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.baselines import torch as eager
from kernelmark.kernels.cpu.attention_varlen import attention_varlen as on_cpu
from kernelmark.suite.measure.verify import Incorrect, deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators import _attention as shared
from kernelmark.suite.operators.attention import OPERATOR as DENSE
from kernelmark.suite.operators.attention import reference as dense
from kernelmark.suite.operators.attention_varlen import OPERATOR, lengths_of, reference
from torch.nn.functional import scaled_dot_product_attention

AXES = {"B": 4, "H": 4, "Hkv": 2, "S": 160, "D": 16}
CPU = torch.device("cpu")


def case(dtype="fp32", pass_="forward", axes=None, **options):
    return OPERATOR.case(AXES | (axes or {}), dtype, pass_, **options)


def cases(plan, operator=OPERATOR):
    return [case for grid in operator.plans[plan] for case in operator.expand(grid)]


@given(B=st.integers(0, 40), S=st.integers(0, 5000), kind=st.sampled_from(["equal", "uniform", "long_tail"]))
def test_lengths_lie_in_their_range_and_are_the_same_each_time(B, S, kind):
    chosen = case(axes={"B": B, "S": S}, lengths=kind)
    lengths = lengths_of(chosen)
    assert lengths == lengths_of(chosen)
    assert len(lengths) == B
    low = {"equal": S, "uniform": S // 8, "long_tail": S // 64}[kind]
    assert all(max(low, min(1, S)) <= length <= S for length in lengths)


def test_shapes_of_the_distributions():
    uniform = lengths_of(case(axes={"B": 64, "S": 8192}, lengths="uniform"))
    tail = lengths_of(case(axes={"B": 64, "S": 8192}, lengths="long_tail"))
    assert sum(uniform) == pytest.approx(64 * 8192 * 9 / 16, rel=0.02)
    assert uniform != sorted(uniform)
    median, longest = sorted(tail)[32], max(tail)
    assert median < 300
    assert longest > 4000
    assert sum(sorted(tail)[-8:]) > sum(tail) / 2


def test_inputs():
    chosen = case(lengths="uniform")
    inputs = OPERATOR.inputs(chosen, CPU, torch.Generator().manual_seed(0))
    lengths = lengths_of(chosen)
    assert inputs["q"].shape == (sum(lengths), 4, 16)
    assert inputs["k"].shape == inputs["v"].shape == (sum(lengths), 2, 16)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        assert inputs[name].dtype == torch.int32
        assert inputs[name].diff().tolist() == lengths
    assert inputs["max_seqlen_q"] == inputs["max_seqlen_k"] == max(lengths)
    assert chosen.tokens == sum(lengths)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("chunk", [1, 1 << 28])
def test_reference_is_dense_attention_of_each_sequence(monkeypatch, mask, chunk):
    monkeypatch.setattr(shared, "SCORES", chunk)
    inputs = OPERATOR.inputs(case(lengths="uniform", mask=mask), CPU, torch.Generator().manual_seed(0))
    leaves = [inputs[x].double().requires_grad_() for x in "qkv"]
    got = reference(**(inputs | dict(zip("qkv", leaves, strict=True))))
    lengths = inputs["cu_seqlens_q"].diff().tolist()
    parts = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in leaves), strict=True)
    want = torch.cat([dense(*part, mask)[0].transpose(0, 1) for part in parts])
    torch.testing.assert_close(got, want)
    grad = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad))


def test_reference_aligns_the_causal_mask_to_the_end():
    """2 queries of 5 keys, 5 of 2, 3 of none: which keys a query saw is read off values of one."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 1, 8, dtype=torch.float64, generator=generator) for n in (10, 7))
    v = torch.eye(8, dtype=torch.float64)[:7, None]
    starts = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 7, 10], [0, 5, 7, 7])]
    seen = reference(q, k, v, *starts, 5, 5, "causal")[:, 0, :7] > 0
    expected = torch.zeros(10, 7, dtype=torch.bool)
    expected[0, :4] = expected[1, :5] = True
    expected[5, 5] = expected[6, 5:] = True
    assert torch.equal(seen, expected)


OPTIONS = (
    {"keys": "prefix"},
    {"keys": "other"},
    {"keys": "other", "mask": "full"},
    {"keys": "prefix", "W": 20},
    {"keys": "other", "W": 20, "mask": "full", "storage": "packed"},
    {"sinks": True, "W": 20},
    {"cap": 30, "keys": "prefix", "storage": "packed"},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_by_the_formula_and_by_others(options):
    """The reference, PyTorch's and ours on a CPU against products, mask and softmax of each sequence."""
    options = dict(options)
    W = options.pop("W", 0)
    chosen = case(axes={"W": W}, lengths="uniform", **options)
    given = OPERATOR.built(chosen, CPU, torch.Generator().manual_seed(0))
    wide = {
        x: y.double() if isinstance(y, torch.Tensor) and y.is_floating_point() else y for x, y in given.items()
    }
    mine, others = (given[x].diff().tolist() for x in ("cu_seqlens_q", "cu_seqlens_k"))
    assert (mine == others) == (options.get("keys", "same") == "same")
    want, pairs = [], 0
    for q, k, v in zip(
        *(wide[x].split(n) for x, n in zip("qkv", (mine, others, others), strict=True)), strict=True
    ):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / 4
        cap = wide.get("cap", 0)
        scores = cap * (scores / cap).tanh() if cap else scores
        apart = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        seen = (apart >= 0) | (options.get("mask") == "full")
        seen &= (apart.abs() < W) | (W == 0)
        pairs += int(seen.sum())
        terms = scores.exp() * seen
        sink = wide["sinks"].exp()[:, None] if "sinks" in wide else 0
        weights = terms / (terms.sum(-1) + sink).clamp(min=1e-300)[..., None]
        want.append(torch.einsum("hij,jhd->ihd", weights, v))
    torch.testing.assert_close(reference(**wide), torch.cat(want))
    if options.get("keys", "same") != "same" or W:
        assert chosen.flops == 4 * 4 * 16 * pairs
    found = [eager.IMPLEMENTATIONS["attention_varlen"]["torch"](chosen)]
    found += [] if {"sinks", "cap"} & set(options) else [on_cpu]
    for call in found:
        torch.testing.assert_close(call(**given).double(), torch.cat(want), rtol=1e-4, atol=1e-5)


def test_standard_has_the_dense_equivalents_of_its_equal_cases():
    """The same axes, pass and operations, so that a reader can divide the two."""

    def alike(x) -> tuple:
        return (*(x.axes[y] for y in ("B", "H", "Hkv", "S", "D")), x.pass_, x.options["mask"])

    there = {alike(x): x for x in cases("standard", DENSE)}
    equal = [x for x in cases("standard") if x.options["lengths"] == "equal"]
    assert {(x.axes["B"], x.axes["S"]) for x in equal} == {(8, 2048), (2, 8192)}
    assert {(x.axes["H"], x.axes["Hkv"], x.axes["D"]) for x in equal} == {
        (32, 32, 64), (32, 8, 64), (16, 16, 128), (16, 4, 128)
    }  # fmt: skip
    for mine in equal:
        other = there[alike(mine)]
        assert mine.flops == other.flops
        assert mine.bytes == other.bytes + 8 * (mine.axes["B"] + 1)
        assert mine.tokens == other.tokens


def test_plans():
    names = [x.name for x in cases("standard")]
    assert len(names) == len(set(names)) == 30
    for D, H in ((64, 32), (128, 16)):
        for kind, B, S in (("uniform", 16, 2048), ("long_tail", 64, 8192)):
            for pass_ in ("forward", "backward"):
                assert f"B{B}-H{H}-Hkv{H}-S{S}-D{D}-causal-{kind}-bf16-{pass_}" in names
    assert not set(names) & {x.name for x in cases("full")}
    assert [x.name for x in cases("quick")] == [
        f"B8-H16-Hkv16-S2048-D128-causal-uniform-bf16-{x}" for x in ("forward", "backward")
    ]
    assert [x.name for x in cases("quick_cpu")] == ["B4-H4-Hkv4-S256-D64-causal-uniform-fp32-forward"]


def test_costs_are_of_the_true_lengths():
    for kind in ("uniform", "long_tail"):
        full, causal = (case("bf16", lengths=kind, mask=x) for x in ("full", "causal"))
        lengths = lengths_of(full)
        assert full.flops == sum(4 * 4 * x * x * 16 for x in lengths)
        assert causal.flops == full.flops // 2
        assert full.bytes == 2 * sum(lengths) * 16 * (4 + 4 + 2 + 2) + 2 * 4 * 5
        backward, both = (case("bf16", x, lengths=kind) for x in ("backward", "forward_backward"))
        assert backward.flops == causal.flops * 5 // 2
        assert both.bytes == causal.bytes + backward.bytes


@pytest.mark.parametrize("call", ["torch", "cpu"])
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("lengths", ["equal", "uniform", "long_tail"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_right_answer_twice(call, mask, lengths, dtype):
    chosen = case(dtype, "forward_backward", mask=mask, lengths=lengths)
    bench = Workbench.build(OPERATOR, chosen, CPU, seed=1)
    function = on_cpu if call == "cpu" else eager.IMPLEMENTATIONS["attention_varlen"]["torch"](chosen)
    repeat = bench.call(function)
    for _ in range(2):
        deviation(bench.comparable(repeat()), bench.references, OPERATOR.tolerances[dtype])


def test_the_flash_kernel_of_torch_takes_half_precision_only():
    with pytest.raises(NotImplementedError, match="fp16 and bf16"):
        eager.attention_varlen_flash(case("fp32"))


def one_long_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask):
    """As if all tokens were of one sequence."""
    parts = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def one_key_of_the_neighbour(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask):
    """Every sequence but the first sees one key before its own."""
    ends = cu_seqlens_q.tolist()
    outputs = []
    for a, b in itertools.pairwise(ends):
        before = 1 if a else 0
        parts = (x[start:b].transpose(0, 1)[None] for x, start in ((q, a), (k, a - before), (v, a - before)))
        seen = torch.ones(b - a, b - a + before, dtype=torch.bool).tril(before)
        outputs.append(scaled_dot_product_attention(*parts, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("wrong", [one_long_sequence, one_key_of_the_neighbour])
def test_tolerance_fails_a_leak_between_sequences(wrong):
    bench = Workbench.build(OPERATOR, case("bf16", lengths="uniform"), CPU, seed=1)
    with pytest.raises(Incorrect):
        deviation(bench.comparable(bench.call(wrong)()), bench.references, OPERATOR.tolerances["bf16"])
