"""Product of a matrix whose rows the ranks share with each rank's own columns of a weight: a linear layer that is
parallel in its columns, behind activations that are parallel in the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, TOLERANCES, Inputs, Operator, Sharding, torch_dtype
from ._collective import rows, share_of

if TYPE_CHECKING:
    import torch

AXES = {"M": "rows", "N": "columns of the product over all ranks", "K": "length of the sums"}


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """a (M, K), of which each rank has equal rows in order, and w (world, K, N / world), a matrix a rank."""
    import torch

    M, K, dtype = case.axes["M"], case.axes["K"], torch_dtype(case.dtype)
    share_of(case, "M")
    a = torch.randn(M, K, device=device, generator=generator, dtype=dtype)
    w = torch.randn(case.world, K, share_of(case, "N"), device=device, generator=generator, dtype=dtype)
    return {"a": a, "w": w}


def reference(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """(world, M, N / world): each rank's product."""
    return a @ w


def split(whole: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """A rank's rows of a, its matrix of w."""
    return (whole[rank] if whole.dim() == 3 else whole.chunk(case.world)[rank]).clone()


def join(parts: list[torch.Tensor], case: Case) -> torch.Tensor:
    """The inverse. A rank's part of a has M / world rows, of w K."""
    import torch

    is_w = parts[0].shape == (case.axes["K"], case.axes["N"] // case.world)
    is_a = parts[0].shape == (case.axes["M"] // case.world, case.axes["K"])
    if is_w and is_a:
        raise NotImplementedError("a rank's parts of a and w have one shape, and cannot be told apart")
    return rows(parts, case) if is_w else torch.cat(parts)


def part(answer: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """A rank's own columns, of all rows."""
    return answer[rank].clone()


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
    sharding=Sharding(split=split, join=join, part=part),
    plans={},
)
