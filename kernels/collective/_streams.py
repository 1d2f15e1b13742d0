"""Streams for copies beside one another."""

from __future__ import annotations

import functools

import torch


@functools.cache
def stream(device: torch.device, number: int, priority: int = 0) -> torch.cuda.Stream:
    """A device's side stream of that number, always the same. Below 0 its kernels go before others."""
    return torch.cuda.Stream(device, priority)
