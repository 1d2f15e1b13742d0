"""Training another way on a report's page: is it as good? Verdicts, differences by step, gradients by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from .. import figures
from ..analysis.health import Layer, layers
from ..detection.arms import PRIMARY, Arm, arms, differences, measurements, rates_tried
from ..store.journal import Journal
from ..store.metric import Equivalence
from . import lines
from .convergence_table import remarks, rows_of
from .looks import Series, apart

OPERATOR = "converge"
"""The workload whose arms are judged."""


@dataclass(frozen=True)
class Convergence:
    """One case: its arms beside the base."""

    case: str
    base: str
    arms: tuple[tuple[Arm, tuple[tuple[str, ...], ...], tuple[str, ...]], ...]
    """Each with its rows in the order of `convergence_table.HEADINGS`, and remarks."""
    rate: str | None
    """What is wrong with the base's learning rate."""
    margin: float
    looks: tuple[Series, ...]
    drawing: str | None
    """Differences by step, between the bounds of their 95 % intervals."""
    health: tuple[tuple[str, tuple[Layer, ...]], ...]
    """By arm, the base's first."""


def convergences(
    journal: Journal, looks: Mapping[str, Series], beside: Sequence[Journal] = ()
) -> tuple[Convergence, ...]:
    """Every case in which a model is trained to a loss. Runs `beside` it may have tried other learning rates."""
    tried, apart_by_step, seeds = rates_tried(journal, beside), differences(journal), measurements(journal)
    margin = next(
        (
            x.judged.margin
            for x in journal.header.metrics
            if x.name == PRIMARY and isinstance(x.judged, Equivalence)
        ),
        0.0,
    )
    found = []
    for case, group in groupby(arms(journal), key=lambda x: x.case):
        own = tuple(group)
        drawn = apart_by_step.get(case, {})
        # With the base, so that an arm looks here as in its curves.
        distinct = apart(looks[x] for x in looks if x in drawn or x == own[0].base)
        health = ((x, layers(y.values())) for x, y in seeds.get(case, {}).items())
        found.append(
            Convergence(
                case,
                own[0].base,
                tuple((x, tuple(rows_of(x)), tuple(remarks(x))) for x in own),
                tried.get(case),
                margin,
                tuple(x for x in distinct.values() if x.name in drawn),
                _drawing(case, own[0].base, drawn, distinct, margin),
                tuple((x, y) for x, y in health if y),
            )
        )
    return tuple(found)


def _drawing(
    case: str,
    base: str,
    drawn: Mapping[str, Mapping[float, tuple[float, float, float]]],
    looks: Mapping[str, Series],
    margin: float,
) -> str | None:
    points = {
        name: {step: (100 * low, 100 * middle, 100 * high) for step, (low, middle, high) in line.items()}
        for name, line in drawn.items()
        if name in looks
    }
    if not points:
        return None
    text = f"Difference of validation bits a byte to {base} by step, {case}"
    return lines.curves(points, looks, text, 100 * margin or None, " %")


def layer_cells(x: Layer) -> tuple[str, ...]:
    """A layer's texts."""
    least, largest = x.norm or (None, None)
    cosine, step = x.cosine or (None, None)
    norm = f"{figures.number(least, 3)} to {figures.number(largest, 3)}" if x.norm else ""
    exploded = f"not finite at {x.exploded:,}" if x.exploded is not None else ""
    return (
        "; ".join(filter(None, (norm, exploded))) or figures.DASH,
        figures.number(x.update, 3),
        figures.DASH if cosine is None else f"{cosine:.4f} at {step:,}",
        figures.percent(x.saturation, 3),
        figures.percent(x.underflow, 2),
        figures.number(x.amax, 3),
    )
