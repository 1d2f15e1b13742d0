"""A chain of matrix products: work that can be made longer by a known share, with one right answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelmark.registry.store.record import Case
from kernelmark.suite.operator import Inputs, Operator, Tolerance, grid, torch_dtype

if TYPE_CHECKING:
    import torch

LINKS = 40


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (N, N) and an orthogonal w (N, N), so that the product neither grows nor fades."""
    import torch

    N = case.axes["N"]
    x, w = (torch.randn(N, N, device=device, generator=generator, dtype=torch_dtype(case.dtype)) for _ in range(2))
    return {"x": x, "w": torch.linalg.qr(w).Q.contiguous()}


def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x · w⁴⁰."""
    for _ in range(LINKS):
        x = x @ w
    return x


OPERATOR = Operator(
    name="chain",
    summary="Forty matrix products in a row",
    axes={"N": "rows and columns"},
    inputs=inputs,
    reference=reference,
    bytes=lambda case: 3 * 4 * case.axes["N"] ** 2,
    flops=lambda case: 2 * LINKS * case.axes["N"] ** 3,
    dtypes=("fp32",),
    tolerances={"fp32": Tolerance(norm=1e-4, absolute=1e-3, relative=1e-3)},
    plans={"cuda": (grid(N=1024, dtypes="fp32"),), "cpu": (grid(N=192, dtypes="fp32"),)},
)
