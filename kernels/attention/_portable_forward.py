"""The portable forward pass of attention: keys are walked once, with an online softmax in base 2.

A query's place is counted in keys: the last query and the last key are in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .._common import on
from .._launch import Launch
from .._online_softmax import LOWEST, weighted
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
from ._tiling import configured, heads_in_l2, source, tiles


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
        keys = load_tile(k, batch, head, start, k_strides, S, c.D, c.keys, c.width, c.tma, MASKED)
        # S = Q·Kᵀ
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if c.cap > 0:
            scores, _ = capped(scores, scale, c.cap)
        if MASKED:
            columns = start + tl.arange(0, c.keys)
            scores = tl.where(
                seen_by(rows[:, None], columns[None, :], S, c.causal, c.window), scores, float("-inf")
            )
        weights, correction, row_max, row_sum = weighted(scores, row_max, row_sum, scale)
        total = total * correction[:, None]
        values = load_tile(v, batch, head, start, v_strides, S, c.Dv, c.keys, c.width_v, c.tma, MASKED)
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
    block, place = program_place(tl.cdiv(Sq, c.queries), B * H, shared, c.causal)
    batch, head = place // H, place % H
    row = block * c.queries
    first = row + Sk - Sq
    queries = load_tile(q, batch, head, row, q_strides, Sq, c.D, c.queries, c.width, c.tma, True)
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
    store_strided(out, total / row_sum[:, None], batch, head, row, out_strides, Sq, c.Dv, c.queries, c.width_v)
    rows = row + tl.arange(0, c.queries)
    level = tl.where(empty, float("inf"), row_max + tl.log2(row_sum))
    tl.store(lse + place.to(tl.int64) * Sq + rows, level, mask=rows < Sq)


def planned_forward(
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
    c = configured(q, v, t, False, causal, window, tma, cap)
    grid = (triton.cdiv(S, t.resident) * B * H,)
    strides = [x.stride()[:3] for x in (q, k, v, out)]
    numbers = (*strides, B, H, S, Sk, groups, heads_in_l2(k, groups), LOG2E / math.sqrt(D))
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
                    source(q, t.resident, tma), source(k, t.streamed, tma), source(v, t.streamed, tma), out, lse,
                    *numbers, sinks, c, **compiled,
                )  # fmt: skip

        return described
    launch, device = Launch(_forward, grid, *numbers, None, c=c, **compiled), q.device
    return lambda q, k, v, out, lse, sinks: launch(device, q, k, v, out, lse)
