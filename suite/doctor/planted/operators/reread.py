"""A sum over an input that fits the last-level cache: quick from the cache, slower from memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelmark.registry.store.record import Case
from kernelmark.suite.operator import Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, N)."""
    import torch

    shape = (case.axes["M"], case.axes["N"])
    return {"x": torch.randn(*shape, device=device, generator=generator, dtype=torch_dtype(case.dtype))}


def reference(x: torch.Tensor) -> torch.Tensor:
    """Row sums of x², which have no cancellation to make rounding matter."""
    return (x * x).sum(-1)


OPERATOR = Operator(
    name="reread",
    summary="Row sums of squares over an input of a few megabytes",
    axes={"M": "rows", "N": "columns"},
    inputs=inputs,
    reference=reference,
    bytes=lambda case: 4 * case.axes["M"] * (case.axes["N"] + 1),
    flops=lambda case: 0,
    dtypes=("fp32",),
    plans={"cuda": (grid(M=2048, N=2048, dtypes="fp32"),), "cpu": (grid(M=512, N=1024, dtypes="fp32"),)},
)
