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
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .._common import capability, check, choice, on, operator, power_of_2, roomy
from .._launch import Launch, prepared, room
from .._online_softmax import weighted

if TYPE_CHECKING:
    from ._attention_hopper_forward_paired import Schedule

LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite fp32 number. As the first maximum of a row's scores it is below every finite one, and unlike
-inf it can be subtracted from -inf: a row whose scores are all -inf gets a weight of 0 and no NaN."""
SHORT = (512, 256)
"""Sequences shorter than this, at D up to 64 and above, take the portable forward kernel: setting up barriers and
tensor maps for Hopper's takes an H200 as long again as a head of 64 tokens.
"""
L2_SHARE = 24 << 20
"""Bytes of K and V that the programs of one time should share: less than half of an H100's or H200's L2."""

HOPPER = ("forward", "backward")
"""Passes that the kernels for Hopper do, where they can."""
TAKEN = frozenset({("forward", "sinks"), ("forward", "cap"), ("backward", "sinks"), ("backward", "cap")})
"""By pass what those kernels do of sinks and caps; the rest is the portable kernels'."""

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
    sinks: torch.Tensor | None = ...,
    cap: float = ...,
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
    sinks: torch.Tensor | None = ...,
    cap: float = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"] = "causal",
    window: int | None = None,
    return_lse: bool = False,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q·kᵀ / √D)·v of q (B, H, S, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv): (B, H, S, Dv), in q's dtype,
    stored in the order of q's dimensions, the last one contiguous.

    All three in one of bf16, fp16, fp32, on one device; D and Dv from 1 to 256; Hkv divides H, and query head h
    reads key head h // (H / Hkv). The last query and the last key are in one place: `mask` "causal" hides the keys
    after a query, so that query i sees the first Sk - S + i + 1, none where that is not positive. A `window` of
    w, at least 1, hides those w or more places away: a query sees the key in its place and the w - 1 before it,
    and under a "full" mask the w - 1 after it. Sums are in fp32; fp32 inputs are multiplied as fp32, not TF32.

    A `cap` above 0 makes scores cap · tanh(score / cap), before the mask. `sinks` (H,), in bf16, fp16 or fp32, are
    one more logit a head in the softmax's denominator, which has no value and no cap. With Dv other than D the
    portable kernels run, and so they do for gradients with a cap that are to be deterministic. On Hopper tanh of
    bf16 inputs has a relative error of up to 2^-11.

    With `return_lse`, (output, lse): lse (B, H, S), fp32, is the natural logarithm of the sum of exponentials of
    each row's visible scores, its sink among them, by which outputs over several sets of keys can be merged into
    that over all.

    Differentiable once in q, k, v and sinks, through the output and through lse. The same inputs give the same
    bits on the same device, but for the gradient in q on Hopper (compute capability 9.0): it is summed in no fixed
    order, as that of PyTorch's own attention is. Where `torch.use_deterministic_algorithms(True)` holds when
    gradients are computed, it is deterministic too, by kernels that take 1.2 to 1.6 times as long
    (docs/attention.md).

    A row that sees no key, or whose scores are all -inf, as keys with -inf in them can make them, gives zeros,
    an lse of -inf and zero gradients in k and v; the gradient in q of such keys is 0·inf = NaN, as PyTorch's
    is. A score of NaN or +inf, of the inputs or overflowed in fp32, gives NaN in its row.

    Raises `TypeError` for a wrong dtype or a window that is no integer, and `ValueError` for a wrong shape,
    device, mask, window or cap.
    """
    choice("mask", mask, ("causal", "full"))
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, int):
            raise TypeError(f"window must be an integer or None, not {type(window).__name__}")
        if window < 1:
            raise ValueError(f"window is {window}, expected at least 1")
    output, level = _attention(q, k, v, mask == "causal", window or 0, sinks, float(cap))
    if not return_lse:
        found: torch.Tensor = output
        return found
    return output, _natural(level)


def attention_into(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Literal["causal", "full"]
) -> torch.Tensor:
    """Writes `attention` of q, k, v to `out`, of the output's shape and dtype, its last dimension contiguous, and
    gives its log-sum-exp. It may be a part of a larger tensor. Not differentiable.

    Raises as `attention` does, for `out` as well.
    """
    choice("mask", mask, ("causal", "full"))
    _check(q, k, v, mask == "causal", 0, None, 0.0)
    check("out", out, dtypes=(q.dtype,), shape=(*q.shape[:3], v.shape[3]), like=q)
    if out.stride(-1) != 1 and out.shape[-1] > 1:
        raise ValueError("out must have a contiguous last dimension")
    with on(q):
        return _natural(_launch_forward(q, k, v, mask == "causal", out=out)[1])


def _natural(level: torch.Tensor) -> torch.Tensor:
    """The kernels' log-sum-exp is in base 2, and +inf for a row that sees nothing: 2^(score - level) is 0 then."""
    return torch.where(level == math.inf, -math.inf, level / LOG2E)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int,
    sinks: torch.Tensor | None,
    cap: float,
) -> None:
    """Raises what `attention` says."""
    check("q", q, dim=4)
    B, H, _, D = q.shape
    if not 1 <= D <= 256:
        raise ValueError(f"q has head dimension {D}, expected 1 to 256")
    check("k", k, dim=4, dtypes=(q.dtype,), like=q)
    heads, Sk = k.shape[1:3]
    if H and (heads == 0 or H % heads):
        raise ValueError(f"k has {heads} heads, which do not divide the {H} of q")
    check("k", k, shape=(B, heads, Sk, D))
    check("v", v, dim=4, dtypes=(q.dtype,), like=q)
    Dv = v.shape[3]
    if not 1 <= Dv <= 256:
        raise ValueError(f"v has head dimension {Dv}, expected 1 to 256")
    check("v", v, shape=(B, heads, Sk, Dv))
    if sinks is not None:
        check("sinks", sinks, shape=(H,), like=q)
    if not 0 <= cap < math.inf:
        raise ValueError(f"cap is {cap}, expected a number above 0, or 0 for none")


def _bounded(window: int, S: int, Sk: int) -> int:
    """A window that hides nothing is none, which is 0."""
    return window if window < max(S, Sk) else 0


# ---------------------------------------------------------------------------------------------------------
# Tiles: a (rows, D) block of one head of a (B, H, S, D) tensor, whose first three strides come as a tuple.


@dataclass(frozen=True)
class Config:
    """A kernel at compile time: head dimension, rows of a block of queries and of keys, columns of a tile, the
    mask, a window of 0 being none, whether the tensor memory accelerator loads, whether the last block of queries
    is not whole, a cap of scores, 0 being none, and dimension and columns of values.
    """

    D: int
    queries: int
    keys: int
    width: int
    causal: bool
    window: int
    tma: bool
    ragged: bool
    cap: float
    Dv: int
    width_v: int


def _config(
    q: torch.Tensor, v: torch.Tensor, t: Tiles, of_keys: bool, causal: bool, window: int, tma: bool, cap: float
) -> Config:
    """Of tiles whose resident side are queries or, with `of_keys`, keys."""
    queries, keys = (t.streamed, t.resident) if of_keys else (t.resident, t.streamed)
    D, Dv = q.shape[-1], v.shape[-1]
    ragged = of_keys and q.shape[2] % queries != 0
    return Config(D, queries, keys, _width(D), causal, window, tma, ragged, cap, Dv, _width(Dv))


@triton.jit
def _load(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, batch, head, row, strides, S, D,
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
            x
            + batch.to(tl.int64) * strides[0]
            + head.to(tl.int64) * strides[1]
            + tl.cast(row, tl.int64) * strides[2]
        )
        pointers = start + (rows.to(tl.int64) * strides[2])[:, None] + columns[None, :]
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
    """Writes a tile to a (B, H, S, D) tensor."""
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
    i + ahead. `first` may be negative.

    The walk is from `low` to `high` in steps of STEP. Every row sees all of the steps from `clean` to `edge`;
    those before and after need a mask. All but `high`, and what lies at it, are multiples of STEP.
    """
    low = tl.maximum(first - back, 0) // STEP * STEP
    high = tl.maximum(tl.minimum(first + ROWS + ahead, S), 0)
    clean = tl.minimum(tl.cdiv(tl.maximum(first + ROWS - 1 - back, 0), STEP) * STEP, high)
    edge = tl.maximum(clean, tl.minimum(tl.maximum(first + ahead + 1, 0), S) // STEP * STEP)
    return low, clean, edge, high


@triton.jit
def _seen(rows, columns, S, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Whether queries at places `rows` see keys `columns`, of S, which broadcast against each other."""
    # Under a causal mask keys beyond S are hidden too: they come after every row that is stored.
    seen = rows >= columns if CAUSAL else columns < S
    if WINDOW:
        seen = seen & (rows < columns + WINDOW)
        if not CAUSAL:
            seen = seen & (columns < rows + WINDOW)
    return seen


@triton.jit
def _capped(scores, scale, CAP: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(scores, slope): CAP · tanh(score / CAP) of scores that `scale`, with its log₂e, makes those of base 2, in
    the same units, and its derivative. tanh(x) = 1 - 2 / (1 + e^2x), in base 2 as well.
    """
    level = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale * (2.0 / CAP))))
    return level * (CAP * _LOG2E / scale), 1.0 - level * level


# ---------------------------------------------------------------------------------------------------------
# Forward. A query's place is counted in keys: the last query and the last key are in one place.


@triton.jit
def _attend(  # type: ignore[no-untyped-def]  # Triton's types are its own
    state, q, k, v, batch, head, first, low, high, k_strides, v_strides, S, scale, c: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds keys `low` to `high`, of S, to the state of an online softmax of queries from place `first` on:
    (sums, row max, row sum). `scale` includes log₂e.

    The row max starts at LOWEST: a row may see nothing in its first blocks.
    """
    total, row_max, row_sum = state
    rows = first + tl.arange(0, c.queries)
    for start in tl.range(low, high, c.keys):
        keys = _load(k, batch, head, start, k_strides, S, c.D, c.keys, c.width, c.tma, MASKED)
        # S = Q·Kᵀ
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if c.cap > 0:
            scores, _ = _capped(scores, scale, c.cap)
        if MASKED:
            columns = start + tl.arange(0, c.keys)
            scores = tl.where(_seen(rows[:, None], columns[None, :], S, c.causal, c.window), scores, float("-inf"))
        weights, correction, row_max, row_sum = weighted(scores, row_max, row_sum, scale)
        total = total * correction[:, None]
        values = _load(v, batch, head, start, v_strides, S, c.Dv, c.keys, c.width_v, c.tma, MASKED)
        # O += P·V
        total = tl.dot(weights.to(values.dtype), values, total, input_precision="ieee")
    return total, row_max, row_sum


@triton.jit(do_not_specialize=["B", "H", "shared"])
def _forward(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, B, H, Sq, Sk, groups, shared, scale, sinks,
    c: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. `lse` (B, H, Sq) is the base-2 log of the sum of 2^score, +inf for a row
    without a visible score above -inf. `sinks` (H,) are logits beside the scores, without values; None for none.
    """
    BLOCK: tl.constexpr = c.queries
    WIDTH: tl.constexpr = c.width_v
    block, place = _place(tl.cdiv(Sq, c.queries), B * H, shared, c.causal)
    batch, head = place // H, place % H
    row = block * c.queries
    first = row + Sk - Sq
    queries = _load(q, batch, head, row, q_strides, Sq, c.D, c.queries, c.width, c.tma, True)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    row_max = tl.full([BLOCK], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2E
        row_max = tl.maximum(row_max, sink)
        row_sum = tl.exp2(sink - row_max)
    state = (total, row_max, row_sum)
    low = 0
    if c.window:
        before, low, middle, high = _span(
            first, c.window - 1, 0 if c.causal else c.window - 1, Sk, c.queries, c.keys
        )  # fmt: skip
        state = _attend(
            state,
            queries,
            k,
            v,
            batch,
            head // groups,
            first,
            before,
            low,
            k_strides,
            v_strides,
            Sk,
            scale,
            c,
            True,
        )
    elif c.causal:
        middle = tl.maximum(first, 0) // c.keys * c.keys
        high = tl.maximum(tl.minimum(first + c.queries, Sk), 0)
    else:
        middle = Sk // c.keys * c.keys
        high = Sk
    state = _attend(
        state, queries, k, v, batch, head // groups, first, low, middle, k_strides, v_strides, Sk, scale, c, False
    )
    state = _attend(
        state, queries, k, v, batch, head // groups, first, middle, high, k_strides, v_strides, Sk, scale, c, True
    )
    total, row_max, row_sum = state
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    _write(out, total / row_sum[:, None], batch, head, row, out_strides, Sq, c.Dv, c.queries, c.width_v)
    rows = row + tl.arange(0, c.queries)
    level = tl.where(empty, float("inf"), row_max + tl.log2(row_sum))
    tl.store(lse + place.to(tl.int64) * Sq + rows, level, mask=rows < Sq)


# ---------------------------------------------------------------------------------------------------------
# Backward. With P the probabilities, dP = dO·Vᵀ and delta = rowsum(O ∘ dO):
# dV = Pᵀ·dO, dS = P ∘ (dP - delta), dK = dSᵀ·Q / √D, dQ = dS·K / √D.


@triton.jit(do_not_specialize=["H", "blocks"])
def _delta(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, grad, delta, out_strides, grad_strides, H, S, blocks,
    D: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """delta (B, H, S), fp32: the sum of O ∘ dO over each row."""
    program = tl.program_id(0)
    place, first = program // blocks, program % blocks * BLOCK_M
    batch, head = place // H, place % H
    a = _load(out, batch, head, first, out_strides, S, D, BLOCK_M, WIDTH, False, True)
    b = _load(grad, batch, head, first, grad_strides, S, D, BLOCK_M, WIDTH, False, True)
    rows = first + tl.arange(0, BLOCK_M)
    sums = tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)
    tl.store(delta + place.to(tl.int64) * S + rows, sums, mask=rows < S)


@triton.jit
def with_queries(  # type: ignore[no-untyped-def]  # Triton's types are its own
    sums, keys, values, q, grad, lse, delta, batch, head, place, first, start, q_strides, grad_strides, sizes,
    scale, c: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(dK, dV) of a block of keys from `first` on with the tile of queries from `start` on of one head added.
    Scores are transposed here. `sizes` are those of queries and keys.

    Rows beyond the last query, which there are where it is ragged, are zeros with a log-sum-exp of +inf, and so
    have probabilities of 0 but for keys of -inf: 0 · -inf is NaN.
    """
    dk, dv = sums
    Sq, Sk = sizes
    columns = first + tl.arange(0, c.keys)
    rows = start + tl.arange(0, c.queries)
    queries = _load(q, batch, head, start, q_strides, Sq, c.D, c.queries, c.width, c.tma, True)
    level = tl.load(lse + place.to(tl.int64) * Sq + rows, mask=rows < Sq, other=float("inf"))
    # Sᵀ = K·Qᵀ
    scores = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    if c.cap > 0:
        scores, slope = _capped(scores, scale, c.cap)
    exponents = scores * scale - level[None, :]
    if MASKED:
        seen = _seen((rows + (Sk - Sq))[None, :], columns[:, None], Sk, c.causal, c.window)
        exponents = tl.where(seen, exponents, float("-inf"))
    # P = 2^(S·scale - lse)
    weights = tl.exp2(exponents)
    if c.ragged:
        weights = tl.where((rows < Sq)[None, :], weights, 0.0)
    g = _load(grad, batch, head, start, grad_strides, Sq, c.Dv, c.queries, c.width_v, c.tma, True)
    # dV += Pᵀ·dO
    dv = tl.dot(weights.to(g.dtype), g, dv, input_precision="ieee")
    of_row = tl.load(delta + place.to(tl.int64) * Sq + rows, mask=rows < Sq, other=0.0)
    # dPᵀ = V·dOᵀ
    dp = tl.dot(values, tl.trans(g), input_precision="ieee")
    # dS = P ∘ (dP - delta)
    ds = weights * (dp - of_row[None, :])
    if c.cap > 0:
        ds = ds * slope
    # dK += dSᵀ·Q
    dk = tl.dot(ds.to(queries.dtype), queries, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _gather_keys(  # type: ignore[no-untyped-def]  # Triton's types are its own
    sums, keys, values, q, grad, lse, delta, batch, head, place, first, low, high, q_strides, grad_strides, sizes,
    scale, c: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(dK, dV) of a block of keys from `first` on with queries `low` to `high` of one head added."""
    for start in tl.range(low, high, c.queries):
        sums = with_queries(
            sums, keys, values, q, grad, lse, delta, batch, head, place, first, start, q_strides, grad_strides,
            sizes, scale, c, MASKED,
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["B", "H", "shared"])
def _backward_keys(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, grad, lse, delta, dk_out, dv_out, strides, grad_strides, out_strides, B, H, Sq, Sk, groups, shared,
    scale, root, c: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one key head, over all its query heads. `strides` are those of q, k, v,
    `out_strides` of dK and dV; `root` is 1/√D.
    """
    BLOCK: tl.constexpr = c.keys
    WIDTH: tl.constexpr = c.width
    WIDTH_V: tl.constexpr = c.width_v
    # Under a causal mask the first block of keys is the heaviest: the natural order is the right one.
    block, place = _place(tl.cdiv(Sk, c.keys), B * (H // groups), shared, False)
    batch, head = place // (H // groups), place % (H // groups)
    first = block * c.keys
    at = first - (Sk - Sq)  # in queries
    keys = _load(k, batch, head, first, strides[1], Sk, c.D, c.keys, c.width, c.tma, True)
    values = _load(v, batch, head, first, strides[2], Sk, c.Dv, c.keys, c.width_v, c.tma, True)
    dk = tl.zeros([BLOCK, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK, WIDTH_V], tl.float32)
    sums = (dk, dv)
    sizes = (Sq, Sk)
    for member in tl.range(0, groups, num_stages=1):
        query_head = head * groups + member
        row = batch * H + query_head
        middle = 0
        edge = Sq
        if c.window:
            low, middle, edge, high = _span(
                at, 0 if c.causal else c.window - 1, c.window - 1, Sq, c.keys, c.queries
            )  # fmt: skip
        elif c.causal:
            low = tl.maximum(at, 0) // c.queries * c.queries
            middle = tl.cdiv(tl.maximum(at + c.keys, 0), c.queries) * c.queries
        if c.causal or c.window:
            sums = _gather_keys(
                sums, keys, values, q, grad, lse, delta, batch, query_head, row, first, low,
                tl.minimum(middle, Sq), strides[0], grad_strides, sizes, scale, c, True,
            )  # fmt: skip
        sums = _gather_keys(
            sums, keys, values, q, grad, lse, delta, batch, query_head, row, first, middle, edge,
            strides[0], grad_strides, sizes, scale, c, False,
        )  # fmt: skip
        if c.window:
            sums = _gather_keys(
                sums, keys, values, q, grad, lse, delta, batch, query_head, row, first, edge, high,
                strides[0], grad_strides, sizes, scale, c, True,
            )  # fmt: skip
    dk, dv = sums
    _write(dk_out, dk * root, batch, head, first, out_strides[0], Sk, c.D, c.keys, c.width)
    _write(dv_out, dv, batch, head, first, out_strides[1], Sk, c.Dv, c.keys, c.width_v)


@triton.jit
def with_keys(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dq, queries, g, level, of_row, k, v, batch, head, first, start, k_strides, v_strides, S, scale,
    c: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dQ of a block of queries from place `first` on with the tile of keys from `start` on, of S, added."""
    rows = first + tl.arange(0, c.queries)
    keys = _load(k, batch, head, start, k_strides, S, c.D, c.keys, c.width, c.tma, MASKED)
    values = _load(v, batch, head, start, v_strides, S, c.Dv, c.keys, c.width_v, c.tma, MASKED)
    # S = Q·Kᵀ
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if c.cap > 0:
        scores, slope = _capped(scores, scale, c.cap)
    exponents = scores * scale - level[:, None]
    if MASKED:
        # Keys beyond S are zeros, but 2^(0 - lse) can overflow, and inf · 0 is NaN.
        columns = start + tl.arange(0, c.keys)
        seen = _seen(rows[:, None], columns[None, :], S, c.causal, c.window)
        exponents = tl.where(seen, exponents, float("-inf"))
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


@triton.jit
def _gather_queries(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dq, queries, g, level, of_row, k, v, batch, head, first, low, high, k_strides, v_strides, S, scale,
    c: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds keys `low` to `high`, of S, to dQ of a block of queries from place `first` on."""
    for start in tl.range(low, high, c.keys):
        dq = with_keys(
            dq, queries, g, level, of_row, k, v, batch, head, first, start, k_strides, v_strides, S, scale, c,
            MASKED,
        )  # fmt: skip
    return dq


@triton.jit(do_not_specialize=["B", "H", "shared"])
def _backward_queries(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, grad, lse, delta, dq_out, strides, grad_strides, out_strides, B, H, Sq, Sk, groups, shared,
    scale, root, c: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head. `strides` are those of q, k, v."""
    BLOCK: tl.constexpr = c.queries
    WIDTH: tl.constexpr = c.width
    block, place = _place(tl.cdiv(Sq, c.queries), B * H, shared, c.causal)
    batch, head = place // H, place % H
    row = block * c.queries
    first = row + Sk - Sq
    rows = row + tl.arange(0, c.queries)
    queries = _load(q, batch, head, row, strides[0], Sq, c.D, c.queries, c.width, c.tma, True)
    g = _load(grad, batch, head, row, grad_strides, Sq, c.Dv, c.queries, c.width_v, c.tma, True)
    level = tl.load(lse + place.to(tl.int64) * Sq + rows, mask=rows < Sq, other=float("inf"))
    of_row = tl.load(delta + place.to(tl.int64) * Sq + rows, mask=rows < Sq, other=0.0)
    dq = tl.zeros([BLOCK, WIDTH], tl.float32)
    low = 0
    if c.window:
        before, low, middle, high = _span(
            first, c.window - 1, 0 if c.causal else c.window - 1, Sk, c.queries, c.keys
        )  # fmt: skip
        dq = _gather_queries(
            dq, queries, g, level, of_row, k, v, batch, head // groups, first, before, low,
            strides[1], strides[2], Sk, scale, c, True,
        )  # fmt: skip
    elif c.causal:
        middle = tl.maximum(first, 0) // c.keys * c.keys
        high = tl.maximum(tl.minimum(first + c.queries, Sk), 0)
    else:
        middle = Sk // c.keys * c.keys
        high = Sk
    dq = _gather_queries(
        dq, queries, g, level, of_row, k, v, batch, head // groups, first, low, middle,
        strides[1], strides[2], Sk, scale, c, False,
    )  # fmt: skip
    dq = _gather_queries(
        dq, queries, g, level, of_row, k, v, batch, head // groups, first, middle, high,
        strides[1], strides[2], Sk, scale, c, True,
    )  # fmt: skip
    _write(dq_out, dq * root, batch, head, row, out_strides, Sq, c.D, c.queries, c.width)


@triton.jit(do_not_specialize=["B", "H", "S", "room"])
def _of_sink(  # type: ignore[no-untyped-def]  # Triton's types are its own
    sinks, lse, delta, out, B, H, S, room, BLOCK: tl.constexpr
):
    """The gradient in one head's sink: less the sum over its rows of the sink's probability times delta, for it
    has no value. Rows of delta come in `room` a head. Where a row sees nothing lse is +inf only if the sink is
    -inf, and 2^-inf is 0.
    """
    head = tl.program_id(0)
    sink = tl.load(sinks + head).to(tl.float32) * _LOG2E
    total = tl.zeros([BLOCK], tl.float32)
    for batch in range(0, B):
        place = (batch * H + head).to(tl.int64)
        for first in range(0, S, BLOCK):
            rows = first + tl.arange(0, BLOCK)
            level = tl.load(lse + place * S + rows, mask=rows < S, other=float("inf"))
            of_row = tl.load(delta + place * room + rows, mask=rows < S, other=0.0)
            total += tl.exp2(sink - level) * of_row
    tl.store(out + head, (-tl.sum(total, 0)).to(out.dtype.element_ty))


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
    from .. import _hopper as common
    from . import (
        _attention_hopper_backward,
        _attention_hopper_backward_deterministic,
        _attention_hopper_forward,
        _attention_hopper_forward_paired,
    )

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
        and x.numel() > 0
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


def _output(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Memory for the output: like q, of v's head dimension."""
    if v.shape[-1] == q.shape[-1]:
        return like(q)
    order = sorted(range(3), key=lambda i: -q.stride(i))
    new = torch.empty([q.shape[i] for i in order] + [v.shape[-1]], dtype=q.dtype, device=q.device)
    return new.permute(*(order.index(i) for i in range(3)), 3)


def _shared(k: torch.Tensor, groups: int) -> int:
    """How many query heads work at a time so that their K and V stay in L2."""
    S, D = k.shape[2:]
    return max(1, L2_SHARE // max(1, 2 * S * D * k.element_size())) * groups


def _launch_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
    path: Path | None = None,
    schedule: Schedule | None = None,
    out: torch.Tensor | None = None,
) -> tuple[Any, Any]:
    """The output, in `out` if that is given, and its log-sum-exp in base 2, +inf where nothing is seen. A window
    of 0 is none.

    The best path that inputs and device allow, unless one is asked for; that one, or `NotImplementedError`. With a
    schedule, the kernel for Hopper is that of pairs of tiles.
    """
    B, H, S, D = q.shape
    Sk = k.shape[2]
    window = _bounded(window, S, Sk)
    lse = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    hopper = _hopper(q.device) if path in (None, "hopper") and "forward" in HOPPER else None
    if _portable("forward", q, v, sinks, cap):
        hopper = None
    out = _output(q, v) if out is None else out
    if out.numel() == 0:
        return out, lse
    if hopper is not None and path is None and max(S, Sk) < SHORT[D > 64]:
        hopper = None
    if hopper is not None and hopper.common.fits(q, k, v, hopper.common.FORWARD_WIDTHS):
        logits = None if sinks is None else sinks.contiguous()
        if power_of_2(D) in hopper.forward.DIVISIONS and schedule is None:
            section = _section(q, k, causal, window)
            hopper.forward.forward(q, k, v, out, lse, causal, window, section, logits, cap)
            return out, lse
        if Sk == S:
            hopper.paired.forward(q, k, v, out, lse, causal, window, schedule, logits, cap)
            return out, lse
    q, k, v = _plain(q), _plain(k), _plain(v)
    tma = _descriptors(path, q, k, v)
    _portable_forward(q, k, v, out, causal, window, sinks, cap, tma)(q, k, v, out, lse, sinks)
    return out, lse


def _portable_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    causal: bool,
    window: int,
    sinks: torch.Tensor | None,
    cap: float,
    tma: bool,
) -> Callable[..., None]:
    """The portable kernel's launch for tensors like these: of (q, k, v, out, lse, sinks)."""
    B, H, S, D = q.shape
    Sk, groups = k.shape[2], H // k.shape[1]
    t = tiles("forward", q, window)
    c = _config(q, v, t, False, causal, window, tma, cap)
    grid = (triton.cdiv(S, t.resident) * B * H,)
    strides = [x.stride()[:3] for x in (q, k, v, out)]
    numbers = (*strides, B, H, S, Sk, groups, _shared(k, groups), LOG2E / math.sqrt(D))
    compiled = {"num_warps": t.warps, "num_stages": t.stages}
    if tma or sinks is not None:

        def described(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor,
            sinks: torch.Tensor | None,
        ) -> None:
            sinks = None if sinks is None else sinks.contiguous()
            with on(q):
                _forward[grid](
                    _tile(q, t.resident, tma), _tile(k, t.streamed, tma), _tile(v, t.streamed, tma), out, lse,
                    *numbers, sinks, c, **compiled,
                )  # fmt: skip

        return described
    launch, device = Launch(_forward, grid, *numbers, None, c=c, **compiled), q.device
    return lambda q, k, v, out, lse, sinks: launch(device, q, k, v, out, lse)


def _portable(
    part: Literal["forward", "backward"],
    q: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cap: float,
) -> bool:
    """Whether the portable kernels alone compute this pass."""
    return (
        v.shape[-1] != q.shape[-1]
        or (sinks is not None and (part, "sinks") not in TAKEN)
        or (cap > 0 and (part, "cap") not in TAKEN)
    )


def _section(q: torch.Tensor, k: torch.Tensor, causal: bool, window: int) -> int:
    """Query heads whose tiles are taken before others' are."""
    B, H, S, _ = q.shape
    if 0 < 4 * window <= S:
        # Under a short window neighbours of a head read the same keys, and others share nothing.
        return B * H
    groups = H // k.shape[1]
    # With a full mask all tiles are as long: those of one key head at a time, which read the same keys.
    return _shared(k, groups) if causal else groups


def _prepare_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> Callable[..., tuple[Any, Any]]:
    """`_launch_forward` of all inputs that are alike. Where the kernel with a tile scheduler runs or the portable
    one, all but memory and addresses is decided here.
    """
    B, H, S, D = q.shape
    device, short = q.device, max(S, k.shape[2]) < SHORT[D > 64]
    hopper = _hopper(device) if "forward" in HOPPER else None
    portable = hopper is None or short or _portable("forward", q, v, sinks, cap)
    if q.numel() == 0 or v.numel() == 0:
        return _launch_forward
    window = _bounded(window, S, k.shape[2])
    if portable:
        like_these = _plain(q), _plain(k), _plain(v)
        out = _output(q, v)
        output, of_lse = _made(out), room((B, H, S), torch.float32, device)
        kernel = _portable_forward(*like_these, out, causal, window, sinks, cap, _descriptors(None, *like_these))

        def launched_portable(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            causal: bool,
            window: int,
            sinks: torch.Tensor | None = None,
            cap: float = 0.0,
        ) -> tuple[Any, Any]:
            lse, out = of_lse(), output()
            kernel(_plain(q), _plain(k), _plain(v), out, lse, sinks)
            return out, lse

        return launched_portable
    assert hopper is not None
    if power_of_2(D) not in hopper.forward.DIVISIONS or not hopper.common.fits(
        q, k, v, hopper.common.FORWARD_WIDTHS
    ):
        return _launch_forward
    of_sinks = None if sinks is None else sinks.dtype
    section = _section(q, k, causal, window)
    plan = hopper.forward.planned(q, k, v, like(q), causal, window, section, of_sinks, cap)
    run, output, of_lse = hopper.forward.run, _made(like(q)), room((B, H, S), torch.float32, device)

    def launched(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        window: int = 0,
        sinks: torch.Tensor | None = None,
        cap: float = 0.0,
    ) -> tuple[Any, Any]:
        lse, out = of_lse(), output()
        run(plan, q, k, v, out, lse, None if sinks is None else sinks.contiguous())
        return out, lse

    return launched


def _made(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes memory for a dense tensor like this."""
    return room(x.shape, x.dtype, x.device, x.stride())


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
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
    path: Path | None = None,
) -> tuple[Any, Any, Any, Any]:
    """dQ, dK, dV and the gradient in sinks, empty where there are none. `lse` and the gradient in it are of base
    2. `path` as in `_launch_forward`; the unordered kernel for Hopper is taken where none is asked for, nor
    PyTorch for deterministic algorithms.
    """
    S, Sk = q.shape[2], k.shape[2]
    window = _bounded(window, S, Sk)
    dq, dk, dv, ds = like(q), like(k), like(v), _of_sinks(q, sinks)
    if dq.numel() == 0 or dk.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), ds.zero_()
    q, k, v, grad = _plain(q), _plain(k), _plain(v), _plain(grad)
    fixed = path == "hopper" or torch.are_deterministic_algorithms_enabled()
    hopper = _hopper(q.device) if path in (None, "hopper") and "backward" in HOPPER else None
    if hopper is not None and not (
        hopper.common.fits(q, k, v) and _sized(hopper, S, Sk, causal, window, cap, fixed)
    ):
        hopper = None
    if _portable("backward", q, v, sinks, cap):
        hopper = None
    if hopper is not None:
        grad, out = hopper.common.mapped(grad), hopper.common.mapped(out)
        if lse.data_ptr() % 16 or not lse.is_contiguous():
            lse = lse.clone(memory_format=torch.contiguous_format)
        level, delta = hopper.deterministic.statistics(out, grad, lse)
        if grad_lse is not None:
            # A row's log-sum-exp has the probabilities for its derivative: dS = P ∘ (dP + dlse - delta).
            delta[..., :S].sub_(grad_lse, alpha=LOG2E)
        if fixed or not hopper.backward.AVAILABLE:
            hopper.deterministic.backward(grad, q, k, v, level, delta, dq, dk, dv, causal, window)
        else:
            hopper.backward.backward(grad, q, k, v, level, delta, dq, dk, dv, causal, window, cap=cap)
        _gradient_in_sinks(sinks, lse, delta.shape[2])(sinks, lse, delta, ds)
        return dq, dk, dv, ds
    tma = _descriptors(path, q, k, v, grad)
    run = _portable_backward(q, k, v, grad, out, (dq, dk, dv), causal, window, cap, tma)
    delta = run(q, k, v, grad, out, lse, grad_lse, dq, dk, dv)
    _gradient_in_sinks(sinks, lse, S)(sinks, lse, delta, ds)
    return dq, dk, dv, ds


def _gradient_in_sinks(
    sinks: torch.Tensor | None, lse: torch.Tensor, rows: int
) -> Callable[[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """What writes it, where there are sinks: of (sinks, lse (B, H, S) in base 2, delta, the gradient (H,)), delta
    with so many rows a head.
    """
    if sinks is None:
        return lambda *_: None
    B, H, S = lse.shape
    launch, device = Launch(_of_sink, (H,), B, H, S, rows, BLOCK=1024), lse.device

    def run(sinks: torch.Tensor | None, lse: torch.Tensor, delta: torch.Tensor, ds: torch.Tensor) -> None:
        assert sinks is not None
        launch(device, sinks.contiguous(), lse.contiguous(), delta, ds)

    return run


def _sized(hopper: Hopper, S: int, Sk: int, causal: bool, window: int, cap: float, fixed: bool) -> bool:
    """Whether the backward pass for Hopper takes these lengths; the deterministic one as many keys as queries,
    whose scores have no cap.
    """
    if fixed or not hopper.backward.AVAILABLE:
        return Sk == S and not cap
    found: bool = hopper.backward.takes(S, Sk, causal, window)
    return found


def _portable_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    causal: bool,
    window: int,
    cap: float,
    tma: bool,
) -> Callable[..., torch.Tensor]:
    """The portable kernels' launches for tensors like these: of (q, k, v, grad, out, lse, grad_lse, dq, dk, dv).
    They give delta (B, H, S).
    """
    B, H, S, D = q.shape
    Hkv, Sk, Dv = v.shape[1:]
    groups, blocks, device = H // Hkv, triton.cdiv(S, 64), q.device
    strides = tuple(x.stride()[:3] for x in (q, k, v))
    of_grad, of_dq, *of_pair = (x.stride()[:3] for x in (grad, *gradients))
    root = 1 / math.sqrt(D)
    sizes, scales = (B, H, S, Sk, groups), (LOG2E * root, root)
    shared = _shared(k, groups)
    statistics = Launch(
        _delta, (blocks * B * H,), out.stride()[:3], of_grad, H, S, blocks, Dv, 64, _width(Dv), num_warps=4
    )
    t, u = tiles("keys", q), tiles("queries", q)
    of_keys = (strides, of_grad, tuple(of_pair), *sizes, max(1, shared // groups // groups), *scales)
    of_queries = (strides, of_grad, of_dq, *sizes, shared, *scales)
    c = _config(q, v, t, True, causal, window, tma, cap)
    d = _config(q, v, u, False, causal, window, tma, cap)
    grids = (triton.cdiv(Sk, t.resident) * B * Hkv,), (triton.cdiv(S, u.resident) * B * H,)
    options = [{"num_warps": x.warps, "num_stages": x.stages} for x in (t, u)]
    by_keys = Launch(_backward_keys, grids[0], *of_keys, c=c, **options[0])
    by_queries = Launch(_backward_queries, grids[1], *of_queries, c=d, **options[1])
    of_delta = room((B, H, S), torch.float32, device)

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        grad: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_lse: torch.Tensor | None,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> torch.Tensor:
        delta = of_delta()
        statistics(device, out, grad, delta)
        if grad_lse is not None:
            delta.sub_(grad_lse, alpha=LOG2E)
        if not tma:
            by_keys(device, q, k, v, grad, lse, delta, dk, dv)
            by_queries(device, q, k, v, grad, lse, delta, dq)
            return delta
        with on(q):
            _backward_keys[grids[0]](
                _tile(q, t.streamed, tma), _tile(k, t.resident, tma), _tile(v, t.resident, tma),
                _tile(grad, t.streamed, tma), lse, delta, dk, dv, *of_keys, c, **options[0],
            )  # fmt: skip
            _backward_queries[grids[1]](
                _tile(q, u.resident, tma), _tile(k, u.streamed, tma), _tile(v, u.streamed, tma),
                _tile(grad, u.resident, tma), lse, delta, dq, *of_queries, d, **options[1],
            )  # fmt: skip
        return delta

    return run


def _prepare_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    window: int,
    grad_lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    cap: float,
) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """`_launch_backward` of all inputs that are alike: where nothing has to be copied first, all but memory and
    addresses is decided here.
    """
    S, Sk = q.shape[2], k.shape[2]
    hopper = _hopper(q.device) if "backward" in HOPPER else None
    plain = all(x is _plain(x) for x in (q, k, v, grad)) and lse.is_contiguous()
    if not plain or q.numel() == 0 or v.numel() == 0 or Sk == 0:
        return _launch_backward
    window = _bounded(window, S, Sk)
    gradients = like(q), like(k), like(v)
    of_q, of_k, of_v = map(_made, gradients)
    of_sinks = _made(_of_sinks(q, sinks))
    if (
        hopper is None
        or _portable("backward", q, v, sinks, cap)
        or not (hopper.common.fits(q, k, v) and _sized(hopper, S, Sk, causal, window, cap, False))
    ):
        tma = _descriptors(None, q, k, v, grad)
        kernels = _portable_backward(q, k, v, grad, out, gradients, causal, window, cap, tma)
        to_sinks = _gradient_in_sinks(sinks, lse, S)

        def portable(
            grad: torch.Tensor,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            out: torch.Tensor,
            lse: torch.Tensor,
            causal: bool,
            window: int,
            grad_lse: torch.Tensor | None,
            sinks: torch.Tensor | None,
            cap: float,
        ) -> tuple[Any, Any, Any, Any]:
            dq, dk, dv, ds = of_q(), of_k(), of_v(), of_sinks()
            delta = kernels(q, k, v, grad, out, lse, grad_lse, dq, dk, dv)
            to_sinks(sinks, lse, delta, ds)
            return dq, dk, dv, ds

        return portable
    mappable = hopper.common.mappable
    if not (mappable(grad) and mappable(out) and lse.data_ptr() % 16 == 0 and hopper.backward.AVAILABLE):
        return _launch_backward
    of_rows = hopper.deterministic.planned_statistics(out, grad)
    plan = hopper.backward.planned(grad, q, k, v, *gradients, causal, window, cap=cap)
    statistics, run = hopper.deterministic.run_statistics, hopper.backward.run
    to_sinks = _gradient_in_sinks(sinks, lse, of_rows.shape[2])

    def launched(
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        window: int,
        grad_lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        cap: float,
    ) -> tuple[Any, Any, Any, Any]:
        if torch.are_deterministic_algorithms_enabled():
            return _launch_backward(grad, q, k, v, out, lse, causal, window, grad_lse, sinks, cap)
        dq, dk, dv, ds = of_q(), of_k(), of_v(), of_sinks()
        level, delta = statistics(of_rows, out, grad, lse)
        if grad_lse is not None:
            delta[..., :S].sub_(grad_lse, alpha=LOG2E)
        run(plan, grad, q, k, v, level, delta, dq, dk, dv)
        to_sinks(sinks, lse, delta, ds)
        return dq, dk, dv, ds

    return launched


def _of_sinks(q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Memory for the gradient in sinks; of none where there are none."""
    return q.new_empty(0) if sinks is None else torch.empty_like(sinks)


# ---------------------------------------------------------------------------------------------------------
# Autograd.


def attention_gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: Literal["causal", "full"] = "causal",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV) of `attention` over several sets of keys, as far as k and v, one of these sets, have a part in
    them: dK and dV are theirs, and dQ adds up over the sets. `grad` is that of `out`.

    `out` and the natural log-sum-exp `lse` are over all sets; `mask` is that between q and this one. All as
    `attention` takes and gives them.
    """
    level = torch.where(lse == -math.inf, math.inf, lse * LOG2E)
    dq, dk, dv, _ = _gradients(grad, q, k, v, out, level, mask == "causal", 0, None, None, 0.0)
    return dq, dk, dv


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.causal, ctx.window, sinks, ctx.cap = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, sinks)


def _differentiate(ctx: Any, grad: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    if grad is None and grad_lse is None:
        return (None,) * 7
    *saved, sinks = ctx.saved_tensors
    grad = torch.zeros_like(saved[3]) if grad is None else grad
    dq, dk, dv, ds = _gradients(grad, *saved, ctx.causal, ctx.window, grad_lse, sinks, ctx.cap)
    return dq, dk, dv, None, None, None if sinks is None else ds, None


_attention = operator(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, int window, Tensor? sinks, float cap)"
    " -> (Tensor, Tensor)",
    prepared(_prepare_forward, _check),
    lambda q, k, v, *_: (_output(q, v), q.new_empty(q.shape[:3], dtype=torch.float32)),
    _save,
    _differentiate,
    _check,
)

_gradients = operator(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal,"
    " int window, Tensor? grad_lse, Tensor? sinks, float cap) -> (Tensor, Tensor, Tensor, Tensor)",
    prepared(_prepare_backward),
    lambda grad, q, k, v, out, lse, causal, window, grad_lse, sinks, cap: (
        like(q),
        like(k),
        like(v),
        _of_sinks(q, sinks),
    ),
)
