"""A layer in 8-bit integers on a CPU: the weight quantized once by output, the input by row in each call, their
product by `torch._int_mm` (oneDNN), both scales in one loop of Inductor's.
"""

from __future__ import annotations

import weakref

import torch

_quantized: weakref.WeakKeyDictionary[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]] = (
    weakref.WeakKeyDictionary()
)
"""By layer, its weight (K, N) in int8 and the scales (N,) in fp32; gone with the layer."""


def _weight(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    if layer not in _quantized:
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        scale = weight.abs().amax(1).clamp(min=1e-30) / 127
        _quantized[layer] = (weight / scale[:, None]).round().char().t().contiguous(), scale
    return _quantized[layer]


@torch.compile(dynamic=False)
def _by_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (x / scale).round().to(torch.int8), scale


@torch.compile(dynamic=False)
def _scaled(sums: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return sums * rows * columns


def int8_linear(x: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    """x (M, K) in fp32 to x @ weight.T (M, N) in fp32, both operands rounded to 8 bits; sums are exact."""
    weight, columns = _weight(layer)
    q, rows = _by_row(x)
    return _scaled(torch._int_mm(q, weight), rows, columns)
