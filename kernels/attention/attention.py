"""Attention, forward and backward: FlashAttention-2 (Dao, arXiv 2307.08691) in Triton.

The forward pass walks the keys once with an online softmax in base 2 and keeps, beside the output, one
log-sum-exp a row. The backward pass computes the probabilities again from it, in one kernel over blocks of
keys (dK, dV) and one over blocks of queries (dQ): no atomics, so that gradients are the same in every run.
On Hopper one kernel makes all three (`_attention_hopper_backward.py`), and parts of dQ are added up in no fixed
order, unless PyTorch is asked for deterministic algorithms.

A sliding window (Beltagy et al., arXiv 2004.05150) bounds both walks: blocks outside it are never visited, and of
those inside only the ones that its edges cut are masked.

Inputs may have any strides with a contiguous last dimension. From compute capability 9.0 on, long sequences
whose strides are multiples of 16 bytes are loaded by the tensor memory accelerator; everything else through
pointers, by the same kernels. On compute capability 9.0 itself, the modules
`_attention_hopper_*.py` have kernels of their own for the shapes that `_hopper.py` names; which ones run follows
from device, shapes and that switch alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .._common import capability, check, choice, on, operator, power_of_2, roomy

if TYPE_CHECKING:
    from ._attention_hopper_forward_paired import Schedule

LOG2E = 1.4426950408889634
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite fp32 number. As the first maximum of a row's scores it is below every finite one, and unlike
-inf it can be subtracted from -inf: a row whose scores are all -inf gets a weight of 0 and no NaN."""
L2_SHARE = 24 << 20
"""Bytes of K and V that the programs of one time should share: less than half of an H100's or H200's L2."""

HOPPER = ("forward", "backward")
"""Passes that the kernels for Hopper do, where they can."""

Path = Literal["pointers", "descriptors", "hopper"]
"""How tiles are loaded, and by which kernels: the portable ones through pointers or by the tensor memory
accelerator, or those for Hopper, of which the backward pass's are the two that add nothing up in memory."""


@dataclass(frozen=True)
class Tiles:
    """Rows of the resident tile, rows of the streamed tile, and how a kernel is compiled."""

    resident: int
    streamed: int
    warps: int
    stages: int


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"] = ...,
    window: int | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"] = ...,
    window: int | None = ...,
    *,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"] = "causal",
    window: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q·kᵀ / √D)·v of q (B, H, S, D), k and v (B, Hkv, S, D): (B, H, S, D), contiguous, in q's dtype.

    All three in one of bf16, fp16, fp32, on one device; D from 1 to 256; Hkv divides H, and query head h
    reads key head h // (H / Hkv). `mask` "causal" hides the keys after a query. A `window` of w, at least 1,
    hides those w or more places away: a query sees itself and the w - 1 keys before it, and under a "full" mask
    the w - 1 after it. Sums are in fp32; fp32 inputs are multiplied as fp32, not TF32.

    With `return_lse`, (output, lse): lse (B, H, S), fp32, is the natural logarithm of the sum of exponentials of
    each row's visible scores, by which outputs over several sets of keys can be merged into that over all.

    Differentiable once in q, k and v, through the output and through lse. The same inputs give the same bits on
    the same device, but for the gradient in q on Hopper (compute capability 9.0): it is summed in no fixed order,
    as that of PyTorch's own attention is. Where `torch.use_deterministic_algorithms(True)` holds when gradients
    are computed, it is deterministic too, by kernels that take 1.2 to 1.6 times as long (docs/attention.md).

    A row whose scores are all -inf, as keys with -inf in them can make them, gives zeros, an lse of -inf and zero
    gradients in k and v; the gradient in q of such keys is 0·inf = NaN, as PyTorch's is. A score of NaN or +inf,
    of the inputs or overflowed in fp32, gives NaN in its row.

    Raises `TypeError` for a wrong dtype or a window that is no integer, and `ValueError` for a wrong shape,
    device, mask or window.
    """
    choice("mask", mask, ("causal", "full"))
    check("q", q, dim=4)
    B, H, S, D = q.shape
    if not 1 <= D <= 256:
        raise ValueError(f"q has head dimension {D}, expected 1 to 256")
    check("k", k, dim=4, dtypes=(q.dtype,), like=q)
    heads = k.shape[1]
    if H and (heads == 0 or H % heads):
        raise ValueError(f"k has {heads} heads, which do not divide the {H} of q")
    check("k", k, shape=(B, heads, S, D))
    check("v", v, shape=(B, heads, S, D), dtypes=(q.dtype,), like=q)
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, int):
            raise TypeError(f"window must be an integer or None, not {type(window).__name__}")
        if window < 1:
            raise ValueError(f"window is {window}, expected at least 1")
        if window >= S:
            window = None
    output, level = _attention(q, k, v, mask == "causal", window or 0)
    if not return_lse:
        found: torch.Tensor = output
        return found
    # The kernels' is in base 2, and +inf for a row that sees nothing: 2^(score - level) is 0 then.
    return output, torch.where(level == math.inf, -math.inf, level / LOG2E)


# ---------------------------------------------------------------------------------------------------------
# Tiles: a (rows, D) block of one head of a (B, H, S, D) tensor.


@triton.jit
def _load(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, batch, head, row, stride_b, stride_h, stride_s, S, D,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Rows `row` to `row + ROWS` of a head, zero beyond D and, with TAIL, beyond S.

    The products with strides are 64-bit: a tensor of 2³¹ elements is ordinary here. The part that depends on
    `row` is a scalar, the rest does not change over a loop.
    """
    if TMA:
        tile = x.load([batch, head, row, 0]).reshape([ROWS, WIDTH])
    else:
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, WIDTH)
        start = (
            x + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + tl.cast(row, tl.int64) * stride_s
        )
        pointers = start + (rows.to(tl.int64) * stride_s)[:, None] + columns[None, :]
        if TAIL:
            tile = tl.load(pointers, mask=(row + rows < S)[:, None] & (columns < D)[None, :], other=0.0)
        elif WIDTH != D:
            tile = tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def _store(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, tile, batch, head, row, H, S, D, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Writes a tile to a contiguous (B, H, S, D) tensor."""
    rows = row + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    start = x + (batch.to(tl.int64) * H + head) * S * D
    pointers = start + (rows.to(tl.int64) * D)[:, None] + columns[None, :]
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=(rows < S)[:, None] & (columns < D)[None, :])


@triton.jit
def _write(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, tile, batch, head, row, strides, S, D, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Writes a tile to a (B, H, S, D) tensor of these strides, the last of which is 1."""
    rows = row + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    start = x + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    pointers = start + (rows.to(tl.int64) * strides[2])[:, None] + columns[None, :]
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=(rows < S)[:, None] & (columns < D)[None, :])


@triton.jit
def _place(BLOCKS, HEADS, SHARED, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(block, batch·head) of this program: heads in groups of SHARED, whose K and V stay in L2 together.

    Under a causal mask the last block has the most keys; within a group the heavy blocks go first, so that
    the light ones fill the gaps at the end.
    """
    program = tl.program_id(0)
    group = program // (SHARED * BLOCKS)
    within = program - group * SHARED * BLOCKS
    size = tl.minimum(SHARED, HEADS - group * SHARED)
    block = within // size
    if CAUSAL:
        block = BLOCKS - 1 - block
    return block, group * SHARED + within % size


@triton.jit
def _span(  # type: ignore[no-untyped-def]  # Triton's types are its own
    first, back, ahead, S, ROWS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """(low, clean, edge, high) of a walk over what rows `first` to `first + ROWS` see: row i sees i - back to
    i + ahead.

    The walk is from `low` to `high` in steps of STEP. Every row sees all of the steps from `clean` to `edge`;
    those before and after need a mask. All but `high`, and what lies at it, are multiples of STEP.
    """
    low = tl.maximum(first - back, 0) // STEP * STEP
    high = tl.minimum(first + ROWS + ahead, S)
    clean = tl.minimum(tl.cdiv(tl.maximum(first + ROWS - 1 - back, 0), STEP) * STEP, high)
    edge = tl.maximum(clean, tl.minimum(first + ahead + 1, S) // STEP * STEP)
    return low, clean, edge, high


@triton.jit
def _seen(rows, columns, S, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Whether queries `rows` see keys `columns`, which broadcast against each other."""
    # Under a causal mask keys beyond S are hidden too: they come after every row that is stored.
    seen = rows >= columns if CAUSAL else columns < S
    if WINDOW:
        seen = seen & (rows < columns + WINDOW)
        if not CAUSAL:
            seen = seen & (columns < rows + WINDOW)
    return seen


# ---------------------------------------------------------------------------------------------------------
# Forward.


@triton.jit
def _attend(  # type: ignore[no-untyped-def]  # Triton's types are its own
    total, highest, weight, q, k, v, batch, head, first, low, high,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, S, D, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW: tl.constexpr = 0,
):  # fmt: skip
    """Adds keys `low` to `high` to the state of an online softmax. `scale` includes log₂e.

    `highest` starts at LOWEST: a row may see nothing in its first blocks. It can start at -inf where none does.
    """
    rows = first + tl.arange(0, BLOCK_M)
    for start in tl.range(low, high, BLOCK_N):
        keys = _load(k, batch, head, start, stride_kb, stride_kh, stride_ks, S, D, BLOCK_N, WIDTH, TMA, MASKED)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        if MASKED:
            columns = start + tl.arange(0, BLOCK_N)
            scores = tl.where(_seen(rows[:, None], columns[None, :], S, CAUSAL, WINDOW), scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - raised[:, None])
        shrink = tl.exp2(highest - raised)
        weight = weight * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None]
        values = _load(v, batch, head, start, stride_vb, stride_vh, stride_vs, S, D, BLOCK_N, WIDTH, TMA, MASKED)
        total = tl.dot(weights.to(values.dtype), values, total, input_precision=PRECISION)
        highest = raised
    return total, highest, weight


@triton.jit(do_not_specialize=["B", "H", "shared"])
def _forward(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, out, lse, out_strides,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    B, H, S, groups, shared, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. `lse` (B, H, S) is the base-2 log of the sum of 2^score, +inf for a row
    without a visible score above -inf.
    """
    block, place = _place(tl.cdiv(S, BLOCK_M), B * H, shared, CAUSAL)
    batch, head = place // H, place % H
    first = block * BLOCK_M
    queries = _load(q, batch, head, first, stride_qb, stride_qh, stride_qs, S, D, BLOCK_M, WIDTH, TMA, True)
    total = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    low = 0
    if WINDOW:
        before, low, middle, high = _span(first, WINDOW - 1, 0 if CAUSAL else WINDOW - 1, S, BLOCK_M, BLOCK_N)
        total, highest, weight = _attend(
            total, highest, weight, queries, k, v, batch, head // groups, first, before, low,
            stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, S, D, scale,
            BLOCK_M, BLOCK_N, WIDTH, CAUSAL, True, TMA, PRECISION, WINDOW,
        )  # fmt: skip
    elif CAUSAL:
        middle = first // BLOCK_N * BLOCK_N
        high = tl.minimum(first + BLOCK_M, S)
    else:
        middle = S // BLOCK_N * BLOCK_N
        high = S
    total, highest, weight = _attend(
        total, highest, weight, queries, k, v, batch, head // groups, first, low, middle,
        stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, S, D, scale,
        BLOCK_M, BLOCK_N, WIDTH, CAUSAL, False, TMA, PRECISION, WINDOW,
    )  # fmt: skip
    total, highest, weight = _attend(
        total, highest, weight, queries, k, v, batch, head // groups, first, middle, high,
        stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, S, D, scale,
        BLOCK_M, BLOCK_N, WIDTH, CAUSAL, True, TMA, PRECISION, WINDOW,
    )  # fmt: skip
    empty = weight == 0.0
    weight = tl.where(empty, 1.0, weight)
    _write(out, total / weight[:, None], batch, head, first, out_strides, S, D, BLOCK_M, WIDTH)
    rows = first + tl.arange(0, BLOCK_M)
    level = tl.where(empty, float("inf"), highest + tl.log2(weight))
    tl.store(lse + place.to(tl.int64) * S + rows, level, mask=rows < S)


# ---------------------------------------------------------------------------------------------------------
# Backward. With P the probabilities, dP = dO·Vᵀ and delta = rowsum(O ∘ dO):
# dV = Pᵀ·dO, dS = P ∘ (dP - delta), dK = dSᵀ·Q / √D, dQ = dS·K / √D.


@triton.jit(do_not_specialize=["H", "room", "blocks"])
def _delta(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, grad, lse, delta, levels, stride_ob, stride_oh, stride_os, stride_gb, stride_gh, stride_gs, H, S, room, blocks,
    D: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """delta (B, H, room), fp32: the sum of O ∘ dO over each row, 0 beyond S. Where there is more room than rows, the
    log-sum-exp with as much, +inf beyond S, in `levels`.
    """
    program = tl.program_id(0)
    place, first = program // blocks, program % blocks * BLOCK_M
    batch, head = place // H, place % H
    a = _load(out, batch, head, first, stride_ob, stride_oh, stride_os, S, D, BLOCK_M, WIDTH, False, True)
    b = _load(grad, batch, head, first, stride_gb, stride_gh, stride_gs, S, D, BLOCK_M, WIDTH, False, True)
    rows = first + tl.arange(0, BLOCK_M)
    sums = tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)
    tl.store(delta + place.to(tl.int64) * room + rows, sums, mask=rows < room)
    if room != S:
        level = tl.load(lse + place.to(tl.int64) * S + rows, mask=rows < S, other=float("inf"))
        tl.store(levels + place.to(tl.int64) * room + rows, level, mask=rows < room)


@triton.jit
def _gather_keys(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dk, dv, keys, values, q, grad, lse, delta, batch, head, place, first, low, high,
    stride_qb, stride_qh, stride_qs, stride_gb, stride_gh, stride_gs, S, D, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, RAGGED: tl.constexpr,
    CAUSAL: tl.constexpr = True, WINDOW: tl.constexpr = 0,
):  # fmt: skip
    """Adds queries `low` to `high` of one head to dK and dV of a block of keys. Scores are transposed here.

    Rows beyond S, which there are where S is RAGGED, are zeros with a log-sum-exp of +inf, and so have
    probabilities of 0 but for keys of -inf: 0 · -inf is NaN.
    """
    columns = first + tl.arange(0, BLOCK_N)
    for start in tl.range(low, high, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        queries = _load(q, batch, head, start, stride_qb, stride_qh, stride_qs, S, D, BLOCK_M, WIDTH, TMA, True)
        level = tl.load(lse + place.to(tl.int64) * S + rows, mask=rows < S, other=float("inf"))
        scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        exponents = scores * scale - level[None, :]
        if MASKED:
            seen = _seen(rows[None, :], columns[:, None], S, CAUSAL, WINDOW)
            exponents = tl.where(seen, exponents, float("-inf"))
        weights = tl.exp2(exponents)
        if RAGGED:
            weights = tl.where((rows < S)[None, :], weights, 0.0)
        g = _load(grad, batch, head, start, stride_gb, stride_gh, stride_gs, S, D, BLOCK_M, WIDTH, TMA, True)
        dv = tl.dot(weights.to(g.dtype), g, dv, input_precision=PRECISION)
        mean = tl.load(delta + place.to(tl.int64) * S + rows, mask=rows < S, other=0.0)
        change = tl.dot(values, tl.trans(g), input_precision=PRECISION)
        change = weights * (change - mean[None, :])
        dk = tl.dot(change.to(queries.dtype), queries, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["B", "H", "shared"])
def _backward_keys(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, grad, lse, delta, dk_out, dv_out, dk_strides, dv_strides,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_gb, stride_gh, stride_gs, B, H, S, groups, shared, scale, root,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one key head, over all its query heads. `root` is 1/√D."""
    # Under a causal mask the first block of keys is the heaviest: the natural order is the right one.
    block, place = _place(tl.cdiv(S, BLOCK_N), B * (H // groups), shared, False)
    batch, head = place // (H // groups), place % (H // groups)
    first = block * BLOCK_N
    keys = _load(k, batch, head, first, stride_kb, stride_kh, stride_ks, S, D, BLOCK_N, WIDTH, TMA, True)
    values = _load(v, batch, head, first, stride_vb, stride_vh, stride_vs, S, D, BLOCK_N, WIDTH, TMA, True)
    dk = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    for member in tl.range(0, groups, num_stages=1):
        query_head = head * groups + member
        row = batch * H + query_head
        middle = 0
        edge = S
        if WINDOW:
            low, middle, edge, high = _span(
                first, 0 if CAUSAL else WINDOW - 1, WINDOW - 1, S, BLOCK_N, BLOCK_M
            )  # fmt: skip
        elif CAUSAL:
            low = first // BLOCK_M * BLOCK_M
            middle = tl.cdiv(first + BLOCK_N, BLOCK_M) * BLOCK_M
        if CAUSAL or WINDOW:
            dk, dv = _gather_keys(
                dk, dv, keys, values, q, grad, lse, delta, batch, query_head, row, first, low,
                tl.minimum(middle, S), stride_qb, stride_qh, stride_qs, stride_gb, stride_gh, stride_gs, S, D,
                scale, BLOCK_M, BLOCK_N, WIDTH, True, TMA, PRECISION, RAGGED, CAUSAL, WINDOW,
            )  # fmt: skip
        dk, dv = _gather_keys(
            dk, dv, keys, values, q, grad, lse, delta, batch, query_head, row, first, middle,
            edge, stride_qb, stride_qh, stride_qs, stride_gb, stride_gh, stride_gs, S, D,
            scale, BLOCK_M, BLOCK_N, WIDTH, False, TMA, PRECISION, RAGGED,
        )  # fmt: skip
        if WINDOW:
            dk, dv = _gather_keys(
                dk, dv, keys, values, q, grad, lse, delta, batch, query_head, row, first, edge,
                high, stride_qb, stride_qh, stride_qs, stride_gb, stride_gh, stride_gs, S, D,
                scale, BLOCK_M, BLOCK_N, WIDTH, True, TMA, PRECISION, RAGGED, CAUSAL, WINDOW,
            )  # fmt: skip
    _write(dk_out, dk * root, batch, head, first, dk_strides, S, D, BLOCK_N, WIDTH)
    _write(dv_out, dv, batch, head, first, dv_strides, S, D, BLOCK_N, WIDTH)


@triton.jit
def _gather_queries(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dq, queries, g, level, mean, k, v, batch, head, first, low, high,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, S, D, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW: tl.constexpr = 0,
):  # fmt: skip
    """Adds keys `low` to `high` to dQ of a block of queries."""
    rows = first + tl.arange(0, BLOCK_M)
    for start in tl.range(low, high, BLOCK_N):
        keys = _load(k, batch, head, start, stride_kb, stride_kh, stride_ks, S, D, BLOCK_N, WIDTH, TMA, MASKED)
        values = _load(v, batch, head, start, stride_vb, stride_vh, stride_vs, S, D, BLOCK_N, WIDTH, TMA, MASKED)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        exponents = scores * scale - level[:, None]
        if MASKED:
            # Keys beyond S are zeros, but 2^(0 - level) can overflow, and inf · 0 is NaN.
            columns = start + tl.arange(0, BLOCK_N)
            seen = _seen(rows[:, None], columns[None, :], S, CAUSAL, WINDOW)
            exponents = tl.where(seen, exponents, float("-inf"))
        weights = tl.exp2(exponents)
        change = tl.dot(g, tl.trans(values), input_precision=PRECISION)
        change = weights * (change - mean[:, None])
        dq = tl.dot(change.to(keys.dtype), keys, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["B", "H", "shared"])
def _backward_queries(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, grad, lse, delta, dq_out, dq_strides,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_gb, stride_gh, stride_gs, B, H, S, groups, shared, scale, root,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head."""
    block, place = _place(tl.cdiv(S, BLOCK_M), B * H, shared, CAUSAL)
    batch, head = place // H, place % H
    first = block * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    queries = _load(q, batch, head, first, stride_qb, stride_qh, stride_qs, S, D, BLOCK_M, WIDTH, TMA, True)
    g = _load(grad, batch, head, first, stride_gb, stride_gh, stride_gs, S, D, BLOCK_M, WIDTH, TMA, True)
    level = tl.load(lse + place.to(tl.int64) * S + rows, mask=rows < S, other=float("inf"))
    mean = tl.load(delta + place.to(tl.int64) * S + rows, mask=rows < S, other=0.0)
    dq = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    low = 0
    if WINDOW:
        before, low, middle, high = _span(first, WINDOW - 1, 0 if CAUSAL else WINDOW - 1, S, BLOCK_M, BLOCK_N)
        dq = _gather_queries(
            dq, queries, g, level, mean, k, v, batch, head // groups, first, before, low,
            stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, S, D, scale,
            BLOCK_M, BLOCK_N, WIDTH, CAUSAL, True, TMA, PRECISION, WINDOW,
        )  # fmt: skip
    elif CAUSAL:
        middle = first // BLOCK_N * BLOCK_N
        high = tl.minimum(first + BLOCK_M, S)
    else:
        middle = S // BLOCK_N * BLOCK_N
        high = S
    dq = _gather_queries(
        dq, queries, g, level, mean, k, v, batch, head // groups, first, low, middle,
        stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, S, D, scale,
        BLOCK_M, BLOCK_N, WIDTH, CAUSAL, False, TMA, PRECISION, WINDOW,
    )  # fmt: skip
    dq = _gather_queries(
        dq, queries, g, level, mean, k, v, batch, head // groups, first, middle, high,
        stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs, S, D, scale,
        BLOCK_M, BLOCK_N, WIDTH, CAUSAL, True, TMA, PRECISION, WINDOW,
    )  # fmt: skip
    _write(dq_out, dq * root, batch, head, first, dq_strides, S, D, BLOCK_M, WIDTH)


# ---------------------------------------------------------------------------------------------------------
# Launch.


class Hopper(NamedTuple):
    """The modules for Hopper: what they share; the forward pass with a tile scheduler, and with paired tiles; the
    backward pass, and the deterministic one.
    """

    common: ModuleType
    forward: ModuleType
    paired: ModuleType
    backward: ModuleType
    deterministic: ModuleType


@cache
def _hopper(device: torch.device) -> Hopper | None:
    """Where the device is one: compute capability 9.0, no other."""
    if capability(device) != (9, 0):
        return None
    from . import (
        _attention_hopper_backward,
        _attention_hopper_backward_deterministic,
        _attention_hopper_forward,
        _attention_hopper_forward_paired,
    )
    from . import _hopper as common

    return Hopper(
        common,
        _attention_hopper_forward,
        _attention_hopper_forward_paired,
        _attention_hopper_backward,
        _attention_hopper_backward_deterministic,
    )


def tiles(kernel: Literal["forward", "keys", "queries"], q: torch.Tensor, window: int = 0) -> Tiles:
    """The tiles of a kernel: as large as shared memory and registers hold.

    Hopper and the Blackwell of data centres have 227 KiB of shared memory and matrix instructions that read it;
    others have at least 99 KiB.
    """
    D = q.shape[-1]
    if q.dtype == torch.float32:
        return Tiles(32, 32, 4, 1) if D > 64 else Tiles(64, 32, 4, 2)
    if not roomy(capability(q.device)):
        return modest(kernel, D)
    if kernel == "forward":
        if q.shape[2] <= 512:
            # Few blocks: smaller ones use more of the device.
            return Tiles(64, 64, 4, 2)
        if D > 64:
            # Four warps have no registers for the loops that a window adds.
            return Tiles(128, 64, 8 if D > 128 or window else 4, 2)
        return Tiles(128, 128, 8, 3)
    if D > 128:
        return Tiles(64, 32, 8, 2)
    if kernel == "queries":
        return Tiles(128, 64, 8, 3)
    return Tiles(64, 64, 4, 2) if D > 64 else Tiles(64, 64, 4, 3)


def modest(kernel: Literal["forward", "keys", "queries"], D: int) -> Tiles:
    """For 16-bit numbers in 99 KiB of shared memory."""
    if D > 128:
        return Tiles(32 if kernel == "keys" else 64, 32, 4, 1)
    return Tiles(64, 32, 4, 2) if D > 64 else Tiles(64, 64, 4, 2)


def _precision(dtype: torch.dtype) -> str:
    """fp32 means fp32; for the others the argument has no effect."""
    return "ieee" if dtype == torch.float32 else "tf32"


def _width(D: int) -> int:
    """Columns of a tile: a power of two that a matrix instruction takes."""
    return max(16, power_of_2(D))


def _plain(x: torch.Tensor) -> torch.Tensor:
    """With a contiguous last dimension."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _tma(*tensors: torch.Tensor) -> bool:
    """Whether tiles are loaded by the tensor memory accelerator: in bf16 and fp16 from 1024 rows on, since
    descriptors cost host time, and where addresses and strides are in units of 16 bytes.
    """
    first = tensors[0]
    if capability(first.device)[0] < 9 or first.shape[2] < 1024 or first.element_size() != 2:
        return False
    return all(
        x.data_ptr() % 16 == 0
        and x.stride(-1) == 1
        and all(
            0 < stride < 1 << 40 and stride * x.element_size() % 16 == 0
            for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)
            if size > 1
        )
        for x in tensors
    )


def _descriptors(path: Path | None, *tensors: torch.Tensor) -> bool:
    """Whether the portable kernels load by the tensor memory accelerator: as asked for, or where they can.

    Raises `NotImplementedError` where what is asked for cannot be.
    """
    if path == "pointers":
        return False
    if path == "hopper":
        raise NotImplementedError("the kernels for Hopper do not take these inputs on this device")
    tma = _tma(*tensors)
    if path is not None and not tma:
        raise NotImplementedError("descriptors cannot describe these inputs on this device")
    return tma


def _tile(x: torch.Tensor, rows: int, tma: bool) -> Any:
    """What a kernel loads tiles from: a descriptor of (1, 1, rows, width) blocks, or the tensor itself."""
    if not tma:
        return x
    # The stride of a dimension of one is arbitrary; a descriptor wants a valid one all the same.
    strides = [stride if size > 1 else x.shape[-1] * 16 for stride, size in zip(x.stride(), x.shape, strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:-1], 1], [1, 1, rows, _width(x.shape[-1])])


def like(x: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor of the same shape, in the order of the same dimensions, the last one contiguous."""
    new = torch.empty_like(x)
    return new if new.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def _shared(k: torch.Tensor, groups: int) -> int:
    """How many query heads work at a time so that their K and V stay in L2."""
    S, D = k.shape[2:]
    return max(1, L2_SHARE // (2 * S * D * k.element_size())) * groups


def _launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int = 0,
    path: Path | None = None,
    schedule: Schedule | None = None,
) -> tuple[Any, Any]:
    """The output and its log-sum-exp in base 2, +inf where nothing is seen. A window of 0 is none.

    The best path that inputs and device allow, unless one is asked for; that one, or `NotImplementedError`. With a
    schedule, the kernel for Hopper is that of pairs of tiles.
    """
    B, H, S, D = q.shape
    lse = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    hopper = _hopper(q.device) if path in (None, "hopper") and "forward" in HOPPER else None
    out = like(q)
    if out.numel() == 0:
        return out, lse
    if hopper is not None and hopper.common.fits(q, k, v, hopper.common.FORWARD_WIDTHS):
        if power_of_2(D) in hopper.forward.DIVISIONS and schedule is None:
            groups = H // k.shape[1]
            # With a full mask all tiles are as long: those of one key head at a time, which read the same keys.
            # Under a short window neighbours of a head do, and others share nothing.
            together = _shared(k, groups) if causal else groups
            if 0 < 4 * window <= S:
                together = B * H
            hopper.forward.forward(q, k, v, out, lse, causal, window, together)
        else:
            hopper.paired.forward(q, k, v, out, lse, causal, window, schedule)
        return out, lse
    q, k, v = _plain(q), _plain(k), _plain(v)
    groups = H // k.shape[1]
    t = tiles("forward", q, window)
    tma = _descriptors(path, q, k, v)
    with on(q):
        _forward[(triton.cdiv(S, t.resident) * B * H,)](
            _tile(q, t.resident, tma), _tile(k, t.streamed, tma), _tile(v, t.streamed, tma), out, lse,
            out.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            B, H, S, groups, _shared(k, groups), LOG2E / math.sqrt(D),
            D, t.resident, t.streamed, _width(D), causal, tma, _precision(q.dtype), window,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return out, lse


def _launch_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    window: int = 0,
    grad_lse: torch.Tensor | None = None,
    path: Path | None = None,
) -> tuple[Any, Any, Any]:
    """dQ, dK and dV. `lse` and the gradient in it are of base 2. `path` as in `_launch_forward`; the fused kernel
    for Hopper is taken where none is asked for, nor PyTorch for deterministic algorithms.
    """
    B, H, S, D = q.shape
    Hkv = k.shape[1]
    dq, dk, dv = like(q), like(k), like(v)
    if dq.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    q, k, v, grad = _plain(q), _plain(k), _plain(v), _plain(grad)
    groups = H // Hkv
    hopper = _hopper(q.device) if path in (None, "hopper") and "backward" in HOPPER else None
    if hopper is not None and not hopper.common.fits(q, k, v):
        hopper = None
    # The kernels for Hopper have statistics of whole blocks of 128 rows.
    room = S if hopper is None else triton.cdiv(S, 128) * 128
    delta = torch.empty(B, H, room, dtype=torch.float32, device=q.device)
    level = lse if room == S else torch.empty_like(delta)
    blocks = triton.cdiv(room, 64)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3])
    root = 1 / math.sqrt(D)
    scale = LOG2E * root
    with on(q):
        _delta[(blocks * B * H,)](
            out, grad, lse, delta, level, *out.stride()[:3], *grad.stride()[:3], H, S, room, blocks,
            D, 64, _width(D), num_warps=4,
        )  # fmt: skip
        if grad_lse is not None:
            # A row's log-sum-exp has the probabilities for its derivative: dS = P ∘ (dP + dlse - delta).
            delta[..., :S].sub_(grad_lse, alpha=LOG2E)
        if hopper is not None:
            tensors = (hopper.common.mapped(grad), q, k, v, level, delta, dq, dk, dv)
            fixed = path == "hopper" or torch.are_deterministic_algorithms_enabled()
            kernels = hopper.deterministic if fixed or not hopper.backward.AVAILABLE else hopper.backward
            kernels.backward(*tensors, causal, window)
            return dq, dk, dv
        tma = _descriptors(path, q, k, v, grad)
        t = tiles("keys", q)
        _backward_keys[(triton.cdiv(S, t.resident) * B * Hkv,)](
            _tile(q, t.streamed, tma), _tile(k, t.resident, tma), _tile(v, t.resident, tma),
            _tile(grad, t.streamed, tma), lse, delta, dk, dv, dk.stride()[:3], dv.stride()[:3], *strides,
            B, H, S, groups, max(1, _shared(k, groups) // groups // groups), scale, root,
            D, t.streamed, t.resident, _width(D), causal, tma, _precision(q.dtype), window, S % t.streamed != 0,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
        t = tiles("queries", q)
        _backward_queries[(triton.cdiv(S, t.resident) * B * H,)](
            _tile(q, t.resident, tma), _tile(k, t.streamed, tma), _tile(v, t.streamed, tma),
            _tile(grad, t.resident, tma), lse, delta, dq, dq.stride()[:3], *strides,
            B, H, S, groups, _shared(k, groups), scale, root,
            D, t.resident, t.streamed, _width(D), causal, tma, _precision(q.dtype), window,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return dq, dk, dv


# ---------------------------------------------------------------------------------------------------------
# Autograd.


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.causal, ctx.window = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(
    ctx: Any, grad: torch.Tensor | None, grad_lse: torch.Tensor | None
) -> tuple[Any, Any, Any, None, None]:
    if grad is None and grad_lse is None:
        return None, None, None, None, None
    saved = ctx.saved_tensors
    grad = torch.zeros_like(saved[3]) if grad is None else grad
    return (*_gradients(grad, *saved, ctx.causal, ctx.window, grad_lse), None, None)


_attention = operator(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, int window) -> (Tensor, Tensor)",
    _launch_forward,
    lambda q, k, v, *_: (like(q), q.new_empty(q.shape[:3], dtype=torch.float32)),
    _save,
    _differentiate,
)

_gradients = operator(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal,"
    " int window, Tensor? grad_lse) -> (Tensor, Tensor, Tensor)",
    _launch_backward,
    lambda grad, q, k, v, *_: (like(q), like(k), like(v)),
)
