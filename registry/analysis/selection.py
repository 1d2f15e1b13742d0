"""Which rows of a run, a comparison or a history are asked for: by operator, case, implementation and so on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import InputError, unknown
from ..figures import counted
from ..store.record import Key
from .rows import Row

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Selection:
    """What is asked for. Of a field that is given a row must have one of the values; an empty one asks for all.

    A case is asked for by its name or by parts of it in any order: `S4096-causal`. `axes` has the sizes by axis.
    `above_limit` asks for rows that pass their limit, which a run's rows alone can.
    """

    operators: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    axes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    statuses: tuple[str, ...] = ()
    above_limit: bool = False

    @property
    def everything(self) -> bool:
        """Whether nothing is left out."""
        return not any(vars(self).values())

    def rows(self, found: Iterable[Row]) -> tuple[Row, ...]:
        """The rows that are asked for. Raises `InputError` naming what exists if there is none."""
        return self._of(tuple(found), _of_row)

    def keys(self, found: Mapping[Key, str]) -> tuple[Key, ...]:
        """The same of rows of which only key and provider are known: a case's name has its sizes, dtype, pass."""
        return self._of(tuple(found), lambda x: _of_key(x, found[x]))

    def _of(self, found: Sequence[Kept], facts: Callable[[Kept], _Facts]) -> tuple[Kept, ...]:
        if self.everything:
            return tuple(found)
        known = [facts(x) for x in found]
        kept = tuple(x for x, y in zip(found, known, strict=True) if self._keeps(y))
        if not kept:
            self._refuse(known)
        return kept

    def _keeps(self, row: _Facts) -> bool:
        return (
            row.operator in (self.operators or (row.operator,))
            and row.implementation in (self.implementations or (row.implementation,))
            and row.provider in (self.providers or (row.provider,))
            and row.status in (self.statuses or (row.status,))
            and (row.above_limit or not self.above_limit)
            and (not self.cases or any(set(x.split("-")) <= row.parts for x in self.cases))
            and (not self.dtypes or not row.parts.isdisjoint(self.dtypes))
            and (not self.passes or not row.parts.isdisjoint(self.passes))
            and all(any(f"{axis}{x}" in row.parts for x in sizes) for axis, sizes in self.axes.items())
        )

    def _refuse(self, rows: Collection[_Facts]) -> None:
        """Says which of the values that were asked for no row has."""
        for kind, asked, known in (
            ("operator", self.operators, {x.operator for x in rows}),
            ("implementation", self.implementations, {x.implementation for x in rows}),
            ("provider", self.providers, {x.provider for x in rows}),
            ("status", self.statuses, {x.status for x in rows}),
        ):
            for name in asked:
                if name not in known:
                    raise unknown(kind, name, sorted(known))
        parts = {part for x in rows for part in x.parts}
        for kind, names in (("case", self.cases), ("dtype", self.dtypes), ("pass", self.passes)):
            for name in names:
                if not set(name.split("-")) <= parts:
                    raise InputError(f"no row has {kind} {name}. {_cases(rows)}")
        for axis, sizes in self.axes.items():
            if not any(f"{axis}{x}" in parts for x in sizes):
                there_are = sorted({int(x[len(axis) :]) for x in parts if _is_size(x, axis)})
                there = (
                    f"{axis} is {', '.join(map(str, there_are))}" if there_are else f"no row has an axis {axis}"
                )
                raise InputError(f"no row has {axis}={','.join(map(str, sizes))}: {there}.")
        if self.above_limit and not any(x.above_limit for x in rows):
            raise InputError("no row passes its limit: what the run measured of its device holds for all of them.")
        raise InputError(f"each of these is there, but no row has them together. {_cases(rows)}")


EVERYTHING = Selection()


@dataclass(frozen=True)
class _Facts:
    """What is asked of a row. `parts` are those of its case's name."""

    operator: str
    implementation: str
    provider: str
    status: str
    parts: frozenset[str]
    above_limit: bool = False


def _of_row(row: Row) -> _Facts:
    # An axis at the size that it had before it existed is in no name.
    parts = {*row.case.split("-"), row.dtype, row.pass_, *(f"{x}{y}" for x, y in row.axes.items())}
    above = bool(row.above_limit)
    return _Facts(row.operator, row.implementation, row.provider, row.status, frozenset(parts), above)


def _of_key(key: Key, provider: str) -> _Facts:
    return _Facts(key.operator, key.implementation, provider, "ok", frozenset(key.case.split("-")))


def _is_size(part: str, axis: str) -> bool:
    return part.startswith(axis) and part[len(axis) :].isdecimal()


def _cases(rows: Collection[_Facts]) -> str:
    operators = sorted({x.operator for x in rows})
    there, it = ("There is", "it is shown") if len(rows) == 1 else ("There are", "they are all shown")
    return f"{there} {counted(len(rows), 'row')} of {', '.join(operators)}; without filters {it}."
