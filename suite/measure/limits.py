"""The device's own limits, measured in the run: copy times over sizes, matmul rates by dtype."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from ...registry.store.record import Case, Ceiling
from ..operator import torch_dtype
from .device import Device
from .stopping import Sampling, finished

COPY_BYTES = {"cuda": [1 << n for n in range(14, 33)], "cpu": [1 << n for n in range(14, 28)]}
"""Bytes read plus written, from 16 KiB up to 4 GiB on a GPU and 128 MiB on a CPU."""
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
MATMUL_DTYPES = {"cuda": ("bf16", "fp16", "fp32", "e4m3"), "cpu": ("fp32", "bf16")}
SAMPLING = Sampling(min_samples=7, max_samples=30, min_seconds=0.01, max_seconds=0.2, target=0.01)


def measure(device: Device, replicate: int) -> Iterator[Ceiling]:
    """All ceilings of a device, cold, by the timers that cases of the same size get."""
    for size in COPY_BYTES[device.kind]:
        yield Ceiling("copy", size, _time(device, size, 0, copy(device, size)), replicate)
    n = MATMUL_SIZE[device.kind]
    for dtype in MATMUL_DTYPES[device.kind]:
        call = matmul(device, n, dtype)
        if call is not None:
            flops = 2 * n**3
            yield Ceiling("matmul", flops, _time(device, 3 * n * n, flops, call), replicate, dtype)
    device.release()


def _time(device: Device, size: int, flops: int, call: Callable[[], object]) -> float:
    """Median milliseconds of a call."""
    case = Case("ceiling", "ceiling", {}, {}, "", "forward", "", size, flops)
    call()
    device.synchronize()
    timer = device.timer(case, "cold", call, "auto")
    timer.sample(call)
    samples: list[float] = []
    begin = time.monotonic()
    while not finished(samples, time.monotonic() - begin, SAMPLING):
        samples += timer.sample(call)
    return median(samples)


def copy(device: Device, size: int) -> Callable[[], object]:
    """A call that reads and writes so many bytes in sum."""
    import torch

    source = torch.randint(0, 255, (size // 2,), dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def matmul(device: Device, n: int, dtype: str) -> Callable[[], Any] | None:
    """A square product on random data, None where the device has none of the dtype.

    Zeros draw less power and run faster than any real work.
    """
    import torch

    if dtype != "e4m3":
        a, b = (torch.randn(n, n, device=device.torch_device, dtype=torch_dtype(dtype)) for _ in range(2))
        return lambda: a @ b
    if device.kind == "cpu" or torch.cuda.get_device_capability() < (8, 9):
        return None
    left, right = (torch.randn(n, n, device=device.torch_device).to(torch_dtype(dtype)) for _ in range(2))
    one = torch.ones((), device=device.torch_device)
    return lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16)
