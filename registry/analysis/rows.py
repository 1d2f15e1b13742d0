"""Rows: what a run says about each implementation of each case, its replicates taken together.

The machine-readable side of the product: `kernelmark show RUN --json` prints these fields, the report and
MLflow show them. An unknown value is None, never 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, get_args

import msgspec
import numpy as np

from ..store.journal import Journal
from ..store.metric import Better, Metric, summarized
from ..store.record import (
    EAGER,
    PROVIDER,
    YARDSTICK,
    Cache,
    Case,
    Key,
    Measurement,
    Pass,
    Record,
    Status,
    baseline,
    ended,
    versions_count,
)
from .ceilings import ABOVE, Ceilings
from .statistics import coefficient_of_variation, log_mean_interval, mean_and_sd, median_interval


class Value(msgspec.Struct, frozen=True):
    """One metric of a row over all replicates, in the metric's unit.

    `value` is the median over replicates of each process's value (or the largest, where the metric says so), with
    the 95 % interval of that; the spread is of all samples.
    """

    value: float
    unit: str
    better: Better
    processes: int
    samples: int
    low: float | None = None
    high: float | None = None
    cv_between: float | None = None
    """Coefficient of variation of the processes' values: the noise between processes."""
    mean: float | None = None
    median: float | None = None
    sd: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    p5: float | None = None
    p20: float | None = None
    p80: float | None = None
    p95: float | None = None


class Row(msgspec.Struct, frozen=True, rename={"pass_": "pass"}):
    """One implementation of one case in one cache state, over all replicates of a run.

    `status` is how its processes ended together (`record.ended`). `reason` is set wherever a replicate did not end
    well. Speedups and the fraction of the limit are of the primary metric.
    """

    operator: str
    case: str
    axes: dict[str, int]
    options: dict[str, bool | int | float | str]
    dtype: str
    pass_: Pass
    implementation: str
    provider: str
    version: str | None
    cache: Cache
    status: Status
    reason: str | None
    key: str
    """Comparability of this row: run conditions, case definition, its library's version, timer and cache."""
    primary: str = "latency"
    metrics: dict[str, Value] = {}
    """What was measured, and what follows from it and the case's own numbers, by the metric's name."""
    timer: str | None = None
    replicates: int = 0
    """Replicates that ended well."""
    converged: bool | None = None
    throttled: bool | None = None
    """True if more than half of the samples were taken while a throttle reason was raised."""
    bytes: int | None = None
    flops: int | None = None
    limit: float | None = None
    """What the device's own ceilings of the run allow, in the primary metric's unit; None where it is no time."""
    fraction_of_limit: float | None = None
    above_limit: bool | None = None
    """Whether it passes its limit by more than measuring it twice would: then the limit is none."""
    speedup_vs_best_baseline: float | None = None
    speedup_ci_low: float | None = None
    speedup_ci_high: float | None = None
    best_baseline: str | None = None
    speedup_vs_eager: float | None = None
    sm_mhz: tuple[int, int] | None = None
    tuning: dict[str, str] = {}

    @property
    def identity(self) -> Key:
        """What tells a row from the others of its run."""
        return Key(self.operator, self.case, self.implementation, self.cache)

    def get(self, metric: str | None = None) -> Value | None:
        """A metric of the row, the primary one by default; None where it has none."""
        return self.metrics.get(metric or self.primary)

    def value(self, metric: str | None = None) -> float | None:
        """Its value."""
        found = self.get(metric)
        return found.value if found else None

    def bounds(self, metric: str | None = None) -> tuple[float | None, float | None]:
        """Its 95 % interval."""
        found = self.get(metric)
        return (found.low, found.high) if found else (None, None)


@dataclass(frozen=True)
class _Group:
    """The replicates of one implementation of one case."""

    records: tuple[Record, ...]

    @property
    def first(self) -> Record:
        return self.records[0]

    @cached_property
    def status(self) -> tuple[Status, str | None]:
        return ended(self.records)

    @cached_property
    def measured(self) -> dict[int, Measurement]:
        """Measurements by replicate; empty unless the group as a whole is ok."""
        if self.status[0] != "ok":
            return {}
        return {x.replicate: x.measurement for x in self.records if x.measurement is not None}

    @cached_property
    def _values(self) -> dict[str, dict[int, float]]:
        return {}

    def values(self, metric: Metric) -> dict[int, float]:
        """Each process's value of a metric, by replicate, where it has any."""
        if metric.name not in self._values:
            self._values[metric.name] = {
                replicate: summarized(x.samples[metric.name], metric.summary)
                for replicate, x in self.measured.items()
                if metric.name in x.samples
            }
        return self._values[metric.name]


def rows(journal: Journal) -> tuple[Row, ...]:
    """The rows of a run, in the order of operators, cases and implementations met."""
    ceilings = Ceilings.of(journal.ceilings)
    groups: dict[tuple[str, str, str], list[_Group]] = {}
    by_identity: dict[Key, list[Record]] = {}
    for record in sorted(journal.records, key=lambda x: (x.case.operator, x.replicate)):
        by_identity.setdefault(record.identity, []).append(record)
    for key, records in by_identity.items():
        groups.setdefault((key.operator, key.case, key.cache), []).append(_Group(tuple(records)))
    out = [_row(group, peers, ceilings, journal) for peers in groups.values() for group in peers]
    return tuple(sorted(out, key=_sort_key))


def _sort_key(row: Row) -> tuple[object, ...]:
    passes = get_args(Pass)
    ours = 0 if row.provider == PROVIDER else 2 if row.provider == YARDSTICK else 1
    options = tuple((isinstance(x, str), x) for x in row.options.values())
    place = (passes.index(row.pass_), options, row.dtype, tuple(row.axes.values()))
    return (row.operator, place, row.cache, ours, row.implementation)


def _row(group: _Group, peers: Sequence[_Group], ceilings: Ceilings, journal: Journal) -> Row:
    record, (status, reason) = group.first, group.status
    case = record.case
    timers = [x.measurement.timer for x in group.records if x.measurement is not None]
    timer = timers[0] if timers else None
    parts = [journal.header.key, case.operator, case.name, case.spec, timer or "", record.cache]
    if versions_count(journal.header.conditions):
        parts.append(record.version or "")
    text = "/".join(parts)
    bare = Row(
        operator=case.operator,
        case=case.name,
        axes=case.axes,
        options=case.options,
        dtype=case.dtype,
        pass_=case.pass_,
        implementation=record.implementation,
        provider=record.provider,
        version=record.version,
        cache=record.cache,
        status=status,
        reason=reason,
        key=hashlib.sha256(text.encode()).hexdigest()[:16],
        primary=case.primary,
        timer=timer,
        bytes=case.bytes or None,
        flops=case.flops or None,
        limit=ceilings.limit_ms(case, record.cache) if journal.metric(case.primary).unit == "ms" else None,
    )
    measured = group.measured
    if not measured:
        return bare
    found = {
        x.name: _value(group, x)
        for x in journal.header.metrics
        if any(x.name in y.samples for y in measured.values())
    }
    found |= derived(case, found[case.primary])
    fraction = (
        bare.limit / 1e3 / (value / 1e3) if bare.limit and (value := found[case.primary].value) > 0 else None
    )
    clocks = [x.telemetry.sm_mhz for x in measured.values() if x.telemetry is not None and x.telemetry.sm_mhz]
    samples = [x.samples[case.primary] for x in measured.values()]
    return msgspec.structs.replace(
        bare,
        metrics=found,
        replicates=len(measured),
        converged=all(x.converged for x in measured.values()),
        throttled=sum(len(x.throttled) for x in measured.values()) * 2 > sum(map(len, samples)),
        fraction_of_limit=fraction,
        above_limit=None if fraction is None else fraction > ABOVE,
        sm_mhz=(min(x[0] for x in clocks), max(x[1] for x in clocks)) if clocks else None,
        tuning=next((x.tuning for x in measured.values() if x.tuning), {}),
        **_speedups(group, peers, journal.metric(case.primary)),
    )


def _value(group: _Group, metric: Metric) -> Value:
    """One metric of a row."""
    values = list(group.values(metric).values())
    by_process = [x.samples[metric.name] for x in group.measured.values() if metric.name in x.samples]
    samples = np.asarray([x for process in by_process for x in process], dtype=np.float64)
    ordered = sorted(samples.tolist())
    low, high = interval(values, by_process[0])
    p5, p20, p80, p95 = (_quantile(ordered, x) for x in (0.05, 0.2, 0.8, 0.95))
    mean, sd = mean_and_sd(samples)
    return Value(
        value=max(values) if metric.across == "maximum" else median(values),
        unit=metric.unit,
        better=metric.better,
        processes=len(values),
        samples=len(samples),
        low=low,
        high=high,
        cv_between=coefficient_of_variation(values),
        mean=mean,
        median=median(ordered),
        sd=sd,
        minimum=ordered[0],
        maximum=ordered[-1],
        p5=p5,
        p20=p20,
        p80=p80,
        p95=p95,
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of sorted values, with a straight line between two of them, as NumPy has it by default."""
    place = (len(ordered) - 1) * share
    below = int(place)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    rest = place - below
    return low + (high - low) * rest if rest < 0.5 else high - (high - low) * (1 - rest)


def derived(case: Case, time: Value) -> dict[str, Value]:
    """What follows from a time and the case's own numbers: the least bytes, operations and tokens over it."""
    if time.unit != "ms" or time.value <= 0:
        return {}
    return {
        metric.name: Value(
            value=amount / (time.value / 1e3) / scale,
            unit=metric.unit,
            better="higher",
            processes=time.processes,
            samples=time.samples,
            low=amount / (time.high / 1e3) / scale if time.high else None,
            high=amount / (time.low / 1e3) / scale if time.low else None,
        )
        for metric, amount, scale in (
            (BANDWIDTH, case.bytes, 1e9),
            (THROUGHPUT, case.flops, 1e12),
            (TOKENS, case.tokens, 1.0),
        )
        if amount
    }


BANDWIDTH = Metric("bandwidth", "GB/s", "higher", shown="table")
THROUGHPUT = Metric("throughput", "TFLOP/s", "higher", shown="table")
TOKENS = Metric("tokens", "tokens/s", "higher")
DERIVED = (BANDWIDTH, THROUGHPUT, TOKENS)
"""What follows from a time, as `derived` makes it."""


def interval(values: Sequence[float], samples: Sequence[float]) -> tuple[float | None, float | None]:
    """The 95 % interval of a metric's value over processes.

    The unit is the process: t over the logarithms of the processes' values, stretched to hold the value itself. A
    single process has only its own `samples` to go by, and gets the interval of their median. None where there are
    too few of them, or where a value is not positive and has no logarithm.
    """
    if min(values) <= 0:
        return None, None
    if len(values) == 1:
        return median_interval(samples) or (None, None)
    _, low, high = log_mean_interval(values)
    return min(low, median(values)), max(high, median(values)) if math.isfinite(high) else None


def _speedups(group: _Group, peers: Sequence[_Group], metric: Metric) -> dict[str, Any]:
    """Speedups over the best correct baseline and over eager, by the primary metric.

    Replicates pair up: both sides ran in the same process, minutes apart at most, so that the ratio's
    interval rests on the ratios within processes and not on two separate spreads.
    """
    if metric.better == "neither":
        return {}
    baselines = [x for x in peers if x.measured and baseline(x.first.provider, x.first.implementation)]
    sign = 1 if metric.better == "lower" else -1
    best = min(baselines, key=lambda x: sign * median(x.values(metric).values()), default=None)
    eager = next((x for x in baselines if x.first.implementation == EAGER), None)
    own = group.values(metric)
    out: dict[str, Any] = {
        "speedup_vs_eager": speedup(eager.values(metric), own, metric.better)[0] if eager else None
    }
    if best is not None:
        value, low, high = speedup(best.values(metric), own, metric.better)
        out |= {
            "speedup_vs_best_baseline": value,
            "speedup_ci_low": low,
            "speedup_ci_high": high,
            "best_baseline": best.first.implementation,
        }
    return out


def speedup(
    base: Mapping[int, float], other: Mapping[int, float], better: Better = "lower"
) -> tuple[float | None, float | None, float | None]:
    """How many times better `other` is than `base`, with the 95 % interval over paired replicates.

    Values by replicate. The interval is None where fewer than two replicates pair up.
    """
    if not base or not other or min(*base.values(), *other.values()) <= 0:
        return None, None, None
    if better == "higher":
        base, other = other, base
    value = median(base.values()) / median(other.values())
    ratios = [base[x] / other[x] for x in sorted(base.keys() & other.keys())]
    if len(ratios) < 2:
        return value, None, None
    _, low, high = log_mean_interval(ratios)
    return value, min(low, value), max(high, value) if math.isfinite(high) else None


FASTER = ("excellent", "good", "faster")
"""The categories of a row that is faster."""


def category(row: Row) -> str | None:
    """What the speedup's interval supports; None without one. `faster` has two grades, `excellent` from 1.5 on and
    `good` from 1.2. The lower bound decides, so that noise cannot earn a better label.
    """
    low, high = row.speedup_ci_low, row.speedup_ci_high
    if low is None or high is None:
        return None
    if high < 1.0:
        return "slower"
    if low >= 1.5:
        return "excellent"
    if low >= 1.2:
        return "good"
    return "faster" if low >= 1.0 else "undecided"


def summarize(journal: Journal, chosen: Iterable[Row] | None = None) -> dict[str, Any]:
    """A run as `kernelmark show --json` prints it: the header, how time was spent, and the rows, or the `chosen`
    ones of them.
    """
    found = rows(journal) if chosen is None else chosen
    return {**described(journal), "rows": [msgspec.to_builtins(x) | named_before(x) for x in found]}


def described(journal: Journal) -> dict[str, Any]:
    """A run without its rows."""
    header = msgspec.to_builtins(journal.header)
    return {
        **{
            name: header[name]
            for name in ("run", "created", "harness", "commit", "dirty", "plan", "seed", "device")
        },
        "replicates": journal.header.replicates,
        "comparability_key": journal.header.key,
        "conditions": header["conditions"],
        "environment": header["environment"],
        "complete": any(x.complete for x in journal.footers),
        "torn": journal.torn,
        "wall_s": sum(x.wall_s for x in journal.footers) or None,
        "spent_s": spent(journal),
        "ceilings": Ceilings.of(journal.ceilings).summary(),
        "metrics": header["metrics"] + msgspec.to_builtins(DERIVED),
    }


_BEFORE: Mapping[str, tuple[str, str]] = {
    "samples": ("latency", "samples"),
    "latency_ms": ("latency", "value"),
    "ci_low_ms": ("latency", "low"),
    "ci_high_ms": ("latency", "high"),
    "cv_between": ("latency", "cv_between"),
    "mean_ms": ("latency", "mean"),
    "sd_ms": ("latency", "sd"),
    "min_ms": ("latency", "minimum"),
    "max_ms": ("latency", "maximum"),
    "p5_ms": ("latency", "p5"),
    "p20_ms": ("latency", "p20"),
    "p80_ms": ("latency", "p80"),
    "p95_ms": ("latency", "p95"),
    "launch_latency_ms": ("launch", "median"),
    "conversion_ms": ("conversion", "value"),
    "gbps": ("bandwidth", "value"),
    "tflops": ("throughput", "value"),
    "tokens_per_s": ("tokens", "value"),
    "peak_memory_bytes": ("memory", "value"),
    "energy_j": ("energy", "value"),
    "error": ("error", "value"),
}
"""Names that `show --json` had before metrics were data: the metric and what of it."""


def named_before(row: Row) -> dict[str, Any]:
    """An operator's metrics by the names that they had in `show --json` before schema 2."""
    found: dict[str, Any] = {"limit_ms": row.limit if row.primary == "latency" else None}
    for name, (metric, field) in _BEFORE.items():
        value = row.get(metric)
        found[name] = getattr(value, field) if value else 0 if name == "samples" else None
    if found["peak_memory_bytes"] is not None:
        found["peak_memory_bytes"] = int(found["peak_memory_bytes"])
    return found


def spent(journal: Journal) -> dict[str, float]:
    """Seconds per stage over all sessions of a run."""
    out: dict[str, float] = {}
    for footer in journal.footers:
        for name, seconds in footer.spent_s.items():
            out[name] = out.get(name, 0.0) + seconds
    return out
