"""The health of a training run's gradients, layer by layer: the worst over all looks and seeds. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from ..store.record import Measurement

STEP, LAYER = "health_step", "health_layer"
EXPLODED_STEP, EXPLODED_LAYER = "exploded_step", "exploded_layer"
REST = -1
"""The number of what is in no layer."""


class Layer(msgspec.Struct, frozen=True):
    """One layer. None where it was not looked at."""

    layer: int
    norm: tuple[float, float] | None
    """Of its gradient before clipping: least and largest."""
    update: float | None
    """Largest norm of an update over that of the weights."""
    cosine: tuple[float, int] | None
    """Least cosine to the gradient in fp32, and the step of that look."""
    saturation: float | None
    """Largest share of elements beyond the largest of 8 bits."""
    underflow: float | None
    """Largest share of elements that become 0."""
    amax: float | None
    """Largest magnitude."""
    exploded: int | None = None
    """The first step at which what was seen of it was not finite."""

    @property
    def name(self) -> str:
        """As a table says it."""
        return "in no layer" if self.layer == REST else f"layer {self.layer}"


def layers(seeds: Iterable[Measurement]) -> tuple[Layer, ...]:
    """All layers that were looked at, in their order, what is in none last."""
    seen: dict[int, dict[str, list[tuple[float, int]]]] = {}
    seeds = tuple(seeds)
    for x in seeds:
        places = tuple(zip(x.samples.get(LAYER, ()), x.samples.get(STEP, ()), strict=False))
        for name, values in x.samples.items():
            if name.endswith("_by_layer"):
                for value, (layer, step) in zip(values, places, strict=False):
                    own = seen.setdefault(int(layer), {})
                    own.setdefault(name.removesuffix("_by_layer"), []).append((value, int(step)))
    exploded: dict[int, int] = {}
    for x in seeds:
        for layer, step in zip(x.samples.get(EXPLODED_LAYER, ()), x.samples.get(EXPLODED_STEP, ()), strict=False):
            exploded[int(layer)] = min(int(step), exploded.get(int(layer), int(step)))
            seen.setdefault(int(layer), {})
    order = sorted(seen, key=lambda x: math.inf if x == REST else x)
    return tuple(_layer(x, seen[x], exploded.get(x)) for x in order)


def _layer(layer: int, seen: dict[str, list[tuple[float, int]]], exploded: int | None) -> Layer:
    def most(name: str) -> float | None:
        return max((x for x, _ in seen.get(name, ())), default=None)

    norms = [x for x, _ in seen.get("gradient_norm", ())]
    return Layer(
        layer,
        (min(norms), max(norms)) if norms else None,
        most("update_ratio"),
        min(seen.get("gradient_cosine", ()), default=None),
        most("fp8_saturation"),
        most("fp8_underflow"),
        most("fp8_amax"),
        exploded,
    )
