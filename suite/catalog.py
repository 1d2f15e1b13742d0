"""Discovery by folder: which operators and implementations exist, and which can run here.

A *root* is a folder with `operators/`, `workloads/`, `models/`, `kernels/` and `baselines/`. The program itself is
one; the path list `KERNELMARK_PATH` adds others, so that a private kernel needs no fork. Nothing is registered: a
file that is there counts, and its name is its name.

Listing imports the files of `operators/` and `baselines/`, which import no torch, and never a kernel.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from ..registry.errors import InputError, short, unknown
from ..registry.store import bounds
from ..registry.store.metric import Metric
from ..registry.store.record import DEVICES, PROVIDER, YARDSTICK, Case
from .definition import Definition
from .implementation import Factory, Implementation
from .model import Architecture, Model
from .operator import Operator
from .system import System, implementations
from .workload import Workload

TRITON = ("cuda", "rocm")
"""Where kernels in Triton run: AMD's GPUs answer to CUDA's names in torch."""
_ENVIRONMENT = re.compile(r"[A-Za-z0-9_-]{1,60}")
HARNESS_ROOMS = ("operators", "workloads", "models")
"""Rooms that are part of the harness: the same for every commit that is measured."""
ROOMS = (*HARNESS_ROOMS, "kernels", "baselines")


class NotImported(InputError):
    """A file that cannot be imported; it is named, whichever file of ours asked for it."""


@dataclass(frozen=True)
class Root:
    """A folder of operators, kernels and baselines. `package` is its name where it is installed.

    `code` is another commit's copy of the folder: kernels and baselines then come from there, while the
    operators, which are part of the harness, stay.
    """

    folder: Path
    package: str | None = None
    code: Path | None = None

    def home(self, room: str) -> Path:
        """The folder that a room lies in."""
        return self.folder if self.code is None or room in HARNESS_ROOMS else self.code

    def place(self, room: str) -> str:
        """A room's folder below its home."""
        return room

    def files(self, room: str) -> Mapping[str, Path]:
        """The Python files anywhere below a room by name, in alphabetical order; those of `cpu/` are a room of
        their own. A path with a leading underscore is private.

        Raises `InputError` for two files of one name.
        """
        folder = self.home(room) / self.place(room)
        found: dict[str, Path] = {}
        for path in sorted(folder.rglob("*.py"), key=lambda x: (x.stem, x)):
            inside = path.relative_to(folder)
            if any(part.startswith("_") for part in inside.parts) or (
                room == "kernels" and inside.parts[0] == "cpu"
            ):
                continue
            if path.stem in found:
                raise InputError(
                    f"{path}: {found[path.stem]} has that name already; names are unique below {room}/."
                )
            found[path.stem] = path
        return found

    def listed(self, room: str) -> Iterator[tuple[str, Path, ModuleType]]:
        """Imports the files of a room for listing: names, files, modules. Raises `InputError` if one cannot be."""
        for name, path in self.files(room).items():
            try:
                module = self._imported(room, path)
            except NotImported:  # a workload's file asks for models as it is imported
                raise
            except (Exception, SystemExit) as error:  # somebody's file may raise anything, a command's file exits
                raise NotImported(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
            yield name, path, module

    def module(self, room: str, name: str) -> ModuleType:
        """Imports one file of a room."""
        return self._imported(room, self.files(room)[name])

    def _imported(self, room: str, path: Path) -> ModuleType:
        home = self.home(room)
        package = _package(home) if self.package is None or home != self.folder else self.package
        return importlib.import_module(".".join([package, *path.relative_to(home).with_suffix("").parts]))


def _package(folder: Path) -> str:
    """A package of its own for a folder that is not installed, so that relative imports stay within it.

    Files that the installed program has and this folder lacks are not found: nothing of one commit can run
    under the name of another.
    """
    name = f"kernelmark_path_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        importlib.invalidate_caches()  # the folder may be younger than the import system's view of the disk
        sys.modules[name] = package
    return name


class _OwnRoot(Root):
    """The program's own root. Its rooms lie beside `suite/` in a checkout and in an installation alike, and those
    of the harness under `suite/`.
    """

    def place(self, room: str) -> str:
        return f"suite/{room}" if room in HARNESS_ROOMS else room


def _own() -> Root:
    return _OwnRoot(Path(__file__).resolve().parents[1], __package__.rpartition(".")[0])


@dataclass(frozen=True)
class Catalog:
    """All that exists in the roots given; the program's own comes first. `systems` are those that a plan names,
    beside the ones that need no file.
    """

    roots: tuple[Root, ...]
    systems: tuple[System, ...] = ()

    @classmethod
    def default(cls) -> Catalog:
        """The program's own root and those of `KERNELMARK_PATH`."""
        named = (Path(x) for x in os.environ.get("KERNELMARK_PATH", "").split(os.pathsep) if x)
        extra = {x.resolve(): x for x in named}  # once each: a shell may add the same one again
        for folder in extra.values():
            if not folder.is_dir():
                raise InputError(f"KERNELMARK_PATH names {folder}, which is not a folder.")
            # One that holds none of the rooms is fine, `kernelmark new` makes them; one that is a room is not.
            if folder.resolve().name in ROOMS and not any((folder / room).is_dir() for room in ROOMS):
                raise InputError(
                    f"KERNELMARK_PATH names {folder}, which is a room itself: name the folder that holds it."
                )
        return cls((_own(), *map(Root, extra)))

    @classmethod
    def of(cls, *folders: Path) -> Catalog:
        """Only the folders given, for the harness's tests of itself."""
        return cls(tuple(Root(folder) for folder in folders))

    @property
    def code(self) -> Mapping[str, str]:
        """Folders of other commits' kernels and baselines, by root's folder: what `with_code` was given."""
        return {str(x.folder): str(x.code) for x in self.roots if x.code is not None}

    def with_code(self, code: Mapping[str, str]) -> Catalog:
        """The same catalog with the kernels and baselines of other commits' folders, by root's folder.

        Raises `InputError` for a folder that is no root: its code would be taken for measured.
        """
        if apart := code.keys() - {str(x.folder) for x in self.roots}:
            raise InputError(f"no root is in {', '.join(sorted(apart))}.")
        changed = (replace(x, code=Path(code[str(x.folder)])) if str(x.folder) in code else x for x in self.roots)
        return replace(self, roots=tuple(changed))

    def with_systems(self, systems: Iterable[System]) -> Catalog:
        """The same catalog with these systems of a plan."""
        given = tuple(systems)
        if given == self.systems:
            return self
        found = replace(self, systems=given)
        found.__dict__.update({name: x for name, x in self.__dict__.items() if name in _OF_FILES})
        return found

    @cached_property
    def operators(self) -> Mapping[str, Operator]:
        """Operators by name. Raises `InputError` for two files of one name or a file without `OPERATOR`."""
        found: dict[str, Operator] = {}
        for root in self.roots:
            for name, path, module in root.listed("operators"):
                operator = getattr(module, "OPERATOR", None)
                if not isinstance(operator, Operator) or operator.name != name:
                    raise InputError(f"{path} must define OPERATOR, an Operator named {name!r}.")
                if name in found:
                    raise InputError(f"{path}: an operator named {name!r} exists already; name yours otherwise.")
                _recordable(operator, path)
                found[name] = operator
        return found

    @cached_property
    def workloads(self) -> Mapping[str, Workload]:
        """Workloads by name. Raises `InputError` for a name that is taken or a file without `WORKLOAD`."""
        found: dict[str, Workload] = {}
        for root in self.roots:
            for name, path, module in root.listed("workloads"):
                workload = getattr(module, "WORKLOAD", None)
                if not isinstance(workload, Workload) or workload.name != name:
                    raise InputError(f"{path} must define WORKLOAD, a Workload named {name!r}.")
                if name in found or name in self.operators:
                    raise InputError(f"{path}: an operator or a workload named {name!r} exists already.")
                _recordable(workload, path)
                found[name] = workload
        return found

    @cached_property
    def architectures(self) -> Mapping[str, Architecture]:
        """What `models/` holds by name, whether it can be run or not. Raises `InputError` for a name that is taken
        or a file without `MODEL`.
        """
        found: dict[str, Architecture] = {}
        names: dict[str, str] = {}
        for root in self.roots:
            for name, path, module in root.listed("models"):
                model = getattr(module, "MODEL", None)
                if not isinstance(model, Architecture) or model.name != name:
                    raise InputError(f"{path} must define MODEL, a Model or an Architecture named {name!r}.")
                if name in found:
                    raise InputError(f"{path}: a model named {name!r} exists already.")
                for configuration in model.configurations:
                    if names.setdefault(configuration, name) != name:
                        raise InputError(f"{path}: {names[configuration]} has a {configuration!r} already.")
                found[name] = model
        return found

    @cached_property
    def models(self) -> Mapping[str, Model]:
        """Those of `architectures` that can be run, by name."""
        return {name: x for name, x in self.architectures.items() if isinstance(x, Model)}

    @cached_property
    def definitions(self) -> Mapping[str, Definition]:
        """Operators and workloads by name."""
        return {**self.operators, **self.workloads}

    def own(self, name: str) -> bool:
        """Whether an operator or workload is one of the program's own, and not of a root that a user named."""
        return name in self._own_names

    @cached_property
    def _own_names(self) -> frozenset[str]:
        own = (x for x in self.roots if isinstance(x, _OwnRoot))
        return frozenset(name for x in own for room in ("operators", "workloads") for name in x.files(room))

    def own_file(self, folder: str, name: str) -> Any:
        """A file of one of the program's own folders, loaded."""
        return self.roots[0].module(folder, name)

    def operator(self, name: str) -> Operator:
        """The operator of that name."""
        if name not in self.operators:
            raise _unknown_operator(name, list(self.operators))
        return self.operators[name]

    def definition(self, name: str) -> Definition:
        """The operator or workload of that name."""
        if name not in self.definitions:
            raise _unknown_operator(name, list(self.definitions))
        return self.definitions[name]

    def metrics(self, cases: Iterable[Case]) -> tuple[Metric, ...]:
        """What measurements of these cases hold. Raises `InputError` where two mean different things by a name."""
        found: dict[str, Metric] = {}
        for name in dict.fromkeys(x.operator for x in cases):
            for metric in self.definition(name).metrics:
                if found.setdefault(metric.name, metric) != metric:
                    raise InputError(
                        f"{name}: its metric {metric.name!r} is another than that of an earlier case."
                    )
        return tuple(found.values())

    @cached_property
    def implementations(self) -> tuple[Implementation, ...]:
        """All implementations of operators and workloads: ours, then baselines in alphabetical order, then
        systems.

        Raises `InputError` where two have one name: a journal could not tell them apart.
        """
        assembled = (
            x
            for workload in self.workloads.values()
            if workload.assemble is not None
            for x in implementations(workload, self)
        )
        return _apart((*self.parts, *assembled))

    @cached_property
    def parts(self) -> tuple[Implementation, ...]:
        """Implementations that a file has, of which systems are made."""
        ours = [x for root in self.roots for x in self._ours(root)]
        theirs = [x for root in self.roots for file in root.listed("baselines") for x in self._theirs(root, *file)]
        return _apart(ours + theirs)

    def of_operator(self, operator: str) -> tuple[Implementation, ...]:
        """The implementations of one operator."""
        return tuple(x for x in self.implementations if x.operator == operator)

    def file(self, implementation: Implementation) -> tuple[Path, Path] | None:
        """An implementation's file and the folder that its room lies in; None where it has none of its own."""
        for root in self.roots:
            if root.folder == implementation.root:
                own = implementation.operator, "kernels/cpu" if implementation.name.endswith("_cpu") else "kernels"
                for name, room in (own, (implementation.provider, "baselines")):
                    if (room == "baselines") == (implementation.provider in root.files("baselines")):
                        path = root.files(room).get(name)
                        return None if path is None else (root.home(room), path)
        return None

    def _ours(self, root: Root) -> Iterator[Implementation]:
        kernels, cpu = set(root.files("kernels")), set(root.files("kernels/cpu"))
        for room in ("kernels", "kernels/cpu"):
            for name, path in root.files(room).items():
                self._refuse_a_slip(root, path, name, list(self.operators))
        before = {name for x in self.roots[: self.roots.index(root)] for name in x.files("kernels")}
        for name, operator in self.operators.items():
            # A kernel that another root has for an operator of ours stands beside ours, named by its root.
            provider = root.folder.name if name in before else PROVIDER
            forms = ("", *operator.forms) if provider == PROVIDER else ("",)
            for form in forms if name in kernels else ():
                yield _own_implementation(root, "kernels", name, provider, form, ("torch", "triton"), TRITON)
            for form in forms if name in cpu else ():
                yield _own_implementation(root, "kernels/cpu", name, provider, form, ("torch",), ("cpu",))
            if root is self.roots[0]:
                for yardstick, call in operator.yardsticks.items():
                    yield Implementation(name, yardstick, YARDSTICK, ("torch",), "core", DEVICES, _constant(call))

    def _refuse_a_slip(self, root: Root, path: Path, name: object, known: list[str]) -> None:
        """Raises `InputError` for a name in a user's file that is a known one but for a slip. Other names that
        nothing has are another root's, or a later version's: they wait for it.
        """
        if name in known or not isinstance(name, str) or root.code is not None or isinstance(root, _OwnRoot):
            return
        from difflib import get_close_matches  # most start-ups meet no such name

        near = get_close_matches(name, known, n=1, cutoff=0.8)
        if near and near[0] not in name and name not in near[0]:
            raise InputError(f"{path}: {_unknown_operator(name, known)}")

    def _theirs(self, root: Root, name: str, path: Path, module: ModuleType) -> Iterator[Implementation]:
        if not isinstance(getattr(module, "IMPLEMENTATIONS", None), dict):
            raise InputError(f"{path} must define IMPLEMENTATIONS, a dict.")
        requires = _names(getattr(module, "REQUIRES", ()), path, "REQUIRES")
        environment = getattr(module, "ENVIRONMENT", "core")
        if not isinstance(environment, str) or not _ENVIRONMENT.fullmatch(environment):
            raise InputError(f"{path}: ENVIRONMENT must be a name of letters, digits, - and _.")
        no_environment = str(getattr(module, "NO_ENVIRONMENT", ""))
        its = {y for x in module.IMPLEMENTATIONS.values() if isinstance(x, dict) for y in x}
        once, on_request = (_some(module, path, x, its) for x in ("ONCE", "ON_REQUEST"))
        apart = _some(module, path, "APART", module.IMPLEMENTATIONS)
        for operator, factories in module.IMPLEMENTATIONS.items():
            if not isinstance(factories, dict):
                raise InputError(f"{path}: IMPLEMENTATIONS[{operator!r}] must be a dict of factories.")
            self._refuse_a_slip(root, path, operator, list(self.definitions))
            if operator in self.definitions:
                for implementation, factory in factories.items():
                    if not isinstance(implementation, str) or not callable(factory):
                        raise InputError(f"{path}: IMPLEMENTATIONS[{operator!r}] must be a dict of factories.")
                    yield Implementation(
                        operator=operator,
                        name=implementation,
                        provider=name,
                        requires=requires,
                        environment=environment,
                        devices=_devices(getattr(module, "DEVICES", DEVICES), implementation, path),
                        load=lambda factory=factory: factory,  # type: ignore[misc]  # mypy cannot type the default
                        root=root.folder,
                        no_environment=no_environment,
                        once=implementation in once,
                        apart=operator in apart,
                        on_request=implementation in on_request,
                        install=str(getattr(module, "INSTALL", "")),
                    )


_OF_FILES = frozenset({"operators", "workloads", "architectures", "models", "definitions", "parts", "_own_names"})
"""What a catalog has found in its roots, whatever its systems are."""


def _unknown_operator(name: str, known: list[str]) -> InputError:
    """With what is left to be set where the name is one of a private root's."""
    error = unknown("operator", name, known)
    if os.environ.get("KERNELMARK_PATH"):
        return error
    return InputError(f"{error} KERNELMARK_PATH is not set: it names the folder of operators of your own.")


def _recordable(definition: Definition, path: Path) -> None:
    """Raises `InputError` for names that a journal may not hold: what is measured could not be read again."""
    try:
        bounds.checked_name(definition.name, "its name")
        for names, what in ((definition.axes, "an axis"), (definition.options, "an option")):
            for name in names:
                bounds.checked_identifier(name, what)
    except bounds.OutOfBounds as error:
        raise InputError(f"{path}: {error}.") from None


def _apart(all_: Iterable[Implementation]) -> tuple[Implementation, ...]:
    """Implementations, of which no two have one name, and none a name that a journal may not hold."""
    found: dict[tuple[str, str], Implementation] = {}
    for x in all_:
        try:
            bounds.checked_name(x.name, f"{x.operator}: an implementation of {short(x.provider)}")
            bounds.checked_name(x.provider, f"{x.operator}: a provider")
        except bounds.OutOfBounds as error:
            raise InputError(f"{error}.") from None
        other = found.setdefault((x.operator, x.name), x)
        if other is not x:
            raise InputError(
                f"{x.operator} has two implementations named {x.name!r}: of {other.provider} and of {x.provider}."
            )
    return tuple(found.values())


def _devices(given: object, implementation: str, path: Path) -> tuple[str, ...]:
    """A baseline file's `DEVICES` for one of its implementations."""
    return _names(given.get(implementation, DEVICES) if isinstance(given, Mapping) else given, path, "DEVICES")


def _names(given: object, path: Path, what: str) -> tuple[str, ...]:
    """A sequence of strings of a baseline file. Raises `InputError` for anything else."""
    if not isinstance(given, list | tuple) or not all(isinstance(x, str) for x in given):
        raise InputError(f"{path}: {what} must be a tuple of strings.")
    return tuple(given)


def _some(module: ModuleType, path: Path, what: str, known: Collection[str]) -> tuple[str, ...]:
    """Some of the names that a baseline file's IMPLEMENTATIONS have. Raises `InputError` for another."""
    names = _names(getattr(module, what, ()), path, what)
    for name in names:
        if name not in known:
            raise InputError(f"{path}: {what} names {name!r}, which IMPLEMENTATIONS has not.")
    return names


def _own_implementation(
    root: Root,
    room: str,
    operator: str,
    provider: str,
    form: str,
    requires: tuple[str, ...],
    devices: tuple[str, ...],
) -> Implementation:
    """A kernel of a root: the function of the operator's name in the file of that name, or of one of its forms."""

    def load() -> Factory:
        module = root.module(room, operator)
        if not form:
            if (call := getattr(module, operator, None)) is None:
                own = [x for x, y in vars(module).items() if getattr(y, "__module__", "") == module.__name__]
                has = f"; it has {', '.join(own)}" if own else ""
                raise AttributeError(f"its file defines no function {operator!r}{has}")
        elif (call := getattr(module, f"{operator}_{form}", None)) is None:  # a commit from before it had the form
            raise NotImplementedError(f"{operator} has no form {form!r} in this commit")
        return lambda case: call

    name = "_".join([provider, *([form] if form else []), *(["cpu"] if room == "kernels/cpu" else [])])
    return Implementation(operator, name, provider, requires, "core", devices, load, root.folder)


def _constant(call: Callable[..., Any]) -> Callable[[], Factory]:
    return lambda: lambda case: call
