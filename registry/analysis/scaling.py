"""What several GPUs are worth against one of them, and what more of them would be worth. Pure.

* Strong: the same work. E = T₁ / (P·T_P) with T₁ the best correct implementation of one GPU in the same run, not
  only ours: a slow T₁ buys no efficiency. Both times stand beside it.
* Weak: as much work for each GPU (a program whose GPUs have tokens of their own). E = T₁ / T_P. Strong beside it,
  where the run has one GPU with the tokens of all.
* Prediction: a step takes what it computes plus what communication is left when as much of it is hidden as was
  before. Collectives take α and 1/β a byte (Hockney 1994), fitted to the run's own all-reduces. A prediction is no
  row, and stands beside what was measured where that is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import msgspec

from ..errors import KernelmarkError
from ..store.journal import Journal
from ..store.metric import EACH
from ..store.record import GPUS, YARDSTICK, Key
from .rows import Row, rows


class NothingToPredict(KernelmarkError):
    """A run lacks what a prediction is made from."""

    exit_code = 4


WAY = "parallel"
"""The option that says how a program is spread, which one of a single GPU has at another value."""
SHARED = ("tensor", "sequence", "context")
"""Its values by which GPUs share a step's tokens."""
NO_WORK = (GPUS, "follow")
"""Axes that do not change what is computed in the time."""


@dataclass(frozen=True)
class Scaled:
    """A row on several GPUs, and the best one of a single GPU. Values are of the primary metric, in ms."""

    row: Row
    one: Row

    @property
    def world(self) -> int:
        """Its number of GPUs."""
        return self.row.axes[GPUS]

    @property
    def kind(self) -> Literal["strong", "weak"]:
        """Whether the GPUs share the work of the one, or each has as much."""
        return "weak" if _own_tokens(self.row) and self.one.axes.get("B") == self.row.axes.get("B") else "strong"

    @property
    def ideal(self) -> int:
        """How many times the one GPU's speed it has at best."""
        return self.world if self.kind == "strong" else 1

    @property
    def value(self) -> float:
        """Its time."""
        return _value(self.row)

    @property
    def alone(self) -> float:
        """That of one GPU."""
        return _value(self.one)

    @property
    def efficiency(self) -> float:
        """1 where no GPU waits for another."""
        return self.alone / self.value / self.ideal


def efficiencies(rows: Iterable[Row]) -> tuple[Scaled, ...]:
    """Every row of one run that has a time on several GPUs, where the run has one of the same `work` on one GPU,
    by the same operator or by one that this one's name begins with (`attention` of `attention_context_parallel`).
    That one may have axes and options which this one lacks: names of cases leave their defaults out.

    Of an implementation that each of as many GPUs, or more, computed the whole by, the time is the slowest GPU's.
    """
    timed = [x for x in rows if x.provider != YARDSTICK and _timed(x)]
    alone: dict[object, list[Row]] = {}
    for x in timed:
        if x.axes.get(GPUS, 1) == 1 or by_each(x):
            alone.setdefault(work(x), []).append(x)
            alone.setdefault(_named(x), []).append(x)
    found = []
    for row in timed:
        if row.axes.get(GPUS, 1) > 1 and not by_each(row):
            same = (*alone.get(work(row), ()), *alone.get(_named(row), ()))
            one = _ones([x for x in same if f"{row.operator}_".startswith(f"{x.operator}_")], row.axes[GPUS])
            if one:
                found.append(Scaled(row, min(one, key=_value)))
    return tuple(found)


def by_each(row: Row) -> bool:
    """Whether each of its GPUs computed the whole."""
    return EACH.name in row.metrics


def _ones(found: Iterable[Row], world: int) -> list[Row]:
    """One-GPU rows of each implementation: of those that each of `world` GPUs has a time of the one of the fewest,
    its value the slowest GPU's; else the row of one GPU.
    """
    known: dict[object, Row] = {}
    for x in sorted(found, key=lambda x: x.axes.get(GPUS, 1), reverse=True):
        name = x.operator, x.implementation
        if x.axes.get(GPUS, 1) >= world and by_each(x):
            known[name] = msgspec.structs.replace(x, metrics={**x.metrics, x.primary: x.metrics[EACH.name]})
        elif x.axes.get(GPUS, 1) == 1:
            known.setdefault(name, x)
    return list(known.values())


def each_gpu(journal: Journal) -> Mapping[Key, tuple[float, ...]]:
    """Of rows whose GPUs each computed the whole, every GPU's time in ms by rank: the median over processes."""
    found: dict[Key, list[tuple[float, ...]]] = {}
    for record in journal.records:
        if record.measurement is not None and (samples := record.measurement.samples.get(EACH.name)):
            found.setdefault(record.identity, []).append(samples)
    # As many in each process, or the journal is somebody's who may write anything.
    return {key: tuple(map(median, zip(*all_, strict=False))) for key, all_ in found.items()}


def strong_besides(rows: Iterable[Row]) -> tuple[Scaled, ...]:
    """Programs whose GPUs have tokens of their own, B sequences each, against the best of one GPU that has all of
    them, B times the number of GPUs: strong scaling beside the weak one.
    """
    timed = [x for x in rows if x.provider != YARDSTICK and _timed(x) and x.pass_ == "program"]
    alone: dict[object, list[Row]] = {}
    for x in timed:
        if x.axes.get(GPUS, 1) == 1:
            alone.setdefault((x.operator, work(x)), []).append(x)
    found = []
    for row in timed:
        if row.axes.get(GPUS, 1) > 1 and _own_tokens(row) and "B" in row.axes:
            all_ = msgspec.structs.replace(row, axes={**row.axes, "B": row.axes["B"] * row.axes[GPUS]})
            if one := alone.get((row.operator, work(all_))):
                found.append(Scaled(row, min(one, key=_value)))
    return tuple(found)


def _own_tokens(row: Row) -> bool:
    """Whether each GPU has as much work as one of them alone."""
    return row.pass_ == "program" and row.options.get(WAY) not in SHARED


def _named(row: Row) -> tuple[object, ...]:
    """What a row computes by its case's name, without the number of GPUs."""
    return row.case.replace(f"-{GPUS}{row.axes.get(GPUS, 1)}-", "-", 1), row.cache, row.primary


def work(row: Row) -> tuple[object, ...]:
    """What a row computes, on however many GPUs: axes, options, dtype, pass, cache, and what is measured."""
    axes = tuple(sorted((name, size) for name, size in row.axes.items() if name not in NO_WORK))
    options = tuple(sorted((name, value) for name, value in row.options.items() if name != WAY))
    return axes, options, row.dtype, row.pass_, row.cache, row.primary


def _timed(row: Row) -> bool:
    found = row.get()
    return row.status == "ok" and found is not None and found.unit == "ms" and found.value > 0


def _value(row: Row) -> float:
    value = row.value()
    assert value is not None
    return value


@dataclass(frozen=True)
class Link:
    """What a collective's time follows from: α in ms, β in bytes a ms."""

    alpha_ms: float
    beta: float

    def all_reduce_ms(self, size: float, world: int) -> float:
        """Time of an all-reduce of `size` bytes over so many GPUs of a host: α, and 2(n-1)/n of the bytes a link.

        One α, not one a step of a ring: of a small array a launch and its ranks' meeting take most, whatever their
        number. NCCL took 39 µs for 4 MiB over two H200 and 46 over four (`20261129-200344-b173`), where steps
        would have made 97 of it.
        """
        return self.alpha_ms + 2 * (world - 1) / world * size / self.beta

    def ring_ms(self, size: float, hosts: int) -> float:
        """Time of an all-reduce over hosts: 2(n-1) messages one after the other, each of which takes α."""
        return 2 * (hosts - 1) * (self.alpha_ms + size / hosts / self.beta)


def fitted(times_ms: Sequence[tuple[float, float]], world: int) -> Link:
    """The link that all-reduces of (bytes, ms) over so many GPUs were made with, by least squares of relative
    deviations. Raises ValueError for fewer than two sizes.
    """
    if len({size for size, _ in times_ms}) < 2:
        raise ValueError("a link has two unknowns: all-reduces of at least two sizes are needed")
    # t = α + 2(n-1)/n·S·(1/β), each equation divided by its t.
    a = [1 / t for _, t in times_ms]
    b = [2 * (world - 1) / world * size / t for size, t in times_ms]
    aa, ab, bb = _dot(a, a), _dot(a, b), _dot(b, b)
    determinant = aa * bb - ab * ab
    alpha = (sum(a) * bb - sum(b) * ab) / determinant
    inverse = (sum(b) * aa - sum(a) * ab) / determinant
    # Neither can be below zero; where one would be, the other is fitted without it, not kept as it was beside it.
    if alpha < 0:
        alpha, inverse = 0.0, sum(b) / bb
    elif inverse < 0:
        alpha, inverse = sum(a) / aa, 0.0
    return Link(alpha, 1 / max(inverse, 1e-300))


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class Step:
    """A training step as the prediction sees it: what it computes, and the buckets of gradients that it sends."""

    compute_ms: float
    buckets: tuple[float, ...]
    """Bytes of each all-reduce."""
    hidden_ms: float
    """Communication that runs beside computation, as much as was seen. Where all of it was hidden there may be
    room for more, and predictions are from above."""
    other_ms: float = 0.0
    """What the step on several GPUs took longer than all of its communication explains: it stays."""
    sent_ms: float = 0.0
    """All of its communication where it was measured."""
    share: float = 1.0
    """Of communication beyond that, what nothing hides: all, where steps of one number of GPUs are known alone."""

    @classmethod
    def measured(cls, alone_ms: float, step_ms: float, world: int, buckets: Sequence[float], link: Link) -> Step:
        """From one GPU's step and that of `world` GPUs with as much work each."""
        sent = sum(link.all_reduce_ms(x, world) for x in buckets)
        exposed = max(0.0, step_ms - alone_ms)
        return cls(alone_ms, tuple(buckets), max(0.0, sent - exposed), max(0.0, exposed - sent), sent)

    @classmethod
    def trend(cls, fewer: Step, more: Step) -> Step:
        """From those measured on two numbers of GPUs: of more communication as large a share is exposed as of what
        the larger number sends more than the smaller one. All, where the smaller one hid all, as any more may be
        exposed then, and where both send alike.
        """
        sent = more.sent_ms - fewer.sent_ms
        if sent <= 0 or not fewer.exposed_ms:
            return more
        return replace(more, share=min(1.0, max(0.0, (more.exposed_ms - fewer.exposed_ms) / sent)))

    @property
    def exposed_ms(self) -> float:
        """What it took longer than one GPU's, where it was measured."""
        return max(0.0, self.sent_ms - self.hidden_ms) + self.other_ms

    def predicted_ms(self, world: int, link: Link, between: Link | None = None, hosts: int = 1) -> float:
        """Time of the step on `world` GPUs of each of so many hosts, which `between` links.

        Hosts exchange what each has added up: an all-reduce within, one between the hosts of each GPU's share.
        """
        sent = sum(link.all_reduce_ms(x, world) for x in self.buckets)
        if hosts > 1:
            if between is None:
                raise ValueError("several hosts need the link between them")
            sent += sum(between.ring_ms(x / world, hosts) for x in self.buckets)
        left, known = (max(0.0, x - self.hidden_ms) for x in (sent, self.sent_ms))
        if left > known:
            left = known + self.share * (left - known)
        return self.compute_ms + left + self.other_ms


@dataclass(frozen=True)
class Prediction:
    """A step on more GPUs than it was measured on."""

    row: Row
    """What it is predicted from: that on most GPUs, if on several numbers."""
    alone_ms: float
    """The same implementation's step on one GPU."""
    world: int
    """GPUs of each host."""
    hosts: int
    ms: float
    seen_ms: float | None
    """What the run measured on as many; None where it did not."""
    made_from: tuple[int, ...]
    """The numbers of GPUs whose steps it is made of."""

    @property
    def efficiency(self) -> float:
        """Weak, where each GPU has as much work as the one; strong, where they share it."""
        return self.alone_ms / self.ms / (self.world if self.row.options.get(WAY) in SHARED else 1)

    @property
    def off(self) -> float | None:
        """By how much the prediction is above what was measured, relative."""
        return None if self.seen_ms is None else self.ms / self.seen_ms - 1


@dataclass(frozen=True)
class BreakEven:
    """Gradients that are sent in fewer bytes, beside the same step that sends them as they are."""

    row: Row
    plain: Row
    ratio: float
    rate: float | None
    """GB/s of a link's each direction below which the compressed step is the shorter one; None where it is at any
    rate. Of communication that nothing hides; where some is hidden it is less."""


ALL_REDUCE, SENT, RATIO = "all_reduce", "sent", "compression_ratio"
NCCL = "torch_distributed"
"""Whose all-reduces a program's are."""


def links(found: Iterable[Row]) -> dict[int, Link]:
    """By number of GPUs, from a run's all-reduces in place, or where there are too few, out of place."""
    times: dict[int, dict[object, list[tuple[float, float]]]] = {}
    for row in found:
        if row.operator == ALL_REDUCE and row.implementation == NCCL and _timed(row) and row.bytes:
            # The array is read and written once. What follows from times makes several sizes of one.
            world, size = row.axes.get(GPUS, 1), row.bytes / 2
            if world > 1:
                times.setdefault(world, {}).setdefault(row.options.get("place"), []).append((size, _value(row)))
    made = {}
    for world, by_place in times.items():
        for place in ("in", "out"):
            if world not in made and len({size for size, _ in by_place.get(place, ())}) > 1:
                made[world] = fitted(by_place[place], world)
    return made


def predictions(
    journal: Journal, worlds: Sequence[int], hosts: int = 1, between: Link | None = None
) -> tuple[Prediction, ...]:
    """The steps of a run on so many GPUs of each of so many hosts, each from the next smaller worlds of the run
    that have its step and all-reduces, two if there are two, and that of the same implementation on one GPU.
    """
    found = rows(journal)
    known, sent = links(found), _sent(journal)
    alone = {(work(x), x.implementation): _value(x) for x in found if _timed(x) and x.axes.get(GPUS, 1) == 1}
    steps: dict[object, dict[int, Row]] = {}
    for row in found:
        if row.pass_ == "program" and _timed(row) and row.axes.get(GPUS, 1) > 1:
            steps.setdefault((work(row), row.options.get(WAY), row.implementation), {})[row.axes[GPUS]] = row
    made = []
    for by_world in steps.values():
        for world in worlds:
            smaller = [x for x in by_world if (x < world or hosts > 1) and x <= world and x in known]
            if not smaller:
                continue
            row = by_world[max(smaller)]
            one = alone.get((work(row), row.implementation))
            if one is None or not sent.get(row.identity):
                continue
            taken = [x for x in sorted(smaller) if sent.get(by_world[x].identity)][-2:]
            shared = row.options.get(WAY) in SHARED
            if shared and hosts > 1:
                continue  # what a step's GPUs share they exchange over all hosts at each layer: no bucket of it
            steps_ = [
                Step.measured(
                    one / x if shared else one, _value(by_world[x]), x, sent[by_world[x].identity], known[x]
                )
                for x in taken
            ]
            step = steps_[-1] if len(steps_) == 1 else Step.trend(*steps_)
            step = replace(step, compute_ms=one / world) if shared else step
            seen = by_world.get(world) if hosts == 1 else None
            ms = step.predicted_ms(world, known[row.axes[GPUS]], between, hosts)
            seen_ms = None if seen is None else _value(seen)
            made.append(Prediction(row, one, world, hosts, ms, seen_ms, tuple(taken)))
    return tuple(made)


def break_evens(journal: Journal) -> tuple[BreakEven, ...]:
    """Every step of a run that sends gradients in fewer bytes, where the run has the same one that does not."""
    found = rows(journal)
    known, sent = links(found), _sent(journal)
    timed = [x for x in found if x.pass_ == "program" and _timed(x) and x.axes.get(GPUS, 1) in known]
    made = []
    for row in timed:
        way = str(row.options.get(WAY)).partition("_")[0]
        same = (work(row), row.implementation, row.axes[GPUS])
        plain = next(
            (x for x in timed if (work(x), x.implementation, x.axes[GPUS]) == same and x.options.get(WAY) == way),
            None,
        )
        if RATIO not in row.metrics or plain is None or not (sent.get(row.identity) and sent.get(plain.identity)):
            continue
        world, link = row.axes[GPUS], known[row.axes[GPUS]]
        fewer = sum(sent[plain.identity]) - sum(sent[row.identity])
        if fewer <= 0:
            continue
        # What it costs beside the bytes that it saves: a link of this rate saves so many ms of them.
        moved = 2 * (world - 1) / world * fewer
        cost = _value(row) - _value(plain) + moved / link.beta
        rate = moved / cost / 1e6 if cost > 0 else None
        made.append(BreakEven(row, plain, row.metrics[RATIO].value, rate))
    return tuple(made)


def _sent(journal: Journal) -> Mapping[Key, tuple[float, ...]]:
    """The all-reduces that a step's communication is like, bytes of each; of several processes the middle ones."""
    found: dict[Key, list[tuple[float, ...]]] = {}
    for record in journal.records:
        if record.measurement is not None and (samples := record.measurement.samples.get(SENT)):
            found.setdefault(record.identity, []).append(samples)
    return {
        key: tuple(map(median, zip(*all_, strict=True))) if len(set(map(len, all_))) == 1 else all_[0]
        for key, all_ in found.items()
    }
