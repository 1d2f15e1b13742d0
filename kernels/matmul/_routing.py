"""Who computes which token of a mixture of experts: router, top-k and softmax, the permutation, and the
combination.

For the portable products tokens stay where they are. What is made is a list of places in tiles of so many rows
that no tile has rows of two experts: for each tile its expert, for each place token · k + nth choice, or -1.
Hopper's load tiles of rows that lie side by side, so that tokens are copied to such places (`spread`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .._common import INTERPRETED, INTERPRETING, cdiv, on, power_of_2
from ._grouped import Rows

TOKENS = 16 if INTERPRETED else 64
"""Most tokens of a program of the router."""


@triton.jit
def _route(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, router, experts, shares, ranks, counts, M, D, x_row, router_row,
    E: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens a program: their K experts of E, the largest first, their shares, and each one's rank among
    the tokens of its expert, which depends on who came first: nothing else does.
    """
    row = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    expert = tl.arange(0, WIDE)
    logits = tl.zeros([TOKENS, WIDE], tl.float32)
    for start in range(0, D, STEP):
        depth = start + tl.arange(0, STEP)
        a = tl.load(x + row[:, None] * x_row + depth[None, :], (row < M)[:, None] & (depth < D)[None, :], 0.0)
        b = tl.load(
            router + expert[None, :] * router_row + depth[:, None],
            (expert < E)[None, :] & (depth < D)[:, None],
            0.0,
        )
        if INTERPRETING:  # which multiplies the bits of 16-bit numbers
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        logits = tl.dot(a, b, logits)  # logits += X @ R.T
    logits = tl.where((expert < E)[None, :], logits, float("-inf"))
    first = tl.max(logits, 1)
    total = tl.zeros([TOKENS], tl.float32)
    chosen = ()
    for i in tl.static_range(K):
        best = tl.minimum(tl.argmax(logits, 1), E - 1)  # of NaN, argmax may be any, and counts has E
        share = tl.exp(tl.max(logits, 1) - first)
        total += share
        chosen += (share,)
        logits = tl.where(expert[None, :] == best[:, None], float("-inf"), logits)
        tl.store(experts + row * K + i, best.to(tl.int32), row < M)
        tl.store(ranks + row * K + i, tl.atomic_add(counts + best, 1, row < M, sem="relaxed"), row < M)
    for i in tl.static_range(K):
        # share = exp(logit) / Σ exp(logit) over the chosen
        tl.store(shares + row * K + i, chosen[i] / total, row < M)


@triton.jit
def _share_out(  # type: ignore[no-untyped-def]  # Triton's types are its own
    counts, starts, group_of, tiles, E: tl.constexpr, WIDE: tl.constexpr, HEIGHT: tl.constexpr, TILES: tl.constexpr
):
    """TILES tiles a program: whose each is, -1 beyond the last; the first one also says where experts begin."""
    expert = tl.arange(0, WIDE)
    count = tl.load(counts + expert, expert < E, 0)
    own = (count + HEIGHT - 1) // HEIGHT
    ends = tl.cumsum(own, 0)
    if tl.program_id(0) == 0:
        tl.store(starts + expert, (ends - own) * HEIGHT, expert < E)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    # A tile is the expert's before which as many experts end.
    group = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    tl.store(group_of + tile, tl.where(tile < tl.sum(own, 0), group, -1), tile < tiles)


@triton.jit
def _place(experts, ranks, starts, row_of, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """BLOCK choices a program, each to its place."""
    choice = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + choice, choice < count, 0)
    place = tl.load(starts + expert) + tl.load(ranks + choice, choice < count, 0)
    tl.store(row_of + place, choice, choice < count)


@triton.jit
def _combine(parts, out, D, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """BLOCK columns of one token a program: out = Σ of its K parts, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(K):
        total += tl.load(parts + (token * K + i) * D + column, column < D, 0.0).to(tl.float32)
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), column < D)


@triton.jit
def _spread(  # type: ignore[no-untyped-def]  # Triton's types are its own
    x, scales, experts, ranks, starts, rows, row_scales, places, D, steps, x_row, from_strides, to_strides,
    K: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one token a program, to its K places; the first of a token also its scales, if there are
    any, and what its places are.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * x_row + column, column < D)
    for i in tl.static_range(K):
        choice = token * K + i
        place = tl.load(starts + tl.load(experts + choice)) + tl.load(ranks + choice)
        tl.store(rows + place.to(tl.int64) * D + column, value, column < D)
        if tl.program_id(1) == 0:
            tl.store(places + choice, place)
            if STEPS:
                step = tl.arange(0, STEPS)
                scale = tl.load(scales + token * from_strides[0] + step * from_strides[1], step < steps, 0.0)
                tl.store(row_scales + place * to_strides[0] + step * to_strides[1], scale, step < steps)


@triton.jit
def _gather(parts, places, shares, out, D, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """BLOCK columns of one token a program: out = Σ share · part of its K places, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(K):
        place = tl.load(places + token * K + i).to(tl.int64)
        part = tl.load(parts + place * D + column, column < D, 0.0).to(tl.float32)
        total += tl.load(shares + token * K + i) * part
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), column < D)


@dataclass(frozen=True)
class Choices:
    """Of tokens: their experts and shares, int32 and fp32 (M, k), each one's rank among its expert's tokens, and
    how many of them each expert has, int32 (M, k) and (E,).
    """

    experts: torch.Tensor
    shares: torch.Tensor
    ranks: torch.Tensor
    counts: torch.Tensor


def chosen(x: torch.Tensor, router: torch.Tensor, top_k: int) -> Choices:
    """What x (M, D) chooses by router (E, D)."""
    (M, D), E = x.shape, router.shape[0]
    experts, ranks = (torch.empty(M, top_k, dtype=torch.int32, device=x.device) for _ in range(2))
    shares = torch.empty(M, top_k, dtype=torch.float32, device=x.device)
    counts = torch.zeros(E, dtype=torch.int32, device=x.device)
    wide = max(16, power_of_2(E))
    tokens = TOKENS if M > 512 else 16
    with on(x):
        _route[(cdiv(M, tokens),)](
            x, router, experts, shares, ranks, counts, M, D, x.stride(0), router.stride(0),
            E, top_k, tokens, wide, 32 if INTERPRETED else 64, num_warps=8 if tokens * wide > 8192 else 4,
        )  # fmt: skip
    return Choices(experts, shares, ranks, counts)


def listed(choices: Choices, height: int) -> Rows:
    """The rows of tiles of `height`."""
    experts, counts = choices.experts, choices.counts
    (M, top_k), E = experts.shape, counts.numel()
    count = M * top_k
    # Each expert that is chosen leaves one tile at most unfilled.
    tiles = count // height + min(E, count)
    starts, group_of = torch.empty_like(counts), torch.empty(tiles, dtype=torch.int32, device=counts.device)
    row_of = torch.full((tiles * height,), -1, dtype=torch.int32, device=counts.device)
    with on(counts):
        _share_out[(cdiv(tiles, 32),)](
            counts, starts, group_of, tiles, E, max(16, power_of_2(E)), height, 32, num_warps=4
        )
        _place[(cdiv(count, 256),)](experts, choices.ranks, starts, row_of, count, 256, num_warps=4)
    return Rows("listed", tiles, height, group_of, row_of, share=top_k)


def spread(
    x: torch.Tensor, scale: torch.Tensor | None, choices: Choices, starts: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(tokens x (M, D) by their experts (rows, D), scales (M, S) of them as (rows, S), column by column, or None,
    the places (M, k) int32). Each expert's rows begin at `starts`. Rows that are no token's are not written.
    """
    (M, D), top_k = x.shape, choices.experts.shape[1]
    out = torch.empty(rows, D, dtype=x.dtype, device=x.device)
    places = torch.empty_like(choices.experts)
    steps = 0 if scale is None else scale.shape[1]
    row_scale = None if scale is None else torch.empty(steps, rows, dtype=scale.dtype, device=x.device).t()
    # 8-bit floats are copied as bytes, which any GPU and the interpreter know.
    source, target = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (x, out))
    block = min(power_of_2(D), 256 if INTERPRETED else 2048)
    with on(x):
        _spread[(M, cdiv(D, block))](
            source, x if scale is None else scale, choices.experts, choices.ranks, starts,
            target, x if row_scale is None else row_scale, places, D, steps, x.stride(0),
            (0, 0) if scale is None else scale.stride(), (0, 0) if row_scale is None else row_scale.stride(),
            top_k, block, power_of_2(steps) if steps else 0, num_warps=4,
        )  # fmt: skip
    return out, row_scale, places


def gathered(parts: torch.Tensor, places: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """(M, D), the sums of parts (rows, D) at places (M, k), each times its share."""
    (M, top_k), D = places.shape, parts.shape[1]
    out = torch.empty(M, D, dtype=parts.dtype, device=parts.device)
    block = min(power_of_2(D), 256 if INTERPRETED else 1024)
    with on(parts):
        _gather[(M, cdiv(D, block))](parts, places, shares, out, D, top_k, block, num_warps=4)
    return out


def combined(parts: torch.Tensor, M: int, top_k: int) -> torch.Tensor:
    """(M, D) of parts (M · k, D), each multiplied by its share before."""
    D = parts.shape[1]
    out = torch.empty(M, D, dtype=parts.dtype, device=parts.device)
    block = min(power_of_2(D), 256 if INTERPRETED else 1024)
    with on(parts):
        _combine[(M, cdiv(D, block))](parts, out, D, top_k, block, num_warps=4)
    return out
