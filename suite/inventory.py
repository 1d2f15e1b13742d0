"""What exists, as plain facts: operators with their cases, plans, providers and models, and what can run where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from ..registry.store.record import DeviceKind
from .catalog import Catalog
from .definition import Definition
from .implementation import Implementation

Facts: TypeAlias = dict[str, Any]
"""Of one thing, by name, as JSON knows them."""


def described(definition: Definition, catalog: Catalog, device: DeviceKind) -> Facts:
    """An operator or workload, and who implements it."""
    return {
        "name": definition.name,
        "summary": definition.summary,
        "axes": dict(definition.axes),
        "options": {name: list(values) for name, values in definition.options.items()},
        "dtypes": list(definition.dtypes),
        "passes": list(definition.passes),
        "standard_cases": sum(grid.size for grid in definition.plans.get("standard", ())),
        "implementations": [_availability(x, device) for x in catalog.of_operator(definition.name)],
    }


def cases(definition: Definition) -> dict[str, list[str]]:
    """Names of all cases by plan; making them hashes the operator's file, which a table need not wait for."""
    return {
        plan: [case.name for grid in grids for case in definition.expand(grid)]
        for plan, grids in definition.plans.items()
    }


def all_cases(definitions: Sequence[Definition]) -> list[Facts]:
    """Every case by name, with its operator and plan."""
    return [
        {"operator": x.name, "plan": plan, "case": name}
        for x in definitions
        for plan, names in cases(x).items()
        for name in names
    ]


def absent(operators: Sequence[Facts]) -> dict[str, list[str]]:
    """Why something cannot run, the reason of most first, and whom it concerns; of what `described` says."""
    reasons: dict[str, dict[str, None]] = {}
    for operator in operators:
        for x in operator["implementations"]:
            if not x["available"]:
                reasons.setdefault(x["reason"], {}).setdefault(x["name"])
    return {reason: list(names) for reason, names in sorted(reasons.items(), key=lambda x: -len(x[1]))}


def builtin_plans(catalog: Catalog, device: DeviceKind) -> list[Facts]:
    """The plans that come with the suite, a budget in seconds."""
    from . import plan as plans  # here: a list of operators need not wait for it

    found = []
    for name in plans.BUILTIN:
        plan = plans.load(name, catalog, device)
        found.append(
            {
                "plan": name,
                "cases": len(plan.cases),
                "operators": len({x.operator for x in plan.cases}),
                "replicates": plan.replicates,
                "cache": ", ".join(plan.caches),
                "budget": plan.budget_s,
            }
        )
    return found


def providers(catalog: Catalog, device: DeviceKind) -> list[Facts]:
    """The libraries, and how many of their implementations can run on the device."""
    found: dict[str, list[Implementation]] = {}
    for x in catalog.parts:
        found.setdefault(x.provider, []).append(x)
    return [_provider(name, mine, device) for name, mine in found.items()]


def models(catalog: Catalog) -> list[Facts]:
    """The models with their configurations."""
    return [
        {
            "model": model.name,
            "configuration": name,
            "layers": configuration.layers,
            "width": configuration.width,
            "vocabulary": configuration.vocabulary,
        }
        for model in catalog.models.values()
        for name, configuration in model.configurations.items()
    ]


def _availability(implementation: Implementation, device: DeviceKind) -> Facts:
    missing = implementation.unavailable(device)
    return {
        "name": implementation.name,
        "provider": implementation.provider,
        "version": implementation.version,
        "environment": implementation.environment,
        "available": missing is None,
        "status": missing[0] if missing else "ok",
        "reason": missing[1] if missing else None,
    }


def _provider(name: str, mine: Sequence[Implementation], device: DeviceKind) -> Facts:
    missing = [x.unavailable(device) for x in mine]
    return {
        "provider": name,
        "version": mine[0].version,
        "environment": mine[0].environment,
        "operators": len({x.operator for x in mine}),
        "implementations": len(mine),
        "available": sum(x is None for x in missing),
        "reason": next((x[1] for x in missing if x is not None), None),
    }
