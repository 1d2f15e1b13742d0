"""Sum over ranks of an array that each of them holds, given to all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import Inputs, Operator, Sharding, torch_dtype
from ._collective import AXES, SUMS, rates, row, rows, size

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (world, N), a row a rank, and where the result goes."""
    import torch

    shape = (case.world, case.axes["N"])
    return {
        "x": torch.randn(shape, device=device, generator=generator, dtype=torch_dtype(case.dtype)),
        "place": case.options["place"],
    }


def reference(x: torch.Tensor, place: str) -> torch.Tensor:
    """Of (world, N): the sum of the rows; in place their mean, which stays finite however often it is taken."""
    return x.sum(0) if place == "out" else x.mean(0)


def part(answer: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """Every rank has all of it."""
    return answer


OPERATOR = Operator(
    name="all_reduce",
    summary="Sum over ranks, given to all; in place the mean",
    axes=AXES,
    options={"place": ("out", "in")},
    inputs=inputs,
    reference=reference,
    in_place=("x",),
    bytes=lambda case: 2 * size(case),
    flops=lambda case: 0,
    tolerances=SUMS,
    rates=rates(2),
    sharding=Sharding(split=row, join=rows, part=part),
    plans={},
)
