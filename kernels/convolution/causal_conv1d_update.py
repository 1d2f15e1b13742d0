"""One decode step of a causal depthwise convolution (Mamba, arXiv 2312.00752): state in place.

Bound by memory: the state is read and written once. A program works on several sequences, so that the weight,
which is as large as one sequence's state, is not read once for each.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from .._common import cdiv, check, choice, multiprocessors, on, operator
from .._pointwise import silu
from .causal_conv1d import pack4, taps_of, unpack4, weighted

BLOCK = 256
"""Channels of a program: 2 a thread, whose packed states are 16 bytes."""

SEQUENCES = 8
"""Sequences of a program, at most."""


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Literal["silu", "none"] = "silu",
) -> torch.Tensor:
    """Puts the token x behind those in `conv_state`, in place, and returns the convolution's value at it.

    x and y (B, D); conv_state (B, D, L) with the last L tokens, oldest first, L ≥ W - 1, of which the oldest
    is dropped; weight (D, W) with W from 2 to 4; bias (D,). bf16, fp16 or fp32 each, conv_state in x's dtype;
    computed in fp32. Not differentiable. Raises TypeError for a wrong type or dtype, ValueError for a wrong
    shape, device or activation; the message names the argument.
    """
    choice("activation", activation, ("silu", "none"))
    check("x", x, dim=2)
    B, D = x.shape
    check("weight", weight, dim=2, like=x)
    W = weight.shape[1]
    if not 2 <= W <= 4:
        raise ValueError(f"weight has {W} taps, expected 2 to 4")
    check("weight", weight, shape=(D, W))
    check("conv_state", conv_state, dim=3, dtypes=(x.dtype,), like=x)
    L = conv_state.shape[2]
    if L < W - 1:
        raise ValueError(f"conv_state holds {L} tokens, expected {W - 1} or more")
    check("conv_state", conv_state, shape=(B, D, L))
    if bias is not None:
        check("bias", bias, shape=(D,), like=x)
    y: torch.Tensor = _update(x, conv_state, weight, bias, activation == "silu")
    return y


@triton.jit
def _step(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, state, weight, bias, y, B, D, x_strides, state_strides, SEQUENCES,
    L: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of SEQUENCES sequences. PACKED: four tokens, contiguous, are one vector, and so are four
    taps; the next sequence's are read before this one's are worked on."""
    x_b, x_d = x_strides
    state_b, state_d, state_l = state_strides
    blocks = tl.cdiv(D, BLOCK)
    program = tl.program_id(0)
    d = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    first = (program // blocks) * SEQUENCES
    end = tl.minimum(first + SEQUENCES, B)
    inside = d < D
    x += d.to(tl.int64) * x_d
    start = 0.0
    if BIAS:
        start = tl.load(bias + d, inside, 0.0).to(tl.float32)
    if PACKED:
        # Flat, for a thread to have two channels of it in one access.
        n = (program % blocks) * (BLOCK * 4) + tl.arange(0, BLOCK * 4)
        all4 = n < D * 4
        taps = tl.load(weight + n, all4, 0.0).to(tl.float32)
        taps = unpack4(tl.reshape(taps, [BLOCK, 4]))
        line = state + n
        new = tl.load(x + tl.cast(first, tl.int64) * x_b, inside, 0.0)
        old = tl.load(line + tl.cast(first, tl.int64) * state_b, all4, 0.0)
        for sequence in range(first, end):
            b = tl.cast(sequence, tl.int64)
            x3, here = new, old
            new = tl.load(x + (b + 1) * x_b, inside & (sequence + 1 < end), 0.0)
            old = tl.load(line + (b + 1) * state_b, all4 & (sequence + 1 < end), 0.0)
            _, x0, x1, x2 = unpack4(tl.reshape(here, [BLOCK, 4]))
            tl.store(line + b * state_b, tl.reshape(pack4(x0, x1, x2, x3), [BLOCK * 4]), all4)
            x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
            value = weighted(start, (x0, x1, x2, x3), taps, W)
            if SILU:
                value = silu(value)
            tl.store(y + b * D + d, value.to(y.dtype.element_ty), inside)
    else:
        taps = taps_of(weight, d, inside, W)
        state += d.to(tl.int64) * state_d
        for sequence in range(first, end):
            b = tl.cast(sequence, tl.int64)
            new = tl.load(x + b * x_b, inside, 0.0)
            at = state + b * state_b
            x2 = tl.load(at + (L - 1) * state_l, inside, 0.0).to(tl.float32)
            x1, x0 = x2, x2
            if W >= 3:
                x1 = tl.load(at + (L - 2) * state_l, inside, 0.0).to(tl.float32)
            if W >= 4:
                x0 = tl.load(at + (L - 3) * state_l, inside, 0.0).to(tl.float32)
            for k in tl.static_range(L - 1):
                tl.store(at + k * state_l, tl.load(at + (k + 1) * state_l, inside, 0.0), inside)
            tl.store(at + (L - 1) * state_l, new, inside)
            value = weighted(start, (x0, x1, x2, new.to(tl.float32)), taps, W)
            if SILU:
                value = silu(value)
            tl.store(y + b * D + d, value.to(y.dtype.element_ty), inside)


def _launch(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    block: int = BLOCK,
    warps: int = 4,
    sequences: int = 0,
) -> torch.Tensor:
    """`sequences` a program, 0 for as many as leave 16 programs a multiprocessor."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    B, D = x.shape
    weight = weight.contiguous()
    L, W = conv_state.shape[2], weight.shape[1]
    blocks = cdiv(D, block)
    sequences = sequences or min(SEQUENCES, max(1, B * blocks // (16 * multiprocessors(x))))
    with on(x):
        _step[(cdiv(B, sequences) * blocks,)](
            x,
            conv_state,
            weight,
            weight if bias is None else bias.contiguous(),
            y,
            B,
            D,
            x.stride(),
            conv_state.stride(),
            sequences,
            L=L,
            W=W,
            BIAS=bias is not None,
            SILU=silu,
            PACKED=L == W == 4 and conv_state.stride(2) == 1 and conv_state.stride(1) == 4,
            BLOCK=block,
            num_warps=warps,
        )
    return y


_update = operator(
    "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, bool silu) -> Tensor",
    _launch,
    lambda x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)
