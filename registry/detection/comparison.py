"""What is known of both sides of one row, before anything is decided.

Way of the data: records of two commits make `Comparison`s (`pairing.py`), which make `Verdict`s
(`decision.py`). The unit is the process: `Side.medians` holds one median per fresh process, never
iterations, because iterations of one process are not independent (docs/deciding.md).
"""

from __future__ import annotations

import math

import msgspec

from ..errors import InputError
from ..store.metric import LATENCY, Metric
from ..store.record import Key, Status


class Noise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Variance of one pair's log ratio as one comparison estimated it, and that estimate's degrees of freedom.

    Per pair and not of the mean, so that 5 pairs and 10 pairs speak of the same thing.
    """

    variance: float
    df: float


class History(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What earlier runs under the same comparability key say of a row, oldest first.

    `noise` comes from earlier A/B and A/A comparisons (`Verdict.noise`), changed code or not: it speaks of
    spread only. `runs` holds run means in ms (`noise.run_mean`) of runs of *unchanged* code only.
    """

    noise: tuple[Noise, ...] = ()
    runs: tuple[float, ...] = ()


class Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One commit's processes. Tuples are indexed by pair; NaN where a process has no value.

    `medians` holds each process's value of the primary metric, `metrics` those of the others.

    `status` is how the processes ended together (`store.record.ended`), None where the commit has no such row
    at all; `failures` counts those that did not end well, by status.
    """

    status: Status | None = "ok"
    reason: str | None = None
    medians: tuple[float, ...] = ()
    metrics: dict[str, tuple[float, ...]] = {}
    failures: dict[str, int] = {}
    throttled: float = 0.0
    """Share of processes that were throttled throughout."""
    clock: float | None = None
    """The processes' median clock, in MHz."""


class Comparison(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Both sides of one row, with what history knows of it.

    `differing` names the comparability fields that differ ("driver: 580 / 590"). `control` is True where
    the two commits cannot differ in this row's code (another library's), which makes it a witness of the
    machine: the shift guard asks these first.
    """

    key: Key
    base: Side
    current: Side
    history: History = History()
    differing: tuple[str, ...] = ()
    control: bool = False
    notes: tuple[str, ...] = ()
    same: str | None = None
    """What of both sides' code is the same, where it is: then there is nothing to decide by times."""
    metric: Metric = LATENCY
    """The primary metric."""
    beside: tuple[Metric, ...] = ()
    """The other metrics that are judged."""


def pooled(earlier: Comparison, fresh: Comparison) -> Comparison:
    """Both measurements of one row as one; what is no number of processes is the fresh one's."""
    width = max(len(earlier.base.medians), len(earlier.current.medians))
    return msgspec.structs.replace(
        fresh,
        base=_joined(earlier.base, fresh.base, width),
        current=_joined(earlier.current, fresh.current, width),
        history=earlier.history,
    )


def _joined(first: Side, second: Side, width: int) -> Side:
    """The second side's processes after the first's, which are filled up to `width`: pairs stay pairs."""
    counts = first.failures.keys() | second.failures.keys()
    made = len(first.medians), len(second.medians)
    return msgspec.structs.replace(
        second,
        medians=(*first.medians, *[math.nan] * (width - made[0]), *second.medians),
        metrics={
            name: (*first.metrics.get(name, ()), *[math.nan] * (width - len(first.metrics.get(name, ()))), *values)
            for name, values in second.metrics.items()
        },
        failures={x: first.failures.get(x, 0) + second.failures.get(x, 0) for x in counts},
        throttled=(first.throttled * made[0] + second.throttled * made[1]) / max(1, sum(made)),
    )


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The thresholds of the detector; fractions, not percent. The defaults are the calibrated ones."""

    fail_above: float = 0.05
    """A regression is more than this; "no change" means the interval lies within this on both sides."""
    warn_above: float = 0.03
    tolerated: float = 0.01
    """The null hypothesis is "slower by at most this": nobody is woken for less."""
    level: float = 0.05
    """One-sided level against what is tolerated; 1 - level is the confidence of intervals."""
    false_calls: float = 0.001
    """How many unchanged rows may be called slower or faster, however many are compared and however noisy."""
    power: float = 0.95
    """How surely a change of `fail_above` is to be found: decides how many fresh pairs a noisy row gets."""
    q: float = 0.05
    """Benjamini-Hochberg's false discovery rate over the rows of a stored comparison."""
    pairs: int = 6
    """First pairs. An even number, so that both sides come first equally often."""
    rerun_pairs: int = 10
    """The least number of fresh pairs."""
    maximum_pairs: int = 100
    """A row that would need more fresh pairs than this is left inconclusive."""
    shift_above: float = 0.01
    """If the median of all unrelated rows moved by more than this, the machine changed and not the code."""
    minimum_runs: int = 10
    maximum_runs: int = 20
    minimum_processes: int = 5
    """Of the side that is judged from storage, over all its runs."""
    run_processes: int = 3
    """A stored run of fewer is none."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerated <= self.warn_above <= self.fail_above < 10:
            raise InputError(
                f"thresholds must rise: tolerated {self.tolerated:g} <= warn above {self.warn_above:g} <= "
                f"fail above {self.fail_above:g} (fractions: 0.05 is 5 %)"
            )
        if self.fail_above <= self.tolerated:
            raise InputError(f"fail above {self.fail_above:g} must exceed what is tolerated, {self.tolerated:g}")
        for name in ("level", "q", "false_calls"):
            if not 0 < getattr(self, name) < 0.5:
                raise InputError(f"{name} is {getattr(self, name):g}; it must lie between 0 and 0.5")
        if not 0.5 < self.power < 1:
            raise InputError(f"power is {self.power:g}; it must lie between 0.5 and 1")
        if not self.shift_above > 0:
            raise InputError(f"shift_above is {self.shift_above:g}; it must be above 0")
        least = min(self.pairs, self.rerun_pairs, self.minimum_processes, self.minimum_runs)
        if least < 3 or self.run_processes < 1:
            raise InputError("pairs, rerun pairs, processes and runs must each be at least 3")
        if self.maximum_pairs < self.rerun_pairs:
            raise InputError(f"maximum_pairs {self.maximum_pairs} is below rerun_pairs {self.rerun_pairs}")
        if self.maximum_runs < self.minimum_runs:
            raise InputError(f"maximum_runs {self.maximum_runs} is below minimum_runs {self.minimum_runs}")
