"""The same on a CPU, where the work is to wait: it tries out the program that plants, and measures nothing."""

from __future__ import annotations

import time

import torch

from .._commit import extra

SECONDS = 0.004


def planted(x: torch.Tensor, weight: torch.Tensor, share: float) -> torch.Tensor:
    """x (M, D) and weight (D,) to y (M, D)."""
    end = time.perf_counter() + SECONDS * (1 + extra(share))
    y = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    while time.perf_counter() < end:
        pass
    return y
