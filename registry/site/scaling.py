"""Several GPUs: the last time of each row, and its efficiency beside the one-GPU time that it is taken against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..analysis.scaling import Scaled, efficiencies, work
from ..store.record import GPUS, Key
from .facts import Fact, Run
from .timeline import Measured


@dataclass(frozen=True)
class Step:
    """A row on several GPUs, the one-GPU row that it is taken against, and what both say together: None where its
    run has no time of the same work on one.
    """

    run: Run
    fact: Fact
    one: Fact | None = None
    scaled: Scaled | None = None

    @property
    def gpus(self) -> int:
        """Their number."""
        return self.fact.axes[GPUS]


def scaling(measured: Iterable[Measured]) -> tuple[Step, ...]:
    """The newest value of each row on more than one GPU, by operator, work and implementation, over GPUs."""
    by_run: dict[str, list[Measured]] = {}
    for run, fact in measured:
        if fact.number is not None and not fact.scale:
            by_run.setdefault(run.name, []).append((run, fact))
    newest: dict[tuple[str, Key], Step] = {}
    for found in by_run.values():
        if any(fact.axes.get(GPUS, 1) > 1 for _, fact in found):
            newest |= {(x.run.device, x.fact.identity): x for x in _of_run(found)}
    return tuple(sorted(newest.values(), key=_place))


def _of_run(found: Sequence[Measured]) -> Iterator[Step]:
    facts = {fact.identity: fact for _, fact in found}
    scaled = {x.row.identity: x for x in efficiencies(x.row() for x in facts.values())}
    for run, fact in found:
        if fact.axes.get(GPUS, 1) > 1:
            known = scaled.get(fact.identity)
            yield Step(run, fact, facts[known.one.identity], known) if known else Step(run, fact)


def _place(step: Step) -> tuple[str, str, str, int]:
    return step.fact.operator, str(work(step.fact.row())), step.fact.implementation, step.gpus
