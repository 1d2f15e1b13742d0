"""A plan file: what its tables are, and what is said of one that is wrong. Pure, and without a catalog: which
operators and implementations there are is asked in `plan`.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

import msgspec

from ..registry.errors import InputError, short
from ..registry.store.bounds import DEADLINE_S, LARGEST, REPLICATES
from ..registry.store.record import Cache, Pass
from .definition import Grid, Option
from .measure.stopping import Sampling
from .system import Changes, System

TEXT = 4 << 20
"""Characters of a plan file."""
CASES = 20_000
"""Of a plan. They stand in a journal's first line, which is not read again where it is longer than 16 MiB."""


class Drawn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes drawn at random, the same by the same seed: `count` sets of one size of each axis.

    `axes` are [smallest, largest] or [smallest, largest, multiple]. Sizes are uniform in their logarithm,
    rounded down to the multiple.
    """

    count: int
    seed: int
    axes: dict[str, list[int]]

    def __post_init__(self) -> None:
        if not 0 < self.count <= 1000:
            raise ValueError(f"count is {self.count}; 1 to 1000")
        for axis, bounds in self.axes.items():
            multiple = bounds[2] if len(bounds) == 3 else 1
            if len(bounds) not in (2, 3) or not 0 < multiple <= bounds[0] <= bounds[1] <= LARGEST:
                raise ValueError(f"axis {axis} is {bounds}; [smallest, largest] or [smallest, largest, multiple]")

    def sizes(self) -> list[dict[str, int]]:
        """The sets. Only `random()` is asked, whose numbers Python promises to keep."""
        generator = random.Random(self.seed)

        def one(smallest: int, largest: int, multiple: int = 1) -> int:
            size = int(smallest * (largest / smallest) ** generator.random())
            return max(size // multiple, 1) * multiple

        return [{axis: one(*bounds) for axis, bounds in self.axes.items()} for _ in range(self.count)]


class Cases(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"dtypes": "dtype", "passes": "pass"}):
    """A `[[cases]]` table of a plan file: an operator and a grid over its axes and options, for each set of sizes
    that is `random` if there is one.

    `implementations` are the names or providers that these cases are for, without it all but those that are
    measured on request; less those of `without`.
    `models` are those whose calls these cases are; `calls` says how many a step of a captured program makes.
    """

    operator: str
    axes: dict[str, int | list[int]] = {}
    random: Drawn | None = None
    options: dict[str, Option | list[Option]] = {}
    dtypes: list[str] | str = "bf16"
    passes: list[Pass] | Pass = "forward"
    implementations: list[str] = []
    without: list[str] = []
    models: list[str] = []
    calls: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.calls < 1e9:
            raise ValueError(f"calls is {self.calls:g}; how often a step makes the call")
        lists: dict[str, object] = {f"axis {axis}": x for axis, x in self.axes.items()}
        lists |= {f"option {option}": x for option, x in self.options.items()}
        for name, x in {**lists, "dtype": self.dtypes, "pass": self.passes}.items():
            if x == []:
                raise ValueError(f"{name} is an empty list, which leaves no case; list a value or more")

    def grids(self) -> list[Grid]:
        """The grid part: one, or one for each set of sizes drawn."""
        sets = [{}] if self.random is None else self.random.sizes()
        return [Grid({**self.axes, **sizes}, self.options, self.dtypes, self.passes) for sizes in sets]


class Worths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `[[worth]]` table of a plan file: a model's step by each of the `bases`, systems that need no file, with
    one part exchanged at a time, and the same calls alone.

    `parts` and `implementations` narrow what is exchanged and what is put in; `nulls` exchanges each part with
    itself too.
    """

    model: str
    axes: dict[str, int]
    options: dict[str, Option] = {}
    dtype: str = "bf16"
    bases: tuple[str, ...] = ("torch_compile_blocks",)
    parts: list[str] = []
    implementations: list[str] = []
    nulls: bool = False

    def __post_init__(self) -> None:
        if not self.bases:
            raise ValueError("bases is an empty list, which leaves no step; list a system or more")


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `[program]` table of a captured plan: how long a step took, of which cases have the `calls`."""

    step_ms: float

    def __post_init__(self) -> None:
        if not 0 < self.step_ms < 1e9:
            raise ValueError(f"step_ms is {self.step_ms:g}; above 0")


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan as a TOML file gives it; everything but its cases, or what they are worth, has a default. `peers` are
    by operator the implementations without which nothing is said of it as a whole.
    """

    cases: list[Cases] = []
    worth: list[Worths] = []
    systems: list[System] = []
    peers: dict[str, list[str]] = {}
    program: Program | None = None
    replicates: int = 5
    cache: list[Cache] | Cache = "cold"
    deadline_s: float = 120.0
    budget_s: float | None = None
    sampling: Sampling = Sampling()


def read(text: str) -> PlanFile:
    """The tables of a plan file. Raises `InputError` for a text that is none, or whose numbers mean nothing."""
    try:
        if len(text) > TEXT:
            raise ValueError(f"more than {TEXT >> 20} MiB")
        file = msgspec.convert(tomllib.loads(text), PlanFile)
    except msgspec.ValidationError as error:
        raise InputError(f"not a valid plan: {_explained(str(error)[:1000])}") from None
    except (ValueError, RecursionError) as error:  # TOML's errors are ValueErrors
        said = "nested too deep" if isinstance(error, RecursionError) else str(error)[:1000]
        raise InputError(f"not a valid plan: {said}") from None
    if not 1 <= file.replicates <= REPLICATES:
        raise InputError(f"replicates is {file.replicates}; at least 1, at most {REPLICATES}.")
    if not 0 < file.deadline_s <= DEADLINE_S:
        raise InputError(f"deadline_s is {file.deadline_s:g}; above 0, at most {DEADLINE_S:.0f}.")
    if file.budget_s is not None and not file.budget_s > 0:
        raise InputError(f"budget_s is {file.budget_s:g}; above 0.")
    if (count := sum(x.size for table in file.cases for x in table.grids())) > CASES:
        raise InputError(f"its [[cases]] make {count:,} cases; at most {CASES:,}. List fewer values.")
    names = [x.name for x in file.systems]
    if twice := next((x for x in names if names.count(x) > 1), None):
        raise InputError(f"two [[systems]] are named {short(twice)!r}; name one of them otherwise.")
    if not file.cache:
        raise InputError("cache is empty; cold, hot or both.")
    return file


TABLES: Mapping[str, tuple[str, type[msgspec.Struct]]] = {
    "": ("a plan", PlanFile),
    "cases": ("[[cases]]", Cases),
    "cases.random": ("random", Drawn),
    "worth": ("[[worth]]", Worths),
    "systems": ("[[systems]]", System),
    "systems.changes": ("changes", Changes),
    "program": ("[program]", Program),
    "sampling": ("[sampling]", Sampling),
}
"""By where an error says it is: what the table is called, and what it is."""


def _explained(said: str) -> str:
    """What msgspec says of a file, and what exists where it found a name, or a value of few, that does not."""
    place = re.search(r" - at `\$\.?([^`]*)`$", said)
    at = re.sub(r"\[.*?\]", "", place[1]) if place else ""
    if wrong := re.match(r"Object (?:contains unknown|missing required) field `(.*?)`", said):
        table, kind = TABLES.get(at, TABLES[""])
        names = [x.encode_name for x in msgspec.structs.fields(kind)]
        near = get_close_matches(wrong[1], names, n=1) if "unknown" in wrong[0] else []
        hint = f" Did you mean `{near[0]}`?" if near else ""
        return f"{said}.{hint} {table[0].upper()}{table[1:]} takes {', '.join(names)}."
    if said.startswith("Invalid enum value"):
        above, _, field = at.rpartition(".")
        fields = msgspec.structs.fields(TABLES.get(above, TABLES[""])[1])
        values = [y for x in fields if x.encode_name == field for y in _values(x.type)]
        return f"{said}. Known: {', '.join(dict.fromkeys(values))}." if values else f"{said}."
    return f"{said}."


def _values(kind: Any) -> list[str]:
    """The words that a field's type names."""
    if get_origin(kind) is Literal:
        return [str(x) for x in get_args(kind) if x]
    return [y for x in get_args(kind) for y in _values(x)]
