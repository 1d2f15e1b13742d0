"""Layer normalization over the last dimension (Ba, Kiros and Hinton, arXiv 1607.06450)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch


EPS = 0.1
"""Large, beside a mean square of about 1, so that its absence or another place of it shows."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (B, S, D), weight (D,) and bias (D,), all in the case's dtype."""
    import torch

    B, S, D = (case.axes[axis] for axis in "BSD")
    dtype = torch_dtype(case.dtype)
    return {
        "x": torch.randn(B, S, D, device=device, generator=generator, dtype=dtype),
        "weight": torch.randn(D, device=device, generator=generator, dtype=dtype),
        "bias": torch.randn(D, device=device, generator=generator, dtype=dtype),
        "eps": EPS,
    }


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) · weight + bias, with the biased variance."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight + bias


def bytes_(case: Case) -> int:
    """Forward reads x, weight and bias and writes y; backward reads x, dy and weight and writes all gradients."""
    B, S, D = (case.axes[axis] for axis in "BSD")
    tensors, rows = {"forward": (2, 2), "backward": (3, 3), "forward_backward": (5, 5)}[case.pass_]
    return (tensors * B * S * D + rows * D) * BYTES[case.dtype]


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="layer_norm",
    summary="layer normalization over the last dimension, with weight and bias",
    axes={"B": "batch", "S": "sequence", "D": "model dimension"},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    gradients=("x", "weight", "bias"),
    # Epsilon became large: nothing else is drawn or computed.
    continues={
        "4b1c26117fe6": "07e5d00e162e",
        "0a092ea50d09": "0cbe8574b085",
        "913d0fe60905": "0e6d960fbe16",
        "58150612c805": "bc15a36a7685",
        "0dbf313d7bb5": "8d96559d3560",
        "3203fd9b98f0": "becfb87e18b9",
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
