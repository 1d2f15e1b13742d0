"""Sum over ranks of an array that each of them holds; each is given a share of it.

In place the sum is written to a rank's own share of its array, as nccl-tests has it.
"""

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


def in_place(inputs: Inputs, case: Case) -> Inputs:
    """The same, and where the result goes."""
    return {**inputs, "place": "in"}


def reference(x: torch.Tensor, place: str = "out") -> torch.Tensor:
    """The sum of the rows, (N,)."""
    return x.sum(0)


OPERATOR = Operator(
    name="reduce_scatter",
    summary="Sum over ranks, of which each gets a share",
    axes=AXES,
    options={"place": ("out", "in")},
    later={"place": "out"},
    variations={("place", "in"): in_place},
    inputs=inputs,
    reference=reference,
    in_place=("x",),
    bytes=lambda case: size(case) + size(case) // case.world,
    flops=lambda case: 0,
    tolerances=SUMS,
    rates=rates(1),
    sharding=Sharding(split=row, join=rows, part=share),
    # In place came later, and changes nothing of what is computed out of place.
    continues={"d3f22578c4cd": "d7519782890b", "b6d47b4b5549": "48ed64858b40", "6981da27dc30": "5312e4196e00"},
    plans={},
)
