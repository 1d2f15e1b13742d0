"""PyTorch's own kernels over symmetric memory (`torch.ops.symm_mem`), those that need no multicast.

An array is an ordinary tensor, as a model has it: copying it to symmetric memory is part of the call. What needs
multicast (`multimem_*`) is no row: it can put GPUs that others share out of service.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

REQUIRES = ("torch",)
DEVICES = ("cuda",)


@functools.cache
def _buffer(elements: int, dtype: Any, device: Any) -> tuple[Any, str]:
    """Symmetric memory of the default group for arrays of so many elements, and the group's name."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as memory

    group = dist.group.WORLD
    assert group is not None
    buffer = memory.empty(elements, dtype=dtype, device=device)
    memory.rendezvous(buffer, group)
    return buffer, group.group_name


def _sums_alone(case: Any) -> None:
    if case.options["place"] == "in":
        raise NotImplementedError("its all-reduce gives sums only, no mean in place")
    if case.dtype not in ("bf16", "fp32"):
        raise NotImplementedError(f"its all-reduce has no {case.dtype}")


def _one_shot(case: Any) -> Callable[..., Any]:
    import torch

    _sums_alone(case)

    def call(x: Any, place: str) -> Any:
        buffer, group = _buffer(x.numel(), x.dtype, x.device)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", group)

    return call


def _two_shot(case: Any) -> Callable[..., Any]:
    import torch

    _sums_alone(case)

    def call(x: Any, place: str) -> Any:
        buffer, group = _buffer(x.numel(), x.dtype, x.device)
        buffer.copy_(x)
        result = torch.empty_like(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", group, result)
        return result

    return call


def _low_contention_all_gather(case: Any) -> Callable[..., Any]:
    import torch

    def call(x: Any) -> Any:
        buffer, group = _buffer(x.numel(), x.dtype, x.device)
        buffer.copy_(x)
        result = torch.ops.symm_mem._low_contention_all_gather(buffer, group)
        return torch.ops._c10d_functional.wait_tensor(result)

    return call


IMPLEMENTATIONS = {
    "all_reduce": {"symmetric_one_shot": _one_shot, "symmetric_two_shot": _two_shot},
    "all_gather": {"symmetric_low_contention": _low_contention_all_gather},
}
