"""Attention over packed sequences of different lengths, forward and backward: FlashAttention-2 (Dao, arXiv
2307.08691) in Triton, with FlashAttention's names for what says where sequences begin.

Blocks of tokens of all sequences are listed on the device, in one launch, by the sequences whose blocks have
the most to do first: nothing waits for the host, no program is there for padding, and what is left at the end
is short. Otherwise the kernels are those of `attention`: an online softmax in base 2 forward, and backward
one kernel over blocks of keys (dK, dV) and one over blocks of queries (dQ), without atomics, so that gradients
are the same in every run. On Hopper one kernel makes all three (`_attention_varlen_hopper_backward.py`), and
parts of dQ are added up in no fixed order, unless PyTorch is asked for deterministic algorithms.

On compute capability 9.0 `_attention_varlen_hopper.py`, `_attention_varlen_hopper_backward.py` and
`_attention_varlen_hopper_backward_deterministic.py` have kernels of their own for what the first names; the last
for heads of 64 or 128 columns without a window or a cap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from .._common import capability, cdiv, check, choice, on, operator, power_of_2, roomy
from .._online_softmax import LOWEST, weighted
from ._dispatch import LARGEST_CAP, like_sinks
from ._portable_backward import planned_gradient_in_sinks
from ._tile_functions import LOG2E, LOG2E_ON_DEVICE, capped, seen_by, walk_span
from ._tiling import Tiles, bounded, modest, row_contiguous, tile_width

HOPPER = ("forward", "backward")
"""Passes that the kernels for Hopper do, where they can."""

CHUNK = 1024
"""Sequences, and rows of the list, that a program takes at a time."""

FIELDS: tl.constexpr = tl.constexpr(8)
"""Numbers of a listed block: where its sequence starts and how long it is, the same of the sequence on the other
side of the product, how many blocks are listed before the sequence's first, how many it has, and which it is."""


@dataclass(frozen=True)
class Config:
    """A kernel at compile time: head dimension, rows of a block of queries and of keys, columns of one, mask,
    window and cap of scores, 0 for none.
    """

    D: int
    queries: int
    keys: int
    width: int
    causal: bool
    window: int = 0
    cap: float = 0.0


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    mask: Literal["causal", "full"] = "causal",
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v of each sequence: q (T, H, D), k and v (Tk, Hkv, D) to (T, H, D), contiguous, like q.

    Sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] and the keys cu_seqlens_k[b] to
    cu_seqlens_k[b + 1]; both (n + 1,) int32, ascending from 0 to T and Tk. They stay on the device: that they
    ascend is not checked, and rows of no sequence are not written. Sequences may be empty. max_seqlen_q and
    max_seqlen_k, the longest of each, choose tiles only: wrong ones cost time, nothing else.

    q, k and v in one of bf16, fp16, fp32, on one device; D from 1 to 256; Hkv divides H, and query head h reads
    key head h // (H / Hkv). `mask` "causal" is aligned to the end of each sequence, as in FlashAttention since
    2.1: of Lq queries and Lk keys, query i sees the keys up to i + Lk − Lq. A query that sees none gives zeros.
    Sums are in fp32; fp32 inputs are multiplied as fp32, not TF32.

    A `window` of w, at least 1, hides the keys w or more places away: a query sees the key in its place and the
    w - 1 before it, and under a "full" mask the w - 1 after it. The last query and the last key of a sequence
    are in one place under either mask then. A `cap` above 0 makes scores cap · tanh(score / cap), before the mask.
    `sinks` (H,), in bf16, fp16 or fp32, are one more logit a head in the softmax's denominator, without a value.

    Differentiable once in q, k, v and sinks. The same inputs give the same bits on the same device, but for the
    gradient in q on Hopper (compute capability 9.0), which is summed in no fixed order. Where
    `torch.use_deterministic_algorithms(True)` holds when gradients are computed, it is deterministic too, by
    kernels that take 1.2 to 1.5 times as long, or with a window, a cap or other than 64 or 128 columns by the
    portable ones.

    Raises `TypeError` for a wrong dtype or a window that is no integer, and `ValueError` for a wrong shape,
    device, mask, length, window or cap.
    """
    choice("mask", mask, ("causal", "full"))
    check("q", q, dim=3)
    _, H, D = q.shape
    if not 1 <= D <= 256:
        raise ValueError(f"q has head dimension {D}, expected 1 to 256")
    check("k", k, dim=3, dtypes=(q.dtype,), like=q)
    Tk, heads = k.shape[:2]
    if H and (heads == 0 or H % heads):
        raise ValueError(f"k has {heads} heads, which do not divide the {H} of q")
    check("k", k, shape=(Tk, heads, D), dtypes=(q.dtype,))
    check("v", v, shape=(Tk, heads, D), dtypes=(q.dtype,), like=q)
    check("cu_seqlens_q", cu_seqlens_q, dim=1, dtypes=(torch.int32,), like=q)
    if cu_seqlens_q.shape[0] == 0:
        raise ValueError("cu_seqlens_q is empty, expected one number more than there are sequences")
    check("cu_seqlens_k", cu_seqlens_k, shape=cu_seqlens_q.shape, dtypes=(torch.int32,), like=q)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest < 0:
            raise ValueError(f"{name} is {longest}, expected a length")
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, int):
            raise TypeError(f"window must be an integer or None, not {type(window).__name__}")
        if window < 1:
            raise ValueError(f"window is {window}, expected at least 1")
    if sinks is not None:
        check("sinks", sinks, shape=(H,), like=q)
    if not 0 <= cap < math.inf:
        raise ValueError(f"cap is {cap}, expected a number above 0, or 0 for none")
    output: torch.Tensor = _attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask == "causal", window or 0, sinks,
        float(cap),
    )[0]  # fmt: skip
    return output


# ---------------------------------------------------------------------------------------------------------
# The list of blocks.


@triton.jit(do_not_specialize=["n", "rows"])
def _list(  # type: ignore[no-untyped-def]  # Triton's types are its own
    mine, others, table, n, rows, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Lists the blocks of BLOCK tokens of one sequence, behind those of all sequences that come before it: of more
    tokens on the other side, which is what a block's work grows with. The count of all goes to row `rows`, and
    behind it a 0, with which programs count what they take.
    """
    sequence = tl.program_id(0)
    start = tl.load(mine + sequence)
    length = tl.load(mine + sequence + 1) - start
    other = tl.load(others + sequence)
    work = tl.load(others + sequence + 1) - other
    before = 0
    total = 0
    for low in range(0, n, CHUNK):
        at = low + tl.arange(0, CHUNK)
        inside = at < n
        lengths = tl.load(mine + at + 1, mask=inside, other=0) - tl.load(mine + at, mask=inside, other=0)
        works = tl.load(others + at + 1, mask=inside, other=0) - tl.load(others + at, mask=inside, other=0)
        blocks = tl.cdiv(lengths, BLOCK)
        earlier = (works > work) | ((works == work) & (at < sequence))
        before += tl.sum(tl.where(earlier, blocks, 0))
        total += tl.sum(blocks)
    blocks = tl.cdiv(length, BLOCK)
    for low in range(0, blocks, CHUNK):
        at = low + tl.arange(0, CHUNK)
        # More rows than there are belong to starts that do not ascend: wrong, but nobody else's memory.
        inside = (at < blocks) & (before + at < rows)
        row = table + (before + at) * FIELDS
        tl.store(row, start, mask=inside)
        tl.store(row + 1, length, mask=inside)
        tl.store(row + 2, other, mask=inside)
        tl.store(row + 3, work, mask=inside)
        tl.store(row + 4, before, mask=inside)
        tl.store(row + 5, blocks, mask=inside)
        tl.store(row + 6, sequence, mask=inside)
    if sequence == 0:
        tl.store(table + rows * FIELDS, tl.minimum(total, rows))
        tl.store(table + rows * FIELDS + 1, 0)


@triton.jit
def _item(table, H):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(head, block, start, length, other start, other length) of this program. A sequence's blocks of one head are
    neighbours, so that its keys stay in L2.
    """
    row = table + tl.program_id(0) // H * FIELDS
    within = tl.program_id(0) - tl.load(row + 4) * H
    blocks = tl.load(row + 5)
    head = within // blocks
    return head, within - head * blocks, tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


# ---------------------------------------------------------------------------------------------------------
# Tiles: a (rows, D) block of one head of one sequence of a (T, H, D) tensor.


@triton.jit
def _head(x, start, head, strides):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """The first row of a head of a sequence; 64-bit, as a tensor of 2³¹ elements is ordinary here."""
    return x + start.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def _load(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, row, stride_t, length, D, ROWS: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr
):  # fmt: skip
    """Rows `row` to `row + ROWS` of a head, zero beyond D and, with TAIL, beyond the sequence."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    start = x + tl.cast(row, tl.int64) * stride_t
    pointers = start + (rows.to(tl.int64) * stride_t)[:, None] + columns[None, :]
    if TAIL:
        tile = tl.load(pointers, mask=(row + rows < length)[:, None] & (columns < D)[None, :], other=0.0)
    elif WIDTH != D:
        tile = tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _store(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, tile, row, stride_t, length, D, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Writes a tile to rows `row` to `row + ROWS` of a head, as far as the sequence has them."""
    rows = row + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    pointers = x + (rows.to(tl.int64) * stride_t)[:, None] + columns[None, :]
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=(rows < length)[:, None] & (columns < D)[None, :])


# ---------------------------------------------------------------------------------------------------------
# Forward.


@triton.jit
def _attend(  # type: ignore[no-untyped-def]  # Triton's types are its own
    state, q, k, v, first, low, high, stride_kt, stride_vt, length, offset, scale, c: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds keys `low` to `high` to the state of an online softmax: (sums, row max, row sum). `scale` includes
    log₂e.
    """
    total, row_max, row_sum = state
    last = first + offset + tl.arange(0, c.queries)
    for start in tl.range(low, high, c.keys):
        keys = _load(k, start, stride_kt, length, c.D, c.keys, c.width, MASKED)
        # S = Q·Kᵀ
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if c.cap > 0:
            scores, _ = capped(scores, scale, c.cap)
        if MASKED:
            columns = start + tl.arange(0, c.keys)
            if c.window:
                seen = seen_by(last[:, None], columns[None, :], length, c.causal, c.window)
                scores = tl.where(seen, scores, float("-inf"))
            elif c.causal:
                # Keys beyond the sequence are hidden too: they come after every row that is stored.
                scores = tl.where(last[:, None] >= columns[None, :], scores, float("-inf"))
            else:
                scores = tl.where((columns < length)[None, :], scores, float("-inf"))
        weights, correction, row_max, row_sum = weighted(scores, row_max, row_sum, scale)
        total = total * correction[:, None]
        values = _load(v, start, stride_vt, length, c.D, c.keys, c.width, MASKED)
        # O += P·V
        total = tl.dot(weights.to(values.dtype), values, total, input_precision="ieee")
    return total, row_max, row_sum


@triton.jit
def _seen(first, length, offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(middle, high): a block of queries sees all keys before `middle`, whole blocks, and none from `high` on."""
    middle = length
    high = length
    if CAUSAL:
        middle = tl.maximum(tl.minimum(first + offset + 1, length), 0)
        high = tl.maximum(tl.minimum(first + offset + BLOCK_M, length), 0)
    return middle // BLOCK_N * BLOCK_N, high


@triton.jit(do_not_specialize=["T", "rows", "H"])
def _forward(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, out, lse, table, q_strides, k_strides, v_strides, T, rows, H, groups, scale, sinks, c: tl.constexpr
):  # fmt: skip
    """One block of queries of one head. `lse` (H, T) is the base-2 log of the sum of 2^score; of a row that sees
    nothing it is +inf, which makes all of its probabilities 0. `sinks` (H,) are logits beside the scores, without
    values; None for none.
    """
    BLOCK: tl.constexpr = c.queries
    WIDTH: tl.constexpr = c.width
    D: tl.constexpr = c.D
    if tl.program_id(0) // H >= tl.load(table + rows * FIELDS):
        return
    head, block, start, queries, key_start, keys = _item(table, H)
    if c.causal:
        # The last block has the most keys: the light ones fill the gaps at the end.
        block = tl.cdiv(queries, c.queries) - 1 - block
    first = block * c.queries
    offset = keys - queries
    tile = _load(_head(q, start, head, q_strides), first, q_strides[0], queries, D, c.queries, c.width, True)
    k = _head(k, key_start, head // groups, k_strides)
    v = _head(v, key_start, head // groups, v_strides)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    row_max = tl.full([BLOCK], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E_ON_DEVICE
        row_max = tl.maximum(row_max, sink)
        row_sum = tl.exp2(sink - row_max)
    state = (total, row_max, row_sum)
    low = 0
    if c.window:
        before, low, middle, high = walk_span(
            first + offset, c.window - 1, 0 if c.causal else c.window - 1, keys, c.queries, c.keys
        )  # fmt: skip
        state = _attend(
            state, tile, k, v, first, before, low, k_strides[0], v_strides[0], keys, offset, scale, c, True
        )  # fmt: skip
    else:
        middle, high = _seen(first, keys, offset, c.queries, c.keys, c.causal)
    state = _attend(
        state, tile, k, v, first, low, middle, k_strides[0], v_strides[0], keys, offset, scale, c, False
    )  # fmt: skip
    state = _attend(
        state, tile, k, v, first, middle, high, k_strides[0], v_strides[0], keys, offset, scale, c, True
    )  # fmt: skip
    total, row_max, row_sum = state
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    total = total / row_sum[:, None]
    _store(_head(out, start, head, (H * D, D)), total, first, H * D, queries, D, c.queries, c.width)
    at = first + tl.arange(0, c.queries)
    level = tl.where(empty, float("inf"), row_max + tl.log2(row_sum))
    tl.store(lse + head.to(tl.int64) * T + start + at, level, mask=at < queries)


# ---------------------------------------------------------------------------------------------------------
# Backward. With P the probabilities, dP = dO·Vᵀ and delta = rowsum(O ∘ dO):
# dV = Pᵀ·dO, dS = P ∘ (dP - delta), dK = dSᵀ·Q / √D, dQ = dS·K / √D.


@triton.jit(do_not_specialize=["T", "H"])
def _delta(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, grad, delta, grad_strides, T, H,
    D: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """delta (H, T), fp32: the sum of O ∘ dO over each row."""
    first = tl.program_id(0) // H * BLOCK_M
    head = tl.program_id(0) % H
    a = _load(_head(out, first * 0, head, (H * D, D)), first, H * D, T, D, BLOCK_M, WIDTH, True)
    b = _load(_head(grad, first * 0, head, grad_strides), first, grad_strides[0], T, D, BLOCK_M, WIDTH, True)
    rows = first + tl.arange(0, BLOCK_M)
    sums = tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)
    tl.store(delta + head.to(tl.int64) * T + rows, sums, mask=rows < T)


@triton.jit(do_not_specialize=["T", "rows", "H", "slots"])
def _statistics(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, grad, lse, level, delta, table, grad_strides, T, rows, H, slots,
    D: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp and delta as (H, slots, BLOCK_M), in which each sequence begins a slot.

    Block i of sequence b, which starts at row s, has slot s // BLOCK_M + b + i: that leaves enough to each. Rows
    beyond a sequence are +inf and 0, and so their probabilities 0 but for keys of -inf: 0 · -inf is NaN.
    """
    if tl.program_id(0) // H >= tl.load(table + rows * FIELDS):
        return
    head, block, start, length, _, _ = _item(table, H)
    sequence = tl.load(table + tl.program_id(0) // H * FIELDS + 6)
    first = block * BLOCK_M
    a = _load(_head(out, start, head, (H * D, D)), first, H * D, length, D, BLOCK_M, WIDTH, True)
    b = _load(_head(grad, start, head, grad_strides), first, grad_strides[0], length, D, BLOCK_M, WIDTH, True)
    at = tl.arange(0, BLOCK_M)
    inside = first + at < length
    exponent = tl.load(lse + head.to(tl.int64) * T + start + first + at, mask=inside, other=float("inf"))
    place = (head.to(tl.int64) * slots + start // BLOCK_M + sequence + block) * BLOCK_M + at
    tl.store(level + place, exponent)
    tl.store(delta + place, tl.sum(a.to(tl.float32) * b.to(tl.float32), 1))


@triton.jit
def _gather_keys(  # type: ignore[no-untyped-def]  # Triton's types are its own
    sums, keys, values, q, grad, lse, delta, first, low, high, stride_qt, stride_gt, length, offset, scale,
    c: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(dK, dV) of a block of keys with queries `low` to `high` of one head added. Scores are transposed here. With
    a window MASKED is that at its edges.

    Rows beyond the sequence are zeros with a log-sum-exp of +inf, and so have probabilities of 0 but for keys of
    -inf: 0 · -inf is NaN.
    """
    dk, dv = sums
    columns = first + tl.arange(0, c.keys)
    for start in tl.range(low, high, c.queries):
        rows = start + tl.arange(0, c.queries)
        queries = _load(q, start, stride_qt, length, c.D, c.queries, c.width, True)
        level = tl.load(lse + rows, mask=rows < length, other=float("inf"))
        # Sᵀ = K·Qᵀ
        scores = tl.dot(keys, tl.trans(queries), input_precision="ieee")
        if c.cap > 0:
            scores, slope = capped(scores, scale, c.cap)
        exponents = scores * scale - level[None, :]
        if MASKED and c.window:
            place = (rows + offset)[None, :]
            seen = (rows < length)[None, :] & (place < columns[:, None] + c.window)
            seen = seen & (place >= columns[:, None] if c.causal else columns[:, None] < place + c.window)
            exponents = tl.where(seen, exponents, float("-inf"))
        elif MASKED:
            last = tl.where(rows < length, rows + offset, -1)
            exponents = tl.where(last[None, :] >= columns[:, None], exponents, float("-inf"))
        else:
            exponents = tl.where((rows < length)[None, :], exponents, float("-inf"))
        # P = 2^(S·scale - lse)
        weights = tl.exp2(exponents)
        g = _load(grad, start, stride_gt, length, c.D, c.queries, c.width, True)
        # dV += Pᵀ·dO
        dv = tl.dot(weights.to(g.dtype), g, dv, input_precision="ieee")
        of_row = tl.load(delta + rows, mask=rows < length, other=0.0)
        # dPᵀ = V·dOᵀ
        dp = tl.dot(values, tl.trans(g), input_precision="ieee")
        # dS = P ∘ (dP - delta)
        ds = weights * (dp - of_row[None, :])
        if c.cap > 0:
            ds = ds * slope
        # dK += dSᵀ·Q
        dk = tl.dot(ds.to(queries.dtype), queries, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["T", "rows", "heads"])
def _backward_keys(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, grad, lse, delta, dk_out, dv_out, table, strides, grad_strides, T, rows, heads, groups, scale, root,
    c: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one key head of `heads`, over all its query heads. `strides` are those of
    q, k, v; `root` is 1/√D.
    """
    BLOCK: tl.constexpr = c.keys
    WIDTH: tl.constexpr = c.width
    D: tl.constexpr = c.D
    if tl.program_id(0) // heads >= tl.load(table + rows * FIELDS):
        return
    # Under a causal mask the first block of keys is the heaviest: the natural order is the right one.
    head, block, key_start, length, start, queries = _item(table, heads)
    first = block * c.keys
    offset = length - queries
    k = _head(k, key_start, head, strides[1])
    v = _head(v, key_start, head, strides[2])
    keys = _load(k, first, strides[1][0], length, D, c.keys, c.width, True)
    values = _load(v, first, strides[2][0], length, D, c.keys, c.width, True)
    dk = tl.zeros([BLOCK, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK, WIDTH], tl.float32)
    sums = (dk, dv)
    for member in tl.range(0, groups, num_stages=1):
        query_head = head * groups + member
        q_head = _head(q, start, query_head, strides[0])
        g_head = _head(grad, start, query_head, grad_strides)
        at = query_head.to(tl.int64) * T + start
        middle = 0
        if c.window:
            # One loop, all of it masked: three would spill, and a short window cuts nearly all of its tiles.
            low, _, _, high = walk_span(
                first - offset, 0 if c.causal else c.window - 1, c.window - 1, queries, c.keys, c.queries
            )  # fmt: skip
            sums = _gather_keys(
                sums, keys, values, q_head, g_head, lse + at, delta + at, first, low, high,
                strides[0][0], grad_strides[0], queries, offset, scale, c, True,
            )  # fmt: skip
        else:
            if c.causal:
                # From the first query that sees the first key on, and to the last that does not see the last.
                low = tl.maximum(tl.minimum(first - offset, queries), 0) // c.queries * c.queries
                middle = tl.cdiv(tl.maximum(first - offset + c.keys - 1, 0), c.queries) * c.queries
                sums = _gather_keys(
                    sums, keys, values, q_head, g_head, lse + at, delta + at, first, low,
                    tl.minimum(middle, queries), strides[0][0], grad_strides[0], queries, offset, scale, c, True,
                )  # fmt: skip
            sums = _gather_keys(
                sums, keys, values, q_head, g_head, lse + at, delta + at, first, middle, queries,
                strides[0][0], grad_strides[0], queries, offset, scale, c, False,
            )  # fmt: skip
    dk, dv = sums
    stride = heads * D
    _store(_head(dk_out, key_start, head, (stride, D)), dk * root, first, stride, length, D, c.keys, c.width)
    _store(_head(dv_out, key_start, head, (stride, D)), dv, first, stride, length, D, c.keys, c.width)


@triton.jit
def _gather_queries(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dq, queries, g, level, of_row, k, v, first, low, high, stride_kt, stride_vt, length, offset, scale,
    c: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds keys `low` to `high` to dQ of a block of queries."""
    last = first + offset + tl.arange(0, c.queries)
    for start in tl.range(low, high, c.keys):
        keys = _load(k, start, stride_kt, length, c.D, c.keys, c.width, MASKED)
        values = _load(v, start, stride_vt, length, c.D, c.keys, c.width, MASKED)
        # S = Q·Kᵀ
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if c.cap > 0:
            scores, slope = capped(scores, scale, c.cap)
        exponents = scores * scale - level[:, None]
        if MASKED:
            # Keys beyond the sequence are zeros, but 2^(0 - level) can overflow, and inf · 0 is NaN.
            columns = start + tl.arange(0, c.keys)
            if c.window:
                seen = seen_by(last[:, None], columns[None, :], length, c.causal, c.window)
                exponents = tl.where(seen, exponents, float("-inf"))
            elif c.causal:
                exponents = tl.where(last[:, None] >= columns[None, :], exponents, float("-inf"))
            else:
                exponents = tl.where((columns < length)[None, :], exponents, float("-inf"))
        # P = 2^(S·scale - lse)
        weights = tl.exp2(exponents)
        # dP = dO·Vᵀ
        dp = tl.dot(g, tl.trans(values), input_precision="ieee")
        # dS = P ∘ (dP - delta)
        ds = weights * (dp - of_row[:, None])
        if c.cap > 0:
            ds = ds * slope
        # dQ += dS·K
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["T", "rows", "H"])
def _backward_queries(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, grad, lse, delta, dq_out, table, strides, grad_strides, T, rows, H, groups, scale, root,
    c: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head. `strides` are those of q, k, v."""
    BLOCK: tl.constexpr = c.queries
    WIDTH: tl.constexpr = c.width
    D: tl.constexpr = c.D
    if tl.program_id(0) // H >= tl.load(table + rows * FIELDS):
        return
    head, block, start, length, key_start, keys = _item(table, H)
    if c.causal:
        block = tl.cdiv(length, c.queries) - 1 - block
    first = block * c.queries
    offset = keys - length
    q = _head(q, start, head, strides[0])
    grad = _head(grad, start, head, grad_strides)
    k = _head(k, key_start, head // groups, strides[1])
    v = _head(v, key_start, head // groups, strides[2])
    queries = _load(q, first, strides[0][0], length, D, c.queries, c.width, True)
    g = _load(grad, first, grad_strides[0], length, D, c.queries, c.width, True)
    rows = first + tl.arange(0, c.queries)
    at = head.to(tl.int64) * T + start
    level = tl.load(lse + at + rows, mask=rows < length, other=float("inf"))
    of_row = tl.load(delta + at + rows, mask=rows < length, other=0.0)
    dq = tl.zeros([BLOCK, WIDTH], tl.float32)
    low = 0
    if c.window:
        before, low, middle, high = walk_span(
            first + offset, c.window - 1, 0 if c.causal else c.window - 1, keys, c.queries, c.keys
        )  # fmt: skip
        dq = _gather_queries(
            dq, queries, g, level, of_row, k, v, first, before, low, strides[1][0], strides[2][0], keys, offset,
            scale, c, True,
        )  # fmt: skip
    else:
        middle, high = _seen(first, keys, offset, c.queries, c.keys, c.causal)
    dq = _gather_queries(
        dq, queries, g, level, of_row, k, v, first, low, middle, strides[1][0], strides[2][0], keys, offset, scale,
        c, False,
    )  # fmt: skip
    dq = _gather_queries(
        dq, queries, g, level, of_row, k, v, first, middle, high, strides[1][0], strides[2][0], keys, offset,
        scale, c, True,
    )  # fmt: skip
    _store(_head(dq_out, start, head, (H * D, D)), dq * root, first, H * D, length, D, c.queries, c.width)


# ---------------------------------------------------------------------------------------------------------
# Launch.


class Hopper(NamedTuple):
    """The modules for Hopper: the forward pass, the backward pass, and the deterministic one."""

    forward: ModuleType
    backward: ModuleType
    deterministic: ModuleType


@cache
def _hopper(device: torch.device) -> Hopper | None:
    """Where the device is one: compute capability 9.0, no other."""
    if capability(device) != (9, 0):
        return None
    from . import (
        _attention_varlen_hopper,
        _attention_varlen_hopper_backward,
        _attention_varlen_hopper_backward_deterministic,
    )

    return Hopper(
        _attention_varlen_hopper,
        _attention_varlen_hopper_backward,
        _attention_varlen_hopper_backward_deterministic,
    )


def _kernels(
    hopper: Hopper,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    window: int,
    cap: float,
) -> ModuleType | None:
    """The module for Hopper that computes the gradients; None where the portable kernels do. These have windows,
    caps and heads of other columns where algorithms are to be deterministic.
    """
    T, H, _ = q.shape
    slots = T // hopper.deterministic.BLOCK + starts.shape[0] - 1
    unordered = hopper.backward.AVAILABLE and not torch.are_deterministic_algorithms_enabled()
    if unordered and cap <= LARGEST_CAP and hopper.backward.fits(H, slots):
        return hopper.backward if hopper.forward.takes(q, k, v, longest) else None
    return hopper.deterministic if not window and not cap and hopper.forward.fits(q, k, v, longest) else None


def tiles(kernel: Literal["forward", "keys", "queries"], q: torch.Tensor, longest: int) -> Tiles:
    """The tiles of a kernel, for loads through pointers, with sequences of `longest` tokens at most."""
    D = q.shape[-1]
    if q.dtype == torch.float32:
        return Tiles(16, 16, 8, 1) if D > 128 else Tiles(32, 16, 8, 1) if D > 64 else Tiles(64, 32, 4, 2)
    if not roomy(capability(q.device)):
        return modest(kernel, D)
    if kernel == "forward":
        if longest <= 512:
            # Few blocks: smaller ones use more of the device.
            return Tiles(64, 64, 4, 2)
        return Tiles(128, 64, 8, 2) if D > 64 else Tiles(128, 64, 4, 3)
    if D > 128:
        return Tiles(64, 32, 8, 2)
    if kernel == "queries":
        return Tiles(128, 64, 8, 2) if longest > 512 else Tiles(64, 64, 4, 2)
    return Tiles(64, 64, 8, 2) if D > 64 else Tiles(64, 64, 4, 2)


def listed(mine: torch.Tensor, others: torch.Tensor, tokens: int, block: int) -> tuple[torch.Tensor, int]:
    """(table, rows): the blocks of `block` tokens of all sequences, of `tokens` in all, in rows of FIELDS int32.

    As many rows as there can be blocks: each sequence has one at most that is not whole. The first number of
    row `rows`, the last, says how many there are. See `_list`.
    """
    n = mine.shape[0] - 1
    rows = tokens // block + n
    table = torch.empty((rows + 1) * FIELDS.value, dtype=torch.int32, device=mine.device)
    with on(mine):
        _list[(n,)](mine, others, table, n, rows, block, min(CHUNK, power_of_2(n)), num_warps=4)
    return table, rows


def statistics(
    grad: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    table: torch.Tensor,
    rows: int,
    block: int,
    filled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-sum-exp, delta) as `_statistics` lays them out, (H, rows, block), from a list of blocks of queries.
    Slots of no block are not written, or `filled` with +inf and 0.
    """
    T, H, D = out.shape
    level, delta = out.new_empty(2, H, rows, block, dtype=torch.float32).unbind()
    if filled:
        level.fill_(math.inf)
        delta.zero_()
    with on(out):
        _statistics[(rows * H,)](
            out, grad, lse, level, delta, table, grad.stride()[:2], T, rows, H, rows,
            D, block, tile_width(D), num_warps=8,
        )  # fmt: skip
    return level, delta


def _launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> tuple[Any, Any]:
    T, H, D = q.shape
    out = q.new_empty(q.shape)
    lse = torch.empty(H, T, dtype=torch.float32, device=q.device)
    if out.numel() == 0 or cu_seqlens_q.shape[0] == 1:
        return out, lse
    starts, key_starts = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    hopper = _hopper(q.device)
    if cap > LARGEST_CAP:
        hopper = None
    if hopper is not None and "forward" in HOPPER and hopper.forward.takes(q, k, v, max_seqlen_q):
        table, rows = listed(starts, key_starts, T, hopper.forward.unit(D))
        # By all tokens: a longest sequence that is said to be less than it is may cost time, and no window.
        window = bounded(window, T, k.shape[0])
        hopper.forward.forward(q, k, v, out, lse, table, rows, causal, window, sinks, cap)
        return out, lse
    q, k, v = row_contiguous(q), row_contiguous(k), row_contiguous(v)
    t = tiles("forward", q, max_seqlen_q)
    table, rows = listed(starts, key_starts, T, t.resident)
    c = Config(D, t.resident, t.streamed, tile_width(D), causal, window, cap)
    with on(q):
        _forward[(rows * H,)](
            q, k, v, out, lse, table, q.stride()[:2], k.stride()[:2], v.stride()[:2],
            T, rows, H, H // k.shape[1], LOG2E / math.sqrt(D), sinks, c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return out, lse


def _launch_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> tuple[Any, Any, Any, Any]:
    T, H, D = q.shape
    Tk, heads = k.shape[:2]
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    ds = like_sinks(q, sinks)
    if dq.numel() == 0 or dk.numel() == 0 or cu_seqlens_q.shape[0] == 1:
        return dq.zero_(), dk.zero_(), dv.zero_(), ds.zero_()
    starts, key_starts = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    q, k, v, grad = row_contiguous(q), row_contiguous(k), row_contiguous(v), row_contiguous(grad)
    groups = H // heads
    # By all tokens, as in the forward pass.
    window = bounded(window, T, Tk)
    hopper = _hopper(q.device) if "backward" in HOPPER else None
    if hopper is not None and (kernels := _kernels(hopper, q, k, v, starts, max_seqlen_q, window, cap)):
        block = hopper.deterministic.BLOCK
        lists = listed(starts, key_starts, T, block), listed(key_starts, starts, Tk, block)
        level, delta = statistics(grad, out, lse, *lists[0], block, filled=sinks is not None)
        grad = grad.contiguous()
        if grad.data_ptr() % 16:
            grad = grad.clone()
        options = (window, cap) if window or cap else ()
        kernels.backward(grad, q, k, v, level, delta, dq, dk, dv, *lists, causal, max_seqlen_q, *options)
        level = level.view(1, H, -1)
        planned_gradient_in_sinks(sinks, level, level.shape[2])(sinks, level, delta, ds)
        return dq, dk, dv, ds
    delta = torch.empty_like(lse)
    strides = (q.stride()[:2], k.stride()[:2], v.stride()[:2])
    root = 1 / math.sqrt(D)
    scale = LOG2E * root
    with on(q):
        _delta[(cdiv(T, 64) * H,)](out, grad, delta, grad.stride()[:2], T, H, D, 64, tile_width(D), num_warps=4)
        t = tiles("keys", q, max_seqlen_k)
        table, rows = listed(key_starts, starts, Tk, t.resident)
        c = Config(D, t.streamed, t.resident, tile_width(D), causal, window, cap)
        _backward_keys[(rows * heads,)](
            q, k, v, grad, lse, delta, dk, dv, table, strides, grad.stride()[:2], T, rows, heads, groups,
            scale, root, c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
        t = tiles("queries", q, max_seqlen_q)
        table, rows = listed(starts, key_starts, T, t.resident)
        c = Config(D, t.resident, t.streamed, tile_width(D), causal, window, cap)
        _backward_queries[(rows * H,)](
            q, k, v, grad, lse, delta, dq, table, strides, grad.stride()[:2], T, rows, H, groups,
            scale, root, c, num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    if sinks is not None:
        # Rows of no sequence were not written, in delta neither: what is read of them must count nothing.
        row = torch.arange(T, device=q.device)
        written = (row >= starts[0]) & (row < starts[-1])
        lse, delta = lse.masked_fill(~written, math.inf), delta.masked_fill(~written, 0.0)
        planned_gradient_in_sinks(sinks, lse[None], T)(sinks, lse[None], delta, ds)
    return dq, dk, dv, ds


# ---------------------------------------------------------------------------------------------------------
# Autograd.


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.constants, sinks, ctx.cap = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, cu_seqlens_q, cu_seqlens_k, *output, sinks)


def _differentiate(ctx: Any, grad: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 11
    *saved, sinks = ctx.saved_tensors
    *gradients, ds = _gradients(grad, *saved, *ctx.constants, sinks, ctx.cap)
    return *gradients, *(None,) * 6, None if sinks is None else ds, None


_attention_varlen = operator(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q,"
    " SymInt max_seqlen_k, bool causal, int window, Tensor? sinks, float cap) -> (Tensor, Tensor)",
    _launch_forward,
    lambda q, *rest: (q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)),
    _save,
    _differentiate,
)

_gradients = operator(
    "attention_varlen_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q,"
    " Tensor cu_seqlens_k, Tensor out, Tensor lse, SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal,"
    " int window, Tensor? sinks, float cap) -> (Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    lambda grad, q, k, v, *rest: (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        like_sinks(q, rest[-2]),
    ),
)
