"""The device's limits in the power state that timed steps left: a matmul's and a copy's rate, right after."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean, median

from ..measure.device import Device
from ..measure.limits import COPY_BYTES, MATMUL_SIZE, copy, products
from ._window import Clock

CALLS = 12
"""Calls of each at once."""
SPAN_S = 0.5
"""A GPU at its power limit moves its clocks up and down several times a second: calls of less than that see any of
them. On an H200 twelve products, a fiftieth of a second, gave rates 15 % apart."""


def rates(device: Device, dtype: str) -> tuple[float, float] | None:
    """(FLOP/s of products in a dtype, bytes/s of a copy); None where there is no product, or no memory left for
    one.
    """
    import torch

    n, size = MATMUL_SIZE[device.kind], COPY_BYTES[device.kind][-2]
    found = []
    for work, make in ((2 * n**3, lambda: products(device, n, dtype)), (size, lambda: (copy(device, size),))):
        try:
            calls = make()
        except torch.OutOfMemoryError:
            return None
        if not calls:
            return None
        found.append(work / (min(_mean_ms(device, x) for x in calls) * 1e-3))
    return found[0], found[1]


def _mean_ms(device: Device, call: Callable[[], object]) -> float:
    """Milliseconds of a call among calls: of a GPU, for as long as its clocks take to show all that they do; of a
    CPU, where one in 16 bits may take seconds, no longer than that.
    """
    call()
    times: list[float] = []
    begin = time.monotonic()
    while not times or (device.kind == "cuda" and time.monotonic() - begin < SPAN_S):
        clock = Clock(device.kind == "cuda")
        clock.edge()
        for _ in range(CALLS):
            call()
            clock.edge()
            if device.kind == "cpu" and time.monotonic() - begin > SPAN_S:
                break
        times += clock.take()
    return fmean(times)


LINK_BYTES = 1 << 28
"""Of a copy; larger ones are no faster."""


def link_rate(device: Device) -> float | None:
    """Bytes/s that a host and its device send to each other, both ways at once, in sum; None without a device, or
    memory for it.
    """
    import torch

    if device.kind != "cuda":
        return None
    try:
        host = [torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        own = [torch.empty(LINK_BYTES, dtype=torch.uint8, device=device.torch_device) for _ in range(2)]
    except torch.OutOfMemoryError:
        return None
    streams = [torch.cuda.Stream() for _ in range(2)]
    pairs = ((own[0], host[0]), (host[1], own[1]))
    clock = Clock(cuda=True)
    for counted in (False, True):
        if counted:
            clock.edge()
        for stream, (target, source) in zip(streams, pairs, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(CALLS):
                    target.copy_(source, non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
    clock.edge()
    return 2 * CALLS * LINK_BYTES / (clock.take()[0] * 1e-3)


def read_rate(device: Device) -> float | None:
    """Bytes/s of a sum over memory that no cache holds: reading alone, which decoding is bound by.

    None where there is no memory left for it.
    """
    import torch

    size = COPY_BYTES[device.kind][-1]
    try:
        values = torch.randn(size // 4, device=device.torch_device)
    except torch.OutOfMemoryError:
        return None
    values.sum()
    clock = Clock(device.kind == "cuda")
    clock.edge()
    for _ in range(CALLS):
        values.sum()
        clock.edge()
    return size / (median(clock.take()) * 1e-3)
