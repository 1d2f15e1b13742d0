"""What the device told of itself over a run, as strips: clocks, power, temperature, utilization; and what was
throttled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .. import figures
from ..analysis.rows import spent
from ..store.journal import Journal
from ..store.metric import UTILIZATION
from ..store.record import SLOWED, Key, Measurement, Record

LISTED = 40
"""Rows that were throttled most, in a table."""
WIDTH, HEIGHT = 1120, 64
ABOVE = 0.05
"""By how much of its limit a board's power may be above it and still be drawn. A board holds its mean to the
limit, not each moment; and early journals have differences of the energy counter over less than a step of it,
which tell up to 1.8 times the limit.
"""


@dataclass(frozen=True)
class Track:
    """One quantity over a run: for each measurement its lowest and highest value, None where it is unknown."""

    name: str
    unit: str
    values: tuple[tuple[float, float] | None, ...]

    @property
    def known(self) -> list[tuple[float, float]]:
        """The values there are."""
        return [x for x in self.values if x is not None]

    @property
    def steady(self) -> bool:
        """Whether it is known, and never moved."""
        return len({y for x in self.known for y in x}) == 1


@dataclass(frozen=True)
class Throttled:
    """A row that was throttled: the share of its samples, why, and its slowest clock over the run's highest."""

    row: Key
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
    steady: tuple[str, ...]
    """What had one value throughout, with it: a drawing of that says nothing."""
    missing: tuple[str, ...]
    doubted: str | None
    """What of the power is not drawn, and why."""
    throttled: tuple[Throttled, ...]
    samples: int
    marked: int
    within: int
    """Where no sample is marked, measurements within which a throttle reason was raised: a server's requests are
    not marked one by one.
    """
    measured_s: float
    sampling: float | None
    """Share of the run's seconds in which samples were taken: how much the harness used the device."""


def monitored(journal: Journal) -> Monitored:
    """From a journal's records in the order they were made; the time is that of measuring, gaps left out."""
    times, breaks = _times(journal.records)
    end = times[-1][1] if times else 0.0
    found = [(x, y) for x, y in zip(times, journal.records, strict=True) if y.measurement is not None]
    measured = [x.measurement for _, x in found if x.measurement is not None]
    seen = [x.telemetry for x in measured]
    power, doubted = _power([x.power_w if x else None for x in seen], journal.header.conditions)
    tracks = (
        Track("SM clock", "MHz", tuple(_pair(x.sm_mhz) if x else None for x in seen)),
        Track("memory clock", "MHz", tuple(_pair(x.memory_mhz) if x else None for x in seen)),
        power,
        Track("temperature", "°C", tuple(_pair(x.temperature_c) if x else None for x in seen)),
        Track(UTILIZATION.name, UTILIZATION.unit, tuple(_utilization(x) for x in measured)),
    )
    places = [x for x, _ in found]
    marks = [bool(x.throttled) for x in measured]
    bare = not any(marks)
    if bare:
        marks = [bool(x and x.reasons) for x in seen]
    seconds = spent(journal)
    wall = sum(x.wall_s for x in journal.footers)
    return Monitored(
        tuple(
            (f"{x.name}, {x.unit}", drawn(x, places, marks, breaks, end))
            for x in tracks
            if x.known and not x.steady
        ),
        tuple(f"{x.name} {x.known[0][0]:,.0f} {x.unit}" for x in tracks if x.steady),
        tuple(x.name for x in tracks if not x.known and not (x is power and doubted)),
        doubted,
        _throttled([x for _, x in found]),
        sum(len(x.primary) for _, x in found),
        sum(len(x.throttled) for x in measured),
        sum(marks) if bare else 0,
        end,
        seconds["sample"] / wall if wall > 0 and "sample" in seconds else None,
    )


def _power(seen: Sequence[float | None], conditions: Mapping[str, Any]) -> tuple[Track, str | None]:
    """The powers that the board's limit allows, and what to say of the others."""
    limit = power_limit(conditions)
    most = math.inf if limit is None else limit * (1 + ABOVE)
    above = [x for x in seen if x is not None and x > most]
    track = Track("power", "W", tuple(None if x is None or x > most else (x, x) for x in seen))
    if not above:
        return track, None
    return track, (
        f"{len(above):,} of {sum(x is not None for x in seen):,} readings of power, up to {max(above):,.0f} W, "
        f"are above the board's limit of {limit:,.0f} W by more than {100 * ABOVE:.0f} % and not drawn: they are "
        "of a shorter time than a board holds its limit over, or than its energy counter is right over."
    )


def power_limit(conditions: Mapping[str, Any]) -> float | None:
    """A board's limit in watts; None where it is unknown, or a header from elsewhere has no number there."""
    limit = conditions.get("power_limit_w")
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        return None
    return float(limit) if limit > 0 else None


def _pair(value: tuple[int, int] | float | None) -> tuple[float, float] | None:
    if value is None:
        return None
    return (float(value[0]), float(value[1])) if isinstance(value, tuple) else (float(value), float(value))


def _utilization(x: Measurement) -> tuple[float, float] | None:
    values = x.samples.get(UTILIZATION.name)
    return (min(values), max(values)) if values else None


def _times(records: Sequence[Record]) -> tuple[list[tuple[float, float]], list[float]]:
    """Seconds of measuring between which each record was sampled, and those at which a replicate began."""
    times, breaks = [], []
    now, replicate = 0.0, None
    for x in records:
        if replicate not in (None, x.replicate):
            breaks.append(now)
        replicate = x.replicate
        now += sum(x.spent_s.values())
        times.append((now - x.spent_s.get("sample", 0.0), now))
    return times, breaks


def _throttled(measured: Sequence[Record]) -> tuple[Throttled, ...]:
    by_row: dict[Key, list[Record]] = {}
    highest = 0
    for x in measured:
        seen = x.measurement.telemetry if x.measurement else None
        highest = max(highest, seen.sm_mhz[1] if seen and seen.sm_mhz else 0)
        by_row.setdefault(x.identity, []).append(x)
    out = []
    for row, records in by_row.items():
        here = [x.measurement for x in records if x.measurement]
        marked = sum(len(x.throttled) for x in here)
        if not marked:
            continue
        clocks = [x.telemetry.sm_mhz[0] for x in here if x.telemetry and x.telemetry.sm_mhz]
        reasons = dict.fromkeys(y for x in here if x.telemetry for y in x.telemetry.reasons)
        share = marked / sum(len(x.primary) for x in records)
        clock = min(clocks) / highest if clocks and highest else None
        out.append(Throttled(row, share, tuple(reasons), clock))
    order = sorted(out, key=lambda x: (-x.share, x.row.operator, x.row.case, x.row.implementation, x.row.cache))
    return tuple(order[:LISTED])


def drawn(
    track: Track,
    times: Sequence[tuple[float, float]],
    marked: Sequence[bool],
    breaks: Sequence[float],
    end: float,
) -> str:
    """A quantity over a run's seconds up to its end: bars from lowest to highest where samples end, with lines
    from where they begin, those `marked` in the colour of a warning, and a line where a replicate begins.
    """
    known = track.known
    low, high = min(x for x, _ in known), max(y for _, y in known)
    reach = max(high - low, 0.02 * abs(high)) or 1.0
    steady = high - low < reach / 3  # two labels would lie on each other
    end = max(end, 1e-9)
    left, right = 64, WIDTH - 4

    def place(value: float) -> float:
        return HEIGHT - 6 - (value - low) / reach * (HEIGHT - 14)

    bins: dict[tuple[int, bool], tuple[float, float]] = {}
    long = {False: "", True: ""}
    for value, span, mark in zip(track.values, times, marked, strict=True):
        if value is not None:
            first, x = (round(left + at / end * (right - left)) for at in span)
            a, b = bins.get((x, mark), value)
            bins[x, mark] = min(a, value[0]), max(b, value[1])
            if x - first > 2:  # long enough to be seen
                edges = dict.fromkeys(f"{place(y):.1f}" for y in value)
                long[mark] += "".join(f"M{first} {y}H{x}" for y in edges)
    paths = {
        mark: "".join(
            f"M{x} {place(a):.1f}V{min(place(b), place(a) - 1.5):.1f}"
            for (x, m), (a, b) in bins.items()
            if m == mark
        )
        + long[mark]
        for mark in (False, True)
    }
    lines = "".join(f"M{left + x / end * (right - left):.0f} 2V{HEIGHT - 2}" for x in breaks)
    name = escape(f"{track.name}, {figures.number(low)} to {figures.number(high)} {track.unit}")
    return (
        f"<svg class='monitor' viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{name}'><title>{name}</title>"
        f"<path class='grid' d='M{left} {place(high):.1f}H{right}M{left} {place(low):.1f}H{right}'/>"
        f"<path class='grid' d='{lines}'/><path d='{paths[False]}'/><path class='warn' d='{paths[True]}'/>"
        f"{''.join(_label(left - 8, place(x) + 4, x) for x in ((high,) if steady else (high, low)))}</svg>"
    )


def _label(x: float, y: float, value: float) -> str:
    return f"<text x='{x:.0f}' y='{y:.1f}'>{value:,.0f}</text>"
