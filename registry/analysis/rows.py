"""Rows: what a run says about each implementation of each case, its replicates taken together.

The machine-readable side of the product: `kernelmark show RUN --json` prints these fields, the report and
MLflow show them. An unknown value is None, never 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeAlias, get_args

import msgspec
import numpy as np

from ..store.journal import Journal
from ..store.metric import Better, Metric
from ..store.processes import HIGHEST, as_judged, sampled, searches
from ..store.record import (
    EAGER,
    GPUS,
    PROVIDER,
    UNKNOWN,
    YARDSTICK,
    Cache,
    Case,
    Header,
    Key,
    Measurement,
    Pass,
    Record,
    Status,
    baseline,
    boards,
    ended,
    versions_count,
)
from .ceilings import ABOVE, Ceilings
from .statistics import (
    coefficients_of_variation,
    intervals,
    log_mean_intervals,
    matrices,
    means_and_sds,
    medians,
    quantiles,
    summaries,
)


class Value(msgspec.Struct, frozen=True):
    """One metric of a row over all replicates, in the metric's unit.

    `value` is the median over replicates of each process's value (or the largest, where the metric says so), with
    the 95 % interval of that; the spread is of all samples. `low` and `high` of a single process are its own
    samples' alone: pages that show an interval ask for `interval`.
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

    @property
    def interval(self) -> tuple[float | None, float | None]:
        """The 95 % interval over processes. A single one has none: its samples do not say how another would do."""
        return (self.low, self.high) if self.processes > 1 else (None, None)


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
    """What the device's own ceilings of the run allow, or what its workload measured as its limit, in the primary
    metric's unit; None where it is no time.
    """
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
        """Its 95 % interval over processes; none of a single process."""
        found = self.get(metric)
        return found.interval if found else (None, None)


@dataclass(eq=False)
class _Group:
    """The replicates of one implementation of one case, and how they ended together."""

    records: Sequence[Record]
    status: Status
    reason: str | None
    measured: Mapping[int, Measurement]
    """Measurements by replicate; empty unless the group as a whole is ok."""
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    """By metric each process's value, by replicate, where it has any."""
    metrics: dict[str, Value] = field(default_factory=dict)
    speedups: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Sequence[Record]) -> _Group:
        records = as_judged(records)
        status, reason = ended(records)
        ok = records if status == "ok" else ()
        return cls(records, status, reason, {x.replicate: x.measurement for x in ok if x.measurement is not None})

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def primary(self) -> str:
        return self.first.case.primary

    @property
    def made(self) -> Mapping[int, float]:
        """Each process's value of the primary metric."""
        return self.values[self.primary]

    @property
    def better(self) -> Better:
        return self.metrics[self.primary].better

    @property
    def competes(self) -> bool:
        """Whether its value says how good it is: of a search that kept no rate which it found it does not."""
        return self.metrics[self.primary].better != "neither" and (
            self.primary == HIGHEST or not searches(self.first.case)
        )

    @property
    def middle(self) -> float:
        return median(self.made.values())


_Samples: TypeAlias = tuple[_Group, Mapping[int, Sequence[float]]]
"""A group, and samples of one metric by replicate."""
Speedup: TypeAlias = tuple[float | None, float | None, float | None]
"""A value with its 95 % interval."""


def rows(journal: Journal, beside: bool = True) -> tuple[Row, ...]:
    """The rows of a run, in the order of operators, cases and implementations met.

    Without what is `beside` they have their primary metric alone, and no speedups.
    """
    ceilings = Ceilings.of(journal.ceilings)
    groups: dict[tuple[str, str, str], list[_Group]] = {}
    for group in _grouped(journal.records):
        case = group.first.case
        groups.setdefault((case.operator, case.name, group.first.cache), []).append(group)
    found = [x for peers in groups.values() for x in peers]
    metrics = {x.name: x for x in journal.header.metrics}
    metrics |= {x: journal.metric(x) for x in sorted({x.primary for x in found} - metrics.keys())}
    _measure(found, metrics, beside)
    if beside:
        _compare(groups.values(), journal.header.request.exchanged)
    out = [_row(x, journal.header, ceilings, metrics[x.primary], beside) for x in found]
    return tuple(sorted(by_own_limits(over_links(out)) if beside else out, key=_sort_key))


LINK, WIRE, BUS = "link_rate", "wire", "busbw"
"""What a GPU receives of others by copy engines; what a link carries at least of a collective that sends fewer
bytes than its array has, and of any other; in GB/s.
"""


def over_links(found: Sequence[Row]) -> list[Row]:
    """The rows, of which those of what goes over links alone have their limit by the fastest copies between as
    many GPUs of the same run, and not by the device's memory; none where the run has no copies.
    """
    rates: dict[int, float] = {}
    for row in found:
        if row.status == "ok" and (rate := row.metrics.get(LINK)) is not None:
            world = row.axes.get(GPUS, 1)
            rates[world] = max(rate.value, rates.get(world, 0.0))

    def limited(row: Row) -> Row:
        own = next((row.metrics[x] for x in (LINK, WIRE, BUS) if x in row.metrics), None)
        ms = row.value()
        if own is None or ms is None or row.axes.get(GPUS, 1) == 1:
            return row
        best = rates.get(row.axes[GPUS])
        share = own.value / best if best else None
        return msgspec.structs.replace(
            row,
            limit=None if share is None else share * ms,
            fraction_of_limit=share,
            above_limit=None if share is None else share > ABOVE,
        )

    return [limited(x) for x in found]


OWN_LIMITS = ("limit_fraction", "byte_fraction")
"""The shares that workloads give of their own limits: of a model's floor, by rates measured beside its steps."""


def by_own_limits(found: Sequence[Row]) -> list[Row]:
    """The rows, of which those whose workload measured a limit of its own have that one: a case's bytes and
    operations in one dtype say less of a whole step. Other rows of such a case have none.
    """

    def own(row: Row) -> Value | None:
        return next((row.metrics[x] for x in OWN_LIMITS if x in row.metrics), None)

    cases = {(x.operator, x.case, x.cache) for x in found if own(x) is not None}

    def limited(row: Row) -> Row:
        if (row.operator, row.case, row.cache) not in cases:
            return row
        share, value = own(row), row.value()
        if share is None or value is None:
            return msgspec.structs.replace(row, limit=None, fraction_of_limit=None, above_limit=None)
        return msgspec.structs.replace(
            row, limit=share.value * value, fraction_of_limit=share.value, above_limit=share.value > ABOVE
        )

    return [limited(x) for x in found]


def _grouped(records: Iterable[Record]) -> list[_Group]:
    """Groups in the order of operators, then in that in which their first replicates were measured."""
    found: dict[tuple[str, str, str, str], list[Record]] = {}
    for record in sorted(records, key=lambda x: x.replicate):
        case = record.case
        found.setdefault((case.operator, case.name, record.implementation, record.cache), []).append(record)
    groups = [_Group.of(x) for x in found.values()]
    return sorted(groups, key=lambda x: (x.first.case.operator, x.first.replicate))


def _sort_key(row: Row) -> tuple[object, ...]:
    passes = get_args(Pass)
    ours = 0 if row.provider == PROVIDER else 2 if row.provider == YARDSTICK else 1
    options = tuple((isinstance(x, str), x) for x in row.options.values())
    place = (passes.index(row.pass_), options, row.dtype, tuple(row.axes.values()))
    return (row.operator, place, row.cache, ours, row.implementation)


def _row(group: _Group, header: Header, ceilings: Ceilings, primary: Metric, beside: bool) -> Row:
    record, case = group.first, group.first.case
    timers = [x.measurement.timer for x in group.records if x.measurement is not None]
    timer = timers[0] if timers else None
    parts = [header.key, case.operator, case.name, case.spec, timer or "", record.cache]
    if versions_count(header.conditions):
        parts.append(record.version or "")
    text = "/".join(parts)
    limit = ceilings.limit_ms(case, record.cache) if primary.unit == "ms" else None
    return Row(
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
        status=group.status,
        reason=group.reason,
        key=hashlib.sha256(text.encode()).hexdigest()[:16],
        primary=case.primary,
        timer=timer,
        bytes=case.bytes or None,
        flops=case.flops or None,
        limit=limit,
        **(_measured(group, limit, beside) if group.measured else {}),
        **group.speedups,
    )


def _measured(group: _Group, limit: float | None, beside: bool) -> dict[str, Any]:
    """What a row says where it was measured."""
    case, measured = group.first.case, group.measured
    time = group.metrics[case.primary]
    fraction = limit / 1e3 / (time.value / 1e3) if limit and time.value > 0 else None
    clocks = [x.telemetry.sm_mhz for x in measured.values() if x.telemetry is not None and x.telemetry.sm_mhz]
    samples = sum(len(x.samples[sampled(case, x)]) for x in measured.values())
    return {
        "metrics": group.metrics | derived(case, time) if beside else group.metrics,
        "replicates": len(measured),
        "converged": all(x.converged for x in measured.values()),
        "throttled": sum(len(x.throttled) for x in measured.values()) * 2 > samples,
        "fraction_of_limit": fraction,
        "above_limit": None if fraction is None else fraction > ABOVE,
        "sm_mhz": (min(x[0] for x in clocks), max(x[1] for x in clocks)) if clocks else None,
        "tuning": next((x.tuning for x in measured.values() if x.tuning), {}),
    }


def _measure(groups: Iterable[_Group], metrics: Mapping[str, Metric], beside: bool) -> None:
    """Puts each process's value of each metric, and the row's, into the groups that have it."""
    having: dict[str, list[_Samples]] = {x: [] for x in metrics}
    for group in groups:
        found: dict[str, dict[int, Sequence[float]]] = {}
        for replicate, measurement in group.measured.items():
            for name, samples in measurement.samples.items():
                if name in metrics and (beside or name == group.primary):
                    found.setdefault(name, {})[replicate] = samples
        for name, by_replicate in found.items():
            having[name].append((group, by_replicate))
    for name, metric in metrics.items():
        _measure_one(having.pop(name), metric)


def _measure_one(having: Sequence[_Samples], metric: Metric) -> None:
    name = metric.name
    values = iter(summaries([x for _, found in having for x in found.values()], metric.summary))
    for group, found in having:
        group.values[name] = {replicate: next(values) for replicate in found}
    processes = [[*group.values[name].values()] for group, _ in having]
    bounds = intervals(processes, [next(iter(found.values())) for _, found in having], metric.summary)
    spreads = coefficients_of_variation(processes)
    for places, matrix in matrices([[*found.values()] for _, found in having]):
        means, sds = means_and_sds(matrix)
        ordered = np.sort(matrix)
        columns = [means, medians(ordered), ordered[:, 0], ordered[:, -1]]
        columns += [quantiles(ordered, x) for x in (0.05, 0.2, 0.8, 0.95)]
        deviations = [None] * len(places) if sds is None else sds.tolist()
        for place, sd, figures in zip(places, deviations, np.stack(columns, axis=1).tolist(), strict=True):
            mean, middle, minimum, maximum, p5, p20, p80, p95 = figures
            made = processes[place]
            value = max(made) if metric.across == "maximum" else median(made)
            low, high = bounds[place]
            if high is not None:  # that of the middle, which the largest may lie above
                high = max(high, value)
            having[place][0].metrics[name] = Value(
                value=value,
                unit=metric.unit,
                better=metric.better,
                processes=len(made),
                samples=matrix.shape[1],
                low=low,
                high=high,
                cv_between=spreads[place],
                mean=mean,
                median=middle,
                sd=sd,
                minimum=minimum,
                maximum=maximum,
                p5=p5,
                p20=p20,
                p80=p80,
                p95=p95,
            )


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
            high=amount / (time.low / 1e3) / scale if time.low and time.low > 0 else None,
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


def _compare(cases: Iterable[Sequence[_Group]], exchanged: Collection[tuple[str, str, str]]) -> None:
    """Puts into the groups of each case their speedups over its best correct baseline and over eager. Systems
    that are there for an exchange alone (operator, case, implementation) are no baselines, and have their worth
    instead.

    Replicates pair up: both sides ran in the same process, minutes apart at most, so that the ratio's
    interval rests on the ratios within processes and not on two separate spreads.
    """
    pairs: list[tuple[_Group, _Group]] = []
    for peers in cases:
        measured = [
            x
            for x in peers
            if x.measured and x.competes
            if (x.first.case.operator, x.first.case.name, x.first.implementation) not in exchanged
        ]
        baselines = [x for x in measured if baseline(x.first.provider, x.first.implementation)]
        eager = next((x for x in baselines if x.first.implementation == EAGER), None)
        best = _best(baselines)
        for group in measured:
            group.speedups["speedup_vs_eager"] = _ratio(eager.made, group.made, group.better) if eager else None
            if best is not None:
                group.speedups["best_baseline"] = best.first.implementation
                pairs.append((best, group))
    found = speedups([(best.made, group.made, group.better) for best, group in pairs])
    for (_, group), (value, low, high) in zip(pairs, found, strict=True):
        group.speedups |= {
            "speedup_vs_best_baseline": value,
            "speedup_ci_low": low,
            "speedup_ci_high": high,
        }


def _best(baselines: Iterable[_Group]) -> _Group | None:
    """The best by its middle, unless another is better in the processes that both have: one that was lost where
    the machine was slow is not the faster for it.
    """
    ordered = sorted(baselines, key=lambda x: x.middle if x.better == "lower" else -x.middle)
    best = next(iter(ordered), None)
    for x in ordered[1:]:
        assert best is not None
        if (gain := _ratio(best.made, x.made, x.better)) is not None and gain > 1:
            best = x
    return best


def speedup(base: Mapping[int, float], other: Mapping[int, float], better: Better = "lower") -> Speedup:
    """How many times better `other` is than `base`, with the 95 % interval over paired replicates.

    Values by replicate. The interval is None where fewer than two replicates pair up.
    """
    return speedups([(base, other, better)])[0]


def speedups(pairs: Sequence[tuple[Mapping[int, float], Mapping[int, float], Better]]) -> list[Speedup]:
    """`speedup` of each pair."""
    out: list[Speedup] = []
    paired: list[int] = []
    ratios: list[list[float]] = []
    for base, other, better in pairs:
        value = _ratio(base, other, better)
        common = sorted(base.keys() & other.keys())
        if value is not None and len(common) > 1:
            slower, faster = (other, base) if better == "higher" else (base, other)
            paired.append(len(out))
            ratios.append([slower[x] / faster[x] for x in common])
        out.append((value, None, None))
    for place, (_, low, high) in zip(paired, log_mean_intervals(ratios), strict=True):
        value = out[place][0]
        assert value is not None
        out[place] = value, min(low, value), max(high, value) if math.isfinite(high) else None
    return out


def _ratio(base: Mapping[int, float], other: Mapping[int, float], better: Better) -> float | None:
    """Of the medians over the processes that have both, or of all where none has; None where a value is not
    positive, or there is none.
    """
    # A process that one side has alone may have met another state of the machine.
    if common := base.keys() & other.keys():
        base, other = {x: base[x] for x in common}, {x: other[x] for x in common}
    if not base or not other or min(*base.values(), *other.values()) <= 0:
        return None
    if better == "higher":
        base, other = other, base
    return median(base.values()) / median(other.values())


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
        "boards": sorted(boards(journal.header, journal.records) - {UNKNOWN}),
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
    for name, (metric, what) in _BEFORE.items():
        value = row.get(metric)
        found[name] = getattr(value, what) if value else 0 if name == "samples" else None
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
