"""PyTorch's FlexAttention under torch.compile (Dong et al., arXiv 2412.05496)."""

from __future__ import annotations

from typing import Any

from ._terms import Call

REQUIRES = ("torch", "triton")
DEVICES = ("cuda",)


def attention(case: Any) -> Call:
    """`flex_attention`, compiled; causal as a block mask, made once: it depends on the length alone."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    S = case.axes["S"]
    groups = case.axes["H"] != case.axes["Hkv"]
    causal = case.options["mask"] == "causal"
    compiled = torch.compile(flex_attention, dynamic=False)
    blocks = None

    def seen(b: Any, h: Any, query: Any, key: Any) -> Any:
        return query >= key

    def call(q: Any, k: Any, v: Any, mask: str) -> Any:
        nonlocal blocks
        if causal and blocks is None:
            blocks = create_block_mask(seen, None, None, S, S, device=q.device)
        return compiled(q, k, v, block_mask=blocks, enable_gqa=groups)

    return call


IMPLEMENTATIONS = {"attention": {"flex_attention": attention}}
