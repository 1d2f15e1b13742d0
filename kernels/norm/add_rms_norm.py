"""Residual addition and RMS normalization in one kernel, forward and backward: h is written once, read never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, check, dense_like, needs_gradient, on, operator, power_of_2, rows
from .._launch import prepared
from ._norm_backward import empty_gradients, prepare_backward
from ._norm_forward import empty, prepare_forward


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, h): h = x + residual, y = h / √(mean(h²) + eps) · weight over the last dimension.

    x and residual (…, D) of one dtype and weight (D,), in bf16, fp16 or fp32, to y and h (…, D) in x's
    dtype; statistics in fp32. Differentiable in x, residual and weight. Raises TypeError for a wrong type or
    dtype, ValueError for a wrong shape or device; the message names the argument.
    """
    if needs_gradient(x, residual, weight):
        y, h = _saving(x, residual, weight, eps)[:2]
    else:
        y, h = _plain(x, residual, weight, eps)
    return y, h


def add_rms(
    x: torch.Tensor, residual: torch.Tensor | None = None, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, rstd): h = x + residual, or x itself, and rstd (…,) = 1 / √(mean(h²) + eps) in fp32: what is left of
    `add_rms_norm` for who computes the norm where it is used. x and residual (…, D) as there.
    """
    check("x", x)
    if residual is not None:
        check("residual", residual, shape=x.shape, like=x, dtypes=(x.dtype,))
    h, rstd = _sums(x, residual, eps)
    return (x if residual is None else h), rstd


def gradients(
    dy: torch.Tensor, dh: torch.Tensor | None, h: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the gradient of x and of residual, the weight's) from those of y and h."""
    found: tuple[torch.Tensor, torch.Tensor] = _gradients(dy, dh, h, weight, rstd)
    return found


PIECE = 32 if INTERPRETED else 4096
"""Numbers of a row that a program of `add_rms` has at a time."""


@triton.jit
def _squares(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, residual, h, rstds, D, x_step, residual_step, eps, BLOCK: tl.constexpr
):
    """A row a program, in pieces."""
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_step + col, col < D, 0.0).to(tl.float32)
        if residual is not None:
            value += tl.load(residual + row * residual_step + col, col < D, 0.0).to(tl.float32)
            rounded = value.to(h.dtype.element_ty)
            tl.store(h + row * D + col, rounded, col < D)
            value = rounded.to(tl.float32)
        squares += value * value
    tl.store(rstds + row, 1.0 / tl.sqrt(tl.sum(squares, 0) / D + eps))


def _empty_sums(x: torch.Tensor, residual: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    h = x.new_empty(0) if residual is None else dense_like(x)
    return h, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _launch_sums(x: torch.Tensor, residual: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    h, rstd = _empty_sums(x, residual, eps)
    if x.numel() == 0:
        return h, rstd
    flat = rows(x)
    other = None if residual is None else rows(residual)
    N, D = flat.shape
    block = min(power_of_2(D), PIECE)
    with on(x):
        _squares[(N,)](
            flat, other, h, rstd, D, flat.stride(0), 0 if other is None else other.stride(0), eps, BLOCK=block,
            num_warps=min(max(block // 512, 1), 8),
        )  # fmt: skip
    return h, rstd


_sums = operator("add_rms(Tensor x, Tensor? residual, float eps) -> (Tensor, Tensor)", _launch_sums, _empty_sums)


def _check(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    check("x", x)
    if x.dim() == 0:
        raise ValueError("x has shape (), expected at least one dimension")
    check("residual", residual, shape=x.shape, like=x, dtypes=(x.dtype,))
    check("weight", weight, shape=x.shape[-1:], like=x)


def _prepare(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    run = prepare_forward(x, residual, weight, None, eps, save=False)
    return lambda x, residual, weight, eps: run(x, residual, weight, None)[:2]


def _prepare_saving(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    run = prepare_forward(x, residual, weight, None, eps, save=True)

    def saving(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor | None, ...]:
        y, h, _, rstd = run(x, residual, weight, None)
        return y, h, rstd

    return saving


def _empty(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    y, h, _, _ = empty(x, residual=True, centred=False, save=False)
    assert h is not None
    return y, h


def _empty_saving(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, h, _, rstd = empty(x, residual=True, centred=False, save=True)
    assert h is not None
    assert rstd is not None
    return y, h, rstd


def _prepare_backward(
    dy: torch.Tensor, dh: torch.Tensor | None, h: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    run = prepare_backward(dy, dh, h, weight, None, rstd)
    return lambda dy, dh, h, weight, rstd: run(dy, dh, h, weight, None, rstd)[:2]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1], inputs[2], output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: torch.Tensor | None, dh: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    """The gradients of x and residual are one tensor."""
    if dy is None:
        return dh, dh, None, None
    dx, dweight = _gradients(dy, dh, *ctx.saved_tensors)
    return dx, dx, dweight, None


_plain = operator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    prepared(_prepare, _check),
    _empty,
    check=_check,
)
_saving = operator(
    "add_rms_norm_saving(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    prepared(_prepare_saving, _check),
    _empty_saving,
    _save,
    _backward,
    check=_check,
    hidden=1,
)
_gradients = operator(
    "add_rms_norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor weight, Tensor rstd) -> (Tensor, Tensor)",
    prepared(_prepare_backward),
    lambda dy, dh, h, weight, rstd: empty_gradients(h, weight, False)[:2],
)
