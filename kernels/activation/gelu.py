"""Gaussian error linear unit (Hendrycks and Gimpel, arXiv 1606.08415), forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from .._common import cdiv, check, choice, dense_like, multiprocessors, operator, tanh_slope
from .._launch import Launch, prepared, room_like
from ._gated_activation import block_of

BLOCK = 4096
"""Elements of a program of four warps: 32 a thread, four 16-byte loads of a 2-byte type in flight."""


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x · Φ(x), with Φ the normal distribution function ("none") or its tanh approximation ("tanh").

    x of any shape in bf16, fp16 or fp32 to y of the same shape and dtype; computed in fp32.
    Differentiable. Raises TypeError for a wrong type or dtype, ValueError for a wrong device or
    `approximate`; the message names the argument.
    """
    y: torch.Tensor = _gelu(x, approximate)
    return y


@triton.jit
def _phi_slope(x, TANH: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(Φ(x), d(x · Φ(x))/dx)."""
    if TANH:
        phi, slope = tanh_slope(x)
    else:
        phi = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        slope = phi + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return phi, slope


@triton.jit
def _forward_piece(x, y, inside, TANH: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    value = tl.load(x, inside).to(tl.float32)
    phi, _ = _phi_slope(value, TANH)
    tl.store(y, (value * phi).to(y.dtype.element_ty), inside)


@triton.jit
def _forward(x, y, n, TANH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    # Only the last program masks: a mask at an odd n would split every 16-byte access.
    if start + BLOCK <= n:
        _forward_piece(x + at, y + at, None, TANH)
    else:
        _forward_piece(x + at, y + at, at < n, TANH)


@triton.jit
def _gradient_piece(dy, x, dx, inside, TANH: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    given = tl.load(dy, inside).to(tl.float32)
    _, slope = _phi_slope(tl.load(x, inside).to(tl.float32), TANH)
    tl.store(dx, (given * slope).to(dx.dtype.element_ty), inside)


@triton.jit
def _gradient(dy, x, dx, n, TANH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _gradient_piece(dy + at, x + at, dx + at, None, TANH)
    else:
        _gradient_piece(dy + at, x + at, dx + at, at < n, TANH)


def _check(x: torch.Tensor, approximate: str) -> None:
    check("x", x)
    choice("approximate", approximate, ("none", "tanh"))


def _prepare(x: torch.Tensor, approximate: str) -> Callable[..., torch.Tensor]:
    n, device, dense = x.numel(), x.device, x.is_contiguous()
    # A tail that is masked by element takes registers: 45 million took 67 µs in blocks of half the size, not 80.
    block, warps = block_of(n, multiprocessors(x), BLOCK if n % 16 == 0 else BLOCK // 2)
    launch = Launch(_forward, (cdiv(n, block),), n, TANH=approximate == "tanh", BLOCK=block, num_warps=warps)
    of_y = room_like(x)

    def run(x: torch.Tensor, approximate: str) -> torch.Tensor:
        y = of_y()
        if n:
            launch(device, x if dense else x.contiguous(), y)
        return y

    return run


def _prepare_backward(dy: torch.Tensor, x: torch.Tensor, approximate: str) -> Callable[..., torch.Tensor]:
    n, device, dense = x.numel(), x.device, dy.is_contiguous() and x.is_contiguous()
    block, warps = block_of(n, multiprocessors(x), BLOCK // 2)
    launch = Launch(_gradient, (cdiv(n, block),), n, TANH=approximate == "tanh", BLOCK=block, num_warps=warps)
    of_dx = room_like(x)

    def run(dy: torch.Tensor, x: torch.Tensor, approximate: str) -> torch.Tensor:
        dx = of_dx()
        if n:
            if not dense:
                dy, x = dy.contiguous(), x.contiguous()
            launch(device, dy, x, dx)
        return dx

    return run


_launch = prepared(_prepare, _check)
_launch_backward = prepared(_prepare_backward)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.approximate = inputs[1]


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return _gelu_backward(dy, *ctx.saved_tensors, ctx.approximate), None


_gelu = operator(
    "gelu(Tensor x, str approximate) -> Tensor",
    _launch,
    lambda x, approximate: dense_like(x),
    _save,
    _backward,
    check=_check,
)
_gelu_backward = operator(
    "gelu_backward(Tensor dy, Tensor x, str approximate) -> Tensor",
    _launch_backward,
    lambda dy, x, approximate: dense_like(x),
)
