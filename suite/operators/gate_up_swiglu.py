"""The gate and up projections of a Llama feed-forward and the gate: silu(x · gateᵀ) · (x · upᵀ) (Shazeer, arXiv
2002.05202). What the down projection then reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype
from .swiglu import reference as gated

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (M, K), the weights gate and up (N, K), in the case's dtype."""
    import torch

    M, N, K = (case.axes[axis] for axis in "MNK")
    dtype = torch_dtype(case.dtype)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator, dtype=dtype)

    return {"x": drawn(M, K), "gate": drawn(N, K) * K**-0.5, "up": drawn(N, K) * K**-0.5}


def reference(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x · gateᵀ) · (x · upᵀ), (M, N)."""
    return gated(x @ gate.T, x @ up.T)


def bytes_(case: Case) -> int:
    """Forward reads x and the weights and writes the result; backward reads these, the result's gradient in its
    place, and writes the gradients of x and of the weights.
    """
    M, N, K = (case.axes[axis] for axis in "MNK")
    read = M * K + 2 * N * K
    forward = read + M * N
    passes = {"forward": forward, "backward": forward + read}
    numbers = passes.get(case.pass_, sum(passes.values()))
    return numbers * BYTES[case.dtype]


def flops(case: Case) -> int:
    """Two a number of gate and up times K, and for each of two gradients as many."""
    M, N, K = (case.axes[axis] for axis in "MNK")
    return {"forward": 2, "backward": 4, "forward_backward": 6}[case.pass_] * M * 2 * N * K


OPERATOR = Operator(
    name="gate_up_swiglu",
    summary="gate and up projections with SwiGLU as their epilogue",
    axes={"M": "tokens", "N": "width of the feed-forward", "K": "width"},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["M"],
    dtypes=("bf16", "fp16"),
    gradients=("x", "gate", "up"),
    plans={
        "quick": (grid("forward_backward", M=4096, N=8192, K=2048),),
        "quick_cpu": (grid("forward", M=64, N=256, K=320),),
        "standard": (
            grid("forward", "backward", M=16384, N=8192, K=2048),
            grid("forward", "backward", M=8192, N=14336, K=4096),
        ),
        "full": (
            grid("forward", "backward", M=2048, N=11008, K=4096),
            grid("forward_backward", M=[17, 1000], N=1001, K=999),
            grid("forward_backward", M=4096, N=13824, K=5120, dtypes="fp16"),
        ),
    },
)
