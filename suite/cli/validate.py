"""`kernelmark validate`: six criteria for every row of ours, and one verdict."""

from __future__ import annotations

import sys

import click

from ...registry.store.home import Home
from ...registry.store.journal import Journal
from .names import run_argument

MARKS = {"pass": ("✓", "green"), "fail": ("✗", "red"), "unknown": ("?", "yellow")}
NAMED = {"gradients": "gradients of a training run"}
"""Criteria whose name may be taken for another thing: the backward pass of an operator is checked in any case."""
CODES = {"pass": 0, "fail": 1, "unknown": 3}


@click.command("validate")
@run_argument("run")
@click.option("--json", "as_json", is_flag=True, help="For machines: one object with `verdict` and `rows`.")
def command_validate(run: str, as_json: bool) -> None:
    """Six criteria for every row of ours: speedup, memory, error; of training to a loss also
    quality, stability, gradients. Only what the row's operator or workload measures is asked.

    RUN is a run's name, the beginning of one, `latest`, or a journal file. Exit codes: 0 all pass, 1 one fails,
    3 none fails and some were not measured.
    """
    sys.exit(shown(Home().load(run), as_json))


def shown(journal: Journal, as_json: bool = False) -> int:
    """Prints the ticks and gives the exit code."""
    from ...registry.detection.validation import validate, verdict

    found = validate(journal)
    whole = verdict(found)
    if as_json:
        import msgspec

        rows = [{**msgspec.to_builtins(x), "verdict": x.verdict} for x in found]
        data = msgspec.json.encode({"run": journal.header.run, "verdict": whole, "rows": rows})
        click.echo(msgspec.json.format(data, indent=2).decode())
        return CODES[whole]
    from ...registry.escape import plain
    from ...registry.figures import counted

    apart: dict[str, int] = {}
    for x in found:
        if x.status in ("unsupported", "unavailable"):
            apart[x.status] = apart.get(x.status, 0) + 1
            continue
        click.echo(f"{_mark(x.verdict)} {plain(x.row)}" + ("" if x.status == "ok" else f": {x.status}"))
        for criterion in x.asked if x.status == "ok" else ():
            click.echo(
                f"    {_mark(criterion.verdict)} {criterion.name}: {plain(criterion.seen)} ({criterion.bound})"
            )
        names = [NAMED.get(y.name, y.name) for y in x.criteria if y.verdict == "not asked"]
        if x.status == "ok" and names:
            click.echo(f"    – {', '.join(names)}: not measured of {plain(x.row.operator)}, and not asked")
    for status, count in apart.items():
        click.echo(f"{counted(count, 'row')} of ours {status} there, and not asked")
    if not found:
        click.echo(f"{whole}: run {journal.header.run} has no row of ours")
        return CODES[whole]
    counts = {name: sum(x.verdict == name for x in found if x.status not in apart) for name in MARKS}
    click.echo(f"{whole}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    return CODES[whole]


def _mark(verdict: str) -> str:
    sign, colour = MARKS[verdict]
    return click.style(sign, fg=colour)
