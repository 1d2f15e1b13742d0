"""A trace that PyTorch's profiler wrote, read as a capture: which of our operators it holds, and all else by time.

    with torch.profiler.profile(record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace("mine.json")

The time of an operator is that of the kernels which it launched, by the identifiers that the profiler gives both;
of a trace without kernels it is the host's. Shapes alone are known, not which tensor is which: what programs write
by hand of several functions is not followed, and a mask's elements are not seen.
"""

from __future__ import annotations

import gzip
import itertools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ...registry.errors import InputError
from .recorder import Capture
from .rules import RULES, Rule, attended, flat, rows

DTYPES: Mapping[str, str] = {
    "c10::BFloat16": "torch.bfloat16",
    "c10::Half": "torch.float16",
    "float": "torch.float32",
    "double": "torch.float64",
}
"""PyTorch's dtypes by what a trace calls them."""

BACKWARD = "autograd::engine::evaluate_function: "
STEP = "Optimizer.step#"


@dataclass(frozen=True)
class Traced:
    """What a trace says of a tensor, with as much of a tensor's interface as rules ask for."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    requires_grad: bool
    is_cuda: bool = False

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        """In elements."""
        return self.strides


@dataclass
class _Event:
    """An operator's event. Its time belongs to `name`, or to the call of index `taken`, of which it is a part."""

    raw: Mapping[str, Any]
    end: float
    name: str
    group: bool
    """Whether what is within it belongs to it too."""
    taken: int | None = None
    part: bool = False
    inner: float = 0.0
    """Microseconds of the events within it."""

    @property
    def self_time(self) -> float:
        """Microseconds that no event within it took."""
        return max(0.0, float(self.raw["dur"]) - self.inner)


def traced(path: Path) -> Capture:
    """The calls of a trace file (`.json` or `.json.gz`).

    Raises `InputError` for a file that is no trace, or one without shapes.
    """
    events = _events(path)
    operators = sorted(
        (x for x in events if x.get("cat") in ("cpu_op", "user_annotation") and _timed(x)),
        key=lambda x: (x["ts"], -x["dur"]),
    )
    if not any("Input Dims" in x.get("args", {}) for x in operators):
        raise InputError(f"{path} has no shapes of operators: profile with record_shapes=True.")
    differentiated = _differentiated(operators)
    seen = Capture()
    # Of several optimizers each has its step in a step of the program, where their classes are several.
    seen.steps = max(Counter(x["name"] for x in operators if x["name"].startswith(STEP)).values(), default=None)
    nested = list(_nested(operators, differentiated, seen))
    kernels = [x for x in events if x.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and _timed(x)]
    if kernels:
        _spend_kernels(seen, nested, kernels)
    else:
        for x in nested:
            seen.spend(x.taken, x.name, x.self_time / 1e6, x.part)
    return seen


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        data = path.read_bytes()
        found = msgspec.json.decode(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, EOFError, zlib.error, RecursionError):
        raise InputError(f"{path} is no JSON: give what `export_chrome_trace` wrote.") from None
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        raise InputError(f"{path} is no trace of PyTorch's profiler: it has no list `traceEvents`.")
    return [x for x in events if isinstance(x, dict) and isinstance(x.get("args", {}), dict)]


def _timed(event: Mapping[str, Any]) -> bool:
    return isinstance(event.get("name"), str) and all(isinstance(event.get(x), int | float) for x in ("ts", "dur"))


def _differentiated(operators: Sequence[Mapping[str, Any]]) -> set[int]:
    """The events, by `id`, that made a node whose backward pass the trace holds.

    All operators up to the one that makes a node have its number: the last one made it.
    """
    last: dict[Any, int] = {}
    backward = set()
    for x in operators:
        arguments = x.get("args", {})
        number = arguments.get("Sequence number")
        if x["name"].startswith(BACKWARD):
            backward.add(number)
        elif number is not None and not arguments.get("Fwd thread id"):
            last[number] = id(x)
    return {last[x] for x in backward if x in last}


def _nested(operators: Sequence[Mapping[str, Any]], differentiated: set[int], seen: Capture) -> Iterator[_Event]:
    """Each event with whom its time belongs to; calls of our operators are recorded."""
    by_thread: dict[Any, list[Mapping[str, Any]]] = {}
    for x in operators:
        by_thread.setdefault((x.get("pid"), x.get("tid")), []).append(x)
    for those in by_thread.values():
        open_: list[_Event] = []
        for place, raw in enumerate(those):
            while open_ and open_[-1].end <= raw["ts"]:
                open_.pop()
            above = open_[-1] if open_ else None
            if above is not None:
                above.inner += raw["dur"]
            one = _Event(raw, raw["ts"] + raw["dur"], raw["name"], group=False)
            if above is not None and (above.group or above.taken is not None):
                one.name, one.group, one.taken, one.part = above.name, above.group, above.taken, True
            elif raw["name"].startswith((BACKWARD, STEP)):
                one.name, one.group = raw["name"].removeprefix(BACKWARD).removeprefix(STEP), True
            elif raw["cat"] == "cpu_op" and not _asked(raw["name"], open_):
                one.taken = _claim(seen, raw, partial(_trained, those, place, one.end, differentiated))
            open_.append(one)
            yield one


def _asked(name: str, around: Sequence[_Event]) -> bool:
    """Whether an operator is a way of one around it that was refused: it would be refused once more."""
    return name in _ATEN and any(
        x.raw["name"] != name and x.raw["name"] in _ATEN and _ATEN[x.raw["name"]][0] == _ATEN[name][0]
        for x in around
    )


def _trained(those: Sequence[Mapping[str, Any]], place: int, end: float, differentiated: set[int]) -> bool:
    """Whether this event, or one within it, made a node that the backward pass went through."""
    within = itertools.takewhile(lambda x: x["ts"] < end, map(those.__getitem__, range(place, len(those))))
    return any(id(x) in differentiated for x in within)


def _claim(seen: Capture, raw: Mapping[str, Any], trained: Callable[[], bool]) -> int | None:
    """Asks the rule of an event's name; the index of the call, if it is one of ours."""
    name = raw["name"]
    if name not in _ATEN and name not in _LIBRARIES:
        return None
    args, kwargs = _arguments(raw.get("args", {}), trained()), {}
    if name in _LIBRARIES:
        rule = _LIBRARIES[name]
    else:
        public, names = _ATEN[name]
        rule = RULES[public]
        kwargs = {x: y for x, y in zip(names, args, strict=False) if y is not None}
        args = ()
    try:
        return seen.claim(
            name, rule, args, kwargs, next(x for x in (*args, *kwargs.values()) if hasattr(x, "shape"))
        )
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError, ZeroDivisionError):
        return None  # a trace of another version, whose arguments are others


def _arguments(given: Mapping[str, Any], trained: bool) -> tuple[Any, ...]:
    """An event's arguments in their order: tensors, numbers, texts, lists of integers, None."""
    dims = given.get("Input Dims", [])
    strides = given.get("Input Strides", [])
    types = given.get("Input type", [])
    values = given.get("Concrete Inputs", [])
    found: list[Any] = []
    for i, kind in enumerate(types):
        if i < len(dims) and dims[i] and all(isinstance(x, int) for x in dims[i]):
            shape = tuple(dims[i])
            laid = tuple(strides[i]) if i < len(strides) and len(strides[i]) == len(shape) else _contiguous(shape)
            found.append(Traced(shape, laid, DTYPES.get(kind, str(kind)), trained))
        else:
            found.append(_value(values[i]) if i < len(values) else None)
    return tuple(found)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _value(text: str) -> Any:
    """What is written of an argument that is no tensor: None, a truth value, a number, integers or a text."""
    if text in ("", "None", "True", "False"):
        return {"True": True, "False": False}.get(text)
    try:
        if text.startswith("["):
            return [int(x) for x in text.strip("[]").split(",") if x.strip()]
        return float(text) if any(x in text for x in ".en") else int(text)
    except ValueError:
        return text


def _spend_kernels(seen: Capture, nested: Sequence[_Event], kernels: Sequence[Mapping[str, Any]]) -> None:
    """Gives each kernel's time to the call, or the operator, that launched it; to itself where none is known."""
    launched = {x.raw.get("args", {}).get("External id"): x for x in nested}
    for kernel in kernels:
        by = launched.get(kernel.get("args", {}).get("External id"))
        taken, name = (None, kernel["name"]) if by is None else (by.taken, by.name)
        seen.spend(taken, name, kernel["dur"] / 1e6)


_QKV = "query", "key", "value"
_ATEN: Mapping[str, tuple[str, tuple[str, ...]]] = {
    # What torch.compile calls in the place of the first: one of its ways.
    "aten::_scaled_dot_product_flash_attention": (
        "scaled_dot_product_attention",
        (*_QKV, "dropout_p", "is_causal", "return_debug_mask", "scale"),
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (
        "scaled_dot_product_attention",
        (*_QKV, "dropout_p", "is_causal", "attn_mask", "scale"),
    ),
    "aten::_scaled_dot_product_efficient_attention": (
        "scaled_dot_product_attention",
        (*_QKV, "attn_mask", "compute_log_sumexp", "dropout_p", "is_causal", "scale"),
    ),
    "aten::_scaled_dot_product_cudnn_attention": (
        "scaled_dot_product_attention",
        (*_QKV, "attn_mask", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask", "scale"),
    ),
    "aten::_scaled_dot_product_fused_attention_overrideable": (
        "scaled_dot_product_attention",
        (*_QKV, "attn_mask", "dropout_p", "is_causal", "return_debug_mask", "scale"),
    ),
    "aten::scaled_dot_product_attention": (
        "scaled_dot_product_attention",
        ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    ),
    "aten::linear": ("linear", ("input", "weight", "bias")),
    "aten::addmm": ("addmm", ("input", "mat1", "mat2", "beta", "alpha")),
    "aten::matmul": ("matmul", ("input", "other")),
    "aten::mm": ("mm", ("input", "mat2")),
    "aten::rms_norm": ("rms_norm", ("input", "normalized_shape", "weight", "eps")),
    "aten::layer_norm": ("layer_norm", ("input", "normalized_shape", "weight", "bias", "eps")),
    "aten::softmax": ("softmax", ("input", "dim")),
    "aten::cross_entropy_loss": (
        "cross_entropy",
        ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing"),
    ),
    "aten::gelu": ("gelu", ("input", "approximate")),
}
"""PyTorch's operators: the public function whose rule they share, and the names of their arguments."""


def _silu_and_mul(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    x = args[1]
    self.record([at], "swiglu", self.itself(x), {"M": flat(x.shape, "N")["M"], "N": x.shape[-1] // 2})


def _rms_norm_of_vllm(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    self.record([at], "rms_norm", self.itself(args[1]), rows(args[1].shape))


def _add_rms_norm_of_vllm(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    self.record([at], "add_rms_norm", self.itself(args[0]), rows(args[0].shape))


def _rotary_of_vllm(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    q, k, D, halves = args[1], args[2], args[3], args[5]
    axes = {"B": 1, "H": q.shape[-1] // D, "Hkv": k.shape[-1] // D, "S": q.shape[0], "D": D}
    options = {"layout": "half" if halves else "interleaved", "storage": "bshd"}
    self.record([at], "rope", self.itself(q), axes, options)


def _flash_attention(self: Capture, at: int, args: Any, kwargs: Any, result: Any) -> None:
    """(B, S, H, D) of q, k and v; then dropout, scale, causal, and the window's two sides, -1 being none."""
    q, k, v = (
        Traced(
            tuple(x.shape[i] for i in (0, 2, 1, 3)),
            tuple(x.strides[i] for i in (0, 2, 1, 3)),
            x.dtype,
            x.requires_grad,
        )
        for x in args[:3]
    )
    causal, before, after = args[5], args[6], args[7]
    window = before + 1 if before >= 0 and (causal or after == 0) else 0
    if before >= 0 and not window:
        self.remarks["attention with a window to both sides"] += 1
        return
    attended(self, at, (q, k, v), ("causal" if causal or window else "full", window))


_LIBRARIES: Mapping[str, Rule] = {
    "_C::silu_and_mul": _silu_and_mul,
    "_C::rms_norm": _rms_norm_of_vllm,
    "_C::fused_add_rms_norm": _add_rms_norm_of_vllm,
    "_C::rotary_embedding": _rotary_of_vllm,
    "flash_attn::_flash_attn_forward": _flash_attention,
}
"""Operators of vLLM (`_C`) and of FlashAttention, by the name that a trace has."""
