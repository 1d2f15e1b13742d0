"""What is different in a step whose part was exchanged: kernels that came and went, as profiles of both tell.

A profile counts launches, which do not vary, and times them, which the profiler itself makes longer: the
differences are of counts first, and milliseconds say which of them matter.
"""

from __future__ import annotations

import re

import msgspec

from ..figures import counted
from ..store.record import Launched, Launches

NUMBER = re.compile(r"(?<=\D)_\d+$")
"""What a compiler numbers its kernels by: a graph's third and another's fifth may well be one kernel."""
WRAPPERS = ("aten::clone", "aten::contiguous", "aten::_to_copy")
"""On a CPU, what has no work of its own but `aten::copy_`, which stands beside it."""
NO_WORK = re.compile(r"autograd::|\w+Backward\d+$|aten::(new_)?empty")
"""On a CPU, events around operators, and memory that is taken and not written."""
NAMED = 2
"""Kernels that a statement names, of those that went and of those that came."""
SHORT = 48
"""Characters of a kernel's name in a statement."""
WORTH_A_WORD = 0.005
"""Of a step's kernels, the share from which a difference of their times is told."""


class Difference(msgspec.Struct, frozen=True):
    """The exchanged system's step less the base's: calls and milliseconds a step.

    `gone` and `new` are calls of kernels that only one of the steps makes, the longest first; `kept_ms` is what
    kernels that both call as often take longer; `copies` only lay out anew what is there.
    """

    launches: float
    copies: float
    copies_ms: float
    gap_ms: float
    kept_ms: float
    busy_ms: float
    """All kernels of the base's step."""
    gone: tuple[Launched, ...] = ()
    new: tuple[Launched, ...] = ()


def difference(base: Launches, exchanged: Launches) -> Difference:
    """What distinguishes the two steps."""
    before, after = _by_name(base), _by_name(exchanged)
    copies = [sum((x.calls for x in y.values() if x.kind == "copy"), 0.0) for y in (before, after)]
    spent = [sum((x.ms for x in y.values() if x.kind == "copy"), 0.0) for y in (before, after)]
    rest = [x for x, y in before.items() if y.kind != "copy" and x in after and after[x].calls == y.calls]
    return Difference(
        launches=sum(x.calls for x in after.values()) - sum(x.calls for x in before.values()),
        copies=copies[1] - copies[0],
        copies_ms=spent[1] - spent[0],
        gap_ms=exchanged.gap_ms - base.gap_ms,
        kept_ms=sum(after[x].ms - before[x].ms for x in rest),
        busy_ms=sum(x.ms for x in before.values()),
        gone=_longest(before, after),
        new=_longest(after, before),
    )


def stated(x: Difference) -> str:
    """A difference in a line."""
    least = WORTH_A_WORD * x.busy_ms
    said = []
    if x.copies:
        said.append(f"{_signed(x.copies)} layout copies ({_signed(x.copies_ms, 3)} ms)")
    if x.launches:
        said.append(f"{_signed(x.launches)} launches")
    for word, kernels in (("gone", x.gone), ("new", x.new)):
        if kernels:
            named = ", ".join(f"{_short(y.name)} × {y.calls:g} ({y.ms:.3f} ms)" for y in kernels[:NAMED])
            more = f" and {counted(len(kernels) - NAMED, 'other')}" if len(kernels) > NAMED else ""
            said.append(f"{word}: {named}{more}")
    if abs(x.kept_ms) > least:
        said.append(f"other kernels {_signed(x.kept_ms, 3)} ms")
    if abs(x.gap_ms) > least:
        said.append(f"waiting {_signed(x.gap_ms, 3)} ms")
    return "; ".join(said) or "the same kernels, as often, in the same time"


def _by_name(step: Launches) -> dict[str, Launched]:
    """The kernels of a step, those that differ by a compiler's number alone as one."""
    found: dict[str, Launched] = {}
    for x in step.kernels:
        if NO_WORK.match(x.name):
            continue
        name = NUMBER.sub("", x.name) if x.name.startswith("triton_") else x.name
        calls = x.calls
        if name in WRAPPERS:
            name, calls = "aten::copy_", 0.0
        seen = found.get(name, Launched(name, x.kind, 0.0, 0.0))
        found[name] = Launched(name, x.kind, seen.calls + calls, seen.ms + x.ms)
    return found


def _longest(of: dict[str, Launched], other: dict[str, Launched]) -> tuple[Launched, ...]:
    """What one step has more often than the other, copies left out, by how much time that is."""
    more = []
    for name, x in of.items():
        fewer = other.get(name)
        if x.kind != "copy" and (fewer is None or fewer.calls < x.calls):
            share = 1.0 if fewer is None else 1 - fewer.calls / x.calls
            more.append(Launched(name, x.kind, x.calls * share, x.ms * share))
    return tuple(sorted(more, key=lambda x: (-x.ms, x.name)))


def _signed(x: float, digits: int | None = None) -> str:
    text = f"{abs(x):g}" if digits is None else f"{abs(x):.{digits}f}"
    return f"+{text}" if x >= 0 else f"−{text}"


def _short(name: str) -> str:
    """A kernel's name without its return type and arguments."""
    bare = name.removeprefix("void ")
    return bare if len(bare) <= SHORT else bare[: SHORT - 1] + "…"
