"""Launches whose preparation is done once for all calls that are alike.

A kernel of a few microseconds is over before Python has launched the next one. Most of what a call does on the
host has the same result for all tensors of the same dtypes, shapes, strides, device and alignment: checks, the
choice of a plan, and the just-in-time compiler's specialization on each argument. `prepared` keeps what those
decide, and `Launch` keeps a compiled kernel with all of its arguments but addresses. Addresses are read at each
call, so memory that was freed and given to a tensor of another shape is no special case. Calls that come again
are known by the guards of torch.compile's code, which look at all tensors in one call of C. On a GPU what comes
again is known and launched in C (`_in_c`), where that can be had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from operator import itemgetter
from typing import Any, TypeAlias

import torch
import triton
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from . import _in_c

MOST = 4096
"""Calls that one operator remembers; where more kinds come by, it starts anew."""
FAMILIAR = 4
"""Kinds of arguments with one shape of the first that are known again at a glance: each is looked at in turn."""

_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
_DIRECT = _VERSION in ((3, 6), (3, 7), (3, 8), (3, 9))
"""Versions of Triton whose compiled kernels are known to be launched as `Launch` does; others go the usual way."""

_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_device: Callable[[], int | None] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The current device's number, for who has a tensor of CUDA already."""
_empty: Callable[..., torch.Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
"""Memory of a size, strides and dtype on the current device, as Inductor's code takes it: past the dispatcher,
which takes longer than the allocator."""
_DEVICES = ("cuda",)
"""Where launches go past the just-in-time compiler; else it is the interpreter that runs them."""
_runtime = triton.knobs.runtime
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether torch.func transforms what is called; no public function tells, autograd asks the same one."""


def in_c(device: torch.device) -> Any:
    """What there is in C for tensors of a device, or None: where Triton interprets, nothing is compiled."""
    return _in_c.compiled() if device.type in _DEVICES else None


def room(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, strides: Sequence[int] | None = None
) -> Callable[[], torch.Tensor]:
    """Takes uninitialized memory, dense if no strides are given. To be called where the device is the current one,
    as it is inside what is `prepared`.
    """
    sizes, steps = tuple(map(int, shape)), [1]
    for size in reversed(sizes[1:]):
        steps.append(steps[-1] * max(size, 1))
    strides = tuple(map(int, steps[::-1][: len(sizes)] if strides is None else strides))
    if device.type in _DEVICES and _empty is not None:
        return partial(_empty, sizes, strides, dtype)
    return partial(torch.empty_strided, sizes, strides, dtype=dtype, device=device)


def room_like(x: torch.Tensor, dtype: torch.dtype | None = None) -> Callable[[], torch.Tensor]:
    """`room` for a dense tensor of the same shape."""
    return room(x.shape, x.dtype if dtype is None else dtype, x.device)


def likeness(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...] | None, bool]:
    """What arguments that are alike have in common, and whether autograd wants to know of what is made of them.

    Tensors are alike by dtype, shape, strides, device and place within 16 bytes, other arguments by value. None
    where there are tensors of a subclass, which may have no memory of their own, or whose memory is the negative
    of what they are, as a conjugate's `imag` is: autograd gives that as a gradient.
    """
    found: list[Any] = []
    differentiate = False
    for x in arguments:
        kind = type(x)
        if kind in _PLAIN:
            if x.is_neg():
                return None, False
            found += (x.dtype, x.shape, x.stride(), x.device, x.data_ptr() & 15)
            if x.requires_grad:
                differentiate = True
        elif isinstance(x, torch.Tensor):
            return None, False
        else:
            found.append(x)
    return tuple(found), differentiate and torch.is_grad_enabled()


def _trusted_guards() -> Callable[..., Any] | None:
    """What torch.compile's code knows tensors again by: type, dispatch keys, dtype, device, shape, strides and
    whether they have gradients, all tensors in one call of C. None where PyTorch's sees less, or is not there.
    """
    guards: Callable[..., Any] | None = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if guards is None:
        return None
    try:
        x = torch.empty(4, 4, device="cpu")
        check = guards(x, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        others = [x.t(), x.view(2, 8), x.int(), torch._neg_view(x), torch.nn.Parameter(x), x.to("meta")]
        followed = x.clone().requires_grad_()
        return guards if check(x) and check(x.clone()) and not any(map(check, [*others, followed])) else None
    except (TypeError, RuntimeError, SystemError):  # a version that is called otherwise
        return None


_guards = _trusted_guards()


class _Run:
    """What was prepared for arguments that are alike, and the number of its device.

    `looks`: how often such arguments are yet remembered when they had to be looked at one by one.
    """

    __slots__ = ("index", "looks", "run")

    def __init__(self, index: int | None, run: Callable[..., Any]) -> None:
        self.index = index
        self.run = run
        self.looks = FAMILIAR if _guards is not None else 0


class _Kind:
    """Arguments that are alike and begin at multiples of 16 bytes, and how they are known again: numbers by type
    and value, tensors by guards. In C it is `Kind`.
    """

    __slots__ = ("check", "differentiable", "found", "numbers", "of_numbers", "of_tensors", "types")

    def __init__(self, guards: Callable[..., Any], found: _Run, arguments: tuple[Any, ...]) -> None:
        tensors = [i for i, x in enumerate(arguments) if isinstance(x, torch.Tensor)]
        self.found = found
        self.types = tuple(map(type, arguments))
        self.of_tensors = _chosen(tensors)
        self.of_numbers = _chosen([i for i in range(len(arguments)) if i not in tensors])
        self.numbers = self.of_numbers(arguments)
        self.check = check_of(guards, self.of_tensors(arguments))
        self.differentiable = any(arguments[i].requires_grad for i in tensors)

    def matches(self, arguments: tuple[Any, ...]) -> bool:
        """Whether arguments are of this kind."""
        # Types first: of other types numbers could be equal, and to a tensor equality is elementwise.
        if tuple(map(type, arguments)) != self.types or self.numbers != self.of_numbers(arguments):
            return False
        tensors, low = self.of_tensors(arguments), 0
        for x in tensors:
            # Guards end the process at a nested tensor, which has no strides.
            low |= 1 if x.is_nested else x.data_ptr()
        return not low & 15 and self.check(*tensors)


def check_of(guards: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """What knows tensors like these again."""
    check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _kind(guards: Callable[..., Any], found: _Run, arguments: tuple[Any, ...]) -> Any:
    """A `_Kind`, in C where that can be had."""
    tensors = tuple([x for x in arguments if isinstance(x, torch.Tensor)])
    module = in_c(tensors[0].device)
    if module is None:
        return _Kind(guards, found, arguments)
    differentiable = any(x.requires_grad for x in tensors)
    # Nothing of a tensor is kept.
    values = tuple([None if isinstance(x, torch.Tensor) else x for x in arguments])
    types, check = tuple(map(type, arguments)), check_of(guards, tensors)
    return module.Kind(found, found.run, found.index, differentiable, values, types, check, *_PLAIN, _address)


def _chosen(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Takes the elements at these places out of a tuple, in C."""
    if not places:
        return itemgetter(slice(0))
    if places[-1] - places[0] == len(places) - 1:
        return itemgetter(slice(places[0], places[-1] + 1))
    return itemgetter(*places)


class prepared:
    """A function that calls `prepare(*arguments)(*arguments)`, preparing once for all arguments that are alike.

    What is prepared must not keep anything else of a tensor. It runs where the first tensor's device is the
    current one. `check` sees arguments before they are prepared for.
    """

    __slots__ = ("_check", "_kinds", "_prepare", "_runs", "around", "front", "numbers")

    def __init__(
        self, prepare: Callable[..., Callable[..., Any]], check: Callable[..., None] | None = None
    ) -> None:
        self._prepare = prepare
        self._check = check
        self._runs: dict[tuple[Any, ...], _Run] = {}
        self._kinds: dict[torch.Size, list[Any]] = {}
        """By the shape of the first argument."""
        self.numbers: dict[int, str] = {}
        """Names of arguments by place that are numbers. A tensor there would be what it was at the first call."""
        self.around: tuple[Any, Any] | None = None
        """Of an operator, its call in Python, and that of eager mode which autograd wants to know of, if any."""
        self.front: Callable[..., Any] | None = None
        """An operator's call in C, when there is a kind that it knows. In eager mode it calls what was prepared
        for arguments of a kind, and for all others `around`.
        """
        _everything.append(self)

    def __call__(self, *arguments: Any) -> Any:
        found = self.find(arguments)[0]
        return self._first(None, *arguments) if found is None else self.run(found, arguments)

    def find(self, arguments: tuple[Any, ...]) -> tuple[_Run | None, bool]:
        """What `run` takes for these arguments, and whether autograd wants to know of what is made of them. None
        where `likeness` finds none.
        """
        if self._kinds and type(arguments[0]) in _PLAIN:
            kinds = self._kinds.get(arguments[0].shape, ())
            for i, kind in enumerate(kinds):
                if kind.matches(arguments):
                    if i:  # what came last is likely to come next
                        kinds[i], kinds[0] = kinds[0], kind
                    return kind.found, kind.differentiable and torch.is_grad_enabled()
        alike, differentiate = likeness(arguments)
        if alike is None:
            return None, False
        try:
            found = self._runs.get(alike)
        except TypeError:  # something that is no tensor and cannot be a key
            found = None
        if found is None:
            return _Run(None, partial(self._first, alike)), differentiate
        if found.looks:
            found.looks -= 1
            self._remember(found, arguments)
        return found, differentiate

    def _remember(self, found: _Run, arguments: tuple[Any, ...]) -> None:
        """Has arguments that come for the second time be known at a glance from now on."""
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        if not tensors or tensors[0] is not arguments[0] or any(x.data_ptr() & 15 for x in tensors):
            return
        kinds = self._kinds.setdefault(tensors[0].shape, [])
        # Guards take one tensor in two places for none that they know.
        if len(kinds) < FAMILIAR and len(set(map(id, tensors))) == len(tensors):
            assert _guards is not None
            kinds.append(_kind(_guards, found, arguments))
            module = in_c(tensors[0].device)
            if self.front is None and self.around is not None and module is not None:
                of_torch = vars(forward_ad), vars(_python_dispatch), _transforming, torch.is_grad_enabled
                self.front = module.Front(self._kinds, *self.around, *of_torch, _device, *_PLAIN)

    def run(self, found: _Run, arguments: tuple[Any, ...]) -> Any:
        """The call of arguments for which this was found."""
        index = found.index
        if index is None or index == _device():
            return found.run(*arguments)
        with torch.cuda.device(index):
            return found.run(*arguments)

    def forget(self) -> None:
        """Prepares anew from now on."""
        self._runs.clear()
        self._kinds.clear()
        self.front = None

    def _first(self, alike: tuple[Any, ...] | None, *arguments: Any) -> Any:
        """The call of arguments that nothing is prepared for."""
        for i, name in self.numbers.items():
            if not isinstance(arguments[i], Real):
                kind = "a tensor" if isinstance(arguments[i], torch.Tensor) else type(arguments[i]).__name__
                raise TypeError(f"{name} must be a number, not {kind}")
        if self._check is not None:
            self._check(*arguments)
        index = next((x.device.index for x in arguments if isinstance(x, torch.Tensor)), None)
        with contextlib.nullcontext() if index is None else torch.cuda.device(index):
            run = self._prepare(*arguments)
            if len(self._runs) >= MOST:
                self.forget()
            if alike is not None:
                self._runs[alike] = _Run(index, run)
            return run(*arguments)


_everything: list[prepared] = []


def forget() -> None:
    """Has all calls prepared anew: for whoever changed what a preparation asks beside its arguments, such as which
    kernels there are.
    """
    for x in _everything:
        x.forget()


Straight: TypeAlias = tuple[Callable[..., None], bool, tuple[Any, ...]]
"""What `straight` gives: a function, whether it takes arguments as one sequence, what stands before them."""


class Launcher:
    """A compiled kernel as it is launched past Triton's just-in-time compiler. Called with the arguments of a
    launch, says whether it launched: not where a profiler listens, nor where another device is the current one.

    `places` says of each argument how it is handed over: "a" a tensor by its address, None as it is; "g" a tuple
    of tensors by their addresses, 0 for None; "m" as many arguments as `make(place, argument)` makes of it, which
    keeps those of a `placed` one in `maps`, by its base's address and by what it says; "x" as it is. `tail` comes
    behind them. `index` is the device's number, `...` for whichever is the current one.

    In C it is `Launcher`: `launcher` gives that where it can be had.
    """

    __slots__ = (
        "_device", "_function", "_grid", "_groups", "_index", "_make", "_maps", "_middle", "_pointers", "_stream",
        "_tail", "_together",
    )  # fmt: skip

    def __init__(
        self,
        straight: Straight,
        grid: tuple[int, ...],
        tail: tuple[Any, ...],
        places: str,
        index: Any,
        device: Callable[[], Any],
        stream: Callable[[Any], Any],
        make: Callable[[int, Any], tuple[Any, ...]] | None,
    ) -> None:
        self._function, self._together, self._middle = straight
        self._grid = grid
        self._tail = tail
        self._pointers, self._groups, maps = ([i for i, x in enumerate(places) if x == kind] for kind in "agm")
        self._maps = maps[::-1]  # those behind one move where it is replaced
        self._index = index
        self._device = device
        self._stream = stream
        self._make = make

    def __call__(self, arguments: tuple[Any, ...]) -> bool:
        if _observed():
            return False
        index = self._device()
        if self._index is not ... and self._index != index:
            return False
        given = list(arguments)
        for place in self._pointers:
            x = given[place]
            if x is not None:
                given[place] = _address(x)
        for place in self._groups:
            given[place] = tuple([0 if x is None else _address(x) for x in given[place]])
        for place in self._maps:
            given[place : place + 1] = self._make(place, given[place])  # type: ignore[misc]  # is there with maps
        given += self._tail
        if self._together:
            self._function(*self._grid, self._stream(index), *self._middle, given)
        else:
            self._function(*self._grid, self._stream(index), *self._middle, *given)
        return True


def launcher(
    straight: Straight,
    grid: tuple[int, ...],
    tail: tuple[Any, ...],
    places: str,
    index: Any,
    device: Callable[[], Any],
    stream: Callable[[Any], Any],
    maps: dict[Any, tuple[Any, ...]] | None = None,
    placed: type | None = None,
    make: Callable[[int, Any], tuple[Any, ...]] | None = None,
) -> Callable[[tuple[Any, ...]], bool]:
    """A `Launcher`, in C where that can be had. `placed` is the type of what is kept in `maps`."""
    module = in_c(torch.device(_DEVICES[0]))
    if module is None:
        return Launcher(straight, grid, tail, places, index, device, stream, make)
    function, together, middle = straight
    held = {} if maps is None else maps, placed, make, _address, device, stream, _runtime
    found: Callable[[tuple[Any, ...]], bool] = module.Launcher(
        function, together, grid, middle, tail, places.encode(), index, *held
    )
    return found


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
        self._bound: Callable[[tuple[Any, ...]], bool] | None = None

    def __call__(self, device: torch.device, *tensors: Any, numbers: tuple[Any, ...] = ()) -> None:
        bound = self._bound
        if bound is None:
            self._first(device, tensors, numbers)
        elif not bound((*tensors, *numbers) if numbers else tensors):
            with torch.cuda.device(device):
                if _observed() or not bound((*tensors, *numbers)):
                    self._first(device, tensors, numbers)

    def _bind(
        self,
        device: torch.device,
        tensors: tuple[Any, ...],
        numbers: tuple[Any, ...],
        straight: Straight,
        grid: tuple[int, ...],
        tail: tuple[Any, ...],
    ) -> None:
        """Has later launches go past the just-in-time compiler."""
        assert _stream is not None
        kinds = ["g" if isinstance(x, tuple) else "a" for x in tensors] + ["x"] * len(numbers)
        self._bound = launcher(straight, grid, tail, "".join(kinds), device.index, _device, _stream)

    def _first(self, device: torch.device, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        """The usual launch, through the just-in-time compiler; what it compiled is kept."""
        arguments = (*tensors, *numbers, *self._numbers)
        if device.type not in _DEVICES:
            self._kernel[self._grid](*arguments, **self._constants)
            return
        with torch.cuda.device(device):
            compiled = self._kernel[self._grid](*arguments, **self._constants)
        if _DIRECT and _stream is not None and compiled is not None:
            names = self._kernel.arg_names[len(arguments) :]
            # No launch metadata and no hooks: where there are any, the usual launch is taken.
            tail = (*self._numbers, *(self._constants[name] for name in names))
            self._bind(device, tensors, numbers, straight(compiled), (*self._grid, 1, 1)[:3], tail)


def straight(compiled: Any) -> Straight:
    """How a compiled kernel is launched without hooks: a function, whether it takes the kernel's arguments as one
    sequence, and what it takes between the stream and them.

    The function is that in C behind Triton's launcher, where it is one that is known, and a kernel needs no
    scratch memory; else the launcher.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    scratch = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if type(run).__name__ == "CudaLauncher" and scratch == [0, 0]:
        flags = function, run.launch_cooperative_grid, run.launch_pdl
        if _VERSION == (3, 6):
            return run.launch, False, (*flags, None, None, metadata, None, None, None)
        if _VERSION == (3, 7):
            return run.launch, True, (*flags, metadata, *(None,) * 5, run.arg_annotations, run.kernel_signature)
    return run, False, (function, metadata, None, None, None)


def _observed() -> bool:
    """Whether a profiler wants to know of launches."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # a hook in place of a chain of them
        return enter is not None or leave is not None
