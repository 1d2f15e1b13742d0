"""A linear layer and cross-entropy on a CPU: rows in chunks, fused loops over their logits by Inductor."""

from __future__ import annotations

import torch
import torch.utils.checkpoint

BUFFER = 1 << 26
"""Bytes of logits at a time."""


@torch.compile(dynamic=False)
def _losses(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    wide = logits.float()
    wide = wide - wide.amax(-1, keepdim=True).detach()  # large logits cancel exactly
    return (wide.exp().sum(-1).log() - wide.gather(-1, target[:, None]).squeeze(-1)).sum()


def fused_linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """x (M, D), weight (V, D) and target (M,) to their mean cross-entropy in the dtype of x; computed in fp32.

    Differentiable; what backward needs of a chunk is computed again there.
    """
    height = max(1, BUFFER // (weight.shape[0] * x.element_size()))
    total = x.new_zeros((), dtype=torch.float32)
    for some, wanted in zip(x.split(height), target.split(height), strict=True):
        if torch.is_grad_enabled():
            total = total + torch.utils.checkpoint.checkpoint(_chunk, some, weight, wanted, use_reentrant=False)
        else:
            total = total + _chunk(some, weight, wanted)
    return (total / x.shape[0]).to(x.dtype)


def _chunk(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    losses: torch.Tensor = _losses(x @ weight.t(), target)
    return losses
