"""PyTorch's own kernels over symmetric memory (`torch.ops.symm_mem`), those that need no multicast; and NCCL's
over windows that torch registers.

An array is an ordinary tensor, as a model has it: copying it to symmetric memory is part of the call. What needs
multicast (`multimem_*`) is no row: it can put GPUs that others share out of service.
"""

from __future__ import annotations

import functools
import os
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
    _made.append(buffer)
    return buffer, group.group_name


_made: list[Any] = []
"""Buffers that are there."""


def _workspaces() -> dict[str, Any]:
    """What torch's fused operators copy through, by group."""
    import torch.distributed._symmetric_memory as memory

    found: dict[str, Any] = memory._group_name_to_workspace_tensor
    return found


def _shared(**inputs: Any) -> int:
    """Bytes of this rank's memory that its peers can read and write now."""
    there = (*_made, *(x for _, _, x in _registered), *(x for x in _workspaces().values() if x is not None))
    return sum(x.numel() * x.element_size() for x in there)


def _forget() -> None:
    """Gives that memory up."""
    _buffer.cache_clear()
    _made.clear()
    _workspaces().clear()
    _window.cache_clear()
    while _registered:
        backend, pool, _array = _registered.pop()
        backend.deregister_mem_pool(pool)  # before its memory goes: NCCL knows it by its address


def _asked(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that the harness may ask for the memory that peers can read, and to give it up."""
    call.shared, call.forget = _shared, _forget  # type: ignore[attr-defined]
    return call


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

    return _asked(call)


def _two_shot(case: Any) -> Callable[..., Any]:
    import torch

    _sums_alone(case)

    def call(x: Any, place: str) -> Any:
        buffer, group = _buffer(x.numel(), x.dtype, x.device)
        buffer.copy_(x)
        result = torch.empty_like(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", group, result)
        return result

    return _asked(call)


NCCL_WITH_WINDOWS = (2, 27)
"""The first NCCL that has them."""

_registered: list[tuple[Any, Any, Any]] = []
"""Windows that are there: who registered one, its pool, and its array."""


def _registers(device: Any) -> Any:
    """NCCL's backend of the default group. Raises NotImplementedError where it registers no windows."""
    import torch
    import torch.distributed as dist

    version = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else (0,)
    if version < NCCL_WITH_WINDOWS:
        found = ".".join(map(str, version)) if any(version) else "none"
        raise NotImplementedError(f"windows are NCCL's from 2.27 on, and torch has {found}")
    for name in ("NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE"):
        if os.environ.get(name) == "0":
            raise NotImplementedError(f"{name}=0 leaves NCCL without windows")
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(device)
    if "symm" not in (getattr(getattr(backend, "register_mem_pool", None), "__doc__", None) or ""):
        raise NotImplementedError(
            f"torch {torch.__version__} registers no windows: its {type(backend).__name__} has no "
            "register_mem_pool(symm=True)"
        )
    return backend


@functools.cache
def _window(elements: int, dtype: Any, device: Any) -> Any:
    """An array of NCCL's own allocator, in a pool that all ranks have registered as a window of the group.

    A pool for each: what is registered is what is there by then, in all ranks the same.
    """
    import torch

    backend = _registers(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        array = torch.empty(elements, dtype=dtype, device=device)
    backend.register_mem_pool(pool, symm=True)
    _registered.append((backend, pool, array))
    return array


def _windows(case: Any) -> Callable[..., Any]:
    """NCCL's all-reduce of an array in a registered window, for which it has kernels that read and write peers'
    memory; whether it takes them is its own choice. The sum lies in the window, as torch's does that is in place.
    """
    import torch
    import torch.distributed as dist

    _registers(torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu")

    def out_of_place(x: Any, place: str) -> Any:
        array = _window(x.numel(), x.dtype, x.device)
        array.copy_(x)
        dist.all_reduce(array)
        return array

    def in_place(x: Any, place: str) -> Any:
        array = _window(x.numel(), x.dtype, x.device)
        array.copy_(x)
        dist.all_reduce(array, dist.ReduceOp.AVG)
        return x.copy_(array)

    return _asked(out_of_place if case.options["place"] == "out" else in_place)


def _low_contention_all_gather(case: Any) -> Callable[..., Any]:
    import torch

    if case.options.get("place") == "in":
        raise NotImplementedError("its all-gather gives memory of its own")

    def call(x: Any) -> Any:
        buffer, group = _buffer(x.numel(), x.dtype, x.device)
        buffer.copy_(x)
        result = torch.ops.symm_mem._low_contention_all_gather(buffer, group)
        return torch.ops._c10d_functional.wait_tensor(result)

    return _asked(call)


def _group() -> str:
    """The default group's name."""
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    return group.group_name


def _all_gather_matmul(case: Any) -> Callable[..., Any]:
    """Async tensor parallelism's: chunks of the gathered matrix are multiplied as they come."""
    import torch

    def call(a: Any, w: Any) -> Any:
        return torch.ops.symm_mem.fused_all_gather_matmul(a, [w], 0, _group())[1][0]

    return _asked(call)


def _matmul_reduce_scatter(case: Any) -> Callable[..., Any]:
    """Async tensor parallelism's: chunks of the product are sent as they are there."""
    import torch

    def call(a: Any, w: Any) -> Any:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, w, "sum", 0, _group())

    return _asked(call)


IMPLEMENTATIONS = {
    "all_reduce": {
        "symmetric_one_shot": _one_shot,
        "symmetric_two_shot": _two_shot,
        "nccl_windows": _windows,
    },
    "all_gather": {"symmetric_low_contention": _low_contention_all_gather},
    "all_gather_matmul": {"symmetric_fused": _all_gather_matmul},
    "matmul_reduce_scatter": {"symmetric_fused": _matmul_reduce_scatter},
}
