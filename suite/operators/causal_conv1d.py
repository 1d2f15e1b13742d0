"""Causal depthwise convolution with SiLU, as before the scan of a state-space model (Mamba, arXiv 2312.00752)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...registry.store.record import Case
from ..operator import BYTES, Inputs, Operator, grid, torch_dtype

if TYPE_CHECKING:
    import torch


def inputs(case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
    """x (B, D, S) or (B, S, D) by layout, weight (D, W), bias (D,), all in the case's dtype.

    With option initial, the W - 1 tokens before the first, laid out as x is; else they are zero.
    """
    import torch

    B, D, S, W = (case.axes[axis] for axis in ("B", "D", "S", "W"))
    channels_last = case.options["layout"] == "bsd"

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=torch_dtype(case.dtype))

    def tokens(count: int) -> torch.Tensor:
        return normal(B, count, D) if channels_last else normal(B, D, count)

    return {
        "x": tokens(S),
        "weight": normal(D, W),
        "bias": normal(D),
        "initial_state": tokens(W - 1) if case.options["initial"] else None,
        "activation": str(case.options["activation"]),
        "layout": str(case.options["layout"]),
    }


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    initial_state: torch.Tensor | None,
    activation: str,
    layout: str,
) -> torch.Tensor:
    """act(bias + Σ_w weight[:, w] · x[s - W + 1 + w]) at every token s, one term a tap."""
    import torch

    W = weight.shape[1]
    dim = 1 if layout == "bsd" else 2
    if initial_state is None:
        shape = list(x.shape)
        shape[dim] = W - 1
        initial_state = x.new_zeros(shape)
    longer = torch.cat((initial_state, x), dim)

    def wide(row: torch.Tensor) -> torch.Tensor:
        return row if layout == "bsd" else row[:, None]

    y = sum((wide(weight[:, w]) * longer.narrow(dim, w, x.shape[dim]) for w in range(W)), wide(bias))
    return torch.nn.functional.silu(y) if activation == "silu" else y


def bytes_(case: Case) -> int:
    """Forward reads x and writes y; backward reads x and dy and writes dx. Both read the weight and the bias."""
    B, D, S, W = (case.axes[axis] for axis in ("B", "D", "S", "W"))
    tensors = {"forward": 2, "backward": 3, "forward_backward": 5}[case.pass_]
    return (tensors * B * D * S + D * (W + 1)) * BYTES[case.dtype]


def flops(case: Case) -> int:
    """No matmul: bound by memory."""
    return 0


OPERATOR = Operator(
    name="causal_conv1d",
    summary="causal depthwise convolution of a few taps, with bias and SiLU",
    axes={"B": "batch", "D": "channels", "S": "sequence", "W": "taps"},
    options={"layout": ("bds", "bsd"), "activation": ("silu", "none"), "initial": (False, True)},
    inputs=inputs,
    reference=reference,
    bytes=bytes_,
    flops=flops,
    tokens=lambda case: case.axes["B"] * case.axes["S"],
    gradients=("x", "weight", "bias"),
    plans={
        "quick": (grid("forward", "backward", B=8, D=4096, S=2048, W=4),),
        "quick_cpu": (grid("forward", B=1, D=256, S=1024, W=4, dtypes="fp32"),),
        "standard": (
            grid("forward", "backward", B=8, D=4096, S=2048, W=4, options={"layout": ["bds", "bsd"]}),
            grid("forward", "backward", B=1, D=5376, S=32768, W=4, options={"layout": "bsd"}),
        ),
        "full": (
            grid("forward", "backward", B=8, D=4096, S=2048, W=4, dtypes=["fp16", "fp32"]),
            grid("forward", "backward", B=8, D=4096, S=2048, W=[2, 3], options={"layout": ["bds", "bsd"]}),
            grid("forward", "backward", B=3, D=1001, S=1023, W=4, options={"initial": [False, True]}),
            grid("forward", "backward", B=3, D=1001, S=1023, W=4, options={"layout": "bsd", "activation": "none"}),
        ),
    },
)
