"""What a process shares among implementations, as it was before any was loaded: compared, and put back.

An implementation runs in the process of its rivals and of the harness. What it replaces there (the clock, the
check, a public function of torch) and what it switches (default dtype, TF32, threads, deterministic algorithms)
would alter others' rows and its own. Replacing is `Incorrect`; a switch is put back and remarked upon. What a
library replaces in torch when it is imported is put back after its row and remarked upon: that is for its own use.

Code that searches the process for the harness's own objects, or writes to its memory, is not found (docs/
threat-model.md).
"""

from __future__ import annotations

import builtins
import gc
import os
import random
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

CODE_VARIABLES = (
    "CUDA_",
    "CUBLAS_",
    "CUDNN_",
    "TRITON_",
    "TORCH",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "NCCL_",
    "LD_",
    "NVIDIA_",
)
"""Environment variables that begin so change how others' code is made or run."""
PLACES = ("_DIR", "_PATH", "_HOME")
"""Their endings where they only name a place; torch.compile sets its cache's."""
HARNESS = tuple(f"{__package__.partition('.')[0]}.{room}." for room in ("suite", "registry"))
_MISSING = object()
BY_BACKEND = "by backend"
"""What torch's older name of a precision says once its newer names have told it otherwise: it cannot be read."""


class _Name(NamedTuple):
    """A name that others look up: `value` is what it stood for, `ours` whether the harness itself relies on it."""

    holder: Any
    name: str
    value: Any
    code: Any
    ours: bool
    path: str


class _Switch(NamedTuple):
    """A setting of the process: how it is read and put back."""

    name: str
    read: Callable[[], Any]
    put: Callable[[Any], object]


class Pristine:
    """Remembers the process as it is now. Made once, when torch is loaded and no implementation is."""

    def __init__(self) -> None:
        self._names = tuple(_names())
        self._switches = tuple((x, x.read()) for x in _switches())
        self._seeds = _Seeds()
        self._loaded: frozenset[int] | None = None
        self._compilers = _compilers()

    def begin(self) -> None:
        """An implementation is about to be loaded."""
        self._loaded = None
        self._compilers = _compilers()

    def tampered(self) -> str | None:
        """The name of what was replaced and may not be, if anything was; it is put back.

        Called first when an implementation is loaded: what its library replaced in torch by then stays until
        `settle`.
        """
        changed = [i for i, x in enumerate(self._names) if x.name not in x.holder or _changed(x)]
        if self._loaded is None:
            self._loaded = frozenset(i for i in changed if not self._names[i].ours)
        found = next((self._names[i].path for i in changed if i not in self._loaded), None)
        for i in changed:
            if i not in self._loaded:
                _put_back(self._names[i])
        return _pop_modes() or found

    def settle(self) -> tuple[str, ...]:
        """Puts everything back once an implementation's calls are timed. Says what it had replaced or switched."""
        remarks = []
        for x in self._names:
            if x.name not in x.holder or _changed(x):
                _put_back(x)
                remarks.append(f"it replaced {x.path}; put back")
        _pop_modes()
        for switch, value in self._switches:
            now = switch.read()
            if now is not _MISSING and value is not _MISSING and now != value:
                switch.put(value)
                remarks.append(f"it changed {_told(switch.name, value, now)}; put back")
        if changed := _put_compilers(self._compilers):
            remarks.append(f"it changed settings of torch's compilers ({', '.join(changed)}); put back")
        if self._seeds.put_back():
            remarks.append("it seeded torch's random numbers; put back")
        return tuple(remarks)


def _told(name: str, before: Any, now: Any) -> str:
    if isinstance(before, dict):
        return f"{name} ({', '.join(sorted(x for x in {**before, **now} if before.get(x) != now.get(x)))})"
    return f"{name} from {before} to {now}"


def _changed(x: _Name) -> bool:
    value = x.holder[x.name]
    if value is not x.value:
        return x.ours or not _torchs_own(value)
    return x.code is not None and (value.__code__, value.__defaults__, value.__kwdefaults__) != x.code


def _torchs_own(value: Any) -> bool:
    """Whether torch itself put it there: it replaces functions of its own as parts of it are loaded."""
    code = getattr(value, "__code__", None)
    torch: Any = sys.modules["torch"]
    if code is None:
        return str(getattr(value, "__module__", None) or "").split(".")[0] == "torch"
    return Path(code.co_filename).is_relative_to(Path(torch.__file__).parent)


def _put_back(x: _Name) -> None:
    if x.code is not None:
        x.value.__code__, x.value.__defaults__, x.value.__kwdefaults__ = x.code
    owner = x.holder.owner
    setattr(owner, x.name, x.value)


class _Holder:
    """The names of a module or class."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._names = vars(owner)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        return self._names[name]


def _names() -> Iterator[_Name]:
    """Functions and classes that others look up by name: the harness's, the clock's, Python's and torch's."""
    import torch

    for name, module in sorted(sys.modules.items()):
        if f"{name}.".startswith(HARNESS) and isinstance(module, types.ModuleType):
            yield from _of(module, name, ours=True)
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    yield from _of(value, f"{name}.{value.__name__}", ours=True)
    for own in (time, builtins, gc, random):
        yield from _of(own, own.__name__, ours=True)
    timing = (torch.cuda.Event, torch.cuda.CUDAGraph, torch.cuda.Stream)
    for cls in timing:
        yield from _of(cls, f"torch.cuda.{cls.__name__}", ours=True)
    for name in ("synchronize", "_sleep", "current_stream"):
        yield from _of(torch.cuda, "torch.cuda", ours=True, only=name)
    spaces = {
        "torch": torch,
        "torch.nn.functional": torch.nn.functional,
        "torch.linalg": torch.linalg,
        "torch.autograd": torch.autograd,
        "torch.cuda": torch.cuda,
        "torch.Tensor": torch.Tensor,
        "torch.nn.Module": torch.nn.Module,
    }
    for path, space in spaces.items():
        yield from _of(space, path, ours=False)


def _of(owner: Any, path: str, ours: bool, only: str | None = None) -> Iterator[_Name]:
    holder = _Holder(owner)
    for name, value in list(vars(owner).items()):
        if only is not None and name != only:
            continue
        # A submodule is no function, and loading one sets it.
        if isinstance(value, types.ModuleType) or (name.startswith("__") and name != "__call__"):
            continue
        if not callable(value) and not isinstance(value, property | classmethod | staticmethod):
            continue
        code = None
        if isinstance(value, types.FunctionType):
            code = (value.__code__, value.__defaults__, value.__kwdefaults__)
        yield _Name(holder, name, value, code, ours, f"{path}.{name}")


def _pop_modes() -> str | None:
    """Takes away modes that see every call of torch, and names them if there were any."""
    import torch

    found = None
    while torch._C._len_torch_function_stack() > 0:
        found = type(torch._C._pop_torch_function_stack()).__name__
    while torch._C._len_torch_dispatch_stack() > 0:
        found = type(torch._C._pop_torch_dispatch_stack()).__name__
    return found and f"how torch is called (by a {found})"


def _switches() -> Iterator[_Switch]:
    """Settings that change what others compute, or how fast."""
    import torch

    cuda: Any = torch.backends.cuda
    yield _Switch("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield _Switch("torch's threads", torch.get_num_threads, torch.set_num_threads)
    yield _Switch(
        "deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    )
    yield _Switch("gradient mode", torch.is_grad_enabled, torch._C._set_grad_enabled)
    yield _Switch("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly)
    yield _Switch("denormal numbers", _keeps_denormals, lambda kept: torch.set_flush_denormal(not kept))
    flags = (
        (torch.backends.cudnn, "torch.backends.cudnn", ("enabled", "benchmark", "deterministic", "allow_tf32")),
        (
            cuda.matmul,
            "torch.backends.cuda.matmul",
            (
                "allow_tf32",
                "allow_fp16_reduced_precision_reduction",
                "allow_bf16_reduced_precision_reduction",
                "allow_fp16_accumulation",
            ),
        ),
        (torch.backends.mkldnn, "torch.backends.mkldnn", ("enabled",)),
    )
    for owner, path, names in flags:
        for name in names:
            yield _flag(owner, path, name)
    # After the flags, which are among its older names: putting one of them back sets newer ones.
    yield _Switch("the precision of fp32 products", _precisions, _put_precisions)
    for kind in ("cpu", "cuda"):
        yield _Switch(f"autocast on {kind}", partial(_autocast, kind), partial(_put_autocast, kind))
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        read, put = getattr(cuda, f"{kind}_sdp_enabled", None), getattr(cuda, f"enable_{kind}_sdp", None)
        if read is not None and put is not None:
            yield _Switch(f"{kind} attention of torch", read, put)
    if torch.cuda.is_initialized():
        yield _Switch("the CUDA device", torch.cuda.current_device, torch.cuda.set_device)
        yield _Switch("the CUDA stream", torch.cuda.current_stream, torch.cuda.set_stream)
    yield _Switch("Python's switch interval", sys.getswitchinterval, sys.setswitchinterval)
    yield _Switch("Python's tracing", sys.gettrace, sys.settrace)
    yield _Switch("Python's profiling", sys.getprofile, sys.setprofile)
    yield _Switch("garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable())
    yield _Switch("garbage collection's thresholds", gc.get_threshold, lambda x: gc.set_threshold(*x))
    if hasattr(os, "sched_getaffinity"):
        yield _Switch(
            "the cores it may use", lambda: os.sched_getaffinity(0), lambda x: os.sched_setaffinity(0, x)
        )
    yield _Switch("the working directory", os.getcwd, os.chdir)
    yield _Switch("environment variables", _variables, _put_variables)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        yield _Switch(
            f"the handler of {number.name}",
            lambda number=number: signal.getsignal(number),  # type: ignore[misc]  # mypy cannot type the default
            lambda handler, number=number: signal.signal(number, handler),  # type: ignore[misc]  # as above
        )


_COMPILERS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")


def _compilers() -> dict[tuple[str, str], Any]:
    """What was set by hand in the settings of torch's compilers, of those that are loaded."""
    found = {}
    for module in _COMPILERS:
        for name, entry in getattr(sys.modules.get(module), "_config", {}).items():
            override: Any = getattr(entry, "user_override", None)
            value = override.get() if isinstance(override, ContextVar) else entry.default
            # Reading one that is a list sets a copy of its default.
            if value is not _unset() and value != entry.default:
                found[module, name] = value
    return found


def _unset() -> Any:
    from torch.utils import _config_module

    return getattr(_config_module, "_UNSET_SENTINEL", None)


def _put_compilers(before: dict[tuple[str, str], Any]) -> list[str]:
    """Puts these back: with one of them, whoever compiles after it would compile otherwise, or not at all."""
    now = _compilers()
    changed = [x for x in now.keys() | before.keys() if now.get(x, _MISSING) != before.get(x, _MISSING)]
    for module, name in changed:
        owner: Any = sys.modules[module]
        owner._config[name].user_override.set(before.get((module, name), _unset()))
    return sorted(f"{module}.{name}" for module, name in changed)


def _flag(owner: Any, path: str, name: str) -> _Switch:
    def read() -> Any:
        try:
            return getattr(owner, name)
        except AttributeError:  # not of this torch
            return _MISSING
        except RuntimeError:
            return BY_BACKEND

    def put(value: Any) -> None:
        if value is not BY_BACKEND:
            setattr(owner, name, value)

    return _Switch(f"{path}.{name}", read, put)


_PRECISIONS = (("generic", "all"), *((b, o) for b in ("cuda", "mkldnn") for o in ("all", "matmul", "conv", "rnn")))
"""Backends and operations whose precision of fp32 torch can be told, what others inherit first."""


def _precisions() -> dict[str, str]:
    """By torch's older name, which cannot be read once newer ones say something else, and by its newer ones."""
    import torch

    try:
        found = {"all": torch.get_float32_matmul_precision()}
    except RuntimeError:
        found = {"all": BY_BACKEND}
    if (read := getattr(torch._C, "_get_fp32_precision_getter", None)) is not None:
        for backend, operation in _PRECISIONS:
            said = read(backend, operation)
            # "none" is the same, until one that it inherits from is told.
            found[f"{backend}.{operation}"] = "ieee" if said == "none" else said
    return found


def _put_precisions(before: dict[str, str]) -> None:
    import torch

    if before["all"] != BY_BACKEND:
        torch.set_float32_matmul_precision(before["all"])
    for backend, operation in _PRECISIONS:
        name = f"{backend}.{operation}"
        if name in before and _precisions()[name] != before[name]:
            wanted = "none" if before[name] == "ieee" else before[name]
            torch._C._set_fp32_precision_setter(backend, operation, wanted)


def _autocast(kind: str) -> tuple[bool, Any]:
    import torch

    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _put_autocast(kind: str, before: tuple[bool, Any]) -> None:
    import torch

    torch.set_autocast_enabled(kind, before[0])
    torch.set_autocast_dtype(kind, before[1])


def _keeps_denormals() -> bool:
    import torch

    return float(torch.full((1,), 1e-310, dtype=torch.float64) * 0.5) != 0


def _variables() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(CODE_VARIABLES) and not name.endswith(PLACES)
    }


def _put_variables(before: dict[str, str]) -> None:
    for name in _variables().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


class _Seeds:
    """The state of random number generators. Drawing from them is nobody's fault, and ends with the row."""

    def __init__(self) -> None:
        import torch

        self._first = torch.initial_seed()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = numpy.random.get_state() if numpy else None

    def put_back(self) -> bool:
        """Puts the states back. Whether torch had been given another seed."""
        import torch

        seeded = torch.initial_seed() != self._first
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        return seeded
