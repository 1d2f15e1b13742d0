"""`kernelmark list`: what exists, and for each whether it can run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from ...registry.figures import seconds
from ...registry.store.record import DEVICES, DeviceKind
from ...registry.views.table import Block, Column, Page, Table, line
from .. import inventory
from ..catalog import Catalog
from ..definition import Definition
from ..inventory import Facts
from ..run.fingerprint import devices_here
from .formats import Form, emit, formats
from .names import operators


@click.command("list")
@click.argument("operator", required=False, shell_complete=operators)
@click.option("--plans", "what", flag_value="plans", help="The plans, with their cases and what they cost.")
@click.option("--cases", "what", flag_value="cases", help="Every case by name, of OPERATOR or of all.")
@click.option("--providers", "what", flag_value="providers", help="The libraries: version, environment, what for.")
@click.option("--models", "what", flag_value="models", help="The models with their configurations.")
@click.option("--device", type=click.Choice(DEVICES), help="Judge for this device, not the one here.")
@formats
def command_list(operator: str | None, what: str | None, device: DeviceKind | None, form: Form) -> None:
    """What exists: operators, cases, implementations, and what is available here.

    With OPERATOR (or a workload) all about it: sizes, options, cases by plan, and each implementation.
    """
    device = device or devices_here()[0]
    catalog = Catalog.default()
    chosen = list(catalog.operators.values()) if operator is None else [catalog.definition(operator)]
    if what == "plans":
        plans = inventory.builtin_plans(catalog, device)
        _listed("Plans", [x | {"budget": x["budget"] and seconds(x["budget"])} for x in plans], form)
    elif what == "cases":
        _listed("Cases", inventory.all_cases(chosen), form)
    elif what == "providers":
        _listed("Providers", inventory.providers(catalog, device), form)
    elif what == "models":
        _listed("Models", inventory.models(catalog), form)
    else:
        described = [inventory.described(x, catalog, device) for x in chosen]
        emit(
            form,
            lambda: _overview(described, device) if operator is None else _one(chosen[0], described[0], device),
            lambda: {
                "device": device,
                "operators": [x | {"cases": inventory.cases(y)} for x, y in zip(described, chosen, strict=True)],
            },
            lambda: [{"operator": x["name"], **y} for x in described for y in x["implementations"]],
        )


def _listed(title: str, facts: Sequence[Facts], form: Form) -> None:
    emit(form, lambda: [_plain_table(title, facts)], lambda: facts, lambda: facts)


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


def _absent(described: Sequence[Facts]) -> Page:
    """What cannot run here: a line for each reason, with whom it concerns."""
    reasons = inventory.absent(described)
    if not reasons:
        return []
    told = [line(f"  {reason}: {', '.join(names)}") for reason, names in reasons.items()]
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
