"""`kernelmark list`: what exists, and for each whether it can run here."""

from __future__ import annotations

from typing import Any

import click

from ..catalog import Catalog, Implementation
from ..operator import Operator
from ..run.fingerprint import has_gpu


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="For machines; lists every case by name.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Judge for this device, not the one here.")
def command_list(as_json: bool, device: str | None) -> None:
    """What exists: operators, cases, implementations, and what is available here."""
    device = device or ("cuda" if has_gpu() else "cpu")
    catalog = Catalog.default()
    described = [_describe(x, catalog, device) for x in catalog.operators.values()]
    if as_json:
        import msgspec

        for operator in described:
            operator["cases"] = _cases(catalog.operators[operator["name"]])
        data = msgspec.json.encode({"device": device, "operators": described})
        click.echo(msgspec.json.format(data, indent=2).decode())
        return
    _table(described, device)


def _describe(operator: Operator, catalog: Catalog, device: str) -> dict[str, Any]:
    return {
        "name": operator.name,
        "summary": operator.summary,
        "axes": dict(operator.axes),
        "options": {name: list(values) for name, values in operator.options.items()},
        "dtypes": list(operator.dtypes),
        "passes": list(operator.passes),
        "standard_cases": sum(grid.size for grid in operator.plans.get("standard", ())),
        "implementations": [_availability(x, device) for x in catalog.of_operator(operator.name)],
    }


def _cases(operator: Operator) -> dict[str, list[str]]:
    """Names of all cases by plan; making them hashes the operator's file, which a table need not wait for."""
    return {
        plan: [case.name for grid in grids for case in operator.expand(grid)]
        for plan, grids in operator.plans.items()
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


def _table(described: list[dict[str, Any]], device: str) -> None:
    from rich.table import Table
    from rich.text import Text

    from ...registry.escape import console

    table = Table(title=f"Operators and implementations, on {device}", title_justify="left", box=None)
    table.add_column("operator", style="bold", no_wrap=True)
    table.add_column("cases", justify="right")
    table.add_column("available here", ratio=2)
    table.add_column("not here", ratio=2, style="dim")
    for operator in described:
        implementations = operator["implementations"]
        names = [x["name"] for x in implementations if x["available"]]
        absent = [f"{x['name']}: {x['reason']}" for x in implementations if not x["available"]]
        cases = operator["standard_cases"]
        table.add_row(operator["name"], str(cases), Text(", ".join(names)), Text("\n".join(absent)))
    terminal = console()
    terminal.print(table)
    terminal.print(Text("Cases are those of the standard plan; all by name: kernelmark list --json", style="dim"))
