"""A mode over PyTorch's public functions that records calls of our operators, and the time of all others."""

from __future__ import annotations

import functools
import inspect
import itertools
import statistics
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from ...registry.figures import counted
from ..operator import Option
from .rules import RULES, Rule, storage

if TYPE_CHECKING:
    from ..catalog import Catalog

NAMES: Mapping[str, str] = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
"""torch's dtypes by ours."""

FORMS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a rule raises for tensors without strides or sizes, or for arguments that it does not expect."""


@dataclass(frozen=True)
class Call:
    """One kind of call: all that look the same count as one. `strides` are those of the first tensor."""

    operator: str
    axes: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Option], ...]
    dtype: str
    strides: tuple[int, ...]
    trained: bool
    """Whether gradients were asked for."""


@dataclass(frozen=True)
class Seen:
    """A kind of call, how often it was made, and the milliseconds of all of them, forward."""

    call: Call
    count: int
    ms: float


@dataclass(frozen=True)
class Shape:
    """What is kept of a tensor: enough for a case, and a number to tell it from others; the dtype is PyTorch's."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    trained: bool


@dataclass(frozen=True)
class Mark:
    """What a tensor is, as a step of a pattern that began at `source`: by the entries `steps`."""

    kind: str
    source: Shape
    steps: tuple[int, ...]


@dataclass
class Entry:
    """One call of a public function, between two CUDA events or two times in seconds. `call` is what it is a part
    of; the last part `counts`.
    """

    name: str
    edges: tuple[Any, Any]
    call: Call | None = None
    counts: bool = False
    part: bool = False
    """Of something larger that is no operator of ours, and counts itself."""

    @property
    def host(self) -> bool:
        """Whether it was timed by the host's clock."""
        return isinstance(self.edges[0], float)

    @property
    def ms(self) -> float:
        """Between the edges."""
        return _ms(*self.edges)


class Capture:
    """A context in which calls are recorded. It may be entered again, and adds up."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._sources: dict[int, tuple[weakref.ref[Any], Shape]] = {}
        self._marks: dict[int, tuple[weakref.ref[Any], Mark]] = {}
        self._turned: Mark | None = None
        self._count = 0
        self._mode: Any = None
        self._hooks: tuple[Any, ...] = ()
        self._within = ""
        """The optimizer whose step is being taken; its calls are one thing."""
        self._frame: FrameType | None = None
        """Where that step runs: of one that raises no hook tells the end."""
        self.remarks: Counter[str] = Counter()
        self._ends: dict[int, list[Any]] = {}
        """When each optimizer's steps ended: a program may have several, each with its step in one of its own."""
        self.steps: int | None = None
        """How many steps the program took, where that is known; else those of its optimizers are counted."""
        self.step_ms: float | None = None
        """How long one took, where that was measured without a capture, which slows."""

    def __enter__(self) -> Capture:
        import torch
        from torch.overrides import TorchFunctionMode

        outer = self

        class Mode(TorchFunctionMode):
            def __torch_function__(
                self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if torch.compiler.is_compiling():  # the compiler cannot follow what is written down
                    return function(*args, **(kwargs or {}))
                return outer._seen(function, args, kwargs or {})

        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._hooks = (
            register_optimizer_step_pre_hook(self._stepping),
            register_optimizer_step_post_hook(self._stepped),
        )
        self._mode = Mode()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._within, self._frame = "", None

    def _stepping(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = [x for group in optimizer.param_groups for x in group["params"] if x.grad is not None]
        numbers = sum(x.numel() for x in tensors)
        self._within = f"{type(optimizer).__name__}.step of {counted(len(tensors), 'tensor')}, {numbers:,} numbers"
        self._entries.append(Entry(self._within, (0.0, 0.0)))
        self._frame = sys._getframe(1)
        within = tuple(self._outside(x) if inspect.isroutine(x) else x for x in args)
        return within, {name: self._outside(x) if callable(x) else x for name, x in kwargs.items()}

    def _outside(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The closure that an optimizer's step calls: a pass of the model, and no part of the update."""

        @functools.wraps(closure)
        def outside(*given: Any, **named: Any) -> Any:
            kept, self._within = self._within, ""
            try:
                return closure(*given, **named)
            finally:
                self._within = kept

        return outside

    def _stepped(self, optimizer: Any, *given: Any) -> None:
        self._within, self._frame = "", None
        self._ends.setdefault(id(optimizer), []).append(_edge())

    # -- recording ----------------------------------------------------------------------------------------

    def _seen(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(function, "__name__", str(function)).strip("_")
        if name in _SILENT or "record_function" in name:  # the latter are the profiler's marks
            return function(*args, **kwargs)
        if self._within and not _running(self._frame):  # it raised, and the program goes on
            self._within, self._frame = "", None
        first = _edge()
        result = function(*args, **kwargs)
        self._entries.append(Entry(self._within or name, (first, _edge()), part=bool(self._within)))
        rule = None if self._within else RULES.get(name)
        if rule is not None and _batched((*args, *kwargs.values())):
            self.remarks[f"{name} within torch.vmap, whose sizes are of one example"] += 1
        elif rule is not None:
            try:
                rule(self, len(self._entries) - 1, args, kwargs, result)
            except FORMS:  # the call itself is right, and so is the program
                self.remarks[f"{name} of tensors or arguments of a form that is not known"] += 1
        return result

    def claim(
        self, name: str, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> int | None:
        """Records a call of no time yet, if the rule says that it is one of ours; its index, for `spend`."""
        at = len(self._entries)
        self._entries.append(Entry(name, (0.0, 0.0)))
        try:
            rule(self, at, args, kwargs, result)
        finally:
            claimed = self._entries[at].call is not None
            if not claimed:
                del self._entries[at:]
        return at if claimed else None

    def spend(self, at: int | None, name: str, seconds: float, part: bool = False) -> None:
        """Adds time to a call by its index; without one, to what has this name, of which a `part` is no call."""
        if at is None:
            self._entries.append(Entry(name, (0.0, seconds), part=part))
        else:
            self._entries[at].edges = 0.0, self._entries[at].edges[1] + seconds

    def record(
        self,
        steps: Sequence[int],
        operator: str,
        source: Shape,
        axes: Mapping[str, int],
        options: Mapping[str, Option] | None = None,
    ) -> None:
        """Says that these steps were one call of an operator. The time of all goes to it."""
        if (call := self._call(operator, source, axes, options)) is not None:
            for step in steps:
                self._entries[step].call = call
                self._entries[step].counts = step == steps[-1]

    def implied(
        self, operator: str, source: Shape, axes: Mapping[str, int], options: Mapping[str, Option]
    ) -> None:
        """Says that the backward pass will make this call. Its time is a part of that pass."""
        if (call := self._call(operator, source, axes, options)) is not None:
            self._entries.append(Entry(operator, (0.0, 0.0), call, counts=True))

    def _call(
        self, operator: str, source: Shape, axes: Mapping[str, int], options: Mapping[str, Option] | None
    ) -> Call | None:
        """None where the operator has no such dtype or sizes, which is remembered."""
        if source.dtype not in NAMES:
            self.remarks[f"{operator} in {source.dtype}"] += 1
            return None
        if not all(isinstance(x, int) for x in axes.values()):  # of ragged tensors they are symbols
            self.remarks[f"{operator} of sizes that differ within a tensor"] += 1
            return None
        what = tuple(axes.items()), tuple((options or {}).items()), NAMES[source.dtype]
        return Call(operator, *what, source.strides, source.trained)

    def mark(self, tensor: Any, kind: str, source: Shape, *steps: int) -> None:
        """Says what a tensor is a step of."""
        self._marks[id(tensor)] = (weakref.ref(tensor), Mark(kind, source, steps))

    def marked(self, tensor: Any, *kinds: str) -> Mark | None:
        """The mark of a tensor, if it is of one of these kinds."""
        found = self._marks.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1].kind not in kinds:
            return None
        return found[1]

    def source(self, tensor: Any) -> Shape:
        """A tensor as it was before casts."""
        found = self._sources.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        self.same(tensor, shape := self.itself(tensor))
        return shape

    def itself(self, tensor: Any, *others: Any) -> Shape:
        """A tensor as it is; trained, where it or one of those others is."""
        import torch

        self._count += 1
        trained = any(x.requires_grad for x in (tensor, *others)) and torch.is_grad_enabled()
        return Shape(self._count, tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype), trained)

    def same(self, tensor: Any, source: Shape) -> None:
        """Says that a tensor is a cast of that one."""
        self._sources[id(tensor)] = (weakref.ref(tensor), source)

    def turned(self, source: Shape, *steps: int) -> None:
        """Queries and keys are turned one after the other, and are one call of ours."""
        kept, self._turned = self._turned, None
        if kept is None or kept.source.shape[2:] != source.shape[2:]:
            self._turned = Mark("turned", source, steps)
            return
        B, H, S, D = kept.source.shape
        axes = {"B": B, "H": H, "Hkv": source.shape[1], "S": S, "D": D}
        options = {"layout": "half", "storage": storage(kept.source)}
        self.record([*kept.steps, *steps], "rope", kept.source, axes, options)

    # -- what was seen ------------------------------------------------------------------------------------

    def calls(self) -> tuple[Seen, ...]:
        """The kinds of calls, those that took the longest first."""
        self._wait()
        counts: dict[Call, int] = {}
        spent: dict[Call, float] = {}
        for x in self._entries:
            if x.call is not None:
                counts[x.call] = counts.get(x.call, 0) + x.counts
                spent[x.call] = spent.get(x.call, 0.0) + x.ms
        return tuple(sorted((Seen(x, counts[x], spent[x]) for x in counts), key=lambda x: -x.ms))

    def rest(self) -> tuple[tuple[str, int, float], ...]:
        """Functions that are no operator of ours: name, calls and milliseconds, the longest first."""
        self._wait()
        counts: dict[str, int] = {}
        spent: dict[str, float] = {}
        for x in self._entries:
            if x.call is None:
                counts[x.name] = counts.get(x.name, 0) + (not x.part)
                spent[x.name] = spent.get(x.name, 0.0) + x.ms
        return tuple(sorted(((x, counts[x], spent[x]) for x in counts), key=lambda x: -x[2]))

    def step(self) -> tuple[int, float, str]:
        """How many steps were seen, milliseconds of one, and how these are known."""
        self._wait()
        ends = max(self._ends.values(), key=len, default=[])
        steps = self.steps or len(ends) or 1
        if self.step_ms is not None:
            return steps, self.step_ms, "as given"
        if len(ends) > 1 and not self.steps:
            between = [_ms(a, b) for a, b in itertools.pairwise(ends) if type(a) is type(b)]
            return steps, statistics.median(between), "between optimizer steps, while they were captured"
        return steps, self.total_ms / steps, "of all calls that were seen"

    @property
    def total_ms(self) -> float:
        """Of all calls that were seen."""
        self._wait()
        return sum(x.ms for x in self._entries)

    def _wait(self) -> None:
        if any(not x.host for x in self._entries):
            import torch

            torch.cuda.synchronize()

    def plan(self, catalog: Catalog) -> str:
        """The text of a plan file: each kind of call that is a case of the catalog; what is not, as comments."""
        from .planned import plan

        return plan(self, catalog)


_SILENT = frozenset(
    {
        *("get", "set", "size", "stride", "dim", "numel", "len", "repr", "format", "is_floating_point"),
        *("element_size", "device", "set_grad_enabled"),
    }
)
"""Functions that compute nothing."""


def _running(frame: FrameType | None) -> bool:
    """Whether a frame is one of those that led here."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None


def _ms(first: Any, last: Any) -> float:
    """Between two edges; 0 between one of the host's clock and one of a device that came into use after it."""
    if isinstance(first, float) != isinstance(last, float):
        return 0.0
    return float(last - first) * 1e3 if isinstance(first, float) else float(first.elapsed_time(last))


def _batched(values: Sequence[Any]) -> bool:
    """Whether one of them has a dimension that `torch.vmap` hides: a call's sizes are then of one of many."""
    import torch

    hidden = torch._C._functorch.is_batchedtensor  # there is no public name for it
    return any(isinstance(x, torch.Tensor) and hidden(x) for x in values)


def _edge() -> Any:
    """The time now: on the device where there is one in use, else the host's."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()
