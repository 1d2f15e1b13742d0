"""Products of groups of rows of 8-bit floats (E4M3), each with a weight of its own, in DeepGEMM's two layouts."""

from __future__ import annotations

from dataclasses import replace

import torch

from .._common import capability, cdiv, check, choice, multiprocessors, needs_e4m3, operator
from . import _grouped
from . import _grouped_tiles as grouped_tiles
from ._dispatch import SECTION, grouped
from ._matmul import BLOCK


def grouped_fp8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    groups: torch.Tensor,
    recipe: str = "block",
) -> torch.Tensor:
    """(a · scale_a) @ (b · scale_b)ᵀ by groups, in bf16, of a in float8_e4m3fn and weights b (E, N, K) in the
    same.

    Contiguous: a is (T, K), `groups` (T,) in int32 is each row's group, -1 for none; a group's rows follow each
    other and begin at a multiple of 128; the result is (T, N). Masked: a is (E, M, K), `groups` (E,) in int32 is
    how many of each group's rows count, up to M; the result is (E, M, N).

    Rows that belong to no group have any value in the result. scale_a and scale_b are fp32: for "block" (…, ⌈K /
    128⌉) of a's rows and (E, ⌈N / 128⌉, ⌈K / 128⌉), sums of 128 products scaled and added up in fp32; for "row"
    (…, 1) and (E, N, 1), which the whole sum is multiplied by.
    Not differentiable.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or recipe,
    NotImplementedError on GPUs that do not convert to E4M3; the message names the argument.
    """
    check("a", a, dtypes=(torch.float8_e4m3fn,))
    if a.dim() not in (2, 3):
        raise ValueError(f"a has shape {tuple(a.shape)}, expected (T, K) or (E, M, K)")
    check("b", b, dim=3, like=a, dtypes=(torch.float8_e4m3fn,))
    E, N, K = b.shape
    if a.shape[-1] != K or (a.dim() == 3 and a.shape[0] != E):
        raise ValueError(f"a has shape {tuple(a.shape)}, expected (T, {K}) or ({E}, M, {K})")
    choice("recipe", recipe, ("block", "row"))
    steps, down = (cdiv(K, BLOCK), cdiv(N, BLOCK)) if recipe == "block" else (1, N)
    check("scale_a", scale_a, shape=(*a.shape[:-1], steps), like=a, dtypes=(torch.float32,))
    check("scale_b", scale_b, shape=(E, down, steps), like=a, dtypes=(torch.float32,))
    check("groups", groups, shape=(a.shape[0],), like=a, dtypes=(torch.int32,))
    result: torch.Tensor = _grouped_fp8_matmul(a, b, scale_a, scale_b, groups, recipe)
    return result


def _empty(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    groups: torch.Tensor,
    recipe: str,
) -> torch.Tensor:
    return torch.empty(*a.shape[:-1], b.shape[1], dtype=torch.bfloat16, device=a.device)


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    groups: torch.Tensor,
    recipe: str,
) -> torch.Tensor:
    needs_e4m3("grouped_fp8_matmul", a)
    out = _empty(a, b, scale_a, scale_b, groups, recipe)
    if out.numel() == 0 or a.shape[-1] == 0:
        return out.zero_()
    a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in (a, b))
    groups = groups.contiguous()
    if capability(a.device)[0] == 9 and (a.dim() == 2 or a.shape[1] >= _grouped.ALIGNED):
        from . import _grouped_hopper as hopper  # where Gluon may be missing, it is not needed

        if all(map(hopper.mapped, (a, b, out))):
            # Of a masked group's memory about half is taken: it has room for the most that there may be.
            E, each = (1, len(a)) if a.dim() == 2 else (len(a), a.shape[1] // 2)
            schedule = grouped(recipe, E, each, out.shape[-1], multiprocessors(a))
            if a.dim() == 2:
                tiles = grouped_tiles.contiguous(groups, schedule.height)
            else:
                tiles = grouped_tiles.masked(groups, schedule.height, a.shape[1])
                schedule = replace(schedule, masked=True)
            hopper.multiply(a, b, out, tiles, schedule, SECTION, scale_a, scale_b)
            return out
    if a.dim() == 2:
        height = _grouped.tile_rows(_grouped.ALIGNED)
        rows = _grouped.Rows("contiguous", cdiv(a.shape[0], height), height, groups)
    else:
        E, M, _ = a.shape
        height = _grouped.tile_rows(min(M, 64))  # of the most that there may be few are, in decoding
        rows = _grouped.Rows("masked", E * cdiv(M, height), height, groups)
    _grouped.multiply(a, b, out, rows, recipe, scale_a, scale_b)
    return out


_grouped_fp8_matmul = operator(
    "grouped_fp8_matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor groups, str recipe) -> Tensor",
    _launch,
    _empty,
)
