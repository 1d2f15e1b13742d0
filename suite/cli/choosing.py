"""The options of the commands that measure, each in one place: what is measured, how, and as which run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

from ...registry.errors import InputError
from ...registry.store.record import Pass, Status
from ..choice import Choice
from ..plan import BUILTIN
from . import names
from .values import AxisSizes, Duration, Seed, together

_CHOICE = {
    "plan": click.option(
        "--plan",
        shell_complete=names.plans,
        default="quick",
        show_default=True,
        help=f"{', '.join(BUILTIN)}, or a plan file (.toml).",
    ),
    "operators": click.option(
        "--operator",
        "operators",
        multiple=True,
        shell_complete=names.operators,
        help="Only this operator; repeatable.",
    ),
    "implementations": click.option(
        "--implementation",
        "implementations",
        multiple=True,
        shell_complete=names.implementations,
        help="Only this implementation or provider; repeatable.",
    ),
    "axes": click.option(
        "--axis",
        "axes",
        multiple=True,
        type=AxisSizes(),
        help="At these sizes in place of the plan's: S=1024,4096; repeatable. Operators without it are left out. "
        "gpus=2,4: the plan's cases of so many GPUs alone.",
    ),
    "dtypes": click.option(
        "--dtype", "dtypes", multiple=True, help="In this dtype in place of the plan's; repeatable."
    ),
    "passes": click.option(
        "--pass",
        "passes",
        multiple=True,
        type=click.Choice(get_args(Pass)),
        help="Of this pass in place of the plan's; repeatable.",
    ),
    "replicates": click.option(
        "--replicates", type=click.IntRange(1, 1000), help="Fresh processes; default: the plan's."
    ),
    "cache": click.option(
        "--cache", type=click.Choice(["cold", "hot", "both"]), help="Cache state; default: the plan's."
    ),
    "timer": click.option(
        "--timer",
        type=click.Choice(["auto", "events", "graph", "cupti"]),
        help="GPU timer; default: the case's own.",
    ),
}
"""By the field of `Choice` that it fills."""
WHAT = ("plan", "operators", "implementations", "axes", "dtypes", "passes")
HOW = ("replicates", "cache", "timer")

_SHARED = {
    "budget": click.option(
        "--budget",
        type=Duration(),
        help="End within this time (5m): what says least is left out and named. Default: the plan's, if any.",
    ),
    "note": click.option("--note", help="What to remember of this run; kernelmark runs shows it."),
    "fail_on": click.option(
        "--fail-on",
        multiple=True,
        type=click.Choice([x for x in get_args(Status) if x != "ok"]),
        help="Exit code 1 if a row ends so; repeatable.",
    ),
    "shard": click.option(
        "--shard",
        metavar="I/N",
        help="Only the I-th of N parts of the plan, cut by case, long trainings by seed; needs --run and --seed.",
    ),
    "name": click.option("--run", "name", help="The run's name: one for all shards, on whichever machine."),
    "control": click.option(
        "--control",
        metavar="OPERATOR/CASE",
        help="With --shard: a case that every shard measures, to hold machines against each other.",
    ),
    "any_board": click.option(
        "--any-board",
        is_flag=True,
        help="With --resume: on another board of the same kind, too; its rows say so.",
    ),
    "seed": click.option("--seed", type=Seed(), help="Seed of inputs and order; default: random, recorded."),
    "output": click.option(
        "--output", type=click.Path(path_type=Path), help="Results' folder, in place of $KERNELMARK_HOME."
    ),
    "no_report": click.option("--no-report", is_flag=True, help="Leave out the HTML report."),
    "journal_only": click.option(
        "--journal-only", is_flag=True, help="Write the journal and leave the rest to another machine."
    ),
}


def choosing(*fields: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds the options of these fields, all by default; the command gets them together as `choice`."""
    chosen = fields or (*WHAT, *HOW)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def call(**given: Any) -> Any:
            mine = {name: given.pop(name) for name in chosen}
            if "axes" in mine:
                mine["axes"] = together(mine["axes"])
            return command(**given, choice=Choice(**mine))

        for name in reversed(chosen):
            _CHOICE[name](call)
        return call

    return decorate


def shared(*options: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds these options, each by the name of the command's own parameter."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(options):
            _SHARED[name](command)
        return command

    return decorate


def with_resume(resume: str | None) -> None:
    """Raises `InputError` where --any-board is asked for a run that begins: it has no other board yet."""
    source = click.get_current_context().get_parameter_source("any_board")
    if resume is None and source is ParameterSource.COMMANDLINE:
        raise InputError("--any-board goes on with a run on another board; it needs --resume RUN.")


def asked_for(
    ctx: click.Context, but: Sequence[str], source: ParameterSource = ParameterSource.COMMANDLINE
) -> list[str]:
    """The options that stand on the command line, or come from another source: defaults of the user's are one."""
    given = [x for x in ctx.command.params if x.name not in but]
    return [x.opts[0] for x in given if ctx.get_parameter_source(str(x.name)) is source]
