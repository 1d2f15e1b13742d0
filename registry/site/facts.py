"""What the site keeps of a run: its header in short, and a fact a row. Small: 100,000 are read at once."""

from __future__ import annotations

import hashlib
import re
from typing import TypeAlias

import msgspec

from ..analysis.rows import FASTER, Row, Value, category, rows
from ..store.journal import Journal
from ..store.metric import Better
from ..store.record import PROVIDER, YARDSTICK, Cache, Key, Pass, Scalar, Status
from ..views.summary import device_name
from .paging import numbered

Number: TypeAlias = tuple[float, float | None, float | None, str]
"""A metric's value, its 95 % interval and its unit."""


ONE_PROCESS = "one process"
"""How a case stands whose ratio is of a single process: it may be luck, and is counted apart."""
ROWS = 200
"""Rows of a run that its page has room for: where there are more, so many stand on each of its further pages."""


class Run(msgspec.Struct, frozen=True):
    """A run: where it comes from, what decides comparability, and how it went."""

    name: str
    created: str
    commit: str | None
    dirty: bool
    plan: str
    replicates: int
    kind: str
    """cuda or cpu, as the header has it."""
    device: str
    """What it was measured on, by name."""
    key: str
    conditions: dict[str, Scalar]
    rows: int
    timed: int
    """Rows with a value of their primary metric."""
    wall_s: float | None
    complete: bool
    torn: bool
    stage: int = 0
    arm: str | None = None
    partner: str | None = None
    records: int = 0
    """Measurements in its journal."""
    verifies: str | None = None
    """The run of which it measured some rows again."""

    @property
    def file(self) -> str:
        """The name of its files, without ending."""
        return file_name(self.name)

    @property
    def rows_a_page(self) -> int:
        """How many rows each page from the second on has; 0 where they all stand on the first."""
        return ROWS if self.rows > ROWS else 0

    def page(self, place: int) -> str:
        """The page that has the row of this place, from the folder of runs' pages."""
        return f"{numbered(self.file, 2 + place // ROWS) if self.rows > ROWS else self.file}.html"

    def row(self, place: int) -> str:
        """Where that row stands, from the site's root."""
        return f"run/{self.page(place)}#row-{place}"

    @property
    def code(self) -> str:
        """What tells one state of the code from another: a changed tree is not its commit, no two are alike."""
        return f"{self.commit}+{self.name}" if self.dirty or not self.commit else self.commit

    @property
    def short(self) -> str:
        """The commit for people."""
        if not self.commit:
            return "no commit"
        return f"{self.commit[:8]}+" if self.dirty else self.commit[:8]


class Fact(msgspec.Struct, frozen=True, array_like=True):
    """One row of one run. `lines` are its records' in the journal, `place` is the row's on the run's page."""

    operator: str
    case: str
    implementation: str
    cache: Cache
    provider: str
    version: str | None
    dtype: str
    pass_: Pass
    axes: dict[str, int]
    options: dict[str, bool | int | float | str]
    status: Status
    reason: str | None
    key: str
    """What it may be compared with: run conditions, case definition, its library's version, timer and cache."""
    spec: str
    timer: str | None
    primary: str
    better: Better
    metrics: dict[str, Number]
    processes: int
    between: float | None
    """Coefficient of variation of the processes' values of the primary metric."""
    limit: float | None
    fraction: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    best: str | None
    """The best correct baseline of its run, that `speedup` is over."""
    throttled: bool | None
    bytes: int | None
    flops: int | None
    """What the case moves at least and computes."""
    lines: tuple[int, ...]
    place: int

    @property
    def identity(self) -> Key:
        """What tells it from the others of its run."""
        return Key(self.operator, self.case, self.implementation, self.cache)

    @property
    def ours(self) -> bool:
        """Whether it is our implementation."""
        return self.provider == PROVIDER

    @property
    def scale(self) -> bool:
        """Whether it only gives a scale, and competes with nothing."""
        return self.provider == YARDSTICK

    @property
    def number(self) -> Number | None:
        """Its primary metric."""
        return self.metrics.get(self.primary)

    @property
    def interval(self) -> tuple[float | None, float | None]:
        """That metric's 95 % interval over processes: a single one has none (`rows.Value.interval`)."""
        found = self.number
        return (found[1], found[2]) if found is not None and self.processes > 1 else (None, None)

    def row(self, every: bool = False) -> Row:
        """As the views take it, with the primary metric alone or with `every` one: of the others the value and its
        interval are known, and no direction.
        """
        metrics = {
            name: Value(value, unit, "neither", self.processes, 0, low, high)
            for name, (value, low, high, unit) in (self.metrics.items() if every else ())
        }
        if (number := self.number) is not None:
            value, low, high, unit = number
            metrics[self.primary] = Value(value, unit, self.better, self.processes, 0, low, high, self.between)
        return Row(
            operator=self.operator,
            case=self.case,
            axes=self.axes,
            options=self.options,
            dtype=self.dtype,
            pass_=self.pass_,
            implementation=self.implementation,
            provider=self.provider,
            version=self.version,
            cache=self.cache,
            status=self.status,
            reason=self.reason,
            key=self.key,
            primary=self.primary,
            metrics=metrics,
            speedup_vs_best_baseline=self.speedup,
            speedup_ci_low=self.speedup_low,
            speedup_ci_high=self.speedup_high,
            best_baseline=self.best,
            bytes=self.bytes,
            flops=self.flops,
            limit=self.limit,
            fraction_of_limit=self.fraction,
        )

    @property
    def outcome(self) -> str:
        """faster, slower or undecided against the best baseline, by the speedup's category; `one process` where
        fewer than two have both, which is no interval and no verdict.
        """
        found = category(self.row())
        if self.speedup is not None and self.speedup_low is None:
            return ONE_PROCESS
        return "faster" if found in FASTER else found or "undecided"


def run_of(journal: Journal, found: tuple[Fact, ...]) -> Run:
    """A journal's header in short."""
    header = journal.header
    return Run(
        name=header.run,
        created=header.created,
        commit=header.commit,
        dirty=header.dirty,
        plan=header.plan,
        replicates=header.replicates,
        kind=header.device,
        device=device_name(header),
        key=header.key,
        conditions=header.conditions,
        rows=len(found),
        timed=sum(x.number is not None for x in found),
        wall_s=journal.elapsed_s,
        complete=any(x.complete for x in journal.footers),
        torn=journal.torn,
        stage=header.request.stage,
        arm=header.request.arm,
        partner=header.request.partner,
        records=len(journal.records),
        verifies=header.request.verifies,
    )


def facts(journal: Journal) -> tuple[Fact, ...]:
    """A fact for each row of a journal, in the order of its rows."""
    lines: dict[Key, list[int]] = {}
    specs: dict[Key, str] = {}
    for record, line in zip(journal.records, journal.lines or (0,) * len(journal.records), strict=True):
        lines.setdefault(record.identity, []).append(line)
        specs.setdefault(record.identity, record.case.spec)
    return tuple(
        Fact(
            operator=x.operator,
            case=x.case,
            implementation=x.implementation,
            cache=x.cache,
            provider=x.provider,
            version=x.version,
            dtype=x.dtype,
            pass_=x.pass_,
            axes=x.axes,
            options=x.options,
            status=x.status,
            reason=x.reason,
            key=x.key,
            spec=specs[x.identity],
            timer=x.timer,
            primary=x.primary,
            better=journal.metric(x.primary).better,
            metrics={name: (y.value, y.low, y.high, y.unit) for name, y in x.metrics.items()},
            processes=x.replicates,
            between=y.cv_between if (y := x.get()) is not None else None,
            limit=x.limit,
            fraction=x.fraction_of_limit,
            speedup=x.speedup_vs_best_baseline,
            speedup_low=x.speedup_ci_low,
            speedup_high=x.speedup_ci_high,
            best=x.best_baseline,
            throttled=x.throttled,
            bytes=x.bytes,
            flops=x.flops,
            lines=tuple(lines[x.identity]),
            place=place,
        )
        for place, x in enumerate(rows(journal))
    )


def file_name(name: str) -> str:
    """A name of a journal as a file's: letters, digits and dashes. What had to change ends in a hash of the name,
    so that no two names share a file, not even where case does not count.
    """
    plain = re.sub(r"[^a-z0-9_-]", "-", name[:80])
    if plain == name and plain and not plain.startswith("-"):
        return plain
    return f"{plain.lstrip('-') or 'x'}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:10]}"
