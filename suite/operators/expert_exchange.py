"""Dispatch and combine: tokens go to the ranks of their experts, come back, and are added up by their weights.

Between the two an expert only multiplies by a vector of its own, so that what is timed is the exchange and what is
returned tells whether each token was at each of its experts. Each rank has as many experts, in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, TOLERANCES, Inputs, Operator, Sharding, torch_dtype
from ._collective import row, rows, share_of

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """Of each rank, in order: x (world, M / world, D), experts (world, M / world, K) int64, each token's without a
    repetition, and weights (world, M / world, K) fp32; scale (world, E / world, D), each rank's experts'.
    """
    import torch

    D, E, K = (case.axes[axis] for axis in "DEK")
    tokens, dtype = (case.world, share_of(case, "M")), torch_dtype(case.dtype)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    logits = drawn(*tokens, E) + float(case.options["skew"]) * drawn(E)
    chosen = logits.topk(K, -1)
    return {
        "x": drawn(*tokens, D).to(dtype),
        "experts": chosen.indices,
        "weights": chosen.values.softmax(-1),
        "scale": drawn(case.world, share_of(case, "E"), D).to(dtype),
    }


def reference(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(world, M / world, D): Σ weight · scale[expert] · x over a token's experts."""
    import torch

    found = torch.zeros_like(x)
    for k in range(experts.shape[-1]):  # (M, K, D) at once would be many times the inputs
        found += weights[..., k, None].to(x.dtype) * scale.flatten(0, 1)[experts[..., k]] * x
    return found


def bytes_(case: Case) -> int:
    """Of each GPU: its tokens, their copies at experts written and read there, and the result."""
    M, D, K = (case.axes[axis] for axis in "MDK")
    return (2 + 2 * K) * M * D // case.world * BYTES[case.dtype]


OPERATOR = Operator(
    name="expert_exchange",
    summary="Tokens sent to the ranks of their experts and back, and added up by weight",
    axes={"M": "tokens of all ranks", "D": "width", "E": "experts of all ranks", "K": "experts of a token"},
    options={"skew": (0, 1)},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=lambda case: 3 * case.axes["M"] * case.axes["K"] * case.axes["D"] // case.world,
    dtypes=("bf16", "fp32"),
    tolerances=TOLERANCES,
    sharding=Sharding(split=row, join=rows),
    plans={},
)
