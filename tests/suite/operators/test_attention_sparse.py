"""The block-sparse operator: its layout, its choice, its costs, what its results forgive and what they do not."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.baselines._terms import telling
from kernelmark.baselines.torch import IMPLEMENTATIONS
from kernelmark.kernels.cpu.attention_sparse import attention_sparse as on_cpu
from kernelmark.suite.measure.verify import Incorrect, deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators import _gates
from kernelmark.suite.operators._gates import pooled
from kernelmark.suite.operators.attention_sparse import (
    LEFT_OUT,
    OPERATOR,
    attended,
    choose,
    chosen_of,
    dense_error,
    fixed,
    kept,
    layout,
    left_out_by_reference,
    over,
    reference,
    results,
    right_blocks,
    saved,
    scores,
    visible,
)
from torch.nn.functional import scaled_dot_product_attention

AXES = {"B": 1, "H": 4, "Hkv": 2, "S": 700, "D": 16}
CPU = torch.device("cpu")


def drawn(axes=None, dtype="fp32", **options):
    case = OPERATOR.case(AXES | (axes or {}), dtype, "forward", **options)
    return case, OPERATOR.built(case, CPU, torch.Generator().manual_seed(0))


def raised(inputs):
    return {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


@given(
    across=st.integers(1, 40),
    mask=st.sampled_from(["causal", "full"]),
    sparsity=st.sampled_from([0, 50, 75, 90, 99]),
)
def test_layout_has_the_share_the_own_block_and_nothing_hidden(across, mask, sparsity):
    for row, blocks in enumerate(layout(across, mask, sparsity)):
        assert blocks == sorted(set(blocks))
        assert len(blocks) == kept(row, across, mask, sparsity)
        assert row in blocks
        assert blocks[-1] < visible(row, across, mask)
        assert 0 in blocks or len(blocks) < 3


def test_layout_is_a_band_a_sink_and_a_stride():
    row = layout(40, "causal", 75)[39]
    assert row[-5:] == [35, 36, 37, 38, 39]
    assert row[0] == 0
    gaps = [b - a for a, b in itertools.pairwise(row[:6])]
    assert max(gaps) <= 2 * min(gaps) + 2


@pytest.mark.parametrize("pattern", ["static", "dynamic", "learned"])
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("S", [512, 700])
def test_reference_agrees_with_torch(pattern, mask, S):
    case, inputs = drawn({"S": S}, pattern=pattern, mask=mask, sparsity=50)
    result = IMPLEMENTATIONS["attention_sparse"]["torch"](case)(**inputs)
    output = results(result, inputs)
    deviation([output], [OPERATOR.reference(**raised(inputs))], OPERATOR.tolerances["fp32"])


def test_without_sparsity_it_is_dense_attention():
    _, inputs = drawn({"S": 300})
    q, k, v = (inputs[x].double() for x in "qkv")
    for mask in ("causal", "full"):
        everything = choose(scores(q, k, mask, None, None), mask, 0)
        dense = scaled_dot_product_attention(q, k, v, is_causal=mask == "causal", enable_gqa=True)
        torch.testing.assert_close(attended(q, k, v, mask, everything), dense)
        torch.testing.assert_close(attended(q, k, v, mask, None), dense)


def test_queries_that_see_nothing_give_zeros():
    _, inputs = drawn({"S": 300})
    blocks = torch.ones(1, 3, 3, dtype=torch.bool)
    blocks[0, 1] = False
    output = attended(inputs["q"], inputs["k"], inputs["v"], "full", blocks)
    assert not output[:, :, 128:256].any()
    assert bool(output.isfinite().all())


def test_the_last_block_s_mean_is_of_the_tokens_it_has():
    x = torch.randn(2, 3, 300, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([x[:, :, :128].mean(2), x[:, :, 128:256].mean(2), x[:, :, 256:].mean(2)], 2)
    torch.testing.assert_close(pooled(x), expected)


@pytest.mark.parametrize("pattern", ["dynamic", "learned"])
def test_choice_has_the_best_scores_and_the_own_block(pattern):
    case, inputs = drawn({"S": 2000}, pattern=pattern, sparsity=75)
    values = scores(*(inputs[x] for x in ("q", "k", "mask", "gate_q", "gate_k")))
    blocks = choose(values, "causal", 75)
    assert blocks.sum(-1)[0, 0].tolist() == [kept(row, 16, "causal", 75) for row in range(16)]
    assert bool(blocks.diagonal(dim1=-2, dim2=-1).all())
    assert not blocks.triu(1).any()
    worst = values.masked_fill(~blocks, torch.inf).amin(-1)
    assert bool((values.masked_fill(blocks, -torch.inf).amax(-1) <= worst).all())
    assert case.options["pattern"] == pattern


def test_a_gate_chooses_much_as_the_whole_scores_do():
    """With all features a gate of an orthonormal basis changes no product; with half of them, some."""
    _, inputs = drawn({"S": 2000, "D": 64}, pattern="learned", sparsity=75)
    q, k = inputs["q"].double(), inputs["k"].double()
    gates = inputs["gate_q"].double(), inputs["gate_k"].double()
    torch.testing.assert_close(
        scores(q, k, "causal", *gates), scores(q, k, "causal", None, None), rtol=1e-4, atol=1e-4
    )
    half = choose(scores(q, k, "causal", *(x[..., :32] for x in gates)), "causal", 75)
    whole = choose(scores(q, k, "causal", None, None), "causal", 75)
    assert 0.4 < float((half & whole).sum() / whole.sum()) < 1


def near_tie():
    """Inputs of which row 3 of head 0 has two scores that differ by less than fp32's rounding, and the choice."""
    _, inputs = drawn({"S": 512, "H": 1, "Hkv": 1}, pattern="dynamic", mask="full", sparsity=50)
    inputs["k"][0, 0, :128] = inputs["k"][0, 0, 128:256]
    inputs["q"][0, 0, 384:] = inputs["k"][0, 0, :128]
    inputs["k"][0, 0, 0, 0] += 1e-4
    blocks = choose(scores(*raised({x: inputs[x] for x in "qk"}).values(), "full", None, None), "full", 50)
    assert blocks[0, 0, 3].sum() == 2
    assert int(blocks[0, 0, 3, :2].sum()) == 1
    return inputs, blocks


def answer(inputs, blocks):
    q, k, v = (inputs[x] for x in "qkv")
    return attended(q, k, v, inputs["mask"], blocks), blocks


def test_results_take_either_of_two_equal_scores():
    inputs, blocks = near_tie()
    expected = OPERATOR.reference(**raised(inputs))
    other = blocks.clone()
    other[0, 0, 3, :2] ^= True
    output, _ = answer(inputs, other)
    with pytest.raises(Incorrect):
        deviation([output], [expected], OPERATOR.tolerances["fp32"])
    deviation([results((output, other), inputs)], [expected], OPERATOR.tolerances["fp32"])
    wrong, _ = answer(inputs, blocks)
    with pytest.raises(Incorrect):
        deviation([results((wrong, other), inputs)], [expected], OPERATOR.tolerances["fp32"])


def worse(blocks):
    changed = blocks.clone()
    changed[0, 0, 3, :2] = False
    changed[0, 0, 3, 2] = True
    return changed


def fewer(blocks):
    return blocks & torch.eye(4, dtype=torch.bool)


def more(blocks):
    return torch.ones_like(blocks)


def bytes_instead(blocks):
    return blocks.to(torch.uint8)


@pytest.mark.parametrize("change", [worse, fewer, more, bytes_instead])
def test_results_take_no_other_choice(change):
    inputs, blocks = near_tie()
    output, _ = answer(inputs, blocks)
    assert bool(results((output, change(blocks)), inputs).isnan().all())


def test_costs_count_the_kept_blocks():
    axes = {"B": 1, "H": 16, "Hkv": 16, "S": 16384, "D": 128}
    dense = 4 * 16 * 16384 * 16384 * 128
    for sparsity, share in ((90, 0.1), (75, 0.25), (50, 0.5)):
        full = OPERATOR.case(axes, "bf16", "forward", mask="full", sparsity=sparsity)
        causal = OPERATOR.case(axes, "bf16", "forward", mask="causal", sparsity=sparsity)
        assert full.flops == pytest.approx(share * dense, rel=0.02)
        # The blocks on the diagonal, always kept, are half hidden.
        assert causal.flops == pytest.approx(share * dense / 2, rel=0.06)
        assert saved(full) == pytest.approx(1 - share, abs=0.002)
        assert saved(causal) == pytest.approx(1 - share, abs=0.008)
    assert full.bytes == 4 * 16 * 16384 * 128 * 2 + 128 * 128
    chosen = OPERATOR.case(axes, "bf16", "forward", pattern="dynamic")
    learned = OPERATOR.case(axes, "bf16", "forward", pattern="learned")
    assert chosen.bytes - full.bytes == 15 * 128 * 128
    assert learned.bytes - chosen.bytes == 2 * 16 * 128 * 64 * 2
    assert chosen.flops == learned.flops


def test_a_partial_causal_case_costs_what_its_pairs_do():
    case, _ = drawn({"S": 300}, sparsity=50)
    blocks = layout(3, "causal", 50)
    pairs = sum(key // 128 in blocks[query // 128] for query in range(300) for key in range(query + 1))
    assert case.flops == pytest.approx(4 * 4 * 16 * pairs, rel=0.02)


def error_of(pattern, sparsity):
    _, inputs = drawn({"S": 2560, "D": 96}, pattern=pattern, sparsity=sparsity)
    return dense_error(OPERATOR.reference(**inputs), inputs)


def test_error_against_dense_attention_ranks_sparsities_and_patterns():
    dynamic = [error_of("dynamic", sparsity) for sparsity in (50, 75, 90)]
    assert 0 < dynamic[0] < dynamic[1] < dynamic[2]
    # The gate keeps 64 of 96 features.
    assert dynamic[1] < error_of("learned", 75) < error_of("static", 75)


def test_dense_attention_has_no_error():
    _, inputs = drawn()
    assert dense_error(attended(*(inputs[x] for x in "qkv"), "causal", None), inputs) == 0


def test_standard_has_every_pattern_at_every_sparsity():
    names = {case.name for grid in OPERATOR.plans["standard"] for case in OPERATOR.expand(grid)}
    for mask in ("causal", "full"):
        for pattern in ("static", "dynamic", "learned"):
            for sparsity in (50, 75, 90):
                assert f"B1-H16-Hkv16-S16384-D128-{mask}-{pattern}-sparsity{sparsity}-bf16-forward" in names
    assert "B1-H16-Hkv4-S32768-D128-causal-static-sparsity90-bf16-forward" in names


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("pattern", ["window", "random"])
def test_patterns_beside_have_the_layouts_density_and_the_own_block(pattern, mask):
    across = 20
    rows, layout_rows = (fixed(x, across, mask, 75) for x in (pattern, "static"))
    assert [len(x) for x in rows] == [len(x) for x in layout_rows]
    for row, chosen in enumerate(rows):
        assert row in chosen
        assert set(chosen) <= set(range(visible(row, across, mask)))
    if pattern == "window":
        assert all(max(abs(x - row) for x in chosen) <= len(chosen) for row, chosen in enumerate(rows))
    _, inputs = drawn({"S": 2000}, pattern=pattern, mask=mask, sparsity=75)
    assert inputs["blocks"].sum(-1).tolist() == [[kept(row, 16, mask, 75) for row in range(16)]]


def test_a_threshold_keeps_what_is_near_the_largest():
    exact = torch.tensor([[torch.inf, 1.0, 5.0, -torch.inf], [4.5, torch.inf, 0.0, 5.0]])
    assert over(exact, 1.0).tolist() == [[True, False, True, False], [True, True, False, True]]
    only = torch.tensor([[torch.inf, -torch.inf]])
    assert over(only, 1.0).tolist() == [[True, False]]


def test_a_choice_near_the_threshold_may_go_either_way_and_no_other():
    _, inputs = drawn({"S": 1024}, pattern="threshold", sparsity=75)
    wide = {x: y.double() if x in "qkv" else y for x, y in inputs.items()}
    right = chosen_of(wide["q"], wide["k"], "causal", 75, None, None, inputs["threshold"])
    output = reference(**wide)
    torch.testing.assert_close(results((output, right), inputs).double(), output)
    wrong = right.clone()
    wrong[..., -1, 0] = ~wrong[..., -1, 0]
    assert results((output, wrong), inputs).isnan().all()


def test_every_row_says_what_was_left_out_and_how_far_it_is_from_dense():
    _, inputs = drawn({"S": 2048}, pattern="static", sparsity=75)
    output = reference(**inputs)
    left_out, error = (measure([output], [output], inputs) for measure in OPERATOR.measures.values())
    tiles = sum(kept(row, 16, "causal", 75) for row in range(16))
    assert left_out == pytest.approx(1 - tiles / (16 * 17 / 2))
    assert error == pytest.approx(dense_error(output, inputs))
    _, chosen = drawn({"S": 2048}, pattern="dynamic", sparsity=75)
    assert left_out_by_reference([], [], chosen) == pytest.approx(left_out)
    _, near = drawn({"S": 2048}, pattern="threshold", sparsity=50)
    assert 0 < left_out_by_reference([], [], near) < 1


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_an_implementation_says_what_it_left_out_itself(mask):
    """SDPA computes every tile, and ours on a CPU as many of a row in each head as in that which keeps most."""
    case, inputs = drawn({"S": 1000}, pattern="threshold", sparsity=75, mask=mask)
    kept = right_blocks(inputs)
    dense = 36 if mask == "causal" else 64
    torch_ = Workbench.told(
        SimpleNamespace(inputs=inputs), IMPLEMENTATIONS["attention_sparse"]["torch"](case), LEFT_OUT.name
    )
    assert torch_ == (1 - 64 / dense, "")
    most = int(kept.sum(-1).amax((0, 1)).sum())
    assert on_cpu.tiles_left_out(**inputs) == pytest.approx(1 - most / dense)


def test_an_implementation_that_does_not_say_leaves_a_reason():
    bench = SimpleNamespace(inputs={"x": 1})
    assert Workbench.told(bench, lambda x: x, LEFT_OUT.name) == (None, "this implementation does not say")

    def silent(x):
        raise NotImplementedError("its lists are made on the device")

    call = telling(lambda x: x, tiles_left_out=silent)
    assert Workbench.told(bench, call, LEFT_OUT.name) == (None, "its lists are made on the device")
    call = telling(lambda x: x, tiles_left_out=lambda x: x / 4)
    assert Workbench.told(bench, call, LEFT_OUT.name) == (0.25, "")


@pytest.mark.parametrize("pattern", ["static", "dynamic"])
@pytest.mark.parametrize("pass_", ["backward", "forward_backward"])
def test_a_pass_with_gradients_is_checked_against_the_reference(pattern, pass_):
    """By PyTorch's attention with a mask; its row says how far the forward pass is from dense attention."""
    case = OPERATOR.case(AXES | {"S": 300}, "fp32", pass_, pattern=pattern, sparsity=50)
    bench = Workbench.build(OPERATOR, case, CPU, 3)
    call = bench.call(IMPLEMENTATIONS["attention_sparse"]["torch"](case))
    outputs = bench.comparable(call())
    assert len(outputs) == (3 if pass_ == "backward" else 4)
    deviation(outputs, bench.references, OPERATOR.tolerances["fp32"])
    left_out, error = (x(outputs, bench.references, bench.inputs) for x in OPERATOR.measures.values())
    assert 0 < left_out < 1
    plain = {x: y.detach() if isinstance(y, torch.Tensor) else y for x, y in bench.inputs.items()}
    assert error == pytest.approx(dense_error(reference(**plain), plain), rel=1e-5)
    dropped = [*outputs[:-1], torch.zeros_like(outputs[-1])]
    with pytest.raises(Incorrect):
        deviation(dropped, bench.references, OPERATOR.tolerances["fp32"])


def test_a_backward_pass_costs_five_products_of_two():
    passes = [OPERATOR.case(AXES, "bf16", x) for x in ("forward", "backward", "forward_backward")]
    assert [x.flops / passes[0].flops for x in passes] == [1, 2.5, 3.5]
    assert passes[0].exponentials == passes[1].exponentials


def test_a_trained_gate_chooses_nearly_as_the_best_does(monkeypatch):
    """Nearer to the best gate, which for drawn inputs is known, than to where it started."""
    monkeypatch.setattr(_gates, "amount", lambda D, device: (4, 2048))
    found = {}
    for pattern in ("learned", "trained"):
        _, inputs = drawn({"S": 1500, "H": 2}, pattern=pattern, sparsity=75)
        found[pattern] = dense_error(reference(**inputs), inputs)
    monkeypatch.setattr(_gates, "trained", lambda gate, seen, mask: gate)
    _, inputs = drawn({"S": 1500, "H": 2}, pattern="trained", sparsity=75)
    found["started"] = dense_error(reference(**inputs), inputs)
    assert found["learned"] < found["started"]
    assert found["trained"] < (found["learned"] + found["started"]) / 2


def test_weights_of_blocks_are_dense_attentions():
    q, k = (torch.randn(1, heads, 300, 8, generator=torch.Generator().manual_seed(0)) for heads in (4, 2))
    dense = (q @ k.repeat_interleave(2, 1).mT * 8**-0.5).masked_fill(
        torch.ones(300, 300, dtype=torch.bool).triu(1), -torch.inf
    )
    whole = dense.softmax(-1)
    found = _gates.weights(q, k, "causal")
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 4, 3))
    torch.testing.assert_close(found[..., 2, 1], whole[..., 256:, 128:256].sum(-1).mean(-1))


def test_a_gate_s_loss_is_least_where_its_scores_are_the_weights():
    """And neither a row's own block nor what comes after it counts."""
    means = torch.randn(1, 1, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = torch.eye(4, dtype=torch.float64)[None]
    target = (means @ means.mT * 0.5).exp()
    target = target / target.sum(-1, keepdim=True)

    def loss(gate, target):
        return float(_gates.gate_loss(gate, exact, means, means, target, "causal"))

    least = loss(exact, target)
    assert least < loss(0.5 * exact, target)
    assert least < loss(-exact, target)
    other = target.clone()
    other[..., 2, 2:] = 1e-9
    assert loss(exact, other) == pytest.approx(least)
