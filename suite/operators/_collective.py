"""What the collectives share: their sizes, and bandwidths as nccl-tests defines them.

`S` is the whole array: what each rank holds before all-reduce, reduce-scatter and all-to-all, and after
all-gather. algbw = S / t; busbw = algbw times the share of S that each link must carry at least, so that it can be
held against the speed of a link whatever the number of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ...registry.store.metric import Metric
from ...registry.store.record import Case
from ..operator import BYTES, Tolerance

if TYPE_CHECKING:
    import torch

AXES = {"N": "elements of the whole array"}
"""Their cases stand in the plan `distributed`: quick, standard and full are of one GPU."""

ALGBW = Metric(
    "algbw", "GB/s", better="higher", shown="table", about="Bytes of the whole array over the time, of nccl-tests."
)
BUSBW = Metric(
    "busbw",
    "GB/s",
    better="higher",
    shown="table",
    about="algbw times what a link must carry at least of each byte: 2(n-1)/n of an all-reduce over n GPUs, "
    "(n-1)/n of the others (nccl-tests).",
)

WIRE = Metric(
    "wire",
    "GB/s",
    better="higher",
    about="busbw of the bytes that are sent, where these are fewer than the array's: what the link carried.",
)

SUMS = {
    "bf16": Tolerance(norm=8e-3, absolute=5e-2, relative=3e-2),
    "fp16": Tolerance(norm=1e-3, absolute=8e-3, relative=4e-3),
    "fp32": Tolerance(norm=1e-6, absolute=1e-5, relative=1e-5),
}
"""Sums of a few ranks in any order."""

EXACT = dict.fromkeys(("bf16", "fp16", "fp32"), Tolerance(norm=0.0, absolute=0.0, relative=0.0))
"""Of what only moves data."""


def size(case: Case) -> int:
    """Bytes of the whole array."""
    return case.axes["N"] * BYTES[case.dtype]


def chunk(case: Case) -> int:
    """Elements of a rank's share of the whole array."""
    return share_of(case, "N")


def share_of(case: Case, axis: str) -> int:
    """A rank's share of an axis. Raises NotImplementedError where that is no whole number."""
    whole, world = case.axes[axis], case.world
    if whole % world:
        raise NotImplementedError(f"{axis} = {whole} cannot be shared evenly by {world} ranks")
    return whole // world


def rates(
    trips: int, sent: Callable[[Case], float] | None = None
) -> Mapping[Metric, Callable[[Case, float], float]]:
    """algbw and busbw of a collective that sends every byte so many times; of one that sends fewer bytes than the
    array has, their share is `sent`, and what the link carries stands beside.
    """

    def algbw(case: Case, milliseconds: float) -> float:
        return size(case) / milliseconds / 1e6

    def busbw(case: Case, milliseconds: float) -> float:
        return algbw(case, milliseconds) * trips * (case.world - 1) / case.world

    if sent is None:
        return {ALGBW: algbw, BUSBW: busbw}
    return {ALGBW: algbw, BUSBW: busbw, WIRE: lambda case, milliseconds: busbw(case, milliseconds) * sent(case)}


def row(whole: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """A rank's own array of (world, N)."""
    return whole[rank].clone()


def rows(parts: list[torch.Tensor], case: Case) -> torch.Tensor:
    """(world, N) of all ranks' own arrays."""
    import torch

    return torch.stack(parts)


def share(whole: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """A rank's share of one array (N,)."""
    return whole.view(case.world, chunk(case))[rank].clone()


def shares(parts: list[torch.Tensor], case: Case) -> torch.Tensor:
    """(N,) of all ranks' shares."""
    import torch

    return torch.cat(parts)
