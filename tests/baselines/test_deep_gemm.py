"""DeepGEMM's mixture of experts, with its products by PyTorch: what lies where, and that it is the operator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kernelmark.baselines import deep_gemm
from kernelmark.suite.measure.verify import deviation
from kernelmark.suite.operators.fp8_matmul import BLOCK, scaled, widened
from kernelmark.suite.operators.moe import OPERATOR


@pytest.mark.parametrize(("tokens", "count", "top_k"), [(1, 8, 2), (5, 3, 3), (300, 4, 2), (33, 64, 1)])
def test_experts_rows_begin_at_multiples_of_128(tokens, count, top_k):
    torch.manual_seed(tokens)
    experts = torch.rand(tokens, count).topk(top_k, -1).indices
    place, owner = deep_gemm.rows_by_expert(experts, count)
    assert len(place.unique()) == tokens * top_k
    assert torch.equal(owner[place].long(), experts.flatten())
    assert (owner >= 0).sum() == tokens * top_k
    for block in owner.view(-1, 128):
        assert len(block[block >= 0].unique()) <= 1
    for expert in experts.unique():
        assert place[experts.flatten() == expert].min() % 128 == 0


def _quantized(x):
    q, scale = scaled(x.nan_to_num(), 1, BLOCK)
    return q, scale.t().contiguous().t()


def _grouped(rows, weights, out, owner, disable_ue8m0_cast):
    """What it does to rows that are somebody's; the others are left as they were."""
    (a, scale_a), (b, scale_b) = rows, weights
    assert scale_a.stride(0) == 1
    out.fill_(float("nan"))
    a = a.float() * widened(scale_a, a.shape, 1, BLOCK)
    for e in owner[owner >= 0].unique().tolist():
        b_e = b[e].float() * widened(scale_b[e], b[e].shape, BLOCK, BLOCK)
        out[owner == e] = (a[owner == e] @ b_e.t()).to(out.dtype)


def _gate(x):
    gate, up = x.float().chunk(2, 1)
    return _quantized(torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("tokens", [1, 150])
def test_a_mixture_is_the_operator(tokens):
    case = OPERATOR.case({"M": tokens, "D": 128, "F": 256, "E": 4, "K": 2}, "e4m3", "forward")
    given = OPERATOR.inputs(case, torch.device("cpu"), torch.Generator().manual_seed(1))
    call = deep_gemm.mixture(case, SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=_grouped), _quantized, _gate)
    y, experts = call(**given)
    wide = OPERATOR.reference(**{k: x.double() if k in ("x", "router") else x for k, x in given.items()})
    assert experts.shape == (tokens, 2)
    deviation([y], [wide[0] if isinstance(wide, tuple) else wide], OPERATOR.tolerances["e4m3"])


@pytest.mark.parametrize(
    ("change", "why"),
    [({"dtype": "bf16"}, "E4M3"), ({"activation": "clamped"}, "clamps nothing"), ({"F": 192}, "multiples of 128")],
)
def test_what_it_does_not_take_is_said(change, why):
    axes = {"M": 2, "D": 128, "F": change.pop("F", 128), "E": 4, "K": 2}
    case = OPERATOR.case(axes, change.pop("dtype", "e4m3"), "forward", **change)
    with pytest.raises(NotImplementedError, match=why):
        deep_gemm.mixture(case, SimpleNamespace(), _quantized, _gate)
