"""Every rank sends a share of its array to every other: rank r ends with all ranks' r-th shares, by rank.

Out of place alone: nccl-tests does not check it in place, and no library has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import Inputs, Operator, Sharding, torch_dtype
from ._collective import AXES, EXACT, chunk, rates, row, rows, size

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (world, N), a row a rank, of as many equal shares as there are ranks."""
    import torch

    chunk(case)
    shape = (case.world, case.axes["N"])
    return {"x": torch.randn(shape, device=device, generator=generator, dtype=torch_dtype(case.dtype))}


def reference(x: torch.Tensor) -> torch.Tensor:
    """(world, N): row r holds the r-th share of each row in order."""
    world = x.shape[0]
    return x.view(world, world, -1).transpose(0, 1).reshape(world, -1)


OPERATOR = Operator(
    name="all_to_all",
    summary="Every rank's shares, one for each rank, exchanged",
    axes=AXES,
    inputs=inputs,
    reference=reference,
    bytes=lambda case: 2 * size(case),
    flops=lambda case: 0,
    tolerances=EXACT,
    rates=rates(1),
    sharding=Sharding(split=row, join=rows),
    plans={},
)
