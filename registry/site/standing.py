"""Where things stand: of each case on each device what was measured last, and ours beside the best other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from ..analysis.speedups import mean_bounds
from ..analysis.statistics import geometric_mean
from ..store.record import baseline
from ..views.rivals import told
from .facts import ONE_PROCESS, Fact, Run
from .field import Fields, cost, fields, left_out
from .timeline import Measured

OUTCOMES = ("faster", "undecided", "slower", ONE_PROCESS, "alone", "failed", "none of ours")
"""Of a case, as `CaseStanding.outcome` says it."""


@dataclass(frozen=True)
class CaseStanding:
    """A case on a device: the newest fact of each implementation, and of ours with what it competes with.

    `best` is the best correct baseline of ours' own run, which had the same inputs in the same processes; `absent`
    is one that every run since lacks, and that was better than it.
    """

    device: str
    case: str
    cache: str
    latest: tuple[Measured, ...]
    ours: Measured | None
    best: Measured | None
    absent: Measured | None = None

    @property
    def outcome(self) -> str:
        """That of ours' fact; `failed` without a value, `alone` without a speedup, `undecided` where its run left
        the best of the others out.
        """
        if self.ours is None:
            return "none of ours"
        fact = self.ours[1]
        if fact.number is None:
            return "failed"
        if self.absent is not None:
            return "undecided"
        return "alone" if fact.speedup is None else fact.outcome


@dataclass(frozen=True)
class Standing:
    """An operator or workload on a device, over its cases."""

    operator: str
    device: str
    cases: tuple[CaseStanding, ...]
    known: Fields
    """Who competes in each of its cases; in those of other devices, too."""

    @cached_property
    def compared(self) -> tuple[Fact, ...]:
        """Ours where a baseline of the same run has a value too, and no better one was left out."""
        return tuple(
            x.ours[1]
            for x in self.cases
            if x.ours and x.ours[1].speedup is not None and x.ours[1].number and x.absent is None
        )

    @cached_property
    def outcomes(self) -> Counter[str]:
        """How many cases are faster, slower, and so on."""
        return Counter(x.outcome for x in self.cases)

    @cached_property
    def counted(self) -> tuple[Fact, ...]:
        """What `speedup` is of: the cases that have an interval, or all of them where none has."""
        return tuple(x for x in self.compared if x.outcome != ONE_PROCESS) or self.compared

    @property
    def speedup(self) -> float | None:
        """Ours over the best baseline of each case that counts, the geometric mean."""
        return geometric_mean(x.speedup for x in self.counted)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """An interval of `speedup`; None where none of its cases has one."""
        return mean_bounds((x.speedup_low, x.speedup_high) for x in self.counted)

    @property
    def part(self) -> str:
        """Of how many cases `speedup` is, where these are not all."""
        counted, every = len(self.counted), len(self.compared)
        return f"of {counted} of {every}" if counted < every else ""

    @property
    def fraction(self) -> float | None:
        """Ours' median share of the limit."""
        found = [x.ours[1].fraction for x in self.cases if x.ours and x.ours[1].fraction is not None]
        return median(found) if found else None

    @property
    def rival(self) -> tuple[str, int] | None:
        """The baseline that is the best of most cases, as it is called in ratios, and of how many."""
        ours = (x.ours for x in self.cases if x.ours and x.ours[1].speedup is not None)
        found = Counter(told(fact.best, run.conditions) for run, fact in ours if fact.best)
        return found.most_common(1)[0] if found else None

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs that its rows are of."""
        return tuple(dict.fromkeys(run.name for x in self.cases for run, _ in x.latest))

    @property
    def newest(self) -> Run | None:
        """The run that was measured last."""
        runs = [run for x in self.cases for run, _ in x.latest]
        return max(runs, key=lambda x: x.created, default=None)


def standings(operator: str, measured: Iterable[Measured]) -> tuple[Standing, ...]:
    """By device, GPUs before processors, from an operator's facts in order, oldest first."""
    given = list(measured)
    known = fields(given)
    kinds: dict[str, str] = {}
    by_case: dict[tuple[str, str, str], list[Measured]] = {}
    for run, fact in given:
        if run.arm is None:
            kinds[run.device] = run.kind
            by_case.setdefault((run.device, fact.case, fact.cache), []).append((run, fact))
    devices: dict[str, list[CaseStanding]] = {}
    for (device, case, cache), found in by_case.items():
        devices.setdefault(device, []).append(_case(device, case, cache, found, known))
    ordered = sorted(devices, key=lambda x: (kinds[x] == "cpu", x))
    return tuple(Standing(operator, x, tuple(devices[x]), known) for x in ordered)


def _case(device: str, case: str, cache: str, found: Sequence[Measured], known: Fields) -> CaseStanding:
    latest = {fact.implementation: (run, fact) for run, fact in found}
    ours = _ours([x for x in found if x[1].ours], known)
    best = absent = None
    if ours is not None and ours[1].best is not None:
        of_run = (x for x in found if x[0].name == ours[0].name and x[1].implementation == ours[1].best)
        best, absent = next(of_run, None), left_out(ours, known)
    elif ours is None or ours[1].number is None:
        best = _first([x for x in latest.values() if baseline(x[1].provider, x[1].implementation)])
    return CaseStanding(device, case, cache, tuple(latest.values()), ours, best, absent)


def _ours(found: Sequence[Measured], known: Fields) -> Measured | None:
    """The newest, unless it is right and an older one beside baselines says more; of a run's several the best.

    Of runs beside baselines the newest by the newest definition that leaves out no rival which is better, and that
    had the machine to itself; where there is none, the newest.
    """
    if not found:
        return None
    newest = [x for x in found if x[0].name == found[-1][0].name]
    best = _first(newest)
    if best is None:
        return newest[-1]
    beside = [x for x in found if x[1].number is not None and x[1].speedup is not None]
    if not beside:
        return best
    alike = [x for x in beside if x[1].spec == beside[-1][1].spec]
    by_run: dict[str, list[Measured]] = {}
    for x in alike:
        by_run.setdefault(x[0].name, []).append(x)
    each = [y for x in reversed(by_run.values()) if (y := _first(x)) is not None]
    whole = [x for x in each if left_out(x, known) is None]
    return next((x for x in whole if "parallel" not in x[0].conditions), None) or next(iter(whole or each))


def better(one: Measured, other: Measured) -> Measured:
    """The one of two values that is better, the first of equals."""
    return min(one, other, key=_cost)


def _first(found: Sequence[Measured]) -> Measured | None:
    """The best value among facts."""
    return min((x for x in found if x[1].number is not None), key=_cost, default=None)


def _cost(measured: Measured) -> float:
    return cost(measured[1])
