"""Which cases of an operator lie on a line: the same but for one size, so that a value can be drawn over it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..store.record import GPUS, Status
from .grouping import CaseRows

OUT_OF_MEMORY: Status = "out_of_memory"
LEAST = 3
"""Two points are no line that a list of two numbers would not show better."""
BYTES = "bytes"
"""What stands for a size where cases differ in several at once: the least bytes that they move."""
PARAMETERS = "parameters"
"""What stands for a size where cases differ in the model."""
ARRAY = "bytes of the array"
"""What stands for the number of elements of a collective's array, for which bandwidth is told."""
BATCH, LENGTH, ELEMENTS = "B", "S", "N"
DRAWN = 2
"""Cases of a line that have a value: one point is no line, wherever memory ends."""


@dataclass(frozen=True)
class Sweep:
    """Cases along an axis of the operator, `ARRAY`, `BYTES` or `PARAMETERS`, by increasing size."""

    axis: str
    common: str
    """What they have in common, and what moves along with the axis."""
    cases: tuple[tuple[int, CaseRows], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Where along the axis they lie."""
        return tuple(x for x, _ in self.cases)


def sweeps(found: Iterable[CaseRows], parameters: Mapping[str, int] | None = None) -> tuple[Sweep, ...]:
    """The lines through the cases of one operator and pass, each case on one at most. A case that nobody had the
    memory for belongs to its line: it says where that ends. `parameters` are those of cases' models, by
    operator/case.

    First those of collectives over their arrays, then those on which nothing but one size differs, then those
    where the batch differs with it (it usually shrinks as sequences grow), then those over models of as many
    tokens, then those over bytes, for what does nothing but move them.
    """
    left = [x for x in found if x.ok or any(y.status == OUT_OF_MEMORY for y in x.rows)]
    arrays = [x for x in left if x.first.axes.keys() == {ELEMENTS, GPUS}]
    out = _lines(
        arrays, ARRAY, lambda x: array_bytes(x.first.axes, x.first.dtype), lambda name: name != f"axis {ELEMENTS}"
    )
    left = _without(left, out)
    names = list(dict.fromkeys(name for x in left for name in x.first.axes))
    names.sort(key=lambda x: x != LENGTH)
    for beside in ((), (BATCH,)):
        while True:
            axes = [x for x in names if x not in beside]
            best = max((_along(left, x, beside) for x in axes), key=_covered, default=[])
            if not best:
                break
            out += best
            left = _without(left, best)
    known = parameters or {}
    sized = [x for x in left if f"{x.operator}/{x.name}" in known]
    over_models = _lines(
        sized,
        PARAMETERS,
        lambda x: known[f"{x.operator}/{x.name}"],
        lambda name: name not in ("option model", f"axis {BATCH}", f"axis {LENGTH}"),
        lambda x: x.first.axes.get(BATCH, 1) * x.first.axes.get(LENGTH, 1),
    )
    out += over_models
    left = _without(left, over_models)
    moved = [x for x in left if not x.first.flops]
    over_bytes = _lines(moved, BYTES, lambda x: x.first.bytes, lambda name: not name.startswith("axis "))
    return (*out, *over_bytes)


def array_bytes(axes: Mapping[str, int], dtype: str) -> int | None:
    """Bytes of a collective's array: how many elements, of so many bits as their type's name says. Nothing that
    was measured, so that one size is one place on an axis. None where there are none.
    """
    small = re.fullmatch(r"e([0-9])m([0-9])", dtype)  # of a sign, an exponent and a mantissa
    named = re.search(r"[0-9]{1,3}", dtype)
    bits = 1 + int(small[1]) + int(small[2]) if small else int(named[0]) if named else 0
    # An axis of logarithms has no 0, which a journal of somebody else may have.
    return axes.get(ELEMENTS, 0) * bits // 8 or None


def _covered(found: Sequence[Sweep]) -> int:
    return sum(len(x.cases) for x in found)


def _without(left: Iterable[CaseRows], found: Iterable[Sweep]) -> list[CaseRows]:
    taken = {id(case) for sweep in found for _, case in sweep.cases}
    return [x for x in left if id(x) not in taken]


def _along(left: Sequence[CaseRows], axis: str, beside: Sequence[str]) -> list[Sweep]:
    free = {f"axis {x}" for x in (axis, *beside)}
    return _lines(left, axis, lambda x: x.first.axes.get(axis), lambda name: name not in free)


def _lines(
    left: Sequence[CaseRows],
    axis: str,
    size: Callable[[CaseRows], int | None],
    fixed: Callable[[str], bool],
    same: Callable[[CaseRows], int] = lambda _: 0,
) -> list[Sweep]:
    """Cases whose `fixed` parts, and what is the `same`, agree, where they have enough sizes and each once."""
    groups: dict[tuple[object, ...], list[tuple[int, CaseRows]]] = {}
    for case in left:
        if (at := size(case)) is not None:
            key = same(case), *((name, text) for name, text in case.parts.items() if fixed(name))
            groups.setdefault(key, []).append((at, case))
    out = []
    for members in groups.values():
        sizes = {x for x, _ in members}
        if len(sizes) >= LEAST and len(sizes) == len(members) and sum(bool(x.ok) for _, x in members) >= DRAWN:
            members.sort(key=lambda x: x[0])
            out.append(Sweep(axis, _common(axis, members), tuple(members)))
    return out


def _common(axis: str, members: Sequence[tuple[int, CaseRows]]) -> str:
    parts = [x.parts for _, x in members]
    shared = [x for x in parts[0] if all(y.get(x) == parts[0][x] for y in parts)]
    told = [parts[0][x] for x in shared if parts[0][x] != "cold cache"]
    moving = [x for x in parts[0] if x not in shared and x != f"axis {axis}"]
    if axis == PARAMETERS:
        first = members[0][1].first.axes
        told = [x for x in told if x not in (parts[0].get(f"axis {BATCH}"), parts[0].get(f"axis {LENGTH}"))]
        told.append(f"B × S = {first.get(BATCH, 1) * first.get(LENGTH, 1):,}")
    elif axis != BYTES and moving == [f"axis {BATCH}"]:
        products = {size * x.first.axes[BATCH] for size, x in members}
        told.append(f"B × {axis} = {products.pop():,}" if len(products) == 1 else "B differs")
    return " · ".join(told)
