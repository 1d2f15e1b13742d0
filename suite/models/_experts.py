"""A feed-forward of experts (Shazeer et al., arXiv 1701.06538), for the models that have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def grouped(x: Any, weight: Any, ends: Any) -> Any:
    """Rows x (M, K), sorted by expert, times weight (E, N, K) transposed: (M, N). `ends` (E,) int32 are where each
    expert's rows end.

    PyTorch's grouped product on a GPU in bf16, which waits for nothing; elsewhere one product an expert.
    """
    import torch

    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch.nn.functional.grouped_mm(x, weight.mT, offs=ends)
    lengths = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat([a @ w.t() for a, w in zip(x.split(lengths), weight.unbind(0), strict=True)])


def routed(scores: Any, count: int, renormalized: bool) -> tuple[Any, Any]:
    """Of scores (M, E) the weights and the numbers (M, count) of each token's experts, by softmax in fp32.

    `renormalized` makes a token's weights add up to 1, as Mixtral does and OLMoE does not.
    """
    shares = scores.float().softmax(-1)
    weights, experts = shares.topk(count, -1)
    if renormalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(scores.dtype), experts


def feed(
    y: Any,
    router: Any,
    gate: Any,
    up: Any,
    down: Any,
    count: int,
    renormalized: bool,
    activation: Callable[..., Any],
) -> Any:
    """y (M, D) through `count` experts each: router (E, D), gate and up (E, F, D), down (E, D, F)."""
    import torch

    M, E = y.shape[0], router.shape[0]
    weights, experts = routed(torch.nn.functional.linear(y, router), count, renormalized)
    order = experts.flatten().argsort(stable=True)
    ends = torch.bincount(experts.flatten(), minlength=E).cumsum(0).to(torch.int32)
    rows = order // count
    x = y[rows]
    inner = activation(gate=grouped(x, gate, ends), up=grouped(x, up, ends))
    out = grouped(inner, down, ends) * weights.flatten()[order, None]
    return torch.zeros_like(y).index_add(0, rows, out) if M else y
