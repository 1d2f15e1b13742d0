"""Rows: what a run says about each implementation of each case, its replicates taken together.

The machine-readable side of the product: `kernelmark show RUN --json` prints these fields, the report and
MLflow show them. An unknown value is None, never 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec
import numpy as np

from ..store.journal import Journal
from ..store.record import EAGER, PROVIDER, YARDSTICK, Cache, Measurement, Pass, Record, Status, rival
from .ceilings import Ceilings
from .statistics import coefficient_of_variation, log_mean_interval, median_interval


class Row(msgspec.Struct, frozen=True, rename={"pass_": "pass"}):
    """One implementation of one case in one cache state, over all replicates of a run.

    `status` is "ok" if any replicate is, unless another one was incorrect: a wrong answer is never
    outvoted. `reason` is set wherever a replicate did not end well.
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
    """Comparability of this row: run conditions, case definition, timer and cache."""
    timer: str | None = None
    replicates: int = 0
    """Replicates that ended well."""
    samples: int = 0
    converged: bool | None = None
    throttled: bool | None = None
    """True if more than half of the samples were taken while a throttle reason was raised."""
    latency_ms: float | None = None
    ci_low_ms: float | None = None
    ci_high_ms: float | None = None
    cv_between: float | None = None
    """Coefficient of variation of the replicates' medians: the noise between processes."""
    mean_ms: float | None = None
    sd_ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    p5_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    p95_ms: float | None = None
    launch_latency_ms: float | None = None
    """Median host time of single calls, launch and synchronization included."""
    conversion_ms: float | None = None
    """Median over replicates of the layout conversion that the library forces on its user: a part of the latency,
    timed alone with the same timer and cache state."""
    bytes: int | None = None
    flops: int | None = None
    gbps: float | None = None
    tflops: float | None = None
    tokens_per_s: float | None = None
    limit_ms: float | None = None
    fraction_of_limit: float | None = None
    speedup_vs_best_baseline: float | None = None
    speedup_ci_low: float | None = None
    speedup_ci_high: float | None = None
    best_baseline: str | None = None
    speedup_vs_eager: float | None = None
    peak_memory_bytes: int | None = None
    energy_j: float | None = None
    error: float | None = None
    sm_mhz: tuple[int, int] | None = None
    tuning: dict[str, str] = {}

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What tells a row from the others of its run."""
        return (self.operator, self.case, self.implementation, self.cache)


@dataclass(frozen=True)
class _Group:
    """The replicates of one implementation of one case."""

    records: tuple[Record, ...]

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def status(self) -> tuple[Status, str | None]:
        bad = [x for x in self.records if x.status != "ok"]
        if not bad:
            return "ok", None
        wrong = next((x for x in bad if x.status == "incorrect"), None)
        chosen = wrong or bad[0]
        if wrong is None and len(bad) < len(self.records):
            return "ok", f"{len(bad)} of {len(self.records)} replicates: {chosen.status}: {chosen.reason}"
        return chosen.status, chosen.reason

    @property
    def medians(self) -> dict[int, float]:
        """Median latency by replicate; empty unless the group as a whole is ok."""
        if self.status[0] != "ok":
            return {}
        return {x.replicate: median(x.measurement.samples_ms) for x in self.records if x.measurement}


def rows(journal: Journal) -> tuple[Row, ...]:
    """The rows of a run, in the order of operators, cases and implementations met."""
    ceilings = Ceilings.of(journal.ceilings)
    groups: dict[tuple[str, str, str], list[_Group]] = {}
    by_identity: dict[tuple[str, str, str, str], list[Record]] = {}
    for record in sorted(journal.records, key=lambda x: (x.case.operator, x.replicate)):
        by_identity.setdefault(record.identity[:4], []).append(record)
    for (operator, case, _, cache), records in by_identity.items():
        groups.setdefault((operator, case, cache), []).append(_Group(tuple(records)))
    out = [_row(group, peers, ceilings, journal.header.key) for peers in groups.values() for group in peers]
    return tuple(sorted(out, key=_sort_key))


def _sort_key(row: Row) -> tuple[object, ...]:
    passes = ("forward", "backward", "forward_backward")
    ours = 0 if row.provider == PROVIDER else 2 if row.provider == YARDSTICK else 1
    options = tuple((isinstance(x, str), x) for x in row.options.values())
    place = (passes.index(row.pass_), options, row.dtype, tuple(row.axes.values()))
    return (row.operator, place, row.cache, ours, row.implementation)


def _row(group: _Group, peers: Sequence[_Group], ceilings: Ceilings, run_key: str) -> Row:
    record, (status, reason) = group.first, group.status
    case = record.case
    measured = [x.measurement for x in group.records if x.measurement is not None]
    timer = measured[0].timer if measured else None
    text = "/".join((run_key, case.operator, case.name, case.spec, timer or "", record.cache))
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
        timer=timer,
        bytes=case.bytes or None,
        flops=case.flops or None,
        limit_ms=ceilings.limit_ms(case),
    )
    if not group.medians:
        return bare
    return msgspec.structs.replace(
        bare, **_times(group, measured), **_derived(group, bare, measured), **_speedups(group, peers)
    )


def _times(group: _Group, measured: Sequence[Measurement]) -> dict[str, Any]:
    medians = list(group.medians.values())
    samples = np.concatenate([np.asarray(x.samples_ms) for x in measured])
    low, high = interval(medians, measured)
    p5, p20, p80, p95 = (float(x) for x in np.percentile(samples, [5, 20, 80, 95]))
    return {
        "latency_ms": median(medians),
        "ci_low_ms": low,
        "ci_high_ms": high,
        "cv_between": coefficient_of_variation(medians),
        "mean_ms": float(samples.mean()),
        "sd_ms": float(samples.std(ddof=1)) if len(samples) > 1 else None,
        "min_ms": float(samples.min()),
        "max_ms": float(samples.max()),
        "p5_ms": p5,
        "p20_ms": p20,
        "p80_ms": p80,
        "p95_ms": p95,
        "samples": len(samples),
        "replicates": len(medians),
        "converged": all(x.converged for x in measured),
        "throttled": sum(len(x.throttled) for x in measured) * 2 > len(samples),
        "launch_latency_ms": _median(x for y in measured for x in y.launch_ms),
        "conversion_ms": _median(x.conversion_ms for x in measured if x.conversion_ms is not None),
    }


def interval(medians: Sequence[float], measured: Sequence[Measurement]) -> tuple[float | None, float | None]:
    """The 95 % interval of a row's latency.

    The unit is the process: t over the logarithms of the replicates' medians, stretched to hold the latency
    itself. A single replicate has only its own iterations to go by, and gets the interval of their median.
    None where there are too few of them, or where a time is 0 and has no logarithm.
    """
    if min(medians) <= 0:
        return None, None
    if len(medians) == 1:
        return median_interval(measured[0].samples_ms) or (None, None)
    _, low, high = log_mean_interval(medians)
    return min(low, median(medians)), max(high, median(medians))


def _derived(group: _Group, bare: Row, measured: Sequence[Measurement]) -> dict[str, Any]:
    seconds = median(group.medians.values()) / 1e3
    tokens = group.first.case.tokens
    clocks = [x.telemetry.sm_mhz for x in measured if x.telemetry is not None and x.telemetry.sm_mhz]
    return {
        "gbps": bare.bytes / seconds / 1e9 if bare.bytes and seconds > 0 else None,
        "tflops": bare.flops / seconds / 1e12 if bare.flops and seconds > 0 else None,
        "tokens_per_s": tokens / seconds if tokens and seconds > 0 else None,
        "fraction_of_limit": bare.limit_ms / 1e3 / seconds if bare.limit_ms and seconds > 0 else None,
        "peak_memory_bytes": max(
            (x.peak_memory_bytes for x in measured if x.peak_memory_bytes is not None), default=None
        ),
        "energy_j": _median(x.energy_j for x in measured if x.energy_j is not None),
        "error": max((x.error for x in measured if x.error is not None), default=None),
        "sm_mhz": (min(x[0] for x in clocks), max(x[1] for x in clocks)) if clocks else None,
        "tuning": measured[0].tuning,
    }


def _speedups(group: _Group, peers: Sequence[_Group]) -> dict[str, Any]:
    """Speedups over the fastest correct baseline and over eager.

    Replicates pair up: both sides ran in the same process, minutes apart at most, so that the ratio's
    interval rests on the ratios within processes and not on two separate spreads.
    """
    baselines = [x for x in peers if x.medians and rival(x.first.provider, x.first.implementation)]
    best = min(baselines, key=lambda x: median(x.medians.values()), default=None)
    eager = next((x for x in baselines if x.first.implementation == EAGER), None)
    out: dict[str, Any] = {"speedup_vs_eager": speedup(eager.medians, group.medians)[0] if eager else None}
    if best is not None:
        value, low, high = speedup(best.medians, group.medians)
        out |= {
            "speedup_vs_best_baseline": value,
            "speedup_ci_low": low,
            "speedup_ci_high": high,
            "best_baseline": best.first.implementation,
        }
    return out


def speedup(base: dict[int, float], other: dict[int, float]) -> tuple[float | None, float | None, float | None]:
    """How many times faster `other` is than `base`, with the 95 % interval over paired replicates.

    Medians in milliseconds by replicate. The interval is None where fewer than two replicates pair up.
    """
    if not base or not other or min(*base.values(), *other.values()) <= 0:
        return None, None, None
    value = median(base.values()) / median(other.values())
    ratios = [base[x] / other[x] for x in sorted(base.keys() & other.keys())]
    if len(ratios) < 2:
        return value, None, None
    _, low, high = log_mean_interval(ratios)
    return value, min(low, value), max(high, value)


def _median(values: Iterable[float]) -> float | None:
    listed = [x for x in values if math.isfinite(x)]
    return median(listed) if listed else None


def category(row: Row) -> str | None:
    """What the speedup's interval supports: its lower bound decides, so that chance earns no praise."""
    low, high = row.speedup_ci_low, row.speedup_ci_high
    if low is None or high is None:
        return None
    if high < 1.0:
        return "investigate"
    if low >= 1.5:
        return "excellent"
    if low >= 1.2:
        return "good"
    return "measured" if low >= 1.0 else "no difference shown"


def summarize(journal: Journal) -> dict[str, Any]:
    """A run as `kernelmark show --json` prints it: the header, how time was spent, and the rows."""
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
        "rows": [msgspec.to_builtins(x) for x in rows(journal)],
    }


def spent(journal: Journal) -> dict[str, float]:
    """Seconds per stage over all sessions of a run."""
    out: dict[str, float] = {}
    for footer in journal.footers:
        for name, seconds in footer.spent_s.items():
            out[name] = out.get(name, 0.0) + seconds
    return out
