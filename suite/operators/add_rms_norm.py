"""Residual addition and RMS normalization in one: the seam between two blocks of a transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch


EPS = 0.1
"""Large, beside a mean square of about 1, so that its absence or another place of it shows."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x and residual (B, S, D) and weight (D,), all in the case's dtype."""
    import torch

    B, S, D = (case.axes[axis] for axis in "BSD")
    dtype = torch_dtype(case.dtype)
    return {
        "x": torch.randn(B, S, D, device=device, generator=generator, dtype=dtype),
        "residual": torch.randn(B, S, D, device=device, generator=generator, dtype=dtype),
        "weight": torch.randn(D, device=device, generator=generator, dtype=dtype),
        "eps": EPS,
    }


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, h): h = x + residual, y = h / sqrt(mean(h²) + eps) · weight."""
    h = x + residual
    return h * (h.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight, h


def bytes_(case: Case) -> int:
    """Forward reads x and residual and writes y and h; backward reads dy, dh and h and writes one gradient.

    The gradients of x and residual are equal, so one tensor is both. Each pass reads the weight, backward
    writes its gradient.
    """
    B, S, D = (case.axes[axis] for axis in "BSD")
    tensors, rows = {"forward": (4, 1), "backward": (4, 2), "forward_backward": (8, 3)}[case.pass_]
    return (tensors * B * S * D + rows * D) * BYTES[case.dtype]


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="add_rms_norm",
    summary="residual addition and RMS normalization, both results kept",
    axes={"B": "batch", "S": "sequence", "D": "model dimension"},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    gradients=("x", "residual", "weight"),
    # Epsilon became large: nothing else is drawn or computed.
    continues={
        "c0550d829220": "176d9a39df18",
        "f4f2584fdb51": "69c57113e389",
        "d3c90c0cd1ae": "b1ac65acee86",
        "82d59156ffb7": "8c526d807e4f",
        "ecace9f209d4": "9fa15734a5e0",
        "d47d136ef8df": "3a69d9a2d3eb",
    },
    plans={
        "quick": (grid("forward", B=4, S=2048, D=4096),),
        "quick_cpu": (grid("forward", B=1, S=512, D=2048, dtypes="fp32"),),
        "standard": (
            grid("forward", "backward", B=[4, 32], S=2048, D=[4096, 8192]),
            # Fewer rows than multiprocessors, and rows too long for one.
            grid("forward", B=1, S=[1, 64], D=[65536, 262144]),
            grid("backward", B=1, S=64, D=[65536, 262144]),
        ),
        "full": (
            grid("forward", "backward", B=4, S=2048, D=4096, dtypes=["fp16", "fp32"]),
            grid("forward", "backward", B=1, S=[1, 2048], D=4096),
            grid("forward", "backward", B=3, S=1023, D=4095),
            grid("forward", "backward", B=1, S=2048, D=65536),
        ),
    },
)
