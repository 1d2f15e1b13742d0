"""Several GPUs: time and efficiency over the number of them, beside the one-GPU time they are taken against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .facts import Fact, Run
from .timeline import Measured

WORLD = "gpus"
"""The axis that names a case's world; a case without it is on one."""


@dataclass(frozen=True)
class Step:
    """A row on so many GPUs. `efficiency` is the best one-GPU time of the run over GPUs times this time."""

    run: Run
    fact: Fact
    gpus: int
    one: Fact | None

    @property
    def speedup(self) -> float | None:
        """Over the best one-GPU row of its run."""
        if self.one is None or self.one.number is None or self.fact.number is None:
            return None
        first, now = self.one.number[0], self.fact.number[0]
        higher = self.fact.better == "higher"
        return (now / first if higher else first / now) if first > 0 and now > 0 else None

    @property
    def efficiency(self) -> float | None:
        """Speedup over GPUs."""
        return None if self.speedup is None else self.speedup / self.gpus


def scaling(measured: Iterable[Measured]) -> tuple[Step, ...]:
    """The newest value of each row on more than one GPU, with the best correct one on one GPU of the same run.

    A pair is the same operator and sizes, so what is split is the problem of the one GPU.
    """
    measured = [x for x in measured if x[1].number is not None]
    worlds = {(fact.operator, run.name) for run, fact in measured if fact.axes.get(WORLD, 1) > 1}
    newest: dict[tuple[str, object], Measured] = {}
    ones: dict[tuple[object, ...], Fact] = {}
    for run, fact in measured:
        if (fact.operator, run.name) not in worlds:
            continue
        if fact.axes.get(WORLD, 1) > 1:
            newest[run.device, fact.identity] = run, fact
        else:
            key = (run.name, *_problem(fact))
            ones[key] = min((fact, ones[key]), key=_worth) if key in ones else fact
    steps = (
        Step(run, fact, fact.axes[WORLD], ones.get((run.name, *_problem(fact)))) for run, fact in newest.values()
    )
    return tuple(
        sorted(steps, key=lambda x: (x.fact.operator, str(_problem(x.fact)), x.fact.implementation, x.gpus))
    )


def _problem(fact: Fact) -> tuple[object, ...]:
    axes = tuple(sorted((x, y) for x, y in fact.axes.items() if x != WORLD))
    options = tuple(sorted((x, str(y)) for x, y in fact.options.items()))
    return fact.operator, axes, options, fact.dtype, fact.pass_, fact.cache


def _worth(fact: Fact) -> float:
    value = fact.number[0] if fact.number else float("inf")
    return -value if fact.better == "higher" else value
