"""A feed-forward of experts (Shazeer et al., arXiv 1701.06538): router, top-k, gated products by expert,
combination.

In the portable kernels tokens are neither copied nor sorted: the products gather the rows that a list names, and
write them to the token's place; for Hopper they are copied to their experts' rows (`_experts_hopper.py`). In 8
bits the gated product quantizes its result itself, which is never in memory in 16 bits.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from .._common import capability, cdiv, check, needs_e4m3, operator
from ..quantization.fp8_quant import fp8_quant
from . import _grouped
from ._dispatch import PROMOTED, SIXTEEN, mixture
from ._matmul import BLOCK
from ._routing import chosen, combined, listed


def moe(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scale_gate_up: torch.Tensor | None,
    scale_down: torch.Tensor | None,
    top_k: int,
    limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Σ over a token's experts e of share · down_e · (silu(gate_e · x) · (up_e · x)), the experts (M, top_k) in
    int32).

    x (M, D) and router (E, D) in bf16: a token's experts are those of its `top_k` largest logits x · router, which
    are fp32, its shares their softmax. gate_up (E, 2F, D), the gate's rows first, and down (E, D, F) are bf16 or
    float8_e4m3fn. The latter have fp32 scales for 128 × 128: scale_gate_up (E, 2 · ⌈F / 128⌉, ⌈D / 128⌉), the up's
    blocks beginning at its first row, and scale_down (E, ⌈D / 128⌉, ⌈F / 128⌉). Then x and the gated product are
    quantized with a scale for 128 columns. Sums are fp32; a token's parts are rounded to bf16 before they are
    added.

    With a `limit` the product of gate and up is gpt-oss's: g · sigmoid(1.702 · g) · (u + 1) with g = min(gate_e ·
    x, limit) and u = up_e · x between -limit and limit. It is a constant of the compiled code.

    Which row of a tile a token takes depends on the device's timing; the result does not.
    Not differentiable.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device, NotImplementedError on GPUs
    that do not convert to E4M3 where weights are E4M3; the message names the argument.
    """
    check("x", x, dim=2, dtypes=(torch.bfloat16,))
    D = x.shape[1]
    check("router", router, dim=2, like=x, dtypes=(x.dtype,))
    E = router.shape[0]
    check("router", router, shape=(E, D), dtypes=(x.dtype,))
    check("gate_up", gate_up, dim=3, like=x, dtypes=(torch.bfloat16, torch.float8_e4m3fn))
    F = gate_up.shape[1] // 2
    check("gate_up", gate_up, shape=(E, 2 * F, D), dtypes=(gate_up.dtype,))
    check("down", down, shape=(E, D, F), like=x, dtypes=(gate_up.dtype,))
    if not 0 < top_k <= E:
        raise ValueError(f"top_k is {top_k}, expected 1 to {E}, the number of experts")
    if not 0 <= limit < math.inf:
        raise ValueError(f"limit is {limit}, expected a finite number above 0, or 0 for silu(gate) · up")
    down_blocks, across = cdiv(F, BLOCK), cdiv(D, BLOCK)
    if gate_up.dtype == torch.float8_e4m3fn:
        check("scale_gate_up", scale_gate_up, shape=(E, 2 * down_blocks, across), like=x, dtypes=(torch.float32,))
        check("scale_down", scale_down, shape=(E, across, down_blocks), like=x, dtypes=(torch.float32,))
    elif scale_gate_up is not None or scale_down is not None:
        raise ValueError("scales are given, but the weights are bf16")
    result: tuple[torch.Tensor, torch.Tensor] = _moe(
        x, router, gate_up, down, scale_gate_up, scale_down, top_k, limit
    )
    return result


def _empty(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scale_gate_up: torch.Tensor | None,
    scale_down: torch.Tensor | None,
    top_k: int,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    M = x.shape[0]
    return x.new_empty(x.shape), torch.empty(M, top_k, dtype=torch.int32, device=x.device)


def _launch(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scale_gate_up: torch.Tensor | None,
    scale_down: torch.Tensor | None,
    top_k: int,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    (M, D), E, F = x.shape, router.shape[0], down.shape[2]
    if x.numel() == 0 or F == 0:
        out, experts = _empty(x, router, gate_up, down, scale_gate_up, scale_down, top_k, limit)
        return out.zero_(), experts.zero_()
    x, router, gate_up, down = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, router, gate_up, down))
    eight = gate_up.dtype == torch.float8_e4m3fn
    if capability(x.device)[0] == 9:
        from . import _experts_hopper as hopper  # where Gluon may be missing, it is not needed

        if hopper.takes(gate_up, down):
            schedules = mixture(PROMOTED if eight else SIXTEEN, M * top_k / E)
            return hopper.experts(x, router, gate_up, down, scale_gate_up, scale_down, top_k, limit, schedules)
    choices = chosen(x, router, top_k)
    experts, shares = choices.experts, choices.shares
    rows = listed(choices, _grouped.tile_rows(M * top_k / E))
    parts = torch.empty(M * top_k, D, dtype=x.dtype, device=x.device)
    apart = replace(rows, share=1)  # the gated products are each choice's own
    if not eight:
        inner = torch.empty(M * top_k, F, dtype=x.dtype, device=x.device)
        _grouped.multiply(x, gate_up, inner, rows, gated=True, limit=limit)
        _grouped.multiply(inner, down, parts, apart, weights=shares)
        return combined(parts, M, top_k), experts
    needs_e4m3("moe with weights in E4M3", x)
    q, scale = fp8_quant(x, "block", layout="matmul")
    inner = torch.empty(M * top_k, F, dtype=q.dtype, device=x.device)
    inner_scale = torch.empty(cdiv(F, BLOCK), M * top_k, dtype=torch.float32, device=x.device).t()
    _grouped.multiply(
        q, gate_up, inner, rows, "block", scale, scale_gate_up, gated=True, limit=limit, out_scale=inner_scale
    )
    _grouped.multiply(inner, down, parts, apart, "block", inner_scale, scale_down, weights=shares)
    return combined(parts, M, top_k), experts


_moe = operator(
    "moe(Tensor x, Tensor router, Tensor gate_up, Tensor down, Tensor? scale_gate_up, Tensor? scale_down, "
    "int top_k, float limit) -> (Tensor, Tensor)",
    _launch,
    _empty,
)
