"""Sum over ranks of an array that each of them holds; each is given a share of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import Inputs, Operator, Sharding, torch_dtype
from ._collective import AXES, SUMS, rates, row, rows, share, size

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (world, N), a row a rank."""
    import torch

    shape = (case.world, case.axes["N"])
    return {"x": torch.randn(shape, device=device, generator=generator, dtype=torch_dtype(case.dtype))}


def reference(x: torch.Tensor) -> torch.Tensor:
    """The sum of the rows, (N,)."""
    return x.sum(0)


OPERATOR = Operator(
    name="reduce_scatter",
    summary="Sum over ranks, of which each gets a share",
    axes=AXES,
    inputs=inputs,
    reference=reference,
    bytes=lambda case: size(case) + size(case) // case.world,
    flops=lambda case: 0,
    tolerances=SUMS,
    rates=rates(1),
    sharding=Sharding(split=row, join=rows, part=share),
    plans={},
)
