"""Gaussian error linear unit (Hendrycks and Gimpel, arXiv 1606.08415)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, N) in the case's dtype, and which form is meant."""
    import torch

    M, N = case.axes["M"], case.axes["N"]
    return {
        "x": torch.randn(M, N, device=device, generator=generator, dtype=torch_dtype(case.dtype)),
        "approximate": str(case.options["approximate"]),
    }


def reference(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """x · Φ(x), Φ the normal distribution function, or its approximation by a hyperbolic tangent."""
    if approximate == "none":
        inner = (x * 0.5**0.5).erf()
    else:
        inner = ((x + 0.044715 * x.pow(3)) * 0.7978845608028654).tanh()
    y: torch.Tensor = x * 0.5 * (1 + inner)
    return y


def bytes_(case: Case) -> int:
    """Forward reads x and writes y; backward reads x and dy and writes dx."""
    tensors = {"forward": 2, "backward": 3, "forward_backward": 5}[case.pass_]
    return tensors * case.axes["M"] * case.axes["N"] * BYTES[case.dtype]


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="gelu",
    summary="Gaussian error linear unit, exact or with tanh",
    axes={"M": "tokens", "N": "width"},
    options={"approximate": ("tanh", "none")},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    gradients=("x",),
    plans={
        "quick": (grid("forward", M=4096, N=4096),),
        "quick_cpu": (grid("forward", M=512, N=2048, dtypes="fp32"),),
        "standard": (grid("forward", "backward", M=[4096, 16384], N=4096),),
        "full": (
            grid("forward", "backward", M=16384, N=4096, dtypes=["fp16", "fp32"]),
            grid("forward", "backward", M=16384, N=4096, options={"approximate": "none"}),
            grid("forward", "backward", M=[1, 4095], N=4095),
        ),
    },
)
