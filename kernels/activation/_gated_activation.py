"""Gated activations, activation(gate) · up: what SwiGLU and GeGLU share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from .._common import cdiv, check, dense_like, multiprocessors, operator, sigmoid, tanh_slope
from .._launch import Launch, prepared, room_like

BLOCK = 1024
"""Elements of a program of four warps: 8 a thread of each tensor, one 16-byte access each. On an H200 it was
the quickest forward (129.1 → 128.6 µs at 8192×11008, 2048 elements before) and backward.
"""

SMALLEST = 512
"""Fewest elements of a program: 4 a thread. 1000 x 1001 of gelu took 6.9 µs on an H200, in blocks of 2048 8.1."""


@triton.jit
def _activation(gate, SILU: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(factor, slope): the activation is gate · factor, slope is its derivative."""
    if SILU:
        factor = sigmoid(gate)
        slope = factor * (1.0 + gate * (1.0 - factor))
    else:
        factor, slope = tanh_slope(gate)
    return factor, slope


@triton.jit
def _forward_piece(gate, up, y, inside, SILU: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    g = tl.load(gate, inside).to(tl.float32)
    u = tl.load(up, inside).to(tl.float32)
    factor, _ = _activation(g, SILU)
    tl.store(y, (g * factor * u).to(y.dtype.element_ty), inside)


@triton.jit
def _forward(gate, up, y, n, SILU: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    # Only the last program masks: a mask at an odd n would split every 16-byte access.
    if start + BLOCK <= n:
        _forward_piece(gate + at, up + at, y + at, None, SILU)
    else:
        _forward_piece(gate + at, up + at, y + at, at < n, SILU)


@triton.jit
def _gradients_piece(dy, gate, up, dgate, dup, inside, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    given = tl.load(dy, inside).to(tl.float32)
    g = tl.load(gate, inside).to(tl.float32)
    u = tl.load(up, inside).to(tl.float32)
    factor, slope = _activation(g, SILU)
    tl.store(dgate, (given * u * slope).to(dgate.dtype.element_ty), inside)
    tl.store(dup, (given * g * factor).to(dup.dtype.element_ty), inside)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy, gate, up, dgate, dup, n, SILU: tl.constexpr, BLOCK: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _gradients_piece(dy + at, gate + at, up + at, dgate + at, dup + at, None, SILU)
    else:
        _gradients_piece(dy + at, gate + at, up + at, dgate + at, dup + at, at < n, SILU)


def block_of(n: int, processors: int, block: int) -> tuple[int, int]:
    """(elements, warps) of a program for n elements: `block`, or less where programs are few for the device."""
    while block > SMALLEST and cdiv(n, block) < 16 * processors:
        block //= 2
    return block, 4


def _check(gate: torch.Tensor, up: torch.Tensor) -> None:
    check("gate", gate)
    check("up", up, shape=gate.shape, like=gate, dtypes=(gate.dtype,))


Gated: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Gradients: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def gated(name: str, silu: bool) -> tuple[Gated, Gradients]:
    """The operator `name(gate, up)`, with SiLU or with GELU's tanh form, and gradients(dy, gate, up) of both."""

    def prepare(gate: torch.Tensor, up: torch.Tensor) -> Callable[..., torch.Tensor]:
        n, device, dense = gate.numel(), gate.device, gate.is_contiguous() and up.is_contiguous()
        block, warps = block_of(n, multiprocessors(gate), BLOCK)
        launch = Launch(_forward, (cdiv(n, block),), n, SILU=silu, BLOCK=block, num_warps=warps)
        of_y = room_like(gate)

        def run(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            y = of_y()
            if n:
                if not dense:
                    gate, up = gate.contiguous(), up.contiguous()
                launch(device, gate, up, y)
            return y

        return run

    def prepare_backward(
        dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        n, device = gate.numel(), gate.device
        dense = dy.is_contiguous() and gate.is_contiguous() and up.is_contiguous()
        block, warps = block_of(n, multiprocessors(gate), BLOCK)
        launch = Launch(_gradients, (cdiv(n, block),), n, SILU=silu, BLOCK=block, num_warps=warps)
        of_gradient = room_like(gate)

        def run(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            dgate, dup = of_gradient(), of_gradient()
            if n:
                if not dense:
                    dy, gate, up = dy.contiguous(), gate.contiguous(), up.contiguous()
                launch(device, dy, gate, up, dgate, dup)
            return dgate, dup

        return run

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    gradients = operator(
        f"{name}_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)",
        prepared(prepare_backward),
        lambda dy, gate, up: (dense_like(gate), dense_like(gate)),
    )
    forward = operator(
        f"{name}(Tensor gate, Tensor up) -> Tensor",
        prepared(prepare, _check),
        lambda gate, up: dense_like(gate),
        save,
        lambda ctx, dy: gradients(dy, *ctx.saved_tensors),
        check=_check,
    )
    return forward, gradients
