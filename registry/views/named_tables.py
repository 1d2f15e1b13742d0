"""Tables that people know from elsewhere, from any run: a kernel a line, or a block a configuration. Pure.

Both set ours beside one baseline. That is the one asked for by name, else eager PyTorch, else the fastest that a
case has; what stands in for another says its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, median

from .. import figures
from ..analysis.peers import Speedup, peers
from ..analysis.repeated import said
from ..analysis.rows import BANDWIDTH, THROUGHPUT, TOKENS, Row, rows
from ..analysis.selection import EVERYTHING, Selection
from ..errors import InputError
from ..escape import markdown, plain
from ..figures import counted
from ..store.journal import Journal
from ..store.record import EAGER, PROVIDER, baseline
from .grouping import cases

HEADINGS = ("Kernel", "Our Latency (ms)", "Base Latency (ms)", "Speedup", "Metric", "Our Perf", "Base Perf")


@dataclass(frozen=True)
class Pair:
    """Ours and a baseline of one case."""

    ours: Row
    base: Row
    speedup: Speedup

    @property
    def name(self) -> str:
        """`rms_norm forward (B=32, S=4096, D=8192, bf16)`."""
        sizes = [f"{name}={size}" for name, size in self.ours.axes.items()]
        options = [
            name if x is True else str(x) if isinstance(x, str) else f"{name}={x}"
            for name, x in self.ours.options.items()
            if x is not False
        ]
        cache = [] if self.ours.cache == "cold" else [f"{self.ours.cache} cache"]
        inside = ", ".join([*sizes, *options, self.ours.dtype, *cache])
        return f"{self.ours.operator} {self.ours.pass_.replace('_', ' ')} ({inside})"


def pairs(journal: Journal, against: str | None = None, selection: Selection = EVERYTHING) -> tuple[Pair, ...]:
    """Every case that both sides have a time of, of the rows that are asked for.

    Raises `InputError` where there is none; the message says what there is, and of whom.
    """
    found = rows(journal)
    known = peers(journal, found)
    asked = {x.identity for x in selection.rows(found)}
    out = []
    for case in cases(found):
        ours = case.ours
        ratios = known.get(ours.identity, {}) if ours is not None else {}
        if ours is None or ours.identity not in asked or not ratios or ours.primary != "latency":
            continue
        name = against or (EAGER if EAGER in ratios else ours.best_baseline)
        if name is not None and name in ratios:
            base = next(x for x in case.ok if x.implementation == name)
            out.append(Pair(ours, base, ratios[name]))
    if not out and against is not None:
        names = ", ".join(sorted({x for y in known.values() for x in y})) or "none"
        raise InputError(f"no case has a time of ours and of {against!r}; baselines with times: {names}")
    if not out:
        timed = [x for x in found if x.identity in asked and x.primary == "latency" and x.value() is not None]
        mine = {(x.operator, x.case, x.cache) for x in timed if x.provider == PROVIDER}
        theirs = {(x.operator, x.case, x.cache) for x in timed if baseline(x.provider, x.implementation)}
        kept = "" if selection.everything else " that the filters leave"
        raise InputError(
            f"run {journal.header.run} has no case with a latency of ours and one of a baseline{kept}: "
            f"{counted(len(mine), 'case')} with one of ours, {len(theirs)} with one of a baseline. "
            "Measure both in one run: kernelmark run --operator NAME does."
        )
    return tuple(out)


def kernels(
    journal: Journal,
    against: str | None = None,
    selection: Selection = EVERYTHING,
    verifications: Iterable[Journal] = (),
) -> str:
    """A line a kernel, in Markdown: both latencies, the speedup, and the bandwidth or throughput of both."""
    found = pairs(journal, against, selection)
    lines = [f"| {' | '.join(HEADINGS)} |", "|---|---:|---:|---:|---|---:|---:|"]
    for x in found:
        metric = next((y for y in (THROUGHPUT, BANDWIDTH, TOKENS) if y.name in x.ours.metrics), None)
        rate = [figures.number(y.value(metric.name)) if metric else figures.DASH for y in (x.ours, x.base)]
        base = figures.number(x.base.value())
        base += "" if x.base.implementation == (against or EAGER) else f" ({markdown(x.base.implementation)})"
        cells = (markdown(x.name), figures.number(x.ours.value()), base, _speedup(x.speedup))
        lines.append(f"| {' | '.join((*cells, metric.unit if metric else figures.DASH, *rate))} |")
    told = _told(journal, found, against, said(journal, verifications), markdown)
    return "\n".join([*lines, "", *told]) + "\n"


def configurations(
    journal: Journal,
    against: str | None = None,
    selection: Selection = EVERYTHING,
    verifications: Iterable[Journal] = (),
) -> str:
    """A block a configuration, and the mean and median speedup over all of them."""
    found = pairs(journal, against, selection)
    lines = []
    for x in found:
        base = plain(x.base.implementation)
        lines += [plain(x.name), f"  {base}: {_latency(x.base)}", f"  Ours: {_latency(x.ours)}"]
        lines.append(f"  Speedup: {_speedup(x.speedup)}")
        tokens = [y.value(TOKENS.name) for y in (x.base, x.ours)]
        if None not in tokens:
            lines.append(f"  Throughput: {base}: {tokens[0]:,.0f} tokens/s, Ours: {tokens[1]:,.0f} tokens/s")
        lines.append("")
    told = _told(journal, found, against, said(journal, verifications), plain)
    return "\n".join([*lines, *told]) + "\n"


def _latency(row: Row) -> str:
    """`0.123 ± 0.005 ms`, half the 95 % interval; without one as it is."""
    value, (low, high) = row.value() or 0.0, row.bounds()
    if low is None or high is None:
        return f"{figures.number(value)} ms"
    half = (high - low) / 2
    # Of equal times the logarithm and its exponential leave a trace, which is no spread.
    return f"{figures.number(value)} ± {figures.number(half if half > 1e-9 * value else 0, 2)} ms"


def _speedup(x: Speedup) -> str:
    return f"{x.value:.2f}x{figures.bounds(x.low, x.high)}"


def _told(
    journal: Journal, found: Iterable[Pair], against: str | None, repeated: str, safe: Callable[[str], str]
) -> list[str]:
    """The summary below either table, and what its columns rest on."""
    speedups = [x.speedup.value for x in found]
    count = figures.counted(len(speedups), "configuration")
    return [
        f"Average Speedup: {fmean(speedups):.2f}x, Median Speedup: {median(speedups):.2f}x, "
        f"Min: {min(speedups):.2f}x, Max: {max(speedups):.2f}x over {count}.",
        f"Run {safe(journal.header.run)}, {safe(repeated)}. Base: {safe(against or EAGER)}"
        + ("" if against else ", or the baseline named where that has no time")
        + ". In brackets and after ±: 95 % intervals. Bytes and operations are the least that a case needs.",
    ]
