"""What decoding attention does with tiles of a cache, whoever divides them among programs."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from .._online_softmax import weighted_if_seen
from ._tile_functions import LOG2E_ON_DEVICE, capped


@dataclass(frozen=True)
class Config:
    """The kernel at compile time: queries of a sequence, query heads of a key head, head dimension, rows of a tile
    of queries, keys of a tile, columns of both, tokens of a page, 0 being a contiguous cache, stages of the loop,
    and a cap of scores, 0 being none.
    """

    queries: int
    groups: int
    D: int
    rows: int
    keys: int
    width: int
    page: int
    stages: int
    cap: float


@triton.jit
def attended(  # type: ignore[no-untyped-def]  # Triton's types are its own
    q, k, v, table, q_strides, k_strides, v_strides, stride_table, heads, scale, sinks, batch, head, length, first,
    stop, c: tl.constexpr,
):  # fmt: skip
    """The queries of one sequence and key head attend to the tokens from `first` to before `stop` of its cache:
    their mean (rows, D), and its base-2 log-sum-exp (rows,). `first` begins a tile of keys, so that each lies
    within one page of as many or more. A head's sink, None for none, is counted with the first token. Strides are
    those of batch (of the caches: page), token and head.
    """
    ROWS: tl.constexpr = c.rows
    WIDTH: tl.constexpr = c.width
    row = tl.arange(0, c.rows)
    token = row // c.groups
    query_head = head * c.groups + row % c.groups
    width = tl.arange(0, c.width)
    inside = (token < c.queries)[:, None] & (width < c.D)[None, :]
    queries = tl.load(
        q + batch * q_strides[0] + (token * q_strides[1] + query_head * q_strides[2])[:, None] + width[None, :],
        inside,
        0.0,
    )
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        counted = (token < c.queries) & (first == 0)
        row_max = tl.load(sinks + query_head, counted, float("-inf")).to(tl.float32) * LOG2E_ON_DEVICE
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    lane = tl.arange(0, c.keys)
    last = length - c.queries + token
    # Caches may lie with their heads outermost: a head's place has more than 32 bits then.
    k_head = head.to(tl.int64) * k_strides[2]
    v_head = head.to(tl.int64) * v_strides[2]
    for start in tl.range(first, stop, c.keys, num_stages=c.stages):
        column = start + lane
        seen = column < stop
        if c.page:
            if c.page < c.keys:
                place = tl.load(table + batch * stride_table + column // c.page, seen, 0).to(tl.int64)
            else:
                place = tl.load(table + batch * stride_table + start // c.page).to(tl.int64)
            within = column % c.page
        else:
            place = batch
            within = column
        key_at = place * k_strides[0] + within.to(tl.int64) * k_strides[1] + k_head
        value_at = place * v_strides[0] + within.to(tl.int64) * v_strides[1] + v_head
        loaded = seen[:, None] & (width < c.D)[None, :]
        keys = tl.load(k + key_at[:, None] + width[None, :], loaded, 0.0)
        # S = Q·Kᵀ
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if c.cap > 0:
            scores, _ = capped(scores, scale, c.cap)
        scores = scores * scale
        scores = tl.where(seen[None, :] & (column[None, :] <= last[:, None]), scores, float("-inf"))
        weights, correction, row_max, row_sum = weighted_if_seen(scores, row_max, row_sum)
        total = total * correction[:, None]
        values = tl.load(v + value_at[:, None] + width[None, :], loaded, 0.0)
        # O += P·V
        total = tl.dot(weights.to(values.dtype), values, total, input_precision="ieee")
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    return total / row_sum[:, None], tl.where(empty, float("-inf"), row_max + tl.log2(row_sum))


@triton.jit
def stored(out, mean, batch, heads, head, c: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Writes what the queries of a sequence and key head come to."""
    row = tl.arange(0, c.rows)
    token = row // c.groups
    width = tl.arange(0, c.width)
    at = (batch * c.queries + token) * (heads * c.groups) + head * c.groups + row % c.groups
    inside = (token < c.queries)[:, None] & (width < c.D)[None, :]
    tl.store(out + at[:, None] * c.D + width[None, :], mean.to(out.dtype.element_ty), inside)
