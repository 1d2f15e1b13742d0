"""Residual addition and layer normalization in one kernel, forward and backward: h is written once, read never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, check, dense_like, in_rows, needs_gradient, operator, power_of_2, rows
from .._launch import Launch, prepared, room, room_like
from ._norm_backward import empty_gradients, prepare_backward
from ._norm_forward import empty, prepare_forward


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, h): h = x + residual, y = (h - mean) / √(variance + eps) · weight + bias over the last dimension.

    x and residual (…, D) of one dtype, weight and bias (D,) of one, in bf16, fp16 or fp32, to y and h (…, D) in
    x's dtype; statistics in fp32, of h as it is returned. Differentiable in all four. Raises TypeError for a wrong
    type or dtype, ValueError for a wrong shape or device; the message names the argument.
    """
    if needs_gradient(x, residual, weight, bias):
        y, h = _saving(x, residual, weight, bias, eps)[:2]
    else:
        y, h = _plain(x, residual, weight, bias, eps)
    return y, h


def add_moments(
    x: torch.Tensor, residual: torch.Tensor | None = None, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(h, mean, rstd): h = x + residual, or x itself, and of its rows the mean (…,) and 1 / √(variance + eps) in
    fp32: what is left of `add_layer_norm` for who computes the norm where it is used. x and residual (…, D) as
    there.
    """
    h, mean, rstd = _moments(x, residual, eps)
    return (x if residual is None else h), mean, rstd


def gradients(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the gradient of x and of residual, the weight's, the bias's) from those of y and h."""
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _gradients(dy, dh, h, weight, mean, rstd)
    return found


PIECE = 32 if INTERPRETED else 4096
"""Numbers of a row that a program of `add_moments` has at a time."""


@triton.jit
def _row_moments(  # type: ignore[no-untyped-def]  # Triton's types are its own
    tensors, D, x_step, residual_step, eps, BLOCK: tl.constexpr, ONE: tl.constexpr
):
    """A row a program. ONE: it fits a piece, and is read once; else in pieces, and again from the cache."""
    x, residual, h, means, rstds = tensors
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    x += row * x_step
    h += row * D
    value = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        col = start + lane
        value = tl.load(x + col, col < D, 0.0).to(tl.float32)
        if residual is not None:
            value += tl.load(residual + row * residual_step + col, col < D, 0.0).to(tl.float32)
            rounded = value.to(h.dtype.element_ty)
            tl.store(h + col, rounded, col < D)
            value = rounded.to(tl.float32)
        sums += value
    # μ = Σ h / D, and then σ² = Σ (h - μ)² / D: Σ h² - D μ² would cancel where the mean is large.
    mean = tl.sum(sums, 0) / D
    if ONE:
        apart = tl.where(lane < D, value - mean, 0.0)
        squares = apart * apart
    else:
        if residual is not None:
            # Other threads of this program wrote what is read back.
            tl.debug_barrier()
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, D, BLOCK):
            col = start + lane
            again = tl.load((x if residual is None else h) + col, col < D, 0.0).to(tl.float32)
            apart = tl.where(col < D, again - mean, 0.0)
            squares += apart * apart
    tl.store(means + row, mean)
    tl.store(rstds + row, 1.0 / tl.sqrt(tl.sum(squares, 0) / D + eps))


def _empty_moments(
    x: torch.Tensor, residual: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    h = x.new_empty(0) if residual is None else dense_like(x)
    mean = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    return h, mean, torch.empty_like(mean)


def _check_moments(x: torch.Tensor, residual: torch.Tensor | None, eps: float) -> None:
    check("x", x)
    if x.dim() == 0:
        raise ValueError("x has shape (), expected at least one dimension")
    if residual is not None:
        check("residual", residual, shape=x.shape, like=x, dtypes=(x.dtype,))


def _prepare_moments(
    x: torch.Tensor, residual: torch.Tensor | None, eps: float
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    if x.numel() == 0:
        return _empty_moments
    flat, other = rows(x), None if residual is None else rows(residual)
    N, D = flat.shape
    block = min(power_of_2(D), PIECE)
    launch = Launch(
        _row_moments,
        (N,),
        D,
        flat.stride(0),
        0 if other is None else other.stride(0),
        float(eps),
        BLOCK=block,
        ONE=block >= D,
        num_warps=min(max(block // 512, 1), 8),
    )
    device = x.device
    of_h = room((0,), x.dtype, device) if residual is None else room_like(x)
    of_moment = room(x.shape[:-1], torch.float32, device)
    copied = not in_rows(x) or (residual is not None and not in_rows(residual))

    def run(
        x: torch.Tensor, residual: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h, mean, rstd = of_h(), of_moment(), of_moment()
        if copied:
            x, residual = rows(x), None if residual is None else rows(residual)
        launch(device, (x, residual, h, mean, rstd))
        return h, mean, rstd

    return run


_moments = operator(
    "add_moments(Tensor x, Tensor? residual, float eps) -> (Tensor, Tensor, Tensor)",
    prepared(_prepare_moments, _check_moments),
    _empty_moments,
    check=_check_moments,
)


def _check(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
    check("x", x)
    if x.dim() == 0:
        raise ValueError("x has shape (), expected at least one dimension")
    check("residual", residual, shape=x.shape, like=x, dtypes=(x.dtype,))
    check("weight", weight, shape=x.shape[-1:], like=x)
    check("bias", bias, shape=x.shape[-1:], like=x, dtypes=(weight.dtype,))


def _prepare(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    run = prepare_forward(x, residual, weight, bias, eps, save=False)
    return lambda x, residual, weight, bias, eps: run(x, residual, weight, bias)[:2]


def _prepare_saving(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    run = prepare_forward(x, residual, weight, bias, eps, save=True)
    return lambda x, residual, weight, bias, eps: run(x, residual, weight, bias)


def _empty(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return dense_like(x), dense_like(x)


def _empty_saving(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor | None, ...]:
    return empty(x, residual=True, centred=True, save=True)


def _prepare_backward(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    return prepare_backward(dy, dh, h, weight, mean, rstd)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1], inputs[2], output[2], output[3])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: torch.Tensor | None, dh: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
    """The gradients of x and residual are one tensor."""
    if dy is None:
        return dh, dh, None, None, None
    dx, dweight, dbias = _gradients(dy, dh, *ctx.saved_tensors)
    return dx, dx, dweight, dbias, None


_plain = operator(
    "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor)",
    prepared(_prepare, _check),
    _empty,
    check=_check,
)
_saving = operator(
    "add_layer_norm_saving(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    prepared(_prepare_saving, _check),
    _empty_saving,
    _save,
    _backward,
    check=_check,
    hidden=2,
)
_gradients = operator(
    "add_layer_norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor weight, Tensor mean, Tensor rstd)"
    " -> (Tensor, Tensor, Tensor)",
    prepared(_prepare_backward),
    lambda dy, dh, h, weight, mean, rstd: empty_gradients(h, weight, True),
)
