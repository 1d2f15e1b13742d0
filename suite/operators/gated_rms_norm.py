"""Gated RMS normalization, as between the scan and the output of Mamba-2 (Dao and Gu, arXiv 2405.21060)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch


EPS = 0.1
"""Large, beside a mean square of about 1, so that its absence or another place of it shows."""


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x and z (B, S, D) and weight (D,) in the case's dtype; G groups of D / G numbers are normalized each."""
    import torch

    B, S, D, G = (case.axes[axis] for axis in ("B", "S", "D", "G"))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=torch_dtype(case.dtype))

    return {
        "x": normal(B, S, D),
        "z": normal(B, S, D),
        "weight": normal(D),
        "eps": EPS,
        "group": D // G,
        "order": str(case.options["order"]),
    }


def reference(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, group: int, order: str
) -> torch.Tensor:
    """norm(x · silu(z)) · weight with order gate_first, norm(x) · weight · silu(z) with norm_first."""
    import torch

    gate = torch.nn.functional.silu(z)
    h = x * gate if order == "gate_first" else x
    apart = h.unflatten(-1, (-1, group))
    y: torch.Tensor = (apart * (apart.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * weight
    return y if order == "gate_first" else y * gate


def bytes_(case: Case) -> int:
    """Forward reads x and z, writes y; backward reads them and dy, writes dx and dz. Both read the weight."""
    B, S, D = (case.axes[axis] for axis in "BSD")
    tensors = {"forward": 3, "backward": 5, "forward_backward": 8}[case.pass_]
    return (tensors * B * S * D + D) * BYTES[case.dtype]


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="gated_rms_norm",
    summary="RMS normalization with a SiLU gate, before the norm or behind it",
    axes={"B": "batch", "S": "sequence", "D": "model dimension", "G": "groups normalized each"},
    options={"order": ("gate_first", "norm_first")},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    gradients=("x", "z", "weight"),
    # Epsilon became large: nothing else is drawn or computed.
    continues={
        "f8986fffd69d": "67e129538d78",
        "94179591ee71": "d2122314d63f",
        "f29644648dca": "0d831552f413",
        "e1c3608faf04": "1825b3d88383",
        "d0ef0677e05d": "59c670bbcd71",
        "1e869eb8772e": "b94f9d7c6954",
    },
    plans={
        "quick": (grid("forward", B=8, S=2048, D=5120, G=1),),
        "quick_cpu": (grid("forward", B=1, S=512, D=2048, G=1, dtypes="fp32"),),
        "standard": (
            grid("forward", "backward", B=8, S=2048, D=5120, G=1, options={"order": ["gate_first", "norm_first"]}),
            grid("forward", "backward", B=8, S=2048, D=8192, G=8),
        ),
        "full": (
            grid("forward", "backward", B=8, S=2048, D=5120, G=1, dtypes=["fp16", "fp32"]),
            grid("forward", "backward", B=1, S=1, D=5120, G=1),
            grid("forward", "backward", B=3, S=1023, D=4095, G=3, options={"order": "norm_first"}),
            grid("forward", "backward", B=1, S=2048, D=65536, G=1),
        ),
    },
)
