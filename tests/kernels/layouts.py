"""Matrices that lie in memory as those of callers may."""

from __future__ import annotations

import torch

LAYOUTS = ("dense", "apart", "odd", "turned")


def laid(M: int, N: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Random numbers (M, N): dense, a part of wider rows, every second column of them, or column by column."""
    wide = torch.randn(M, 2 * N + 1).to(dtype)
    found = {
        "dense": wide[:, :N].clone(),
        "apart": wide[:, 1 : N + 1],
        "odd": wide[:, 1::2],
        "turned": wide[:, :N].t().clone().t(),
    }
    return found[layout]
