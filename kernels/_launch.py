"""Launches whose preparation is done once for all calls that are alike.

A kernel of a few microseconds is over before Python has launched the next one. Most of what a call does on the
host has the same result for all tensors of the same dtypes, shapes, strides, device and alignment: checks, the
choice of a plan, and the just-in-time compiler's specialization on each argument. `prepared` keeps what those
decide, and `Launch` keeps a compiled kernel with all of its arguments but addresses. Addresses are read at each
call, so memory that was freed and given to a tensor of another shape is no special case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

MOST = 4096
"""Calls that one operator remembers; where more kinds come by, it starts anew."""

_DIRECT = tuple(map(int, triton.__version__.split(".")[:2])) in ((3, 6), (3, 7), (3, 8), (3, 9))
"""Versions of Triton whose compiled kernels are known to be launched as `Launch` does; others go the usual way."""

_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def likeness(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...] | None, bool]:
    """What arguments that are alike have in common, and whether autograd wants to know of what is made of them.

    Tensors are alike by dtype, shape, strides, device and place within 16 bytes, other arguments by value. None
    where there are tensors of a subclass, which may have no memory of their own.
    """
    found: list[Any] = []
    differentiate = False
    for x in arguments:
        kind = type(x)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            found += (x.dtype, x.shape, x.stride(), x.device, x.data_ptr() & 15)
            if x.requires_grad:
                differentiate = True
        elif isinstance(x, torch.Tensor):
            return None, False
        else:
            found.append(x)
    return tuple(found), differentiate and torch.is_grad_enabled()


class prepared:
    """A function that calls `prepare(*arguments)(*arguments)`, preparing once for all arguments that are alike.

    What is prepared must not keep anything else of a tensor. `check` sees arguments before they are prepared for.
    """

    __slots__ = ("_check", "_prepare", "_runs")

    def __init__(
        self, prepare: Callable[..., Callable[..., Any]], check: Callable[..., None] | None = None
    ) -> None:
        self._prepare = prepare
        self._check = check
        self._runs: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        return self.run(likeness(arguments)[0], arguments)

    def run(self, alike: tuple[Any, ...] | None, arguments: tuple[Any, ...]) -> Any:
        """The call of arguments whose likeness is known."""
        try:
            run = self._runs.get(alike)  # type: ignore[arg-type]  # None is never a key
        except TypeError:  # something that is no tensor and cannot be a key
            run = None
        if run is None:
            if self._check is not None:
                self._check(*arguments)
            run = self._prepare(*arguments)
            if len(self._runs) >= MOST:
                self._runs.clear()
            if alike is not None:
                self._runs[alike] = run
        return run(*arguments)


class Launch:
    """A kernel with its grid and all arguments behind the tensors: numbers, then constants by name.

    Called with tensors, or tuples of tensors and None, that are alike each time (see `prepared`), and then with
    floats, or tuples of them, that need not be. The first call compiles; those after it hand addresses to the
    compiled kernel, as Triton's own launch would in the end.
    """

    __slots__ = ("_bound", "_constants", "_grid", "_kernel", "_numbers")

    def __init__(self, kernel: Any, grid: tuple[int, ...], *numbers: Any, **constants: Any) -> None:
        self._kernel = kernel
        self._grid = grid
        self._numbers = numbers
        self._constants = constants
        self._bound: tuple[Any, ...] | None = None

    def __call__(self, device: torch.device, *tensors: Any, numbers: tuple[Any, ...] = ()) -> None:
        bound = self._bound
        if bound is None or _observed():
            self._first(device, tensors, numbers)
            return
        index, run, head, tail = bound
        addresses = [
            tuple([0 if x is None else x.data_ptr() for x in group]) if type(group) is tuple else group.data_ptr()
            for group in tensors
        ]
        if index == torch.cuda.current_device():
            run(*head[0], _stream(index), *head[1], *addresses, *numbers, *tail)  # type: ignore[misc]  # is there with CUDA
        else:
            with torch.cuda.device(index):
                run(*head[0], _stream(index), *head[1], *addresses, *numbers, *tail)  # type: ignore[misc]  # is there with CUDA

    def _first(self, device: torch.device, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        """The usual launch, through the just-in-time compiler; what it compiled is kept."""
        arguments = (*tensors, *numbers, *self._numbers)
        if device.type != "cuda":
            self._kernel[self._grid](*arguments, **self._constants)
            return
        with torch.cuda.device(device):
            compiled = self._kernel[self._grid](*arguments, **self._constants)
        if _DIRECT and _stream is not None and compiled is not None:
            names = self._kernel.arg_names[len(arguments) :]
            grid = (*self._grid, 1, 1)[:3]
            # No launch metadata and no hooks: where there are any, the usual launch is taken.
            head = grid, (compiled.function, compiled.packed_metadata, None, None, None)
            tail = (*self._numbers, *(self._constants[name] for name in names))
            self._bound = device.index, compiled.run, head, tail


def _observed() -> bool:
    """Whether a profiler wants to know of launches."""
    runtime = triton.knobs.runtime
    return bool(
        getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
    )
