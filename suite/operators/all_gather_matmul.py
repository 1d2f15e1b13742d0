"""Product of a matrix whose rows the ranks share with each rank's own columns of a weight: a linear layer that is
parallel in its columns, behind activations that are parallel in the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, TOLERANCES, Inputs, Operator, Sharding, torch_dtype
from ._collective import row, rows, share_of

if TYPE_CHECKING:
    import torch

AXES = {"M": "rows", "N": "columns of the product over all ranks", "K": "length of the sums"}


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """a (world, M / world, K), each rank's rows in order, and w (world, K, N / world), a matrix a rank."""
    import torch

    K, world, dtype = case.axes["K"], case.world, torch_dtype(case.dtype)
    a = torch.randn(world, share_of(case, "M"), K, device=device, generator=generator, dtype=dtype)
    w = torch.randn(world, K, share_of(case, "N"), device=device, generator=generator, dtype=dtype)
    return {"a": a, "w": w}


def reference(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """(world, M, N / world): each rank's product."""
    return a.flatten(0, 1) @ w


def bytes_(case: Case) -> int:
    """Of each GPU: all of a, its matrix of w, its columns of the product."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    return (M * K + (K * N + M * N) // case.world) * BYTES[case.dtype]


OPERATOR = Operator(
    name="all_gather_matmul",
    summary="A matrix gathered from all ranks, times each one's own columns of a weight",
    axes=AXES,
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=lambda case: 2 * case.axes["M"] * case.axes["N"] * case.axes["K"] // case.world,
    dtypes=("bf16", "fp16", "fp32"),
    tolerances=TOLERANCES,
    sharding=Sharding(split=row, join=rows),
    plans={},
)
