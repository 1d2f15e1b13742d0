"""The shares of an array that each rank holds one of, put together in all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import Inputs, Operator, Sharding, torch_dtype
from ._collective import AXES, EXACT, rates, share, shares, size

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (N,), of which each rank has an equal share in order."""
    import torch

    return {"x": torch.randn(case.axes["N"], device=device, generator=generator, dtype=torch_dtype(case.dtype))}


def reference(x: torch.Tensor) -> torch.Tensor:
    """The whole array."""
    return x.clone()


def part(answer: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """Every rank has all of it."""
    return answer


OPERATOR = Operator(
    name="all_gather",
    summary="Every rank's share of an array, given to all",
    axes=AXES,
    inputs=inputs,
    reference=reference,
    bytes=lambda case: size(case) + size(case) // case.world,
    flops=lambda case: 0,
    tolerances=EXACT,
    rates=rates(1),
    sharding=Sharding(split=share, join=shares, part=part),
    plans={},
)
