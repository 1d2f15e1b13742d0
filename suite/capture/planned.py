"""The plan of what was captured: a case for each kind of call, and what is none as comments."""

from __future__ import annotations

from ...registry.errors import InputError
from ...registry.escape import plain
from ...registry.figures import counted
from ..catalog import Catalog
from ..operator import Option
from .recorder import Capture, Seen


def share(ms: float, total: float) -> str:
    """A part of the time, as it is printed."""
    return f"{100 * ms / total:.1f} %"


def plan(seen: Capture, catalog: Catalog) -> str:
    """The text of a plan file: each kind of call that is a case of the catalog; what is not, as comments."""
    total = seen.total_ms or 1.0
    lines = [
        "# Calls of a program, as `kernelmark capture` saw them. Shares are of the time of all calls that it",
        "# saw; a backward pass is one of them, and not taken apart.",
        "",
    ]
    steps, step_ms, how = seen.step()
    if step_ms > 0:
        lines += [
            f"# A step, of {counted(steps, 'step')}: {how}. `kernelmark run` on this plan says what each",
            "# implementation is worth to it.",
            "[program]",
            f"step_ms = {step_ms:.6g}",
            "",
        ]
    cases = 0
    left: list[str] = [f"{counted(count, 'call')}, {reason}" for reason, count in seen.remarks.items()]
    for kind in seen.calls():
        try:
            table = _table(kind, catalog, total, steps)
        except InputError as error:
            left.append(f"{counted(kind.count, 'call')}, {share(kind.ms, total)}: {error}")
            continue
        cases += 1
        lines += [*table, ""]
    lines.append("# Not attributed to an operator, or not quite:")
    left += [
        f"{counted(count, 'call')}, {share(ms, total)}: {name}"
        for name, count, ms in seen.rest()
        if ms / total >= 1e-3
    ]
    lines += [f"#   {plain(x)}" for x in left] or ["#   nothing"]  # names of a trace are whatever it says
    if not cases:
        raise InputError("; ".join(["the program made no call that is an operator of ours", *left[:5]]))
    return "\n".join(lines) + "\n"


def _table(seen: Seen, catalog: Catalog, total: float, steps: int) -> list[str]:
    """A `[[cases]]` table. Raises `InputError` where the catalog has no such case."""
    call = seen.call
    operator = catalog.operator(call.operator)
    options = dict(call.options)
    passes = ["forward"]
    if call.trained and operator.gradients:
        passes.append("forward_backward" if call.operator.endswith("cross_entropy") else "backward")
    for pass_ in passes:
        operator.case(dict(call.axes), call.dtype, pass_, **options)  # type: ignore[arg-type]  # a Pass
    written = ", ".join(f"{name} = {size}" for name, size in call.axes)
    found = [
        f"# {counted(seen.count, 'call')}, {share(seen.ms, total)} of the time; strides {list(call.strides)}"
        if seen.ms
        else f"# {counted(seen.count, 'call')} of the backward pass, whose time is one",
        "[[cases]]",
        f'operator = "{call.operator}"',
        f"axes = {{ {written} }}",
    ]
    if options:
        given = ", ".join(f"{name} = {_toml(value)}" for name, value in options.items())
        found.append(f"options = {{ {given} }}")
    found.append(f'dtype = "{call.dtype}"')
    found.append(f"calls = {seen.count / steps:.6g}")
    found.append(f"pass = [{', '.join(map(_toml, passes))}]")
    return found


def _toml(value: Option) -> str:
    return (
        str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
    )
