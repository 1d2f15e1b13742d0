"""Block-sparse attention on a CPU: for each block of queries the kept blocks of keys are gathered, and PyTorch's
fused kernel computes no others.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

BLOCK = 128
"""Queries, and keys, of a block."""


def attention_sparse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"],
    sparsity: int,
    blocks: torch.Tensor | None,
    gate_q: torch.Tensor | None,
    gate_k: torch.Tensor | None,
    threshold: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As `kernels/attention/attention_sparse.py` says: q (B, H, S, D), k and v (B, Hkv, S, D) to the output and,
    where `blocks` are not given, those (B, H, n, n) that were chosen.
    """
    causal = mask == "causal"
    if blocks is not None:
        return _attended(q, k, v, blocks[None], causal)
    scores = _scores(q, k, gate_q, gate_k, causal)
    chosen = _choose(scores, causal, sparsity) if threshold is None else _over(scores, threshold)
    return _attended(q, k, v, chosen, causal), chosen


def tiles_left_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Literal["causal", "full"],
    sparsity: int,
    blocks: torch.Tensor | None,
    gate_q: torch.Tensor | None,
    gate_k: torch.Tensor | None,
    threshold: float | None = None,
) -> float:
    """The share of dense attention's tiles of 128 by 128 that are not computed. A row computes as many in every
    head as in the one that has most.
    """
    causal = mask == "causal"
    if blocks is not None:
        kept = blocks[None]
    else:
        scores = _scores(q, k, gate_q, gate_k, causal)
        kept = _choose(scores, causal, sparsity) if threshold is None else _over(scores, threshold)
    n = kept.shape[-1]
    dense = n * (n + 1) // 2 if causal else n * n
    return 1 - float(kept.sum(-1).amax((0, 1)).sum()) / max(1, dense)


attention_sparse.tiles_left_out = tiles_left_out  # type: ignore[attr-defined]  # what the harness asks for


def _pooled(x: torch.Tensor) -> torch.Tensor:
    """The mean of each block of tokens in fp32, the last one's over the tokens it has: (B, heads, n, D)."""
    S = x.shape[2]
    sums = pad(x.float(), (0, 0, 0, -S % BLOCK)).unflatten(2, (-1, BLOCK)).sum(3)
    sizes = torch.full((sums.shape[2], 1), float(BLOCK))
    sizes[-1:] -= -S % BLOCK
    return sums / sizes


def _scores(
    q: torch.Tensor, k: torch.Tensor, gate_q: torch.Tensor | None, gate_k: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """(B, H, n, n), fp32: products of mean queries and keys; +inf for a row's own block, -inf for hidden ones."""
    mean_q, mean_k = _pooled(q), _pooled(k)
    if gate_q is not None and gate_k is not None:
        mean_q, mean_k = mean_q @ gate_q.float(), mean_k @ gate_k.float()
    scores = mean_q @ mean_k.repeat_interleave(q.shape[1] // max(1, k.shape[1]), 1).mT
    scores.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1), -torch.inf)
    return scores


def _choose(scores: torch.Tensor, causal: bool, sparsity: int) -> torch.Tensor:
    """The share of a row's visible blocks with the largest scores, of equal ones the first: a bool for each."""
    across = scores.shape[-1]
    visible = torch.arange(1, across + 1) if causal else torch.full((across,), across)
    counts = ((visible * (100 - sparsity) + 50) // 100).clamp(min=1)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    first = (torch.arange(across) < counts[:, None]).expand(scores.shape)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, first)


def _over(scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """A row's own block and those at most `threshold` below the largest of the others."""
    least = scores.masked_fill(scores.isinf(), -torch.inf).amax(-1, keepdim=True) - threshold
    return (scores >= least) & (scores > -torch.inf)


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, causal: bool
) -> torch.Tensor:
    """softmax(q·kᵀ / √D)·v over blocks (1 or B, 1 or H, n, n). A query that sees nothing gives zeros."""
    B, H, S, _ = q.shape
    across = -(-S // BLOCK)
    groups = H // max(1, k.shape[1])
    k, v = (pad(x, (0, 0, 0, -S % BLOCK)).unflatten(2, (-1, BLOCK)) for x in (k, v))
    out = torch.empty_like(q)
    counts = blocks.sum(-1)
    # Kept blocks first, in ascending order.
    order = (~blocks).to(torch.uint8).sort(dim=-1, stable=True).indices
    batch = torch.arange(B)[:, None, None]
    head = (torch.arange(H) // groups)[None, :, None]
    for row in range(across):
        most = int(counts[:, :, row].max()) if counts.numel() else 0
        low, high = row * BLOCK, min(S, row * BLOCK + BLOCK)
        if not most:
            out[:, :, low:high] = 0
            continue
        kept = order[:, :, row, :most]
        keys, values = (x[batch, head, kept].flatten(2, 3) for x in (k, v))
        position = (kept[..., None] * BLOCK + torch.arange(BLOCK)).flatten(2)
        there = (torch.arange(most) < counts[:, :, row, None]).repeat_interleave(BLOCK, -1) & (position < S)
        seen = there[:, :, None].expand(-1, -1, high - low, -1)
        if causal:
            seen = seen & (position[:, :, None] <= torch.arange(low, high)[:, None])
        result = scaled_dot_product_attention(q[:, :, low:high], keys, values, attn_mask=seen)
        out[:, :, low:high] = result.masked_fill(~seen.any(-1, keepdim=True), 0)
    return out
