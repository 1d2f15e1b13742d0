"""GeGLU's gate (Shazeer, arXiv 2002.05202), forward and backward."""

from __future__ import annotations

import torch

from ._gated_activation import gated

_geglu, _ = gated("geglu", silu=False)


def geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) · up, elementwise, with the tanh form of gelu.

    gate and up of one shape and dtype (bf16, fp16 or fp32) to y of the same; computed in fp32.
    Differentiable in both. Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or
    device; the message names the argument.
    """
    return _geglu(gate, up)
