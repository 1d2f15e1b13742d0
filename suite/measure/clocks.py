"""Are the clocks locked, as the host says? Only a look at them under load can tell: NVML has no getter for it.

The host locks them (docker/lock-clocks) and says so in `KERNELMARK_CLOCKS`; a container cannot, and need not.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence

from .telemetry import Nvml

CLAIM = "KERNELMARK_CLOCKS"
"""The SM clock in MHz that the host locked the GPU to."""
UNLOCKED = "unlocked"
STEP_MHZ = 15
"""NVIDIA's clocks go in steps of this: a lock holds the nearest one."""
LOAD_S = 0.3


def policy(claim: str | None, seen_mhz: Sequence[int]) -> str:
    """`locked at N MHz` where every clock seen under load is the one claimed, else `unlocked`."""
    digits = re.match(r"\s*(\d+)", claim or "")
    if digits is None or not seen_mhz:
        return UNLOCKED
    wanted = int(digits[1])
    return f"locked at {wanted} MHz" if all(abs(x - wanted) <= STEP_MHZ for x in seen_mhz) else UNLOCKED


def checked() -> str:
    """The policy of the current CUDA device, from its clock while it multiplies. Only looks where a claim is."""
    claim = os.environ.get(CLAIM)
    return policy(claim, under_load()) if claim else UNLOCKED


def under_load() -> list[int]:
    """SM clocks in MHz of the current CUDA device, read while a queue of matmuls keeps it busy."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    nvml = Nvml.open(str(properties.uuid))
    if nvml is None:
        return []
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    seen: list[int] = []
    begin = time.monotonic()
    done = torch.cuda.Event()
    while time.monotonic() - begin < LOAD_S:
        for _ in range(16):
            torch.matmul(x, x)
        done.record()
        clock = nvml.get("ClockInfo", nvml.library.NVML_CLOCK_SM)
        # The first third is the way up from idle, which a locked clock goes too.
        if clock is not None and time.monotonic() - begin > LOAD_S / 3:
            seen.append(int(clock))
        done.synchronize()
    return seen
