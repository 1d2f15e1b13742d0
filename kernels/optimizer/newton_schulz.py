"""Newton-Schulz iterations of Muon in Triton: the symmetric products are computed by their lower triangle.

An iteration is three launches over all matrices: A = X·Xᵀ and B = bA + cA·Aᵀ, of which a program writes a tile and
its mirror image, and X ← aX + B·X. Matrices with more rows than columns are read and written by columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, INTERPRETING, cdiv, check, on, operator, tf32

LEAST = 1e-20
"""What a gradient is divided by at least. Squares of a norm below about 1e-22 are no fp32 numbers."""

TILE = 16 if INTERPRETED else 128
"""Rows and columns of a program's tile."""
STEP = 16 if INTERPRETED else 64
"""Numbers of a product's depth a round, of 16 bits; half as many of 32."""


def newton_schulz(grads: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """X ← aX + (bA + cA²)X with A = X·Xᵀ, `steps` times, from X = grad / ‖grad‖.

    grads (T, M, N) of any strides, bf16 or fp32, to as many matrices of the same dtype whose singular values are
    near to 1; a, b, c = 3.4445, -4.775, 2.0315 (K. Jordan et al., "Muon", 2024). Products are summed in fp32 and
    rounded to the dtype; fp32 is multiplied as TF32. A matrix of zeros stays one. Not differentiable.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or a number of steps below 1.
    """
    check("grads", grads, dim=3, dtypes=(torch.bfloat16, torch.float32))
    if steps < 1:
        raise ValueError(f"steps is {steps}, expected at least 1")
    result: torch.Tensor = _newton_schulz(grads, steps)
    return result


@triton.jit
def _load(at, inside):  # type: ignore[no-untyped-def]  # Triton's types are its own
    x = tl.load(at, inside, 0.0)
    return x.to(tl.float32) if INTERPRETING else x  # which multiplies the bits of 16-bit numbers


@triton.jit
def _symmetric(  # type: ignore[no-untyped-def]  # Triton's types are its own
    p,
    added,
    out,
    R,
    K,
    matrix,
    row,
    column,
    alpha,
    beta,
    ADDS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """One tile of out (R, R) = alpha · P·Pᵀ + beta · added, and its mirror image; P (R, K)."""
    # The nth tile of the triangle: row i has i + 1 of them.
    nth = tl.program_id(0)
    i = ((tl.sqrt(8.0 * nth.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # Rounding may be off by one at either side.
    i = tl.where(i * (i + 1) // 2 > nth, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= nth, i + 1, i)
    j = nth - i * (i + 1) // 2
    which = tl.program_id(1).to(tl.int64)
    p += which * matrix
    rows = i * TILE + tl.arange(0, TILE)
    columns = j * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, STEP)
    rows_at = p + rows.to(tl.int64)[:, None] * row
    columns_at = p + columns.to(tl.int64)[None, :] * row
    acc = tl.zeros([TILE, TILE], tl.float32)
    for k in range(0, K, STEP):
        at = (k + depth).to(tl.int64) * column
        x = _load(rows_at + at[None, :], (rows < R)[:, None] & (k + depth < K)[None, :])
        y = _load(columns_at + at[:, None], (columns < R)[None, :] & (k + depth < K)[:, None])
        acc = tl.dot(x, y, acc, input_precision=tf32())  # acc += P · Pᵀ
    acc *= alpha
    inside = (rows < R)[:, None] & (columns < R)[None, :]
    own = which * R * R + rows.to(tl.int64)[:, None] * R + columns[None, :]
    if ADDS:
        acc += beta * tl.load(added + own, inside, 0.0).to(tl.float32)
    value = acc.to(out.dtype.element_ty)
    tl.store(out + own, value, inside)
    if i != j:
        tl.store(out + which * R * R + columns.to(tl.int64)[None, :] * R + rows[:, None], value, inside)


@triton.jit
def _update(  # type: ignore[no-untyped-def]  # Triton's types are its own
    b, x, out, R, S, matrix, row, column, a, TILE: tl.constexpr, STEP: tl.constexpr
):
    """One tile of out (R, S) = a · X + B·X; B (R, R) lies in rows, X and out have the same strides."""
    which = tl.program_id(2).to(tl.int64)
    x += which * matrix
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, STEP)
    b_at = b + which * R * R + rows.to(tl.int64)[:, None] * R
    x_at = x + columns.to(tl.int64)[None, :] * column
    acc = tl.zeros([TILE, TILE], tl.float32)
    for k in range(0, R, STEP):
        y = _load(b_at + (k + depth)[None, :], (rows < R)[:, None] & (k + depth < R)[None, :])
        z = _load(
            x_at + (k + depth).to(tl.int64)[:, None] * row, (k + depth < R)[:, None] & (columns < S)[None, :]
        )
        acc = tl.dot(y, z, acc, input_precision=tf32())  # acc += B · X
    at = rows.to(tl.int64)[:, None] * row + columns.to(tl.int64)[None, :] * column
    inside = (rows < R)[:, None] & (columns < S)[None, :]
    acc += a * tl.load(x + at, inside, 0.0).to(tl.float32)
    tl.store(out + which * matrix + at, acc.to(out.dtype.element_ty), inside)


def _launch(grads: torch.Tensor, steps: int) -> torch.Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    grads = grads.detach()
    norm = torch.linalg.vector_norm(grads, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = torch.empty(grads.shape, dtype=grads.dtype, device=grads.device)
    # Divided in fp32 and rounded once; a norm of zero leaves zeros. Autograd would refuse what has an `out`.
    torch.div(grads, norm.clamp_min_(LEAST), out=x)
    if x.numel() == 0:
        return x
    T, M, N = x.shape
    turned = M > N
    R, S, row, column = (N, M, 1, N) if turned else (M, N, N, 1)
    gram, factor, other = x.new_empty(T, R, R), x.new_empty(T, R, R), torch.empty_like(x)
    tiles = cdiv(R, TILE)
    triangle = (tiles * (tiles + 1) // 2, T)
    step = STEP * 2 // x.element_size()
    meta = {"TILE": TILE, "STEP": step, "num_warps": 8, "num_stages": 3}
    with on(x):
        for _ in range(steps):
            _symmetric[triangle](x, x, gram, R, S, M * N, row, column, 1.0, 0.0, ADDS=False, **meta)
            _symmetric[triangle](gram, gram, factor, R, R, R * R, R, 1, c, b, ADDS=True, **meta)
            _update[(tiles, cdiv(S, TILE), T)](factor, x, other, R, S, M * N, row, column, a, **meta)
            x, other = other, x
    return x


def _empty(grads: torch.Tensor, steps: int) -> torch.Tensor:
    return torch.empty(grads.shape, dtype=grads.dtype, device=grads.device)


_newton_schulz = operator("newton_schulz(Tensor grads, int steps) -> Tensor", _launch, _empty)
