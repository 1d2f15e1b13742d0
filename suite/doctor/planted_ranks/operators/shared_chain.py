"""A sum over ranks, of which each takes a share of rows through a chain of matrix products.

Nothing is exchanged at the end: how long a rank takes shows in its own time alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelmark.registry.store.record import Case
from kernelmark.suite.operator import Inputs, Operator, Sharding, Tolerance, torch_dtype

if TYPE_CHECKING:
    import torch

LINKS = 40
SIZES = {"cuda": 2048, "cpu": 240}


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (world, N, N), one matrix a rank, and an orthogonal w (1, N, N), the same in all."""
    import torch

    N, dtype = case.axes["N"], torch_dtype(case.dtype)
    x = torch.randn(case.world, N, N, device=device, generator=generator, dtype=dtype)
    w = torch.randn(N, N, device=device, generator=generator, dtype=dtype)
    return {"x": x, "w": torch.linalg.qr(w).Q.contiguous()[None]}


def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Σ x · w⁴⁰."""
    total = x.sum(0)
    for _ in range(LINKS):
        total = total @ w[0]
    return total


def split(whole: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """A rank's own x (N, N); all of w."""
    return (whole if whole.shape[0] == 1 else whole[rank]).clone()


def join(parts: list[torch.Tensor], case: Case) -> torch.Tensor:
    """The inverse."""
    import torch

    return parts[0] if parts[0].dim() == 3 else torch.stack(parts)


def part(answer: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """A rank's share of the rows."""
    return answer.chunk(case.world)[rank]


OPERATOR = Operator(
    name="shared_chain",
    summary="A sum over ranks, then forty matrix products of each one's rows",
    axes={"N": "rows and columns"},
    inputs=inputs,
    reference=reference,
    bytes=lambda case: 3 * 4 * case.axes["N"] ** 2,
    flops=lambda case: 2 * LINKS * case.axes["N"] ** 3 // case.world,
    dtypes=("fp32",),
    tolerances={"fp32": Tolerance(norm=1e-4, absolute=1e-3, relative=1e-3)},
    sharding=Sharding(split=split, join=join, part=part),
    plans={},
)
