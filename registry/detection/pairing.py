"""From records of two commits to comparisons: which rows and processes belong together. Decides nothing.

A replicate is a process; A/B pairs are replicates of the same number. Rows pair up by operator, case,
implementation and cache state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median

from ..store.metric import LATENCY, OPERATOR_METRICS, Metric
from ..store.processes import by_replicate, by_row, measurements, sampled, tunings, value
from ..store.record import PROVIDER, VERSION, Header, Key, Record, ended, versions_count
from .comparison import Comparison, History, Side


def differing(base: Header, current: Header, allowed: Collection[str] = ()) -> tuple[str, ...]:
    """The comparability conditions in which two runs differ, with both values.

    `allowed` names conditions that may differ because they are what is compared.
    """
    names = (base.conditions.keys() | current.conditions.keys()) - set(allowed)
    return differing_in(sorted(names), base, current)


def differing_in(names: Iterable[str], base: Header, current: Header) -> tuple[str, ...]:
    """Those of these conditions in which two runs differ, with both values."""
    return tuple(
        f"{name}: {_value(base, name)} / {_value(current, name)}"
        for name in names
        if _value(base, name) != _value(current, name)
    )


def side(records: Sequence[Record], replicates: int, metrics: Sequence[Metric] = OPERATOR_METRICS) -> Side:
    """One commit's records of one row; replicates that left no record count as missing values.

    `metrics` is what the samples mean.
    """
    if not records:
        return Side(status=None)
    numbered = by_replicate(records)
    measured = measurements(numbered, replicates)
    failures = Counter[str](r.status for r in numbered.values() if r.status != "ok")
    status, reason = ended(tuple(numbered.values()))
    primary = records[0].case.primary
    known = {x.name: x for x in metrics}
    case = records[0].case
    throttled = [len(m.throttled) >= len(m.samples[sampled(case, m)]) > 0 for m in measured if m is not None]
    clocks = [sum(x.sm_mhz) / 2 for m in measured if m and (x := m.telemetry) and x.sm_mhz]
    return Side(
        status=status,
        reason=reason,
        medians=tuple(value(m, known.get(primary, LATENCY)) for m in measured),
        metrics={
            name: values
            for name, metric in known.items()
            if name != primary and metric.judged is not None
            if not all(map(math.isnan, values := tuple(value(m, metric) for m in measured)))
        },
        failures=dict(failures),
        throttled=sum(throttled) / len(throttled) if throttled else 0.0,
        clock=median(clocks) if clocks else None,
    )


def pair(
    base: tuple[Header, Iterable[Record]],
    current: tuple[Header, Iterable[Record]],
    histories: Mapping[Key, History] | None = None,
    *,
    allowed: Collection[str] = (),
    controls: Collection[str] | None = None,
) -> list[Comparison]:
    """All rows of two runs, side by side.

    `histories` is what earlier runs under the same comparability key say. `allowed` names conditions that
    may differ. `controls` names the implementations whose code the two commits share; left out, it is those
    of other providers.
    """
    differ = differing(base[0], current[0], allowed)
    rows_base, rows_current = by_row(base[1]), by_row(current[1])
    metrics = current[0].metrics
    # Where only one side's versions count its conditions differ as it is.
    free = () if versions_count(base[0].conditions) and versions_count(current[0].conditions) else (VERSION,)
    out = []
    for key in dict.fromkeys([*rows_base, *rows_current]):
        before, after = rows_base.get(key, []), rows_current.get(key, [])
        example = (after or before)[0]
        is_control = example.provider != PROVIDER if controls is None else key.implementation in controls
        out.append(
            Comparison(
                key=key,
                base=side(before, base[0].replicates, metrics),
                current=side(after, current[0].replicates, metrics),
                history=(histories or {}).get(key, History()),
                differing=differ + _row_differences(before, after, {*allowed, *free}),
                control=is_control,
                notes=_retuned(before, after),
                metric=next((x for x in metrics if x.name == example.case.primary), LATENCY),
                beside=tuple(x for x in metrics if x.judged is not None and x.name != example.case.primary),
            )
        )
    return out


def _value(header: Header, name: str) -> object:
    return header.conditions.get(name, "not recorded")


def _row_differences(
    base: Sequence[Record], current: Sequence[Record], allowed: Collection[str]
) -> tuple[str, ...]:
    """What is measured, of which library's version and with which timer may differ row by row, within equal
    conditions.
    """
    out = []
    facts = {
        "case.spec": (_specs(base), _specs(current)),
        VERSION: (_versions(base), _versions(current)),
        "timer": (_timers(base), _timers(current)),
    }
    for name, (before, after) in facts.items():
        if before and after and before != after and name not in allowed:
            out.append(f"{name}: {', '.join(sorted(before))} / {', '.join(sorted(after))}")
    return tuple(out)


def _specs(records: Sequence[Record]) -> set[str]:
    return {record.case.spec for record in records}


def _versions(records: Sequence[Record]) -> set[str]:
    return {record.version or "unknown" for record in records if record.measurement is not None}


def _timers(records: Sequence[Record]) -> set[str]:
    return {record.measurement.timer for record in records if record.measurement is not None}


def _retuned(base: Sequence[Record], current: Sequence[Record]) -> tuple[str, ...]:
    before, after = ({kernel: set(x) for kernel, x in tunings(side).items()} for side in (base, current))
    return tuple(
        f"autotuned {kernel} otherwise: {' or '.join(sorted(before[kernel]))} before, "
        f"{' or '.join(sorted(after[kernel]))} now"
        for kernel in sorted(before.keys() & after.keys())
        if before[kernel] != after[kernel]
    )
