"""The forward pass of `selective_scan.py` for Hopper (compute capability 9.0), in Gluon.

What bounds the scan is the exponential unit, so the warps that keep it busy do nothing else that can be done
elsewhere. A program has BLOCK channels of one sequence and three partitions of warps, which pass chunks of TOKENS
tokens through a ring of STAGES buffers in shared memory:

* `_producer` reads delta, u, B and C, and writes Δ and Δ · u in fp32, tokens in vectors of 8, and B and C: of 16
  bits, as one word of both. Every scanning thread reads all of its numbers' B and C, and it is the bytes that a
  multiprocessor's threads get of its shared memory, 128 a cycle, that count: 272 cycles a token in fp32 with 256
  channels, beside the exponential unit's 296, and 144 as words, for two more instructions a number to unpack.
* `_scan` has the states in registers, LANES threads to a channel, each with some numbers of the state of CHANNELS
  channels. A number of a state takes one exponential, two products and two multiply-adds. A thread writes its part
  of the sum C · h; nothing is exchanged between threads on the way from one token to the next.
* `_epilogue` adds up a channel's parts, adds D · u, multiplies by silu(z) and writes y.

Barriers, one of each kind a stage. A partition waits with phase 0 in its first round over the ring, the next round
with phase 1, and so on; `_producer` begins with phase 1, so that its first round waits for nobody:

    barrier  arrivals a phase             who waits               what it means
    ready    2: `_producer`, `_epilogue`  `_scan`                 inputs are written, sums of the round before read
    done     1: `_scan`                   `_producer` (phase 1),  inputs are read, sums are written
                                          `_epilogue`

`_epilogue` arrives once at every `ready` before its loop: there are no sums to be read yet.

For the backward pass the same kernel writes states instead of y.

The fewer channels there are in a batch, the more threads share one, so that every scheduler has a warp that scans,
and sequences need not be cut into segments, which would take most exponentials twice.

In programs of 256 channels and states of 16, with two scanning warps to a scheduler, the instructions of all warps
take about 250 issue slots a token, and the exponential unit is busy for 296 cycles, of which 256 are the states'
own. An H200 takes longer, because it waits for the reads of `_producer`: those are of 32 bytes a row, whose rows
lie apart by the length of the sequence. To bring their lines to L2 before made it no faster, nor did reading ahead
into registers, 16 scanning warps, or one exponential of 16 or 32 by the FMA units.
"""

# ruff: noqa: RUF005  # Triton has no starred expressions: tuples grow by addition

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .._common import cdiv, multiprocessors, on
from .._pipeline import advance, viewed

LOG2E = gl.constexpr(1.4426950408889634)

STATES = (4, 8, 16, 32, 64)
"""Sizes of a state that this takes."""

BLOCKS = (256, 128, 64, 32, 16)
"""Channels of a program."""

NUMBERS = 16
"""Numbers of states, over its channels, of which a thread keeps the states, rates and decays in registers."""

PIECE = 4096
"""Tokens times channels that a group of helping warps has in registers at a time: 32 numbers a thread."""

SHARED = 220 << 10
"""Bytes of shared memory for chunks, of the 227 KiB of a multiprocessor."""


class Inputs(NamedTuple):
    """As in `selective_scan`; what flags say is missing is another tensor."""

    u: Any
    delta: Any
    A: Any
    B: Any
    C: Any
    D: Any
    z: Any
    bias: Any


class Sizes(NamedTuple):
    """Channels, tokens, chunks of four tokens whose states are kept."""

    channels: Any
    S: Any
    chunks: Any


class Ring(NamedTuple):
    """STAGES chunks in shared memory, fp32: steps Δ, given Δ · u, B, C and parts of the sums; and barriers. Where
    B and C are packed, both are B, words with C's 16 bits below.
    """

    steps: Any
    given: Any
    B: Any
    C: Any
    sums: Any
    ready: Any
    done: Any


class Strides(NamedTuple):
    """Of u, delta and z by sequence and channel; of B and C by sequence, number of the state and token."""

    u: Any
    delta: Any
    B: Any
    C: Any
    z: Any


class Shape(NamedTuple):
    """Known when compiling: numbers of a state; channels of a program and of a thread; threads of a channel;
    tokens of a chunk, and of what a helping partition has in registers at a time; chunks in flight.
    """

    N: int
    BLOCK: int
    CHANNELS: int
    LANES: int
    TOKENS: int
    PIECE: int
    STAGES: int


class Flags(NamedTuple):
    """Known when compiling: whether states are written and not y; whether B and C are packed; what there is;
    whether steps go through softplus; and whether the sequence is whole chunks.
    """

    KEEP: bool
    PACKED: bool
    HAS_D: bool
    HAS_Z: bool
    HAS_BIAS: bool
    SOFTPLUS: bool
    EVEN: bool


@dataclass(frozen=True)
class Plan:
    """How a launch is cut: channels of a program, warps that scan, channels of a thread, tokens of a chunk, chunks
    in flight, and registers of a helping thread.
    """

    block: int
    warps: int
    channels: int
    tokens: int
    stages: int
    registers: int = 104

    @property
    def lanes(self) -> int:
        """Threads of a channel."""
        return 32 * self.warps * self.channels // self.block


def fits(u: torch.Tensor, A: torch.Tensor) -> bool:
    """Whether `forward` takes these inputs; the device is not looked at."""
    return A.shape[1] in STATES and u.shape[0] * cdiv(u.shape[1], BLOCKS[-1]) < 1 << 31 and u.shape[2] < 1 << 30


def choose(batch: int, channels: int, N: int, processors: int) -> Plan:
    """The plan of a launch: programs of the size that takes the least time in rounds over the device."""

    def time(block: int) -> int:
        # A token takes as long as its channels' exponentials, and about as long as 16 of them besides.
        return (block + 16) * cdiv(batch * cdiv(channels, block), processors)

    block = min((block for block in BLOCKS if 128 <= block * N <= 32 * 8 * NUMBERS), key=time)
    # As measured on an H200, N = 16: two channels a thread halve the reading of B and C and are slower; eight
    # warps are faster than four for 64 channels, and slower for 32.
    return cut(block, N, 8 if block * N > 512 else 4)


def cut(block: int, N: int, warps: int, channels: int = 1) -> Plan:
    """The rest of a plan: as many tokens as there is shared memory for, 64 at most, in two chunks or three."""
    lanes = 32 * warps * channels // block
    size = 4 * (2 * block + block * lanes + 2 * N)
    tokens = next(t for t in (64, 32, 16) if t == 16 or 2 * t * size <= SHARED)
    # The rest of what a multiprocessor has is for the warps that scan: 152, or 248 where there are four.
    registers = 104 if warps == 8 else 128
    return Plan(block, warps, channels, tokens, min(3, SHARED // (tokens * size)), registers)


@gluon.jit
def _exp2(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """2^x, 0 below -126."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _softplus(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """`_pointwise.softplus`: log(1 + e^x) with full relative accuracy where it is small."""
    e = _exp2(gl.abs(x) * -LOG2E)
    p = -0.0031760570527694654 * e + 0.01954252743780671
    p = p * e - 0.056373613209643736
    p = p * e + 0.10543623839523661
    p = p * e - 0.15269667104466478
    p = p * e + 0.19663274269437397
    p = p * e - 0.2495161626572586
    p = p * e + 0.33329710499262943
    p = p * e - 0.49999892648080163
    p = p * e + 0.9999999946562934
    return gl.maximum(x, 0.0) + e * p


@gluon.jit
def _silu(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """x / (1 + e^-x), where that is below -44 x · 2⁻⁶³.

    Two numbers at a time share one reciprocal, of their product, which is why e^-x ends at 2⁶³.
    """
    return x * gl.inline_asm_elementwise(
        "{ .reg .f32 a, b, r; min.ftz.f32 a, $2, 0f427C0000; min.ftz.f32 b, $3, 0f427C0000;"
        " ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; add.ftz.f32 a, a, 0f3F800000;"
        " add.ftz.f32 b, b, 0f3F800000; mul.ftz.f32 r, a, b; rcp.approx.ftz.f32 r, r;"
        " mul.ftz.f32 $0, r, b; mul.ftz.f32 $1, r, a; }",
        "=&f,=&f,f,f",
        [x * -LOG2E],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _wide(x):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """x in fp32; two bf16 of a register by an instruction each, where the compiler takes three."""
    if x.dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r",
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        y = x.to(gl.float32)
    return y


@gluon.jit
def _packed(b, c):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Words of two numbers of 16 bits, c's below."""
    return (b.to(gl.int16, bitcast=True).to(gl.int32) << 16) | (c.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF)


@gluon.jit
def _unpacked(words, TYPE: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The inverse of `_packed`, in fp32."""
    CODE: gl.constexpr = (
        "and.b32 $0, $2, 0xffff0000; shl.b32 $1, $2, 16;"
        if gl.bfloat16 == TYPE
        else "{ .reg .b16 b, c; mov.b32 {c, b}, $2; cvt.f32.f16 $0, b; cvt.f32.f16 $1, c; }"
    )
    return gl.inline_asm_elementwise(
        CODE, "=&r,=r,r", [words], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )


@gluon.constexpr_function
def _tile(rows, warps=4):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(rows, tokens): vectors of 8 tokens, two of them beside each other so that whole sectors are read.

    Neighbouring threads have neighbouring rows, which lie side by side in shared memory.
    """
    high = min(warps, max(1, rows // 16))
    return gl.BlockedLayout([1, 8], [16, 2], [high, warps // high], [0, 1])


@gluon.constexpr_function
def _summed(rows, LANES, warps=4):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(rows, vectors of tokens, 2, 4, LANES) in the threads of `_tile`."""
    high = min(warps, max(1, rows // 16))
    return gl.BlockedLayout([1, 1, 2, 4, LANES], [16, 2, 1, 1, 1], [high, warps // high, 1, 1, 1], [3, 2, 4, 0, 1])


@gluon.constexpr_function
def _matrix(N, warps=4):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(N, tokens) of B and C."""
    high = min(N, 16)
    return gl.BlockedLayout([1, 4], [high, 32 // high], [1, warps], [1, 0])


@gluon.constexpr_function
def _state(LANES, N, warps):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(channels, LANES, N / LANES): neighbouring threads have neighbouring channels and the same numbers."""
    return gl.BlockedLayout([1, 1, N // LANES], [32 // LANES, LANES, 1], [warps, 1, 1], [0, 1, 2])


@gluon.constexpr_function
def _vectors(LANES, warps):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(channels, LANES, 2, 2, 2): tokens of the same threads."""
    return gl.BlockedLayout([1, 1, 2, 2, 2], [32 // LANES, LANES, 1, 1, 1], [warps, 1, 1, 1, 1], [4, 3, 2, 0, 1])


@gluon.jit
def _unpack(t, layout: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The 8 tokens of (channels, 2, 2, 2), each (channels,)."""
    t0, t1 = gl.split(t)
    t00, t10 = gl.split(t0)
    t01, t11 = gl.split(t1)
    c0, c4 = gl.split(t00)
    c2, c6 = gl.split(t10)
    c1, c5 = gl.split(t01)
    c3, c7 = gl.split(t11)
    tokens = ()
    for c in gl.static_range(8):
        tokens = tokens + (gl.convert_layout((c0, c1, c2, c3, c4, c5, c6, c7)[c], layout, assert_trivial=True),)
    return tokens


@gluon.jit
def _pack(c):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(channels, LANES, 2, 2, 2) of 8 tokens, each (channels, LANES)."""
    even = gl.join(gl.join(c[0], c[4]), gl.join(c[2], c[6]))
    odd = gl.join(gl.join(c[1], c[5]), gl.join(c[3], c[7]))
    return gl.join(even, odd)


@gluon.jit
def _first_channel(channels, BLOCK: gl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(b, first channel) of a program."""
    blocks = gl.cdiv(channels, BLOCK)
    program = gl.program_id(0)
    return (program // blocks).to(gl.int64), program % blocks * BLOCK


@gluon.jit
def _producer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs, ring, sizes, strides, shape: gl.constexpr, flags: gl.constexpr
):
    """Steps and Δ · u, B and C, zero beyond the sequence, where nothing may change."""
    N: gl.constexpr = shape.N
    BLOCK: gl.constexpr = shape.BLOCK
    TOKENS: gl.constexpr = shape.TOKENS
    PIECE: gl.constexpr = shape.PIECE
    STAGES: gl.constexpr = shape.STAGES
    channels, S, _ = sizes
    u_b, u_d = strides.u
    delta_b, delta_d = strides.delta
    B_b, B_n, B_s = strides.B
    C_b, C_n, C_s = strides.C
    tile: gl.constexpr = _tile(BLOCK)
    matrix: gl.constexpr = _matrix(N)
    b, first = _first_channel(channels, BLOCK)
    d = first + gl.arange(0, BLOCK, gl.SliceLayout(1, tile))
    there = d < channels
    j = gl.arange(0, PIECE, gl.SliceLayout(0, tile))
    offset = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, tile))
    if flags.HAS_BIAS:
        offset = gl.load(inputs.bias + d, there, 0.0).to(gl.float32)
    delta = inputs.delta + b * delta_b
    u = inputs.u + b * u_b
    B = inputs.B + b * B_b
    C = inputs.C + b * C_b
    from_delta = delta + d.to(gl.int64)[:, None] * delta_d + j[None, :]
    from_u = u + d.to(gl.int64)[:, None] * u_d + j[None, :]
    n = gl.arange(0, N, gl.SliceLayout(1, matrix))
    i = gl.arange(0, PIECE, gl.SliceLayout(0, matrix))
    from_B = B + n.to(gl.int64)[:, None] * B_n + i.to(gl.int64)[None, :] * B_s
    from_C = C + n.to(gl.int64)[:, None] * C_n + i.to(gl.int64)[None, :] * C_s
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    deep: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    PIECES: gl.constexpr = TOKENS // PIECE
    step_tile = viewed(ring.steps, gl.float32, [STAGES * PIECES, PIECE // 8, 2, BLOCK, 4], deep)
    given_tile = viewed(ring.given, gl.float32, [STAGES * PIECES, PIECE // 8, 2, BLOCK, 4], deep)
    b_tile = viewed(ring.B, ring.B.dtype, [STAGES * PIECES, PIECE, N], flat)
    c_tile = viewed(ring.C, ring.C.dtype, [STAGES * PIECES, PIECE, N], flat)
    stage = 0
    phase = 1
    for begin in range(0, S, TOKENS):
        for piece in range(0, PIECES):
            s = begin + piece * PIECE
            inside = there[:, None] & (s + j < S)[None, :]
            present = (n < N)[:, None] & (s + i < S)[None, :]
            step = _wide(gl.load(from_delta + s, inside, 0.0)) + offset[:, None]
            x = _wide(gl.load(from_u + s, inside, 0.0))
            into = gl.load(from_B + gl.cast(s, gl.int64) * B_s, present, 0.0)
            out = gl.load(from_C + gl.cast(s, gl.int64) * C_s, present, 0.0)
            if flags.SOFTPLUS:
                step = _softplus(step)
            if not flags.EVEN:
                step = gl.where(inside, step, 0.0)
            if piece == 0:
                mbarrier.wait(ring.done.index(stage), phase)
            at = stage * PIECES + piece
            step_tile.index(at).permute((2, 0, 1, 3)).store(gl.reshape(step, [BLOCK, PIECE // 8, 2, 4]))
            given_tile.index(at).permute((2, 0, 1, 3)).store(gl.reshape(step * x, [BLOCK, PIECE // 8, 2, 4]))
            if flags.PACKED:
                b_tile.index(at).permute((1, 0)).store(_packed(into, out))
            else:
                b_tile.index(at).permute((1, 0)).store(into.to(gl.float32))
                c_tile.index(at).permute((1, 0)).store(out.to(gl.float32))
        mbarrier.arrive(ring.ready.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _scan(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs, kept, ring, sizes, shape: gl.constexpr, flags: gl.constexpr
):
    """The states, and each thread's part of C · h, or with KEEP the states before every fourth token."""
    KEEP: gl.constexpr = flags.KEEP
    PACKED: gl.constexpr = flags.PACKED
    N: gl.constexpr = shape.N
    BLOCK: gl.constexpr = shape.BLOCK
    LANES: gl.constexpr = shape.LANES
    TOKENS: gl.constexpr = shape.TOKENS
    STAGES: gl.constexpr = shape.STAGES
    channels, S, chunks = sizes
    state: gl.constexpr = _state(LANES, N, gl.num_warps())
    numbers: gl.constexpr = gl.SliceLayout(0, state)
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, state))
    PART: gl.constexpr = N // LANES
    VECTORS: gl.constexpr = TOKENS // 8
    vector: gl.constexpr = gl.SliceLayout(1, _vectors(LANES, gl.num_warps()))
    b, first = _first_channel(channels, BLOCK)
    d = first + gl.arange(0, BLOCK, rows)
    group = gl.arange(0, LANES, gl.SliceLayout(0, gl.SliceLayout(2, state)))
    k = gl.arange(0, PART, gl.SliceLayout(0, gl.SliceLayout(1, state)))
    there = (d < channels)[:, None, None]
    number = (group * PART)[None, :, None] + k[None, None, :]
    # A power without a factor: A times log₂e.
    rates = gl.load(inputs.A + d.to(gl.int64)[:, None, None] * N + number, there, 0.0).to(gl.float32) * LOG2E
    groups = gl.cdiv(channels, 32)
    to = kept + ((b * chunks * groups + d[:, None, None] // 32) * N + number) * 32 + d[:, None, None] % 32
    h = gl.zeros([BLOCK, LANES, PART], gl.float32, state)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    b_rows = viewed(ring.B, ring.B.dtype, [STAGES * TOKENS, LANES, PART], flat)
    c_rows = viewed(ring.C, ring.C.dtype, [STAGES * TOKENS, LANES, PART], flat)
    stage = 0
    phase = 0
    for s in range(0, S, TOKENS):
        mbarrier.wait(ring.ready.index(stage), phase)
        begin = stage * VECTORS
        last = begin + VECTORS - 1
        # What a token needs is read, and its decay computed, one token ahead: little waits at the loop's end.
        dt = _unpack(ring.steps.index(begin).permute((1, 0, 2, 3)).load(vector), rows)
        x = _unpack(ring.given.index(begin).permute((1, 0, 2, 3)).load(vector), rows)
        decay = _exp2(dt[0][:, None, None] * rates)
        into = b_rows.index(begin * 8).load(numbers)
        for v in range(begin, last + 1):
            ahead = gl.minimum(v + 1, last)
            next_dt = _unpack(ring.steps.index(ahead).permute((1, 0, 2, 3)).load(vector), rows)
            next_x = _unpack(ring.given.index(ahead).permute((1, 0, 2, 3)).load(vector), rows)
            total = ()
            for i in gl.static_range(8):
                if KEEP and i % 4 == 0:
                    token = s + (v - begin) * 8 + i
                    gl.store(to + gl.cast(token // 4, gl.int64) * groups * (N * 32), h, there & (token < S))
                if i < 7:
                    next_into = b_rows.index(v * 8 + i + 1).load(numbers)
                    next_decay = _exp2(dt[i + 1][:, None, None] * rates)
                else:
                    next_into = b_rows.index(ahead * 8).load(numbers)
                    next_decay = _exp2(next_dt[0][:, None, None] * rates)
                if PACKED:
                    into, out = _unpacked(into, inputs.B.dtype.element_ty)
                # h ← exp(Δ A) h + Δ B u, and the part of C · h
                h = h * decay + x[i][:, None, None] * into[None, :, :]
                if not KEEP:
                    if not PACKED:
                        out = c_rows.index(v * 8 + i).load(numbers)
                    total = total + (gl.sum(h * out[None, :, :], 2),)
                decay = next_decay
                into = next_into
            dt = next_dt
            x = next_x
            if not KEEP:
                ring.sums.index(v).permute((2, 0, 1, 3, 4)).store(_pack(total))
        mbarrier.arrive(ring.done.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _epilogue(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs, y, ring, sizes, strides, shape: gl.constexpr, flags: gl.constexpr
):
    """y from the sums of a channel's threads; with KEEP nothing."""
    BLOCK: gl.constexpr = shape.BLOCK
    LANES: gl.constexpr = shape.LANES
    TOKENS: gl.constexpr = shape.TOKENS
    PIECE: gl.constexpr = shape.PIECE
    STAGES: gl.constexpr = shape.STAGES
    channels, S, _ = sizes
    u_b, u_d = strides.u
    z_b, z_d = strides.z
    tile: gl.constexpr = _tile(BLOCK)
    whole: gl.constexpr = _summed(BLOCK, LANES)
    b, first = _first_channel(channels, BLOCK)
    d = first + gl.arange(0, BLOCK, gl.SliceLayout(1, tile))
    there = d < channels
    wide = d.to(gl.int64)
    j = gl.arange(0, PIECE, gl.SliceLayout(0, tile))
    skip = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, tile))
    if flags.HAS_D:
        skip = gl.load(inputs.D + d, there, 0.0).to(gl.float32)
    from_u = inputs.u + b * u_b + wide[:, None] * u_d + j[None, :]
    from_z = inputs.z + b * z_b + wide[:, None] * z_d + j[None, :]
    to = y + (b * channels + wide)[:, None] * S + j[None, :]
    deep: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    PIECES: gl.constexpr = TOKENS // PIECE
    sum_tile = viewed(ring.sums, gl.float32, [STAGES * PIECES, PIECE // 8, LANES, 2, BLOCK, 4], deep)
    # There are no sums to be read before the first round.
    for i in gl.static_range(STAGES):
        mbarrier.arrive(ring.ready.index(i), count=1)
    stage = 0
    phase = 0
    for begin in range(0, S, TOKENS):
        if flags.KEEP:
            mbarrier.wait(ring.done.index(stage), phase)
        else:
            for piece in range(0, PIECES):
                s = begin + piece * PIECE
                inside = there[:, None] & (s + j < S)[None, :]
                if flags.HAS_D:
                    x = gl.load(from_u + s, inside, 0.0)
                if flags.HAS_Z:
                    gate = gl.load(from_z + s, inside, 0.0)
                if piece == 0:
                    mbarrier.wait(ring.done.index(stage), phase)
                # y = (Σ over threads C · h + D u) silu(z)
                value = gl.sum(sum_tile.index(stage * PIECES + piece).permute((3, 0, 2, 4, 1)).load(whole), 4)
                value = gl.convert_layout(gl.reshape(value, [BLOCK, PIECE]), tile, assert_trivial=True)
                if flags.HAS_D:
                    value += skip[:, None] * _wide(x)
                if flags.HAS_Z:
                    value *= _silu(_wide(gate))
                gl.store(to + s, value.to(y.dtype.element_ty), inside)
        mbarrier.arrive(ring.ready.index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _forward(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs, y, kept, sizes, strides, shape: gl.constexpr, flags: gl.constexpr, REGISTERS: gl.constexpr
):
    """BLOCK channels of one sequence."""
    N: gl.constexpr = shape.N
    BLOCK: gl.constexpr = shape.BLOCK
    LANES: gl.constexpr = shape.LANES
    TOKENS: gl.constexpr = shape.TOKENS
    STAGES: gl.constexpr = shape.STAGES
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    split: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    parted: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    # Of a vector of 8 tokens two fours, apart, so that those of neighbouring channels lie side by side.
    steps = gl.allocate_shared_memory(gl.float32, [STAGES * TOKENS // 8, 2, BLOCK, 2, 2], split)
    given = gl.allocate_shared_memory(gl.float32, [STAGES * TOKENS // 8, 2, BLOCK, 2, 2], split)
    ins = gl.allocate_shared_memory(gl.int32 if flags.PACKED else gl.float32, [STAGES, TOKENS, N], flat)
    outs = ins
    if not flags.PACKED:
        outs = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS, N], flat)
    sums = gl.allocate_shared_memory(gl.float32, [STAGES * TOKENS // 8, LANES, 2, BLOCK, 2, 2], parted)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=2)
        mbarrier.init(done.index(i), count=1)
    ring = Ring(steps, given, ins, outs, sums, ready, done)
    gl.warp_specialize(
        [
            (_scan, (inputs, kept, ring, sizes, shape, flags)),
            (_producer, (inputs, ring, sizes, strides, shape, flags)),
            (_epilogue, (inputs, y, ring, sizes, strides, shape, flags)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


def forward(
    y: torch.Tensor,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    bias: torch.Tensor | None,
    softplus: bool,
    plan: Plan | None = None,
) -> None:
    """Writes y (B, D, S); u, delta and z with a last stride of 1, for inputs that `fits` approves of."""
    _run(y, None, u, delta, A, B, C, D, z, bias, softplus, plan)


def states(
    kept: torch.Tensor,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    bias: torch.Tensor | None,
    softplus: bool,
    plan: Plan | None = None,
) -> None:
    """Writes the states before every fourth token to kept (B, at least S / 4, D / 32, N, 32), channels in groups
    of 32; as `forward` otherwise.
    """
    _run(None, kept, u, delta, A, B, C, None, None, bias, softplus, plan)


def _run(
    y: torch.Tensor | None,
    kept: torch.Tensor | None,
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    bias: torch.Tensor | None,
    softplus: bool,
    plan: Plan | None,
) -> None:
    batch, channels, S = u.shape
    N = A.shape[1]
    plan = plan or choose(batch, channels, N, multiprocessors(u))
    piece = min(plan.tokens, max(16, PIECE // plan.block))
    gate = u if z is None else z
    # What is passed for what is not there is not read or written.
    inputs = Inputs(
        u, delta, A.contiguous(), B, C, A if D is None else D.contiguous(), gate,
        A if bias is None else bias.contiguous(),
    )  # fmt: skip
    strides = Strides(u.stride()[:2], delta.stride()[:2], B.stride(), C.stride(), gate.stride()[:2])
    shape = Shape(N, plan.block, plan.channels, plan.lanes, plan.tokens, piece, plan.stages)
    there = (D is not None, z is not None, bias is not None)
    # Of B alone, which is all that states need, a word has one number either way.
    packed = kept is None and B.element_size() == 2
    flags = Flags(kept is not None, packed, *there, softplus, S % plan.tokens == 0)
    with on(u):
        _forward[(batch * cdiv(channels, plan.block),)](
            inputs, u if y is None else y, A if kept is None else kept,
            Sizes(channels, S, 1 if kept is None else kept.shape[1]), strides, shape, flags, plan.registers,
            num_warps=plan.warps,
        )  # fmt: skip
