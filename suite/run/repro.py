"""From a recorded run to the exact command that repeats it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ...registry.errors import InputError, KernelmarkError
from ...registry.store.home import Home
from ...registry.store.record import Case, Header
from ..catalog import Catalog
from ..plan import BUILTIN, Plan, load


class NotRepeatable(KernelmarkError):
    """What the run was made of is not here."""

    exit_code = 4


@dataclass(frozen=True)
class Repeat:
    """How a run is repeated.

    `command` is complete but for what must be true before: `commit` checked out (None where an image holds it),
    or the image of that digest at hand.
    """

    command: tuple[str, ...]
    commit: str | None
    image: str | None
    plan_file: Path | None
    plan_text: str | None
    warnings: tuple[str, ...]

    @property
    def line(self) -> str:
        """The command as a shell takes it."""
        return shlex.join(self.command)


def repeat(header: Header, home: Home, catalog: Catalog) -> Repeat:
    """How to repeat the run of a header. Raises `InputError` for a run that does not say what it measured."""
    if header.request.partner is not None:
        raise InputError(
            f"run {header.run} is one side of a comparison of commits; repeat that with regression_detector."
        )
    plan = Plan.of(header)
    if plan is None:
        raise InputError(f"run {header.run} does not say what it measured; it cannot be repeated.")
    image = header.conditions.get("image_digest")
    image = str(image) if image else None
    name = str(header.environment.get("image") or "")
    arguments = [] if image is None else ["--gpus", "0"] if header.device == "cuda" else []
    file = text = None
    narrowing = _narrowing(plan, catalog, header)
    if narrowing is None:
        file = home.folder / "plans" / header.run / f"{plan.name}.toml"
        text = to_toml(plan)
        arguments += ["--plan", str(file)]
    else:
        arguments += ["--plan", plan.name, *narrowing, "--replicates", str(plan.replicates)]
        arguments += ["--cache", "both" if len(plan.caches) == 2 else plan.caches[0]]
    for implementation in header.request.implementations:
        arguments += ["--implementation", implementation]
    arguments += ["--seed", str(header.seed)]
    if image is None:
        arguments += ["--device", header.device]
    command = ["kernelmark", *(["run"] if image is None else ["bench", image]), *arguments]
    return Repeat(
        tuple(command), None if image else header.commit, image, file, text, _warnings(header, image, name)
    )


def _warnings(header: Header, image: str | None, name: str) -> tuple[str, ...]:
    said = []
    if header.dirty:
        said.append("the run was made with uncommitted changes, which its commit does not have")
    if header.commit is None:
        said.append("the run does not know its commit")
    if image is not None and header.commit:
        said.append(
            f"without that image: git checkout {header.commit} && make image IMAGE={name or 'NAME'}; where the "
            f"builder is exact its digest is the same"
        )
    return tuple(said)


def _narrowing(plan: Plan, catalog: Catalog, header: Header) -> list[str] | None:
    """The filters that make a built-in plan the same; None where it is not that plan any more, or never was."""
    if plan.name not in BUILTIN:
        return None
    operators = list(dict.fromkeys(x.operator for x in plan.cases))
    try:
        whole = load(plan.name, catalog, header.device)
        same = load(plan.name, catalog, header.device, operators)
    except InputError:
        return None
    sampling = msgspec.structs.replace(same.sampling, timer=plan.sampling.timer)
    if replace(same, replicates=plan.replicates, caches=plan.caches, sampling=sampling) != plan:
        return None
    out = [] if whole.cases == plan.cases else [x for name in operators for x in ("--operator", name)]
    if plan.sampling.timer != same.sampling.timer:
        out += ["--timer", plan.sampling.timer]
    return out


def to_toml(plan: Plan) -> str:
    """The plan as a plan file, one table for each case."""
    lines = [f"replicates = {plan.replicates}", f"cache = {_value(list(plan.caches))}"]
    lines += [f"deadline_s = {float(plan.deadline_s)}", "", "[sampling]"]
    sampling = msgspec.to_builtins(plan.sampling)
    lines += [f"{name} = {_value(value)}" for name, value in sampling.items()]
    for case in plan.cases:
        lines += ["", "[[cases]]", f"operator = {_value(case.operator)}", f"axes = {_table(case.axes)}"]
        lines += [
            f"options = {_table(case.options)}",
            f"dtype = {_value(case.dtype)}",
            f"pass = {_value(_pass(case))}",
        ]
        if names := plan.chosen(case):
            lines.append(f"implementations = {_value(names)}")
    return "\n".join(lines) + "\n"


def _pass(case: Case) -> str:
    return str(case.pass_)


def _table(values: dict[str, int] | dict[str, bool | int | float | str]) -> str:
    return (
        "{ " + ", ".join(f"{name} = {_value(value)}" for name, value in values.items()) + " }" if values else "{}"
    )


def _value(value: bool | int | float | str | Sequence[str]) -> str:
    """A value in TOML's spelling, which for these is JSON's."""
    return msgspec.json.encode(value).decode()
