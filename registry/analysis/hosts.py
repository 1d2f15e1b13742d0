"""Whether the hosts of a fleet agree, by a control case that each of them measured. Pure.

The unit is a process's value, as everywhere. A host is held against the geometric mean of the others; a
board that a shard went over to counts as a host. Every host has a spread of its own, which is never pooled:
Welch's interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from ..store.journal import Journal
from ..store.metric import summarized
from ..store.record import HOST, Key
from .statistics import exponential, welch

APART = 0.01
"""Hosts agree on a row if each is certainly within such a share of the others; an A/B tolerates as much."""

Kind: TypeAlias = Literal["agrees", "apart", "not known"]


class HostRow(msgspec.Struct, frozen=True):
    """A host's value of a control row over that of the others, with its 95 % interval.

    `spread` is the standard deviation between the host's own processes, as a share: its noise.
    """

    key: Key
    host: str
    processes: int
    ratio: float
    low: float
    high: float
    spread: float | None

    @property
    def kind(self) -> Kind:
        """`apart` if it certainly differs by more than `APART`, `agrees` if it certainly does not."""
        if self.low > 1 + APART or self.high < 1 - APART:
            return "apart"
        return "agrees" if self.low >= 1 - APART and self.high <= 1 + APART else "not known"


def agreement(shards: Sequence[Journal]) -> tuple[HostRow, ...]:
    """The control's rows by host, from the journals of a run's shards; none without a control or with one host."""
    values: dict[Key, dict[str, list[float]]] = {}
    for shard in shards:
        header = shard.header
        host, control = header.environment.get(HOST), header.request.control
        metrics = {x.name: x for x in header.metrics}
        for record in shard.records:
            if host is not None and record.primary and record.case.full_name == control:
                value = summarized(record.primary, metrics[record.case.primary].summary)
                place = str(host) if record.board is msgspec.UNSET else record.board
                if value > 0:
                    values.setdefault(record.identity, {}).setdefault(place, []).append(math.log(value))
    return tuple(
        _row(key, host, hosts) for key, hosts in sorted(values.items()) if len(hosts) > 1 for host in sorted(hosts)
    )


def _row(key: Key, host: str, hosts: dict[str, list[float]]) -> HostRow:
    """Of logarithms by host."""
    mine, others = hosts[host], [values for name, values in hosts.items() if name != host]
    change = float(np.mean(mine) - np.mean([np.mean(x) for x in others]))
    spread = float(np.std(mine, ddof=1)) if len(mine) > 1 else None
    if any(len(x) < 2 for x in hosts.values()):  # one process has no spread
        return HostRow(key, host, len(mine), exponential(change), 0.0, math.inf, spread)
    parts = [(float(np.var(mine, ddof=1)) / len(mine), len(mine))]
    parts += [(float(np.var(x, ddof=1)) / len(x) / len(others) ** 2, len(x)) for x in others]
    half = welch(parts)
    return HostRow(
        key, host, len(mine), exponential(change), exponential(change - half), exponential(change + half), spread
    )
