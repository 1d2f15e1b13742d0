"""A mixture of experts on Hopper: tokens are copied to their experts' rows, whose products (`_grouped_hopper.py`)
are added up by token at the end.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .._common import cdiv
from ..quantization.fp8_quant import fp8_quant
from . import _grouped_hopper as hopper
from . import _grouped_tiles as grouped_tiles
from ._dispatch import SECTION, Mixture
from ._matmul import BLOCK
from ._routing import chosen, gathered, spread


def takes(*tensors: torch.Tensor) -> bool:
    """Whether all of the weights, and what is made beside them, are `mapped`."""
    return all(hopper.mapped(x) and x.shape[-1] * x.element_size() % 16 == 0 for x in tensors)


def experts(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scale_gate_up: torch.Tensor | None,
    scale_down: torch.Tensor | None,
    top_k: int,
    limit: float,
    schedules: Mixture,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `moe`, for weights that `takes` approves of."""
    M, F = x.shape[0], down.shape[2]
    choices = chosen(x, router, top_k)
    tiles, starts = grouped_tiles.compact(choices.counts, schedules.height, M * top_k)
    rows = tiles.most * tiles.height
    scale = inner_scale = None
    if scale_gate_up is not None:
        x, scale = fp8_quant(x, "block", layout="matmul")
        inner_scale = torch.empty(cdiv(F, BLOCK), rows, dtype=torch.float32, device=x.device).t()
    spread_x, spread_scale, places = spread(x, scale, choices, starts, rows)
    inner = torch.empty(rows, F, dtype=x.dtype, device=x.device)
    gated = replace(schedules.gated, quantized=inner_scale is not None, limit=limit)
    hopper.multiply(
        spread_x, gate_up, inner, tiles, gated, SECTION, spread_scale, scale_gate_up, out_scale=inner_scale
    )
    parts = torch.empty(rows, down.shape[1], dtype=torch.bfloat16, device=x.device)
    hopper.multiply(inner, down, parts, tiles, schedules.plain, SECTION, inner_scale, scale_down)
    return gathered(parts, places, choices.shares), choices.experts
