"""What an operator is: everything about a computation except who does it.

An operator's file builds one `Operator`. Its functions receive a `Case` (axes, options, dtype, pass) and
torch tensors; they import torch themselves, so that reading the file needs no torch.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from ..registry.errors import InputError, unknown
from ..registry.store.record import Case, Pass

if TYPE_CHECKING:
    import torch

Option: TypeAlias = bool | int | float | str
Inputs: TypeAlias = "dict[str, Any]"
Result: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"

DTYPES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}
"""Our dtype names, each with torch's."""

BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "e4m3": 1, "e5m2": 1}
"""Bytes of one element."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of one of our names."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


class Tolerance(msgspec.Struct, frozen=True):
    """What still counts as the same answer, against a reference in higher precision.

    `norm` bounds ‖out − ref‖ / ‖ref‖ of each output; `absolute` and `relative` bound every element:
    |out − ref| ≤ absolute · s + relative · |ref|, with s the root mean square of the reference, so that the
    bound means the same at every scale of the inputs. Of outputs of ten million elements and more a few may pass
    that bound, by no more than tenfold (`measure/verify.py`).
    """

    norm: float
    absolute: float
    relative: float


TOLERANCES: Mapping[str, Tolerance] = {
    "bf16": Tolerance(norm=8e-3, absolute=5e-2, relative=3e-2),
    "fp16": Tolerance(norm=1e-3, absolute=8e-3, relative=4e-3),
    "fp32": Tolerance(norm=1e-5, absolute=1e-4, relative=1e-4),
}
"""Rounding of the output dtype with head-room for another order of summation; an operator may differ."""


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"dtypes": "dtype", "passes": "pass"}):
    """A set of cases: the product of all values given. A plan file's `[[cases]]` table has this shape."""

    axes: dict[str, int | list[int]]
    options: dict[str, Option | list[Option]] = {}
    dtypes: list[str] | str = "bf16"
    passes: list[Pass] | Pass = "forward"

    @property
    def size(self) -> int:
        """How many cases it stands for."""
        values = (*self.axes.values(), *self.options.values(), self.dtypes, self.passes)
        return math.prod(len(_listed(x)) for x in values)


def grid(
    *passes: Pass,
    dtypes: list[str] | str = "bf16",
    options: dict[str, Option | list[Option]] | None = None,
    **axes: int | list[int],
) -> Grid:
    """A `Grid` in one line: `grid("forward", B=[4, 32], S=2048, D=4096)`."""
    return Grid(axes=axes, options=options or {}, dtypes=dtypes, passes=list(passes or ("forward",)))


def _no_tokens(case: Case) -> int | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A computation with its inputs, its reference and its cost.

    * `axes` and `options` say what each letter and option means; a case gives all axes, options have
      defaults (the first of the values listed).
    * `inputs(case, device, generator)` gives keyword arguments; every implementation gets the same.
    * `reference(**inputs)` computes in the precision of its inputs, which the harness has raised to fp64
      (fp32 for `fp32_reference`); differentiable when `gradients` are asked for.
    * `results(result, inputs)` turns an implementation's result into what the reference gives, for
      outputs that have more than one right form (a quantized tensor and its scales).
    * `bytes(case)`, `flops(case)`: the least a perfect implementation moves and computes, for the pass.
    * `gradients` names the inputs that the backward pass differentiates.
    * `in_place` names inputs that the forward pass may write its results to, as an optimizer's step does. What
      a call changed must be among its results (`results` can give the inputs themselves), and no other input
      may change. Inputs are laid anew before each checked call; timing repeats the call on what it left, which
      must stay finite.
    * An input is a tensor, a list of tensors, or anything else, which is passed on as it is.
    * `plans`: the cases by plan. `quick` (and `quick_cpu` in its place on a CPU) and `standard`; `full`
      is what comes on top of `standard`.
    * `yardsticks`: calls on the same inputs that give a scale and are not implementations.
    """

    name: str
    summary: str
    axes: Mapping[str, str]
    inputs: Callable[[Case, torch.device, torch.Generator], Inputs]
    reference: Callable[..., Result]
    bytes: Callable[[Case], int]
    flops: Callable[[Case], int]
    plans: Mapping[str, tuple[Grid, ...]]
    options: Mapping[str, tuple[Option, ...]] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")
    gradients: tuple[str, ...] = ()
    in_place: tuple[str, ...] = ()
    tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: TOLERANCES)
    results: Callable[[Any, Inputs], Result] | None = None
    tokens: Callable[[Case], int | None] = _no_tokens
    fp32_reference: bool = False
    yardsticks: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes this operator has."""
        return ("forward", "backward", "forward_backward") if self.gradients else ("forward",)

    def case(self, axes: Mapping[str, int], dtype: str, pass_: Pass, **options: Option) -> Case:
        """One case. Raises `InputError` naming the wrong axis, option, dtype or pass, and what exists."""
        for axis in axes:
            if axis not in self.axes:
                raise unknown(f"axis of {self.name}", axis, list(self.axes))
            if axes[axis] < 0:
                raise InputError(f"{self.name}: axis {axis} is {axes[axis]}; sizes are not negative.")
        missing = [axis for axis in self.axes if axis not in axes]
        if missing:
            raise InputError(f"{self.name}: axes {', '.join(missing)} are missing.")
        for option, value in options.items():
            if option not in self.options:
                raise unknown(f"option of {self.name}", option, list(self.options))
            if value not in self.options[option]:
                raise unknown(f"{option} of {self.name}", str(value), [str(x) for x in self.options[option]])
        if dtype not in self.dtypes:
            raise unknown(f"dtype of {self.name}", dtype, list(self.dtypes))
        if pass_ not in self.passes:
            raise unknown(f"pass of {self.name}", pass_, list(self.passes))
        chosen = {name: options.get(name, values[0]) for name, values in self.options.items()}
        ordered = {axis: axes[axis] for axis in self.axes}
        bare = Case(
            operator=self.name,
            name=_name(ordered, chosen, dtype, pass_),
            axes=ordered,
            options=chosen,
            dtype=dtype,
            pass_=pass_,
            spec=self.spec,
            bytes=0,
            flops=0,
        )
        return msgspec.structs.replace(
            bare, bytes=self.bytes(bare), flops=self.flops(bare), tokens=self.tokens(bare)
        )

    def expand(self, grid: Grid) -> tuple[Case, ...]:
        """The cases of a grid, first axis slowest."""
        axes = [(name, _listed(value)) for name, value in grid.axes.items()]
        options = [(name, _listed(value)) for name, value in grid.options.items()]
        return tuple(
            self.case(
                dict(zip([name for name, _ in axes], sizes, strict=True)),
                dtype,
                pass_,
                **dict(zip([name for name, _ in options], values, strict=True)),
            )
            for sizes in itertools.product(*(values for _, values in axes))
            for values in itertools.product(*(values for _, values in options))
            for dtype in _listed(grid.dtypes)
            for pass_ in _listed(grid.passes)
        )

    @property
    def spec(self) -> str:
        """A short hash of what the operator computes and accepts; comments and plans do not change it."""
        return _spec(Path(inspect.getfile(self.reference)), repr(sorted(self.tolerances.items())))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _name(axes: Mapping[str, int], options: Mapping[str, Option], dtype: str, pass_: str) -> str:
    parts = [f"{axis}{size}" for axis, size in axes.items()]
    for name, value in options.items():
        if isinstance(value, bool):
            parts += [name] if value else []
        else:
            parts.append(str(value) if isinstance(value, str) else f"{name}{value}")
    return "-".join([*parts, dtype, pass_])


_specs: dict[tuple[Path, str], str] = {}


def _spec(path: Path, tolerances: str) -> str:
    """Hash of the functions of an operator's file, docstrings and comments left out."""
    if (path, tolerances) not in _specs:
        digest = hashlib.sha256(tolerances.encode())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            if isinstance(node, ast.FunctionDef | ast.Lambda):
                digest.update(_tree(node).encode())
        _specs[path, tolerances] = digest.hexdigest()[:12]
    return _specs[path, tolerances]


def _tree(node: Any) -> str:
    """A syntax tree as text. Fields that are empty are left out, because Python versions differ in them: journals
    of a GPU machine are read, and gone on with, by other Pythons. (`ast.dump` does so from 3.13 on.)
    """
    if isinstance(node, ast.AST):
        fields = (f"{name}={_tree(value)}" for name, value in ast.iter_fields(node) if value not in (None, []))
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(_tree, node))}]"
    return repr(node)
