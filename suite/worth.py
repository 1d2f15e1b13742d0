"""What plans on worth measure: one part of a base system exchanged at a time, and the same calls alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from ..registry.errors import InputError, unknown
from ..registry.store.record import EAGER, YARDSTICK, Case, DeviceKind, Exchange
from .catalog import Catalog
from .definition import Option
from .implementation import Implementation
from .measure.stopping import Sampling
from .model import Chosen, Part, Storage, chosen
from .system import OPTIMIZER, Assembly, System, builtin

COMPILED = "torch_compile"
"""The implementation that is PyTorch's own, compiled."""

DEADLINE_S = 600.0
REPLICATES = 5
SAMPLING = Sampling(min_samples=20, max_samples=60, min_seconds=0.05, max_seconds=8.0, warmup_s=2.0)
"""Of steps and of isolated calls; the least number of samples is what decides for steps."""


def base_named(name: str, catalog: Catalog) -> System:
    """A system that needs no file. Raises `InputError` for another."""
    known = {x.name: x for x in builtin(dict.fromkeys(x.provider for x in catalog.parts))}
    if name not in known:
        raise unknown("system", name, list(known))
    return known[name]


@dataclass(frozen=True)
class Exchanges:
    """What a plan has for it: the step and the isolated calls, and by case what it is for."""

    cases: tuple[Case, ...]
    only: Mapping[str, tuple[str, ...]]
    systems: tuple[System, ...]
    exchanges: tuple[Exchange, ...]


def exchanged(
    step: Case,
    base: System,
    catalog: Catalog,
    device: DeviceKind,
    parts: Sequence[str] = (),
    implementations: Sequence[str] = (),
    nulls: bool = False,
) -> Exchanges:
    """One part of a model's step exchanged at a time.

    `nulls` exchanges each part with itself too, of which nothing may come.

    `parts` narrows what is exchanged, by the part's or the operator's name; `implementations` by what is put in,
    by name or provider. Raises `InputError` where nothing is left.
    """
    model = chosen(catalog.models, str(step.options["model"]))
    if (part_of := str(step.options["slice"])) != "whole":
        model = model.first(int(part_of.removeprefix("first")))
    every = sites_of(model, step)
    sites = [x for x in every if not parts or {x.name, x.operator} & set(parts)]
    if not sites:
        known = sorted({y for x in every for y in (x.name, x.operator)})
        raise InputError(f"{model.name} has none of the parts {', '.join(parts)}. Known: {', '.join(known)}.")
    named = {y for x in catalog.implementations for y in (x.name, x.provider)}
    if absent := next((x for x in implementations if x not in named), None):
        here = {x.operator for x in sites}
        some = {y for x in catalog.implementations if x.operator in here for y in (x.name, x.provider)}
        raise InputError(f"nothing to exchange in {model.name}: {unknown('implementation', absent, sorted(some))}")
    assembly = Assembly(base, catalog)
    systems: list[System] = []
    exchanges: list[Exchange] = []
    cases: dict[str, Case] = {}
    only: dict[str, list[str]] = {step.full_name: [base.name]}
    for site in sites:
        if step.dtype not in catalog.operator(site.operator).dtypes:
            continue
        own = assembly.implementation(site.name, site.operator, device)
        # A graph captures PyTorch's own parts as they are: the compiler sees none of them.
        alone = own if base.execution in ("eager", "graph") else _compiled(site, own, catalog)
        case = isolated(site, step.dtype, catalog, model.model.storage)
        others = _candidates(site, {own.name, alone.name}, catalog, device, implementations)
        for x in (*([own] if nulls else ()), *others):
            refused = _apart(base, x, catalog)
            system = msgspec.structs.replace(
                base, name=f"{base.name}+{site.name}.{x.name}", parts={**base.parts, site.name: x.name}
            )
            put_in = alone if x is own else x
            key = case.full_name
            cases[key] = case
            only.setdefault(key, [alone.name]).append(put_in.name)
            if not refused:
                systems.append(system)
                only[step.full_name].append(system.name)
            exchanges.append(
                Exchange(
                    system=system.name,
                    base=base.name,
                    part=site.name,
                    program=step.operator,
                    step=step.name,
                    operator=case.operator,
                    case=case.name,
                    implementation=put_in.name,
                    instead=alone.name,
                    calls=site.calls,
                    refused=refused,
                )
            )
    if not exchanges:
        raise InputError(f"nothing to exchange in {model.name}: nobody else has what was asked for on {device}.")
    return Exchanges(
        cases=(step, *cases.values()),
        only={key: tuple(dict.fromkeys(names)) for key, names in only.items()},
        systems=tuple(systems),
        exchanges=tuple(exchanges),
    )


def sites_of(of: Chosen, step: Case) -> tuple[Part, ...]:
    """The parts of a model with the calls that a step makes of them, the optimizer among them, and those that only
    a system which names them has. Where Muon updates the matrices of layers, the optimizer is AdamW of all else.
    """
    own = of.model.parts(of.configuration, step.axes["B"], step.axes["S"])
    state, count = str(step.options["state"]), len(of.model.weights(of.configuration))
    if state.startswith("muon"):
        state = state.removeprefix("muon").removeprefix("_") or "plain"
        count -= len(of.model.hidden(of.configuration))
    sizes = {"T": count, "D": of.configuration.width}
    update = Part(OPTIMIZER, "adamw", sizes, 1, {"sizes": "llama", "state": state})
    own = (*own, *of.named(step.axes["B"], step.axes["S"]))
    return (*(replace(x, calls=x.calls * step.axes.get("A", 1)) for x in own), update)


def isolated(site: Part, dtype: str, catalog: Catalog, storage: Storage) -> Case:
    """A part's call alone: forward and backward together, inputs stored as the model stores them, where the
    operator can be asked for that.
    """
    operator = catalog.operator(site.operator)
    options: dict[str, Option] = dict(site.options)
    if storage in operator.options.get("storage", ()):
        options["storage"] = storage
    return operator.case(dict(site.axes), dtype, operator.passes[-1], **options)


def _compiled(site: Part, own: Implementation, catalog: Catalog) -> Implementation:
    """What a part of a compiled model is alone: PyTorch's own is compiled with the rest."""
    if own.name != EAGER:
        return own
    return next((x for x in catalog.of_operator(site.operator) if x.name == COMPILED), own)


def _candidates(
    site: Part, own: Collection[str], catalog: Catalog, device: str, wanted: Sequence[str]
) -> Iterator[Implementation]:
    """What can be put in for a part, or says in a row why it cannot: but what is for another device alone."""
    for x in catalog.of_operator(site.operator):
        if x.name in own or x.provider == YARDSTICK or x.name.endswith("_reference"):
            continue
        if not x.among(wanted) if wanted else x.on_request:
            continue
        if x.asked_on(device):
            yield x


def _apart(base: System, x: Implementation, catalog: Catalog) -> str:
    """Why a part cannot go into a base system at all: each needs an environment of its own. Empty where it can."""
    first = next(y for y in catalog.parts if y.provider == base.base)
    environments = sorted({first.environment, x.environment} - {"core"})
    if len(environments) < 2:
        return ""
    return f"its environment {x.environment!r} and {first.environment!r}, its base's, cannot be one"
