"""The backward kernels of `ssd.py`.

Every chunk needs the state h that it starts from and the gradient g of the state that it ends with; `_states`
of `_ssd_forward.py` writes both, once forward, once in reverse. Then `_chunk_backward` has one program for a chunk
that loops over the heads of a group: B·Cᵀ is computed once for all of them, and the gradient of it is summed in
registers. `_from_states`, once for dB and once for dC, adds what passes through the states, a matrix product over
heads and head dimension; `_reduce_gradients` adds up the gradient of the steps. Nothing of the size (B, S, H, N)
exists, and no atomics are needed.

With M[j, i] = exp(a_i - a_j) for j ≤ i, a the sums of step · A within the chunk, and s the steps:

    x · dyᵀ ∘ M s is the gradient of B·Cᵀ, whose sum over heads times C (or B) is added to dB (or dC);
    dx = s (M ∘ B·Cᵀ · dy + exp(a_last - a) B·gᵀ) + D dy
    dC += exp(a) dy·h        dB += s exp(a_last - a) x·g

The gradient of a decay at t is the sum over all pairs (i, j) with j < t ≤ i of what j contributes to the loss
through i. Pairs within the chunk are sums over a row minus sums over a column of one fp32 matrix, without its
diagonal, so that what cancels, cancels exactly; pairs across the border come from h and g.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .._common import capability, cdiv, multiprocessors, roomy
from ._ssd_forward import (
    PIECE,
    Extent,
    Launch,
    Recurrence,
    block,
    launch,
    load_tile,
    sequences,
    shape_of,
    source,
    store_tile,
    strides,
)


class StepGradients(NamedTuple):
    """Parts of the gradient of the steps, fp32 (B, H, S in whole chunks): `direct`, of the step as a factor;
    `pairs`, row minus column sums; `after`, what a position adds to what follows the chunk; and `border`
    (B, H, chunks), what comes from before the chunk and goes behind it.
    """

    direct: Any
    pairs: Any
    after: Any
    border: Any


class Splits(NamedTuple):
    """Of a grid with a program for each chunk and group, whose `groups` heads are in `splits` parts."""

    S: Any
    H: Any
    batches: Any
    groups: Any
    chunks: Any
    splits: Any


@triton.jit
def load_state(  # type: ignore[no-untyped-def]  # Triton's types are its own
    states, wide, chunk, head, chunks, H, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    COLUMNS: tl.constexpr, first=0,
):  # fmt: skip
    """COLUMNS, from `first` on, of one tile of (B, chunks, H, BLOCK_P, BLOCK_N); with TMA all of them."""
    at = ((wide * chunks + chunk) * H + head) * BLOCK_P
    if TMA:
        tile = states.load([tl.cast(at, tl.int32), 0])
    else:
        offsets = tl.arange(0, BLOCK_P)[:, None] * BLOCK_N + first + tl.arange(0, COLUMNS)[None, :]
        tile = tl.load(states + at * BLOCK_N + offsets)
    return tile


@triton.jit
def _chunk_backward(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, b, c, dy, recurrence, h, g, dx, dscores, gradients, dskip, strides, sizes, shape: tl.constexpr,
    PIECE: tl.constexpr, ONE_SUM: tl.constexpr,
):  # fmt: skip
    """dx (B, S, H, P) of one chunk for some heads of one group, with all else that takes x and dy.

    Writes this program's part of the gradient of B·Cᵀ to `dscores` (splits, B, chunks, G, CHUNK, CHUNK), the
    parts of `StepGradients`, and dskip (B, chunks, H). `strides` are those of x, b, c and dy.
    """
    CHUNK: tl.constexpr = shape.CHUNK
    P: tl.constexpr = shape.P
    N: tl.constexpr = shape.N
    BLOCK_P: tl.constexpr = shape.BLOCK_P
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    TMA: tl.constexpr = shape.TMA
    STAGES: tl.constexpr = shape.STAGES
    S, H, batches, groups, chunks, splits = sizes
    x_strides, b_strides, c_strides, dy_strides = strides
    program = tl.program_id(0)
    split = program % splits
    group = program // splits % (H // groups)
    chunk = program // (splits * (H // groups)) % chunks
    batch = program // (splits * (H // groups)) // chunks
    wide = batch.to(tl.int64)
    row = chunk * CHUNK
    rows = tl.arange(0, CHUNK)
    visible = rows[:, None] <= rows[None, :]
    if shape.PACKED:
        own, before, last = sequences(recurrence.ids, wide, row, S, CHUNK)
        visible = visible & (own[:, None] == own[None, :])
    # scores = B · Cᵀ
    if PIECE == BLOCK_N:
        b_tile = load_tile(b, b_strides, wide, row, group, S, N, CHUNK, BLOCK_N, TMA)
        c_tile = load_tile(c, c_strides, wide, row, group, S, N, CHUNK, BLOCK_N, TMA)
        scores = tl.dot(b_tile, tl.trans(c_tile), input_precision="ieee")
    else:
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        for n in tl.range(0, N, PIECE, num_stages=STAGES):
            part_b = load_tile(b, b_strides, wide, row, group, S, N, CHUNK, PIECE, TMA, n)
            part_c = load_tile(c, c_strides, wide, row, group, S, N, CHUNK, PIECE, TMA, n)
            scores = tl.dot(part_b, tl.trans(part_c), scores, input_precision="ieee")
    total = tl.zeros([CHUNK, CHUNK], tl.float32)
    per = tl.cdiv(groups, splits)
    low = group * groups + split * per
    high = tl.minimum(low + per, (group + 1) * groups)
    for head in tl.range(low, high, num_stages=STAGES):
        sequence = wide * H + head
        x_tile = load_tile(x, x_strides, wide, row, head, S, P, CHUNK, BLOCK_P, TMA)
        dy_tile = load_tile(dy, dy_strides, wide, row, head, S, P, CHUNK, BLOCK_P, TMA)
        wide_x = x_tile.to(tl.float32)
        wide_dy = dy_tile.to(tl.float32)
        if shape.SKIP:
            tl.store(dskip + (wide * chunks + chunk) * H + head, tl.sum(tl.sum(wide_dy * wide_x, 1), 0))
        at = sequence * chunks * CHUNK + row + rows
        decay = tl.load(recurrence.decay + at)
        step = tl.load(recurrence.step + at)
        chunk_decay = tl.load(recurrence.decay + sequence * chunks * CHUNK + row + CHUNK - 1)
        from_start = tl.exp2(decay)
        to_end = tl.exp2(chunk_decay - decay)
        if shape.PACKED:
            from_start = tl.where(own == before, from_start, 0.0)
            to_end = tl.where(own == last, to_end, 0.0)
            chunk_decay = tl.where(before == last, chunk_decay, float("-inf"))
        mask = tl.exp2(tl.where(visible, decay[None, :] - decay[:, None], float("-inf")))
        local = (scores * mask).to(dy_tile.dtype)
        # d(B·Cᵀ) = x · dyᵀ ∘ M s
        dmask = tl.dot(x_tile, tl.trans(dy_tile), input_precision="ieee") * mask * step[:, None]
        total += dmask
        contributions = tl.where(rows[:, None] < rows[None, :], dmask * scores, 0.0)
        difference = tl.sum(contributions, 0) - tl.sum(contributions, 1)
        # x's own gradient, without the step: first what passes through the state, then what stays in the chunk.
        # dx = exp(a_last - a) B · gᵀ
        if PIECE == BLOCK_N:
            end = load_state(g, wide, chunk, head, chunks, H, BLOCK_P, BLOCK_N, TMA, BLOCK_N)
            out = tl.dot(b_tile, tl.trans(end), input_precision="ieee")
        else:
            out = tl.zeros([CHUNK, BLOCK_P], tl.float32)
            past = tl.zeros([CHUNK, BLOCK_P], tl.float32)
            product = tl.zeros([BLOCK_P, PIECE], tl.float32)
            for n in tl.range(0, N, PIECE, num_stages=STAGES):
                part_b = load_tile(b, b_strides, wide, row, group, S, N, CHUNK, PIECE, TMA, n)
                end = load_state(g, wide, chunk, head, chunks, H, BLOCK_P, BLOCK_N, TMA, PIECE, n)
                out = tl.dot(part_b, tl.trans(end), out, input_precision="ieee")
                # past = C · hᵀ
                part_c = load_tile(c, c_strides, wide, row, group, S, N, CHUNK, PIECE, TMA, n)
                start = load_state(h, wide, chunk, head, chunks, H, BLOCK_P, BLOCK_N, TMA, PIECE, n)
                past = tl.dot(part_c, tl.trans(start), past, input_precision="ieee")
                product += start.to(tl.float32) * end.to(tl.float32)
            both = tl.sum(tl.sum(product, 1), 0)
        out *= to_end[:, None]
        tl.store(gradients.after + at, tl.sum(out * wide_x, 1) * step)
        # dx += M ∘ B·Cᵀ · dy
        out = tl.dot(local, dy_tile, out, input_precision="ieee")
        tl.store(gradients.direct + at, tl.sum(out * wide_x, 1))
        out *= step[:, None]
        if shape.SKIP:
            out += wide_dy * tl.load(recurrence.skip + head).to(tl.float32)
        store_tile(dx, out, wide, row, head, S, H, P, CHUNK, BLOCK_P, TMA)
        # y's part from before the chunk, past = C · hᵀ: the gradient of the decays since then.
        if PIECE == BLOCK_N:
            start = load_state(h, wide, chunk, head, chunks, H, BLOCK_P, BLOCK_N, TMA, BLOCK_N)
            past = tl.dot(c_tile, tl.trans(start), input_precision="ieee")
        tl.store(gradients.pairs + at, tl.sum(past * wide_dy, 1) * from_start + difference)
        if PIECE == BLOCK_N:
            # The sum of h ∘ g is the trace of h · gᵀ: cheaper than to hold both in registers.
            both = tl.dot(start, tl.trans(end), input_precision="ieee")
            across = tl.arange(0, BLOCK_P)
            both = tl.where(across[:, None] == across[None, :], both, 0.0)
            # Triton 3.6 and 3.7 cannot sum in two steps what Blackwell's tensor memory holds; two steps take fewer
            # registers on Hopper.
            both = tl.sum(both) if ONE_SUM else tl.sum(tl.sum(both, 1), 0)
        tl.store(gradients.border + sequence * chunks + chunk, both * tl.exp2(chunk_decay))
    to = ((tl.cast(split, tl.int64) * batches + batch) * chunks + chunk) * (H // groups) + group
    square = rows[:, None] * CHUNK + rows[None, :]
    tl.store(dscores + to * (CHUNK * CHUNK) + square, total)


@triton.jit
def _from_states(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, other, recurrence, states, dscores, result, x_strides, other_strides, sizes, shape: tl.constexpr,
    DC: tl.constexpr,
):  # fmt: skip
    """dB (B, S, G, N) of one chunk and group, from x, C and the gradients of the states; with DC dC, from dy (as
    x), B and the states.
    """
    CHUNK: tl.constexpr = shape.CHUNK
    BLOCK_P: tl.constexpr = shape.BLOCK_P
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    S, H, batches, groups, chunks, splits = sizes
    program = tl.program_id(0)
    group = program % (H // groups)
    chunk = program // (H // groups) % chunks
    batch = program // (H // groups) // chunks
    wide = batch.to(tl.int64)
    row = chunk * CHUNK
    rows = tl.arange(0, CHUNK)
    if shape.PACKED:
        own, before, last = sequences(recurrence.ids, wide, row, S, CHUNK)
    # The transposed gradient of B·Cᵀ is what is stored: rows are positions of B.
    square = rows[:, None] * CHUNK + rows[None, :]
    if DC:
        square = rows[:, None] + rows[None, :] * CHUNK
    total = tl.zeros([CHUNK, CHUNK], tl.float32)
    for split in range(0, splits):
        to = ((tl.cast(split, tl.int64) * batches + batch) * chunks + chunk) * (H // groups) + group
        total += tl.load(dscores + to * (CHUNK * CHUNK) + square)
    # dB = d(B·Cᵀ) · C, or dC = d(B·Cᵀ)ᵀ · B
    factor = load_tile(other, other_strides, wide, row, group, S, shape.N, CHUNK, BLOCK_N, shape.TMA)
    out = tl.dot(total.to(factor.dtype), factor, input_precision="ieee")
    for head in tl.range(group * groups, (group + 1) * groups, num_stages=shape.STAGES):
        at = (wide * H + head) * chunks * CHUNK + row
        x_tile = load_tile(x, x_strides, wide, row, head, S, shape.P, CHUNK, BLOCK_P, shape.TMA)
        state = load_state(states, wide, chunk, head, chunks, H, BLOCK_P, BLOCK_N, shape.TMA, BLOCK_N)
        decay = tl.load(recurrence.decay + at + rows)
        if DC:
            weight = tl.exp2(decay)
            if shape.PACKED:
                weight = tl.where(own == before, weight, 0.0)
        else:
            weight = tl.exp2(tl.load(recurrence.decay + at + CHUNK - 1) - decay)
            weight *= tl.load(recurrence.step + at + rows)
            if shape.PACKED:
                weight = tl.where(own == last, weight, 0.0)
        # dB += s exp(a_last - a) x · g, or dC += exp(a) dy · h
        weighted = (x_tile.to(tl.float32) * weight[:, None]).to(state.dtype)
        out = tl.dot(weighted, state, out, input_precision="ieee")
    store_tile(result, out, wide, row, group, S, H // groups, shape.N, CHUNK, BLOCK_N, shape.TMA)


@triton.jit
def _reduce_gradients(  # type: ignore[no-untyped-def]  # Triton's types are its own
    gradients, step, A, ddt, dA, extent,
    CHUNK: tl.constexpr, HEADS: tl.constexpr, SOFTPLUS: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """The gradient of dt (B, S, H) from its parts, and one chunk's part of dA and of the gradient of the bias,
    (2, B, chunks, H). With GATES that of the gates, and nothing else.
    """
    S, H, chunks = extent
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    known = heads < H
    sequence = batch * H + heads
    at = sequence[:, None] * (chunks * CHUNK) + rows[None, :]
    behind = tl.load(gradients.after + at, known[:, None], 0.0)
    # d(decay)_t = Σ_{i ≥ t} pairs_i + Σ_{j < t} after_j + border
    ddecay = tl.cumsum(tl.load(gradients.pairs + at, known[:, None], 0.0), 1, reverse=True)
    ddecay += tl.cumsum(behind, 1) - behind
    ddecay += tl.load(gradients.border + sequence * chunks + chunk, known, 0.0)[:, None]
    size = tl.load(step + at, known[:, None], 0.0)
    if GATES:
        value = ddecay
    else:
        rate = tl.load(A + heads, known, 0.0).to(tl.float32)
        value = tl.load(gradients.direct + at, known[:, None], 0.0) + ddecay * rate[:, None]
    if SOFTPLUS:
        # The sigmoid of what went into softplus, from what came out: 1 - exp(-step), accurate where it is small.
        value *= tl.where(size < 0.01, size * (1.0 - size * (0.5 - size * (1.0 / 6.0))), 1.0 - tl.exp(-size))
    inside = known[:, None] & (rows < S)[None, :]
    value = tl.where(inside, value, 0.0)
    if not GATES:
        part = (tl.program_id(0) * H).to(tl.int64) + heads
        tl.store(dA + part, tl.sum(ddecay * size, 1), known)
        tl.store(dA + tl.num_programs(0).to(tl.int64) * H + part, tl.sum(value, 1), known)
    to = (batch * S + rows)[:, None] * H + heads[None, :]
    tl.store(ddt + to, tl.trans(value).to(ddt.dtype.element_ty), tl.trans(inside))


def _described_states(states: torch.Tensor, described: bool) -> Any:
    """What `load_state` takes for (B, chunks, H, height, width)."""
    if not described:
        return states
    height, width = states.shape[3:]
    return TensorDescriptor(states, [states.numel() // width, width], [width, 1], [height, width])


def chunk_backward(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, dy: torch.Tensor, recurrence: Recurrence, h: torch.Tensor,
    g: torch.Tensor, *, chunk: int, described: bool, how: Launch | None = None, splits: int | None = None,
    piece: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, StepGradients]:  # fmt: skip
    """(dx, dscores, dD in parts (B, chunks, H), parts of the gradient of the steps).

    h and g are (B, chunks, H, tile): the state before each chunk, the gradient of the one behind it. What is
    summed over a state's columns is one product, or with `piece`, which described tensors cannot have, a loop
    over products of so many; in fp32 the latter.
    """
    B, S, H, P = x.shape
    G, N = b.shape[2:]
    chunks = cdiv(S, chunk)
    if splits is None:
        splits = max(1, 4 * multiprocessors(x) // (B * chunks * G))
    splits = cdiv(H // G, cdiv(H // G, min(splits, H // G)))
    dx = torch.empty(B, S, H, P, dtype=x.dtype, device=x.device)
    dscores = torch.empty(splits, B, chunks, G, chunk, chunk, dtype=torch.float32, device=x.device)
    parts = torch.empty(3, B, H, chunks * chunk, dtype=torch.float32, device=x.device)
    border = torch.empty(B, H, chunks, dtype=torch.float32, device=x.device)
    gradients = StepGradients(*parts, border)
    dskip = torch.empty(B, chunks, H, dtype=torch.float32, device=x.device)
    how = how or launch("chunk_backward", x.dtype, N)
    device = capability(x.device)
    if piece is None:
        piece = PIECE if x.dtype == torch.float32 else block(N)
        if piece > 128 and not roomy(device):  # all columns at a time take a little more than 99 KiB
            piece, described = 128, False
    _chunk_backward[(splits * G * B * chunks,)](
        source(x, chunk, described), source(b, chunk, described), source(c, chunk, described),
        source(dy, chunk, described), recurrence.only("skip", "ids"), _described_states(h, described),
        _described_states(g, described), source(dx, chunk, described), dscores, gradients, dskip,
        (strides(x), strides(b), strides(c), strides(dy)), Splits(S, H, B, H // G, chunks, splits),
        shape_of(x, b, recurrence, chunk, described, how.stages), piece, device[0] >= 10, num_warps=how.warps,
    )  # fmt: skip
    return dx, dscores, dskip, gradients


def from_states(
    x: torch.Tensor, other: torch.Tensor, recurrence: Recurrence, states: torch.Tensor, dscores: torch.Tensor, *,
    dC: bool, chunk: int, described: bool, how: Launch | None = None,
) -> torch.Tensor:  # fmt: skip
    """dB of x, C and g; with `dC` dC of dy, B and h: (B, S, G, N), contiguous."""
    B, S, H, _ = x.shape
    G, N = other.shape[2:]
    chunks = cdiv(S, chunk)
    result = torch.empty(B, S, G, N, dtype=other.dtype, device=x.device)
    how = how or launch("from_states", x.dtype, N)
    _from_states[(G * B * chunks,)](
        source(x, chunk, described), source(other, chunk, described), recurrence.only("ids"),
        _described_states(states, described), dscores, source(result, chunk, described), strides(x),
        strides(other), Splits(S, H, B, H // G, chunks, dscores.shape[0]),
        shape_of(x, other, recurrence, chunk, described, how.stages), dC, num_warps=how.warps,
    )  # fmt: skip
    return result


def reduce_gradients(
    gradients: StepGradients, step: torch.Tensor, A: torch.Tensor | None, dt: torch.Tensor, use_softplus: bool,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of dt (B, S, H), of A (H,) and of the bias (H,), the latter two in fp32, and empty without A."""
    B, S, H = dt.shape
    chunks = cdiv(S, chunk)
    ddt = torch.empty(B, S, H, dtype=dt.dtype, device=dt.device)
    sums = torch.empty(2, B * chunks, 0 if A is None else H, dtype=torch.float32, device=dt.device)
    _reduce_gradients[(B * chunks, cdiv(H, 16))](
        gradients, step, step if A is None else A, ddt, sums, Extent(S, H, chunks),
        CHUNK=chunk, HEADS=16, SOFTPLUS=use_softplus, GATES=A is None, num_warps=4,
    )  # fmt: skip
    dA, dbias = sums.sum(1).unbind(0)
    return ddt, dA, dbias
