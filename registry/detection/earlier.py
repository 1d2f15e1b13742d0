"""What earlier runs say of a row, from the index's rows: means of unchanged code, and noise. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..store.index import Spreads
from ..store.processes import Processes
from ..store.record import Key
from .comparison import History, Noise
from .decision import Progress, remember
from .noise import log_times, trimmed


@dataclass(frozen=True)
class Mean:
    """What one run says of one row: the trimmed mean over its processes in ms.

    Means of different definitions (`Processes.definition`) do not belong together.
    """

    ms: float
    processes: int
    provider: str
    definition: str


def run_means(rows: Mapping[Key, Processes]) -> dict[Key, Mean]:
    """The means of a run's rows; of a row without any positive value there is none."""
    means = np.exp(trimmed(log_times([x.values for x in rows.values()])).mean).tolist()
    return {
        key: Mean(ms, x.count, x.provider, x.definition)
        for (key, x), ms in zip(rows.items(), means, strict=True)
        if math.isfinite(ms)
    }


def noise_seen(spreads: Spreads) -> dict[Key, History]:
    """The noise that earlier comparisons saw, by row, oldest first."""
    return {row: History(tuple(Noise(*x) for x in mine)) for row, mine in spreads.items()}


def with_noise(spreads: Spreads, progress: Progress) -> Spreads:
    """The same with the noise that this comparison saw, for the index to keep: the next one leans on it."""
    histories = remember(noise_seen(spreads), progress)
    return {row: [(x.variance, x.df) for x in history.noise] for row, history in histories.items()}


def unchanged(runs: Sequence[Mapping[Key, Mean]], like: Mapping[Key, Mean], processes: int) -> dict[Key, History]:
    """Run means by row, in the order given, of runs that measured the same as `like` often enough."""
    out: dict[Key, History] = {}
    for key, mine in like.items():
        found = [x[key] for x in runs if key in x]
        fit = [x.ms for x in found if x.definition == mine.definition and x.processes >= processes]
        out[key] = History(runs=tuple(fit))
    return out


def joined(noise: Mapping[Key, History], runs: Mapping[Key, History]) -> dict[Key, History]:
    """Both halves of what history knows."""
    nothing = History()
    return {
        key: History(noise.get(key, nothing).noise, runs.get(key, nothing).runs)
        for key in noise.keys() | runs.keys()
    }
