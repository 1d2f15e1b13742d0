"""Two runs side by side, for reading: what changed, with its interval. It gives no verdict.

Rows pair up by operator, case, implementation and cache state. Their ratio is shown only where their
comparability keys are the same, or differ by conditions alone that are named as what is compared; else the
conditions that differ are named. Metrics beside the primary one that are
judged (memory, energy, error) are flags, by the detector's rule: said where they got worse.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from ..analysis.rows import Row, rows
from ..analysis.selection import EVERYTHING, Selection
from ..analysis.statistics import NO_RATIO, Logs, exponential, geometric_mean, logarithms, summaries, welch
from ..detection.comparison import Comparison
from ..detection.comparison import Side as Processes
from ..detection.metrics import flags
from ..detection.verdict import Flag
from ..errors import InputError
from ..store.journal import Journal
from ..store.metric import Better, Metric
from ..store.processes import by_replicate, by_row, measurements, value
from ..store.record import VERSION, Cache, Key, Pass, Scalar, versions_count

Standing: TypeAlias = Literal["faster", "undecided", "slower"]
Outcome: TypeAlias = Literal["compared", "not comparable", "not measured", "only in first", "only in second"]


class Side(msgspec.Struct, frozen=True):
    """One of the two runs."""

    run: str
    created: str
    commit: str | None
    dirty: bool
    device: str
    key: str


class Difference(msgspec.Struct, frozen=True):
    """A condition that the two headers do not agree on."""

    condition: str
    first: Scalar
    second: Scalar


class RowComparison(msgspec.Struct, frozen=True, rename={"pass_": "pass"}):
    """One row of both runs.

    `ratio` is the second value of the primary `metric` over the first. Its 95 % interval is
    None where either side has a single replicate. `notes` says what else changed without making the rows
    incomparable: the version of a library, the configuration that autotuning chose.
    """

    operator: str
    case: str
    pass_: Pass
    implementation: str
    cache: Cache
    outcome: Outcome
    reason: str | None = None
    metric: str = "latency"
    unit: str = "ms"
    better: Better = "lower"
    first_value: float | None = None
    second_value: float | None = None
    first_replicates: int = 0
    second_replicates: int = 0
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    notes: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    """The other judged metrics that both sides have."""
    flags: tuple[Flag, ...] = ()
    """Those of them that got worse."""

    @property
    def standing(self) -> Standing:
        """How the second run's value stands to the first's, by the interval; without one nothing is decided."""
        if self.ratio_low is None or self.ratio_high is None or self.ratio_low <= 1 <= self.ratio_high:
            return "undecided"
        return "faster" if (self.ratio_high < 1) == (self.better == "lower") else "slower"

    @property
    def timed(self) -> bool:
        """Whether faster and slower are words for it: a time, or a rate. Else it is better or worse."""
        return self.unit in ("ms", "s") or self.unit.endswith("/s")

    @property
    def size(self) -> float:
        """How large the change is, whichever way: the logarithm's absolute value."""
        return abs(math.log(self.ratio)) if self.ratio else 0.0


class OperatorChange(msgspec.Struct, frozen=True):
    """The compared rows of one operator, by one metric: how they stand, and the geometric mean of their ratios."""

    operator: str
    metric: str
    rows: int
    faster: int
    undecided: int
    slower: int
    ratio: float | None


class MetricChange(msgspec.Struct, frozen=True):
    """A judged metric beside the primary one: of how many compared rows both sides have it, and the worse ones."""

    metric: str
    rows: int
    worse: int


class RunComparison(msgspec.Struct, frozen=True):
    """Two runs, the conditions in which they differ, and every row that either of them has."""

    first: Side
    second: Side
    differences: tuple[Difference, ...]
    rows: tuple[RowComparison, ...]

    @property
    def compared(self) -> tuple[RowComparison, ...]:
        """The rows that have a ratio."""
        return tuple(x for x in self.rows if x.outcome == "compared")

    @property
    def operators(self) -> tuple[OperatorChange, ...]:
        """The compared rows by operator and metric, in the order met."""
        found: dict[tuple[str, str], list[RowComparison]] = {}
        for row in self.compared:
            found.setdefault((row.operator, row.metric), []).append(row)
        return tuple(_change(operator, metric, x) for (operator, metric), x in found.items())

    @property
    def overall(self) -> OperatorChange:
        """All compared rows; a ratio only where they have one metric."""
        found = _change("all", "", self.compared)
        same = len({x.metric for x in self.compared}) == 1
        return found if same else msgspec.structs.replace(found, ratio=None)

    @property
    def beside(self) -> tuple[MetricChange, ...]:
        """The judged metrics beside the primary ones, in the order met."""
        names = dict.fromkeys(name for row in self.compared for name in row.beside)
        worse = [flag.metric for row in self.compared for flag in row.flags]
        return tuple(MetricChange(x, sum(x in row.beside for row in self.compared), worse.count(x)) for x in names)

    def to_builtins(self) -> dict[str, Any]:
        """As `kernelmark compare --json` prints it."""
        out: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))  # lists where tuples were
        for row, known in zip(out["rows"], self.rows, strict=True):
            row["standing"] = known.standing if known.outcome == "compared" else None
        for row in out["rows"]:  # by the names that they had when every value was a time
            times = row["unit"] == "ms"
            row |= {f"{side}_ms": row[f"{side}_value"] if times else None for side in ("first", "second")}
        counted = {
            "operators": [msgspec.to_builtins(x) for x in self.operators],
            "overall": msgspec.to_builtins(self.overall),
            "beside": [msgspec.to_builtins(x) for x in self.beside],
        }
        return out | {"compared": len(self.compared)} | counted


def _change(operator: str, metric: str, rows: Sequence[RowComparison]) -> OperatorChange:
    standings = [x.standing for x in rows]
    faster, undecided, slower = (standings.count(x) for x in get_args(Standing))
    ratio = geometric_mean(x.ratio for x in rows)
    return OperatorChange(operator, metric, len(rows), faster, undecided, slower, ratio)


def compare(first: Journal, second: Journal, selection: Selection = EVERYTHING) -> RunComparison:
    """Pairs up the rows of two runs that `selection` asks for in either of them."""
    return compared(Run(first), Run(second), selection)


def compared(
    first: Run, second: Run, selection: Selection = EVERYTHING, across: Collection[str] = ()
) -> RunComparison:
    """The same of what is left of two journals. Runs may differ in conditions of `across`.

    Raises `InputError` for one of them in which these do not differ.
    """
    sides = tuple(
        Side(x.run, x.created, x.commit, x.dirty, x.device, x.key) for x in (first.header, second.header)
    )
    differences = condition_differences(first, second)
    names = [x.condition for x in differences]
    if wrong := [x for x in across if x not in names]:
        there = f"they differ in: {', '.join(names)}" if names else "they do not differ in any"
        raise InputError(f"the runs do not differ in the condition {wrong[0]!r}; {there}.")
    kept = selection.rows([*first.rows.values(), *second.rows.values()])
    identities = list(dict.fromkeys(x.identity for x in kept))
    found = tuple(_compare(x, first, second, names, across) for x in identities)
    return RunComparison(sides[0], sides[1], differences, found)


def condition_differences(first: Journal | Run, second: Journal | Run) -> tuple[Difference, ...]:
    """The conditions of the two headers that differ; one that only one of them knows is None in the other."""
    a, b = first.header.conditions, second.header.conditions
    return tuple(
        Difference(name, a.get(name), b.get(name))
        for name in dict.fromkeys([*a, *b])
        if name not in a or name not in b or a[name] != b[name]
    )


class Run:
    """What comparing needs of a journal, by identity: a tenth of it, so that of two large ones one is in memory.

    Rows have their primary metric alone; `beside` has each process's value of the others that are judged.
    """

    def __init__(self, journal: Journal) -> None:
        self.header = journal.header
        self.key = journal.header.key
        self.versions = versions_count(journal.header.conditions)
        self.rows: Mapping[Key, Row] = {x.identity: x for x in rows(journal, beside=False)}
        records = by_row(journal.records)
        self.specs = {key: found[0].case.spec for key, found in records.items()}
        measured = {key: found for key, all_ in records.items() if (found := [x for x in all_ if x.measurement])}
        by_metric: dict[str, list[Key]] = {}
        for key, found in measured.items():
            by_metric.setdefault(found[0].case.primary, []).append(key)
        self.logs: dict[Key, Logs | None] = {}
        for name, keys in by_metric.items():
            samples = [x.primary for key in keys for x in measured[key]]
            values = iter(summaries(samples, journal.metric(name).summary))
            by_key = [[next(values) for _ in measured[key]] for key in keys]
            self.logs |= zip(keys, logarithms(by_key), strict=True)
        self.judged = {x.name: x for x in journal.header.metrics if x.judged is not None}
        self.beside: dict[Key, dict[str, tuple[float, ...]]] = {}
        for key, found in measured.items():
            processes = measurements(by_replicate(found), journal.header.replicates)
            names = {x for y in processes if y for x in y.samples} & self.judged.keys() - {found[0].case.primary}
            self.beside[key] = {x: tuple(value(y, self.judged[x]) for y in processes) for x in sorted(names)}


def _compare(
    identity: Key, first: Run, second: Run, differences: Collection[str], across: Collection[str]
) -> RowComparison:
    a, b = first.rows.get(identity), second.rows.get(identity)
    some = a or b
    assert some is not None
    known = (a.get() if a else None) or (b.get() if b else None)
    bare = RowComparison(
        operator=some.operator,
        case=some.case,
        pass_=some.pass_,
        implementation=some.implementation,
        cache=some.cache,
        outcome="compared",
        metric=some.primary,
        unit=known.unit if known else "",
        better=known.better if known else "lower",
        first_value=a.value() if a else None,
        second_value=b.value() if b else None,
        first_replicates=a.replicates if a else 0,
        second_replicates=b.replicates if b else 0,
    )
    if a is None or b is None:
        return msgspec.structs.replace(bare, outcome="only in first" if a else "only in second")
    if a.value() is None or b.value() is None:
        return msgspec.structs.replace(bare, outcome="not measured", reason=_unmeasured(a, b))
    notes = _notes(a, b)
    if a.key != b.key and (reason := _incomparable(identity, first, second, differences, across)):
        return msgspec.structs.replace(bare, outcome="not comparable", reason=reason, notes=notes)
    ratio, low, high = ratio_interval(first.logs[identity], second.logs[identity])
    if ratio is None:
        return msgspec.structs.replace(bare, outcome="not comparable", reason=NO_RATIO, notes=notes)
    worse = _beside(identity, first, second)
    return msgspec.structs.replace(
        bare,
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        notes=notes,
        beside=tuple(x.name for x in worse.beside),
        flags=flags(worse),
    )


def _beside(identity: Key, first: Run, second: Run) -> Comparison:
    """Both sides' other judged metrics, as the detector flags them."""
    a, b = first.beside[identity], second.beside[identity]
    both: list[Metric] = [x for name, x in second.judged.items() if name in a and name in b]
    return Comparison(identity, Processes(metrics=a), Processes(metrics=b), beside=tuple(both))


def _unmeasured(first: Row, second: Row) -> str:
    told = {
        place: f"{row.status}: {row.reason or 'no samples'}"
        for place, row in (("first run", first), ("second run", second))
        if row.value() is None
    }
    if len(told) == 2 and len(set(told.values())) == 1:
        return f"both runs: {told['first run']}"
    return "; ".join(f"{place}: {why}" for place, why in told.items())


def _incomparable(
    identity: Key, first: Run, second: Run, differences: Collection[str], across: Collection[str]
) -> str:
    """Why the keys of a row differ; nothing where it is by conditions of `across` alone."""
    reasons = []
    meant = bool(across) and set(differences) <= set(across)
    if first.key != second.key and not meant:
        names = ", ".join(x for x in differences if x not in across)
        reasons.append(f"conditions differ: {names}" if names else "the runs' keys differ")
    if first.specs[identity] != second.specs[identity]:
        reasons.append("the case's definition changed")
    a, b = first.rows[identity], second.rows[identity]
    if a.version != b.version and first.versions and second.versions:
        reasons.append(f"{VERSION} {a.version or 'unknown'} and {b.version or 'unknown'}")
    if a.timer != b.timer:
        reasons.append(f"timer {a.timer} and {b.timer}")
    return "; ".join(reasons) or ("" if meant else "the rows' keys differ")


def _notes(first: Row, second: Row) -> tuple[str, ...]:
    notes = []
    if first.version != second.version:
        notes.append(f"version {first.version or 'unknown'} → {second.version or 'unknown'}")
    if first.tuning != second.tuning:
        notes.append("tuned to another configuration")
    return tuple(notes)


def ratio_interval(first: Logs | None, second: Logs | None) -> tuple[float | None, float | None, float | None]:
    """Ratio of two latencies (second over first) with its 95 % interval, from each side's process medians.

    The two runs share no process, so the interval is Welch's over the logarithms, stretched to hold
    the ratio of the medians, which is what the latencies shown give. None
    for the bounds where a side has fewer than two processes, for all where a time is not positive.
    """
    if first is None or second is None:
        return None, None, None
    value = second.middle / first.middle
    if first.number < 2 or second.number < 2:
        return value, None, None
    centre = second.mean - first.mean
    half = welch([(x.variance, x.number) for x in (first, second)])
    low, high = exponential(centre - half), exponential(centre + half)
    return value, min(value, low), max(value, high) if math.isfinite(high) else None
