"""The steps of the online softmax (Milakov and Gimelshein, arXiv 1805.02867) in the portable kernels: of
attention, over blocks of keys, and of rows, whose lanes each keep a maximum and a sum.

That of attention for Hopper, which holds P and row sums otherwise, is in `attention/_softmax.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite fp32 number. As a row's first maximum it is below every finite one, and unlike -inf it can be
subtracted from -inf: what is -inf gets a weight of 0 and no NaN."""


@triton.jit
def weighted(scores, row_max, row_sum, scale, OFFSET: tl.constexpr = 0):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(P, the correction of what is summed up, row max, row sum) with a block of scores added; `scale` includes
    log₂e. P is 2^OFFSET as large. Every row must have seen a key, or the row max begun at a finite number.
    """
    raised = tl.maximum(row_max, tl.max(scores, 1) * scale)
    # P = 2^(S·scale - m + OFFSET)
    if OFFSET != 0:
        weights = tl.exp2(scores * scale - (raised - OFFSET)[:, None])
    else:
        weights = tl.exp2(scores * scale - raised[:, None])
    correction = tl.exp2(row_max - raised)
    # l = l·2^(m_old - m) + rowsum(P)
    row_sum = row_sum * correction + tl.sum(weights, 1)
    return weights, correction, raised, row_sum


@triton.jit
def weighted_if_seen(scores, row_max, row_sum):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """As `weighted`, of scores that are scaled already and of rows that may have seen nothing yet."""
    raised = tl.maximum(row_max, tl.max(scores, 1))
    # A row that has seen nothing yet: -inf - -inf would be NaN.
    level = tl.where(raised == float("-inf"), 0.0, raised)
    # P = 2^(S·scale - m)
    weights = tl.exp2(scores - level[:, None])
    correction = tl.exp2(row_max - level)
    # l = l·2^(m_old - m) + rowsum(P)
    row_sum = row_sum * correction + tl.sum(weights, 1)
    return weights, correction, raised, row_sum


@triton.jit
def lowered(highest, top):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """exp(highest - top) of finite maxima. Halves are subtracted, as fp32 has no number for `LOWEST` less a large
    one; and a difference that leaves nothing is cut, as it has none for log₂e times `LOWEST` either.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    return tl.exp2(tl.maximum(highest * 0.5 - top * 0.5, -500.0) * (2.0 * LOG2E))


@triton.jit
def with_terms(x, highest, total):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """A lane's maximum and its sum of exp(x - maximum), with a row of x a lane added. The maximum begins finite,
    so that the difference of two is never NaN.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    # m' = max(m, max x), Σ' = Σ · exp(m - m') + Σ exp(x - m')
    higher = tl.maximum(highest, tl.max(x, 1))
    terms = tl.exp2((x - higher[:, None]) * LOG2E)
    return higher, total * lowered(highest, higher) + tl.sum(terms, 1)


@triton.jit
def over_lanes(highest, total):  # type: ignore[no-untyped-def]  # Triton's types are its own
    """(maximum, sum of exp(x - maximum)) of all lanes."""
    top = tl.max(highest, 0)
    return top, tl.sum(total * lowered(highest, top), 0)
