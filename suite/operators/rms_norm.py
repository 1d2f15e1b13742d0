"""Root mean square normalization over the last dimension (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch


EPS = 0.1
"""Large, beside a mean square of about 1, so that its absence or another place of it shows."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (B, S, D) and weight (D,), both in the case's dtype."""
    import torch

    B, S, D = (case.axes[axis] for axis in "BSD")
    dtype = torch_dtype(case.dtype)
    return {
        "x": torch.randn(B, S, D, device=device, generator=generator, dtype=dtype),
        "weight": torch.randn(D, device=device, generator=generator, dtype=dtype),
        "eps": EPS,
    }


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight."""
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def bytes_(case: Case) -> int:
    """Forward reads x and writes y; backward reads x and dy and writes dx. Both read the weight."""
    B, S, D = (case.axes[axis] for axis in "BSD")
    tensors = {"forward": 2, "backward": 3, "forward_backward": 5}[case.pass_]
    return (tensors * B * S * D + D) * BYTES[case.dtype]


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="rms_norm",
    summary="RMS normalization over the last dimension, with weight",
    axes={"B": "batch", "S": "sequence", "D": "model dimension"},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    gradients=("x", "weight"),
    # Epsilon became large: nothing else is drawn or computed.
    continues={
        "4e6f28513a18": "2556a4ee90b5",
        "c650cb6a7df3": "1604e6c5545f",
        "73d67d54ca61": "7ec9b28292b6",
        "90c1f45383d8": "f113e273c9b7",
        "6e05a668fed3": "09d83b5ec21a",
        "d3086f778fa9": "b97fd1f6282d",
    },
    plans={
        "quick": (grid("forward", "backward", B=4, S=2048, D=4096),),
        "quick_cpu": (grid("forward", "backward", B=1, S=512, D=2048, dtypes="fp32"),),
        "standard": (
            grid("forward", "backward", B=[4, 32], S=2048, D=[4096, 8192]),
            # Fewer rows than multiprocessors, and rows too long for one.
            grid("forward", B=1, S=[1, 64], D=[65536, 262144]),
            grid("backward", B=1, S=64, D=[65536, 262144]),
        ),
        "full": (
            grid("forward", "backward", B=[4, 32], S=4096, D=[4096, 8192]),
            grid("forward", "backward", B=4, S=2048, D=4096, dtypes=["fp16", "fp32"]),
            grid("forward", "backward", B=1, S=[1, 2048], D=4096),
            grid("forward", "backward", B=3, S=1023, D=4095),
            grid("forward", "backward", B=1, S=2048, D=65536),
        ),
    },
)
