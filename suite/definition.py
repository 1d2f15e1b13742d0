"""What there is to measure: cases, and the definition that gives them, be it an operator or a workload.

A definition's file is read without torch; its functions import what they need.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import msgspec

from ..registry.errors import InputError, short, unknown
from ..registry.store import bounds
from ..registry.store.metric import Metric
from ..registry.store.record import GPUS, Case, Pass

Option: TypeAlias = bool | int | float | str


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


def no_exponentials(case: Case) -> int:
    """Of what computes none, or so few that they take no time."""
    return 0


def no_time(case: Case) -> float:
    """Of what is over as soon as it is computed."""
    return 0.0


def no_tokens(case: Case) -> int | None:
    """Of what has no tokens."""
    return None


@dataclass(frozen=True, kw_only=True)
class Definition:
    """What gives cases: names, sizes and choices, cost, and the metrics that its measurements hold.

    * `axes` and `options` say what each letter and option means; a case gives all axes, options have
      defaults (the first of the values listed).
    * `dtypes` are those that its cases may have: names of `DTYPES` in `operator.py`.
    * `later` gives axes and options that came after results were recorded, with the value they had until then: at
      that value they are left out of names and hashes, so that old rows stay comparable. Axes that are
      `asked_for` are not in the case either then.
    * `least`: the smallest sizes of axes that may not be 0, or not that small.
    * `bytes(case)`, `flops(case)`, `exponentials(case)`: the least a perfect implementation moves and computes.
    * `lasts(case)`: about the seconds that it takes whatever the device, as it follows a clock or waits for
      others: for estimates alone.
    * `tokens(case)`: how many tokens a call stands for, for a rate of them; None where it has none.
    * `primary(case)`: the name of the metric that the case is judged by, where it is not the first of all.
    * `seeded`: each replicate of a case is a seed of its own and is compared within itself, so that shards of a
      run may have some of them each.
    * `plans`: the cases by plan. `quick` (and `quick_cpu` in its place on a CPU) and `standard`; `full`
      is what comes on top of `standard`.
    * `continues` maps a definition's hash to the one that it had before an edit which changed nothing of what is
      computed (a new keyword with a default, say). An edit after that has a hash of its own again.
    """

    name: str
    summary: str
    axes: Mapping[str, str]
    bytes: Callable[[Case], int]
    flops: Callable[[Case], int]
    plans: Mapping[str, tuple[Grid, ...]]
    options: Mapping[str, tuple[Option, ...]] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")
    later: Mapping[str, Option] = field(default_factory=dict)
    asked_for: tuple[str, ...] = ()
    least: Mapping[str, int] = field(default_factory=dict)
    exponentials: Callable[[Case], int] = no_exponentials
    lasts: Callable[[Case], float] = no_time
    tokens: Callable[[Case], int | None] = no_tokens
    primary: Callable[[Case], str] | None = None
    seeded: bool = False
    continues: Mapping[str, str] = field(default_factory=dict)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that its cases have."""
        raise NotImplementedError

    @property
    def distributed(self) -> bool:
        """Whether its cases may take several GPUs, by the reserved axis `gpus`."""
        return False

    @property
    def several_gpus(self) -> bool:
        """Whether its cases may have that axis, be it that GPUs share the work or that each does all of it."""
        return self.distributed

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What is measured of its cases: first what they are judged by, where `primary` says nothing else."""
        raise NotImplementedError

    def computes(self, case: Case) -> tuple[object, ...]:
        """What decides a case's answer: functions, whose code counts, and values, whose text does."""
        raise NotImplementedError

    def case(self, axes: Mapping[str, int], dtype: str, pass_: Pass, **options: Option) -> Case:
        """One case. Raises `InputError` naming the wrong axis, option, dtype or pass, and what exists."""
        axes = dict(axes)
        world = axes.pop(GPUS, 1)
        if world != 1 and not (self.several_gpus and world > 0):
            allowed = "1 or more" if self.several_gpus else "1, as it does not run on several"
            raise InputError(f"{self.name}: {GPUS} is {world}; {allowed}.")
        for axis in axes:
            if axis not in self.axes:
                raise unknown(f"axis of {self.name}", axis, list(self.axes))
            if axes[axis] < 0:
                raise InputError(f"{self.name}: axis {axis} is {axes[axis]}; sizes are not negative.")
            if axes[axis] < self.least.get(axis, 0):
                raise InputError(f"{self.name}: axis {axis} is {axes[axis]}; it is at least {self.least[axis]}.")
        missing = [axis for axis in self.axes if axis not in axes and axis not in self.later]
        if missing:
            raise InputError(f"{self.name}: axes {', '.join(missing)} are missing; it has {', '.join(self.axes)}.")
        for option, value in options.items():
            if option not in self.options:
                raise unknown(f"option of {self.name}", option, list(self.options))
            if value not in self.options[option]:
                for x in self.options[option]:
                    if str(x) == value:
                        raise InputError(f"{self.name}: {option} is the text {value!r}; write {x} without quotes.")
                raise unknown(f"{option} of {self.name}", str(value), [str(x) for x in self.options[option]])
        if dtype not in self.dtypes:
            raise unknown(f"dtype of {self.name}", dtype, list(self.dtypes))
        if pass_ not in self.passes:
            raise unknown(f"pass of {self.name}", pass_, list(self.passes))
        chosen = {name: options.get(name, values[0]) for name, values in self.options.items()}
        ordered = {axis: axes[axis] if axis in axes else int(self.later[axis]) for axis in self.axes}
        plain = [axis for axis in self.asked_for if ordered[axis] == self.later[axis]]
        ordered = {axis: size for axis, size in ordered.items() if axis not in plain}
        ordered |= {GPUS: world} if world > 1 else {}
        bare = Case(
            operator=self.name,
            name=self._name(ordered, chosen, dtype, pass_),
            axes=ordered,
            options=chosen,
            dtype=dtype,
            pass_=pass_,
            spec="",
            bytes=0,
            flops=0,
            primary=self.metrics[0].name,
        )
        self._checked(bare)
        if self.primary is not None:
            primary, known = self._given("primary", self.primary, bare), [x.name for x in self.metrics]
            if primary not in known:
                raise unknown(f"metric of {self.name}", str(primary), known)
            bare = msgspec.structs.replace(bare, primary=primary)
        tokens = self._given("tokens", self.tokens, bare)
        return msgspec.structs.replace(
            bare,
            spec=self.spec(bare),
            bytes=self._count("bytes", self._given("bytes", self.bytes, bare), bare),
            flops=self._count("flops", self._given("flops", self.flops, bare), bare),
            exponentials=self._count("exponentials", self._given("exponentials", self.exponentials, bare), bare),
            tokens=None if tokens is None else self._count("tokens", tokens, bare),
        )

    def _checked(self, case: Case) -> None:
        """Raises `InputError` for a case that no journal may hold: it would be measured and never read again."""
        try:
            bounds.checked_case(case)
        except bounds.OutOfBounds as error:
            raise InputError(f"{self.name}: {error}.") from None

    def _given(self, what: str, function: Callable[[Case], object], case: Case) -> object:
        """What a function of the definition's file gives. Raises `InputError` where it raises anything: the file
        may be a user's, and its fault is none of ours.
        """
        try:
            return function(case)
        except InputError:
            raise
        except Exception as error:
            said = short(f"{type(error).__name__}: {error}")
            raise InputError(
                f"{self.name}: its function for {what} failed for {short(case.name)}: {said}."
            ) from error

    def _count(self, what: str, given: object, case: Case) -> int:
        """What a function of the definition's file counts, which may give anything."""
        if isinstance(given, float) and given.is_integer():
            given = int(given)
        if not isinstance(given, int) or not 0 <= given <= bounds.LARGEST:
            raise InputError(
                f"{self.name}: {what} of {short(case.name)} is {short(repr(given))}; its function gives a whole "
                f"number, 0 to {bounds.LARGEST:g}."
            )
        return given

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

    def spec(self, case: Case) -> str:
        """A short hash of what a case computes, and of the metric that it is judged by where it is not the first:
        judged by another it is another case. Comments, plans and what the case does not use do not count.
        """
        found = _hash("".join(map(_said, self.computes(case))))
        found = self.continues.get(found, found)
        return found if case.primary == self.metrics[0].name else _hash(f"{found}/{case.primary}")

    def _name(self, axes: Mapping[str, int], options: Mapping[str, Option], dtype: str, pass_: Pass) -> str:
        parts = [f"{axis}{size}" for axis, size in axes.items() if self.later.get(axis) != size]
        for name, value in options.items():
            if name in self.later and self.later[name] == value:
                continue
            if isinstance(value, bool):
                parts += [name] if value else []
            else:
                parts.append(str(value) if isinstance(value, str) else f"{name}{value}")
        return "-".join([*parts, dtype, *([] if pass_ == "program" else [pass_])])


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _said(x: object) -> str:
    if isinstance(x, partial):
        return "".join(map(_said, (x.func, *x.args, *x.keywords.items())))
    return code(x) if isinstance(x, FunctionType) else repr(x)


@cache
def code(function: FunctionType) -> str:
    """What a function computes, as text: its own code, and that of the functions and constants of definitions'
    files that it uses. Docstrings and comments do not count.
    """
    seen: dict[FunctionType, str] = {}
    _collect(function, seen)
    return "\n".join(seen.values())


def _collect(function: FunctionType, seen: dict[FunctionType, str]) -> None:
    if function in seen:
        return
    seen[function] = _text(function)
    for name in sorted(set(_names(function.__code__))):
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType):
            if value.__module__ == function.__module__ or _ROOMS & set(value.__module__.split(".")):
                _collect(value, seen)
        elif _plain(value):
            seen[function] += f"\n{name}={value!r}"


_ROOMS = {"operators", "workloads", "models"}
"""Packages of definitions' files: what they share counts as theirs."""


def _plain(value: object) -> bool:
    """Whether a value's text says all of it."""
    if isinstance(value, Mapping):
        return all(map(_plain, (*value.keys(), *value.values())))
    if isinstance(value, tuple | list | frozenset):
        return all(map(_plain, value))
    return isinstance(value, bool | int | float | str)


def _names(compiled: CodeType) -> Iterator[str]:
    """Names that code looks up outside of itself, nested functions included."""
    yield from compiled.co_names
    for constant in compiled.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _text(function: FunctionType) -> str:
    """A function's syntax tree as text."""
    path = Path(inspect.getfile(function))
    at = _lambdas if function.__code__.co_name == "<lambda>" else _functions
    return "".join(map(_tree, at(path).get(function.__code__.co_firstlineno, ())))


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())  # its encoding is what its first bytes say, as for an import


@cache
def _functions(path: Path) -> Mapping[int, list[ast.FunctionDef]]:
    """The functions of a file by the line that their code begins at, without docstrings. Only statements are
    looked through: expressions are most of a file.
    """
    found: dict[int, list[ast.FunctionDef]] = {}
    left: list[ast.AST] = [_parsed(path)]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            line = min([node.lineno, *(x.lineno for x in node.decorator_list)])
            found.setdefault(line, []).append(node)
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, part, ())
    return found


@cache
def _lambdas(path: Path) -> Mapping[int, list[ast.Lambda]]:
    found: dict[int, list[ast.Lambda]] = {}
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Lambda):
            found.setdefault(node.lineno, []).append(node)
    return found


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
