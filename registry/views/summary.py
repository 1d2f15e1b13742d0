"""What a run says in a few lines: how our implementations stand, what did not end well, where it ran."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .. import figures
from ..analysis.rows import FASTER, Row, category
from ..analysis.speedups import excludes_one, mean_bounds
from ..analysis.statistics import geometric_mean
from ..store.journal import Journal
from ..store.record import SLOWED, Header, Request, boards
from ..store.shards import few
from . import rivals
from .grouping import CaseRows, cases

SIZE = re.compile(r"(?<![\w.])(\d+\.\d+)(?= GiB)")
"""Of a remark, what may be another in each row."""
NO_INTERVAL = "no interval"
"""The category of a ratio of single processes."""
MANY = 6
"""So many implementations are counted where they have one remark, not named."""


@dataclass(frozen=True)
class Standing:
    """Our implementations of one operator against the fastest baseline of each case, and against eager."""

    operator: str
    cases: int
    """All cases of the operator, ours or not."""
    compared: tuple[Row, ...]
    """Our rows that have a baseline to be compared with, in the order of the cases."""
    versus_best: float | None
    versus_eager: float | None
    categories: dict[str, int] = field(default_factory=dict)
    """How many rows are of each category; "no interval" of a single replicate, which counts as undecided."""

    @property
    def faster(self) -> int:
        """Cases where the whole interval is at or above 1."""
        return sum(self.categories.get(x, 0) for x in FASTER)

    @property
    def slower(self) -> int:
        """Cases where the whole interval is below 1."""
        return self.categories.get("slower", 0)

    @property
    def single(self) -> int:
        """Of the undecided those without an interval: fewer than two processes have both."""
        return self.categories.get(NO_INTERVAL, 0)

    @property
    def undecided(self) -> int:
        """Cases whose interval holds 1, or that have none."""
        return len(self.compared) - self.faster - self.slower

    @property
    def bounds(self) -> tuple[float, float] | None:
        """An interval of `versus_best`; None where a case has none."""
        return mean_bounds((x.speedup_ci_low, x.speedup_ci_high) for x in self.compared)

    @property
    def decided(self) -> bool:
        """Whether `bounds` leaves out 1."""
        return self.bounds is not None and excludes_one(*self.bounds)

    @property
    def names(self) -> tuple[str, ...]:
        """The implementations of ours that were compared, each once."""
        return tuple(dict.fromkeys(x.implementation for x in self.compared))

    @property
    def best(self) -> Row | None:
        """The case with the largest speedup."""
        return max(self.compared, key=lambda x: x.speedup_vs_best_baseline or 0, default=None)

    @property
    def worst(self) -> Row | None:
        """The case with the smallest speedup."""
        return min(self.compared, key=lambda x: x.speedup_vs_best_baseline or 0, default=None)


def standings(rows: Iterable[Row]) -> tuple[Standing, ...]:
    """One a operator, in the order met."""
    found: dict[str, list[CaseRows]] = {}
    for case in cases(rows):
        found.setdefault(case.operator, []).append(case)
    return tuple(_standing(operator, x) for operator, x in found.items())


def overall(rows: Iterable[Row]) -> Standing:
    """All operators together."""
    return _standing("all", cases(rows))


def _standing(operator: str, found: Sequence[CaseRows]) -> Standing:
    ours = [x.ours for x in found]
    compared = tuple(x for x in ours if x is not None and x.speedup_vs_best_baseline is not None)
    return Standing(
        operator,
        len(found),
        compared,
        geometric_mean(x.speedup_vs_best_baseline for x in compared),
        geometric_mean(x.speedup_vs_eager for x in compared),
        dict(Counter(category(x) or NO_INTERVAL for x in compared)),
    )


@dataclass(frozen=True)
class Failure:
    """Rows that ended the same way for the same reason."""

    status: str
    reason: str
    rows: tuple[Row, ...]

    @property
    def implementations(self) -> tuple[str, ...]:
        """Names, each once."""
        return tuple(dict.fromkeys(x.implementation for x in self.rows))

    @property
    def operators(self) -> tuple[str, ...]:
        """Names, each once."""
        return tuple(dict.fromkeys(x.operator for x in self.rows))


_SEVERITY = ("incorrect", "crashed", "timeout", "error", "out_of_memory", "ok", "unsupported", "unavailable")


def failures(rows: Iterable[Row]) -> tuple[Failure, ...]:
    """Everything that was skipped or failed, gravest first; "ok" are rows that lost a replicate."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.status != "ok" or row.reason:
            found.setdefault((row.status, row.reason or ""), []).append(row)
    grouped = [Failure(status, reason, tuple(x)) for (status, reason), x in found.items()]
    return tuple(sorted(grouped, key=lambda x: (_SEVERITY.index(x.status), -len(x.rows))))


def device_name(header: Header) -> str:
    """What the run was measured on, by name; CPU runs say that they are."""
    names = ("cpu", "cpu_model") if header.device == "cpu" else ("gpu", "gpu_name", "device_name", "device")
    found = next((str(header.conditions[x]) for x in names if header.conditions.get(x)), None)
    if header.device == "cpu":
        return f"CPU: {found}" if found else "CPU"
    return found or f"{header.device.upper()} device"


def commit(header: Header) -> str:
    """The commit, shortened, and whether the tree had changes of its own."""
    if header.commit is None:
        return "no commit"
    return header.commit[:12] + (" + uncommitted changes" if header.dirty else "")


def _lacking(request: Request) -> str:
    """Why a run is not whole, in words."""
    if request.missing:
        return f"not here are shards {few(request.missing)}"
    joined = bool(request.hosts)  # of shards, each of which may be done
    what = "shards of the run are missing, or one was stopped" if joined else "the run was stopped"
    return f"{what} before its plan was done"


def warnings(journal: Journal, rows: Sequence[Row]) -> tuple[str, ...]:
    """What a reader must know before any number."""
    out = []
    if journal.header.device == "cpu":
        out.append("CPU run: every number here is of the host's processor, not of a GPU.")
    if not any(x.complete for x in journal.footers):
        out.append(f"Incomplete: {_lacking(journal.header.request)}; what was measured is shown.")
    if (count := len(boards(journal.header, journal.records))) > 1:
        out.append(f"Measured on {count} boards of one kind: intervals hold the spread between them, too.")
    if journal.torn:
        out.append("The journal's last line was cut off; that line is lost.")
    if journal.header.dirty:
        out.append("The working tree had uncommitted changes: the commit alone does not say what was measured.")
    incorrect = sum(x.status == "incorrect" for x in rows)
    if incorrect:
        out.append(f"{figures.counted(incorrect, 'row')} with a wrong answer, and so without a time.")
    throttled = [x for x in rows if x.throttled]
    if throttled:
        slowed = _slowed(throttled, journal.header)
        told = figures.counted(len(throttled), "row")
        out.append(f"{told} measured while the device was throttled for most samples{slowed}.")
    if above := sum(x.above_limit is True for x in rows):
        told = figures.counted(above, "row")
        out.append(
            f"{told} faster than {'its' if above == 1 else 'their'} limit (marked !), which is no limit then: "
            f"kernelmark show {journal.header.run} --above-limit"
        )
    if nccl := rivals.warning((x.best_baseline for x in rows), journal.header.conditions):
        out.append(nccl)
    out += _remarked(journal)
    loose = sum(x.converged is False for x in rows)
    if loose:
        out.append(
            f"{figures.counted(loose, 'row')} that did not reach the stopping rule's precision within its limits."
        )
    return tuple(out)


def _remarked(journal: Journal) -> list[str]:
    """What implementations had changed in their rivals' process and other remarks: each once, for all, with the
    least and the most of a size that is another in each row.
    """
    found: dict[tuple[str, ...], dict[str, None]] = {}
    sizes: dict[tuple[str, ...], list[str]] = {}
    all_names = {x.implementation for x in journal.records if x.measurement is not None}
    for record in journal.records:
        for remark in record.measurement.remarks if record.measurement is not None else ():
            parts = SIZE.split(remark, maxsplit=1)
            alike = tuple(parts[::2])
            found.setdefault(alike, {})[record.implementation] = None
            sizes.setdefault(alike, []).extend(parts[1::2])

    def said(alike: tuple[str, ...]) -> str:
        few = sorted(sizes[alike], key=float)
        return " to ".join(dict.fromkeys((few[0], few[-1]))).join(alike) if few else alike[0]

    def named(names: Sequence[str]) -> str:
        return ", ".join(names) if len(names) < MANY else f"{len(names)} of {len(all_names)} implementations"

    return [f"{named(list(names))}: {said(alike)}." for alike, names in found.items()][:20]


def _slowed(throttled: Sequence[Row], header: Header) -> str:
    """How many of these rows had a clock that shows it; nothing where the device does not say its highest."""
    highest = header.environment.get("gpu/max_sm_mhz")
    clocks = [sum(x.sm_mhz) / 2 for x in throttled if x.sm_mhz]
    if not isinstance(highest, int | float) or not clocks:
        return ""
    slow = sum(x <= (1 - SLOWED) * highest for x in clocks)
    return f", {slow or 'none'} of them at a clock {figures.percent(SLOWED)} or more below its highest"
