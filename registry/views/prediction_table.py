"""Steps predicted on more GPUs, and what compressed gradients need of a link, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .. import figures
from ..analysis.scaling import WAY, BreakEven, Link, Prediction
from ..store.record import GPUS
from .table import Block, Column, Table, line

HEADINGS = (
    "case",
    "implementation",
    "from GPUs",
    "GPUs",
    "hosts",
    "predicted ms",
    "efficiency",
    "measured ms",
    "off",
)
EVEN = ("case", "implementation", "GPUs", "way", "compression", "step ms", "plain ms", "break-even GB/s")
SEEN = 1e12
"""Bytes a ms beyond which a fit found none: larger arrays took no longer."""
_TEXTS = ("case", "implementation", "way")


def page(predicted: Iterable[Prediction], even: Iterable[BreakEven], links: Mapping[int, Link]) -> list[Block]:
    """Tables with what they rest on."""
    blocks: list[Block] = []
    for world, link in sorted(links.items()):
        rate = f"{link.beta / 1e6:.4g} GB/s" if link.beta < SEEN else "no time for a byte that could be seen"
        blocks.append(line(f"all-reduce on {world} GPUs: {link.alpha_ms * 1e3:.3g} µs a call, {rate}"))
    if predicted := list(predicted):
        table = _table("PREDICTION, not measured: steps on more GPUs", HEADINGS)
        for x in sorted(predicted, key=lambda x: (x.row.case, x.row.implementation, x.world)):
            table.add(*cells(x))
        blocks.append(table)
    if even := list(even):
        table = _table("Gradients in fewer bytes: shorter steps on links below", EVEN)
        for y in sorted(even, key=lambda y: (y.row.case, y.row.implementation)):
            table.add(*even_cells(y))
        blocks.append(table)
    return blocks


def _table(title: str, headings: tuple[str, ...]) -> Table:
    return Table([Column(x, number=x not in _TEXTS, folds=20 if x == "case" else 0) for x in headings], title)


def cells(x: Prediction) -> tuple[str, ...]:
    """A prediction's texts, in the order of `HEADINGS`."""
    return (
        f"{x.row.operator} {x.row.case}",
        x.row.implementation,
        ", ".join(map(str, x.made_from)),
        str(x.world),
        str(x.hosts),
        figures.number(x.ms),
        figures.percent(x.efficiency, 1),
        figures.number(x.seen_ms),
        figures.signed(x.off),
    )


def even_cells(x: BreakEven) -> tuple[str, ...]:
    """Texts of compressed gradients, in the order of `EVEN`."""
    return (
        f"{x.row.operator} {x.row.case}",
        x.row.implementation,
        str(x.row.axes[GPUS]),
        str(x.row.options[WAY]),
        f"{x.ratio:.3g}",
        figures.number(x.row.value()),
        figures.number(x.plain.value()),
        "any" if x.rate is None else figures.number(x.rate, 3),
    )
