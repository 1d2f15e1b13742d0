"""Exponentials and nothing else: a kernel that keeps a GPU's exponential units busy. For limits, not for users."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

BLOCK = 1024
WARPS = 4
PROGRAMS = 32
"""Blocks a multiprocessor: several at a time, so that the chains of each thread hide behind those of others."""
ROUNDS = 4096


@triton.jit
def _rounds(out, rounds, block: tl.constexpr):
    """x ← 2⁻ˣ, again and again: eight chains a thread, one exponential and a change of sign a step."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    x = place.to(tl.float32) * 1e-9
    for _ in range(rounds):
        x = tl.exp2(-x)
    tl.store(out + place, x)


def call(
    device: torch.device, programs: int | None = None, rounds: int = ROUNDS
) -> tuple[int, Callable[[], object]]:
    """How many exponentials a call computes, and the call."""
    if programs is None:
        programs = PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(programs * BLOCK, device=device)
    return out.numel() * rounds, lambda: _rounds[(programs,)](out, rounds, BLOCK, num_warps=WARPS)
