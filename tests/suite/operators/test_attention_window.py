"""The attention_window operator: its cases, its reference, its costs, and what its tolerance lets through."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernelmark.baselines.torch import IMPLEMENTATIONS as TORCH
from kernelmark.kernels.cpu.attention_window import attention_window as on_cpu
from kernelmark.suite.measure.verify import Incorrect, deviation
from kernelmark.suite.measure.workbench import Workbench
from kernelmark.suite.operators import _attention as shared
from kernelmark.suite.operators import attention as whole
from kernelmark.suite.operators.attention_window import OPERATOR, reference

AXES = {"B": 1, "H": 2, "Hkv": 2, "S": 256, "D": 64, "W": 64}


def names(plan):
    return [case.name for grid in OPERATOR.plans[plan] for case in OPERATOR.expand(grid)]


def seen(S, W, mask, Sk=None):
    """The mask (S, Sk), pair by pair, the last of both in one place."""
    Sk = S if Sk is None else Sk
    return torch.tensor(
        [[abs(i - j) < W and (mask == "full" or j <= i) for j in range(Sk)] for i in range(Sk - S, Sk)]
    )


def naive(q, k, v, mask, window):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~seen(q.shape[2], window, mask, k.shape[2]), float("-inf"))
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, -1), v)


def test_standard_has_exactly_these_cases():
    passes = ("forward", "backward")
    expected = {
        f"B{B}-H{H}-Hkv{H}-S{S}-D{D}-W1024-causal-bf16-{x}"
        for H, D in ((32, 64), (16, 128))
        for B, S in ((2, 8192), (1, 16384))
        for x in passes
    }
    expected |= {
        "B2-H16-Hkv16-S8192-D128-W1024-full-bf16-forward",
        "B2-H16-Hkv4-S8192-D128-W1024-causal-bf16-forward",
    }
    assert sorted(names("standard")) == sorted(expected)


def test_other_plans():
    assert names("quick_cpu") == ["B1-H4-Hkv4-S256-D64-W64-causal-fp32-forward"]
    assert set(names("quick")) == {
        f"B2-H16-Hkv16-S8192-D128-W1024-causal-bf16-{x}" for x in ("forward", "backward")
    }
    assert len(set(names("full"))) == len(names("full"))
    assert not set(names("full")) & set(names("standard"))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50), st.sampled_from(["causal", "full"]))
def test_pairs(S, Sk, W, mask):
    assert shared.visible(S, Sk, mask, W) == seen(S, W, mask, Sk).sum()
    assert shared.visible(S, Sk, mask) == seen(S, 100, mask, Sk).sum()


def test_costs():
    def case(pass_, mask="causal", **axes):
        return OPERATOR.case(
            {"B": 2, "H": 16, "Hkv": 4, "S": 1024, "D": 128, "W": 128} | axes, "bf16", pass_, mask=mask
        )

    forward, backward, both = (case(x) for x in ("forward", "backward", "forward_backward"))
    assert forward.flops == 4 * 2 * 16 * 128 * shared.visible(1024, 1024, "causal", 128)
    assert backward.flops == forward.flops * 5 // 2
    assert both.flops == forward.flops + backward.flops
    # Twice the tokens are twice the work but for the first window's, and a window of all is all.
    assert 2 < case("forward", S=2048).flops / forward.flops < 2.2
    assert case("forward", "full", W=1024).flops == 4 * 2 * 16 * 1024**2 * 128
    same = whole.OPERATOR.case({"B": 2, "H": 16, "Hkv": 4, "S": 1024, "D": 128}, "bf16", "backward")
    assert backward.bytes == same.bytes
    assert backward.tokens == 2048
    # Of a part of a prompt: keys that no query sees are not read, but their gradients are written.
    chunk = case("forward", Sk=8192)
    assert chunk.flops == 4 * 2 * 16 * 128 * 1024 * 128
    assert chunk.bytes == 2 * 128 * 2 * (2 * 16 * 1024 + 2 * 4 * (1024 + 127))
    assert case("backward", Sk=8192).bytes == 2 * 128 * 2 * (3 * 16 * 1024 + 4 * (2 * (1024 + 127) + 2 * 8192))


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(("S", "Sk", "W"), [(5, 20, 4), (20, 20, 3), (7, 130, 40), (1, 9, 3)])
def test_more_keys_than_queries(mask, S, Sk, W):
    """The reference, PyTorch's with a mask of elements and ours on a CPU, by the case's inputs."""
    case = OPERATOR.case(AXES | {"S": S, "D": 8, "W": W, "Sk": Sk}, "fp32", "forward", mask=mask)
    given = OPERATOR.built(case, torch.device("cpu"), torch.Generator().manual_seed(1))
    want = naive(given["q"].double(), given["k"].double(), given["v"].double(), mask, W)
    for call in (reference, TORCH["attention_window"]["torch"](case), on_cpu):
        torch.testing.assert_close(call(**given).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(("W", "queries", "chunk"), [(1, 10, 1), (7, 10, 1 << 28), (24, 5, 1), (7, 64, 300)])
@pytest.mark.parametrize("Hkv", [4, 2])
def test_reference(monkeypatch, mask, W, queries, chunk, Hkv):
    """Pieces of queries and chunks of heads, against the formula, with gradients."""
    monkeypatch.setattr(shared, "SCORES", chunk)
    monkeypatch.setattr(shared, "QUERIES", queries)
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(2, heads, 24, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, Hkv, Hkv)
    ]
    got, want = reference(*leaves, mask, W), naive(*leaves, mask, W)
    grad = torch.randn(got.shape, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad))


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_a_window_of_all_is_attention(mask):
    leaves = [torch.randn(1, 2, 30, 8, dtype=torch.float64) for _ in range(3)]
    torch.testing.assert_close(reference(*leaves, mask, 30), whole.reference(*leaves, mask))


@pytest.mark.parametrize("shape", [(0, 2, 8, 16), (1, 2, 0, 16)])
def test_reference_of_nothing(shape):
    q, k, v = (torch.zeros(shape) for _ in range(3))
    assert reference(q, k, v, "causal", 4).shape == shape


def bench(dtype, mask="causal"):
    case = OPERATOR.case(AXES, dtype, "forward_backward", mask=mask)
    return Workbench.build(OPERATOR, case, torch.device("cpu"), seed=3)


def masked(shift):
    """Attention whose window is longer by so many."""

    def call(q, k, v, mask, window):
        hidden = ~seen(q.shape[2], window + shift, mask)
        scores = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
        return (scores.softmax(-1) @ v.float()).to(q.dtype)

    return call


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_tolerance_passes_what_is_right(dtype, mask):
    laid = bench(dtype, mask)
    deviation(list(laid.call(masked(0))()), laid.references, OPERATOR.tolerances[dtype])


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_tolerance_fails_a_window_off_by_one(shift, mask):
    laid = bench("bf16", mask)
    with pytest.raises(Incorrect):
        deviation(list(laid.call(masked(shift))()), laid.references, OPERATOR.tolerances["bf16"])
