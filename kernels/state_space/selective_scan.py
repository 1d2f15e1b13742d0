"""The selective scan of Mamba-1 (Gu and Dao, arXiv 2312.00752), forward and backward.

    h[s] = exp(Δ[s] · A) · h[s-1] + Δ[s] · B[s] · u[s]        y[s] = C[s] · h[s] + D · u[s], times silu(z[s])

for every channel, with N numbers of state each: B·D·S·N exponentials, which bound it (16 a clock on each
multiprocessor, where 8 bytes a token and channel of memory traffic would take less than half as long). So
everything else has to stay small beside one exponential:

* A thread keeps the whole state of its channels in registers, one tensor of channels for each of the N
  numbers: no scan across threads, no sum across threads, four multiply-adds an exponential.
* B and C are the same for all channels. They are first laid out as pairs (B, C) in fp32, token by token, and
  then read as scalars: one 8-byte load serves all the channels of a warp.
* Tokens come as vectors of VEC, contiguous in memory, that are unpacked in registers.
* A batch with too few channels for the device is cut into segments of the sequence. What enters a segment is
  computed by a first pass over the segment before it, which begins only where the past is forgotten: walking
  back until the slowest decay is below 2⁻⁴⁵. In long sequences that is a small part of the work.

On compute capability 9.0 both forward passes are done by a kernel of its own, `_selective_scan_hopper.py`, for
states of the sizes that it names.

Gradients come from a reverse scan over chunks of VEC tokens, from states that a forward pass keeps at the
chunks' beginnings. The gradients of B and C are sums over channels: `_channel_sums.py` adds those of a program,
by tensor cores and within registers, a second kernel those of all programs in a fixed order. Results repeat bit
by bit. With a state of 16 that is 20 instructions a channel, token and number of the state, of which 12 are the
products and sums of the gradients themselves.
"""

# ruff: noqa: RUF005  # Triton has no starred expressions: tuples grow by addition

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .._common import (
    INTERPRETED,
    assembles,
    capability,
    cdiv,
    check,
    dense_like,
    lined,
    multiprocessors,
    on,
    operator,
    power_of_2,
)
from .._pointwise import sigmoid, silu, silu_slope, softplus
from ..convolution.causal_conv1d import pack, unpack
from ._channel_sums import added, fours

LOG2E = tl.constexpr(1.4426950408889634)

FORGOTTEN = tl.constexpr(45.0)
"""Binary digits of decay after which the past no longer counts: fp32 has 24, and more for a large past."""

LIMIT = 64
"""Largest state of a channel; its numbers are in registers."""

HOPPER = ("forward", "backward")
"""Passes in which the kernel for Hopper runs, where it can: backward, it computes the states that are kept."""

BLOCK = 32 if INTERPRETED else 128
"""Channels of a program, forward: two a thread of two warps."""

WARPS = 2

BACKWARD_BLOCK = 32
"""Channels of a program, backward: one a thread of one warp."""

BACKWARD_WARPS = 1

STEPS = 4
"""Tokens of a chunk, VEC."""

SEGMENT = 8 if INTERPRETED else 512
"""Shortest segment of a sequence."""

BUSY = 4
"""Warps of a multiprocessor up to which sequences are cut into segments: one a scheduler. More would cost more
in first passes over segments than they hide of waiting."""

BACKWARD_SEGMENT = 8 if INTERPRETED else 128

BACKWARD_BUSY = 8
"""The same, backward: a first pass is a quarter of the instructions there, and with two warps a scheduler issues
1.6 times as many as with one. More do not fit its registers."""


def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
) -> torch.Tensor:
    """y (B, D, S), in u's dtype, of the scan over the tokens of u (B, D, S), from a state of zeros.

    delta and z (B, D, S), A (D, N), B and C (B, N, S), D and delta_bias (D,); N from 1 to 64. Steps are
    delta + delta_bias, through softplus with `delta_softplus`. bf16, fp16 or fp32 each, B and C the same;
    computed in fp32, with states in fp32. Differentiable in all tensors. A must not be positive by so much that
    states overflow. Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device; the
    message names the argument.
    """
    check("u", u, dim=3)
    batch, channels, S = u.shape
    check("delta", delta, shape=u.shape, like=u)
    check("A", A, dim=2, like=u)
    N = A.shape[1]
    if not 1 <= N <= LIMIT:
        raise ValueError(f"A has a state of {N}, expected 1 to {LIMIT}")
    check("A", A, shape=(channels, N))
    check("B", B, shape=(batch, N, S), like=u)
    check("C", C, shape=(batch, N, S), dtypes=(B.dtype,), like=u)
    if D is not None:
        check("D", D, shape=(channels,), like=u)
    if z is not None:
        check("z", z, shape=u.shape, like=u)
    if delta_bias is not None:
        check("delta_bias", delta_bias, shape=(channels,), like=u)
    y: torch.Tensor = _scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    return y


# ---------------------------------------------------------------------------------------------------------
# Arguments of kernels, in groups. None is no parameter of a kernel, which then has no use for it; in place of what
# a flag of the shape says is missing stands some other tensor.


class Inputs(NamedTuple):
    """As in `selective_scan`, but for the pairs (B, PADDED, N) of B and C as 64-bit numbers."""

    u: Any
    delta: Any
    A: Any
    pairs: Any
    D: Any
    z: Any
    bias: Any


class Results(NamedTuple):
    """Of the backward scan: du, ddelta and dz; parts (blocks, B, chunks, N/2, 16), sums over a block's channels
    for B and C, in `_gather`'s order; of_A (B, segments, N, D), of_D and of_bias (B, segments, D), sums over a
    segment's tokens.
    """

    du: Any
    ddelta: Any
    dz: Any
    parts: Any
    of_A: Any
    of_D: Any
    of_bias: Any


class Rows(NamedTuple):
    """Strides of a tensor (B, D, S) whose tokens are contiguous."""

    batch: Any
    channel: Any


class Sizes(NamedTuple):
    """Channels, tokens, tokens of `pairs`, tokens of a segment, and segments."""

    channels: Any
    S: Any
    PADDED: Any
    LENGTH: Any
    segments: Any


class Shape(NamedTuple):
    """Known when compiling: numbers of a state, tokens of a chunk, what there is of D, z and bias, whether steps
    go through softplus, S is a multiple of VEC, there are several segments; and channels of a program.
    """

    N: int
    VEC: int
    HAS_D: bool
    HAS_Z: bool
    HAS_BIAS: bool
    SOFTPLUS: bool
    EVEN: bool
    SEGMENTED: bool
    BLOCK: int


# ---------------------------------------------------------------------------------------------------------
# Forward.


@triton.jit
def _pair(  # type: ignore[no-untyped-def]  # Triton's types are its own
    B, C, pairs, N, S, B_strides, C_strides, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """B and C (B, N, S) to pairs (B, S, N, 2) in fp32, zero for tokens that fill the last chunk."""
    blocks = tl.num_programs(0)
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(1).to(tl.int64)
    n = tl.arange(0, WIDTH)
    inside = (n < N)[:, None] & (s < S)[None, :]
    here = s.to(tl.int64)[None, :]
    B_b, B_n, B_s = B_strides
    C_b, C_n, C_s = C_strides
    first = tl.load(B + b * B_b + n[:, None] * B_n + here * B_s, inside, 0.0).to(tl.float32)
    second = tl.load(C + b * C_b + n[:, None] * C_n + here * C_s, inside, 0.0).to(tl.float32)
    both = tl.join(tl.trans(first), tl.trans(second))
    at = (b * blocks * BLOCK + s.to(tl.int64))[:, None] * N + n[None, :]
    tl.store(pairs + at[:, :, None] * 2 + tl.arange(0, 2)[None, None, :], both, (n < N)[None, :, None])


@triton.jit
def _place(  # type: ignore[no-untyped-def]  # Triton's types are its own
    channels, segments, BLOCK: tl.constexpr, FIRST: tl.constexpr = 0, LEFT: tl.constexpr = 0
):
    """(block of channels, its channels, segment, sequence) of a program, of the segments from FIRST on all but
    LEFT.
    """
    blocks = tl.cdiv(channels, BLOCK)
    program = tl.program_id(0)
    block = program % blocks
    d = block * BLOCK + tl.arange(0, BLOCK)
    segment = (program // blocks) % (segments - LEFT) + FIRST
    b = (program // blocks // (segments - LEFT)).to(tl.int64)
    return block, d, segment, b


@triton.jit
def _row(x, rows, b, d):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Pointers to the first tokens of channels d (int64) of a sequence."""
    return x + (b * rows.batch + d * rows.channel)


@triton.jit
def _by_channel(x, d, inside, THERE: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """A number a channel, in fp32: zeros where there are none."""
    value = tl.zeros(d.shape, tl.float32)
    if THERE:
        value = tl.load(x + d, inside, 0.0).to(tl.float32)
    return value


@triton.jit
def _both(at):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(B, C) of a number of the state: one load of 8 bytes, the same for all threads."""
    value = tl.load(at)
    return value.to(tl.int32).to(tl.float32, bitcast=True), (value >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _two(at):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """B, and C, of an even number of the state and the one behind it: one load of 16 bytes, the same for all
    threads.
    """
    if assembles():
        into0, out0, into1, out1 = tl.inline_asm_elementwise(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l",
            [at.to(tl.int64)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        into0, out0 = _both(at)
        into1, out1 = _both(at + 1)
    return (into0, into1), (out0, out1)


@triton.jit
def _rates(A, d, inside, N: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """A · log₂e of the channels, one tensor a number of the state."""
    rates = ()
    for n in tl.static_range(N):
        rates = rates + (tl.load(A + d * N + n, inside, 0.0).to(tl.float32) * LOG2E,)
    return rates


@triton.jit
def _slowest(rates):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The rate by which a channel's past decays at least: that of its slowest number."""
    slowest = -rates[0]
    for n in tl.static_range(1, len(rates)):
        slowest = tl.minimum(slowest, -rates[n])
    return slowest


@triton.jit
def _zeros(N: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """A state of zeros, one tensor a number of it."""
    h = ()
    for _ in tl.static_range(N):
        h = h + (tl.zeros([BLOCK], tl.float32),)
    return h


@triton.jit
def _tokens(at, s, S, inside, VEC: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """VEC tokens of each channel, the first of them token s; zero at and beyond S."""
    j = tl.arange(0, VEC)
    # With S a multiple of VEC, one mask for a vector: it is loaded as one.
    mask = (inside & (s < S))[:, None] & (j < VEC)[None, :] if EVEN else inside[:, None] & (s + j < S)[None, :]
    return tl.load(at[:, None] + j[None, :], mask, 0.0)


@triton.jit
def _steps(raw, bias, s, S, SOFTPLUS: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The steps of a vector of tokens, unpacked; 0 beyond the sequence, where nothing may change."""
    step = raw.to(tl.float32) + bias[:, None]
    if SOFTPLUS:
        step = softplus(step)
    if not EVEN:
        step = tl.where((s + tl.arange(0, raw.shape[1]) < S)[None, :], step, 0.0)
    return unpack(step)


@triton.jit
def _enter(states, b, segment, segments, d, channels, inside, shape: tl.constexpr, REVERSE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The state that enters a segment, from states (B, segments, N, D); zeros at the sequence's beginning, or in
    REVERSE at its end.
    """
    N: tl.constexpr = shape.N
    h = ()
    for n in tl.static_range(N):
        if shape.SEGMENTED:
            at = states + ((b * segments + segment) * N + n) * channels + d
            before = segment < segments - 1 if REVERSE else segment > 0
            h = h + (tl.load(at, inside & before, 0.0),)
        else:
            h = h + (tl.zeros(d.shape, tl.float32),)
    return h


@triton.jit
def _kept(kept, b, chunks, channels, d, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """(pointers to the first number of channels d before a sequence's first chunk, numbers that a chunk takes), of
    states that are kept: (B, chunks, D / 32, N, 32), so that a channel's numbers lie as far apart in all shapes.
    """
    groups = tl.cdiv(channels, 32)
    return kept + ((b * chunks * groups + d // 32) * (N * 32) + d % 32), groups.to(tl.int64) * (N * 32)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]  # Triton's types are its own
    given, entering, y, kept, sizes, u_rows, delta_rows, z_rows, shape: tl.constexpr, KEEP: tl.constexpr
):
    """BLOCK channels of one segment of one sequence.

    With KEEP there is no y: the states at the beginnings of chunks go to kept `_kept`'s memory instead.
    """
    N: tl.constexpr = shape.N
    VEC: tl.constexpr = shape.VEC
    EVEN: tl.constexpr = shape.EVEN
    BLOCK: tl.constexpr = shape.BLOCK
    channels, S, PADDED, LENGTH, segments = sizes
    _, d, segment, b = _place(channels, segments, BLOCK)
    inside = d < channels
    wide = d.to(tl.int64)
    rates = _rates(given.A, d, inside, N)
    h = _enter(entering, b, segment, segments, d, channels, inside, shape, False)
    pairs = given.pairs + b * PADDED * N
    u = _row(given.u, u_rows, b, wide)
    delta = _row(given.delta, delta_rows, b, wide)
    z = _row(given.z, z_rows, b, wide)
    y += (b * channels + wide) * S
    if KEEP:
        kept, of_chunk = _kept(kept, b, PADDED // VEC, channels, d, N)
    offset = _by_channel(given.bias, d, inside, shape.HAS_BIAS)
    skip = _by_channel(given.D, d, inside, shape.HAS_D)
    begin = segment * LENGTH
    end = tl.minimum(begin + LENGTH, S)
    # The next chunk is on its way while this one is computed.
    next_delta = _tokens(delta + begin, begin, S, inside, VEC, EVEN)
    next_u = _tokens(u + begin, begin, S, inside, VEC, EVEN)
    next_z = next_u
    if shape.HAS_Z:
        next_z = _tokens(z + begin, begin, S, inside, VEC, EVEN)
    for s in range(begin, end, VEC):
        steps = _steps(next_delta, offset, s, S, shape.SOFTPLUS, EVEN)
        wide_u = next_u.to(tl.float32)
        tokens = unpack(wide_u)
        gate = next_z
        ahead = s + VEC
        if KEEP:
            for n in tl.static_range(N):
                tl.store(kept + s // VEC * of_chunk + n * 32, h[n], inside)
        # Beyond the segment's end there is nothing to read ahead: mask out, do not branch.
        next_delta = _tokens(delta + ahead, ahead, end, inside, VEC, EVEN)
        next_u = _tokens(u + ahead, ahead, end, inside, VEC, EVEN)
        if shape.HAS_Z:
            next_z = _tokens(z + ahead, ahead, end, inside, VEC, EVEN)
        row = pairs + tl.cast(s, tl.int64) * N
        results = ()
        for i in tl.static_range(VEC):
            enters = steps[i] * tokens[i]
            total = tl.zeros([BLOCK], tl.float32)
            after = ()
            for n in tl.static_range(0, N, 2):
                into, out = _two(row + (i * N + n))
                for k in tl.static_range(2):
                    new = h[n + k] * tl.exp2(steps[i] * rates[n + k]) + into[k] * enters
                    total += out[k] * new
                    after = after + (new,)
            h = after
            results = results + (total,)
        if not KEEP:
            value = pack(results) + skip[:, None] * wide_u
            if shape.HAS_Z:
                value *= silu(gate.to(tl.float32))
            j = tl.arange(0, VEC)
            mask = inside[:, None] & (j < VEC)[None, :] if EVEN else inside[:, None] & (s + j < S)[None, :]
            tl.store(y[:, None] + s + j[None, :], value.to(y.dtype.element_ty), mask)


@triton.jit
def _ends(  # type: ignore[no-untyped-def]  # Triton's types are its own
    given, ends, totals, sizes, u_rows, delta_rows, shape: tl.constexpr
):
    """What a segment adds to the state at its end, to ends (B, segments, N, D) of the segment behind it; and
    the sum of its steps, to totals (B, segments, D): by exp2(rate · total) the state that entered decays."""
    N: tl.constexpr = shape.N
    VEC: tl.constexpr = shape.VEC
    EVEN: tl.constexpr = shape.EVEN
    BLOCK: tl.constexpr = shape.BLOCK
    channels, S, PADDED, LENGTH, segments = sizes
    _, d, segment, b = _place(channels, segments, BLOCK, 0, 1)
    inside = d < channels
    wide = d.to(tl.int64)
    rates = _rates(given.A, d, inside, N)
    pairs = given.pairs + b * PADDED * N
    u = _row(given.u, u_rows, b, wide)
    delta = _row(given.delta, delta_rows, b, wide)
    offset = _by_channel(given.bias, d, inside, shape.HAS_BIAS)
    slowest = _slowest(rates)
    # Channels beyond the last have no past.
    slowest = tl.where(inside, slowest, 1e30)
    begin = segment * LENGTH
    end = begin + LENGTH
    total = tl.zeros([BLOCK], tl.float32)
    s = end
    # Only a channel that decays can forget, and only its own steps count.
    left = tl.min(tl.where(inside, 0.0, 1e30), 0)
    while (s > begin) & (left < FORGOTTEN):
        s -= VEC
        steps = _steps(_tokens(delta + s, s, S, inside, VEC, EVEN), offset, s, S, shape.SOFTPLUS, EVEN)
        for i in tl.static_range(VEC):
            total += steps[i]
        left = tl.min(tl.where(inside, total * slowest, 1e30), 0)
    tl.store(totals + (b * segments + segment + 1) * channels + d, total, inside)
    h = _zeros(N, BLOCK)
    next_delta = _tokens(delta + s, s, S, inside, VEC, EVEN)
    next_u = _tokens(u + s, s, S, inside, VEC, EVEN)
    for t in range(s, end, VEC):
        steps = _steps(next_delta, offset, t, S, shape.SOFTPLUS, EVEN)
        tokens = unpack(next_u)
        ahead = t + VEC
        next_delta = _tokens(delta + ahead, ahead, end, inside, VEC, EVEN)
        next_u = _tokens(u + ahead, ahead, end, inside, VEC, EVEN)
        row = pairs + tl.cast(t, tl.int64) * N
        for i in tl.static_range(VEC):
            enters = steps[i] * tokens[i]
            after = ()
            for n in tl.static_range(0, N, 2):
                into = _two(row + (i * N + n))[0]
                for k in tl.static_range(2):
                    after = after + (h[n + k] * tl.exp2(steps[i] * rates[n + k]) + into[k] * enters,)
            h = after
    for n in tl.static_range(N):
        tl.store(ends + ((b * segments + segment + 1) * N + n) * channels + d, h[n], inside)


@triton.jit
def _join_segments(  # type: ignore[no-untyped-def]  # Triton's types are its own
    A, ends, totals, channels, segments, N, REVERSE: tl.constexpr, BLOCK: tl.constexpr
):
    """In place, ends to the states that enter each segment: each the one before, decayed, plus its own."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    inside = d < channels
    rate = tl.load(A + d * N + n, inside, 0.0).to(tl.float32) * LOG2E
    h = tl.zeros([BLOCK], tl.float32)
    for k in range(1, segments):
        segment = k
        if REVERSE:
            segment = segments - 1 - k
        total = tl.load(totals + (b * segments + segment) * channels + d, inside, 0.0)
        at = ends + ((b * segments + segment) * N + n) * channels + d
        h = h * tl.exp2(rate * total) + tl.load(at, inside, 0.0)
        tl.store(at, h, inside)


# ---------------------------------------------------------------------------------------------------------
# Backward. e[s], the gradient of h[s], is C[s] · dy[s] + q[s+1]; q[s] = exp(Δ[s] · A) · e[s] goes to h[s-1].


@triton.jit
def _ends_reverse(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dout, given, ends, totals, sizes, dout_rows, delta_rows, z_rows, shape: tl.constexpr
):
    """As `_ends`, for q: what a segment, but the first, gives to the one before it."""
    N: tl.constexpr = shape.N
    VEC: tl.constexpr = shape.VEC
    EVEN: tl.constexpr = shape.EVEN
    BLOCK: tl.constexpr = shape.BLOCK
    channels, S, PADDED, LENGTH, segments = sizes
    _, d, segment, b = _place(channels, segments, BLOCK, 1, 1)
    inside = d < channels
    wide = d.to(tl.int64)
    rates = _rates(given.A, d, inside, N)
    pairs = given.pairs + b * PADDED * N
    dout = _row(dout, dout_rows, b, wide)
    delta = _row(given.delta, delta_rows, b, wide)
    z = _row(given.z, z_rows, b, wide)
    offset = _by_channel(given.bias, d, inside, shape.HAS_BIAS)
    slowest = _slowest(rates)
    begin = segment * LENGTH
    end = tl.minimum(begin + LENGTH, S)
    total = tl.zeros([BLOCK], tl.float32)
    s = begin
    left = tl.min(tl.where(inside, 0.0, 1e30), 0)
    while (s < end) & (left < FORGOTTEN):
        steps = _steps(_tokens(delta + s, s, S, inside, VEC, EVEN), offset, s, S, shape.SOFTPLUS, EVEN)
        for i in tl.static_range(VEC):
            total += steps[i]
        left = tl.min(tl.where(inside, total * slowest, 1e30), 0)
        s += VEC
    tl.store(totals + (b * segments + segment - 1) * channels + d, total, inside)
    q = _zeros(N, BLOCK)
    while s > begin:
        s -= VEC
        steps = _steps(_tokens(delta + s, s, S, inside, VEC, EVEN), offset, s, S, shape.SOFTPLUS, EVEN)
        dy = _tokens(dout + s, s, S, inside, VEC, EVEN).to(tl.float32)
        if shape.HAS_Z:
            dy *= silu(_tokens(z + s, s, S, inside, VEC, EVEN).to(tl.float32))
        dys = unpack(dy)
        row = pairs + tl.cast(s, tl.int64) * N
        for i in tl.static_range(VEC - 1, -1, -1):
            before = ()
            for n in tl.static_range(0, N, 2):
                out = _two(row + (i * N + n))[1]
                for k in tl.static_range(2):
                    before = before + ((q[n + k] + out[k] * dys[i]) * tl.exp2(steps[i] * rates[n + k]),)
            q = before
    for n in tl.static_range(N):
        tl.store(ends + ((b * segments + segment - 1) * N + n) * channels + d, q[n], inside)


@triton.jit
def _chunk(h, q, gradient, rate, ins, outs, steps, enters, dys, sums, VEC: tl.constexpr):  # type: ignore[no-untyped-def]
    """One number of the state through a chunk, forward and back.

    From h before the chunk and q behind it to q before it; to the gradient of A is added Σ A · e · a · h, to the
    token's `sums` of y, of Σ B · e and of the steps' gradient what is this number's. Last come the products whose
    sums over channels are the gradients of B and of C.
    """
    decays = ()
    before = ()
    after = ()
    for i in tl.static_range(VEC):
        decay = tl.exp2(steps[i] * rate)
        # h ← decay h + Δ B u
        kept = decay * h
        h = kept + ins[i] * enters[i]
        decays = decays + (decay,)
        before = before + (kept,)
        after = after + (h,)
    y, x, step = sums
    more_y = ()
    more_x = ()
    more_step = ()
    of_B = ()
    of_C = ()
    for i in tl.static_range(VEC - 1, -1, -1):
        # e = C · dy + q
        e = outs[i] * dys[i] + q
        r = e * before[i]
        gradient += r * steps[i]
        more_y = (y[i] + outs[i] * after[i],) + more_y
        more_x = (x[i] + ins[i] * e,) + more_x
        more_step = (step[i] + r * rate,) + more_step
        of_B = (e * enters[i],) + of_B
        of_C = (after[i] * dys[i],) + of_C
        q = decays[i] * e
    return q, gradient, (more_y, more_x, more_step), of_B + of_C


@triton.jit
def _backward_scan(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dout, given, kept, entering, results, batch, sizes, dout_rows, u_rows, delta_rows, z_rows,
    shape: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of one segment of one sequence, from its last chunk to its first."""
    N: tl.constexpr = shape.N
    VEC: tl.constexpr = shape.VEC
    EVEN: tl.constexpr = shape.EVEN
    BLOCK: tl.constexpr = shape.BLOCK
    channels, S, PADDED, LENGTH, segments = sizes
    block, d, segment, b = _place(channels, segments, BLOCK)
    inside = d < channels
    wide = d.to(tl.int64)
    rates = _rates(given.A, d, inside, N)
    q = _enter(entering, b, segment, segments, d, channels, inside, shape, True)
    gradient = _zeros(N, BLOCK)
    pairs = given.pairs + b * PADDED * N
    dout = _row(dout, dout_rows, b, wide)
    u = _row(given.u, u_rows, b, wide)
    delta = _row(given.delta, delta_rows, b, wide)
    z = _row(given.z, z_rows, b, wide)
    to = (b * channels + wide) * S
    offset = _by_channel(given.bias, d, inside, shape.HAS_BIAS)
    skip = _by_channel(given.D, d, inside, shape.HAS_D)
    sum_D = tl.zeros([BLOCK], tl.float32)
    sum_bias = tl.zeros([BLOCK], tl.float32)
    chunks = PADDED // VEC
    kept, of_chunk = _kept(kept, b, chunks, channels, d, N)
    parts = results.parts + (block * batch + b) * chunks * (N * 8)
    begin = segment * LENGTH
    end = tl.minimum(begin + LENGTH, S)
    j = tl.arange(0, VEC)
    pair = tl.arange(0, 8)[None, :]
    place = tl.arange(0, 16)[:, None] + pair * 16
    s = begin + (tl.cdiv(end - begin, VEC) - 1) * VEC
    raw_delta = _tokens(delta + s, s, S, inside, VEC, EVEN)
    raw_u = _tokens(u + s, s, S, inside, VEC, EVEN)
    raw_dout = _tokens(dout + s, s, S, inside, VEC, EVEN)
    raw_z = raw_dout
    if shape.HAS_Z:
        raw_z = _tokens(z + s, s, S, inside, VEC, EVEN)
    states = ()
    for n in tl.static_range(N):
        states = states + (tl.load(kept + s // VEC * of_chunk + n * 32, inside, 0.0),)
    for back in range(0, tl.cdiv(end - begin, VEC)):
        chunk = (end - begin + VEC - 1) // VEC - 1 - back
        s = begin + chunk * VEC
        chunk = s // VEC
        raw = raw_delta
        now_u = raw_u
        now_dout = raw_dout
        now_z = raw_z
        # The chunk before this one is on its way while this one is computed.
        t = tl.maximum(s - VEC, begin)
        from_kept = kept + t // VEC * of_chunk
        raw_delta = _tokens(delta + t, t, S, inside, VEC, EVEN)
        raw_u = _tokens(u + t, t, S, inside, VEC, EVEN)
        raw_dout = _tokens(dout + t, t, S, inside, VEC, EVEN)
        if shape.HAS_Z:
            raw_z = _tokens(z + t, t, S, inside, VEC, EVEN)
        steps = _steps(raw, offset, s, S, shape.SOFTPLUS, EVEN)
        wide_u = now_u.to(tl.float32)
        wide_dout = now_dout.to(tl.float32)
        dy = wide_dout
        gate_slope = wide_dout
        if shape.HAS_Z:
            gate, gate_slope = silu_slope(now_z.to(tl.float32))
            dy = wide_dout * gate
        dys = unpack(dy)
        tokens = unpack(wide_u)
        enters = ()
        zero = ()
        for i in tl.static_range(VEC):
            enters = enters + (steps[i] * tokens[i],)
            zero = zero + (tl.zeros([BLOCK], tl.float32),)
        row = pairs + tl.cast(s, tl.int64) * N
        sums = (zero, zero, zero)
        next_q = ()
        next_gradient = ()
        next_states = ()
        waiting = ()
        totals = tl.zeros([16, 8], tl.float32)
        to_parts = parts + tl.cast(chunk, tl.int64) * (N * 8)
        for n in tl.static_range(0, N, 2):
            ins = ((), ())
            outs = ((), ())
            for i in tl.static_range(VEC):
                into, out = _two(row + (i * N + n))
                ins = (ins[0] + (into[0],), ins[1] + (into[1],))
                outs = (outs[0] + (out[0],), outs[1] + (out[1],))
            products = ()
            for k in tl.static_range(2):
                new_q, new_gradient, sums, new_products = _chunk(
                    states[n + k],
                    q[n + k],
                    gradient[n + k],
                    rates[n + k],
                    ins[k],
                    outs[k],
                    steps,
                    enters,
                    dys,
                    sums,
                    VEC,
                )
                next_q = next_q + (new_q,)
                next_gradient = next_gradient + (new_gradient,)
                products = products + (pack(new_products),)
                next_states = next_states + (tl.load(from_kept + (n + k) * 32, inside, 0.0),)
            # dB and dC: 1ᵀ · (Δ u e, dy h)
            numbers = tl.reshape(tl.join(products[0], products[1]), [BLOCK, 16])
            if EXACT:
                tl.store(to_parts + (n // 2) * 16 + tl.arange(0, 16), tl.sum(numbers, 0))
            else:
                # Of the two before: in the time that their products take, these are computed.
                if n > 0:
                    totals = tl.where(pair == (n // 2 - 1) % 8, added(fours(waiting)), totals)
                    if n % 16 == 0:
                        tl.store(to_parts + (n // 16 - 1) * 128 + place, totals)
                waiting = numbers
        if not EXACT:
            totals = tl.where(pair == (N // 2 - 1) % 8, added(fours(waiting)), totals)
            tl.store(to_parts + (N - 2) // 16 * 128 + place, totals, (N - 2) // 16 * 8 + pair < N // 2)
        sum_y, sum_x, sum_step = sums
        q = next_q
        gradient = next_gradient
        states = next_states
        x = pack(sum_x)
        result = x * pack(steps) + skip[:, None] * dy
        # The steps' gradient: rates include log₂e.
        slope = pack(sum_step) * (1.0 / LOG2E) + x * wide_u
        if shape.SOFTPLUS:
            slope *= sigmoid(raw.to(tl.float32) + offset[:, None])
        if EVEN:
            mask = inside[:, None] & (j < VEC)[None, :]
        else:
            mask = inside[:, None] & (s + j < S)[None, :]
            slope = tl.where((s + j < S)[None, :], slope, 0.0)
        here = to[:, None] + s + j[None, :]
        tl.store(results.du + here, result.to(results.du.dtype.element_ty), mask)
        tl.store(results.ddelta + here, slope.to(results.ddelta.dtype.element_ty), mask)
        sum_bias += tl.sum(slope, 1)
        sum_D += tl.sum(dy * wide_u, 1)
        if shape.HAS_Z:
            y = (pack(sum_y) + skip[:, None] * wide_u) * (wide_dout * gate_slope)
            tl.store(results.dz + here, y.to(results.dz.dtype.element_ty), mask)
    piece = b * segments + segment
    for n in tl.static_range(N):
        tl.store(results.of_A + (piece * N + n) * channels + d, gradient[n], inside)
    tl.store(results.of_D + piece * channels + d, sum_D, inside)
    tl.store(results.of_bias + piece * channels + d, sum_bias, inside)


@triton.jit
def _gather(  # type: ignore[no-untyped-def]  # Triton's types are its own
    parts, dB, dC, batch, blocks, chunks, S, TRUE, N: tl.constexpr, VEC: tl.constexpr, CHUNKS: tl.constexpr
):
    """Sums over blocks of channels of `parts`, to dB and dC (B, TRUE, S).

    A chunk's numbers are pairs of the state by 16: for B and then for C, the tokens, each for both of a pair.
    """
    b = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    k = tl.arange(0, 16)
    pair = tl.program_id(2)
    at = (chunk.to(tl.int64) * (N // 2) + pair)[:, None] * 16 + k[None, :]
    inside = (chunk * VEC < S)[:, None] & (k >= 0)[None, :]
    total = tl.zeros([CHUNKS, 16], tl.float32)
    for block in range(blocks):
        total += tl.load(parts + (block * batch + b) * chunks * (N * 8) + at, inside, 0.0)
    n = pair * 2 + k % 2
    token = k // 2
    s = chunk[:, None] * VEC + (token % VEC)[None, :]
    to = (b * TRUE + n[None, :]) * S + s
    here = inside & (s < S) & (n < TRUE)[None, :]
    tl.store(dB + to, total.to(dB.dtype.element_ty), here & (token < VEC)[None, :])
    tl.store(dC + to, total.to(dC.dtype.element_ty), here & (token >= VEC)[None, :])


# ---------------------------------------------------------------------------------------------------------
# Host.

Optional = torch.Tensor | None


def _rows(x: torch.Tensor) -> Rows:
    return Rows(*x.stride()[:2])


def _pairs(A: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(A with an even N, pairs (B, PADDED, N, 2) of B and C as 64-bit numbers, PADDED)."""
    batch, N, S = B.shape
    even = N + N % 2
    width = power_of_2(even)
    block = 16 if INTERPRETED else max(8, 2048 // width)
    padded = cdiv(S, block) * block
    pairs = torch.empty(batch, padded, even, 2, dtype=torch.float32, device=B.device)
    if even != N:
        A = torch.nn.functional.pad(A, (0, 1))
        B, C = (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (B, C))
    _pair[(padded // block, batch)](
        B, C, pairs, even, S, B.stride(), C.stride(), WIDTH=width, BLOCK=block, num_warps=4
    )
    return A.contiguous(), pairs.view(torch.int64), padded


def _cut(
    u: torch.Tensor, block: int, warps: int, vec: int, segments: int, busy: int = BUSY, shortest: int = SEGMENT
) -> tuple[int, int]:
    """(segments, tokens of each): so many that the device is busy, unless the number is given."""
    batch, channels, S = u.shape
    if not segments:
        programs = batch * cdiv(channels, block) * warps
        segments = min(multiprocessors(u) * busy // programs, S // shortest)
    # A multiple of what the compiler knows to be aligned, and of a chunk.
    unit = vec if INTERPRETED else 64
    length = cdiv(cdiv(S, max(segments, 1)), unit) * unit
    return cdiv(S, length), length


@cache
def _hopper(device: torch.device) -> ModuleType | None:
    """The module for Hopper where the device is one: compute capability 9.0, no other."""
    if capability(device) != (9, 0):
        return None
    from . import _selective_scan_hopper

    return _selective_scan_hopper


def _launch(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Optional,
    z: Optional,
    delta_bias: Optional,
    delta_softplus: bool,
    block: int = BLOCK,
    warps: int = WARPS,
    vec: int = STEPS,
    segments: int = 0,
) -> torch.Tensor:
    """y; with `segments`, by the kernels for any GPU."""
    y = dense_like(u)
    if u.numel() == 0:
        return y
    hopper = _hopper(u.device) if "forward" in HOPPER and not segments else None
    if hopper is not None and hopper.fits(u, A):
        gate = None if z is None else lined(z)
        hopper.forward(y, lined(u), lined(delta), A, B, C, D, gate, delta_bias, delta_softplus)
        return y
    with on(u):
        A, pairs, padded = _pairs(A, B, C)
        _forward_pass(
            y, None, u, delta, A, pairs, padded, D, z, delta_bias, delta_softplus, block, warps, vec, segments
        )
    return y


def _forward_pass(
    y: Optional,
    kept: Optional,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    pairs: torch.Tensor,
    padded: int,
    D: Optional,
    z: Optional,
    bias: Optional,
    softplus_: bool,
    block: int,
    warps: int,
    vec: int,
    segments: int,
) -> None:
    """To y, or the states at the beginnings of chunks to `kept`."""
    batch, channels, S = u.shape
    N = A.shape[1]
    u, delta = lined(u), lined(delta)
    gate = u if z is None else lined(z)
    block = min(block, max(power_of_2(channels), 16))
    segments, length = _cut(u, block, warps, vec, segments)
    blocks = cdiv(channels, block)
    offset = A if bias is None else bias.contiguous()
    given = Inputs(u, delta, A, pairs, A if D is None else D.contiguous(), gate, offset)
    there = (D is not None, z is not None, bias is not None)
    shape = Shape(N, vec, *there, softplus_, S % vec == 0, segments > 1, block)
    sizes = Sizes(channels, S, padded, length, segments)
    entering = A
    if segments > 1:
        entering = torch.empty(batch, segments, N, channels, dtype=torch.float32, device=u.device)
        totals = torch.empty(batch, segments, channels, dtype=torch.float32, device=u.device)
        _ends[(batch * (segments - 1) * blocks,)](
            given._replace(D=None, z=None), entering, totals, sizes, _rows(u), _rows(delta), shape, num_warps=warps
        )
        _join_segments[(cdiv(channels, 128), N, batch)](
            A, entering, totals, channels, segments, N, REVERSE=False, BLOCK=128, num_warps=4
        )
    _forward[(batch * segments * blocks,)](
        given, entering, u if y is None else y, A if kept is None else kept, sizes, _rows(u), _rows(delta),
        _rows(gate), shape, KEEP=kept is not None, num_warps=warps,
    )  # fmt: skip


Gradients = tuple[torch.Tensor, ...]


def _launch_backward(
    dout: torch.Tensor,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Optional,
    z: Optional,
    delta_bias: Optional,
    delta_softplus: bool,
    block: int = BACKWARD_BLOCK,
    warps: int = BACKWARD_WARPS,
    segments: int = 0,
    states: bool = True,
) -> Gradients:
    """The gradients; with `states`, the kept ones come from the kernel for Hopper, where it can."""
    results = _empty_gradients(dout, u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    if u.numel() == 0:
        return tuple(x.zero_() for x in results)
    du, ddelta, dA, dB, dC, dD, dz, dbias = results
    batch, channels, S = u.shape
    true = A.shape[1]
    vec = 4
    with on(u):
        A, pairs, padded = _pairs(A, B, C)
        N = A.shape[1]
        chunks = padded // vec
        kept = torch.empty(batch, chunks, cdiv(channels, 32), N, 32, dtype=torch.float32, device=u.device)
        hopper = _hopper(u.device) if states and "backward" in HOPPER else None
        # Not where A got a number more: B and C have none for it.
        if hopper is not None and true == N and hopper.fits(u, A):
            hopper.states(kept, lined(u), lined(delta), A, B, C, delta_bias, delta_softplus)
        else:
            # One channel a thread: with two, states would go through shared memory to be written.
            _forward_pass(
                None, kept, u, delta, A, pairs, padded, None, None, delta_bias, delta_softplus, 32 * WARPS, WARPS,
                vec, 0,
            )  # fmt: skip
        dout, u, delta = lined(dout), lined(u), lined(delta)
        gate = u if z is None else lined(z)
        segments, length = _cut(u, block, warps, vec, segments, BACKWARD_BUSY, BACKWARD_SEGMENT)
        blocks = cdiv(channels, block)
        offset = A if delta_bias is None else delta_bias.contiguous()
        given = Inputs(u, delta, A, pairs, A if D is None else D.contiguous(), gate, offset)
        there = (D is not None, z is not None, delta_bias is not None)
        shape = Shape(N, vec, *there, delta_softplus, S % vec == 0, segments > 1, block)
        sizes = Sizes(channels, S, padded, length, segments)
        entering = A
        if segments > 1:
            entering = torch.empty(batch, segments, N, channels, dtype=torch.float32, device=u.device)
            totals = torch.empty(batch, segments, channels, dtype=torch.float32, device=u.device)
            _ends_reverse[(batch * (segments - 1) * blocks,)](
                dout, given._replace(u=None, D=None), entering, totals, sizes, _rows(dout), _rows(delta),
                _rows(gate), shape, num_warps=warps,
            )  # fmt: skip
            _join_segments[(cdiv(channels, 128), N, batch)](
                A, entering, totals, channels, segments, N, REVERSE=True, BLOCK=128, num_warps=4
            )
        parts = torch.empty(blocks, batch, chunks, N // 2, 16, dtype=torch.float32, device=u.device)
        of_A = torch.empty(batch * segments, N, channels, dtype=torch.float32, device=u.device)
        of_D, of_bias = torch.empty(2, batch * segments, channels, dtype=torch.float32, device=u.device)
        # One stage: a loop with a product would have all its loads go through shared memory.
        _backward_scan[(batch * segments * blocks,)](
            dout, given, kept, entering, Results(du, ddelta, dz, parts, of_A, of_D, of_bias), batch, sizes,
            _rows(dout), _rows(u), _rows(delta), _rows(gate), shape, EXACT=dB.dtype == torch.float32,
            num_warps=warps, num_stages=1,
        )  # fmt: skip
        width = 16 if INTERPRETED else 64
        used = cdiv(S, vec)
        _gather[(cdiv(used, width), batch, N // 2)](
            parts, dB, dC, batch, blocks, chunks, S, true, N=N, VEC=vec, CHUNKS=width, num_warps=4
        )
        dA.copy_(of_A.sum(0)[:true].t())
        if D is not None:
            dD.copy_(of_D.sum(0))
        if delta_bias is not None:
            dbias.copy_(of_bias.sum(0))
    return results


def _empty_gradients(
    dout: torch.Tensor,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: Optional,
    z: Optional,
    delta_bias: Optional,
    delta_softplus: bool,
) -> Gradients:
    """Memory for the gradients in the order of the arguments; none for what is not there."""
    there = (u, delta, A, B, C, D, z, delta_bias)
    return tuple(u.new_empty(0) if t is None else dense_like(t) for t in there)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.delta_softplus = inputs[8]


def _backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    gradients = _gradients(dout, *saved, ctx.delta_softplus)
    return (*(None if t is None else g for t, g in zip(saved, gradients, strict=True)), None)


_ARGUMENTS = (
    "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
    "bool delta_softplus"
)
_gradients = operator(
    f"selective_scan_backward(Tensor dout, {_ARGUMENTS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    _empty_gradients,
)
_scan = operator(f"selective_scan({_ARGUMENTS}) -> Tensor", _launch, lambda u, *_: dense_like(u), _save, _backward)
