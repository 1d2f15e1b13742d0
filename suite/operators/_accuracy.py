"""What quantizing costs and what it saves, as metrics that the products of quantized numbers share.

The error against the answer for the numbers before they were quantized is the harness's own
(`Operator.unquantized`); that against the answer for the quantized ones is every operator's `error`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...registry.store.metric import Metric
from ..operator import Inputs

if TYPE_CHECKING:
    import torch

Measure = Callable[[list[Any], list[Any], Inputs], float]

E4M3_LARGEST = 448.0
"""E4M3's largest number."""

SATURATED = Metric(
    "saturated",
    "1",
    better="neither",
    about="The share of the given quantized numbers that are the largest of their format: each scale's largest, "
    "and more where a scale cuts others off.",
)
UNDERFLOWED = Metric(
    "underflowed",
    "1",
    better="neither",
    about="The share of the given quantized numbers that are 0; before they were quantized none was.",
)
WEIGHT_BYTES = Metric(
    "weight_bytes", "B", about="What a number of the weight takes in memory, its share of the scales included."
)


def saturated(*names: str) -> Measure:
    """The share of these inputs' E4M3 numbers that are ±448."""
    return lambda outputs, references, inputs: _share(inputs, names, lambda x: x.abs() == E4M3_LARGEST)


def underflowed(*names: str) -> Measure:
    """The share of these inputs' numbers that are 0."""
    return lambda outputs, references, inputs: _share(inputs, names, lambda x: x == 0)


def weight_bytes(weight: str, *besides: str) -> Measure:
    """Bytes of the weight and of what belongs to it, where it is there, for each number of the weight."""

    def measure(outputs: list[Any], references: list[Any], inputs: Inputs) -> float:
        there = [inputs[name] for name in (weight, *besides) if inputs[name] is not None]
        stored = sum(x.numel() * x.element_size() for x in there)
        return float(stored / max(1, inputs[weight].numel()))

    return measure


def with_outliers(x: torch.Tensor) -> torch.Tensor:
    """x with every hundredth column 30 times as large, in place, as channels of a transformer's activations are
    (Dettmers et al., arXiv 2208.07339).
    """
    x[..., ::100] *= 30
    return x


def _share(inputs: Inputs, names: tuple[str, ...], chosen: Callable[[Any], Any]) -> float:
    found: int = sum(int(chosen(inputs[name].float()).sum()) for name in names)
    numbers: int = sum(inputs[name].numel() for name in names)
    return found / max(1, numbers)
