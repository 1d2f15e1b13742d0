"""A private softmax for a CPU, so that the example runs without a GPU: three steps of PyTorch, one result."""

from __future__ import annotations

import torch


def softmax(x: torch.Tensor) -> torch.Tensor:
    """x (M, D) to its softmax over the last dimension, in x's dtype; computed in fp32."""
    power = (x.float() - x.amax(-1, keepdim=True)).exp_()
    return power.div_(power.sum(-1, keepdim=True)).to(x.dtype)
