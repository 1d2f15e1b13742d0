"""The backward kernels of `ssd.py`.

Every chunk needs the state h that it starts from and the gradient g of the state that it ends with; `_states`
of `_ssd_forward.py` writes both, once forward, once in reverse. Then `_inner` has one program for a chunk that
walks through the heads of a group: B·Cᵀ is computed once for all of them, and the gradient of it is summed in
registers. `_outer`, once for dB and once for dC, adds what passes through the states, a matrix product over
heads and head dimension. Nothing of the size (B, S, H, N) exists, and no atomics are needed.

With M[j, i] = exp(a_i - a_j) for j ≤ i, a the sums of step · A within the chunk, and s the steps:

    x · dyᵀ ∘ M s is the gradient of B·Cᵀ, whose sum over heads times C (or B) is added to dB (or dC);
    dx = s (M ∘ B·Cᵀ · dy + exp(a_last - a) B·g) + D dy
    dC += exp(a) dy·h        dB += s exp(a_last - a) x·g

The gradient of a decay at t is the sum over all pairs (i, j) with j < t ≤ i of what j contributes to the loss
through i. Pairs within the chunk are sums over a row minus sums over a column of one fp32 matrix, without its
diagonal, so that what cancels, cancels exactly; pairs across the border come from h and g.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .._common import capability, cdiv, multiprocessors, roomy
from ._ssd_forward import PIECE, Launch, block, launch, load_tile, precision, sequences, source, store_tile


@triton.jit
def load_state(  # type: ignore[no-untyped-def]  # Triton's types are its own
    states, wide, chunk, head, chunks, H, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    COLUMNS: tl.constexpr, first=0,
):  # fmt: skip
    """COLUMNS, from `first` on, of one tile of (B, chunks, H, BLOCK_P, BLOCK_N); with TMA all of them."""
    spot = ((wide * chunks + chunk) * H + head) * BLOCK_P
    if TMA:
        tile = states.load([tl.cast(spot, tl.int32), 0])
    else:
        offsets = tl.arange(0, BLOCK_P)[:, None] * BLOCK_N + first + tl.arange(0, COLUMNS)[None, :]
        tile = tl.load(states + spot * BLOCK_N + offsets)
    return tile


@triton.jit
def _inner(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, b, c, grad, step, decay, skip, ids, h, g, dx, dscores, direct, pairs, after, border, dskip,
    stride_xb, stride_xs, stride_xh, stride_bb, stride_bs, stride_bg, stride_cb, stride_cs, stride_cg,
    stride_gb, stride_gs, stride_gh, S, H, batches, groups, chunks, splits,
    P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr, SKIP: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, ONE_SUM: tl.constexpr,
):  # fmt: skip
    """dx (B, S, H, P) of one chunk for some heads of one group, with all else that takes x and its gradient.

    Writes this program's part of the gradient of B·Cᵀ to `dscores` (splits, B, chunks, G, CHUNK, CHUNK), dskip
    (B, chunks, H), and for `_finish` four parts of the gradient of the steps, fp32 (B, H, S in whole chunks):
    `direct`, the gradient of the step as a factor; `pairs`, row minus column sums; `after`, what a position
    adds to what follows the chunk; and `border` (B, H, chunks), what comes from before the chunk and goes
    behind it.
    """
    program = tl.program_id(0)
    split = program % splits
    group = program // splits % (H // groups)
    chunk = program // (splits * (H // groups)) % chunks
    batch = program // (splits * (H // groups)) // chunks
    wide = batch.to(tl.int64)
    row = chunk * CHUNK
    rows = tl.arange(0, CHUNK)
    visible = rows[:, None] <= rows[None, :]
    if PACKED:
        own, before, last = sequences(ids, wide, row, S, CHUNK)
        visible = visible & (own[:, None] == own[None, :])
    if PIECE == BLOCK_N:
        written = load_tile(b, wide, row, group, stride_bb, stride_bs, stride_bg, S, N, CHUNK, BLOCK_N, TMA)
        read = load_tile(c, wide, row, group, stride_cb, stride_cs, stride_cg, S, N, CHUNK, BLOCK_N, TMA)
        scores = tl.dot(written, tl.trans(read), input_precision=PRECISION)
    else:
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        for n in tl.range(0, N, PIECE, num_stages=STAGES):
            part_b = load_tile(b, wide, row, group, stride_bb, stride_bs, stride_bg, S, N, CHUNK, PIECE, TMA, n)
            part_c = load_tile(c, wide, row, group, stride_cb, stride_cs, stride_cg, S, N, CHUNK, PIECE, TMA, n)
            scores = tl.dot(part_b, tl.trans(part_c), scores, input_precision=PRECISION)
    total = tl.zeros([CHUNK, CHUNK], tl.float32)
    per = tl.cdiv(groups, splits)
    low = group * groups + split * per
    high = tl.minimum(low + per, (group + 1) * groups)
    for head in tl.range(low, high, num_stages=STAGES):
        place = wide * H + head
        given = load_tile(x, wide, row, head, stride_xb, stride_xs, stride_xh, S, P, CHUNK, BLOCK_P, TMA)
        dy = load_tile(grad, wide, row, head, stride_gb, stride_gs, stride_gh, S, P, CHUNK, BLOCK_P, TMA)
        wider = given.to(tl.float32)
        wider_dy = dy.to(tl.float32)
        if SKIP:
            tl.store(dskip + (wide * chunks + chunk) * H + head, tl.sum(tl.sum(wider_dy * wider, 1), 0))
        at = place * chunks * CHUNK + row + rows
        sofar = tl.load(decay + at)
        size = tl.load(step + at)
        whole = tl.load(decay + place * chunks * CHUNK + row + CHUNK - 1)
        carried = tl.exp2(sofar)
        rest = tl.exp2(whole - sofar)
        if PACKED:
            carried = tl.where(own == before, carried, 0.0)
            rest = tl.where(own == last, rest, 0.0)
            whole = tl.where(before == last, whole, float("-inf"))
        mask = tl.exp2(tl.where(visible, sofar[None, :] - sofar[:, None], float("-inf")))
        local = (scores * mask).to(dy.dtype)
        dmask = tl.dot(given, tl.trans(dy), input_precision=PRECISION) * mask * size[:, None]
        total += dmask
        inner = tl.where(rows[:, None] < rows[None, :], dmask * scores, 0.0)
        difference = tl.sum(inner, 0) - tl.sum(inner, 1)
        # x's own gradient, without the step: first what passes through the state, then what stays in the chunk.
        if PIECE == BLOCK_N:
            end = load_state(g, wide, chunk, head, chunks, H, BLOCK_P, BLOCK_N, TMA, BLOCK_N)
            out = tl.dot(written, tl.trans(end), input_precision=PRECISION)
        else:
            out = tl.zeros([CHUNK, BLOCK_P], tl.float32)
            past = tl.zeros([CHUNK, BLOCK_P], tl.float32)
            product = tl.zeros([BLOCK_P, PIECE], tl.float32)
            for n in tl.range(0, N, PIECE, num_stages=STAGES):
                part_b = load_tile(
                    b, wide, row, group, stride_bb, stride_bs, stride_bg, S, N, CHUNK, PIECE, TMA, n
                )
                end = load_state(g, wide, chunk, head, chunks, H, BLOCK_P, BLOCK_N, TMA, PIECE, n)
                out = tl.dot(part_b, tl.trans(end), out, input_precision=PRECISION)
                part_c = load_tile(
                    c, wide, row, group, stride_cb, stride_cs, stride_cg, S, N, CHUNK, PIECE, TMA, n
                )
                start = load_state(h, wide, chunk, head, chunks, H, BLOCK_P, BLOCK_N, TMA, PIECE, n)
                past = tl.dot(part_c, tl.trans(start), past, input_precision=PRECISION)
                product += start.to(tl.float32) * end.to(tl.float32)
            both = tl.sum(tl.sum(product, 1), 0)
        out *= rest[:, None]
        tl.store(after + at, tl.sum(out * wider, 1) * size)
        out = tl.dot(local, dy, out, input_precision=PRECISION)
        tl.store(direct + at, tl.sum(out * wider, 1))
        out *= size[:, None]
        if SKIP:
            out += wider_dy * tl.load(skip + head).to(tl.float32)
        store_tile(dx, out, wide, row, head, S, H, P, CHUNK, BLOCK_P, TMA)
        # y's part from before the chunk: what the decays since then are worth.
        if PIECE == BLOCK_N:
            start = load_state(h, wide, chunk, head, chunks, H, BLOCK_P, BLOCK_N, TMA, BLOCK_N)
            past = tl.dot(read, tl.trans(start), input_precision=PRECISION)
        tl.store(pairs + at, tl.sum(past * wider_dy, 1) * carried + difference)
        if PIECE == BLOCK_N:
            # The sum of their products is the trace of one: cheaper than to hold both in registers.
            both = tl.dot(start, tl.trans(end), input_precision=PRECISION)
            across = tl.arange(0, BLOCK_P)
            both = tl.where(across[:, None] == across[None, :], both, 0.0)
            # Triton 3.6 and 3.7 cannot sum in two steps what Blackwell's tensor memory holds; two steps take fewer
            # registers on Hopper.
            both = tl.sum(both) if ONE_SUM else tl.sum(tl.sum(both, 1), 0)
        tl.store(border + place * chunks + chunk, both * tl.exp2(whole))
    to = ((tl.cast(split, tl.int64) * batches + batch) * chunks + chunk) * (H // groups) + group
    square = rows[:, None] * CHUNK + rows[None, :]
    tl.store(dscores + to * (CHUNK * CHUNK) + square, total)


@triton.jit
def _outer(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, other, step, decay, ids, states, dscores, result,
    stride_xb, stride_xs, stride_xh, stride_ob, stride_os, stride_og, S, H, batches, groups, chunks, splits,
    P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    READ: tl.constexpr, PACKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dB (B, S, G, N) of one chunk and group, from x, C and the gradients of the states; with READ dC, from the
    gradient of y (as x), B and the states.
    """
    program = tl.program_id(0)
    group = program % (H // groups)
    chunk = program // (H // groups) % chunks
    batch = program // (H // groups) // chunks
    wide = batch.to(tl.int64)
    row = chunk * CHUNK
    rows = tl.arange(0, CHUNK)
    if PACKED:
        own, before, last = sequences(ids, wide, row, S, CHUNK)
    # The transposed gradient of B·Cᵀ is what is stored: rows are positions of B.
    square = rows[:, None] * CHUNK + rows[None, :]
    if READ:
        square = rows[:, None] + rows[None, :] * CHUNK
    total = tl.zeros([CHUNK, CHUNK], tl.float32)
    for split in range(0, splits):
        to = ((tl.cast(split, tl.int64) * batches + batch) * chunks + chunk) * (H // groups) + group
        total += tl.load(dscores + to * (CHUNK * CHUNK) + square)
    factor = load_tile(other, wide, row, group, stride_ob, stride_os, stride_og, S, N, CHUNK, BLOCK_N, TMA)
    out = tl.dot(total.to(factor.dtype), factor, input_precision=PRECISION)
    for head in tl.range(group * groups, (group + 1) * groups, num_stages=STAGES):
        at = (wide * H + head) * chunks * CHUNK + row
        given = load_tile(x, wide, row, head, stride_xb, stride_xs, stride_xh, S, P, CHUNK, BLOCK_P, TMA)
        state = load_state(states, wide, chunk, head, chunks, H, BLOCK_P, BLOCK_N, TMA, BLOCK_N)
        sofar = tl.load(decay + at + rows)
        if READ:
            weight = tl.exp2(sofar)
            if PACKED:
                weight = tl.where(own == before, weight, 0.0)
        else:
            weight = tl.exp2(tl.load(decay + at + CHUNK - 1) - sofar) * tl.load(step + at + rows)
            if PACKED:
                weight = tl.where(own == last, weight, 0.0)
        weighted = (given.to(tl.float32) * weight[:, None]).to(state.dtype)
        out = tl.dot(weighted, state, out, input_precision=PRECISION)
    store_tile(result, out, wide, row, group, S, H // groups, N, CHUNK, BLOCK_N, TMA)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]  # Triton's types are its own
    direct, pairs, after, border, step, A, ddt, dA, S, H, chunks,
    CHUNK: tl.constexpr, HEADS: tl.constexpr, SOFTPLUS: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """The gradient of dt (B, S, H) from the parts that `_inner` wrote, and one chunk's part of dA and of the
    gradient of the bias, (2, B, chunks, H). With GATES that of the gates, and nothing else.
    """
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    known = heads < H
    place = batch * H + heads
    at = place[:, None] * (chunks * CHUNK) + rows[None, :]
    behind = tl.load(after + at, known[:, None], 0.0)
    ddecay = tl.cumsum(tl.load(pairs + at, known[:, None], 0.0), 1, reverse=True)
    ddecay += tl.cumsum(behind, 1) - behind
    ddecay += tl.load(border + place * chunks + chunk, known, 0.0)[:, None]
    size = tl.load(step + at, known[:, None], 0.0)
    if GATES:
        value = ddecay
    else:
        rate = tl.load(A + heads, known, 0.0).to(tl.float32)
        value = tl.load(direct + at, known[:, None], 0.0) + ddecay * rate[:, None]
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


def inner(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, grad: torch.Tensor, step: torch.Tensor,
    decay: torch.Tensor, skip: torch.Tensor | None, ids: torch.Tensor | None, h: torch.Tensor, g: torch.Tensor,
    *, chunk: int, described: bool, how: Launch | None = None, splits: int | None = None,
    piece: int | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(dx, dscores, dD in parts (B, chunks, H) and the four parts that `finish` takes).

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
    dskip = torch.empty(B, chunks, H, dtype=torch.float32, device=x.device)
    how = how or launch("inner", x.dtype, N)
    device = capability(x.device)
    if piece is None:
        piece = PIECE if x.dtype == torch.float32 else block(N)
        if piece > 128 and not roomy(device):  # all columns at a time take a little more than 99 KiB
            piece, described = 128, False
    _inner[(splits * G * B * chunks,)](
        source(x, chunk, described), source(b, chunk, described), source(c, chunk, described),
        source(grad, chunk, described), step, decay, step if skip is None else skip, step if ids is None else ids,
        _described_states(h, described), _described_states(g, described), source(dx, chunk, described), dscores,
        *parts, border, dskip,
        *x.stride()[:3], *b.stride()[:3], *c.stride()[:3], *grad.stride()[:3], S, H, B, H // G, chunks, splits,
        P, N, chunk, block(P), block(N), piece, skip is not None, ids is not None, described, precision(x.dtype),
        how.stages, device[0] >= 10, num_warps=how.warps,
    )  # fmt: skip
    return dx, dscores, dskip, *parts, border


def outer(
    x: torch.Tensor, other: torch.Tensor, step: torch.Tensor, decay: torch.Tensor, ids: torch.Tensor | None,
    states: torch.Tensor, dscores: torch.Tensor, *, read: bool, chunk: int, described: bool,
    how: Launch | None = None,
) -> torch.Tensor:  # fmt: skip
    """dB of x, C and g; with `read` dC of dy, B and h: (B, S, G, N), contiguous."""
    B, S, H, P = x.shape
    G, N = other.shape[2:]
    chunks = cdiv(S, chunk)
    result = torch.empty(B, S, G, N, dtype=other.dtype, device=x.device)
    how = how or launch("outer", x.dtype, N)
    _outer[(G * B * chunks,)](
        source(x, chunk, described), source(other, chunk, described), step, decay, step if ids is None else ids,
        _described_states(states, described), dscores, source(result, chunk, described),
        *x.stride()[:3], *other.stride()[:3],
        S, H, B, H // G, chunks, dscores.shape[0], P, N, chunk, block(P), block(N), read, ids is not None,
        described, precision(x.dtype), how.stages, num_warps=how.warps,
    )  # fmt: skip
    return result


def finish(
    direct: torch.Tensor, pairs: torch.Tensor, after: torch.Tensor, border: torch.Tensor, step: torch.Tensor,
    A: torch.Tensor | None, dt: torch.Tensor, use_softplus: bool, chunk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of dt (B, S, H), of A (H,) and of the bias (H,), the latter two in fp32, and empty without A."""
    B, S, H = dt.shape
    chunks = cdiv(S, chunk)
    ddt = torch.empty(B, S, H, dtype=dt.dtype, device=dt.device)
    sums = torch.empty(2, B * chunks, 0 if A is None else H, dtype=torch.float32, device=dt.device)
    _finish[(B * chunks, cdiv(H, 16))](
        direct, pairs, after, border, step, step if A is None else A, ddt, sums, S, H, chunks,
        CHUNK=chunk, HEADS=16, SOFTPLUS=use_softplus, GATES=A is None, num_warps=4,
    )  # fmt: skip
    dA, dbias = sums.sum(1).unbind(0)
    return ddt, dA, dbias
