"""A load that is over: its metrics, and what a reader must know beside them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....registry.store.metric import Metric
from ...measure.rounding import rounded
from . import latencies, load
from .messages import Seen

STAMPED = 2000
"""Requests whose stamps are kept; of more, every k-th."""
NEVER = -1.0
"""A stamp of a request that did not come to that: stamps count from the load's begin, and none is below 0."""
STAMPS = (
    (
        "scheduled",
        "ms",
        "When each request was due, from the load's begin, failed ones too; of more than 2,000 every k-th, in all "
        "of these alike",
    ),
    ("sent", "ms", "When it was sent, likewise; −1 where it was not"),
    ("first", "ms", "When its first text came, likewise; −1 where none came"),
    ("last", "ms", "When its last text came, likewise"),
    ("end", "ms", "When its stream ended, likewise; −1 where it had no end"),
    ("chunks", "1", "Its chunks with text"),
    ("ok", "1", "1 where it ended well, else 0"),
)
STAMP_METRICS = tuple(
    Metric(f"stamp_{name}", unit, better="neither", shown="never", about=f"{about}.")
    for name, unit, about in STAMPS
)
GAPS_KEPT = 5000
LATE_MS = 1.0
"""Lateness of a client at its 99th percentile beyond which it, and not the server, may be what is measured."""


@dataclass(frozen=True)
class Loaded:
    """A load that is over: what was asked, what was seen, its window, and how late the clients were."""

    wanted: load.Load
    asked: Sequence[load.Asked]
    seen: Sequence[Seen]
    window: latencies.Window
    begin_ns: int
    late_ms: Sequence[float]
    saturated: bool

    @property
    def counted(self) -> list[Seen]:
        """Requests of the window."""
        return [x for x in self.seen if self.window.holds(x.scheduled)]

    @property
    def well(self) -> list[Seen]:
        """Those that ended well."""
        return [x for x in self.counted if x.outcome == "ok"]


def figures(found: Loaded, limits: tuple[float, float] | None) -> dict[str, tuple[float, ...]]:
    """The metrics of a load. Those that nothing gives are left out."""
    well, window = found.well, found.window
    values: dict[str, list[float]] = {}
    several: tuple[tuple[str, Callable[[Seen], float | None]], ...] = (
        ("request", latencies.whole),
        ("ttft", latencies.first_token),
        ("tpot", latencies.token_time),
        ("ttft_sent", lambda x: latencies.first_token(x, since_sent=True)),
        ("request_sent", lambda x: latencies.whole(x, since_sent=True)),
        ("dispatch", latencies.dispatch),
    )
    for name, of in several:
        values[name] = [y for x in well if (y := of(x)) is not None]
    pooled = latencies.gaps(well)
    for name in ("request", "ttft", "tpot"):
        if (tail := latencies.p99(values[name])) is not None:
            values[f"{name}_p99"] = [tail]
    if len(well) >= latencies.ENOUGH and pooled:
        values["itl_p99"] = [latencies.nearest_rank(pooled, 99)]
    values["itl"] = latencies.thinned(pooled, GAPS_KEPT)
    ended = [x for x in found.seen if x.outcome == "ok" and window.adds(x.end)]
    values["served_per_s"] = [len(ended) / window.seconds]
    values["output_per_s"] = [latencies.tokens_within(found.seen, window) / window.seconds]
    if limits is not None:
        met = [x for x in found.counted if window.adds(x.scheduled) and latencies.meets(x, limits)]
        values["goodput"] = [len(met) / window.seconds]
    values["failed"] = [sum(x.outcome != "ok" for x in found.seen) / len(found.seen)]
    if not found.wanted.users:
        counts = latencies.backlog(latencies.waiting(found.seen), window)
        values["backlog"] = [float(x) for x in counts]
        step = window.seconds / (len(counts) - 1)
        values["backlog_at"] = [i * step for i in range(len(counts))]
    values["client_late"] = latencies.thinned(found.late_ms, STAMPED)
    values |= stamps(found.seen, found.begin_ns)
    return {name: rounded(x) for name, x in values.items() if x}


def stamps(seen: Sequence[Seen], begin_ns: int) -> dict[str, list[float]]:
    """What is kept of every request, however it ended, in the order given: each list has the same requests."""

    def stamp(at: int | None) -> float:
        return NEVER if at is None else (at - begin_ns) * latencies.MS

    values: dict[str, list[float]] = {
        name: [stamp(getattr(x, name)) for x in seen] for name in ("scheduled", "sent", "first", "last", "end")
    }
    values["chunks"] = [float(len(x.chunks)) for x in seen]
    values["ok"] = [float(x.outcome == "ok") for x in seen]
    return {f"stamp_{name}": latencies.thinned(x, STAMPED) for name, x in values.items()}


def remarks(found: Loaded, checked: bool) -> tuple[str, ...]:
    """What a reader must know beside the numbers."""
    said = []
    if len(found.well) < len(found.counted) or any(x.outcome != "ok" for x in found.seen):
        ends = ", ".join(f"{n} {what}" for what, n in latencies.outcomes(found.seen).items())
        said.append(f"requests by their end: {ends}")
    if found.late_ms and latencies.nearest_rank(found.late_ms, 99) > LATE_MS:
        said.append("client_bound: the clients were late themselves")
    if uncounted := sum(x.tokens is None for x in found.well):
        said.append(
            f"the server did not count the tokens of {uncounted} of {len(found.well)} answers: "
            "no time a token of them, none of them meets a limit, and output tokens/s are without theirs"
        )
    if found.wanted.lengths == "turns":
        said.append(
            "conversations hold random tokens in the place of answers: a cache of prefixes finds prompts alone"
        )
    if not checked:
        said.append("answers not checked: the server has weights of its own")
    return tuple(said)
