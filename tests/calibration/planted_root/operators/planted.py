"""RMS normalization that a commit can make slower by a known share: each option value is a slowdown of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelmark.registry.store.record import Case
from kernelmark.suite.operator import Inputs, Operator, Tolerance, grid, torch_dtype

if TYPE_CHECKING:
    import torch

SHARES = {
    "none": 0.0,
    "plus1": 0.01,
    "plus2": 0.02,
    "plus3": 0.03,
    "plus4": 0.04,
    "plus5": 0.05,
    "plus6": 0.06,
    "plus7": 0.07,
    "plus10": 0.10,
    "minus5": -0.05,
    "minus10": -0.10,
}
"""Of the work; below 0 it is the baseline that does more, so that the commit is an improvement."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, D), weight (D,), and the share that is planted in this case."""
    import torch

    dtype = torch_dtype(case.dtype)
    return {
        "x": torch.randn(case.axes["M"], case.axes["D"], device=device, generator=generator, dtype=dtype),
        "weight": torch.randn(case.axes["D"], device=device, generator=generator, dtype=dtype),
        "share": SHARES[str(case.options["effect"])],
    }


def reference(x: torch.Tensor, weight: torch.Tensor, share: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + 1e-6) · weight, whatever is planted."""
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


OPERATOR = Operator(
    name="planted",
    summary="RMS normalization with a slowdown planted by a commit",
    axes={"M": "rows", "D": "columns", "R": "number of the repetition"},
    options={"effect": tuple(SHARES)},
    inputs=inputs,
    reference=reference,
    bytes=lambda case: 4 * case.axes["M"] * case.axes["D"],
    flops=lambda case: 0,
    dtypes=("bf16", "fp32"),
    tolerances={
        "bf16": Tolerance(norm=1e-2, absolute=5e-2, relative=2e-2),
        "fp32": Tolerance(norm=1e-5, absolute=1e-4, relative=1e-4),
    },
    plans={"quick": (grid(M=32768, D=4096, R=0),)},
)
