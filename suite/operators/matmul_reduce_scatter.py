"""Sum over ranks of each one's product, of which each is given its rows: a linear layer that is parallel in its
rows, before activations that are parallel in the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, Sharding, Tolerance, torch_dtype
from ._collective import row, rows, share_of

if TYPE_CHECKING:
    import torch

AXES = {"M": "rows", "N": "columns", "K": "length of the sums over all ranks"}
TOLERANCES = {
    "bf16": Tolerance(norm=8e-3, absolute=6e-2, relative=3e-2),
    "fp16": Tolerance(norm=1e-3, absolute=8e-3, relative=4e-3),
    "fp32": Tolerance(norm=1e-5, absolute=1e-4, relative=1e-4),
}
"""Each rank's product may be rounded to the dtype before it is added up, as collectives take it."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """a (world, M, K / world) and w (world, K / world, N), a matrix of each a rank."""
    import torch

    M, N, K, dtype = case.axes["M"], case.axes["N"], share_of(case, "K"), torch_dtype(case.dtype)
    share_of(case, "M")
    a = torch.randn(case.world, M, K, device=device, generator=generator, dtype=dtype)
    w = torch.randn(case.world, K, N, device=device, generator=generator, dtype=dtype)
    return {"a": a, "w": w}


def reference(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """(M, N), the sum of the ranks' products."""
    return (a @ w).sum(0)


def part(answer: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """A rank's rows."""
    return answer.chunk(case.world)[rank].clone()


def bytes_(case: Case) -> int:
    """Of each GPU: its matrices, and its rows of the sum."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    return (M * K + K * N + M * N) // case.world * BYTES[case.dtype]


OPERATOR = Operator(
    name="matmul_reduce_scatter",
    summary="Sum over ranks of each one's matrix product, of which each gets its rows",
    axes=AXES,
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=lambda case: 2 * case.axes["M"] * case.axes["N"] * case.axes["K"] // case.world,
    dtypes=("bf16", "fp16", "fp32"),
    tolerances=TOLERANCES,
    sharding=Sharding(split=row, join=rows, part=part),
    plans={},
)
