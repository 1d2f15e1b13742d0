"""What peers' authors published of them (`published.toml`), and how a run's rows stand to it. Pure.

A figure is repeated by a row of the same operator, case and implementation. The GPU of a run is often not the
figure's. Those of `GPUS` multiply at the same rate, so that what is bound by that is compared as it is, and what
is bound by memory as a share of the bandwidth that the GPU's data sheet gives.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from ..store.journal import Journal
from ..store.record import Key
from .rows import Row, rows

TOLERANCE = 0.10
"""By how much a speed may differ from a published one and still agree: drivers, clocks and timers differ."""
GPUS: Mapping[str, tuple[str, float]] = {
    "H100": ("NVIDIA H100 80GB HBM3", 3350.0),
    "H800": ("NVIDIA H800", 3350.0),
    "H200": ("NVIDIA H200", 4800.0),
}
"""GPUs that multiply at the same rate: by name in `published.toml`, how the driver calls it and GB/s of its data
sheet. SXM modules all; others have a lower power limit or other clocks.
"""


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"pass_": "pass"}):
    """One published benchmark. `value` is a throughput, a time or, with `over`, times another's speed.

    `by` is who published it, where that was not the peer's authors; `where` is the place in the source, and its
    flags. `less` and `more` are reasons for a measurement below or above it, `wrong` for an incorrect answer.
    """

    peer: str
    operator: str
    case: str
    axes: dict[str, int]
    dtype: str
    pass_: str
    value: float
    unit: Literal["TFLOP/s", "GB/s", "ms", "×"]
    gpu: str
    bound: Literal["compute", "memory"]
    source: str
    where: str
    date: str
    options: dict[str, bool | int | str] = {}
    over: str = ""
    by: str = ""
    less: str = ""
    more: str = ""
    wrong: str = ""

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise ValueError(f"{self.peer}: gpu is {self.gpu}; there is {', '.join(GPUS)}")
        if not self.value > 0 or (self.unit == "×") != bool(self.over):
            raise ValueError(f"{self.peer}: a value above 0, and `over` exactly where the unit is ×")


class Missing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Peers of which no figure was found, and what was found instead."""

    why: str
    peers: tuple[str, ...]


class Published(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"figures": "figure", "none": "none"}
):
    """The whole table."""

    figures: tuple[Figure, ...]
    none: tuple[Missing, ...]

    @property
    def peers(self) -> frozenset[str]:
        """All that were looked up."""
        return frozenset(x.peer for x in self.figures).union(*(x.peers for x in self.none))


def parse(text: str) -> Published:
    """The table of a TOML text; raises `ValueError` for what is none."""
    return msgspec.convert(tomllib.loads(text), Published)


@cache
def published() -> Published:
    """The table that comes with the program."""
    return parse(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


class Repeat(msgspec.Struct, frozen=True):
    """A figure, and the newest row that repeats it. `measured` is in the figure's unit.

    `speed` is how fast the row is over what the figure says of it on the run's GPU; None where there is no time,
    or the GPU is of another kind.
    """

    figure: Figure
    run: str | None = None
    created: str = ""
    """When the run was made."""
    gpu: str | None = None
    row: Row | None = None
    measured: float | None = None
    speed: float | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether it is as fast as published, within the tolerance; None where that is not known."""
        return None if self.speed is None else abs(self.speed - 1) <= TOLERANCE


def repeats(journals: Iterable[Journal], figures: Iterable[Figure]) -> tuple[Repeat, ...]:
    """Each figure with the newest of the rows that repeat it: of those that can be compared, else of those with a
    time, else of all.
    """
    newest = sorted(journals, key=lambda x: x.header.created, reverse=True)
    read = [(x, {y.identity: y for y in rows(x, beside=False)}) for x in newest]
    return tuple(_repeat(x, read) for x in figures)


def _repeat(figure: Figure, read: Iterable[tuple[Journal, Mapping[Key, Row]]]) -> Repeat:
    found = []
    for journal, known in read:
        row = known.get(Key(figure.operator, figure.case, figure.peer, "cold"))
        if row is not None:
            header, measured = journal.header, _measured(figure, row, known)
            gpu = header.conditions.get("gpu")
            fast = speed(figure, measured, gpu)
            named = None if gpu is None else str(gpu)
            found.append(Repeat(figure, header.run, header.created, named, row, measured, fast))
    return max(found, key=lambda x: (x.speed is not None, x.measured is not None), default=Repeat(figure))


def _measured(figure: Figure, row: Row, known: Mapping[Key, Row]) -> float | None:
    """What the row says in the figure's unit."""
    ms = row.value("latency")
    if not ms:
        return None
    if figure.unit == "ms":
        return ms
    if figure.unit == "×":
        other = known.get(Key(figure.operator, figure.case, figure.over, "cold"))
        base = other.value("latency") if other is not None else None
        return base / ms if base else None
    work, scale = (row.flops, 1e9) if figure.unit == "TFLOP/s" else (row.bytes, 1e6)
    return work / ms / scale if work else None


def speed(figure: Figure, measured: float | None, gpu: object) -> float | None:
    """How fast `measured`, on the GPU of that name, is over the figure, or over what the figure is worth there."""
    kinds = dict(GPUS.values())
    if measured is None or gpu not in kinds:
        return None
    plain = figure.value / measured if figure.unit == "ms" else measured / figure.value
    if figure.unit == "×" or figure.bound == "compute":
        return plain
    return plain * GPUS[figure.gpu][1] / kinds[str(gpu)]
