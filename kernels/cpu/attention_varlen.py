"""Attention over packed sequences on a CPU: PyTorch's fused kernel, neighbours of equal lengths as one batch."""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch.nn.functional import scaled_dot_product_attention

from .attention_window import attention_window


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    mask: Literal["causal", "full"] = "causal",
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """As `kernels/attention/attention_varlen.py` says, of tensors on a CPU; without sinks and caps."""
    if sinks is not None or cap:
        raise NotImplementedError("PyTorch's fused attention has neither sinks nor a cap of scores")
    lengths = zip(*(x.diff().tolist() for x in (cu_seqlens_q, cu_seqlens_k)), strict=True)
    outputs = []
    row = key = 0
    for (queries, keys), members in itertools.groupby(lengths):
        count = len(list(members))
        heads_first = [
            x[start : start + count * length].view(count, length, *x.shape[1:]).transpose(1, 2)
            for x, start, length in ((q, row, queries), (k, key, keys), (v, key, keys))
        ]
        q_part, k_part, v_part = heads_first
        if window:
            output = attention_window(q_part, k_part, v_part, mask, window)
        else:
            output = _batch(q_part, k_part, v_part, mask == "causal")
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        row, key = row + count * queries, key + count * keys
    return torch.cat(outputs) if outputs else torch.zeros_like(q)


def _batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """q (B, H, Lq, D), k and v (B, Hkv, Lk, D), causal as aligned to the end."""
    queries, keys = q.shape[2], k.shape[2]
    blind = max(0, queries - keys) if causal or not keys else 0
    seen = None
    if causal and keys > queries:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril_(keys - queries)
    if blind == queries:
        return torch.zeros_like(q)
    output = scaled_dot_product_attention(
        q[:, :, blind:],
        k,
        v,
        attn_mask=seen,
        is_causal=causal and seen is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return torch.nn.functional.pad(output, (0, 0, blind, 0)) if blind else output
