"""What several GPUs are worth against one of them, and what more of them would be worth. Pure.

* Strong: the same work. E = T₁ / (P·T_P) with T₁ the best correct implementation of one GPU in the same run, not
  only ours: a slow T₁ buys no efficiency. Both times stand beside it.
* Weak: as much work for each GPU (a program, which is measured in work a GPU). E = T₁ / T_P.
* Prediction: a step takes what it computes plus what communication is left when as much of it is hidden as was
  before. Collectives take α a step of their algorithm and 1/β a byte (Hockney 1994). A prediction is no row, and
  no command shows one: it is given the bytes of each all-reduce, which no journal holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..store.record import GPUS, YARDSTICK
from .rows import Row

WAY = "parallel"
"""The option that says how a program is spread, which one of a single GPU has at another value."""


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
        return "weak" if self.row.pass_ == "program" else "strong"

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
    """
    timed = [x for x in rows if x.provider != YARDSTICK and _timed(x)]
    alone: dict[object, list[Row]] = {}
    for x in timed:
        if x.axes.get(GPUS, 1) == 1:
            alone.setdefault(work(x), []).append(x)
    found = []
    for row in timed:
        if row.axes.get(GPUS, 1) > 1:
            same = [x for x in alone.get(work(row), ()) if f"{row.operator}_".startswith(f"{x.operator}_")]
            if same:
                found.append(Scaled(row, min(same, key=_value)))
    return tuple(found)


def work(row: Row) -> tuple[object, ...]:
    """What a row computes, on however many GPUs: axes, options, dtype, pass, cache, and what is measured."""
    axes = tuple(sorted((name, size) for name, size in row.axes.items() if name != GPUS))
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
    """What a collective's time follows from: α in ms a step, β in bytes a ms."""

    alpha_ms: float
    beta: float

    def all_reduce_ms(self, size: float, world: int) -> float:
        """Time of an all-reduce of `size` bytes over so many GPUs: 2(n-1) steps, 2(n-1)/n of the bytes a link."""
        return 2 * (world - 1) * (self.alpha_ms + size / world / self.beta)


def fitted(times_ms: Sequence[tuple[float, float]], world: int) -> Link:
    """The link that all-reduces of (bytes, ms) over so many GPUs were made with, by least squares of relative
    deviations. Raises ValueError for fewer than two sizes.
    """
    if len({size for size, _ in times_ms}) < 2:
        raise ValueError("a link has two unknowns: all-reduces of at least two sizes are needed")
    steps = 2 * (world - 1)
    # t = steps·α + steps·S/world·(1/β), each equation divided by its t.
    a = [steps / t for _, t in times_ms]
    b = [steps * size / world / t for size, t in times_ms]
    aa, ab, bb = _dot(a, a), _dot(a, b), _dot(b, b)
    determinant = aa * bb - ab * ab
    alpha = (sum(a) * bb - sum(b) * ab) / determinant
    inverse = (sum(b) * aa - sum(a) * ab) / determinant
    return Link(max(alpha, 0.0), 1 / max(inverse, 1e-300))


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

    @classmethod
    def measured(cls, alone_ms: float, step_ms: float, world: int, buckets: Sequence[float], link: Link) -> Step:
        """From one GPU's step and that of `world` GPUs with as much work each."""
        sent = sum(link.all_reduce_ms(x, world) for x in buckets)
        exposed = max(0.0, step_ms - alone_ms)
        return cls(alone_ms, tuple(buckets), max(0.0, sent - exposed))

    def predicted_ms(self, world: int, link: Link, between: Link | None = None, hosts: int = 1) -> float:
        """Time of the step on `world` GPUs of each of so many hosts, which `between` links.

        Hosts exchange what each has added up: an all-reduce within, one between the hosts of each GPU's share.
        """
        sent = sum(link.all_reduce_ms(x, world) for x in self.buckets)
        if hosts > 1:
            if between is None:
                raise ValueError("several hosts need the link between them")
            sent += sum(between.all_reduce_ms(x / world, hosts) for x in self.buckets)
        return self.compute_ms + max(0.0, sent - self.hidden_ms)
