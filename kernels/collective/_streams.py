"""Streams for copies beside one another."""

from __future__ import annotations

import functools

import torch


@functools.cache
def stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """A device's side stream of that number, always the same."""
    return torch.cuda.Stream(device)
