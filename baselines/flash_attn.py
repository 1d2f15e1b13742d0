"""FlashAttention 2 (`flash-attn`), built from its source distribution: an environment of its own.

PyTorch ships the same kernels as the flash backend of `scaled_dot_product_attention` (`sdpa.py`). It takes
(B, S, H, D) with any strides but the last: our (B, H, S, D) is a view of that, and nothing is copied.
"""

from __future__ import annotations

from typing import Any

from . import _blocks
from ._terms import Call

REQUIRES = ("flash-attn",)
ENVIRONMENT = "flash_attn"
DEVICES = ("cuda",)


def attention(case: Any) -> Call:
    """`flash_attn.flash_attn_func`, with its `window_size` for a window and its `softcap` for a cap of scores."""
    from flash_attn import flash_attn_func

    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError("FlashAttention 2 takes fp16 and bf16 only")
    if case.axes["D"] > 256:
        raise NotImplementedError("FlashAttention 2 takes head dimensions up to 256")
    _blocks.takes(case, "FlashAttention 2", "cap", "Sk")
    causal = case.options["mask"] == "causal"
    left, right = _blocks.reach(case)

    def call(q: Any, k: Any, v: Any, mask: str, window: int = 0, cap: float = 0.0) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        more = {"softcap": cap} if cap else {}
        return flash_attn_func(q, k, v, causal=causal, window_size=(left, right), **more).transpose(1, 2)

    return call


def attention_varlen(case: Any) -> Call:
    """`flash_attn.flash_attn_varlen_func`, whose interface ours is, with its `window_size` and `softcap`."""
    from flash_attn import flash_attn_varlen_func

    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError("FlashAttention 2 takes fp16 and bf16 only")
    if case.axes["D"] > 256:
        raise NotImplementedError("FlashAttention 2 takes head dimensions up to 256")
    _blocks.takes(case, "FlashAttention 2", "cap", "Sk")
    causal = case.options["mask"] == "causal"
    more: dict[str, Any] = {"window_size": _blocks.reach(case)} if case.axes["W"] else {}

    def call(mask: str, window: int = 0, cap: float = 0.0, **inputs: Any) -> Any:
        return flash_attn_varlen_func(**inputs, causal=causal, **more, **({"softcap": cap} if cap else {}))

    return call


def attention_decode(case: Any) -> Call:
    """`flash_attn_with_kvcache`, which splits the cache by itself; pages of a multiple of 256 tokens."""
    from flash_attn import flash_attn_with_kvcache

    if case.dtype not in ("bf16", "fp16"):
        raise NotImplementedError("FlashAttention 2 takes fp16 and bf16 only")
    if int(case.options["page"]) % 256:
        raise NotImplementedError("FlashAttention 2 takes pages of a multiple of 256 tokens")

    _blocks.takes(case, "FlashAttention 2", "cap")

    def call(q: Any, k_cache: Any, v_cache: Any, block_table: Any, lengths: Any, cap: float = 0.0) -> Any:
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, block_table=block_table, causal=True, softcap=cap
        )

    return call


IMPLEMENTATIONS = {
    "attention": {"flash_attn_2": attention},
    "attention_decode": {"flash_attn_2": attention_decode},
    "attention_window": {"flash_attn_2": attention},
    "attention_varlen": {"flash_attn_2": attention_varlen},
}
