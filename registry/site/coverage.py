"""What was measured on each device, what ended otherwise, and what was never run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..store.record import Status
from .timeline import Measured


@dataclass(frozen=True)
class Expected:
    """What exists of an operator or workload: implementations, each with the kinds of device that it is for, the
    cases of the plan that everything is measured by, and the family that it is shown among.
    """

    implementations: Mapping[str, tuple[str, ...]]
    cases: tuple[str, ...] = ()
    family: str = ""


@dataclass(frozen=True)
class Coverage:
    """An operator on a device. `statuses` counts rows by how they ended last, `failed` says why, by status and
    reason, of which implementations.
    """

    operator: str
    cases: int
    statuses: Mapping[Status, int]
    timed: tuple[str, ...]
    failed: Mapping[tuple[Status, str], tuple[str, ...]]
    never: tuple[str, ...]
    """Implementations that exist and were not run."""
    cases_never: tuple[str, ...]

    @property
    def run(self) -> bool:
        """Whether anything of it was."""
        return bool(self.statuses)


def coverage(
    device: str, kind: str, measured: Iterable[Measured], expected: Mapping[str, Expected]
) -> tuple[Coverage, ...]:
    """Of one device, from all facts in order; what is expected and has no fact is there too."""
    by_operator: dict[str, list[Measured]] = {x: [] for x in expected}
    for run, fact in measured:
        if run.device == device:
            by_operator.setdefault(fact.operator, []).append((run, fact))
    return tuple(
        _of(operator, kind, found, expected.get(operator, Expected({})))
        for operator, found in sorted(by_operator.items())
    )


def _of(operator: str, kind: str, found: Sequence[Measured], expected: Expected) -> Coverage:
    latest = {fact.identity: fact for _, fact in found}
    failed: dict[tuple[Status, str], dict[str, None]] = {}
    for fact in latest.values():
        if fact.status != "ok":
            failed.setdefault((fact.status, fact.reason or ""), {})[fact.implementation] = None
    run = {x.implementation for x in latest}
    cases = {x.case for x in latest}
    return Coverage(
        operator=operator,
        cases=len(cases),
        statuses=dict(Counter(x.status for x in latest.values()).most_common()),
        timed=tuple(sorted({x.implementation for x in latest.values() if x.number is not None})),
        failed={key: tuple(names) for key, names in failed.items()},
        never=tuple(x for x, kinds in expected.implementations.items() if x not in run and kind in kinds),
        cases_never=tuple(x for x in expected.cases if x not in cases),
    )
