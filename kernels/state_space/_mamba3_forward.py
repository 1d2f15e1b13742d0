"""The forward kernels of `mamba3.py`: weights of positions, rotation angles of chunks, and the scan, which rotates
B and C between loads and products.

B and C are shared by heads, but rotated by each head's own angles: rotated in memory they would be the largest
tensors of all. So the scan rotates them tile by tile. Angles are sums over all positions before; in units of 2⁻³²
revolutions they are sums of integers that wrap, exact in any order and over any length, and a chunk needs of the
past one integer a pair.

Chunks, segments, scratch and the names decay and chunk_decay are those of `_ssd_forward.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .._common import assembles, cdiv
from .._pointwise import floored, sigmoid, silu, silu_slope
from ._ssd_forward import (
    Extent,
    Recurrence,
    block,
    load_tile,
    segments_of,
    source,
    store_tile,
    strides,
)

HEADS = 16
"""Heads of a program of the small kernels."""


class Weights(NamedTuple):
    """Of positions, (B, H, S in whole chunks), fp32: see `_weights`."""

    step: Any
    decay: Any
    weight: Any
    present: Any

    @property
    def recurrence(self) -> Recurrence:
        """That of `ssd`, with the weight as its step."""
        return Recurrence(self.weight, self.decay)


class Rotation(NamedTuple):
    """`rates` (B, S in whole chunks, A), fp32, revolutions a unit of step; `angles` (B, chunks, H, A), int32, sums
    over all chunks up to the end of each.
    """

    rates: Any
    angles: Any


class Heads(NamedTuple):
    """What a head has of its own: skip, D (H,), and the biases of B and C (H, N)."""

    skip: Any
    b_bias: Any
    c_bias: Any


class Ends(NamedTuple):
    """The last states of segments, (B, H, segments, tile), and log₂ of segments' decays, (B, H, segments)."""

    result: Any
    total: Any


class Flags(NamedTuple):
    """What `_scan` reads and writes: see there."""

    SKIP: bool
    GATE: bool
    GRAD: bool
    ENTRY: bool
    OUT: bool


class Shape(NamedTuple):
    """Known when compiling: head and state dimension, angles, positions of a chunk, the head dimension as a block,
    columns of the state that are rotated and that are not, and all as a block; whether tiles come by the tensor
    memory accelerator, and stages of the loop.
    """

    P: int
    N: int
    A: int
    CHUNK: int
    BLOCK_P: int
    ROTATED: int
    REST: int
    BLOCK_N: int
    TMA: bool
    STAGES: int


@triton.jit
def cos_sin(angle):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(cos, sin) of angles in 2⁻³² revolutions, int32: from -π to π, where the hardware's are good to 2⁻²⁰."""
    radians = angle.to(tl.float32) * 1.4629180792671596e-09  # 2π · 2⁻³²
    if not assembles():
        return tl.cos(radians), tl.sin(radians)
    else:
        cos = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [radians], tl.float32, True, 1)
        sin = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [radians], tl.float32, True, 1)
        return cos, sin


@triton.jit
def revolutions(part):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """Revolutions as 2⁻³² of one, int32, whole ones left out."""
    part -= tl.floor(part + 0.5)
    return (part * 4294967296.0).to(tl.int32)


@triton.jit
def biased(tile, bias, head, N: tl.constexpr, COLUMNS: tl.constexpr, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns of B or C, from FIRST on, with the head's bias, fp32. The bias is read where it is wanted: its
    registers, held from chunk to chunk, would be missing elsewhere.
    """
    columns = FIRST + tl.arange(0, COLUMNS)
    return tile.to(tl.float32) + tl.load(bias + head * N + columns, columns < N, 0.0).to(tl.float32)[None, :]


@triton.jit
def rotated(wide, cos, sin, CHUNK: tl.constexpr, ROTATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(CHUNK, ROTATED), pairs of neighbours rotated."""
    a, b = tl.split(tl.reshape(wide, [CHUNK, ROTATED // 2, 2]))
    pairs = tl.join(a * cos - b * sin, a * sin + b * cos)
    return tl.reshape(pairs, [CHUNK, ROTATED])


@triton.jit
def _weights(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dt, adt, trap, weights, dt_strides, adt_strides, trap_strides, extent,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Of (B, S, H) to (B, H, S in whole chunks), fp32: `step`; `decay`, log₂ of the decay from the chunk's start,
    inclusive; `present`, λ dt, by which x ⊗ k enters the state at its own position; `weight`, λ dt + (1 - λ') dt'
    with those of the next position, by which it is there at the next one but for that one's decay, where the
    trapezoidal rule has added its second part.
    """
    S, H, chunks = extent
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    rows = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    known = (heads < H)[None, :]
    inside = (rows < S)[:, None] & known
    followed = (rows + 1 < S)[:, None] & known
    wide = rows.to(tl.int64)[:, None]
    step = dt + batch * dt_strides.batch + wide * dt_strides.position + (heads * dt_strides.head)[None, :]
    share = trap + batch * trap_strides.batch + wide * trap_strides.position + (heads * trap_strides.head)[None, :]
    log = adt + batch * adt_strides.batch + wide * adt_strides.position + (heads * adt_strides.head)[None, :]
    own = tl.load(step, inside, 0.0).to(tl.float32)
    now = own * sigmoid(tl.load(share, inside, 0.0).to(tl.float32))
    after = tl.load(step + dt_strides.position, followed, 0.0).to(tl.float32)
    after *= sigmoid(-tl.load(share + trap_strides.position, followed, 0.0).to(tl.float32))
    sums = tl.cumsum(floored(tl.load(log, inside, 0.0).to(tl.float32) * 1.4426950408889634), 0)  # log₂e
    at = (batch * H + heads)[:, None] * (chunks * CHUNK) + rows[None, :]
    mask = (heads < H)[:, None]
    tl.store(weights.step + at, tl.trans(own), mask)
    tl.store(weights.decay + at, tl.trans(sums), mask)
    tl.store(weights.weight + at, tl.trans(now + after), mask)
    tl.store(weights.present + at, tl.trans(now), mask)


@triton.jit
def _rotation_angles(  # type: ignore[no-untyped-def]  # Triton's types are its own
    inputs, steps, rotation, strides, extent,
    A: tl.constexpr, CHUNK: tl.constexpr, BLOCK_A: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rates and angles of a `Rotation`, each chunk's angles by themselves, from `inputs` (B, S, A)."""
    S, H, chunks = extent
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    pairs = tl.arange(0, BLOCK_A)
    inside = (rows < S)[:, None] & (pairs < A)[None, :]
    pointers = inputs + batch * strides.batch + (rows.to(tl.int64) * strides.position)[:, None]
    pointers += (pairs * strides.head)[None, :]
    # tanh(x) is 2 sigmoid(2x) - 1, of which half a revolution is the most.
    rate = sigmoid(2.0 * tl.load(pointers, inside, 0.0).to(tl.float32)) - 0.5
    if tl.program_id(1) == 0:
        at = (batch * chunks * CHUNK + rows)[:, None] * A + pairs[None, :]
        tl.store(rotation.rates + at, rate, (pairs < A)[None, :])
    first = tl.program_id(1) * HEADS
    for head in range(first, tl.minimum(first + HEADS, H)):
        step = tl.load(steps + (batch * H + head) * (chunks * CHUNK) + rows)
        total = tl.sum(revolutions(rate * step[:, None]), 0)
        tl.store(rotation.angles + ((batch * chunks + chunk) * H + head) * A + pairs, total, pairs < A)


@triton.jit
def angles_of(  # type: ignore[no-untyped-def]  # Triton's types are its own
    rotation, step, wide, chunk, head, H, chunks, A: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr
):
    """The angles (CHUNK, PAIRS) of a chunk's positions with these steps, int32, 0 beyond A."""
    pairs = tl.arange(0, PAIRS)
    rows = tl.arange(0, CHUNK)
    position = (wide * chunks + chunk) * CHUNK + rows
    rate = tl.load(rotation.rates + position[:, None] * A + pairs[None, :], (pairs < A)[None, :], 0.0)
    past = ((wide * chunks + chunk - 1) * H + head) * A + pairs
    before = tl.load(rotation.angles + past, (pairs < A) & (chunk > 0), 0)
    return tl.cumsum(revolutions(rate * step[:, None]), 0) + before[None, :]


@triton.jit
def _scan(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, b, c, b_rest, c_rest, z, dy, weights, rotation, heads, entry, y, dout, ends, strides, sizes,
    shape: tl.constexpr, flags: tl.constexpr,
):  # fmt: skip
    """y of one segment of one head, with the state in registers from chunk to chunk, which begins with `entry`
    (B, H, segments, tile). With GRAD, the gradient of y, not y itself but what its gate makes of that: to `y`
    the gradient of z, to `dout` that of what z multiplies. Without OUT no y, but the segment's `Ends`.

    The state is in two parts, (ROTATED, P) and, where there is one, (REST, P) of the columns that are not rotated:
    they need no sines. Programs beside each other have neighbouring heads at the same chunk: B and C come from the
    L2 cache. `strides` are those of x, b, c, z and dy.
    """
    P: tl.constexpr = shape.P
    N: tl.constexpr = shape.N
    CHUNK: tl.constexpr = shape.CHUNK
    BLOCK_P: tl.constexpr = shape.BLOCK_P
    ROTATED: tl.constexpr = shape.ROTATED
    REST: tl.constexpr = shape.REST
    TMA: tl.constexpr = shape.TMA
    S, H, batches, groups, chunks, per, segments = sizes
    x_strides, b_strides, c_strides, z_strides, dy_strides = strides
    program = tl.program_id(0)
    head = program % H
    batch = program // H % batches
    segment = program // (H * batches)
    group = head // groups
    sequence = batch.to(tl.int64) * H + head
    wide = batch.to(tl.int64)
    rows = tl.arange(0, CHUNK)
    tile = tl.arange(0, BLOCK_P)[None, :] * shape.BLOCK_N + tl.arange(0, ROTATED)[:, None]
    offset = (sequence * segments + segment) * (BLOCK_P * shape.BLOCK_N)
    state = tl.zeros([ROTATED, BLOCK_P], tl.float32)
    if flags.ENTRY:
        state += tl.load(entry + offset + tile)
    if REST:
        tile_rest = tl.arange(0, BLOCK_P)[None, :] * shape.BLOCK_N + (ROTATED + tl.arange(0, REST))[:, None]
        state_rest = tl.zeros([REST, BLOCK_P], tl.float32)
        if flags.ENTRY:
            state_rest += tl.load(entry + offset + tile_rest)
    if flags.SKIP:
        skip = tl.load(heads.skip + head).to(tl.float32)
    steps = weights.step + sequence * chunks * CHUNK
    decays = weights.decay + sequence * chunks * CHUNK
    shares = weights.weight + sequence * chunks * CHUNK
    presents = weights.present + sequence * chunks * CHUNK
    sums = 0.0
    first = segment * per
    for chunk in tl.range(first, tl.minimum(first + per, chunks), num_stages=shape.STAGES):
        row = chunk * CHUNK
        step = tl.load(steps + row + rows)
        cos, sin = cos_sin(angles_of(rotation, step, wide, chunk, head, H, chunks, shape.A, CHUNK, ROTATED // 2))
        # k = R(angle) · (B + bias)
        key = load_tile(b, b_strides, wide, row, group, S, N, CHUNK, ROTATED, TMA)
        key = rotated(biased(key, heads.b_bias, head, N, ROTATED, 0), cos, sin, CHUNK, ROTATED).to(key.dtype)
        if REST:
            key_rest = load_tile(b_rest, b_strides, wide, row, group, S, N, CHUNK, REST, TMA, ROTATED)
            key_rest = biased(key_rest, heads.b_bias, head, N, REST, ROTATED).to(key.dtype)
        decay = tl.load(decays + row + rows)
        chunk_decay = tl.load(decays + row + CHUNK - 1)
        weight = tl.load(shares + row + rows)
        if flags.OUT:
            # q = R(angle) · (C + bias); scores = q · kᵀ; y = q · h
            query = load_tile(c, c_strides, wide, row, group, S, N, CHUNK, ROTATED, TMA)
            query = biased(query, heads.c_bias, head, N, ROTATED, 0)
            query = rotated(query, cos, sin, CHUNK, ROTATED).to(key.dtype)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee")
            out = tl.dot(query, state.to(query.dtype), input_precision="ieee")
            if REST:
                query = load_tile(c_rest, c_strides, wide, row, group, S, N, CHUNK, REST, TMA, ROTATED)
                query = biased(query, heads.c_bias, head, N, REST, ROTATED).to(key.dtype)
                scores = tl.dot(query, tl.trans(key_rest), scores, input_precision="ieee")
                out = tl.dot(query, state_rest.to(query.dtype), out, input_precision="ieee")
            # scores ∘ 2^(a_i - a_j) weight_j below the diagonal, scores present_i on it.
            # The difference of exponents only where it is negative: no overflow.
            earlier = rows[:, None] > rows[None, :]
            factor = tl.exp2(tl.where(earlier, decay[:, None] - decay[None, :], float("-inf"))) * weight[None, :]
            own = tl.load(presents + row + rows)
            scores *= tl.where(rows[:, None] == rows[None, :], own[None, :], factor)
            out *= tl.exp2(decay)[:, None]
        # Only here, and widened where it is wanted: there are registers for this or for a chunk's k and q.
        x_tile = load_tile(x, x_strides, wide, row, head, S, P, CHUNK, BLOCK_P, TMA)
        if flags.OUT:
            # y += scores · x + D x
            out = tl.dot(scores.to(x_tile.dtype), x_tile, out, input_precision="ieee")
            if flags.SKIP:
                out += x_tile.to(tl.float32) * skip
            if flags.GATE:
                gate = load_tile(z, z_strides, wide, row, head, S, P, CHUNK, BLOCK_P, TMA)
                if flags.GRAD:
                    wide_dy = load_tile(dy, dy_strides, wide, row, head, S, P, CHUNK, BLOCK_P, TMA).to(tl.float32)
                    factor, slope = silu_slope(gate.to(tl.float32))
                    out *= wide_dy * slope
                    store_tile(dout, wide_dy * factor, wide, row, head, S, H, P, CHUNK, BLOCK_P, TMA)
                else:
                    out *= silu(gate.to(tl.float32))
            store_tile(y, out, wide, row, head, S, H, P, CHUNK, BLOCK_P, TMA)
        # h ← 2^chunk_decay h + kᵀ · (2^(a_last - a) weight x)
        weighted = (x_tile.to(tl.float32) * (tl.exp2(chunk_decay - decay) * weight)[:, None]).to(x_tile.dtype)
        state = tl.dot(tl.trans(key), weighted, state * tl.exp2(chunk_decay), input_precision="ieee")
        if REST:
            state_rest *= tl.exp2(chunk_decay)
            state_rest = tl.dot(tl.trans(key_rest), weighted, state_rest, input_precision="ieee")
        sums += chunk_decay
    if not flags.OUT:
        tl.store(ends.result + offset + tile, state)
        if REST:
            tl.store(ends.result + offset + tile_rest, state_rest)
        tl.store(ends.total + sequence * segments + segment, sums)


# ---------------------------------------------------------------------------------------------------------
# Launches. All tensors are checked; x, B, C and z have a contiguous last dimension, biases are contiguous.


def weights(dt: torch.Tensor, adt: torch.Tensor, trap: torch.Tensor, chunk: int) -> Weights:
    """See `_weights`."""
    B, S, H = dt.shape
    chunks = cdiv(S, chunk)
    made = Weights(*torch.empty(4, B, H, chunks * chunk, dtype=torch.float32, device=dt.device))
    _weights[(B * chunks, cdiv(H, HEADS))](
        dt, adt, trap, made, strides(dt), strides(adt), strides(trap), Extent(S, H, chunks),
        CHUNK=chunk, HEADS=HEADS, num_warps=4,
    )  # fmt: skip
    return made


def rotation_angles(inputs: torch.Tensor, step: torch.Tensor, chunk: int) -> Rotation:
    """Of inputs (B, S, A), before their tanh, and steps (B, H, S in whole chunks)."""
    B, S, A = inputs.shape
    H = step.shape[1]
    chunks = cdiv(S, chunk)
    rates = torch.empty(B, chunks * chunk, A, dtype=torch.float32, device=inputs.device)
    each = torch.empty(B, chunks, H, A, dtype=torch.int32, device=inputs.device)
    if A:
        _rotation_angles[(B * chunks, cdiv(H, HEADS))](
            inputs, step, Rotation(rates, each), strides(inputs), Extent(S, H, chunks),
            A=A, CHUNK=chunk, BLOCK_A=block(A), HEADS=HEADS, num_warps=4,
        )  # fmt: skip
    return Rotation(rates, each.cumsum(1, dtype=torch.int32))


def rotated_columns(state: int, angles: int) -> int:
    """Columns of the state's first tile: half of all where that holds all that is rotated, else all."""
    half = block(state) // 2
    return half if half >= max(16, 2 * angles) else block(state)


def scan(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, z: torch.Tensor | None, weights: Weights,
    rotation: Rotation, skip: torch.Tensor | None, b_bias: torch.Tensor, c_bias: torch.Tensor,
    entry: torch.Tensor | None, y: torch.Tensor | None, ends: Ends | None, dy: torch.Tensor | None = None,
    dout: torch.Tensor | None = None, *, segments: int, chunk: int, described: bool, warps: int = 4,
    stages: int = 2,
) -> None:  # fmt: skip
    """Launches `_scan` into y, with `dy` into y and dout, or, without y, into `ends`; then the last segment, whose
    state nobody wants, is left out.
    """
    B, _, H, P = x.shape
    N, A = b.shape[3], rotation.rates.shape[2]
    none = weights.step
    gate = x if z is None else z
    gradient = gate if dy is None else dy
    first = rotated_columns(N, A)
    rest = block(N) - first
    _scan[((segments if y is not None else segments - 1) * B * H,)](
        source(x, chunk, described), source(b, chunk, described, first), source(c, chunk, described, first),
        source(b, chunk, described, rest), source(c, chunk, described, rest),
        source(gate, chunk, described), source(gradient, chunk, described), weights, rotation,
        Heads(none if skip is None else skip, b_bias, c_bias), none if entry is None else entry,
        source(x if y is None else y, chunk, described), source(x if dout is None else dout, chunk, described),
        ends or Ends(none, none), (strides(x), strides(b), strides(c), strides(gate), strides(gradient)),
        segments_of(x, b, chunk, segments),
        Shape(P, N, A, chunk, block(P), first, rest, block(N), described, stages),
        Flags(skip is not None, z is not None, dy is not None, entry is not None, y is not None), num_warps=warps,
    )  # fmt: skip
