"""Gated RMS normalization, as between the scan and the output of Mamba-2 (Dao and Gu, arXiv 2405.21060).

One read of x and z, one write. Backward runs as many programs as the device holds at a time; each takes every
n-th row and keeps its part of the weight's gradient in registers; a second kernel adds the parts in a fixed
order, so that results repeat bit by bit. Rows too long for registers are taken in pieces, twice.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, cdiv, check, choice, dense_like, multiprocessors, on, operator, power_of_2, rows
from .._pointwise import silu, silu_slope

FORWARD_LIMIT = 16 if INTERPRETED else 16384
"""Longest group that forward holds in registers."""

BACKWARD_LIMIT = 8 if INTERPRETED else 8192
"""Longest group that backward holds."""

PIECE = 8 if INTERPRETED else 4096
"""Piece of a longer group."""

AHEAD = 8 if INTERPRETED else 4096
"""Blocks below it are read ahead by backward; longer ones have no registers left for it."""

LOOSE = (8, 4, 4) if INTERPRETED else (8192, 1024, 4)
"""(block, piece, warps): with the norm first, a group that takes a block of that length or a longer one and fills
at most three quarters of it is taken in such pieces, forward: 5120 numbers would leave three lanes of eight idle.
"""


def gated_rms_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
    group: int | None = None,
    order: Literal["gate_first", "norm_first"] = "gate_first",
) -> torch.Tensor:
    """norm(x · silu(z)) · weight with order "gate_first", norm(x) · weight · silu(z) with "norm_first".

    norm(h) = h / √(mean(h²) + eps) over groups of `group` numbers of the last dimension, by default all of it.
    x and z (…, D) and weight (D,), in bf16, fp16 or fp32, to y (…, D) in x's dtype; computed in fp32.
    Differentiable in x, z and weight. Raises TypeError for a wrong type or dtype, ValueError for a wrong
    shape, device, group or order; the message names the argument.
    """
    choice("order", order, ("gate_first", "norm_first"))
    check("x", x)
    if x.dim() == 0:
        raise ValueError("x has shape (), expected at least one dimension")
    check("z", z, shape=x.shape, like=x)
    check("weight", weight, shape=x.shape[-1:], like=x)
    D = x.shape[-1]
    size = max(D, 1) if group is None else group
    if size < 1 or D % size:
        raise ValueError(f"group is {size}, which does not divide the width {D}")
    y: torch.Tensor
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, z, weight)):
        y = _saving(x, z, weight, eps, size, order == "gate_first")[0]
    else:
        y = _plain(x, z, weight, eps, size, order == "gate_first")
    return y


@triton.jit
def _forward(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    z,
    weight,
    y,
    rstds,
    N,
    D,
    groups,
    x_stride,
    z_stride,
    eps,
    FIRST: tl.constexpr,
    SAVE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS whole groups of D numbers a program; `groups` of them make a row."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, start = at // groups, (at % groups) * D
    col = tl.arange(0, BLOCK)
    inside = (at < N)[:, None] & (col < D)[None, :]
    here = start[:, None] + col[None, :]
    value = tl.load(x + row[:, None] * x_stride + here, inside, 0.0).to(tl.float32)
    gate = silu(tl.load(z + row[:, None] * z_stride + here, inside, 0.0).to(tl.float32))
    # Read before the sum, which hides the wait.
    w = tl.load(weight + here, inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    if FIRST:
        value *= gate
    rstd = 1.0 / tl.sqrt(tl.sum(value * value, 1) / D + eps)
    if SAVE:
        tl.store(rstds + at, rstd, at < N)
    value = value * rstd[:, None] * w
    if not FIRST:
        value *= gate
    tl.store(y + at[:, None] * D + col[None, :], value.to(y.dtype.element_ty), inside)


@triton.jit
def _forward_long(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x,
    z,
    weight,
    y,
    rstds,
    D,
    groups,
    x_stride,
    z_stride,
    eps,
    FIRST: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One group a program, in pieces, twice; the second time it comes from the L2 cache."""
    at = tl.program_id(0).to(tl.int64)
    start = (at % groups) * D
    x += (at // groups) * x_stride + start
    z += (at // groups) * z_stride + start
    squares = tl.zeros([BLOCK], tl.float32)
    for piece in range(0, D, BLOCK):
        col = piece + tl.arange(0, BLOCK)
        value = tl.load(x + col, col < D, 0.0).to(tl.float32)
        if FIRST:
            value *= silu(tl.load(z + col, col < D, 0.0).to(tl.float32))
        squares += value * value
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / D + eps)
    if SAVE:
        tl.store(rstds + at, rstd)
    for piece in range(0, D, BLOCK):
        col = piece + tl.arange(0, BLOCK)
        gate = silu(tl.load(z + col, col < D, 0.0).to(tl.float32))
        value = tl.load(x + col, col < D, 0.0).to(tl.float32) * rstd * gate
        value *= tl.load(weight + start + col, col < D, 0.0).to(tl.float32)
        tl.store(y + at * D + col, value.to(y.dtype.element_ty), col < D)


@triton.jit
def _parts(given, value, gate, rstd, w, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """(x̂ that was normalized, its gradient before the norm, what it adds to the weight's, silu(z), slope)."""
    s, slope = silu_slope(gate)
    if FIRST:
        hat = value * s * rstd
        inner = given * w
        of_weight = given * hat
    else:
        hat = value * rstd
        inner = given * w * s
        of_weight = given * hat * s
    return hat, inner, of_weight, s, slope


@triton.jit
def _ends(given, value, hat, inner, s, slope, rstd, projection, w, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """(dx, dz), with `projection` the mean of inner · x̂."""
    d = (inner - hat * projection) * rstd
    if FIRST:
        dx = d * s
        dz = d * value * slope
    else:
        dx = d
        dz = given * hat * w * slope
    return dx, dz


@triton.jit
def _backward_short(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy,
    x,
    z,
    weight,
    rstds,
    dx,
    dz,
    parts,
    M,
    D,
    groups,
    dy_stride,
    x_stride,
    z_stride,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ROWS whole groups at a time, of every n-th rows; parts (programs, groups · D) of the weight's gradient."""
    col = tl.arange(0, BLOCK)
    group = tl.program_id(1)
    here = group * D + col
    w = tl.load(weight + here, col < D, 0.0).to(tl.float32)[None, :]
    part = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        inside = (row < M)[:, None] & (col < D)[None, :]
        given = tl.load(dy + row[:, None] * dy_stride + here[None, :], inside, 0.0).to(tl.float32)
        value = tl.load(x + row[:, None] * x_stride + here[None, :], inside, 0.0).to(tl.float32)
        gate = tl.load(z + row[:, None] * z_stride + here[None, :], inside, 0.0).to(tl.float32)
        rstd = tl.load(rstds + row * groups + group, row < M, 0.0)[:, None]
        hat, inner, of_weight, s, slope = _parts(given, value, gate, rstd, w, FIRST)
        part += of_weight
        projection = (tl.sum(inner * hat, 1) / D)[:, None]
        of_x, of_z = _ends(given, value, hat, inner, s, slope, rstd, projection, w, FIRST)
        at = (row * groups * D)[:, None] + here[None, :]
        tl.store(dx + at, of_x.to(dx.dtype.element_ty), inside)
        tl.store(dz + at, of_z.to(dz.dtype.element_ty), inside)
    tl.store(parts + tl.program_id(0).to(tl.int64) * groups * D + here, tl.sum(part, 0), col < D)


@triton.jit
def _project(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy,
    x,
    z,
    weight,
    rstds,
    projections,
    D,
    groups,
    dy_stride,
    x_stride,
    z_stride,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mean of inner · x̂ of one long group."""
    at = tl.program_id(0).to(tl.int64)
    row, start = at // groups, (at % groups) * D
    rstd = tl.load(rstds + at)
    total = tl.zeros([BLOCK], tl.float32)
    for piece in range(0, D, BLOCK):
        col = piece + tl.arange(0, BLOCK)
        given = tl.load(dy + row * dy_stride + start + col, col < D, 0.0).to(tl.float32)
        value = tl.load(x + row * x_stride + start + col, col < D, 0.0).to(tl.float32)
        gate = tl.load(z + row * z_stride + start + col, col < D, 0.0).to(tl.float32)
        w = tl.load(weight + start + col, col < D, 0.0).to(tl.float32)
        hat, inner, _, _, _ = _parts(given, value, gate, rstd, w, FIRST)
        total += inner * hat
    tl.store(projections + at, tl.sum(total, 0) / D)


@triton.jit
def _backward_long(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy,
    x,
    z,
    weight,
    rstds,
    projections,
    dx,
    dz,
    parts,
    M,
    D,
    groups,
    dy_stride,
    x_stride,
    z_stride,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As `_backward_short`, for one piece of every n-th row, with the groups' means known."""
    pieces = tl.cdiv(D, BLOCK)
    group = tl.program_id(1) // pieces
    col = (tl.program_id(1) % pieces) * BLOCK + tl.arange(0, BLOCK)
    inside = col < D
    here = group * D + col
    w = tl.load(weight + here, inside, 0.0).to(tl.float32)
    part = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(tl.program_id(0), M, tl.num_programs(0)):
        row = tl.cast(start, tl.int64)
        given = tl.load(dy + row * dy_stride + here, inside, 0.0).to(tl.float32)
        value = tl.load(x + row * x_stride + here, inside, 0.0).to(tl.float32)
        gate = tl.load(z + row * z_stride + here, inside, 0.0).to(tl.float32)
        rstd = tl.load(rstds + row * groups + group)
        hat, inner, of_weight, s, slope = _parts(given, value, gate, rstd, w, FIRST)
        part += of_weight
        projection = tl.load(projections + row * groups + group)
        of_x, of_z = _ends(given, value, hat, inner, s, slope, rstd, projection, w, FIRST)
        tl.store(dx + row * groups * D + here, of_x.to(dx.dtype.element_ty), inside)
        tl.store(dz + row * groups * D + here, of_z.to(dz.dtype.element_ty), inside)
    tl.store(parts + tl.program_id(0).to(tl.int64) * groups * D + here, part, inside)


@triton.jit
def _add_parts(  # type: ignore[no-untyped-def]  # Triton's types are its own
    parts, dweight, P, D, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum over programs of (P, D) to dweight (D,)."""
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, P, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < P)[:, None] & (col < D)[None, :]
        total += tl.load(parts + row.to(tl.int64)[:, None] * D + col[None, :], inside, 0.0)
    tl.store(dweight + col, tl.sum(total, 0).to(dweight.dtype.element_ty), col < D)


def _empty(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, group: int, gate_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for y and, one a group, rstd."""
    size = x.shape[-1] // group
    return dense_like(x), torch.empty(*x.shape[:-1], size, dtype=torch.float32, device=x.device)


def _launch_saving(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: int,
    gate_first: bool,
    save: bool = True,
    elements: int = 2048,
    each: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`elements` of a program, at least one group, and `each` a thread."""
    y, rstd = _empty(x, z, weight, eps, group, gate_first)
    if x.numel() == 0:
        return y, rstd
    flat, gate, weight = rows(x), rows(z), weight.contiguous()
    groups = flat.shape[1] // group
    N = flat.shape[0] * groups
    strides = (flat.stride(0), gate.stride(0))
    block = power_of_2(group)
    loose = not gate_first and block >= LOOSE[0] and 4 * group <= 3 * block
    with on(x):
        if block <= FORWARD_LIMIT and not loose:
            height = power_of_2(max(1, min(elements // block, N)))
            _forward[(cdiv(N, height),)](
                flat, gate, weight, y, rstd, N, group, groups, *strides, eps, FIRST=gate_first, SAVE=save,
                ROWS=height, BLOCK=block, num_warps=min(max(height * block // (32 * each), 1), 32),
            )  # fmt: skip
        else:
            _forward_long[(N,)](
                flat, gate, weight, y, rstd, group, groups, *strides, eps, FIRST=gate_first, SAVE=save,
                BLOCK=LOOSE[1] if loose else PIECE, num_warps=LOOSE[2] if loose else 8,
            )  # fmt: skip
    return y, rstd


def _launch(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, group: int, gate_first: bool
) -> torch.Tensor:
    return _launch_saving(x, z, weight, eps, group, gate_first, save=False)[0]


def _launch_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    group: int,
    gate_first: bool,
    elements: int = 2048,
    each: int = 16,
    share: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`elements` of a program at a time, `each` a thread, and `share` warps on a multiprocessor."""
    dx, dz, dweight = _empty_gradients(dy, x, z, weight, rstd, group, gate_first)
    if x.numel() == 0:
        return dx, dz, dweight.zero_()
    given, flat, gate, weight = rows(dy), rows(x), rows(z), weight.contiguous()
    M, D = flat.shape
    groups = D // group
    strides = (given.stride(0), flat.stride(0), gate.stride(0))
    block = power_of_2(group)
    with on(x):
        if block <= BACKWARD_LIMIT:
            height = power_of_2(max(1, min(elements // block, 16, M)))
            warps = min(max(height * block // (32 * each), 1), 32)
            programs = min(cdiv(M, height), max(1, multiprocessors(x) * max(share // warps, 1) // groups))
            parts = torch.empty(programs, D, dtype=torch.float32, device=x.device)
            _backward_short[(programs, groups)](
                given, flat, gate, weight, rstd, dx, dz, parts, M, group, groups, *strides, FIRST=gate_first,
                ROWS=height, BLOCK=block, STAGES=2 if block < AHEAD else 1, num_warps=warps,
            )  # fmt: skip
        else:
            projection = torch.empty_like(rstd)
            pieces = cdiv(group, PIECE)
            programs = min(M, max(1, multiprocessors(x) * 4 // (pieces * groups)))
            parts = torch.empty(programs, D, dtype=torch.float32, device=x.device)
            _project[(M * groups,)](
                given, flat, gate, weight, rstd, projection, group, groups, *strides, FIRST=gate_first,
                BLOCK=PIECE, num_warps=8,
            )  # fmt: skip
            _backward_long[(programs, pieces * groups)](
                given, flat, gate, weight, rstd, projection, dx, dz, parts, M, group, groups, *strides,
                FIRST=gate_first, BLOCK=PIECE, num_warps=8,
            )  # fmt: skip
        _add_parts[(cdiv(D, 32),)](
            parts, dweight, programs, D, ROWS=min(power_of_2(programs), 256), BLOCK=32, num_warps=8
        )
    return dx, dz, dweight


def _empty_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    group: int,
    gate_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for dx, dz and dweight."""
    return dense_like(x), dense_like(z), dense_like(weight)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.group, ctx.gate_first = inputs[4:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 6
    return *_gradients(dy, *ctx.saved_tensors, ctx.group, ctx.gate_first), None, None, None


_plain = operator(
    "gated_rms_norm(Tensor x, Tensor z, Tensor weight, float eps, int group, bool gate_first) -> Tensor",
    _launch,
    lambda x, *_: dense_like(x),
)
_saving = operator(
    "gated_rms_norm_saving(Tensor x, Tensor z, Tensor weight, float eps, int group, bool gate_first) "
    "-> (Tensor, Tensor)",
    _launch_saving,
    _empty,
    _save,
    _backward,
)
_gradients = operator(
    "gated_rms_norm_backward(Tensor dy, Tensor x, Tensor z, Tensor weight, Tensor rstd, int group, "
    "bool gate_first) -> (Tensor, Tensor, Tensor)",
    _launch_backward,
    _empty_gradients,
)
