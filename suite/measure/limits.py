"""The device's own limits, measured in the run: times of copies, of reading and of writing over sizes, matmul
rates by dtype, and of a GPU the rate of its exponential units.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import msgspec

from ...registry.store.record import TF32, Case, Ceiling, CeilingKind
from ..operator import in_tf32, torch_dtype
from .device import Device
from .stopping import Sampling, finished

COPY_BYTES = {
    "cuda": sorted([*(1 << n for n in range(14, 33)), *(3 << n for n in range(19, 28))]),
    "cpu": [1 << n for n in range(14, 28)],
}
"""Bytes read plus written, from 16 KiB up to 4 GiB on a GPU and 128 MiB on a CPU; of a GPU closer together around
the size of its cache, where the time follows no power."""
ONE_WAY_BYTES = {"cuda": [1 << n for n in range(20, 33, 2)], "cpu": [1 << n for n in range(15, 28, 2)]}
"""Bytes read, or written, alone: some memories do either quicker than both in turns. Two ways of each are timed,
and twice as many sizes would take most of a short run on a CPU.
"""
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
MATMUL_DTYPES = {"cuda": ("bf16", "fp16", "fp32", TF32, "e4m3"), "cpu": ("fp32", "bf16")}
"""Other GPUs are measured as CUDA's are, but for the format that their torch may not multiply."""
EVENTS_FLOPS = 1 << 40
"""Said of a call that takes milliseconds, so that it gets the timer of such."""
SAMPLING = Sampling(min_samples=7, max_samples=30, min_seconds=0.01, max_seconds=0.2, target=0.01)
CPU_SECONDS = 0.1
"""A call's longest sampling on a CPU, where nearly each one reaches it: they would take half of a short run. The
limit that rows are held against is a median over the processes of a run, each of which measures all of them.
"""


def measure(device: Device, replicate: int) -> Iterator[Ceiling]:
    """All ceilings of a device, cold, by the timers that cases of the same size get."""
    like = "cpu" if device.kind == "cpu" else "cuda"
    for size in COPY_BYTES[like]:
        yield from _known("copy", size, [_time(device, size, 0, copy(device, size))], replicate)
    for size in ONE_WAY_BYTES[like]:
        yield from _known("read", size, [_time(device, size, 0, x) for x in reads(device, size)], replicate)
        yield from _known("write", size, [_time(device, size, 0, x) for x in writes(device, size)], replicate)
    if device.kind == "cuda":
        yield from _exponentials(device, replicate)
    n = MATMUL_SIZE[like]
    for dtype in MATMUL_DTYPES[like]:
        flops = 2 * n**3
        times = [_time(device, 3 * n * n, flops, x) for x in products(device, n, dtype)]
        yield from _known("matmul", flops, times, replicate, dtype)
    device.release()


def _known(
    what: CeilingKind, size: int, times: Sequence[float], replicate: int, dtype: str | None = None
) -> Iterator[Ceiling]:
    """The least of times as a ceiling; none without any. A graph's time has its flushes' taken off: beside others'
    work on the device nothing may be left of it, and then nobody knows.
    """
    if known := [x for x in times if x > 0]:
        yield Ceiling(what, size, min(known), replicate, dtype)


def _time(device: Device, size: int, flops: int, call: Callable[[], object]) -> float:
    """Median milliseconds of a call."""
    case = Case("ceiling", "ceiling", {}, {}, "", "forward", "", size, flops)
    call()
    device.synchronize()
    timer = device.timer(case, "cold", call, "auto")
    timer.sample(call)
    sampling = SAMPLING
    if device.kind == "cpu":
        sampling = msgspec.structs.replace(SAMPLING, max_seconds=min(SAMPLING.max_seconds, CPU_SECONDS))
    samples: list[float] = []
    begin = time.monotonic()
    while not finished(samples, time.monotonic() - begin, sampling):
        samples += timer.sample(call)
    return median(samples)


def copy(device: Device, size: int) -> Callable[[], object]:
    """A call that reads and writes so many bytes in sum."""
    import torch

    source = torch.randint(0, 255, (size // 2,), dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def reads(device: Device, size: int) -> tuple[Callable[[], object], ...]:
    """Calls that read so many bytes and write next to nothing; which is quicker hangs on the size."""
    import torch

    whole = torch.rand(size // 4, device=device.torch_device)
    halves = whole.chunk(2)
    return (lambda: whole.sum(), lambda: torch.dot(*halves))


def writes(device: Device, size: int) -> tuple[Callable[[], object], ...]:
    """Calls that write so many bytes and read nothing."""
    import torch

    target = torch.empty(size // 4, device=device.torch_device)
    return (target.zero_, lambda: target.fill_(1.5))


def _exponentials(device: Device, replicate: int) -> Iterator[Ceiling]:
    """The rate of the exponential units; nothing where Triton is not installed."""
    try:
        from .exponentials import call
    except ImportError:
        return
    count, run = call(device.torch_device)
    yield from _known("exponential", count, [_time(device, 0, EVENTS_FLOPS, run)], replicate)


def products(device: Device, n: int, dtype: str) -> tuple[Callable[[], Any], ...]:
    """Calls that multiply two square matrices of random data; none where the device has no product of the dtype.

    Zeros draw less power and run faster than any real work. Of a CPU in fp32 there are two: `matmul` goes to MKL
    in the builds that have it, and oneDNN is quicker on some processors.
    """
    import torch

    if dtype == TF32:
        wide = [torch.randn(n, n, device=device.torch_device) for _ in range(2)]
        return (lambda: _narrowed(*wide),)
    if dtype != "e4m3":
        a, b = (torch.randn(n, n, device=device.torch_device, dtype=torch_dtype(dtype)) for _ in range(2))
        if device.kind == "cpu" and dtype == "fp32" and torch.backends.mkldnn.is_available():
            weight = b.t().contiguous()
            return (lambda: a @ b, lambda: torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], ""))
        return (lambda: a @ b,)
    if device.kind != "cuda" or torch.cuda.get_device_capability() < (8, 9):
        return ()
    left, right = (torch.randn(n, n, device=device.torch_device).to(torch_dtype(dtype)) for _ in range(2))
    one = torch.ones((), device=device.torch_device)
    return (lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16),)


def _narrowed(a: Any, b: Any) -> Any:
    with in_tf32():
        return a @ b
