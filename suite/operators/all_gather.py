"""The shares of an array that each rank holds one of, put together in all of them.

In place a rank's share lies where it will be in the whole array, as nccl-tests has it.
"""

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


def in_place(inputs: Inputs, case: Case) -> Inputs:
    """The same, and where the result goes."""
    return {**inputs, "place": "in"}


def laid(whole: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """A rank's share, in place with zeros where the others' will be."""
    own = share(whole, case, rank)
    if case.options["place"] == "out":
        return own
    out = whole.new_zeros(case.world, own.numel())
    out[rank] = own
    return out.flatten()


def together(parts: list[torch.Tensor], case: Case) -> torch.Tensor:
    """(N,) of all ranks' shares, wherever they lie."""
    if case.options["place"] == "in":
        parts = [x.view(case.world, -1)[rank] for rank, x in enumerate(parts)]
    return shares(parts, case)


def reference(x: torch.Tensor, place: str = "out") -> torch.Tensor:
    """The whole array."""
    return x.clone()


def part(answer: torch.Tensor, case: Case, rank: int) -> torch.Tensor:
    """Every rank has all of it."""
    return answer


OPERATOR = Operator(
    name="all_gather",
    summary="Every rank's share of an array, given to all",
    axes=AXES,
    options={"place": ("out", "in")},
    later={"place": "out"},
    variations={("place", "in"): in_place},
    inputs=inputs,
    reference=reference,
    in_place=("x",),
    bytes=lambda case: size(case) + size(case) // case.world,
    flops=lambda case: 0,
    tolerances=EXACT,
    rates=rates(1),
    sharding=Sharding(split=laid, join=together, part=part),
    # In place came later, and changes nothing of what is computed out of place.
    continues={"3f7f1295b28a": "c308c6b9b580"},
    plans={},
)
