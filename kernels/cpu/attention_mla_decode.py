"""Decoding from latent vectors on a CPU: PyTorch's attention of one sequence after the other."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    latent: int,
    scale: float,
) -> torch.Tensor:
    """q (B, Sq, H, C + R) over pages (pages, page, C + R) to (B, Sq, H, C), C being `latent`."""
    B, Sq = q.shape[:2]
    out = q.new_zeros(*q.shape[:3], latent)
    for b in range(B):
        length = int(lengths[b])
        if not length:
            continue
        # Places of the table beyond the length may hold anything.
        pages = block_table[b, : -(-length // cache.shape[1])]
        seen = cache.index_select(0, pages.long()).flatten(0, 1)[None, :length]
        visible = torch.ones(Sq, length, dtype=torch.bool).tril(length - Sq)
        rows = scaled_dot_product_attention(
            q[b].transpose(0, 1), seen, seen[..., :latent], attn_mask=visible, scale=scale
        )
        out[b] = rows.transpose(0, 1)
    return out
