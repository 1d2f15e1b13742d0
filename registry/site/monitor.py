"""What the device told of itself over a run: clocks, power, temperature, and what was throttled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..analysis.rows import spent
from ..store.journal import Journal
from ..store.record import SLOWED, Record
from .drawing import Track, monitor
from .facts import Fact

LISTED = 40
"""Rows that were throttled most, in a table."""


@dataclass(frozen=True)
class Throttled:
    """A row that was throttled: the share of its samples, why, and its slowest clock over the run's highest."""

    fact: Fact
    share: float
    reasons: tuple[str, ...]
    clock: float | None

    @property
    def slowed(self) -> bool:
        """Whether the clock was lower by enough to matter."""
        return self.clock is not None and self.clock < 1 - SLOWED


@dataclass(frozen=True)
class Monitored:
    """The tracks that can be drawn, the names of those that cannot, and what was throttled, most first."""

    drawings: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]
    throttled: tuple[Throttled, ...]
    samples: int
    marked: int
    measured_s: float
    sampling: float | None
    """Share of the run's seconds in which samples were taken: how much the harness used the device."""


def monitored(journal: Journal, found: Sequence[Fact]) -> Monitored:
    """From a journal's records in the order they were made; the time is that of measuring, gaps left out."""
    measured = [x for x in journal.records if x.measurement is not None]
    times, breaks = _times(journal.records)
    seen = [x.measurement.telemetry if x.measurement else None for x in measured]
    marks = [bool(x.measurement and x.measurement.throttled) for x in measured]
    tracks = (
        Track("SM clock", "MHz", [_pair(x.sm_mhz) if x else None for x in seen]),
        Track("memory clock", "MHz", [_pair(x.memory_mhz) if x else None for x in seen]),
        Track("power", "W", [_pair(x.power_w) if x else None for x in seen]),
        Track("temperature", "°C", [_pair(x.temperature_c) if x else None for x in seen]),
    )
    places = [times[i] for i, x in enumerate(journal.records) if x.measurement is not None]
    drawings = tuple((f"{x.name}, {x.unit}", monitor(x, places, marks, breaks)) for x in tracks if x.known)
    seconds = spent(journal)
    wall = sum(x.wall_s for x in journal.footers)
    return Monitored(
        drawings,
        (*(x.name for x in tracks if not x.known), "utilization"),
        _throttled(measured, found),
        sum(len(x.primary) for x in measured),
        sum(len(x.measurement.throttled) for x in measured if x.measurement),
        times[-1] if times else 0.0,
        seconds["sample"] / wall if wall > 0 and "sample" in seconds else None,
    )


def _pair(value: tuple[int, int] | float | None) -> tuple[float, float] | None:
    if value is None:
        return None
    return (float(value[0]), float(value[1])) if isinstance(value, tuple) else (float(value), float(value))


def _times(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Seconds of measuring at which each record ended, and those at which a replicate began."""
    times, breaks = [], []
    now, replicate = 0.0, None
    for x in records:
        if replicate not in (None, x.replicate):
            breaks.append(now)
        replicate = x.replicate
        now += sum(x.spent_s.values())
        times.append(now)
    return times, breaks


def _throttled(measured: Sequence[Record], found: Sequence[Fact]) -> tuple[Throttled, ...]:
    facts = {x.identity: x for x in found}
    by_row: dict[object, list[Record]] = {}
    highest = 0
    for x in measured:
        seen = x.measurement.telemetry if x.measurement else None
        highest = max(highest, seen.sm_mhz[1] if seen and seen.sm_mhz else 0)
        by_row.setdefault(x.identity, []).append(x)
    out = []
    for records in by_row.values():
        here = [x.measurement for x in records if x.measurement]
        marked = sum(len(x.throttled) for x in here)
        if not marked:
            continue
        clocks = [x.telemetry.sm_mhz[0] for x in here if x.telemetry and x.telemetry.sm_mhz]
        reasons = dict.fromkeys(y for x in here if x.telemetry for y in x.telemetry.reasons)
        share = marked / sum(len(x.primary) for x in records)
        clock = min(clocks) / highest if clocks and highest else None
        out.append(Throttled(facts[records[0].identity], share, tuple(reasons), clock))
    return tuple(sorted(out, key=lambda x: (-x.share, x.fact.place))[:LISTED])
