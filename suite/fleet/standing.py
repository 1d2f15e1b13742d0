"""How a run over many machines stands, in words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from ...registry.escape import plain
from ...registry.figures import counted
from .collect import State


def remaining_s(state: State, running: int) -> float | None:
    """Seconds until the run is whole, at the pace of the shards that are here; None before the first."""
    expected = sum(state.order.seconds[x.shard - 1] for x in state.whole)
    if not expected:
        return None
    pace = sum(x.wall_s for x in state.whole) / expected
    left = sum(state.order.seconds[x - 1] for x in state.missing)
    beside = min(running or len({x.host for x in state.whole}), len(state.missing))
    return left * pace / max(1, beside)


def line(state: State, held: Mapping[int, str], now: datetime, *, known: bool = True) -> str:
    """One line: shards, hosts, what the engine has, and when all will be there. Not `known`: it was not asked."""
    order = state.order
    hosts = len({x.host for x in state.whole})
    parts = [f"[{len(state.whole)}/{order.shards} shards] {counted(hosts, 'host')}"]
    standing = Counter(held[x] for x in state.missing if x in held)
    parts += [f"{count} {word}" for word, count in sorted(standing.items())]
    if lost := len(state.missing) - standing.total():
        parts.append(f"{lost} not asked for" if known else f"{lost} not here")
    left = remaining_s(state, standing["running"])
    if state.missing and left is not None:
        parts.append(f"ends about {(now + timedelta(seconds=left)).astimezone(UTC):%H:%M} UTC")
    return ", ".join(parts)


def table(state: State) -> list[str]:
    """The shards that are here, by host."""
    out = []
    for host in sorted({x.host for x in state.whole}):
        mine = [x for x in state.whole if x.host == host]
        shards = ", ".join(str(x.shard) for x in mine)
        rows, seconds = sum(x.rows for x in mine), sum(x.wall_s for x in mine)
        out.append(f"  {plain(host, 40)}: shards {shards}; {counted(rows, 'measurement')} in {seconds:.0f} s")
    return out
