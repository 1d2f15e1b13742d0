"""The forward kernels of `mamba3.py`: weights of positions, turns of chunks, and the scan that turns as it goes.

B and C are shared by heads, but turned by each head's own angles: turned in memory they would be the largest
tensors of all. So the scan turns them, tile by tile, between its loads and its matrix products. Angles are sums
over all positions before; in units of 2⁻³² revolutions they are sums of integers that wrap, exact in any order and
over any length, and a chunk needs of the past one integer a pair.

Chunks, segments and scratch are those of `_ssd_forward.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._common import INTERPRETING, cdiv
from .._pointwise import sigmoid, silu, silu_slope
from ._ssd_forward import block, load_tile, precision, source, store_tile

HEADS = 16
"""Heads of a program of the small kernels."""


@triton.jit
def circle(turns):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(cos, sin) of angles in 2⁻³² revolutions, int32: from -π to π, where the hardware's are good to 2⁻²⁰."""
    angle = turns.to(tl.float32) * 1.4629180792671596e-09  # 2π · 2⁻³²
    if INTERPRETING:
        return tl.cos(angle), tl.sin(angle)
    else:
        cos = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
        sin = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, True, 1)
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
def turned(wide, cos, sin, CHUNK: tl.constexpr, TURNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(CHUNK, TURNED), pairs of neighbours turned."""
    a, b = tl.split(tl.reshape(wide, [CHUNK, TURNED // 2, 2]))
    pairs = tl.join(a * cos - b * sin, a * sin + b * cos)
    return tl.reshape(pairs, [CHUNK, TURNED])


@triton.jit
def _weights(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dt, adt, trap, size, decay, weight, present,
    stride_db, stride_ds, stride_dh, stride_ab, stride_as, stride_ah, stride_tb, stride_ts, stride_th,
    S, H, chunks, CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Of (B, S, H) to (B, H, S in whole chunks), fp32: `size`, the step; `decay`, log₂ of the decay from the
    chunk's start, inclusive; `present`, by which x ⊗ k enters the state at its own position; `weight`, by which it
    is there at the next one but for that one's decay, where the trapezoidal rule has added its second part.
    """
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    rows = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    known = (heads < H)[None, :]
    inside = (rows < S)[:, None] & known
    followed = (rows + 1 < S)[:, None] & known
    wide = rows.to(tl.int64)[:, None]
    step = dt + batch * stride_db + wide * stride_ds + (heads * stride_dh)[None, :]
    share = trap + batch * stride_tb + wide * stride_ts + (heads * stride_th)[None, :]
    log = adt + batch * stride_ab + wide * stride_as + (heads * stride_ah)[None, :]
    own = tl.load(step, inside, 0.0).to(tl.float32)
    now = own * sigmoid(tl.load(share, inside, 0.0).to(tl.float32))
    after = tl.load(step + stride_ds, followed, 0.0).to(tl.float32)
    after *= sigmoid(-tl.load(share + stride_ts, followed, 0.0).to(tl.float32))
    sums = tl.cumsum(tl.load(log, inside, 0.0).to(tl.float32) * 1.4426950408889634, 0)  # log₂e
    at = (batch * H + heads)[:, None] * (chunks * CHUNK) + rows[None, :]
    mask = (heads < H)[:, None]
    tl.store(size + at, tl.trans(own), mask)
    tl.store(decay + at, tl.trans(sums), mask)
    tl.store(weight + at, tl.trans(now + after), mask)
    tl.store(present + at, tl.trans(now), mask)


@triton.jit
def _turns(  # type: ignore[no-untyped-def]  # Triton's types are its own
    angles, size, rates, turns, stride_b, stride_s, stride_a, S, H, chunks,
    A: tl.constexpr, CHUNK: tl.constexpr, BLOCK_A: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """`rates` (B, S in whole chunks, A), fp32, revolutions a unit of step; `turns` (B, chunks, H, A), those of
    each chunk alone.
    """
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    pairs = tl.arange(0, BLOCK_A)
    inside = (rows < S)[:, None] & (pairs < A)[None, :]
    pointers = angles + batch * stride_b + (rows.to(tl.int64) * stride_s)[:, None] + (pairs * stride_a)[None, :]
    # tanh(x) is 2 sigmoid(2x) - 1, of which half a revolution is the most.
    rate = sigmoid(2.0 * tl.load(pointers, inside, 0.0).to(tl.float32)) - 0.5
    if tl.program_id(1) == 0:
        at = (batch * chunks * CHUNK + rows)[:, None] * A + pairs[None, :]
        tl.store(rates + at, rate, (pairs < A)[None, :])
    first = tl.program_id(1) * HEADS
    for head in range(first, tl.minimum(first + HEADS, H)):
        step = tl.load(size + (batch * H + head) * (chunks * CHUNK) + rows)
        total = tl.sum(revolutions(rate * step[:, None]), 0)
        tl.store(turns + ((batch * chunks + chunk) * H + head) * A + pairs, total, pairs < A)


@triton.jit
def angles_of(  # type: ignore[no-untyped-def]  # Triton's types are its own
    rates, turns, size, wide, chunk, head, H, chunks, A: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """The angles (CHUNK, PAIRS) of a chunk's positions, int32, 0 beyond A; size is its steps. `turns` holds sums
    over all chunks up to each.
    """
    pairs = tl.arange(0, PAIRS)
    rows = tl.arange(0, CHUNK)
    place = (wide * chunks + chunk) * CHUNK + rows
    rate = tl.load(rates + place[:, None] * A + pairs[None, :], (pairs < A)[None, :], 0.0)
    past = ((wide * chunks + chunk - 1) * H + head) * A + pairs
    before = tl.load(turns + past, (pairs < A) & (chunk > 0), 0)
    return tl.cumsum(revolutions(rate * size[:, None]), 0) + before[None, :]


@triton.jit
def _walk(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, b, c, b_rest, c_rest, z, grad, size, decay, weight, present, rates, turns, skip, b_bias, c_bias, entry,
    y, pushed, result, total,
    stride_xb, stride_xs, stride_xh, stride_bb, stride_bs, stride_bg, stride_cb, stride_cs, stride_cg,
    stride_zb, stride_zs, stride_zh, stride_gb, stride_gs, stride_gh, S, H, batches, groups, chunks, per, segments,
    P: tl.constexpr, N: tl.constexpr, A: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr,
    TURNED: tl.constexpr, REST: tl.constexpr, BLOCK_N: tl.constexpr,
    SKIP: tl.constexpr, GATE: tl.constexpr, GRAD: tl.constexpr, ENTRY: tl.constexpr, OUT: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y of one segment of one head, with the state in registers from chunk to chunk, which begins with `entry`
    (B, H, segments, tile). With GRAD, the gradient of y, not y itself but what its gate makes of that: to `y`
    the gradient of z, to `pushed` that of what z multiplies. Without OUT no y, but the last state, to `result` of
    entry's shape, and log₂ of the segment's decay to `total` (B, H, segments).

    The state is in two parts, (TURNED, P) and, where there is one, (REST, P) of the dimensions that stand: they
    need no sines. Programs beside each other have neighbouring heads at the same chunk: B and C come from the L2
    cache.
    """
    program = tl.program_id(0)
    head = program % H
    batch = program // H % batches
    segment = program // (H * batches)
    group = head // groups
    place = batch.to(tl.int64) * H + head
    wide = batch.to(tl.int64)
    rows = tl.arange(0, CHUNK)
    tile = tl.arange(0, BLOCK_P)[None, :] * BLOCK_N + tl.arange(0, TURNED)[:, None]
    spot = (place * segments + segment) * (BLOCK_P * BLOCK_N)
    state = tl.zeros([TURNED, BLOCK_P], tl.float32)
    if ENTRY:
        state += tl.load(entry + spot + tile)
    if REST:
        tile_rest = tl.arange(0, BLOCK_P)[None, :] * BLOCK_N + (TURNED + tl.arange(0, REST))[:, None]
        state_rest = tl.zeros([REST, BLOCK_P], tl.float32)
        if ENTRY:
            state_rest += tl.load(entry + spot + tile_rest)
    if SKIP:
        through = tl.load(skip + head).to(tl.float32)
    size += place * chunks * CHUNK
    decay += place * chunks * CHUNK
    weight += place * chunks * CHUNK
    present += place * chunks * CHUNK
    sums = 0.0
    first = segment * per
    for chunk in tl.range(first, tl.minimum(first + per, chunks), num_stages=STAGES):
        row = chunk * CHUNK
        step = tl.load(size + row + rows)
        cos, sin = circle(angles_of(rates, turns, step, wide, chunk, head, H, chunks, A, CHUNK, TURNED // 2))
        key = load_tile(b, wide, row, group, stride_bb, stride_bs, stride_bg, S, N, CHUNK, TURNED, TMA)
        key = turned(biased(key, b_bias, head, N, TURNED, 0), cos, sin, CHUNK, TURNED).to(key.dtype)
        if REST:
            key_rest = load_tile(
                b_rest, wide, row, group, stride_bb, stride_bs, stride_bg, S, N, CHUNK, REST, TMA, TURNED
            )
            key_rest = biased(key_rest, b_bias, head, N, REST, TURNED).to(key.dtype)
        sofar = tl.load(decay + row + rows)
        whole = tl.load(decay + row + CHUNK - 1)
        share = tl.load(weight + row + rows)
        if OUT:
            query = load_tile(c, wide, row, group, stride_cb, stride_cs, stride_cg, S, N, CHUNK, TURNED, TMA)
            query = turned(biased(query, c_bias, head, N, TURNED, 0), cos, sin, CHUNK, TURNED).to(key.dtype)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            out = tl.dot(query, state.to(query.dtype), input_precision=PRECISION)
            if REST:
                query = load_tile(
                    c_rest, wide, row, group, stride_cb, stride_cs, stride_cg, S, N, CHUNK, REST, TMA, TURNED
                )
                query = biased(query, c_bias, head, N, REST, TURNED).to(key.dtype)
                scores = tl.dot(query, tl.trans(key_rest), scores, input_precision=PRECISION)
                out = tl.dot(query, state_rest.to(query.dtype), out, input_precision=PRECISION)
            # The difference of exponents only where it is negative: no overflow.
            earlier = rows[:, None] > rows[None, :]
            factor = tl.exp2(tl.where(earlier, sofar[:, None] - sofar[None, :], float("-inf"))) * share[None, :]
            own = tl.load(present + row + rows)
            scores *= tl.where(rows[:, None] == rows[None, :], own[None, :], factor)
            out *= tl.exp2(sofar)[:, None]
        # Only here, and widened where it is wanted: there are registers for this or for a chunk's k and q.
        given = load_tile(x, wide, row, head, stride_xb, stride_xs, stride_xh, S, P, CHUNK, BLOCK_P, TMA)
        if OUT:
            out = tl.dot(scores.to(given.dtype), given, out, input_precision=PRECISION)
            if SKIP:
                out += given.to(tl.float32) * through
            if GATE:
                gate = load_tile(z, wide, row, head, stride_zb, stride_zs, stride_zh, S, P, CHUNK, BLOCK_P, TMA)
                if GRAD:
                    given_back = load_tile(
                        grad, wide, row, head, stride_gb, stride_gs, stride_gh, S, P, CHUNK, BLOCK_P, TMA
                    ).to(tl.float32)
                    factor, slope = silu_slope(gate.to(tl.float32))
                    out *= given_back * slope
                    store_tile(pushed, given_back * factor, wide, row, head, S, H, P, CHUNK, BLOCK_P, TMA)
                else:
                    out *= silu(gate.to(tl.float32))
            store_tile(y, out, wide, row, head, S, H, P, CHUNK, BLOCK_P, TMA)
        weighted = (given.to(tl.float32) * (tl.exp2(whole - sofar) * share)[:, None]).to(given.dtype)
        state = tl.dot(tl.trans(key), weighted, state * tl.exp2(whole), input_precision=PRECISION)
        if REST:
            state_rest = tl.dot(
                tl.trans(key_rest), weighted, state_rest * tl.exp2(whole), input_precision=PRECISION
            )
        sums += whole
    if not OUT:
        tl.store(result + spot + tile, state)
        if REST:
            tl.store(result + spot + tile_rest, state_rest)
        tl.store(total + place * segments + segment, sums)


# ---------------------------------------------------------------------------------------------------------
# Launches. All tensors are checked; x, B, C and z have a contiguous last dimension, biases are contiguous.


def weights(dt: torch.Tensor, adt: torch.Tensor, trap: torch.Tensor, chunk: int) -> torch.Tensor:
    """(4, B, H, S in whole chunks), fp32: size, decay, weight and present of `_weights`."""
    B, S, H = dt.shape
    chunks = cdiv(S, chunk)
    made = torch.empty(4, B, H, chunks * chunk, dtype=torch.float32, device=dt.device)
    _weights[(B * chunks, cdiv(H, HEADS))](
        dt, adt, trap, *made, *dt.stride(), *adt.stride(), *trap.stride(), S, H, chunks,
        CHUNK=chunk, HEADS=HEADS, num_warps=4,
    )  # fmt: skip
    return made


def turns(angles: torch.Tensor, size: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rates (B, S in whole chunks, A), turns (B, chunks, H, A) up to the end of each chunk, int32)."""
    B, S, A = angles.shape
    H = size.shape[1]
    chunks = cdiv(S, chunk)
    rates = torch.empty(B, chunks * chunk, A, dtype=torch.float32, device=angles.device)
    each = torch.empty(B, chunks, H, A, dtype=torch.int32, device=angles.device)
    if A:
        _turns[(B * chunks, cdiv(H, HEADS))](
            angles, size, rates, each, *angles.stride(), S, H, chunks,
            A=A, CHUNK=chunk, BLOCK_A=block(A), HEADS=HEADS, num_warps=4,
        )  # fmt: skip
    return rates, each.cumsum(1, dtype=torch.int32)


def turning(state: int, angles: int) -> int:
    """Columns of the state's first tile: half of all where that holds all that turns, else all."""
    half = block(state) // 2
    return half if half >= max(16, 2 * angles) else block(state)


def walk(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, z: torch.Tensor | None, weights: torch.Tensor,
    rates: torch.Tensor, turns: torch.Tensor, skip: torch.Tensor | None, b_bias: torch.Tensor,
    c_bias: torch.Tensor, entry: torch.Tensor | None, y: torch.Tensor | None, result: torch.Tensor | None,
    total: torch.Tensor | None, grad: torch.Tensor | None = None, pushed: torch.Tensor | None = None,
    *, segments: int, chunk: int, described: bool, warps: int = 4, stages: int = 2,
) -> None:  # fmt: skip
    """Launches `_walk` into y, with `grad` into y and pushed, or, without y, into result and total; then the last
    segment, whose state nobody wants, is left out.
    """
    B, S, H, P = x.shape
    G, N = b.shape[2:]
    chunks = cdiv(S, chunk)
    none = weights
    gate = x if z is None else z
    given = gate if grad is None else grad
    first = turning(N, rates.shape[2])
    rest = block(N) - first
    _walk[((segments if y is not None else segments - 1) * B * H,)](
        source(x, chunk, described), source(b, chunk, described, first), source(c, chunk, described, first),
        source(b, chunk, described, rest), source(c, chunk, described, rest),
        source(gate, chunk, described), source(given, chunk, described), *weights, rates, turns,
        none if skip is None else skip, b_bias, c_bias, none if entry is None else entry,
        source(x if y is None else y, chunk, described), source(x if pushed is None else pushed, chunk, described),
        none if result is None else result, none if total is None else total,
        *x.stride()[:3], *b.stride()[:3], *c.stride()[:3], *gate.stride()[:3], *given.stride()[:3],
        S, H, B, H // G, chunks, cdiv(chunks, segments), segments,
        P, N, rates.shape[2], chunk, block(P), first, rest, block(N), skip is not None, z is not None,
        grad is not None, entry is not None, y is not None, described, precision(x.dtype), stages, num_warps=warps,
    )  # fmt: skip
