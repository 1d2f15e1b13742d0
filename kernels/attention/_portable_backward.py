"""The portable backward pass of attention: a kernel over blocks of keys (dK, dV), one over blocks of queries (dQ).

With P the probabilities, dP = dO·Vᵀ and delta = rowsum(O ∘ dO):
dV = Pᵀ·dO, dS = P ∘ (dP - delta), dK = dSᵀ·Q / √D, dQ = dS·K / √D.
Nothing is added up in memory: gradients are the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .._common import on
from .._launch import Launch, room
from ._tile_functions import (
    LOG2E,
    LOG2E_ON_DEVICE,
    capped,
    load_tile,
    program_place,
    seen_by,
    store_strided,
    walk_span,
)
from ._tiling import configured, heads_in_l2, source, tile_width, tiles


@triton.jit(do_not_specialize=["H", "blocks"])
def row_products(  # type: ignore[no-untyped-def]  # Triton's types are its own
    out, grad, delta, out_strides, grad_strides, H, S, blocks,
    D: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """delta (B, H, S), fp32: the sum of O ∘ dO over each row."""
    program = tl.program_id(0)
    place, first = program // blocks, program % blocks * BLOCK_M
    batch, head = place // H, place % H
    a = load_tile(out, batch, head, first, out_strides, S, D, BLOCK_M, WIDTH, False, True)
    b = load_tile(grad, batch, head, first, grad_strides, S, D, BLOCK_M, WIDTH, False, True)
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
    queries = load_tile(q, batch, head, start, q_strides, Sq, c.D, c.queries, c.width, c.tma, True)
    level = tl.load(lse + place.to(tl.int64) * Sq + rows, mask=rows < Sq, other=float("inf"))
    # Sᵀ = K·Qᵀ
    scores = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    if c.cap > 0:
        scores, slope = capped(scores, scale, c.cap)
    exponents = scores * scale - level[None, :]
    if MASKED:
        seen = seen_by((rows + (Sk - Sq))[None, :], columns[:, None], Sk, c.causal, c.window)
        exponents = tl.where(seen, exponents, float("-inf"))
    # P = 2^(S·scale - lse)
    weights = tl.exp2(exponents)
    if c.ragged:
        weights = tl.where((rows < Sq)[None, :], weights, 0.0)
    g = load_tile(grad, batch, head, start, grad_strides, Sq, c.Dv, c.queries, c.width_v, c.tma, True)
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
    block, place = program_place(tl.cdiv(Sk, c.keys), B * (H // groups), shared, False)
    batch, head = place // (H // groups), place % (H // groups)
    first = block * c.keys
    at = first - (Sk - Sq)  # in queries
    keys = load_tile(k, batch, head, first, strides[1], Sk, c.D, c.keys, c.width, c.tma, True)
    values = load_tile(v, batch, head, first, strides[2], Sk, c.Dv, c.keys, c.width_v, c.tma, True)
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
            low, middle, edge, high = walk_span(
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
    store_strided(dk_out, dk * root, batch, head, first, out_strides[0], Sk, c.D, c.keys, c.width)
    store_strided(dv_out, dv, batch, head, first, out_strides[1], Sk, c.Dv, c.keys, c.width_v)


@triton.jit
def with_keys(  # type: ignore[no-untyped-def]  # Triton's types are its own
    dq, queries, g, level, of_row, k, v, batch, head, first, start, k_strides, v_strides, S, scale,
    c: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dQ of a block of queries from place `first` on with the tile of keys from `start` on, of S, added."""
    rows = first + tl.arange(0, c.queries)
    keys = load_tile(k, batch, head, start, k_strides, S, c.D, c.keys, c.width, c.tma, MASKED)
    values = load_tile(v, batch, head, start, v_strides, S, c.Dv, c.keys, c.width_v, c.tma, MASKED)
    # S = Q·Kᵀ
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if c.cap > 0:
        scores, slope = capped(scores, scale, c.cap)
    exponents = scores * scale - level[:, None]
    if MASKED:
        # Keys beyond S are zeros, but 2^(0 - lse) can overflow, and inf · 0 is NaN.
        columns = start + tl.arange(0, c.keys)
        seen = seen_by(rows[:, None], columns[None, :], S, c.causal, c.window)
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
    block, place = program_place(tl.cdiv(Sq, c.queries), B * H, shared, c.causal)
    batch, head = place // H, place % H
    row = block * c.queries
    first = row + Sk - Sq
    rows = row + tl.arange(0, c.queries)
    queries = load_tile(q, batch, head, row, strides[0], Sq, c.D, c.queries, c.width, c.tma, True)
    g = load_tile(grad, batch, head, row, grad_strides, Sq, c.Dv, c.queries, c.width_v, c.tma, True)
    level = tl.load(lse + place.to(tl.int64) * Sq + rows, mask=rows < Sq, other=float("inf"))
    of_row = tl.load(delta + place.to(tl.int64) * Sq + rows, mask=rows < Sq, other=0.0)
    dq = tl.zeros([BLOCK, WIDTH], tl.float32)
    low = 0
    if c.window:
        before, low, middle, high = walk_span(
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
    store_strided(dq_out, dq * root, batch, head, row, out_strides, Sq, c.D, c.queries, c.width)


@triton.jit(do_not_specialize=["B", "H", "S", "room"])
def _of_sink(  # type: ignore[no-untyped-def]  # Triton's types are its own
    sinks, lse, delta, out, B, H, S, room, BLOCK: tl.constexpr
):
    """The gradient in one head's sink: less the sum over its rows of the sink's probability times delta, for it
    has no value. Rows of delta come in `room` a head. Where a row sees nothing lse is +inf only if the sink is
    -inf, and 2^-inf is 0.
    """
    head = tl.program_id(0)
    sink = tl.load(sinks + head).to(tl.float32) * LOG2E_ON_DEVICE
    total = tl.zeros([BLOCK], tl.float32)
    for batch in range(0, B):
        place = (batch * H + head).to(tl.int64)
        for first in range(0, S, BLOCK):
            rows = first + tl.arange(0, BLOCK)
            level = tl.load(lse + place * S + rows, mask=rows < S, other=float("inf"))
            of_row = tl.load(delta + place * room + rows, mask=rows < S, other=0.0)
            total += tl.exp2(sink - level) * of_row
    tl.store(out + head, (-tl.sum(total, 0)).to(out.dtype.element_ty))


def planned_backward(
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
    shared = heads_in_l2(k, groups)
    statistics = Launch(
        row_products,
        (blocks * B * H,),
        out.stride()[:3],
        of_grad,
        H,
        S,
        blocks,
        Dv,
        64,
        tile_width(Dv),
        num_warps=4,
    )
    t, u = tiles("keys", q), tiles("queries", q)
    of_keys = (strides, of_grad, tuple(of_pair), *sizes, max(1, shared // groups // groups), *scales)
    of_queries = (strides, of_grad, of_dq, *sizes, shared, *scales)
    c = configured(q, v, t, True, causal, window, tma, cap)
    d = configured(q, v, u, False, causal, window, tma, cap)
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
                source(q, t.streamed, tma), source(k, t.resident, tma), source(v, t.resident, tma),
                source(grad, t.streamed, tma), lse, delta, dk, dv, *of_keys, c, **options[0],
            )  # fmt: skip
            _backward_queries[grids[1]](
                source(q, u.resident, tma), source(k, u.streamed, tma), source(v, u.streamed, tma),
                source(grad, u.resident, tma), lse, delta, dq, *of_queries, d, **options[1],
            )  # fmt: skip
        return delta

    return run


def planned_gradient_in_sinks(
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
