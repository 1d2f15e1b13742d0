"""What a kernel is worth in a model: alone, expected of the model's step, and measured there.

A run on kernels' worth exchanges one part of a base system at a time. From the isolated rows and the number of
calls follows what the step should gain; the step of the exchanged system says what it does gain. What lies between
is what no isolated row sees: layouts that the neighbours leave, fusion that is lost, launches, the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from ..store.journal import Journal
from ..store.metric import summarized
from ..store.record import Exchange, Launches, Record, Status, ended
from .explained import difference, stated
from .statistics import log_mean_interval

Agreement = Literal["as expected", "more", "less", "unknown"]


class Worth(msgspec.Struct, frozen=True):
    """One exchange. All ratios are of the base's time to the exchanged one's: above 1 the exchange gains."""

    exchange: Exchange
    status: Status
    reason: str | None
    alone: float | None = None
    expected: float | None = None
    """Of the step: its time less what the calls gain alone, as if nothing else changed."""
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    """The 95 % interval of `measured`, over processes, in each of which both systems were timed."""
    processes: int = 0
    base_ms: float | None = None
    """The base system's step."""
    gained_ms: float | None = None
    """Of the step, as measured."""
    expected_ms: float | None = None
    differs: str = ""
    """What the exchanged system's step has and the base's has not, where both were profiled."""

    @property
    def agreement(self) -> Agreement:
        """Whether the expectation lies within the interval of what was measured; that of one process holds all."""
        if self.expected is None or self.low is None or self.high is None or self.processes < 2:
            return "unknown"
        if self.low <= self.expected <= self.high:
            return "as expected"
        return "more" if self.low > self.expected else "less"

    @property
    def null(self) -> bool:
        """Whether nothing is shown: the interval holds 1."""
        return self.low is None or self.high is None or self.low <= 1 <= self.high


def worths(journal: Journal) -> tuple[Worth, ...]:
    """All exchanges of a run, in the order of its request; none where it is no run on worth."""
    found: dict[tuple[str, str, str], dict[int, Record]] = {}
    for record in journal.records:
        key = (record.case.operator, record.case.name, record.implementation)
        found.setdefault(key, {})[record.replicate] = record
    profiled = {(x.operator, x.case, x.implementation): x for x in journal.launches}
    return tuple(_explained(_worth(x, found), profiled) for x in journal.header.request.exchanges)


def unexplained(journal: Journal) -> tuple[tuple[str, str, str], ...]:
    """Rows, as operator, case and implementation, whose profiles would say why a measured exchange is not what was
    expected of it, and which have none yet; the base of each before it.
    """
    profiled = {(x.operator, x.case, x.implementation) for x in journal.launches}
    rows = dict.fromkeys(
        (x.exchange.program, x.exchange.step, name)
        for x in worths(journal)
        if x.status == "ok" and x.agreement in ("more", "less")
        for name in (x.exchange.base, x.exchange.system)
    )
    return tuple(x for x in rows if x not in profiled)


def _explained(found: Worth, profiled: Mapping[tuple[str, str, str], Launches]) -> Worth:
    x = found.exchange
    base, own = (profiled.get((x.program, x.step, name)) for name in (x.base, x.system))
    if found.status != "ok" or base is None or own is None:
        return found
    return msgspec.structs.replace(found, differs=stated(difference(base, own)))


def _worth(x: Exchange, found: Mapping[tuple[str, str, str], Mapping[int, Record]]) -> Worth:
    if x.refused:
        return Worth(x, "unsupported", f"{x.system}: {x.refused}")
    base = found.get((x.program, x.step, x.base), {})
    exchanged = found.get((x.program, x.step, x.system), {})
    for name, records in ((x.system, exchanged), (x.base, base)):
        status, reason = ended(tuple(records.values()))
        if status != "ok":
            return Worth(x, status, f"{name}: {reason}")
    # A process that was lost costs its pair, and not the others.
    pairs = {
        replicate: (_primary(base[replicate]), _primary(exchanged[replicate]))
        for replicate in sorted(base.keys() & exchanged.keys())
        if base[replicate].status == exchanged[replicate].status == "ok"
    }
    if not pairs:
        return Worth(x, "unavailable", "not measured yet")
    ratio, low, high = log_mean_interval([a / b for a, b in pairs.values()])
    step = _mean([a for a, _ in pairs.values()])
    alone = _alone(x, found)
    gained = None if alone is None else x.calls * (alone[0] - alone[1])
    return Worth(
        exchange=x,
        status="ok",
        reason=None,
        alone=None if alone is None else alone[0] / alone[1],
        expected=None if gained is None or gained >= step else step / (step - gained),
        measured=ratio,
        low=low,
        high=high,
        processes=len(pairs),
        base_ms=step,
        gained_ms=step - step / ratio,
        expected_ms=gained,
    )


def _primary(record: Record) -> float:
    """A process's value of the case's primary metric: a time, of which programs and operators have the median."""
    measurement = record.measurement
    assert measurement is not None, record.implementation
    return summarized(measurement.samples[record.case.primary], "median")


def _alone(x: Exchange, found: Mapping[tuple[str, str, str], Mapping[int, Record]]) -> tuple[float, float] | None:
    """Milliseconds of one isolated call, (the base's, the exchanged one's); None where either is missing."""
    times = []
    for name in (x.instead, x.implementation):
        records = [y for y in found.get((x.operator, x.case, name), {}).values() if y.status == "ok"]
        if not records:
            return None
        times.append(_mean([_primary(y) for y in records]))
    return times[0], times[1]


def _mean(values: list[float]) -> float:
    return log_mean_interval(values)[0]
