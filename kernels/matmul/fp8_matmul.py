"""Matrix products of 8-bit floats (E4M3) with scales: one a tensor, one a row, or one a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from .._common import capability, cdiv, check, choice, multiprocessors, needs_e4m3, on, operator
from .._launch import prepared, room
from . import _matmul as portable
from ._dispatch import FAST, GROUPED, PROMOTED, Choice, choose, copied, filled


def fp8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    recipe: str = "block",
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(a · scale_a) @ (b · scale_b) + bias in bf16, of a (M, K) and b (K, N) in float8_e4m3fn. A bias (N,) in bf16
    is added in fp32: the sum is rounded once. Not differentiable: a layer's gradients are products of their own.

    Scales are fp32:

    ========  =========================  =================================  ======================================
    recipe    scale_a                    scale_b                            sums
    ========  =========================  =================================  ======================================
    tensor    ()                         ()                                 in the matrix units, about 14 bits
    row       (M, 1)                     (1, N)                             the same
    block     (M, ⌈K / 128⌉)             (⌈K / 128⌉, ⌈N / 128⌉)             of 128 steps there, of these in fp32
    group     (M, ⌈K / 128⌉)             (⌈K / 128⌉, N)                     as block
    tile      (⌈M / 128⌉, ⌈K / 128⌉)     (⌈K / 128⌉, ⌈N / 128⌉)             as block
    ========  =========================  =================================  ======================================

    Scales of blocks are read fastest where those of one step of K lie together: a's column by column, as
    `fp8_quant(x, "block", layout="matmul")` makes them.

    a and b may lie in memory row by row or column by column. Hopper's matrix units take rows of K only: there a
    that lies column by column is transposed before, and so is b, the transpose of a weight, that lies row by
    row, as in the gradients of a linear layer. A model that needs the transpose more than once keeps it.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device or recipe,
    NotImplementedError on GPUs that do not convert to E4M3; the message names the argument.
    """
    result: torch.Tensor = _fp8_matmul(a, b, scale_a, scale_b, recipe, bias)
    return result


def _check(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    recipe: str,
    bias: torch.Tensor | None,
) -> None:
    """Raises what `fp8_matmul` says."""
    check("a", a, dim=2, dtypes=(torch.float8_e4m3fn,))
    check("b", b, dim=2, like=a, dtypes=(torch.float8_e4m3fn,))
    (M, K), N = a.shape, b.shape[1]
    if b.shape[0] != K:
        raise ValueError(f"b has shape {tuple(b.shape)}, expected ({K}, N)")
    choice("recipe", recipe, ("tensor", "row", *portable.HEIGHTS))
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {"tensor": ((), ()), "row": ((M, 1), (1, N))}
    steps = cdiv(K, portable.BLOCK)
    for kind, (down, along) in portable.HEIGHTS.items():
        shapes[kind] = (cdiv(M, down), steps), (steps, cdiv(N, along))
    a_shape, b_shape = shapes[recipe]
    check("scale_a", scale_a, shape=a_shape, like=a, dtypes=(torch.float32,))
    check("scale_b", scale_b, shape=b_shape, like=a, dtypes=(torch.float32,))
    if bias is not None:
        check("bias", bias, shape=(N,), like=a, dtypes=(torch.bfloat16,))


@triton.jit
def _transpose(x, out, M, N, lead, room, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """One square of SIZE bytes each way a program: out (N, M) = x (M, N)ᵀ, rows `lead` and `room` bytes apart."""
    row = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    column = (tl.program_id(1) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    inside = (row < M)[:, None] & (column < N)[None, :]
    square = tl.load(x + row[:, None] * lead + column[None, :], inside, 0)
    tl.store(out + column[:, None] * room + row[None, :], tl.trans(square), tl.trans(inside))


def in_rows_of_k(x: torch.Tensor) -> torch.Tensor:
    """An 8-bit matrix (R, K) as it is, or where it lies column by column a copy that Hopper can load."""
    if x.stride(1) == 1 or x.stride(0) != 1:
        return x
    from ._matmul_hopper import aligned

    out = aligned(x)
    R, K = x.shape
    with on(x):
        _transpose[(cdiv(K, 64), cdiv(R, 64))](
            x.t().view(torch.uint8), out.view(torch.uint8), K, R, x.stride(1), out.stride(0), 64, num_warps=4
        )
    return out


def _empty(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)


def _of_columns(scale_b: torch.Tensor) -> torch.Tensor:
    """b's scales as those of a weight (N, K)."""
    return scale_b if scale_b.dim() == 0 else scale_b.t()


def _chosen(
    a: torch.Tensor, N: int, scales: tuple[torch.Tensor, torch.Tensor], recipe: str, bias: bool
) -> tuple[Choice, bool]:
    """How Hopper multiplies, a weight's scales being the second, and whether it is worth a copy of both that they
    can be staged.
    """
    from . import _matmul_hopper as hopper

    M, K = a.shape
    if recipe == "block" and M == 1:
        recipe = "tile"  # one row has one scale a step, as a tile has, and needs no more of them in a row
    kind = {"block": PROMOTED, "tile": PROMOTED, "group": GROUPED}.get(recipe, FAST)
    stageable = kind == FAST or hopper.stageable(*scales, recipe)
    chosen = choose(kind, M, N, K, False, multiprocessors(a), stageable)
    schedule = replace(chosen.schedule, scales=recipe, bias=bias, filled=filled(chosen.schedule, M))
    to_copy = not stageable and recipe != "tile" and copied(M, N, K, multiprocessors(a))
    return replace(chosen, schedule=schedule), to_copy


def _staged(of_rows: torch.Tensor, of_columns: torch.Tensor, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of scales, a weight's being the second, that can be staged."""
    from . import _matmul_hopper as hopper

    return hopper.staged_copy(of_rows), hopper.staged_copy(of_columns) if recipe == "group" else of_columns


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    recipe: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    needs_e4m3("fp8_matmul", a)
    out = _empty(a, b)
    K = a.shape[1]
    if out.numel() == 0 or K == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    bias = bias if bias is None else bias.contiguous()
    weight = b.t()
    scales = scale_a, _of_columns(scale_b)
    if capability(a.device)[0] == 9:
        from . import _matmul_hopper as hopper  # where Gluon may be missing, it is not needed

        # The matrix units take 8-bit operands row by row only.
        a, weight = (hopper.loadable(in_rows_of_k(x)) for x in (a, weight))
        target = out if hopper.mapped(out) else hopper.aligned(out)
        chosen, to_copy = _chosen(a, out.shape[1], scales, recipe, bias is not None)
        if to_copy:
            scales = _staged(*scales, recipe)
            chosen, _ = _chosen(a, out.shape[1], scales, recipe, bias is not None)
        hopper.multiply(
            a, weight, target, chosen.schedule, chosen.dealt, chosen.section, *scales, bias, chosen.split
        )
        return out if target is out else out.copy_(target)
    portable.multiply(a, weight, out, False, recipe, *scales, bias)
    return out


def _prepare(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    recipe: str,
    bias: torch.Tensor | None,
) -> Callable[..., torch.Tensor]:
    """`_launch` of all inputs that are alike: on Hopper, where no more than scales has to be copied first, all but
    memory and addresses is decided here.
    """
    (M, K), N = a.shape, b.shape[1]
    if capability(a.device)[0] != 9 or M * N * K == 0:
        return _launch
    from . import _matmul_hopper as hopper  # where Gluon may be missing, it is not needed

    like = _empty(a, b)
    if not (
        all(x.stride(1) == 1 and hopper.mapped(x) for x in (a, b.t()))
        and hopper.mapped(like)
        and (bias is None or bias.is_contiguous())
    ):
        return _launch
    needs_e4m3("fp8_matmul", a)
    scales = scale_a, _of_columns(scale_b)
    chosen, to_copy = _chosen(a, N, scales, recipe, bias is not None)
    if to_copy:
        scales = _staged(*scales, recipe)
        chosen, _ = _chosen(a, N, scales, recipe, bias is not None)
    multiply = hopper.planned(
        a, b.t(), like, chosen.schedule, chosen.dealt, chosen.section, *scales, bias, chosen.split
    )
    made = room((M, N), torch.bfloat16, a.device)

    def run(*given: Any) -> torch.Tensor:
        a, b, scale_a, scale_b, _, bias = given
        out = made()
        scales = scale_a, _of_columns(scale_b)
        multiply(a, b.t(), out, *(_staged(*scales, recipe) if to_copy else scales), bias)
        return out

    return run


_fp8_matmul = operator(
    "fp8_matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str recipe, Tensor? bias) -> Tensor",
    prepared(_prepare, _check),
    _empty,
    check=_check,
)
