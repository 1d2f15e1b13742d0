"""Gradient health, layer by layer: norms, updates, closeness to the gradient in fp32, and what 8 bits lose."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import _expected as answer
from ._arms import ArmTrainer
from ._recipe import Recipe

if TYPE_CHECKING:
    import torch

    from ..catalog import Catalog

EVERY = 500
"""Steps between two looks."""
REST = -1.0
"""The number of what is in no layer: tables and the last norm."""
CURVES = ("gradient_norm", "update_ratio", "gradient_cosine", "fp8_saturation", "fp8_underflow", "fp8_amax")


def layer_of(name: str) -> float:
    """The layer that a parameter is in."""
    found = re.match(r"layers\.(\d+)\.", name)
    return float(found[1]) if found else REST


@dataclass
class Health:
    """What was seen, by step and layer: entries of all lists belong together."""

    at: list[tuple[float, float]] = field(default_factory=list)
    """(step, layer)."""
    values: dict[str, list[float]] = field(default_factory=lambda: {x: [] for x in CURVES})
    low: float | None = None
    """The share of product operations in 8 bits that a pass was counted to make; None where it cannot be."""

    def look(self, trainer: ArmTrainer, batch: tuple[Any, Any], step: int, reference: Reference | None) -> Any:
        """Takes a step and looks at it; gives its loss."""
        wide = None
        before = {name: x.clone() for name, x in trainer.weights().items()}
        if reference is not None:
            wide = reference.gradients(before, batch)
        if trainer.probe is not None:
            self.low = trainer.watch(*(x[0] for x in batch))
        loss = trainer.step(*batch)
        self._note(trainer, before, step, wide)
        return loss

    def _note(
        self, trainer: ArmTrainer, before: Mapping[str, Any], step: int, wide: Mapping[str, Any] | None
    ) -> None:
        gradients, after = trainer.gradients(), trainer.weights()
        clip = trainer.recipe.clip
        unclipped = max(1.0, float(trainer.norm) / clip) if clip else 1.0
        by_layer: dict[float, list[str]] = {}
        for name in gradients:
            by_layer.setdefault(layer_of(name), []).append(name)
        lost = _losses(trainer)
        for layer in sorted(by_layer):
            names = by_layer[layer]
            norm = _norm(gradients[x] for x in names)
            changed = _norm(after[x].float() - before[x].float() for x in names)
            values = {
                "gradient_norm": norm * unclipped,
                "update_ratio": changed / max(_norm(before[x] for x in names), 1e-30),
                "gradient_cosine": _cosine(gradients, wide, names) if wide is not None else 1.0,
                **lost.get(layer, dict.fromkeys(("fp8_saturation", "fp8_underflow", "fp8_amax"), 0.0)),
            }
            self.at.append((float(step), layer))
            for name in CURVES:
                self.values[name].append(values[name])

    def _seen(self, i: int) -> Iterator[float]:
        return (x[i] for x in self.values.values())

    def exploded(self) -> str:
        """Where the last look was not finite, in words; empty where it was, or nothing was looked at."""
        last = [i for i, (step, _) in enumerate(self.at) if step == self.at[-1][0]]
        wrong = [int(self.at[i][1]) for i in last if not all(map(math.isfinite, self._seen(i)))]
        if not wrong:
            return ""
        named = ", ".join("what is in no layer" if x == REST else f"layer {x}" for x in wrong)
        return f"; at step {int(self.at[-1][0])} what was looked at of {named} was not"

    def samples(self, compared: bool, eight_bits: bool) -> dict[str, tuple[float, ...]]:
        """As metrics: the curves over steps and layers, and the worst of each, of what was looked at; and where
        that was not finite, which no journal can hold.
        """
        finite = [i for i, _ in enumerate(self.at) if all(map(math.isfinite, self._seen(i)))]
        found = _exploded([x for i, x in enumerate(self.at) if i not in set(finite)])
        if not finite:
            return found
        left_out = (() if compared else ("gradient_cosine",)) + (
            () if eight_bits else ("fp8_saturation", "fp8_underflow", "fp8_amax")
        )
        kept = [x for x in CURVES if x not in left_out]
        found |= {f"{x}_by_layer": tuple(_short(self.values[x][i]) for i in finite) for x in kept}
        found["health_step"] = tuple(self.at[i][0] for i in finite)
        found["health_layer"] = tuple(self.at[i][1] for i in finite)
        for name, worst in (
            ("gradient_cosine", min),
            ("update_ratio", max),
            ("fp8_saturation", max),
            ("fp8_underflow", max),
        ):
            if name in kept:
                found[name] = (worst(found[f"{name}_by_layer"]),)
        return found


def _exploded(at: list[tuple[float, float]]) -> dict[str, tuple[float, ...]]:
    """As metrics: steps and layers of looks that were not finite."""
    if not at:
        return {}
    return {"exploded_step": tuple(x for x, _ in at), "exploded_layer": tuple(x for _, x in at)}


def _losses(trainer: ArmTrainer) -> dict[float, dict[str, float]]:
    """What 8 bits lose by layer, the worst of its tensors."""
    if trainer.probe is None:
        return {}
    found: dict[float, dict[str, float]] = {}
    for (place, _), values in trainer.probe.seen.items():
        layer = float(trainer.probe.layers[place])
        own = found.setdefault(layer, dict.fromkeys(("fp8_saturation", "fp8_underflow", "fp8_amax"), 0.0))
        for name, value in zip(own, values, strict=True):
            # Of NaN and a number, Python's max is the first.
            own[name] = value if math.isnan(value) else max(own[name], value)
    return found


def _norm(tensors: Iterable[Any]) -> float:
    import torch

    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x.float()) for x in tensors])))


def _cosine(got: Mapping[str, Any], wanted: Mapping[str, Any], names: list[str]) -> float:
    """Of the angle between two gradients of a layer; 0 where one of them is nothing."""
    product = sum(float((got[x].float() * wanted[x].to(got[x].device).float()).sum()) for x in names)
    sizes = _norm(got[x] for x in names) * _norm(wanted[x] for x in names)
    return product / sizes if sizes > 0 else 0.0


@dataclass
class Reference:
    """The same model in fp32, by the operators' references, for its gradients."""

    recipe: Recipe
    catalog: Catalog
    device: torch.device
    _module: Any = None

    def gradients(self, weights: Mapping[str, Any], batch: tuple[Any, Any]) -> dict[str, Any]:
        """By parameter, of a batch (A, B, S) at these weights; clipping changes no direction."""
        import torch

        if self._module is None:
            self._module = answer.reference_module(
                self.recipe.chosen, self.recipe.S, self.catalog, self.device, {}
            )
            self._module.recompute = True
        own = dict(self._module.named_parameters())
        with torch.no_grad():
            for name, x in weights.items():
                own[name].copy_(x)
                own[name].grad = None
        tokens, targets = (x.flatten(0, 1) for x in batch)
        self._module(tokens, targets).backward()
        return {name: x.grad for name, x in own.items()}


def _short(x: float) -> float:
    return float(f"{x:.5g}")
