"""One decode step of a causal depthwise convolution with SiLU (Mamba, arXiv 2312.00752)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (B, D), conv_state (B, D, W) as Mamba's cache keeps it, weight (D, W), bias (D,), in the case's dtype."""
    import torch

    B, D, W = (case.axes[axis] for axis in ("B", "D", "W"))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=torch_dtype(case.dtype))

    return {
        "x": normal(B, D),
        "conv_state": normal(B, D, W),
        "weight": normal(D, W),
        "bias": normal(D),
        "activation": str(case.options["activation"]),
    }


def reference(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, conv_state): the last W tokens with x behind them, and act(bias + their product with the weight)."""
    import torch

    state = torch.cat((conv_state[..., 1:], x[..., None]), -1)
    y = bias + (state * weight).sum(-1)
    return torch.nn.functional.silu(y) if activation == "silu" else y, state


def results(result: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """What a call returns, y, and what it leaves in the state."""
    return result, inputs["conv_state"]


def bytes_(case: Case) -> int:
    """Reads and writes the state; reads x and the parameters, writes y."""
    B, D, W = (case.axes[axis] for axis in ("B", "D", "W"))
    return (B * D * (2 * W + 2) + D * (W + 1)) * BYTES[case.dtype]


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="causal_conv1d_update",
    summary="one decode step of a causal depthwise convolution, state in place",
    axes={"B": "batch", "D": "channels", "W": "taps and tokens of the state"},
    options={"activation": ("silu", "none")},
    inputs=inputs,
    reference=reference,
    results=results,
    in_place=("conv_state",),
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"],
    plans={
        "quick": (grid("forward", B=1024, D=8192, W=4),),
        "quick_cpu": (grid("forward", B=64, D=2048, W=4, dtypes="fp32"),),
        "standard": (grid("forward", B=[32, 256, 4096], D=8192, W=4),),
        "full": (
            grid("forward", B=256, D=8192, W=[2, 3, 4], dtypes=["fp16", "fp32"]),
            grid("forward", B=63, D=1001, W=4, options={"activation": "none"}),
        ),
    },
)
