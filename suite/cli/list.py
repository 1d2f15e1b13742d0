"""`kernelmark list`: what exists, and for each whether it can run here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from ...registry.views import units
from ...registry.views.table import Block, Column, Page, Table, line
from ..catalog import Catalog, Implementation
from ..definition import Definition
from ..run.fingerprint import has_gpu
from .formats import Form, emit, formats
from .names import operators


@click.command("list")
@click.argument("operator", required=False, shell_complete=operators)
@click.option("--plans", "what", flag_value="plans", help="The plans, with their cases and what they cost.")
@click.option("--cases", "what", flag_value="cases", help="Every case by name, of OPERATOR or of all.")
@click.option("--providers", "what", flag_value="providers", help="The libraries: version, environment, what for.")
@click.option("--models", "what", flag_value="models", help="The models with their configurations.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Judge for this device, not the one here.")
@formats
def command_list(operator: str | None, what: str | None, device: str | None, form: Form) -> None:
    """What exists: operators, cases, implementations, and what is available here.

    With OPERATOR (or a workload) all about it: sizes, options, cases by plan, and each implementation.
    """
    device = device or ("cuda" if has_gpu() else "cpu")
    catalog = Catalog.default()
    chosen = list(catalog.operators.values()) if operator is None else [catalog.definition(operator)]
    if what == "plans":
        plans = _plans(catalog, device)
        emit(form, lambda: [_plain_table("Plans", plans)], lambda: plans, lambda: plans)
    elif what == "cases":
        cases = [
            {"operator": x.name, "plan": plan, "case": name}
            for x in chosen
            for plan, names in _cases(x).items()
            for name in names
        ]
        emit(form, lambda: [_plain_table("Cases", cases)], lambda: cases, lambda: cases)
    elif what == "providers":
        providers = _providers(catalog, device)
        emit(form, lambda: [_plain_table("Providers", providers)], lambda: providers, lambda: providers)
    elif what == "models":
        models = _models(catalog)
        emit(form, lambda: [_plain_table("Models", models)], lambda: models, lambda: models)
    else:
        described = [_describe(x, catalog, device) for x in chosen]
        emit(
            form,
            lambda: _overview(described, device) if operator is None else _one(chosen[0], described[0], device),
            lambda: {"device": device, "operators": _with_cases(described, chosen)},
            lambda: [{"operator": x["name"], **y} for x in described for y in x["implementations"]],
        )


# --- what there is --------------------------------------------------------------------------------------


def _describe(definition: Definition, catalog: Catalog, device: str) -> dict[str, Any]:
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


def _with_cases(described: Iterable[dict[str, Any]], chosen: Sequence[Definition]) -> list[dict[str, Any]]:
    return [x | {"cases": _cases(y)} for x, y in zip(described, chosen, strict=True)]


def _cases(definition: Definition) -> dict[str, list[str]]:
    """Names of all cases by plan; making them hashes the operator's file, which a table need not wait for."""
    return {
        plan: [case.name for grid in grids for case in definition.expand(grid)]
        for plan, grids in definition.plans.items()
    }


def _availability(implementation: Implementation, device: str) -> dict[str, Any]:
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


def _plans(catalog: Catalog, device: str) -> list[dict[str, Any]]:
    from .. import plan as plans

    found = []
    for name in plans.BUILTIN:
        plan = plans.load(name, catalog, "cuda" if device == "cuda" else "cpu")
        found.append(
            {
                "plan": name,
                "cases": len(plan.cases),
                "operators": len({x.operator for x in plan.cases}),
                "replicates": plan.replicates,
                "cache": ", ".join(plan.caches),
                "budget": None if plan.budget_s is None else units.seconds(plan.budget_s),
            }
        )
    return found


def _providers(catalog: Catalog, device: str) -> list[dict[str, Any]]:
    found: dict[str, list[Implementation]] = {}
    for x in catalog.parts:
        found.setdefault(x.provider, []).append(x)
    out = []
    for provider, mine in found.items():
        missing = [x.unavailable(device) for x in mine]
        out.append(
            {
                "provider": provider,
                "version": mine[0].version,
                "environment": mine[0].environment,
                "operators": len({x.operator for x in mine}),
                "implementations": len(mine),
                "available": sum(x is None for x in missing),
                "reason": next((x[1] for x in missing if x is not None), None),
            }
        )
    return out


def _models(catalog: Catalog) -> list[dict[str, Any]]:
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


# --- as a page ------------------------------------------------------------------------------------------


_DROPS = {"implementations": 3, "operators": 2, "environment": 1}
"""What a narrow terminal does without, the highest first."""


def _plain_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Every field a column; numbers to the right, reasons fold."""
    first = rows[0] if rows else {}
    columns = [
        Column(x, isinstance(y, int), folds=20 if x in ("case", "reason") else 0, drop=_DROPS.get(x, 0))
        for x, y in first.items()
    ]
    table = Table(columns, title)
    for row in rows:
        table.add(*("–" if x is None else f"{x:,}" if isinstance(x, int) else str(x) for x in row.values()))
    return table


def _overview(described: Sequence[dict[str, Any]], device: str) -> Page:
    table = Table(
        (Column("operator"), Column("cases", number=True), Column("available here", folds=30)),
        f"Operators and implementations, on {device}",
    )
    for operator in described:
        names = [x["name"] for x in operator["implementations"] if x["available"]]
        table.add(operator["name"], str(operator["standard_cases"]), ", ".join(names) or "–")
    page: list[Block] = [table, *_absent(described)]
    page.append(
        line(
            "Cases are those of the standard plan. All of one operator: kernelmark list OPERATOR; more: --plans, "
            "--cases, --providers, --models.",
            style="dim",
        )
    )
    return page


def _absent(described: Iterable[dict[str, Any]]) -> Page:
    """What cannot run here: a line for each reason, with whom it concerns."""
    reasons: dict[str, dict[str, None]] = {}
    for operator in described:
        for x in operator["implementations"]:
            if not x["available"]:
                reasons.setdefault(x["reason"], {}).setdefault(x["name"])
    if not reasons:
        return []
    by_count = sorted(reasons.items(), key=lambda x: -len(x[1]))
    told = [line(f"  {reason}: {', '.join(names)}") for reason, names in by_count]
    return [line(""), line("Not here", style="bold"), *told, line("")]


def _one(definition: Definition, described: Mapping[str, Any], device: str) -> Page:
    options = [f"{x}: {', '.join(map(str, values))}" for x, values in definition.options.items()]
    facts = {
        "axes": ", ".join(f"{letter} {meaning}" for letter, meaning in definition.axes.items()),
        "options": "; ".join(options),
        "dtypes": ", ".join(definition.dtypes),
        "passes": ", ".join(definition.passes),
        "cases": ", ".join(
            f"{plan} {sum(grid.size for grid in grids)}" for plan, grids in definition.plans.items()
        ),
    }
    page: list[Block] = [line(f"{definition.name}: {definition.summary}", style="bold")]
    page += [line(f"  {name:8}{text}") for name, text in facts.items() if text]
    table = Table(
        (
            Column("implementation"),
            Column("provider"),
            Column("version", drop=1),
            Column("environment", drop=2),
            Column(f"on {device}", folds=20),
        )
    )
    for x in described["implementations"]:
        where = (x["provider"], x["version"] or "–", x["environment"], x["reason"] or "available")
        table.add(x["name"], *where, style="" if x["available"] else "dim")
    return [*page, line(""), table]
