"""The gate of a Llama feed-forward block: silu(gate) · up (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """gate and up (M, N) in the case's dtype."""
    import torch

    M, N = case.axes["M"], case.axes["N"]
    dtype = torch_dtype(case.dtype)
    return {
        "gate": torch.randn(M, N, device=device, generator=generator, dtype=dtype),
        "up": torch.randn(M, N, device=device, generator=generator, dtype=dtype),
    }


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, with silu(g) = g / (1 + exp(-g))."""
    return gate * gate.sigmoid() * up


def bytes_(case: Case) -> int:
    """Forward reads gate and up and writes y; backward reads gate, up and dy and writes both gradients."""
    tensors = {"forward": 3, "backward": 5, "forward_backward": 8}[case.pass_]
    return tensors * case.axes["M"] * case.axes["N"] * BYTES[case.dtype]


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="swiglu",
    summary="SiLU of the gate times the up projection",
    axes={"M": "tokens", "N": "width"},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    gradients=("gate", "up"),
    plans={
        "quick": (grid("forward", "backward", M=2048, N=11008),),
        "quick_cpu": (grid("forward", M=256, N=4096, dtypes="fp32"),),
        "standard": (grid("forward", "backward", M=[2048, 8192], N=11008),),
        "full": (
            grid("forward", "backward", M=8192, N=11008, dtypes=["fp16", "fp32"]),
            grid("forward", "backward", M=[1, 2047], N=11007),
        ),
    },
)
