"""When to stop sampling: as soon as the median is known well enough. Pure, apart from timers and devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from ...registry.analysis.statistics import median_interval

TimerName: TypeAlias = Literal["auto", "events", "graph", "cupti"]


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of sampling. `target` is the relative half-width of the 95 % interval of the median.

    Times in seconds of host time spent sampling; `warmup_s` bounds the warm-up before it.
    """

    min_samples: int = 20
    max_samples: int = 1000
    min_seconds: float = 0.05
    max_seconds: float = 1.0
    target: float = 0.005
    warmup_s: float = 0.5
    timer: TimerName = "auto"
    """For a GPU: "auto" lets the case decide, the others are for comparing timers."""
    energy: Literal["first", "every", "never"] = "first"
    """In which processes of a run the energy of each row's call is measured: about a second a row on a GPU."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_samples <= self.max_samples:
            raise ValueError("min_samples must be at least 1 and at most max_samples")
        if not 0 <= self.min_seconds <= self.max_seconds:
            raise ValueError("min_seconds must not be negative and at most max_seconds")
        # Neither infinity nor NaN: JSON has neither, so that no worker could read its task.
        if not self.max_seconds < math.inf:
            raise ValueError("max_seconds must be a length of time")
        if not 0 <= self.warmup_s < math.inf:
            raise ValueError("warmup_s must not be negative, and a length of time")
        if not 0 < self.target < math.inf:
            raise ValueError("target must be above 0")


def half_width(samples: Sequence[float]) -> float | None:
    """Relative half-width of the 95 % interval of the median; None where too few samples give one."""
    interval = median_interval(samples)
    if interval is None:
        return None
    low, high = interval
    return (high - low) / (high + low) if high + low > 0 else 0.0


def converged(samples: Sequence[float], sampling: Sampling) -> bool:
    """Whether the median is known to within the target."""
    width = half_width(samples)
    return width is not None and width <= sampling.target


def finished(samples: Sequence[float], seconds: float, sampling: Sampling) -> bool:
    """Whether to stop: a maximum is reached, or both minima are and the median is known well enough."""
    if len(samples) >= sampling.max_samples or (seconds >= sampling.max_seconds and samples):
        return True
    if len(samples) < sampling.min_samples or seconds < sampling.min_seconds:
        return False
    return converged(samples, sampling)


def steady(times: Sequence[float], window: int = 5, tolerance: float = 0.02) -> bool:
    """Whether warm-up has settled: the medians of the last two windows differ by at most `tolerance`."""
    if len(times) < 2 * window:
        return False
    before = sorted(times[-2 * window : -window])[window // 2]
    after = sorted(times[-window:])[window // 2]
    return abs(after - before) <= tolerance * before
