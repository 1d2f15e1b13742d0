"""Causal depthwise convolution of 2 to 4 taps with bias and SiLU (Mamba, arXiv 2312.00752), and its gradients.

Each number is read once and written once. With the sequence contiguous ("bds"), a thread takes a vector of
consecutive tokens and the vectors beside it, and shifts in registers: loads at an odd offset would be split.
With the channels contiguous ("bsd"), a program slides over the tokens with the last three in registers.

Gradients of the weight are sums over all tokens: each program writes its part, and a second kernel adds the
parts in a fixed order, so that results repeat bit by bit.
"""

# ruff: noqa: RUF005  # Triton has no starred expressions: tuples grow by addition

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from .._common import (
    INTERPRETED,
    cdiv,
    check,
    choice,
    dense_like,
    lined,
    most_registers,
    multiprocessors,
    on,
    operator,
    power_of_2,
)
from .._pointwise import silu, silu_slope

LANES = 8 if INTERPRETED else 256
"""Vectors of a program with the sequence contiguous, forward, two a thread: of one channel or, where that is
shorter, of several. The interpreter turns its loops on little data."""

BACKWARD_LANES = 8 if INTERPRETED else 128
"""The same backward, of one channel."""

BLOCK = 16 if INTERPRETED else 256
"""Channels of a program of two warps with the channels contiguous, at most; 4 a thread."""

CHUNK = 8 if INTERPRETED else 64
"""Tokens of a program with the channels contiguous, forward; the three before them are read twice."""


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    activation: Literal["silu", "none"] = "silu",
    layout: Literal["bds", "bsd"] = "bds",
) -> torch.Tensor:
    """y[b, d, s] = act(bias[d] + Σ_w weight[d, w] · x[b, d, s - W + 1 + w]), of x's shape and dtype.

    x (B, D, S) with layout "bds" or (B, S, D) with "bsd", weight (D, W) with W from 2 to 4, bias (D,). Tokens
    before the first are those of `initial_state`, (B, D, W - 1) or (B, W - 1, D) by layout, or zero.
    bf16, fp16 or fp32 each, initial_state in x's; computed in fp32. Differentiable in all four tensors.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape, device, activation or layout;
    the message names the argument.
    """
    choice("activation", activation, ("silu", "none"))
    choice("layout", layout, ("bds", "bsd"))
    check("x", x, dim=3)
    B, D = x.shape[0], x.shape[1 if layout == "bds" else 2]
    check("weight", weight, dim=2, like=x)
    W = weight.shape[1]
    if not 2 <= W <= 4:
        raise ValueError(f"weight has {W} taps, expected 2 to 4")
    check("weight", weight, shape=(D, W))
    if bias is not None:
        check("bias", bias, shape=(D,), like=x)
    if initial_state is not None:
        shape = (B, D, W - 1) if layout == "bds" else (B, W - 1, D)
        check("initial_state", initial_state, shape=shape, dtypes=(x.dtype,), like=x)
    y: torch.Tensor = _convolve(x, weight, bias, initial_state, activation == "silu", layout == "bsd")
    return y


# ---------------------------------------------------------------------------------------------------------
# Taps are a tuple of four, oldest first; with fewer, the oldest are not there and are never multiplied.


class Inputs(NamedTuple):
    """x, weight (D, W), bias (D,) and the initial state; for what flags say is missing another tensor."""

    x: Any
    weight: Any
    bias: Any
    initial: Any


class Outputs(NamedTuple):
    """Of a backward pass: dx, the gradient of the initial state, and parts (programs, W + 1, D) of those of the
    weight, taps newest first, and the bias.
    """

    dx: Any
    dinitial: Any
    parts: Any


class Sizes(NamedTuple):
    """Sequences, channels, tokens."""

    B: Any
    D: Any
    S: Any


class Flags(NamedTuple):
    """Taps, whether there is a bias, an initial state, SiLU; whether vectors of tokens are whole; and the cache's
    eviction policy for what is written.
    """

    W: int
    BIAS: bool
    STATE: bool
    SILU: bool
    EVEN: bool
    HINT: str


@triton.jit
def taps_of(weight, d, inside, W: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(a0, a1, a2, a3) of the channels d, in fp32."""
    a3 = tl.load(weight + d * W + W - 1, inside, 0.0).to(tl.float32)
    a2 = tl.load(weight + d * W + W - 2, inside, 0.0).to(tl.float32)
    a1 = a2
    a0 = a2
    if W >= 3:
        a1 = tl.load(weight + d * W + W - 3, inside, 0.0).to(tl.float32)
    if W >= 4:
        a0 = tl.load(weight + d * W + W - 4, inside, 0.0).to(tl.float32)
    return a0, a1, a2, a3


@triton.jit
def weighted(start, x, taps, W: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """start + Σ tap · x over the taps that are there, each of them one fused multiplication and addition."""
    total = start + taps[3] * x[3]
    total += taps[2] * x[2]
    if W >= 3:
        total += taps[1] * x[1]
    if W >= 4:
        total += taps[0] * x[0]
    return total


@triton.jit
def _act(value, SILU: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    if SILU:
        value = silu(value)
    return value


@triton.jit
def _slope(given, value, SILU: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The gradient before the activation, for the one behind it."""
    if SILU:
        _, slope = silu_slope(value)
        given = given * slope
    return given


# ---------------------------------------------------------------------------------------------------------
# The sequence contiguous. [n, VEC] is one vector a thread; split and joined, it stays in that thread.


@triton.jit
def unpack4(t):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The columns of t (n, 4), each (n,)."""
    even, odd = tl.split(tl.reshape(t, [t.shape[0], 2, 2]))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    return c0, c1, c2, c3


@triton.jit
def pack4(c0, c1, c2, c3):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(n, 4) of its columns, each (n,)."""
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [c0.shape[0], 4])


@triton.jit
def unpack(t):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The VEC columns of [n, VEC], VEC 4 or 8, as a tuple of [n], in fp32."""
    t = t.to(tl.float32)
    if t.shape[1] == 4:
        return unpack4(t)
    else:
        even, odd = tl.split(tl.reshape(t, [t.shape[0], 4, 2]))
        c0, c2, c4, c6 = unpack4(even)
        c1, c3, c5, c7 = unpack4(odd)
        return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def pack(c):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The inverse of `unpack`."""
    if len(c) == 4:
        return pack4(c[0], c[1], c[2], c[3])
    else:
        even = pack4(c[0], c[2], c[4], c[6])
        odd = pack4(c[1], c[3], c[5], c[7])
        return tl.reshape(tl.join(even, odd), [c[0].shape[0], 8])


@triton.jit
def _vector(at, s, S, inside, VEC: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """VEC tokens from token s on of each row; zero at and beyond S."""
    j = tl.arange(0, VEC)
    if EVEN:
        mask = (inside & (s < S))[:, None] & (j < VEC)[None, :]
    else:
        mask = inside[:, None] & (s[:, None] + j[None, :] < S)
    return tl.load(at[:, None] + j[None, :], mask, 0.0)


@triton.jit
def _before(x, initial, row, s, S, inside, W: tl.constexpr, STATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The three tokens before token s; `row` counts rows of the initial state."""
    _, p1, p2, p3 = unpack4(_vector(x - 4, s - 4, S, inside & (s > 0), 4, True).to(tl.float32))
    if STATE:
        first = inside & (s == 0)
        old = initial + row * (W - 1) + W - 1 + s  # s is 0 wherever this is read
        p3 += tl.load(old - 1, first, 0.0).to(tl.float32)
        if W >= 3:
            p2 += tl.load(old - 2, first, 0.0).to(tl.float32)
        if W >= 4:
            p1 += tl.load(old - 3, first, 0.0).to(tl.float32)
    return p1, p2, p3


@triton.jit
def _window(c, i: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Four neighbours of a tuple, from the i-th on."""
    return c[i], c[i + 1], c[i + 2], c[i + 3]


@triton.jit
def _forward_bds(  # type: ignore[no-untyped-def]  # Triton's types are its own
    given, y, D, S, x_b, x_d, flags: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr
):
    """ROWS channels of one sequence, LANES vectors of each."""
    W: tl.constexpr = flags.W
    pieces = tl.cdiv(S, LANES * VEC)
    blocks = tl.cdiv(D, ROWS)
    program = tl.program_id(0)
    n = tl.arange(0, ROWS * LANES)
    s = (program % pieces) * (LANES * VEC) + (n % LANES) * VEC
    d = ((program // pieces) % blocks) * ROWS
    if ROWS > 1:
        d += n // LANES
    b = (program // pieces // blocks).to(tl.int64)
    inside = (s >= 0) & (d < D)
    row = b * D + d
    at = given.x + b * x_b + d.to(tl.int64) * x_d + s
    before = _before(at, given.initial, row, s, S, inside & (s < S), W, flags.STATE)
    c = before + unpack(_vector(at, s, S, inside, VEC, flags.EVEN))
    taps = taps_of(given.weight, d, d < D, W)
    start = 0.0
    if flags.BIAS:
        start = tl.load(given.bias + d, d < D, 0.0).to(tl.float32)
    # y[s] = act(bias + Σ_w weight[w] · x[s - W + 1 + w])
    results = ()
    for i in tl.static_range(VEC):
        results = results + (_act(weighted(start, _window(c, i), taps, W), flags.SILU),)
    result = pack(results)
    j = tl.arange(0, VEC)
    if flags.EVEN:
        mask = (inside & (s < S))[:, None] & (j < VEC)[None, :]
    else:
        mask = inside[:, None] & (s[:, None] + j[None, :] < S)
    to = y + (row * S + s)[:, None] + j[None, :]
    tl.store(to, result.to(y.dtype.element_ty), mask, eviction_policy=flags.HINT)


@triton.jit
def _input_gradient(c, g, i: tl.constexpr, taps, sums, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """The input's gradient at the i-th token of a vector, and the sums for taps and bias with what it adds."""
    t0, t1, t2, t3, tb = sums
    here = c[i + 3]
    # dx[s] = Σ_w weight[w] · g[s + W - 1 - w];  dweight[w] += x[s] · g[s + W - 1 - w]
    result = weighted(0.0, (g[i + 3], g[i + 2], g[i + 1], g[i]), taps, W)
    t3 += here * g[i]
    t2 += here * g[i + 1]
    if W >= 3:
        t1 += here * g[i + 2]
    if W >= 4:
        t0 += here * g[i + 3]
    return result, (t0, t1, t2, t3, tb + g[i])


@triton.jit
def _gradient_at(c, dy, i: tl.constexpr, start, taps, W: tl.constexpr, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    return _slope(dy[i], weighted(start, _window(c, i), taps, W), SILU)


@triton.jit
def _initial_gradient(dinitial, end, c, g, taps, sums, first, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Those of the tokens before the first, written to `end` and before it, from the first three tokens alone; the
    sums with what they add.
    """
    t0, t1, t2, t3, tb = sums
    a0, a1, a2, _ = taps
    t2 += tl.where(first, c[2] * g[0], 0.0)
    kind = dinitial.dtype.element_ty
    if W == 2:
        tl.store(end - 1, (a2 * g[0]).to(kind), first)
    elif W == 3:
        tl.store(end - 1, (a2 * g[0] + a1 * g[1]).to(kind), first)
        tl.store(end - 2, (a1 * g[0]).to(kind), first)
        t1 += tl.where(first, c[2] * g[1] + c[1] * g[0], 0.0)
    else:
        tl.store(end - 1, (a2 * g[0] + a1 * g[1] + a0 * g[2]).to(kind), first)
        tl.store(end - 2, (a1 * g[0] + a0 * g[1]).to(kind), first)
        tl.store(end - 3, (a0 * g[0]).to(kind), first)
        t1 += tl.where(first, c[2] * g[1] + c[1] * g[0], 0.0)
        t0 += tl.where(first, c[2] * g[2] + c[1] * g[1] + c[0] * g[0], 0.0)
    return t0, t1, t2, t3, tb


@triton.jit
def _backward_bds(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy, given, out, sizes, dy_b, dy_d, x_b, x_d, flags: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr
):
    """One channel of every n-th piece of LANES vectors."""
    W: tl.constexpr = flags.W
    EVEN: tl.constexpr = flags.EVEN
    B, D, S = sizes
    d = tl.program_id(0)
    pieces = tl.cdiv(S, LANES * VEC)
    lane = tl.arange(0, LANES) * VEC
    j = tl.arange(0, VEC)
    everywhere = lane >= 0
    taps = taps_of(given.weight, d, d < D, W)
    start = 0.0
    if flags.BIAS:
        start = tl.load(given.bias + d).to(tl.float32)
    zero = tl.zeros([LANES], tl.float32)
    sums = (zero, zero, zero, zero, zero)
    for piece in range(tl.program_id(1), B * pieces, tl.num_programs(1)):
        b = (piece // pieces).to(tl.int64)
        s = (piece % pieces) * (LANES * VEC) + lane
        row = b * D + d
        at = given.x + b * x_b + d.to(tl.int64) * x_d + s
        dy_at = dy + b * dy_b + d.to(tl.int64) * dy_d + s
        now = _vector(at, s, S, everywhere, VEC, EVEN)
        later = _vector(at + VEC, s + VEC, S, everywhere, 4, EVEN)
        dy_now = _vector(dy_at, s, S, everywhere, VEC, EVEN)
        dy_later = _vector(dy_at + VEC, s + VEC, S, everywhere, 4, EVEN)
        before = _before(at, given.initial, row, s, S, s < S, W, flags.STATE)
        c = before + unpack(now) + unpack(later)
        u = unpack(dy_now) + unpack(dy_later)
        # g = dy · act'(bias + Σ_w weight[w] · x), of the vector and three tokens behind it
        g = ()
        for i in tl.static_range(VEC + 3):
            g = g + (_gradient_at(c, u, i, start, taps, W, flags.SILU),)
        results = ()
        for i in tl.static_range(VEC):
            result, sums = _input_gradient(c, g, i, taps, sums, W)
            results = results + (result,)
        dx = pack(results)
        mask = (s < S)[:, None] & (j < VEC)[None, :] if EVEN else s[:, None] + j[None, :] < S
        to = out.dx + (row * S + s)[:, None] + j[None, :]
        tl.store(to, dx.to(out.dx.dtype.element_ty), mask, eviction_policy=flags.HINT)
        if flags.STATE:
            end = out.dinitial + row * (W - 1) + W - 1 + s
            sums = _initial_gradient(out.dinitial, end, c, g, taps, sums, s == 0, W)
    t0, t1, t2, t3, tb = sums
    part = out.parts + tl.program_id(1).to(tl.int64) * (W + 1) * D + d
    tl.store(part, tl.sum(t3, 0))
    tl.store(part + D, tl.sum(t2, 0))
    if W >= 3:
        tl.store(part + 2 * D, tl.sum(t1, 0))
    if W >= 4:
        tl.store(part + 3 * D, tl.sum(t0, 0))
    tl.store(part + W * D, tl.sum(tb, 0))


# ---------------------------------------------------------------------------------------------------------
# The channels contiguous: a program slides over the tokens.


@triton.jit
def _token(x, s, S, stride, inside):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Token s of each channel in fp32, zero outside of the sequence."""
    at = x + tl.cast(s, tl.int64) * stride
    return tl.load(at, inside & (s >= 0) & (s < S), 0.0).to(tl.float32)


@triton.jit
def _token_before(x, initial, s, D, stride, inside, W: tl.constexpr, STATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `_token`, for one that may lie before the first, in the initial state."""
    value = tl.load(x + tl.cast(s, tl.int64) * stride, inside & (s >= 0), 0.0).to(tl.float32)
    if STATE:
        old = inside & (s < 0) & (s >= 1 - W)
        value += tl.load(initial + (s + W - 1) * D, old, 0.0).to(tl.float32)
    return value


@triton.jit
def _four(x, s, end, stride, inside, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Four tokens from token s on, zero from token `end` on. EVEN: that is not among them, or is the first."""
    at = x + tl.cast(s, tl.int64) * stride
    there = inside & (s < end)
    if EVEN:
        n1 = tl.load(at + stride, there, 0.0)
        n2 = tl.load(at + 2 * stride, there, 0.0)
        n3 = tl.load(at + 3 * stride, there, 0.0)
    else:
        n1 = tl.load(at + stride, inside & (s + 1 < end), 0.0)
        n2 = tl.load(at + 2 * stride, inside & (s + 2 < end), 0.0)
        n3 = tl.load(at + 3 * stride, inside & (s + 3 < end), 0.0)
    return tl.load(at, there, 0.0), n1, n2, n3


@triton.jit
def _forward_bsd(  # type: ignore[no-untyped-def]  # Triton's types are its own
    given, y, D, S, x_b, x_s, flags: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK channels of CHUNK tokens, four at a time; the next four are read before these are worked on."""
    W: tl.constexpr = flags.W
    EVEN: tl.constexpr = flags.EVEN
    HINT: tl.constexpr = flags.HINT
    blocks = tl.cdiv(D, BLOCK)
    chunks = tl.cdiv(S, CHUNK)
    program = tl.program_id(0)
    d = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    first = ((program // blocks) % chunks) * CHUNK
    b = (program // blocks // chunks).to(tl.int64)
    inside = d < D
    at = given.x + b * x_b + d
    old = given.initial + b * (W - 1) * D + d
    to = y + b * S * D + d
    taps = taps_of(given.weight, d, inside, W)
    start = tl.zeros([BLOCK], tl.float32)
    if flags.BIAS:
        start = tl.load(given.bias + d, inside, 0.0).to(tl.float32)
    x0 = _token_before(at, old, first - 3, D, x_s, inside, W, flags.STATE)
    x1 = _token_before(at, old, first - 2, D, x_s, inside, W, flags.STATE)
    x2 = _token_before(at, old, first - 1, D, x_s, inside, W, flags.STATE)
    kind = y.dtype.element_ty
    end = tl.minimum(first + CHUNK, S)
    n0, n1, n2, n3 = _four(at, first, end, x_s, inside, EVEN)
    for s in range(first, end, 4):
        x3, x4, x5, x6 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
        n0, n1, n2, n3 = _four(at, s + 4, end, x_s, inside, EVEN)
        # y[s] = act(bias + Σ_w weight[w] · x[s - W + 1 + w])
        y0 = _act(weighted(start, (x0, x1, x2, x3), taps, W), flags.SILU)
        y1 = _act(weighted(start, (x1, x2, x3, x4), taps, W), flags.SILU)
        y2 = _act(weighted(start, (x2, x3, x4, x5), taps, W), flags.SILU)
        y3 = _act(weighted(start, (x3, x4, x5, x6), taps, W), flags.SILU)
        line = to + tl.cast(s, tl.int64) * D
        tl.store(line, y0.to(kind), inside, eviction_policy=HINT)
        tl.store(line + D, y1.to(kind), inside & (EVEN | (s + 1 < S)), eviction_policy=HINT)
        tl.store(line + 2 * D, y2.to(kind), inside & (EVEN | (s + 2 < S)), eviction_policy=HINT)
        tl.store(line + 3 * D, y3.to(kind), inside & (EVEN | (s + 3 < S)), eviction_policy=HINT)
        x0, x1, x2 = x4, x5, x6


@triton.jit
def _slide(x, dy, g, start, taps, sums, W: tl.constexpr, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """(gradient before the activation at the newest of four tokens, input's gradient at the oldest, sums), from
    those before the activation at the older three.
    """
    t0, t1, t2, t3, tb = sums
    g0, g1, g2 = g
    g3 = _slope(dy, weighted(start, x, taps, W), SILU)
    # dx[s] = Σ_w weight[w] · g[s + W - 1 - w];  dweight[w] += x[s] · g[s + W - 1 - w]
    result = weighted(0.0, (g3, g2, g1, g0), taps, W)
    t3 += x[0] * g0
    t2 += x[0] * g1
    if W >= 3:
        t1 += x[0] * g2
    if W >= 4:
        t0 += x[0] * g3
    return g3, result, (t0, t1, t2, t3, tb + g0)


@triton.jit
def _backward_bsd(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dy, given, out, D, S, dy_b, dy_s, x_b, x_s, CHUNK, flags: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK channels of CHUNK tokens. The input's gradient at a token needs the three tokens behind it, so the
    newest token in hand is always three ahead.
    """
    W: tl.constexpr = flags.W
    SILU: tl.constexpr = flags.SILU
    HINT: tl.constexpr = flags.HINT
    blocks = tl.cdiv(D, BLOCK)
    chunks = tl.cdiv(S, CHUNK)
    program = tl.program_id(0)
    d = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    piece = program // blocks
    first = (piece % chunks) * CHUNK
    b = (piece // chunks).to(tl.int64)
    inside = d < D
    at = given.x + b * x_b + d
    dy_at = dy + b * dy_b + d
    old = given.initial + b * (W - 1) * D + d
    to = out.dx + b * S * D + d
    kind = out.dx.dtype.element_ty
    taps = taps_of(given.weight, d, inside, W)
    start = tl.zeros([BLOCK], tl.float32)
    if flags.BIAS:
        start = tl.load(given.bias + d, inside, 0.0).to(tl.float32)
    p0 = _token_before(at, old, first - 3, D, x_s, inside, W, flags.STATE)
    p1 = _token_before(at, old, first - 2, D, x_s, inside, W, flags.STATE)
    p2 = _token_before(at, old, first - 1, D, x_s, inside, W, flags.STATE)
    x0 = _token(at, first, S, x_s, inside)
    x1 = _token(at, first + 1, S, x_s, inside)
    x2 = _token(at, first + 2, S, x_s, inside)
    u0 = _token(dy_at, first, S, dy_s, inside)
    u1 = _token(dy_at, first + 1, S, dy_s, inside)
    u2 = _token(dy_at, first + 2, S, dy_s, inside)
    g0 = _slope(u0, weighted(start, (p0, p1, p2, x0), taps, W), SILU)
    g1 = _slope(u1, weighted(start, (p1, p2, x0, x1), taps, W), SILU)
    g2 = _slope(u2, weighted(start, (p2, x0, x1, x2), taps, W), SILU)
    zero = tl.zeros([BLOCK], tl.float32)
    t0, t1, t2, t3, tb = zero, zero, zero, zero, zero
    if flags.STATE:  # noqa: SIM102  # one is known when compiling, the other is not
        if first == 0:
            # The tokens before the first: their gradients come from the first three tokens alone.
            a0, a1, a2, _ = taps
            last = out.dinitial + (b * (W - 1) + W - 2) * D + d
            state = out.dinitial.dtype.element_ty
            t2 += p2 * g0
            if W == 2:
                tl.store(last, (a2 * g0).to(state), inside)
            elif W == 3:
                tl.store(last, (a2 * g0 + a1 * g1).to(state), inside)
                tl.store(last - D, (a1 * g0).to(state), inside)
                t1 += p2 * g1 + p1 * g0
            else:
                tl.store(last, (a2 * g0 + a1 * g1 + a0 * g2).to(state), inside)
                tl.store(last - D, (a1 * g0 + a0 * g1).to(state), inside)
                tl.store(last - 2 * D, (a0 * g0).to(state), inside)
                t1 += p2 * g1 + p1 * g0
                t0 += p2 * g2 + p1 * g1 + p0 * g0
    sums = (t0, t1, t2, t3, tb)
    # Three tokens beyond the last of the chunk, unless the sequence ends; the last four read ahead are not used.
    end = tl.minimum(first + CHUNK + 3, S)
    n0, n1, n2, n3 = _four(at, first + 3, end, x_s, inside, False)
    m0, m1, m2, m3 = _four(dy_at, first + 3, end, dy_s, inside, False)
    for s in range(first, tl.minimum(first + CHUNK, S), 4):
        x3, x4, x5, x6 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
        u3, u4, u5, u6 = m0.to(tl.float32), m1.to(tl.float32), m2.to(tl.float32), m3.to(tl.float32)
        n0, n1, n2, n3 = _four(at, s + 7, end, x_s, inside, False)
        m0, m1, m2, m3 = _four(dy_at, s + 7, end, dy_s, inside, False)
        line = to + tl.cast(s, tl.int64) * D
        g3, result, sums = _slide((x0, x1, x2, x3), u3, (g0, g1, g2), start, taps, sums, W, SILU)
        tl.store(line, result.to(kind), inside, eviction_policy=HINT)
        g4, result, sums = _slide((x1, x2, x3, x4), u4, (g1, g2, g3), start, taps, sums, W, SILU)
        tl.store(line + D, result.to(kind), inside & (s + 1 < S), eviction_policy=HINT)
        g5, result, sums = _slide((x2, x3, x4, x5), u5, (g2, g3, g4), start, taps, sums, W, SILU)
        tl.store(line + 2 * D, result.to(kind), inside & (s + 2 < S), eviction_policy=HINT)
        g6, result, sums = _slide((x3, x4, x5, x6), u6, (g3, g4, g5), start, taps, sums, W, SILU)
        tl.store(line + 3 * D, result.to(kind), inside & (s + 3 < S), eviction_policy=HINT)
        x0, x1, x2 = x4, x5, x6
        g0, g1, g2 = g4, g5, g6
    t0, t1, t2, t3, tb = sums
    part = out.parts + piece.to(tl.int64) * (W + 1) * D + d
    tl.store(part, t3, inside)
    tl.store(part + D, t2, inside)
    if W >= 3:
        tl.store(part + 2 * D, t1, inside)
    if W >= 4:
        tl.store(part + 3 * D, t0, inside)
    tl.store(part + W * D, tb, inside)


@triton.jit
def _add_parts(  # type: ignore[no-untyped-def]  # Triton's types are its own
    parts, dweight, dbias, P, D, W: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum over programs of (P, W + 1, D) to dweight (D, W) and dbias (D,), one tap or the bias a program."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.program_id(1)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, P, ROWS):
        row = start + tl.arange(0, ROWS)
        at = (row.to(tl.int64) * (W + 1) + tap)[:, None] * D + d[None, :]
        total += tl.load(parts + at, (row < P)[:, None] & (d < D)[None, :], 0.0)
    value = tl.sum(total, 0)
    if tap < W:
        tl.store(dweight + d * W + W - 1 - tap, value.to(dweight.dtype.element_ty), d < D)
    elif BIAS:
        tl.store(dbias + d, value.to(dbias.dtype.element_ty), d < D)


# ---------------------------------------------------------------------------------------------------------
# Host.


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial: torch.Tensor | None,
    silu: bool,
    last: bool,
    lanes: int = LANES,
    rows: int = 0,
    block: int = BLOCK,
    chunk: int = CHUNK,
    warps: int = 0,
    hint: str = "",
) -> torch.Tensor:
    """`rows` channels a program, 0 for as many as make up the lanes; `warps` 0 for the usual number; `hint` is the
    cache's eviction policy for what is written."""
    y = dense_like(x)
    if x.numel() == 0:
        return y
    x, weight = lined(x), weight.contiguous()
    W = weight.shape[1]
    given = _inputs(x, weight, bias, initial)
    B, D, S = x.shape if not last else (x.shape[0], x.shape[2], x.shape[1])
    vec = 4 if last else _vec(x)
    flags = Flags(W, bias is not None, initial is not None, silu, S % vec == 0, hint)
    with on(x):
        if last:
            block = min(block, power_of_2(D))
            _forward_bsd[(B * cdiv(S, chunk) * cdiv(D, block),)](
                given, y, D, S, x.stride(0), x.stride(1), flags, CHUNK=chunk, BLOCK=block, num_warps=warps or 2
            )
        else:
            wanted, lanes = lanes, min(lanes, power_of_2(cdiv(S, vec)))
            rows = rows or wanted // lanes
            _forward_bds[(B * cdiv(D, rows) * cdiv(S, lanes * vec),)](
                given, y, D, S, x.stride(0), x.stride(1), flags, ROWS=rows, LANES=lanes, VEC=vec,
                num_warps=warps or 4,
            )  # fmt: skip
    return y


def _inputs(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, initial: torch.Tensor | None
) -> Inputs:
    return Inputs(
        x, weight, weight if bias is None else bias.contiguous(), x if initial is None else initial.contiguous()
    )


def _vec(x: torch.Tensor) -> int:
    """Tokens of 16 bytes."""
    return 16 // x.element_size()


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _launch_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial: torch.Tensor | None,
    silu: bool,
    last: bool,
    lanes: int = BACKWARD_LANES,
    block: int = BLOCK,
    chunk: int = 0,
    warps: int = 0,
    share: int = 0,
    hint: str = "",
    registers: int | None = None,
) -> Gradients:
    """`chunk` tokens or a `share` of the pieces a program; 0 leaves the choice to the size. `hint` is the cache's
    eviction policy for what is written, `registers` the most of a thread."""
    dx, dweight, dbias, dinitial = _empty_gradients(dy, x, weight, bias, initial, silu, last)
    if x.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_(), dinitial.zero_()
    x, dy, weight = lined(x), lined(dy), weight.contiguous()
    W = weight.shape[1]
    given = _inputs(x, weight, bias, initial)
    B, D, S = x.shape if not last else (x.shape[0], x.shape[2], x.shape[1])
    vec = _vec(x)
    flags = Flags(W, bias is not None, initial is not None, silu, not last and S % vec == 0, hint)
    strides = (dy.stride(0), dy.stride(1), x.stride(0), x.stride(1))
    limit = most_registers(x, registers)
    with on(x):
        if last:
            block = min(block, power_of_2(D))
            # 16 programs of a multiprocessor, of 32 to 128 tokens: 6 are read twice.
            chunk = chunk or max(32, min(128, cdiv(B * S * cdiv(D, block), multiprocessors(x) * 16)))
            chunk = 8 if INTERPRETED else cdiv(chunk, 4) * 4
            programs = B * cdiv(S, chunk)
            parts = torch.empty(programs, W + 1, D, dtype=torch.float32, device=x.device)
            _backward_bsd[(programs * cdiv(D, block),)](
                dy, given, Outputs(dx, dinitial, parts), D, S, *strides, chunk, flags, BLOCK=block,
                num_warps=warps or 2, **limit,
            )  # fmt: skip
        else:
            lanes = min(lanes, power_of_2(cdiv(S, vec)))
            pieces = B * cdiv(S, lanes * vec)
            share = share or multiprocessors(x) * 64 // D
            programs = min(pieces, max(1, share))
            parts = torch.empty(programs, W + 1, D, dtype=torch.float32, device=x.device)
            _backward_bds[(D, programs)](
                dy, given, Outputs(dx, dinitial, parts), Sizes(B, D, S), *strides, flags,
                LANES=lanes, VEC=vec, num_warps=min(warps or 4, max(1, lanes // 32)), **limit,
            )  # fmt: skip
        _add_parts[(cdiv(D, 32), W + 1)](
            parts,
            dweight,
            dbias,
            programs,
            D,
            W=W,
            BIAS=bias is not None,
            ROWS=min(power_of_2(programs), 128),
            BLOCK=32,
            num_warps=4,
        )
    return dx, dweight, dbias, dinitial


def _empty_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial: torch.Tensor | None,
    silu: bool,
    last: bool,
) -> Gradients:
    """Memory for the gradients; none for what is not there."""
    return (
        dense_like(x),
        dense_like(weight),
        weight.new_empty(0) if bias is None else dense_like(bias),
        x.new_empty(0) if initial is None else dense_like(initial),
    )


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.silu, ctx.last = inputs[4:]


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight, bias, initial = ctx.saved_tensors
    dx, dweight, dbias, dinitial = _gradients(dy, x, weight, bias, initial, ctx.silu, ctx.last)
    return (
        dx,
        dweight,
        None if bias is None else dbias,
        None if initial is None else dinitial,
        None,
        None,
    )


_gradients = operator(
    "causal_conv1d_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, bool silu, "
    "bool channels_last) -> (Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    _empty_gradients,
)
_convolve = operator(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, bool silu, bool channels_last) "
    "-> Tensor",
    _launch,
    lambda x, *_: dense_like(x),
    _save,
    _backward,
)
