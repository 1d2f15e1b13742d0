"""From a recorded run to the exact command that repeats it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ...registry.errors import InputError, KernelmarkError
from ...registry.store.home import Home
from ...registry.store.record import Case, Header
from ...registry.store.transfer import checked_run
from ..catalog import Catalog
from ..plan import BUILTIN, Plan, load
from ..system import System

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What may become a file's name or a word of a printed command; a journal may hold anything."""
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_COUNT = re.compile(r"[2-9]|[1-9]\d{1,2}")
"""Of shards of one host."""
BESIDE = "parallel"
"""Among a run's conditions: how many shards were measured beside each other, or `shared`."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


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
    """How to repeat the run of a header. Raises `InputError` for a run that does not say what it measured.

    Nothing in a header is taken for a path, a command or TOML: names that do not have a name's form are refused,
    or left out where they are only noted.
    """
    if header.request.partner is not None:
        raise InputError(
            f"run {header.run} is one side of a comparison of commits; repeat that with regression_detector."
        )
    plan = Plan.of(header)
    if plan is None:
        raise InputError(f"run {header.run} does not say what it measured; it cannot be repeated.")
    image = _formed(header.conditions.get("image_digest"), _DIGEST, "image digest")
    commit = _formed(header.commit, _COMMIT, "commit")
    name = str(header.environment.get("image") or "")
    gpus = ",".join(str(x) for x in range(max(x.world for x in plan.cases)))
    arguments = ["--gpus", gpus] if image is not None and header.device == "cuda" else []
    file = text = None
    narrowing = _narrowing(plan, catalog, header)
    if narrowing is None:
        stem = plan.name if _NAME.fullmatch(plan.name) else "plan"
        file = home.folder / "plans" / checked_run(header.run) / f"{stem}.toml"
        text = to_toml(plan, catalog)
        arguments += ["--plan", str(file)]
    else:
        arguments += ["--plan", plan.name, *narrowing, "--replicates", str(plan.replicates)]
        arguments += ["--cache", "both" if len(plan.caches) == 2 else plan.caches[0]]
    for implementation in header.request.implementations:
        arguments += ["--implementation", implementation]
    arguments += ["--seed", str(header.seed)]
    if image is None:
        arguments += ["--device", header.device, *_side_by_side(header)]
    where = ["run"] if image is None else ["bench", image]
    if image is not None and (beside := _siblings(header)):
        # Of several images the condition is the digest of the set, by which no engine knows any of them.
        where = ["bench", name, *(x for one in beside for x in ("--with", one))]
    command = ["kernelmark", *where, *arguments]
    warnings = _warnings(header, image, name)
    if file is not None and plan.exchanges:
        warnings += ("its plan file has the rows, and not what they are worth: `kernelmark worth` asks that anew",)
    return Repeat(tuple(command), None if image else commit, image, file, text, warnings)


def _side_by_side(header: Header) -> list[str]:
    """The options that measure shards beside each other, as the rows' conditions say; none for a shard alone."""
    count = str(header.conditions.get(BESIDE) or "")
    if header.request.shard is not None or not _COUNT.fullmatch(count):
        return []
    control = header.request.control
    chosen = ["--control", control] if control in {x.full_name for x in header.request.cases} else []
    return ["--parallel", "--gpus", ",".join(map(str, range(int(count)))), *chosen]


def _siblings(header: Header) -> list[str]:
    """The environments whose images measured the run beside that of its name; none where that is no name."""
    of = [x.removeprefix("image/") for x in header.environment if x.startswith("image/")]
    named = _NAME.fullmatch(str(header.environment.get("image") or ""))
    return sorted(x for x in of if x != "core" and _NAME.fullmatch(x)) if named else []


def _formed(value: object, form: re.Pattern[str], what: str) -> str | None:
    """A value of a header that becomes part of a command. Raises `InputError` for what has not its form."""
    if not value:
        return None
    if not isinstance(value, str) or not form.fullmatch(value):
        raise InputError(f"the run's {what} {str(value)[:80]!r} is none: the journal is not to be trusted.")
    return value


def _warnings(header: Header, image: str | None, name: str) -> tuple[str, ...]:
    said = []
    if header.dirty:
        said.append("the run was made with uncommitted changes, which its commit does not have")
    if header.commit is None:
        said.append("the run does not know its commit")
    if header.request.shard is not None and header.request.seeds:
        said.append("this shard has some of its cases' seeds only, and the command measures all")
    if (beside := header.conditions.get(BESIDE)) and (image is not None or not _side_by_side(header)):
        said.append(
            f"other shards were measured on its host at the same time ({BESIDE} = {str(beside)[:20]}), which the "
            "command does not repeat"
        )
    if image is not None and header.commit:
        said.append(
            f"without that image: git checkout {header.commit} && make image "
            f"IMAGE={name if _NAME.fullmatch(name) else 'NAME'}; where the "
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
    original = same.sampling.timer
    sampling = msgspec.structs.replace(same.sampling, timer=plan.sampling.timer)
    whole, same = (
        replace(x, replicates=plan.replicates, caches=plan.caches, sampling=sampling) for x in (whole, same)
    )
    if plan not in (whole, same):
        return None
    out = [] if plan == whole else [x for name in operators for x in ("--operator", name)]
    if plan.sampling.timer != original:
        out += ["--timer", plan.sampling.timer]
    return out


def to_toml(plan: Plan, catalog: Catalog) -> str:
    """The plan as a plan file, one table for each case. It does not say what is exchanged for its worth."""
    catalog = catalog.with_systems(plan.systems)
    lines = [f"replicates = {plan.replicates}", f"cache = {_value(list(plan.caches))}"]
    lines += [f"deadline_s = {float(plan.deadline_s)}", "", "[sampling]"]
    sampling = msgspec.to_builtins(plan.sampling)
    lines += [f"{_key(name)} = {_value(value)}" for name, value in sampling.items()]
    if plan.step_ms is not None:
        lines += ["", "[program]", f"step_ms = {_value(plan.step_ms)}"]
    if plan.peers:
        lines += ["", "[peers]", *(f"{_key(name)} = {_value(x)}" for name, x in plan.peers.items())]
    for system in plan.systems:
        usual = msgspec.to_builtins(System(system.name))
        said = {name: x for name, x in msgspec.to_builtins(system).items() if name == "name" or x != usual[name]}
        lines += ["", "[[systems]]", *(f"{_key(name)} = {_written(x)}" for name, x in said.items())]
    for case in plan.cases:
        lines += ["", "[[cases]]", f"operator = {_value(case.operator)}", f"axes = {_table(case.axes)}"]
        lines += [
            f"options = {_table(case.options)}",
            f"dtype = {_value(case.dtype)}",
            f"pass = {_value(_pass(case))}",
        ]
        if names := plan.chosen(case):
            lines.append(f"implementations = {_value(names)}")
            # A name may be a provider's too, whose other implementations would come along.
            along = [x.name for x in catalog.of_operator(case.operator) if x.among(names) and x.name not in names]
            lines += [f"without = {_value(along)}"] if along else []
        if models := plan.models.get(case.full_name):
            lines.append(f"models = {_value(models)}")
        if calls := plan.calls.get(case.full_name):
            lines.append(f"calls = {_value(float(calls))}")
    return "\n".join(lines) + "\n"


def _pass(case: Case) -> str:
    return str(case.pass_)


def _written(value: object) -> str:
    return _table(value) if isinstance(value, dict) else _value(value)  # type: ignore[arg-type]  # of a system


def _table(values: Mapping[str, bool | int | float | str]) -> str:
    return (
        "{ " + ", ".join(f"{_key(name)} = {_value(value)}" for name, value in values.items()) + " }"
        if values
        else "{}"
    )


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _value(name)


def _value(value: bool | int | float | str | Sequence[str]) -> str:
    """A value in TOML's spelling, which for these is JSON's but that DEL is escaped."""
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
