"""The plan: which cells are measured, how long, how often, and in what order. Pure.

A *cell* is one case by one implementation in one cache state; a replicate walks all cells once, in a
shuffled order of its own.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import TypeAlias

import msgspec

from ..registry.errors import InputError, short, unknown
from ..registry.store.record import (
    GPUS,
    Cache,
    Case,
    DeviceKind,
    Exchange,
    Header,
    Key,
    Measurement,
    Pass,
    Record,
    Request,
    Status,
)
from . import plan_file, worth
from .catalog import Catalog
from .implementation import Implementation
from .measure.stopping import Sampling, TimerName
from .model import Chosen, chosen
from .plan_file import Cases, PlanFile, Worths
from .system import System

FILES = Path(__file__).with_name("plans")
TIMED = ("30s", "5m", "30m")
"""Plans that end within the time that is their name, by leaving out what says least."""
LATEST: Mapping[str, str] = {"shapes": "shapes-2", "widths": "widths-2"}
"""Plans that are drawn by a rule and then frozen, under a number: the latest of each."""
BUILTIN = ("quick", "standard", "full", *TIMED, *sorted((*LATEST, *(x.stem for x in FILES.glob("*.toml")))))
"""The first are made of the operators' grids (`LEVELS`), the others are the files of those names in `plans/`."""


@dataclass(frozen=True)
class Cell:
    """One case by one implementation in one cache state."""

    case: Case
    implementation: Implementation
    cache: Cache
    lasts_s: float = 0.0
    """About what it takes whatever the device, as its definition says; no part of the row's name."""
    seeded: bool = False
    """Whether its replicates are seeds, as its definition says; no part of the row's name."""

    @property
    def identity(self) -> Key:
        """The row that its records belong to."""
        return Key(self.case.operator, self.case.name, self.implementation.name, self.cache)

    def record(
        self,
        replicate: int,
        position: int,
        status: Status,
        reason: str | None,
        measurement: Measurement | None = None,
        spent_s: dict[str, float] | None = None,
    ) -> Record:
        """How it ended in one replicate. Records are made here and nowhere else."""
        return Record(
            case=self.case,
            implementation=self.implementation.name,
            provider=self.implementation.provider,
            version=self.implementation.version,
            replicate=replicate,
            position=position,
            cache=self.cache,
            status=status,
            reason=reason,
            measurement=measurement,
            spent_s=spent_s or {},
        )


NOTHING = Request()

Only: TypeAlias = Mapping[str, tuple[str, ...]]
"""By operator/case, the implementations that the case is for; one that is not in it is for all."""


@dataclass(frozen=True)
class Plan:
    """What a run executes. `deadline_s` bounds one cell in one replicate, compilation included; `budget_s` the
    whole run, by leaving out cells before it starts.
    """

    name: str
    cases: tuple[Case, ...]
    replicates: int
    caches: tuple[Cache, ...]
    sampling: Sampling
    deadline_s: float
    only: Only = field(default_factory=dict)
    systems: tuple[System, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    budget_s: float | None = None
    models: Only = field(default_factory=dict)
    """By operator/case, the models whose call the case is."""
    calls: Mapping[str, float] = field(default_factory=dict)
    """By operator/case, how often a step of the captured program makes that call."""
    step_ms: float | None = None
    """How long a step of that program took."""
    peers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By operator, the implementations that its cases are to be held against."""
    seeds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of a shard: by operator/case its replicates, where other shards have the rest. What is not in it has all."""
    cut: str = ""
    """Of a shard: a hash of what all shards have, each of them."""

    @classmethod
    def of(cls, header: Header) -> Plan | None:
        """The plan of a run, from what its header says it was asked for; None where it does not say."""
        asked = header.request
        if not asked.cases or asked.deadline_s is None:
            return None
        return cls(
            name=header.plan,
            cases=asked.cases,
            replicates=header.replicates,
            caches=asked.caches,
            sampling=msgspec.convert(asked.sampling, Sampling),
            deadline_s=asked.deadline_s,
            only=asked.only,
            systems=msgspec.convert(asked.systems, tuple[System, ...]),
            exchanges=asked.exchanges,
            models=asked.models,
            calls=asked.calls,
            step_ms=asked.step_ms,
            peers=asked.peers,
            seeds=asked.seeds,
            cut=asked.cut,
        )

    def request(self, cells: Sequence[Cell], besides: Request = NOTHING) -> Request:
        """What asks for the same cells again, with what else a run is `besides`.

        Where one of them is measured on request, each case says whom it is for: being named for one case, it would
        be asked for in all others.
        """
        only = dict(self.only)
        if any(x.implementation.on_request for x in cells):
            names: dict[str, list[str]] = {}
            for x in cells:
                names.setdefault(x.case.full_name, []).append(x.implementation.name)
            only = {case: tuple(dict.fromkeys(some)) for case, some in names.items()}
        return msgspec.structs.replace(
            besides,
            cases=self.cases,
            implementations=tuple(sorted({x.implementation.name for x in cells})),
            caches=self.caches,
            sampling=msgspec.to_builtins(self.sampling),
            deadline_s=self.deadline_s,
            only=only,
            systems=tuple(msgspec.to_builtins(x) for x in self.systems),
            exchanges=self.exchanges,
            models=dict(self.models),
            calls=dict(self.calls),
            step_ms=self.step_ms,
            peers=dict(self.peers),
            seeds=dict(self.seeds),
            cut=self.cut if besides.shard is not None else "",
        )

    def numbers(self, case: Case) -> Sequence[int]:
        """The replicates that a case has here, counted from 0: all, but where shards have some of them each."""
        return self.seeds.get(case.full_name, range(self.replicates))

    @property
    def most(self) -> int:
        """The most replicates that any of its cases has here."""
        return max(len(self.numbers(x)) for x in self.cases)

    def chosen(self, case: Case) -> tuple[str, ...]:
        """The implementations that a case is for; empty where it is for all."""
        return self.only.get(case.full_name, ())

    def but(self, replicates: int | None, cache: str | None, timer: TimerName | None) -> Plan:
        """The same plan with other replicates, cache states (`cold`, `hot`, `both`) or timer; None keeps."""
        states: Mapping[str | None, tuple[Cache, ...]] = {
            None: self.caches,
            "cold": ("cold",),
            "hot": ("hot",),
            "both": ("cold", "hot"),
        }
        sampling = msgspec.structs.replace(self.sampling, timer=timer or self.sampling.timer)
        return replace(self, replicates=replicates or self.replicates, caches=states[cache], sampling=sampling)

    def at(
        self, axes: Mapping[str, Sequence[int]], dtypes: Sequence[str], passes: Sequence[Pass], catalog: Catalog
    ) -> Plan:
        """The same plan at these sizes, dtypes and passes in place of its own; what is not given stays. Numbers of
        GPUs replace none: a case takes as many as it is for, and stays if that is one of them.

        Operators that have not all of these axes, none of the dtypes or none of the passes are left out. Raises
        `InputError` if none is left.
        """
        if worlds := axes.get(GPUS):
            return self._on(worlds).at({k: x for k, x in axes.items() if k != GPUS}, dtypes, passes, catalog)
        if not axes and not dtypes and not passes:
            return self
        cases: dict[str, Case] = {}
        only: dict[str, tuple[str, ...]] = {}
        for case in self.cases:
            definition = catalog.definition(case.operator)
            if not axes.keys() <= definition.axes.keys():
                continue
            for sizes in product(*axes.values()):
                for dtype in [x for x in dtypes if x in definition.dtypes] if dtypes else [case.dtype]:
                    for pass_ in [x for x in passes if x in definition.passes] if passes else [case.pass_]:
                        at = case.axes | dict(zip(axes, sizes, strict=True))
                        made = definition.case(at, dtype, pass_, **case.options)
                        cases.setdefault(made.full_name, made)
                        if chosen := self.chosen(case):
                            only[made.full_name] = chosen
        if not cases:
            asked = [f"{x}={','.join(map(str, y))}" for x, y in axes.items()] + [*dtypes, *passes]
            raise InputError(
                f"no operator of plan {self.name!r} can be measured at {', '.join(asked)}; {self._sizes(catalog)}."
            )
        return replace(self, cases=tuple(cases.values()), only=only, models={}, calls={})

    def _on(self, worlds: Sequence[int]) -> Plan:
        """The same plan with its cases of so many GPUs alone."""
        cases = tuple(x for x in self.cases if x.world in worlds)
        if not cases:
            asked = ", ".join(map(str, worlds))
            there = ", ".join(map(str, sorted({x.world for x in self.cases})))
            raise InputError(f"plan {self.name!r} has no case of {asked} GPUs; it has cases of {there}.")
        names = {x.full_name for x in cases}
        return replace(self, cases=cases, only={k: x for k, x in self.only.items() if k in names})

    def _sizes(self, catalog: Catalog) -> str:
        """What its operator can be measured at, or, of several, what tells."""
        operator, *others = {x.operator for x in self.cases}
        if others:
            return "kernelmark list OPERATOR names axes, dtypes and passes"
        x = catalog.definition(operator)
        axes, dtypes, passes = (", ".join(names) for names in (x.axes, x.dtypes, x.passes))
        return f"{operator} has axes {axes}; dtypes {dtypes}; passes {passes}"

    def cells(self, catalog: Catalog, device: DeviceKind, implementations: Sequence[str] = ()) -> tuple[Cell, ...]:
        """All cells, `implementations` (names or providers) narrowing them; raises `InputError` if none match.

        Of systems of parts only those are asked for that the device runs, and what is exchanged for its worth.
        """
        catalog = catalog.with_systems(self.systems)
        operators = {x.operator for x in self.cases}
        _known(implementations, catalog, operators)
        exchanged = self._exchanged
        cells = tuple(
            Cell(case, implementation, cache, definition.lasts(case), definition.seeded)
            for case in self.cases
            for definition in (catalog.definition(case.operator),)
            for cache in self.caches
            for implementation in catalog.of_operator(case.operator)
            if (
                device in implementation.devices or implementation.name in exchanged
                if implementation.assembled
                else implementation.asked_on(device)
            )
            if not implementations or implementation.among(implementations)
            if self._wanted(case, implementation, implementations)
        )
        if not cells:
            there = {x.name for x in catalog.implementations if x.operator in operators and device in x.devices}
            why = "".join(
                f" {', '.join(names)}: {reason}."
                for reason, names in self.left_out(catalog, device, implementations).items()
            )
            raise InputError(
                f"plan {self.name!r} has nothing to measure with these filters: on {device} its operators have "
                f"{', '.join(sorted(there)) or 'no implementation'}.{why}"
            )
        return cells

    @property
    def _exchanged(self) -> set[str]:
        """Systems of parts that are measured for what an exchange is worth."""
        return {name for x in self.exchanges for name in (x.base, x.system)}

    def left_out(
        self, catalog: Catalog, device: DeviceKind, implementations: Sequence[str] = ()
    ) -> dict[str, tuple[str, ...]]:
        """Of what is asked for, systems of parts that a table names and the device does not run, by the reason."""
        named = {(case.operator, name) for case in self.cases for name in self.chosen(case)}
        found: dict[str, dict[str, None]] = {}
        for x in catalog.with_systems(self.systems).implementations:
            if not x.assembled or device in x.devices or x.name in self._exchanged:
                continue
            if (x.operator, x.name) in named and (not implementations or x.among(implementations)):
                _, reason = x.unavailable(device) or ("", "")
                found.setdefault(reason, {})[x.name] = None
        return {reason: tuple(names) for reason, names in found.items()}

    def _wanted(self, case: Case, implementation: Implementation, asked: Sequence[str]) -> bool:
        """Whether a case is for it; where it names none, what is measured on request has to be `asked` for."""
        if chosen := self.chosen(case):
            return implementation.name in chosen
        return not implementation.on_request or implementation.among(asked)


@dataclass(frozen=True)
class Level:
    """A plan that is made of the operators' grids of these names; the rest is as in `Plan`."""

    grids: tuple[str, ...]
    replicates: int
    sampling: Sampling
    deadline_s: float = 120.0
    budget_s: float | None = None


_SHORT = Sampling(min_samples=10, max_samples=200, min_seconds=0.02, max_seconds=0.25, warmup_s=0.2)
_USUAL = Sampling(min_samples=20, max_samples=500, min_seconds=0.04, max_seconds=0.4, warmup_s=0.2)
_LONG = Sampling(min_samples=30, max_samples=2000, min_seconds=0.1, max_seconds=2.0)
LEVELS: Mapping[str, Level] = {
    "quick": Level(("quick",), 3, _SHORT),
    "standard": Level(("standard",), 5, _USUAL),
    "full": Level(("standard", "full"), 5, _LONG, deadline_s=300.0),
    # Two processes are the fewest that give an interval, and their starts take half of that time.
    "30s": Level(("quick",), 2, _SHORT, budget_s=30.0),
    "5m": Level(("standard",), 3, _SHORT, budget_s=300.0),
    "30m": Level(("standard",), 5, _USUAL, budget_s=1800.0),
}
"""The plans that the operators' grids make."""


def _known(implementations: Sequence[str], catalog: Catalog, operators: Collection[str]) -> None:
    """Raises `InputError` for what is neither an implementation nor a provider, with those of the operators."""
    known = {name for x in catalog.implementations for name in (x.name, x.provider)}
    for name in implementations:
        if name not in known:
            here = (x for x in catalog.implementations if x.operator in operators)
            raise unknown("implementation", name, sorted({y for x in here for y in (x.name, x.provider)}))


def _with_cases_of(operators: Sequence[str], catalog: Catalog, device: DeviceKind) -> list[str]:
    """The built-in plans with cases of any of these operators."""
    found = []
    for name in BUILTIN if operators else ():
        with contextlib.suppress(InputError):  # a plan of operators that this catalog does not have
            if any(x.operator in operators for x in _builtin(name, catalog, device, named=True).cases):
                found.append(name)
    return found


def load(name: str, catalog: Catalog, device: DeviceKind, operators: Sequence[str] = ()) -> Plan:
    """A built-in plan or a plan file, narrowed to `operators`. Raises `InputError` for anything unknown."""
    for operator in operators:
        catalog.definition(operator)
    if name in BUILTIN:
        plan = _builtin(name, catalog, device, bool(operators))
    else:
        plan = _file(Path(name), catalog, device)
    cases = tuple(x for x in plan.cases if not operators or x.operator in operators)
    if not cases:
        of = f" of {', '.join(operators)}" if operators else ""
        others = _with_cases_of(operators, catalog, device)
        other = f" Plans that have some: {', '.join(others)}." if others else ""
        raise InputError(f"plan {name!r} has no cases{of} on {device}.{other}")
    kept = {x.full_name for x in cases}
    return replace(
        plan,
        cases=cases,
        only={key: names for key, names in plan.only.items() if key in kept},
        models={key: names for key, names in plan.models.items() if key in kept},
        calls={key: count for key, count in plan.calls.items() if key in kept},
        exchanges=tuple(x for x in plan.exchanges if {f"{x.program}/{x.step}", f"{x.operator}/{x.case}"} <= kept),
        peers={name: names for name, names in plan.peers.items() if any(x.operator == name for x in cases)},
    )


LIGHT = ("kernelmark", "kernelmark_cpu", "torch", "torch_compile")
"""What every process loads in no time once it has torch."""
MINUTE: Mapping[str, tuple[str, ...]] = {"rms_norm": LIGHT, "softmax": LIGHT, "train": ("torch",)}
"""What `quick` measures on a CPU where no operator is named, and by which implementations; nothing backward. With
more it would take minutes, most of them spent compiling and loading.
"""


def _builtin(name: str, catalog: Catalog, device: DeviceKind, named: bool) -> Plan:
    if name not in LEVELS:
        return _file(FILES / f"{LATEST.get(name, name)}.toml", catalog, device)
    level = LEVELS[name]
    grids = level.grids
    if device == "cpu" and (grids == ("quick",) or level.budget_s is not None):
        grids = ("quick_cpu",)  # a GPU's sizes would leave no time for a second case
    few = device == "cpu" and level.grids == ("quick",) and not named
    cases = [
        case
        for operator in catalog.definitions.values()
        if not few or operator.name in MINUTE or not catalog.own(operator.name)
        for x in grids
        for grid in operator.plans.get(x, ())
        for case in operator.expand(grid)
        if not few or case.pass_ != "backward" or not catalog.own(operator.name)
    ]
    only = {x.full_name: names for x in cases if few and (names := MINUTE.get(x.operator))}
    made = Plan(name, _once(cases), level.replicates, ("cold",), level.sampling, level.deadline_s, only)
    return replace(made, budget_s=level.budget_s)


def _file(path: Path, catalog: Catalog, device: DeviceKind) -> Plan:
    name = short(str(path))
    try:
        if not path.exists():
            if path.suffix != ".toml":
                raise unknown("plan", str(path), [*BUILTIN, "a .toml file"])
            raise InputError(f"no plan file at {name}.")
        with open(path, encoding="utf-8-sig") as file:  # editors on Windows put a mark before the first line
            text = file.read(plan_file.TEXT + 1)
    except (OSError, ValueError) as error:  # no UTF-8, a name that no file has
        raise InputError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return parse(text, path.stem, catalog, device)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def parse(text: str, name: str, catalog: Catalog, device: DeviceKind = "cuda") -> Plan:
    """A plan from the text of a plan file. What is exchanged for its worth is what the device can run."""
    file = plan_file.read(text)
    catalog = _with_systems(catalog, file.systems)
    cases = []
    named: dict[str, list[tuple[str, ...]]] = {}
    models: dict[str, tuple[str, ...]] = {}
    calls: dict[str, float] = {}
    for table in file.cases:
        names = _named(table, catalog)
        for grid in table.grids():
            for case in catalog.definition(table.operator).expand(grid):
                cases.append(case)
                named.setdefault(case.full_name, []).append(names)
                if table.models:
                    before = models.get(case.full_name, ())
                    models[case.full_name] = tuple(dict.fromkeys((*before, *table.models)))
                # What runs both passes at once takes the place of the forward pass alone.
                if table.calls and not (case.pass_ == "forward" and "forward_backward" in table.passes):
                    calls[case.full_name] = calls.get(case.full_name, 0.0) + table.calls
    if not cases and not file.worth:
        raise InputError("a plan needs at least one [[cases]] or [[worth]] table.")
    # Once each: a state that is listed twice would give a row two records of one replicate.
    caches: tuple[Cache, ...] = (file.cache,) if isinstance(file.cache, str) else tuple(dict.fromkeys(file.cache))
    # A case of several tables is for what any of them names, and for all if one names none.
    only = {key: tuple(dict.fromkeys(chain(*tables))) for key, tables in named.items() if all(tables)}
    limits = file.sampling, file.deadline_s
    made = Plan(name, _once(cases), file.replicates, caches, *limits, only, tuple(file.systems))
    made = replace(made, budget_s=file.budget_s, models=models, peers=_peers(file, catalog), calls=calls)
    made = replace(made, step_ms=file.program.step_ms if file.program is not None else None)
    for asked in file.worth:
        made = _exchanged(made, asked, catalog, device)
    return made


def _with_systems(catalog: Catalog, systems: Sequence[System]) -> Catalog:
    """The catalog with a file's systems. Raises `InputError` for one of a name that is taken, or of parts that do
    not exist.
    """
    if not systems:
        return catalog
    taken = {x.name: x for x in catalog.implementations if x.operator in catalog.workloads}
    for x in systems:
        if there := taken.get(x.name):
            raise InputError(
                f"there would be two implementations named {x.name!r}: of {there.provider}, which needs no table, "
                "and of [[systems]]; name yours otherwise."
            )
    found = catalog.with_systems(systems)
    _ = found.implementations
    return found


def of_worth(
    step: Case,
    base: System,
    catalog: Catalog,
    device: DeviceKind,
    parts: Sequence[str] = (),
    implementations: Sequence[str] = (),
    nulls: bool = False,
) -> Plan:
    """The plan of what the parts of one step are worth, by `worth.exchanged` of the same arguments."""
    found = worth.exchanged(step, base, catalog, device, parts, implementations, nulls)
    return Plan(
        name="worth",
        cases=found.cases,
        replicates=worth.REPLICATES,
        caches=("cold",),
        sampling=worth.SAMPLING,
        deadline_s=worth.DEADLINE_S,
        only=found.only,
        systems=found.systems,
        exchanges=found.exchanges,
    )


def _exchanged(plan: Plan, table: Worths, catalog: Catalog, device: DeviceKind) -> Plan:
    """The plan, and what parts of a model's step are worth."""
    options = {**table.options, "model": table.model}
    step = catalog.definition("train").case(table.axes, table.dtype, "program", **options)
    for name in table.bases:
        base = worth.base_named(name, catalog)
        one = worth.exchanged(step, base, catalog, device, table.parts, table.implementations, table.nulls)
        everything = {x.full_name for x in plan.cases} - plan.only.keys()
        both = {key: tuple(dict.fromkeys((*plan.only.get(key, ()), *names))) for key, names in one.only.items()}
        plan = replace(
            plan,
            cases=_once((*plan.cases, *one.cases)),
            only={**plan.only, **{key: names for key, names in both.items() if key not in everything}},
            systems=tuple({x.name: x for x in (*plan.systems, *one.systems)}.values()),
            exchanges=tuple(dict.fromkeys((*plan.exchanges, *one.exchanges))),
        )
    return plan


def _peers(file: PlanFile, catalog: Catalog) -> dict[str, tuple[str, ...]]:
    """Raises `InputError` for an operator without cases, or an implementation that it has not."""
    measured = sorted({x.operator for x in file.cases})
    for operator, names in file.peers.items():
        if operator not in measured:
            raise unknown("operator of [peers]", operator, measured)
        known = [x.name for x in catalog.of_operator(operator)]
        for name in names:
            if name not in known:
                raise unknown(f"peer of {operator}", name, known)
    return {operator: tuple(names) for operator, names in file.peers.items()}


def _named(table: Cases, catalog: Catalog) -> tuple[str, ...]:
    """The implementations that a table names; empty if it names none."""
    if not table.implementations and not table.without:
        return ()
    catalog.definition(table.operator)  # whose name may be wrong
    _known([*table.implementations, *table.without], catalog, (table.operator,))
    wanted = set(table.implementations)
    names = tuple(
        x.name
        for x in catalog.of_operator(table.operator)
        if (x.among(wanted) if wanted else not x.on_request)
        if not x.among(table.without)
    )
    if not names:
        there = ", ".join(x.name for x in catalog.of_operator(table.operator))
        raise InputError(f"{table.operator} has no implementation that this table names; it has {there}.")
    return names


def parameters(cases: Iterable[Case], catalog: Catalog) -> dict[str, int]:
    """By operator/case, the parameters of its model: of a slice those of its layers. Others are left out."""
    found = {}
    for case, of in _modelled(cases, catalog):
        if (part := str(case.options.get("slice", "whole"))).startswith("first"):
            of = of.first(int(part.removeprefix("first")))
        found[case.full_name] = of.model.parameters(of.configuration)
    return found


def layers(cases: Iterable[Case], catalog: Catalog) -> dict[str, int]:
    """By operator/case of a slice, how many layers its whole model has. Others are left out."""
    return {
        case.full_name: of.configuration.layers
        for case, of in _modelled(cases, catalog)
        if case.options.get("slice", "whole") != "whole"
    }


def _modelled(cases: Iterable[Case], catalog: Catalog) -> Iterator[tuple[Case, Chosen]]:
    """Those that are of a model of the catalog, with the whole of it."""
    for case in cases:
        name = str(case.options.get("model", ""))
        if any(name in x.configurations for x in catalog.models.values()):
            yield case, chosen(catalog.models, name)


def _once(cases: Iterable[Case]) -> tuple[Case, ...]:
    return tuple({(case.operator, case.name): case for case in cases}.values())


def order(cells: Sequence[Cell], seed: int, replicate: int) -> tuple[Cell, ...]:
    """The order of one replicate: cases shuffled, and within a case its implementations shuffled.

    The implementations of a case stay together: they share inputs and reference, and see the same state of
    the device, so that their ratio does not carry its drift. Between replicates every order is fresh.
    """
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.case.operator, cell.case.name), []).append(cell)
    generator = random.Random(f"{seed}/{replicate}")
    cases = list(groups.values())
    generator.shuffle(cases)
    for group in cases:
        generator.shuffle(group)
    return tuple(cell for group in cases for cell in group)
