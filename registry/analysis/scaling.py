"""What several GPUs are worth against one of them, and what more of them would be worth. Pure.

* Strong: the same work. E = T₁ / (P·T_P) with T₁ the best correct implementation of one GPU in the same run, not
  only ours: a slow T₁ buys no efficiency. Both times stand beside it.
* Weak: as much work for each GPU (a program, which is measured in work a GPU). E = T₁ / T_P.
* Prediction: a step takes what it computes plus what communication is left when as much of it is hidden as was
  before. Collectives take α a step of their algorithm and 1/β a byte (Hockney 1994). A prediction is drawn as one
  and is no row.
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
    """A row on several GPUs beside the best one of a single GPU. Values are of the primary metric, a time."""

    row: Row
    world: int
    kind: Literal["strong", "weak"]
    value: float
    alone: float
    alone_by: str

    @property
    def efficiency(self) -> float:
        """1 where no GPU waits for another."""
        return self.alone / self.value / (self.world if self.kind == "strong" else 1)


def efficiencies(rows: Iterable[Row]) -> tuple[Scaled, ...]:
    """Every row that ended well on several GPUs, where the run has one of the same work on a single one.

    The same work: axes but for the number of GPUs, options, dtype, pass and cache; by the same operator, or by one
    that this one's name begins with (`attention` of `attention_context_parallel`).
    """
    all_ = [x for x in rows if x.status == "ok" and x.provider != YARDSTICK and x.value() is not None]
    found = []
    for row in all_:
        world = row.axes.get(GPUS, 1)
        if world == 1:
            continue
        alone = [x for x in all_ if GPUS not in x.axes and _same(x, row)]
        best = min(alone, key=_value, default=None)
        if best is not None:
            kind: Literal["strong", "weak"] = "weak" if row.pass_ == "program" else "strong"
            found.append(Scaled(row, world, kind, _value(row), _value(best), best.implementation))
    return tuple(found)


def _value(row: Row) -> float:
    value = row.value()
    assert value is not None
    return value


def _same(alone: Row, row: Row) -> bool:
    named = row.operator == alone.operator or row.operator.startswith(f"{alone.operator}_")

    def work(x: Row) -> tuple[object, ...]:
        axes = {name: size for name, size in x.axes.items() if name != GPUS}
        options = {name: value for name, value in x.options.items() if name != WAY}
        return axes, options, x.dtype, x.pass_, x.cache, x.primary

    return named and work(alone) == work(row)


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
