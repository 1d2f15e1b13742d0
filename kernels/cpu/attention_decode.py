"""Attention of new tokens to a cache on a CPU: PyTorch's fused kernel for each sequence over the tokens it has.

The query heads that share a key head are rows of one product, so that keys and values are read once and not once a
query head; of a paged cache they are first gathered.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    lengths: torch.Tensor,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """q (B, Sq, H, D) to (B, Sq, H, D), of q's dtype; the caches are (B, S, Hkv, D) or, with a table,
    (pages, page, Hkv, D), see `kernels/attention/attention_decode.py`. A token that sees nothing gives zeros.

    Raises `NotImplementedError` for sinks and caps of scores, which the fused kernel does not have.
    """
    if sinks is not None or cap:
        raise NotImplementedError("on a CPU attention of new tokens has no sinks and no cap of scores")
    _, Sq, H, D = q.shape
    heads = k_cache.shape[2]
    out = torch.empty_like(q)
    for b, length in enumerate(lengths.tolist()):
        k, v = (_tokens(cache, b, block_table, length).transpose(0, 1)[None] for cache in (k_cache, v_cache))
        # (1, Hkv, H / Hkv · Sq, D): rows of a key head, its query heads one after the other.
        rows = q[b].view(Sq, heads, H // heads, D).permute(1, 2, 0, 3).reshape(1, heads, -1, D)
        seen = None
        if Sq > 1 or not length:
            last = torch.arange(Sq) + length - Sq
            seen = (torch.arange(length) <= last[:, None]).repeat(H // heads, 1)
        result = scaled_dot_product_attention(rows, k, v, attn_mask=seen) if length else torch.zeros_like(rows)
        if seen is not None:
            result = result.masked_fill(~seen.any(-1)[:, None], 0.0)
        out[b] = result.view(heads, H // heads, Sq, D).permute(2, 0, 1, 3).reshape(Sq, H, D)
    return out


def _tokens(cache: torch.Tensor, b: int, block_table: torch.Tensor | None, length: int) -> torch.Tensor:
    """The first `length` tokens of a sequence, (length, Hkv, D)."""
    if block_table is None:
        return cache[b, :length]
    pages = block_table[b, : -(-length // cache.shape[1])]
    return cache.index_select(0, pages.long()).flatten(0, 1)[:length]
