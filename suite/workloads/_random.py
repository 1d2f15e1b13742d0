"""Random numbers of a workload: tokens, places in a text, what is planted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def generator(seed: int, device: torch.device | str, number: int = 0) -> torch.Generator:
    """The generator of a seed, on a device; those of numbers 0, 1, … give different values. Seeds are cut to 62
    bits, so that with a number they stay within what torch takes.
    """
    import torch

    return torch.Generator(device).manual_seed(seed % (1 << 62) + number)
