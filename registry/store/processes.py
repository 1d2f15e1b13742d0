"""What each process of a run says of its rows: one value a process, and what makes values comparable."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from .metric import LATENCY, Metric, summarized
from .record import HOST, Case, Header, Key, Measurement, Record, boards, ended, versions_count


@dataclass(frozen=True)
class Processes:
    """A row's value of the primary metric by process, in the metric's unit; NaN where a process has none.

    `definition` is what was computed, by which timer, in a fleet on which host, on which boards where they were
    several, and by which version of the row's library: values of different ones do not belong together.
    """

    values: tuple[float, ...]
    provider: str
    definition: str

    @property
    def count(self) -> int:
        """How many processes have a value."""
        return len(self.values) - sum(map(math.isnan, self.values))


def by_row(records: Iterable[Record]) -> dict[Key, Sequence[Record]]:
    """Records put together by the row that they are of, in the order met, as they are judged."""
    rows: dict[Key, list[Record]] = {}
    for record in records:
        rows.setdefault(record.identity, []).append(record)
    return {key: as_judged(mine) for key, mine in rows.items()}


SERVE, HIGHEST, REQUEST = "serve", "slo_rate", "request"
"""The workload whose cases may be searches, the metric that these are judged by, and what older journals name."""


def searches(case: Case) -> bool:
    """Whether a case looks for the highest rate that a server keeps up with."""
    return case.operator == SERVE and case.options.get("load") == "search"


def as_judged(records: Sequence[Record]) -> Sequence[Record]:
    """The records of a row, of which those of a search are judged by the rate that it found.

    Older journals name how long a request took. Each server was then under the load that it had found itself, the
    better one under more, so that these times compare nothing.
    """
    case = records[0].case
    if not searches(case) or any(x.measurement and HIGHEST not in x.measurement.samples for x in records):
        return records
    case = msgspec.structs.replace(case, primary=HIGHEST)
    return [msgspec.structs.replace(x, case=case) for x in records]


def sampled(case: Case, measured: Measurement) -> str:
    """The metric whose samples `throttled` counts: of a search, which finds one rate, its requests."""
    return REQUEST if searches(case) and REQUEST in measured.samples else case.primary


def by_replicate(records: Sequence[Record]) -> dict[int, Record]:
    """One row's records by the number of their process; the first of a number counts."""
    return {record.replicate: record for record in reversed(records)}


def measurements(numbered: Mapping[int, Record], replicates: int) -> list[Measurement | None]:
    """The measurement of each process; None where it left none."""
    return [numbered[i].measurement if i in numbered else None for i in range(replicates)]


def tunings(records: Iterable[Record]) -> dict[str, Counter[str]]:
    """Of a row's records: how often each configuration of each autotuned kernel won."""
    out: dict[str, Counter[str]] = {}
    for record in records:
        for kernel, chosen in (record.measurement.tuning if record.measurement else {}).items():
            out.setdefault(kernel, Counter())[chosen] += 1
    return out


def value(measurement: Measurement | None, metric: Metric) -> float:
    """A process's value of a metric; NaN where it has none."""
    samples = measurement.samples.get(metric.name) if measurement is not None else None
    return summarized(samples, metric.summary) if samples else math.nan


def by_process(records: Iterable[Record], metric: Metric) -> dict[int, float]:
    """Each process's value of a metric, by its number, where it has any."""
    found = {x.replicate: value(x.measurement, metric) for x in records}
    return {replicate: x for replicate, x in found.items() if not math.isnan(x)}


def process_values(header: Header, records: Iterable[Record]) -> dict[Key, Processes]:
    """The rows of a run that ended well."""
    metrics = {x.name: x for x in header.metrics}
    whole, counted = header.environment.get(HOST), versions_count(header.conditions)
    out = {}
    for key, mine in by_row(records).items():
        numbered = by_replicate(mine)
        if ended(tuple(numbered.values()))[0] != "ok":
            continue
        case = mine[0].case
        metric = metrics.get(case.primary, LATENCY)
        timers = sorted({x.measurement.timer for x in mine if x.measurement is not None})
        host = header.request.hosts.get(f"{key.operator}/{key.case}", whole)
        places = [str(host)] if host else []
        # Their spread holds that between boards, which processes of one board do not have.
        places += sorted(several) if len(several := boards(header, mine)) > 1 else []
        versions = [str(mine[0].version)] if counted else []
        out[key] = Processes(
            tuple(value(x, metric) for x in measurements(numbered, header.replicates)),
            mine[0].provider,
            "/".join([case.spec, *timers, *places, *versions]),
        )
    return out
