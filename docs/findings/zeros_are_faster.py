"""Matrix products of zeros are faster than of random numbers, on a GPU at its power limit. Needs a GPU.

Switching bits takes power, and at the limit power is clock. A benchmark on zeros, on ones, or on inputs of few
distinct values reports a rate that no model reaches. All inputs of this suite are random.
"""

from __future__ import annotations

import torch


def rate(a: torch.Tensor, b: torch.Tensor, calls: int = 200) -> float:
    """TFLOP/s of a · b, after as many calls to warm up."""
    for _ in range(calls):
        a @ b
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        a @ b
    end.record()
    end.synchronize()
    return 2 * a.shape[0] * a.shape[1] * b.shape[1] * calls / start.elapsed_time(end) / 1e9


def show() -> bool | None:
    """Prints the effect; None without a GPU."""
    if not torch.cuda.is_available():
        print("needs a GPU")
        return None
    size = (8192, 8192)
    random = rate(*(torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
    zeros = rate(*(torch.zeros(size, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
    where = f"bf16, 8192³, on {torch.cuda.get_device_name()}"
    print(f"{where}: {random:.0f} TFLOP/s of random numbers, {zeros:.0f} of zeros")
    return zeros > random


if __name__ == "__main__":
    show()
