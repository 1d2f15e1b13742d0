"""SwiGLU's gate (Shazeer, arXiv 2002.05202), forward and backward."""

from __future__ import annotations

import torch

from ._gated_activation import gated

_swiglu, _gradients = gated("swiglu", silu=True)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, elementwise.

    gate and up of one shape and dtype (bf16, fp16 or fp32) to y of the same; computed in fp32.
    Differentiable in both. Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or
    device; the message names the argument.
    """
    return _swiglu(gate, up)


def gradients(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate's, up's) from that of y."""
    return _gradients(dy, gate, up)
