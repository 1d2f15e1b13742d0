"""Matrix products of 8-bit floats (E4M3) with scales: one a tensor, one a row, or one a block."""

from __future__ import annotations

from dataclasses import replace

import torch

from .._common import capability, check, choice, multiprocessors, needs_e4m3, operator
from . import _matmul as portable
from ._dispatch import FAST, PROMOTED, choose

BLOCK = 128
"""Steps of K, and columns of b, that share a scale with recipe "block"."""


def fp8_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, recipe: str = "block"
) -> torch.Tensor:
    """(a · scale_a) @ (b · scale_b) in bf16, of a (M, K) and b (K, N) in float8_e4m3fn.

    b lies in memory column by column, as the transpose of a weight (N, K). Scales are fp32:

    ========  =====================  =================================  ==========================================
    recipe    scale_a                scale_b                            sums
    ========  =====================  =================================  ==========================================
    tensor    ()                     ()                                 in the matrix units, about 14 bits
    row       (M, 1)                 (1, N)                             the same
    block     (M, ⌈K / 128⌉)         (⌈K / 128⌉, ⌈N / 128⌉)             128 steps in the matrix units, then in fp32
    ========  =====================  =================================  ==========================================

    Scales of blocks are read fastest where those of one step of K lie together: a's column by column, as
    `fp8_quant(x, "block", layout="matmul")` makes them.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or recipe,
    NotImplementedError on GPUs before compute capability 8.9; the message names the argument.
    """
    check("a", a, dim=2, dtypes=(torch.float8_e4m3fn,))
    check("b", b, dim=2, like=a, dtypes=(torch.float8_e4m3fn,))
    (M, K), N = a.shape, b.shape[1]
    if b.shape[0] != K:
        raise ValueError(f"b has shape {tuple(b.shape)}, expected ({K}, N)")
    choice("recipe", recipe, ("tensor", "row", "block"))
    across, down = -(-K // BLOCK), -(-N // BLOCK)
    a_shape = {"tensor": (), "row": (M, 1), "block": (M, across)}[recipe]
    b_shape = {"tensor": (), "row": (1, N), "block": (across, down)}[recipe]
    check("scale_a", scale_a, shape=a_shape, like=a, dtypes=(torch.float32,))
    check("scale_b", scale_b, shape=b_shape, like=a, dtypes=(torch.float32,))
    result: torch.Tensor = _fp8_matmul(a, b, scale_a, scale_b, recipe)
    return result


def _empty(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, recipe: str
) -> torch.Tensor:
    return torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)


def _launch(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, recipe: str
) -> torch.Tensor:
    needs_e4m3("fp8_matmul", a)
    out = _empty(a, b, scale_a, scale_b, recipe)
    M, K = a.shape
    if out.numel() == 0 or K == 0:
        return out.zero_()
    weight = b.t()
    scales = (scale_a, scale_b if scale_b.dim() == 0 else scale_b.t())
    if capability(a.device)[0] == 9:
        from . import _matmul_hopper as hopper  # where Gluon may be missing, it is not needed

        # The matrix units take 8-bit operands row by row only.
        if all(hopper.mapped(x) and not hopper.turned(x) for x in (a, weight, out)):
            kind = PROMOTED if recipe == "block" else FAST
            chosen = choose(kind, M, out.shape[1], K, False, multiprocessors(a))
            schedule = replace(chosen.schedule, scales=recipe)
            hopper.multiply(a, weight, out, schedule, chosen.dealt, chosen.section, *scales)
            return out
    portable.multiply(a, weight, out, False, recipe, *scales)
    return out


_fp8_matmul = operator(
    "fp8_matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str recipe) -> Tensor", _launch, _empty
)
