"""Which of our operators a PyTorch program calls, with shapes, strides, dtypes and counts, and a plan of them.

    from kernelmark.suite.capture import Capture

    with Capture() as seen:
        model(tokens).loss.backward()
    print(seen.plan(catalog))

A mode over PyTorch's public functions sees every call that the program makes outside of compiled code. Some of
our operators are one such function (`scaled_dot_product_attention`, `layer_norm`), others are what programs write
by hand: `silu(gate) * up`, an RMS norm of `pow`, `mean` and `rsqrt`, rotary positions of halves. Those are
followed from result to result. What is neither (a library's own kernels, compiled regions, backward passes) is not
attributed; what was seen of it is listed with its share of the time.
"""

from __future__ import annotations

import contextlib
import math
import runpy
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..registry.errors import InputError
from .operator import Option

if TYPE_CHECKING:
    from .catalog import Catalog

NAMES: Mapping[str, str] = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
"""torch's dtypes by ours."""


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
class _Shape:
    """What is kept of a tensor: enough for a case, and a number to tell it from others."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    trained: bool


@dataclass(frozen=True)
class _Mark:
    """What a tensor is, as a step of a pattern that began at `source`: by the entries `steps`."""

    kind: str
    source: _Shape
    steps: tuple[int, ...]


@dataclass
class _Entry:
    """One call of a public function, between two CUDA events or two times in seconds. `call` is what it is a part
    of; the last part `counts`.
    """

    name: str
    edges: tuple[Any, Any]
    call: Call | None = None
    counts: bool = False

    @property
    def host(self) -> bool:
        """Whether it was timed by the host's clock."""
        return isinstance(self.edges[0], float)

    @property
    def ms(self) -> float:
        """Between the edges."""
        first, last = self.edges
        return float(last - first) * 1e3 if self.host else float(first.elapsed_time(last))


class Capture:
    """A context in which calls are recorded. It may be entered again, and adds up."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._sources: dict[int, tuple[weakref.ref[Any], _Shape]] = {}
        self._marks: dict[int, tuple[weakref.ref[Any], _Mark]] = {}
        self._turned: _Mark | None = None
        self._count = 0
        self._mode: Any = None
        self.refused: Counter[str] = Counter()

    def __enter__(self) -> Capture:
        from torch.overrides import TorchFunctionMode

        outer = self

        class Mode(TorchFunctionMode):
            def __torch_function__(
                self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                return outer._seen(function, args, kwargs or {})

        self._mode = Mode()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

    # -- recording ----------------------------------------------------------------------------------------

    def _seen(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(function, "__name__", str(function)).strip("_")
        if name in _SILENT:
            return function(*args, **kwargs)
        first = _edge()
        result = function(*args, **kwargs)
        self._entries.append(_Entry(name, (first, _edge())))
        rule = _RULES.get(name)
        if rule is not None:
            rule(self, len(self._entries) - 1, args, kwargs, result)
        return result

    def record(
        self,
        steps: Sequence[int],
        operator: str,
        source: _Shape,
        axes: Mapping[str, int],
        options: Mapping[str, Option] | None = None,
    ) -> None:
        """Says that these steps were one call of an operator. The time of all goes to it."""
        if source.dtype not in NAMES:
            self.refused[f"{operator} in {source.dtype}"] += 1
            return
        what = tuple(axes.items()), tuple((options or {}).items()), NAMES[source.dtype]
        call = Call(operator, *what, source.strides, source.trained)
        for step in steps:
            self._entries[step].call = call
            self._entries[step].counts = step == steps[-1]

    def mark(self, tensor: Any, kind: str, source: _Shape, *steps: int) -> None:
        """Says what a tensor is a step of."""
        self._marks[id(tensor)] = (weakref.ref(tensor), _Mark(kind, source, steps))

    def marked(self, tensor: Any, *kinds: str) -> _Mark | None:
        """The mark of a tensor, if it is of one of these kinds."""
        found = self._marks.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1].kind not in kinds:
            return None
        return found[1]

    def source(self, tensor: Any) -> _Shape:
        """A tensor as it was before casts."""
        found = self._sources.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        self.same(tensor, shape := self.itself(tensor))
        return shape

    def itself(self, tensor: Any) -> _Shape:
        """A tensor as it is."""
        import torch

        self._count += 1
        trained = bool(tensor.requires_grad) and torch.is_grad_enabled()
        return _Shape(self._count, tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype), trained)

    def same(self, tensor: Any, source: _Shape) -> None:
        """Says that a tensor is a cast of that one."""
        self._sources[id(tensor)] = (weakref.ref(tensor), source)

    def turned(self, source: _Shape, *steps: int) -> None:
        """Queries and keys are turned one after the other, and are one call of ours."""
        kept, self._turned = self._turned, None
        if kept is None or kept.source.shape[2:] != source.shape[2:]:
            self._turned = _Mark("turned", source, steps)
            return
        B, H, S, D = kept.source.shape
        axes = {"B": B, "H": H, "Hkv": source.shape[1], "S": S, "D": D}
        self.record([*kept.steps, *steps], "rope", kept.source, axes, {"layout": "half"})

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
                counts[x.name] = counts.get(x.name, 0) + 1
                spent[x.name] = spent.get(x.name, 0.0) + x.ms
        return tuple(sorted(((x, counts[x], spent[x]) for x in counts), key=lambda x: -x[2]))

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
        total = self.total_ms or 1.0
        lines = [
            "# Calls of a program, as `kernelmark capture` saw them. Shares are of the time of all calls that it",
            "# saw; a backward pass is one of them, and not taken apart.",
            "",
        ]
        cases = 0
        left: list[str] = [f"{count} calls, {reason}" for reason, count in self.refused.items()]
        for seen in self.calls():
            try:
                table = _table(seen, catalog, total)
            except InputError as error:
                left.append(f"{seen.count} calls, {100 * seen.ms / total:.1f} %: {error}")
                continue
            cases += 1
            lines += [*table, ""]
        lines.append("# Not attributed to an operator:")
        left += [
            f"{count} calls, {100 * ms / total:.1f} %: {name}"
            for name, count, ms in self.rest()
            if ms / total >= 1e-3
        ]
        lines += [f"#   {x}" for x in left] or ["#   nothing"]
        if not cases:
            raise InputError("the program made no call that is an operator of ours; " + "; ".join(left[:5]))
        return "\n".join(lines) + "\n"


def _table(seen: Seen, catalog: Catalog, total: float) -> list[str]:
    """A `[[cases]]` table. Raises `InputError` where the catalog has no such case."""
    call = seen.call
    operator = catalog.operator(call.operator)
    options = dict(call.options)
    if "bshd" in operator.options.get("layout", ()) and len(call.strides) == 4:
        options["layout"] = "bshd" if call.strides[1] < call.strides[2] else "bhsd"
    passes = ["forward"]
    if call.trained:
        passes.append("forward_backward" if call.operator.endswith("cross_entropy") else "backward")
    for pass_ in passes:
        operator.case(dict(call.axes), call.dtype, pass_, **options)  # type: ignore[arg-type]  # a Pass
    written = ", ".join(f"{name} = {size}" for name, size in call.axes)
    found = [
        f"# {seen.count} calls, {100 * seen.ms / total:.2f} % of the time; strides {list(call.strides)}",
        "[[cases]]",
        f'operator = "{call.operator}"',
        f"axes = {{ {written} }}",
    ]
    if options:
        given = ", ".join(f"{name} = {_toml(value)}" for name, value in options.items())
        found.append(f"options = {{ {given} }}")
    found.append(f'dtype = "{call.dtype}"')
    found.append(f"pass = [{', '.join(map(_toml, passes))}]")
    return found


def _toml(value: Option) -> str:
    return (
        str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
    )


def _edge() -> Any:
    """The time now: on the device where there is one in use, else the host's."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


Rule: TypeAlias = Callable[[Capture, int, Any, Any, Any], None]

# -- rules: what a public function is, or is a step of ------------------------------------------------------


def _rows(shape: Sequence[int]) -> dict[str, int]:
    """(…, D) as B, S, D."""
    lead = list(shape[:-1])
    first = lead[0] if len(lead) > 1 else 1
    return {"B": first, "S": math.prod(lead[1:]) if len(lead) > 1 else math.prod(lead), "D": shape[-1]}


def _flat(shape: Sequence[int], last: str) -> dict[str, int]:
    """(…, N) as M, N."""
    return {"M": math.prod(shape[:-1]), last: shape[-1]}


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _attention(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    q, k, v = (_given(args, kwargs, i, name) for i, name in enumerate(("query", "key", "value")))
    causal = bool(_given(args, kwargs, 5, "is_causal", False))
    scale = kwargs.get("scale")
    if q.dim() != 4 or q.shape[2] != k.shape[2] or q.shape[-1] != v.shape[-1]:
        self.refused[f"attention of {tuple(q.shape)} queries on {tuple(k.shape)} keys"] += 1
        return
    if _given(args, kwargs, 3, "attn_mask") is not None:
        self.refused["attention with a mask of elements"] += 1
        return
    if scale is not None and not math.isclose(scale, q.shape[-1] ** -0.5, rel_tol=1e-3):
        self.refused[f"attention with scores scaled by {scale:.4g}"] += 1
        return
    B, H, S, D = q.shape
    axes = {"B": B, "H": H, "Hkv": k.shape[1], "S": S, "D": D}
    self.record([at], "attention", self.itself(q), axes, {"mask": "causal" if causal else "full"})


def _rms_norm(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x, shape = args[0], _given(args, kwargs, 1, "normalized_shape")
    if len(shape) == 1 and _given(args, kwargs, 2, "weight") is not None:
        self.record([at], "rms_norm", self.itself(x), _rows(x.shape))


def _layer_norm(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x, shape = args[0], _given(args, kwargs, 1, "normalized_shape")
    affine = [_given(args, kwargs, i, name) is not None for i, name in ((2, "weight"), (3, "bias"))]
    if len(shape) == 1 and all(affine):
        self.record([at], "layer_norm", self.itself(x), _rows(x.shape))


def _softmax(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x, dim = args[0], _given(args, kwargs, 1, "dim")
    if dim in (-1, x.dim() - 1):
        self.record([at], "softmax", self.itself(x), _flat(x.shape, "D"))


def _cross_entropy(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x = args[0]
    if x.dim() == 2 and kwargs.get("reduction", "mean") == "mean" and not kwargs.get("label_smoothing"):
        self.record([at], "cross_entropy", self.itself(x), _flat(x.shape, "V"))


def _gelu(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    source = self.itself(args[0])
    form = kwargs.get("approximate", "none")
    self.record([at], "gelu", source, _flat(source.shape, "N"), {"approximate": form})
    if form == "tanh":
        self.mark(result, "gelu", source, at)


def _silu(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    self.mark(result, "silu", self.source(args[0]), at)


def _cast(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    """A cast is still the same thing, and a step of what is made of it."""
    x = args[0]
    if result is x or not hasattr(result, "shape"):
        return
    self.same(result, self.source(x))
    found = self._marks.get(id(x))
    if found is not None and found[0]() is x:
        self.mark(result, found[1].kind, found[1].source, *found[1].steps, at)
    else:
        self.mark(result, "cast", self.source(x), at)


def _square(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    if len(args) > 1 and args[1] != 2:
        return
    cast = self.marked(args[0], "cast")
    self.mark(result, "square", self.source(args[0]), *(cast.steps if cast else ()), at)


def _next(kind: str, *before: str) -> Rule:
    """A rule: this function of what is one of `before` is `kind`."""

    def rule(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
        mark = self.marked(args[0], *before)
        if mark is not None:
            self.mark(result, kind, mark.source, *mark.steps, at)

    return rule


def _slice(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x = args[0]
    if hasattr(result, "shape") and x.dim() == 4 and 2 * result.shape[-1] == x.shape[-1]:
        self.mark(result, "half", self.source(x), at)


def _cat(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    if len(args[0]) != 2:
        return
    first, second = self.marked(args[0][0], "negated half"), self.marked(args[0][1], "half")
    if first is not None and second is not None and first.source == second.source:
        self.mark(result, "rotated", first.source, *first.steps, *second.steps, at)


def _mul(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x, y = args[0], _given(args, kwargs, 1, "other")
    if not (hasattr(x, "shape") and hasattr(y, "shape")):
        return
    if not any(_product(self, at, a, b, result) for a, b in ((x, y), (y, x))):
        # Any product of four dimensions may be that of queries with cosines; what is added to it decides.
        wide = x if x.dim() == 4 else y
        if wide.dim() == 4:
            self.mark(result, "times cos", self.source(wide), at)


def _product(self: Capture, at: int, x: Any, y: Any, result: Any) -> bool:
    """Whether x · y is a step of a pattern that x is in."""
    mark = self.marked(x, "silu", "gelu", "rsqrt", "normalized", "rotated")
    if mark is None:
        return False
    steps = (*mark.steps, at)
    if mark.kind in ("silu", "gelu") and x.shape == y.shape:
        kind = "swiglu" if mark.kind == "silu" else "geglu"
        self.record(steps, kind, mark.source, _flat(mark.source.shape, "N"))
    elif mark.kind == "rsqrt" and self.source(y) == mark.source:
        self.mark(result, "normalized", mark.source, *steps)
    elif mark.kind == "normalized" and tuple(y.shape) == mark.source.shape[-1:]:
        self.record(steps, "rms_norm", mark.source, _rows(mark.source.shape))
    elif mark.kind == "rotated":
        self.mark(result, "times sin", mark.source, *steps)
    else:
        return False
    return True


def _add(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x, y = args[0], _given(args, kwargs, 1, "other")
    if not hasattr(y, "shape"):
        _next("mean square", "mean square")(self, at, args, kwargs, result)
        return
    for a, b in ((x, y), (y, x)):
        first, second = self.marked(a, "times cos"), self.marked(b, "times sin")
        if first is not None and second is not None and first.source == second.source:
            self.turned(first.source, *first.steps, *second.steps, at)
            return


_RULES: Mapping[str, Rule] = {
    "scaled_dot_product_attention": _attention,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
    "gelu": _gelu,
    "silu": _silu,
    "to": _cast,
    "float": _cast,
    "type_as": _cast,
    "type": _cast,
    "pow": _square,
    "square": _square,
    "mean": _next("mean square", "square"),
    "rsqrt": _next("rsqrt", "mean square"),
    "neg": _next("negated half", "half"),
    "getitem": _slice,
    "cat": _cat,
    "mul": _mul,
    "rmul": _mul,
    "multiply": _mul,
    "add": _add,
    "radd": _add,
}
"""By name of a public function, underscores off."""

_SILENT = frozenset(
    {"get", "set", "size", "stride", "dim", "numel", "len", "repr", "format", "is_floating_point", "element_size"}
)
"""Functions that compute nothing."""


@contextlib.contextmanager
def _as_main(arguments: Sequence[str]) -> Iterator[None]:
    """`sys.argv` and `sys.path` as Python sets them for a program."""
    kept = sys.argv, sys.path[:]
    sys.argv = list(arguments)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = kept


def run(command: Sequence[str], seen: Capture) -> int:
    """Runs `python FILE …` or `python -m MODULE …` in this process, and records what it calls.

    Gives the program's exit status. Raises `InputError` for any other command.
    """
    given = list(command)
    if given and Path(given[0]).name.startswith("python"):
        given = given[1:]
    if given[:1] == ["-m"] and len(given) > 1:
        start: Callable[[], Any] = partial(runpy.run_module, given[1], run_name="__main__", alter_sys=True)
        arguments = given[1:]
    elif given and not given[0].startswith("-"):
        if not Path(given[0]).is_file():
            raise InputError(f"no program at {given[0]}.")
        start = partial(runpy.run_path, given[0], run_name="__main__")
        arguments = given
    else:
        raise InputError("say which program after `--`: python FILE …, or python -m MODULE ….")
    with _as_main(arguments):
        if "-m" not in command:
            sys.path.insert(0, str(Path(given[0]).resolve().parent))
        else:
            sys.path.insert(0, str(Path.cwd()))
        try:
            with seen:
                start()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
